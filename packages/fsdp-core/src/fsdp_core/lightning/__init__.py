"""The two Lightning front ends. Importing this package registers our strategy names with Lightning.

That is only needed if torch does not load its ``torch.backends`` entry points (see :mod:`fsdp_core.autoload`): where
``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` disables them, a script imports ``fsdp_core.lightning`` itself, before or after it
imports Lightning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdp_core.autoload import install
from fsdp_core.lazy_names import lazy_names

if TYPE_CHECKING:
    from fsdp_core.lightning.checkpoints.full.consolidation import consolidate_lightning
    from fsdp_core.lightning.fabric_strategy import ShardedFabricStrategy
    from fsdp_core.lightning.global_batch import GlobalBatch, micro_batches
    from fsdp_core.lightning.options import LightningOptions, takes
    from fsdp_core.lightning.pretrained_folders import LoadPretrained, SavePretrained
    from fsdp_core.lightning.setup_checks import check_devices, reduce_op_name, set_rank_zero
    from fsdp_core.lightning.strategy import ShardedStrategy
    from fsdp_core.lightning.trainer_strategy import ShardedTrainerStrategy

__all__ = [
    "GlobalBatch",
    "LightningOptions",
    "LoadPretrained",
    "SavePretrained",
    "ShardedFabricStrategy",
    "ShardedStrategy",
    "ShardedTrainerStrategy",
    "check_devices",
    "consolidate_lightning",
    "micro_batches",
    "reduce_op_name",
    "set_rank_zero",
    "takes",
]

_HOMES = {
    "GlobalBatch": "fsdp_core.lightning.global_batch",
    "LightningOptions": "fsdp_core.lightning.options",
    "takes": "fsdp_core.lightning.options",
    "LoadPretrained": "fsdp_core.lightning.pretrained_folders",
    "SavePretrained": "fsdp_core.lightning.pretrained_folders",
    "ShardedFabricStrategy": "fsdp_core.lightning.fabric_strategy",
    "ShardedStrategy": "fsdp_core.lightning.strategy",
    "ShardedTrainerStrategy": "fsdp_core.lightning.trainer_strategy",
    "check_devices": "fsdp_core.lightning.setup_checks",
    "consolidate_lightning": "fsdp_core.lightning.checkpoints.full.consolidation",
    "micro_batches": "fsdp_core.lightning.global_batch",
    "reduce_op_name": "fsdp_core.lightning.setup_checks",
    "set_rank_zero": "fsdp_core.lightning.setup_checks",
}

install()

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
