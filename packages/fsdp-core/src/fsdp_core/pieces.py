"""Modules that show a rank's pieces of parameters, or nothing of them: ``state_dict()`` of one is refused.

Who saves what it returns would save pieces under the names of whole parameters, and learn of it when they are loaded. A
library whose parameters are DTensors shows what they are, and is left alone; so is one that shows whole parameters.
"""

from __future__ import annotations

from collections.abc import Collection
from types import MethodType
from typing import Any

from torch import nn

from fsdp_core.errors import ShardingError
from fsdp_core.fqn import clean_name
from fsdp_core.parts import Layout

__all__ = ["refuse_again", "refuse_state_dicts"]

_PIECE = "_fsdp_core_piece"


def refuse_state_dicts(root: nn.Module, names: Collection[str], layout: Layout, strategy: str) -> None:
    """Let ``state_dict()`` of a module, and of each part of it that shows no whole values, raise. Idempotent.

    What reads shards on purpose calls the class's method, ``type(module).state_dict(module)``, as
    :class:`~fsdp_core.backend.Backend` does.

    Args:
        root: A sharded root.
        names: Those of the parameters that the module had before it was sharded, tied ones under each of theirs.
        layout: What each sharded parameter has of the user's.
        strategy: The name that users type.
    """
    flat = {id(held) for held, parts in layout.items() if any(part.range is not None for part in parts)}
    if not flat:
        return
    modules: dict[str, list[nn.Module]] = {}
    for raw, module in root.named_modules(remove_duplicate=False):
        modules.setdefault(clean_name(raw), []).append(module)
    for name in names:
        owner, _, attribute = name.rpartition(".")
        shown = [module._parameters.get(attribute) for module in modules.get(owner, ())]
        if any(one is not None and id(one) not in flat for one in shown):
            continue  # whole
        path = owner.split(".") if owner else []
        for depth in range(len(path) + 1):
            for module in modules.get(".".join(path[:depth]), ()):
                module.__dict__.setdefault(_PIECE, (".".join((*path[depth:], attribute)), strategy))
                module.__dict__.setdefault("state_dict", MethodType(state_dict, module))


def refuse_again(module: nn.Module) -> None:
    """Let ``state_dict()`` of a module raise as before, after something else was in the place of it for a while."""
    if _PIECE in module.__dict__:
        module.__dict__["state_dict"] = MethodType(state_dict, module)


def state_dict(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """In the place of a module's own, by whose name a copy or a pickle of the module finds it.

    Raises:
        ShardingError: Always, but inside the ``state_dict()`` of a module around this one.
    """
    if (args[0] if args else kwargs.get("destination")) is None:
        name, strategy = self.__dict__[_PIECE]
        raise ShardingError(
            f"state_dict() of {type(self).__name__} can't be read while {strategy!r} has it sharded: of {name!r} it "
            "would hold this rank's piece, or nothing.\n"
            "Save a checkpoint, which all ranks call: trainer.save_checkpoint(path), or fabric.save(path, "
            '{"model": model}). fsdp_core.load_state_dict(path) gives whole values from it, and `fsdp checkpoint '
            "consolidate PATH OUT --to huggingface` (or safetensors, or lightning) writes them as others read them."
        )
    return type(self).state_dict(self, *args, **kwargs)
