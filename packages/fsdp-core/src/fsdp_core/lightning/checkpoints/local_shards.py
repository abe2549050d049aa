"""Refuses to save tensors that are a rank's own shard of a parameter as if they were full tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp_core.checkpoint.collective import run_on_all
from fsdp_core.checkpoint.format.state_paths import join_path
from fsdp_core.errors import CheckpointValueError
from fsdp_core.runtime import Runtime
from fsdp_core.sharding.sharded import Sharded
from fsdp_core.torch_private.tensors import StorageAddress, storage_address

__all__ = ["refuse_local_shards"]


def refuse_local_shards(
    state: Mapping[str, Any],
    roots: Iterable[Sharded],
    optimizers: Iterable[Optimizer],
    runtime: Runtime,
    remedy: str,
) -> None:
    """Refuse plain data that holds flat shards. All ranks must call it.

    A library that flattens parameters shows each rank's shards as plain 1-D tensors, in ``model.state_dict()`` and in
    the state of torch's optimizers. Rank 0's would be stored as if they were full tensors. DTensors are recognizable as
    shards, and are let through.

    Args:
        state: What is saved besides modules and optimizers.
        roots: The sharded modules.
        optimizers: The optimizers that may hold their parameters.
        runtime: The ranks.
        remedy: What to write instead.

    Raises:
        CheckpointValueError: The state holds a flat shard, on any rank.
    """
    descriptions: dict[StorageAddress, str] = {}  # of shards, by where their elements begin
    for root in roots:
        for parameter, parts in root.layout().items():
            is_flat = any(part.range is not None for part in parts)
            if not is_flat:
                continue
            name = parts[0].name
            descriptions.update(dict.fromkeys(_addresses([parameter]), f"parameter {name!r}"))
            for optimizer in optimizers:
                states = optimizer.state.get(parameter, {}).values()
                state_tensors = [value for value in states if isinstance(value, Tensor) and value.ndim]
                descriptions.update(dict.fromkeys(_addresses(state_tensors), f"the optimizer's state of {name!r}"))

    def refuse_shards_in_state() -> None:
        if not descriptions:
            return
        for path, tensor in _find_tensors(state, ()):
            for address in _addresses([tensor]):
                if address in descriptions:
                    raise CheckpointValueError(
                        f"{join_path(*path)} is a rank's own shard of {descriptions[address]}. "
                        f"A checkpoint would take it for the whole.\n{remedy}"
                    )

    run_on_all(runtime, "looking for shards among what is saved", refuse_shards_in_state)


def _addresses(tensors: Iterable[Tensor]) -> Iterator[StorageAddress]:
    """Where the elements of each plain tensor begin; empty tensors, and other classes, are left out."""
    return (storage_address(tensor) for tensor in tensors if type(tensor) in (Tensor, nn.Parameter) and tensor.numel())


def _find_tensors(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    """The tensors in a nest at a path, each with its own path."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _find_tensors(inner, (*path, str(key)))
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for index, inner in enumerate(value):
            yield from _find_tensors(inner, (*path, str(index)))
