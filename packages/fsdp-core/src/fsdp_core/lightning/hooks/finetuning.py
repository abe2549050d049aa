"""Lightning's fine-tuning callbacks, which give an optimizer further parameters as training goes on."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BaseFinetuning
from torch import nn

from fsdp_core.errors import UnsupportedCapabilityError
from fsdp_core.sharding.backend import Backend
from fsdp_core.state.fqn import clean_name

__all__ = ["check_finetuning"]


def check_finetuning(trainer: pl.Trainer, backend: Backend, root: nn.Module, strategy: str) -> None:
    """Refuse a callback that would find no parameters to unfreeze.

    It looks for them in the modules that held them when they were written, and for what the optimizer holds among them.
    A library may keep its shards elsewhere.

    Args:
        trainer: Whose callbacks to look at.
        backend: Which has sharded the module.
        root: The sharded root.
        strategy: The name that users type.

    Raises:
        UnsupportedCapabilityError: There is such a callback, and the modules show none of their parameters.
    """
    asked = [one for one in trainer.callbacks if isinstance(one, BaseFinetuning)]  # type: ignore[attr-defined]
    if not asked:
        return
    backend.reshard(root)
    shown = {clean_name(name): p for name, p in backend.written_module(root).named_parameters(remove_duplicate=False)}
    held = set(map(id, shown.values()))
    hidden = [name for name in backend.remembered_names(root) if name not in shown]
    hidden += [part.name for p, parts in backend.layout(root).items() if id(p) not in held for part in parts]
    if hidden:
        raise UnsupportedCapabilityError(
            f"{type(asked[0]).__name__} can't be used with {strategy!r} as it is: it unfreezes the parameters that it "
            f"finds in modules, and {hidden[0]!r} is kept elsewhere here.\n"
            "Give the optimizer all parameters in configure_optimizers(), and freeze and unfreeze them with "
            "requires_grad_() there and in configure_model(); or take a strategy that keeps parameters in their "
            "modules, such as strategy='fsdp2'."
        )
