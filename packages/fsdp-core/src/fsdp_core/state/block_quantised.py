"""Optimizer state that torchao keeps in 8 or 4 bits: blocks of elements with a scale each, saved without conversion.

torchao quantises runs of ``block_size`` elements, in C order, of a rank's shard of a parameter. If every rank's shard
begins and ends at a multiple of ``block_size`` in the full parameter, the blocks are the same as in one process, so a
run with other shards of which that is true can load them.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_core.errors import CheckpointMismatchError, CheckpointValueError
from fsdp_core.gradients.clipping import local_tensor
from fsdp_core.runtime import Runtime
from fsdp_core.state.chunks import Chunk, ChunkedTensor, chunked
from fsdp_core.state.dtypes import dtype_name
from fsdp_core.state.filling import fill
from fsdp_core.state.layout import Part

__all__ = [
    "check_blocks",
    "check_fits_shard",
    "describe_full_state",
    "describe_shard",
    "is_quantised",
    "is_saved_quantised",
    "join_quantised",
    "quantises",
    "restore_shard",
]

#: The key that only saved quantised state has. Its value is the name of the tensors' class.
_CLASS_KEY = "torchao"


def quantises(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer keeps state in blocks; the same on every rank, whatever the sizes of the shards."""
    return type(optimizer).__module__.startswith("torchao.") and hasattr(optimizer, "_subclass_zeros")


def is_quantised(value: Any) -> bool:
    """Whether a value is a tensor of torchao's that holds codes and scales."""
    return all(hasattr(value, name) for name in ("codes", "scale", "block_size"))


def is_saved_quantised(value: Any) -> bool:
    """Whether a value is what :func:`describe_shard` or :func:`describe_full_state` returns."""
    return isinstance(value, dict) and _CLASS_KEY in value


class _Run(NamedTuple):
    """A rank's shard as consecutive elements of the full parameter."""

    start: int
    length: int
    replica: int


def _find_run(part: Part, parameter: Tensor) -> _Run | None:
    """Return where a rank's shard lies in the full parameter; ``None`` if its elements are not consecutive there."""
    if part.range is not None:
        return None  # flat parameters are cut without regard to a parameter's blocks
    local_chunks = chunked(parameter)
    if not local_chunks.chunks:
        return _Run(0, 0, local_chunks.replica)
    (chunk,) = local_chunks.chunks
    is_run = tuple(chunk.data.shape[1:]) == tuple(part.shape[1:])
    row_length = prod(part.shape[1:])
    if not is_run or not part.shape:
        return None
    return _Run(chunk.offsets[0] * row_length, prod(chunk.data.shape), local_chunks.replica)


