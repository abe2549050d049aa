"""``strategy="xla_fsdp"`` for Lightning: torch_xla's FSDP and SPMD, under Trainer and Fabric.

A script needs no import of this package: the name is enough. To set an option, import the class instead::

    from fsdp_xla import XLAFSDPStrategy                      # for lightning.pytorch.Trainer
    trainer = Trainer(strategy=XLAFSDPStrategy(state_dict_type="full"), accelerator="tpu")

    from fsdp_xla.classic.fabric import XLAFSDPStrategy               # for lightning.fabric.Fabric
    fabric = Fabric(strategy=XLAFSDPStrategy(auto_wrap_policy={Block}), accelerator="tpu")
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fsdp_xla import fabric
    from fsdp_xla.classic.trainer import XLAFSDPStrategy
    from fsdp_xla.lightning.accelerator import XLACPUAccelerator
    from fsdp_xla.spmd.trainer import XLASPMDStrategy

    __version__: str

__all__ = ["XLACPUAccelerator", "XLAFSDPStrategy", "XLASPMDStrategy", "__version__", "fabric"]


def __getattr__(name: str) -> object:
    value: object
    match name:
        case "XLAFSDPStrategy":
            value = import_module(f"{__name__}.classic.trainer").XLAFSDPStrategy
        case "XLASPMDStrategy":
            value = import_module(f"{__name__}.spmd.trainer").XLASPMDStrategy
        case "XLACPUAccelerator":
            value = import_module(f"{__name__}.lightning.accelerator").XLACPUAccelerator
        case "fabric":
            value = import_module(f"{__name__}.fabric")
        case "__version__":
            value = import_module("importlib.metadata").version("fsdp-xla")
        case _:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
