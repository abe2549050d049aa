"""Refuses to save a rank's shards of parameters as if they were whole.

Where a library exposes shards as plain tensors, or not at all, ``state_dict()`` of a module raises. Where it exposes
DTensors, ``state_dict()`` works: DTensors describe their sharding, and torch's own tools rely on them. Writing them to
a file with ``torch.save`` or ``safetensors`` raises, and so does writing the shards in an optimizer's state. Modules
that expose whole tensors are left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import MethodType
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp_core.errors import ShardingError
from fsdp_core.gradients.piece_states import SHARDS_ATTRIBUTE as _SHARDS
from fsdp_core.state.fqn import clean_name
from fsdp_core.state.full_tensor import gathered_modules
from fsdp_core.state.layout import Layout

__all__ = [
    "read_for_names",
    "refuse_again",
    "refuse_files_of_optimizer",
    "refuse_files_of_shards",
    "refuse_state_dicts",
]

#: The attribute on a module whose ``state_dict()`` raises; holds the name of a parameter in pieces, and the strategy's.
_PIECE = "_fsdp_core_piece"

_INSTEAD = (
    "fsdp_core.full_state_dict(module), which all ranks call, gives whole weights to rank 0. Or save a checkpoint, "
    'which all ranks call too: trainer.save_checkpoint(path), or fabric.save(path, {"model": model}); `fsdp checkpoint '
    "consolidate PATH OUT --to huggingface` (or safetensors, or lightning) writes its weights as others read them."
)


def refuse_state_dicts(root: nn.Module, names: Collection[str], layout: Layout, strategy: str) -> None:
    """Make ``state_dict()`` of a module, and of each submodule that shows no whole values, raise. Idempotent.

    Code that reads shards on purpose calls the class's method, ``type(module).state_dict(module)``, as
    :class:`~fsdp_core.Sharded` does.

    Args:
        root: A sharded root.
        names: The names of the module's parameters before it was sharded, tied ones under each of their names.
        layout: The parts of the user's parameters that each sharded parameter holds.
        strategy: The name that users type.
    """
    flat = {id(parameter) for parameter, parts in layout.items() if any(part.range is not None for part in parts)}
    if not flat:
        return
    modules: dict[str, list[nn.Module]] = {}
    for raw, module in root.named_modules(remove_duplicate=False):
        modules.setdefault(clean_name(raw), []).append(module)
    for name in names:
        owner, _, attribute = name.rpartition(".")
        shards = [module._parameters.get(attribute) for module in modules.get(owner, ())]
        if any(shard is not None and id(shard) not in flat for shard in shards):
            continue  # whole
        path = owner.split(".") if owner else []
        for depth in range(len(path) + 1):
            for module in modules.get(".".join(path[:depth]), ()):
                module.__dict__.setdefault(_PIECE, (".".join((*path[depth:], attribute)), strategy))
                module.__dict__.setdefault("state_dict", MethodType(state_dict, module))


@contextmanager
def read_for_names(module: nn.Module) -> Iterator[None]:
    """Let ``state_dict()`` of the parts of a module be read, by code that takes the names in it and no values."""
    modules = {
        submodule
        for submodule in module.modules()
        if _PIECE in submodule.__dict__ and submodule not in gathered_modules
    }
    gathered_modules.update(modules)
    try:
        yield
    finally:
        gathered_modules.difference_update(modules)


def refuse_again(module: nn.Module) -> None:
    """Make ``state_dict()`` of a module raise again, after something else replaced the method temporarily."""
    if _PIECE in module.__dict__:
        module.__dict__["state_dict"] = MethodType(state_dict, module)


def state_dict(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Replaces a module's ``state_dict``; copies and pickles of the module look it up by this name.

    Raises:
        ShardingError: Always, except inside the ``state_dict()`` of an enclosing module.
    """
    if (args[0] if args else kwargs.get("destination")) is None and self not in gathered_modules:
        name, strategy = self.__dict__[_PIECE]
        raise ShardingError(
            f"state_dict() of {type(self).__name__} can't be read while {strategy!r} has it sharded: of {name!r} it "
            f"would hold this rank's piece, or nothing.\n{_INSTEAD} To copy weights to another module, as to a target "
            "network, write target_parameter.copy_(parameter) for each pair of their parameters(), under "
            "torch.no_grad() in training_step()."
        )
    return type(self).state_dict(self, *args, **kwargs)