def describe_shard(part: Part, parameter: Tensor, value: Any) -> Any:
    """Describe a rank's shard of quantised state, sharing memory with it; any other value is returned unchanged.

    Args:
        part: The user's parameter.
        parameter: What the optimizer holds of it.
        value: A value of its state.

    Returns:
        The flat codes and scales with a description; ``value`` itself if its blocks are not those of one process.
    """
    local_state: Any = local_tensor(value) if isinstance(value, DTensor) else value
    run = _find_run(part, parameter) if is_quantised(local_state) else None
    if run is None:
        return value
    block_size = int(local_state.block_size)
    total = prod(part.shape)
    if run.start % block_size or run.length % block_size or total % block_size:
        return value

    def describe(data: Tensor, elements_per_item: int) -> ChunkedTensor:
        """Describe a flat tensor of which each item stands for several elements of the parameter."""
        chunk = Chunk(offsets=(run.start // elements_per_item,), data=data.detach().reshape(-1))
        shape = (total // elements_per_item,)
        return ChunkedTensor(shape=shape, dtype=data.dtype, chunks=(chunk,), replica=run.replica)

    elements_per_byte = run.length // local_state.codes.numel()
    return {
        **_describe_blocks(local_state, part.shape),
        "codes": describe(local_state.codes, elements_per_byte),
        "scale": describe(local_state.scale, block_size),
    }


def _describe_blocks(value: Any, shape: tuple[int, ...]) -> dict[str, Any]:
    signed = bool(getattr(value, "signed", True))
    description = {
        "block_size": int(value.block_size),
        "signed": signed,
        "shape": list(shape),
        "dtype": dtype_name(value.dtype),
    }
    return {_CLASS_KEY: type(value).__name__, **description}


def check_blocks(
    state: Mapping[str, Mapping[str, Any]], shapes: Mapping[str, tuple[int, ...]], runtime: Runtime
) -> dict[str, dict[str, Any]]:
    """Give all ranks the same names and keys of quantised state, and refuse blocks that can't be saved.

    All ranks must call it.

    Args:
        state: By parameter name and key, values from :func:`describe_shard`.
        shapes: The parameters' shapes, by name.
        runtime: The ranks.

    Returns:
        The state. Where a rank holds nothing of a parameter, it gets a description without chunks.

    Raises:
        CheckpointValueError: Blocks on some rank are not those of one process, or a rank has plain values.
    """
    # By parameter name and key: how the quantised state is described, with shapes and dtypes for tensors; "plain" or
    # "in other blocks" for state that isn't described; None for state without elements on this rank.
    own_descriptions: dict[tuple[str, str], Any] = {}
    for name, values in state.items():
        for key, value in values.items():
            if is_saved_quantised(value):
                description = {k: (v.shape, v.dtype) if isinstance(v, ChunkedTensor) else v for k, v in value.items()}
                own_descriptions[name, key] = description
            elif isinstance(value, Tensor) and value.ndim:
                local_state = local_tensor(value)
                if not local_state.numel():
                    own_descriptions[name, key] = None
                else:
                    own_descriptions[name, key] = "in other blocks" if is_quantised(local_state) else "plain"
    completed = {name: dict(values) for name, values in state.items()}
    descriptions_by_rank = runtime.gather_objects(own_descriptions)
    names_and_keys = dict.fromkeys(name_and_key for of_rank in descriptions_by_rank for name_and_key in of_rank)
    for name, key in names_and_keys:
        descriptions = [of_rank.get((name, key)) for of_rank in descriptions_by_rank]
        blocks = next((description for description in descriptions if isinstance(description, dict)), None)
        if "in other blocks" in descriptions or (blocks is not None and "plain" in descriptions):
            rank = next(r for r, description in enumerate(descriptions) if isinstance(description, str))
            raise CheckpointValueError(
                f"{key!r} of {name!r} can't be saved: torchao quantises each rank's shard, and that of rank {rank} "
                "does not begin and end between two "
                f"blocks of the full parameter of shape {shapes[name]}.\n"
                "Use a strategy that keeps whole rows on each rank, with a number of ranks that divides the rows into "
                "multiples of block_size elements; or an optimizer whose state is plain, such as AdamW."
            )
        if blocks is not None and own_descriptions.get((name, key)) is None:
            completed.setdefault(name, {})[key] = {
                field: ChunkedTensor(shape=v[0], dtype=v[1], chunks=(), replica=0) if isinstance(v, tuple) else v
                for field, v in blocks.items()  # tuples are the shape and dtype of a tensor
            }
    return completed


def check_fits_shard(
    optimizer: torch.optim.Optimizer, part: Part, parameter: nn.Parameter, key: str, saved: Mapping[str, Any]
) -> None:
    """Refuse saved quantised state that this rank can't hold, before anything is restored.

    Args:
        optimizer: The optimizer.
        part: The user's parameter.
        parameter: What the optimizer holds of it.
        key: The key of the state, for the error.
        saved: What :func:`describe_shard` returned, with tensors that are full or saved.

    Raises:
        CheckpointMismatchError: The optimizer keeps no such state, or this rank's shard cuts a block.
    """
    run = _find_run(part, parameter)
    block_size = int(saved["block_size"])
    state_class = "plain tensors"
    if quantises(optimizer):
        torchao_optimizer: Any = optimizer
        one_block = torchao_optimizer._subclass_zeros(torch.zeros(block_size), bool(saved["signed"]), block_size)
        state_class = type(one_block).__name__
    if state_class != saved[_CLASS_KEY]:
        raise CheckpointMismatchError(
            f"{key!r} of {part.name!r} was saved by an optimizer of torchao's, in {saved[_CLASS_KEY]}, and "
            f"{type(optimizer).__name__} keeps {state_class}.\n"
            "Use the optimizer that it was saved with, or load only the weights."
        )
    if tuple(saved["shape"]) != tuple(part.shape):
        raise CheckpointMismatchError(
            f"the checkpoint holds {key} of {part.name!r} at shape {tuple(saved['shape'])}, but the parameter has "
            f"{part.shape}.\nLoad the checkpoint into the model that it was saved from."
        )
    if run is None or run.start % block_size or run.length % block_size:
        raise CheckpointMismatchError(
            f"{key!r} of {part.name!r} was saved in blocks of {block_size} elements, and this rank's part begins or "
            "ends within one.\nLoad it under a strategy that keeps whole rows on each rank, on a number of ranks that "
            f"divides the rows into multiples of {block_size} elements, such as 1 or that which saved it; or load "
            "only the weights."
        )


def restore_shard(
    optimizer: torch.optim.Optimizer, part: Part, parameter: nn.Parameter, saved: Mapping[str, Any]
) -> Any:
    """Restore a rank's shard of quantised state, after :func:`check_fits_shard`.

    Args:
        optimizer: The optimizer.
        part: The user's parameter.
        parameter: What the optimizer holds of it.
        saved: What :func:`describe_shard` returned, with tensors that are full or saved.
    """
    torchao_optimizer: Any = optimizer
    run = _find_run(part, parameter)
    block_size = int(saved["block_size"])
    assert run is not None
    local_state = local_tensor(parameter).detach()
    blocks: Any = torch.zeros_like(local_state)
    if run.length:
        blocks = torchao_optimizer._subclass_zeros(local_state, bool(saved["signed"]), block_size)
        elements_per_byte = run.length // blocks.codes.numel()
        for name, data, size in (("codes", blocks.codes, elements_per_byte), ("scale", blocks.scale, block_size)):
            full = saved[name]
            flat = data.view(-1)
            chunk = Chunk(offsets=(run.start // size,), data=flat)
            fill(ChunkedTensor(shape=tuple(full.shape), dtype=flat.dtype, chunks=(chunk,)), full)
    if not isinstance(parameter, DTensor):
        return blocks
    return DTensor.from_local(
        blocks,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def describe_full_state(value: Any) -> Any:
    """Describe the quantised state of an unsharded optimizer, as :func:`describe_shard` does; others are unchanged."""
    if not is_quantised(value) or isinstance(value, DTensor):
        return value
    return {**_describe_blocks(value, tuple(value.shape)), "codes": value.codes.reshape(-1), "scale": value.scale}


def join_quantised(value: Mapping[str, Any]) -> Any:
    """Join gathered quantised state to one tensor of torchao's, for a file that an unsharded optimizer loads.

    Args:
        value: What :func:`describe_shard` returned, with gathered tensors.
    """
    from importlib import import_module

    bits = {"OptimState8bit": "8bit", "OptimState4bit": "4bit", "OptimStateFp8": "fp8"}[value[_CLASS_KEY]]
    tensor_class: Any = getattr(import_module(f"torchao.optim.subclass_{bits}"), value[_CLASS_KEY])
    settings = {} if bits == "fp8" else {"signed": value["signed"]}
    dtype: torch.dtype = getattr(torch, value["dtype"])
    full = tensor_class.zeros(tuple(value["shape"]), block_size=value["block_size"], dtype=dtype, **settings)
    full.codes.view(-1).copy_(value["codes"].view(full.codes.dtype))
    full.scale.copy_(value["scale"])
    return full
