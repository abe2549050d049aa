"""The private names of Lightning that the adapters use, each with its reason. Checked on Lightning 2.6.6.

Nothing else in this package imports an underscored name of Lightning.
"""

from __future__ import annotations

# The dtype in which tensors are created while a context lasts; the same one that Lightning's own plugins use.
from lightning.fabric.plugins.precision.utils import _convert_fp_tensor as convert_fp_tensor
from lightning.fabric.plugins.precision.utils import _DtypeContextManager as DtypeContext

# Starts the user's script once per rank. Lightning offers no public way to choose a launcher.
from lightning.fabric.strategies.launchers.subprocess_script import (
    _SubprocessScriptLauncher as FabricSubprocessLauncher,
)

# Fabric asks a strategy for an object of this class before it lets `no_backward_sync` do anything.
from lightning.fabric.strategies.strategy import _BackwardSyncControl as BackwardSyncControl

# Seeds a process that Lightning's launcher has started as its parent was seeded.
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies.launchers.subprocess_script import (
    _SubprocessScriptLauncher as TrainerSubprocessLauncher,
)

__all__ = [
    "BackwardSyncControl",
    "DtypeContext",
    "FabricSubprocessLauncher",
    "TrainerSubprocessLauncher",
    "convert_fp_tensor",
    "reset_seed",
]