def refuse_files_of_shards(root: nn.Module, strategy: str) -> None:
    """Make writing the DTensors in ``state_dict()`` of a module or submodule to a file raise. Idempotent.

    Args:
        root: A sharded root.
        strategy: The name that users type.
    """
    for module in root.modules():
        if any(isinstance(parameter, DTensor) for parameter in module._parameters.values()):
            if _SHARDS not in module.__dict__:
                module.register_state_dict_post_hook(_mark_state_dict)
            module.__dict__[_SHARDS] = strategy


def refuse_files_of_optimizer(optimizer: Optimizer, holds_piece: Callable[[Tensor], bool], strategy: str) -> None:
    """Make writing the shards in ``state_dict()`` of an optimizer to a file raise. Idempotent.

    Args:
        optimizer: An optimizer that holds sharded parameters.
        holds_piece: Whether a parameter is this rank's shard as a plain tensor.
        strategy: The name that users type.
    """
    inside = [inner for inner in vars(optimizer).values() if isinstance(inner, Optimizer)]  # as Lookahead has one
    for inner in (optimizer, *inside):
        if _SHARDS not in inner.__dict__:
            # a class may skip torch's constructor, and return another optimizer's state
            with suppress(AttributeError):
                inner.register_state_dict_post_hook(_mark_optimizer_state)
        inner.__dict__[_SHARDS] = holds_piece, strategy


def _mark_state_dict(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    for name in module._parameters:
        value = state.get(prefix + name)
        if isinstance(value, DTensor) and not isinstance(value, nn.Parameter):  # a parameter, if keep_vars
            _refuse_files_of(value, f"{prefix + name!r} in state_dict() of a module", module.__dict__[_SHARDS])


def _mark_optimizer_state(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    holds_piece, strategy = optimizer.__dict__[_SHARDS]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    marked = {}
    for number, values in state["state"].items():
        parameter_of_state = parameters[number] if isinstance(number, int) and number < len(parameters) else number
        is_piece = isinstance(parameter_of_state, Tensor) and holds_piece(parameter_of_state)
        if isinstance(values, dict):
            values = dict(values)
            for name, value in values.items():
                if isinstance(value, DTensor) or (is_piece and isinstance(value, Tensor) and value.ndim):
                    full_name = f"{name!r} in state_dict() of {type(optimizer).__name__}"
                    # a new tensor object that shares memory with the optimizer's own
                    values[name] = _refuse_files_of(value.detach(), full_name, strategy)
        marked[number] = values
    return {**state, "state": marked}


def _refuse_files_of(shard: Tensor, name: str, strategy: str) -> Tensor:
    """Make pickling a shard raise, and reading the memory of a DTensor: libraries would take it for the whole."""
    methods = ["__reduce_ex__", *(["untyped_storage", "storage", "numpy"] if isinstance(shard, DTensor) else [])]
    shard.__dict__.update(dict.fromkeys(methods, partial(_refuse_file, name, strategy)))
    return shard


def _refuse_file(name: str, strategy: str, *_: Any) -> NoReturn:
    """Replaces a shard's methods that return its bytes.

    Raises:
        ShardingError: Always.
    """
    raise ShardingError(
        f"{name} can't be written to a file, or an array: {strategy!r} has it sharded, and the file would hold the "
        f"shard of the rank that writes it.\n{_INSTEAD}"
    )
