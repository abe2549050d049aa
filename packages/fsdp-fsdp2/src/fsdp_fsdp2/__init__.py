"""``strategy="fsdp2"`` for Lightning: torch's ``fully_shard`` on CUDA and CPU.

A script needs no import of this package: the name is enough. To set an option, import the class instead::

    from fsdp_fsdp2 import FSDP2Strategy                      # for lightning.pytorch.Trainer
    trainer = Trainer(strategy=FSDP2Strategy(state_dict_type="full"), devices=2)

    from fsdp_fsdp2.fabric import FSDP2Strategy               # for lightning.fabric.Fabric
    fabric = Fabric(strategy=FSDP2Strategy(cpu_offload=True), devices=2)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fsdp_fsdp2 import fabric
    from fsdp_fsdp2.trainer import FSDP2Strategy

    __version__: str

__all__ = ["FSDP2Strategy", "__version__", "fabric"]


def __getattr__(name: str) -> object:
    value: object
    match name:
        case "FSDP2Strategy":
            value = import_module(f"{__name__}.trainer").FSDP2Strategy
        case "fabric":
            value = import_module(f"{__name__}.fabric")
        case "__version__":
            value = import_module("importlib.metadata").version("fsdp-fsdp2")
        case _:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
