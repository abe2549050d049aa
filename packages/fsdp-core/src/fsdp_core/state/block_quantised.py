"""Optimizer state that torchao keeps in 8 or 4 bits: blocks of elements with a scale each, saved as what they are.

torchao quantises runs of ``block_size`` elements, in C order, of what a rank holds of a parameter. If every rank's part
begins and ends between two blocks of the whole parameter, the blocks are those of one process, and any other division
between blocks holds them too.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

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
    "check_fits_blocks",
    "describe_whole_state",
    "is_of_blocks",
    "is_saved_in_blocks",
    "of_blocks",
    "quantises",
    "restored_blocks",
    "whole_again",
]

#: The key that tells a saved state of this kind from others; its value is the class of the tensors.
_CLASS_KEY = "torchao"


def quantises(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer keeps state in blocks; the same on every rank, whatever the sizes of the shards."""
    return type(optimizer).__module__.startswith("torchao.") and hasattr(optimizer, "_subclass_zeros")


def is_of_blocks(value: Any) -> bool:
    """Whether a value is a tensor of torchao's that holds codes and scales."""
    return all(hasattr(value, name) for name in ("codes", "scale", "block_size"))


def is_saved_in_blocks(value: Any) -> bool:
    """Whether a value is what :func:`of_blocks` or :func:`describe_whole_state` returns."""
    return isinstance(value, dict) and _CLASS_KEY in value


def _find_run(part: Part, parameter: Tensor) -> tuple[int, int, int] | None:
    """Where a rank's part begins in the whole parameter, how long it is, and which copy; ``None`` if it is no run."""
    if part.range is not None:
        return None  # flat parameters are cut without regard to a parameter's blocks
    local_chunks = chunked(parameter)
    if not local_chunks.chunks:
        return 0, 0, local_chunks.replica
    (chunk,) = local_chunks.chunks
    is_run = tuple(chunk.data.shape[1:]) == tuple(part.shape[1:])
    row = prod(part.shape[1:])
    return (chunk.offsets[0] * row, prod(chunk.data.shape), local_chunks.replica) if is_run and part.shape else None


def of_blocks(part: Part, parameter: Tensor, value: Any) -> Any:
    """Describe a rank's part of quantised state, sharing memory with it; a value of another kind is returned unchanged.

    Args:
        part: The user's parameter.
        parameter: What the optimizer holds of it.
        value: A value of its state.

    Returns:
        The codes and scales, flat, and what they are; ``value`` itself if its blocks are not those of one process.
    """
    local: Any = local_tensor(value) if isinstance(value, DTensor) else value
    run = _find_run(part, parameter) if is_of_blocks(local) else None
    if run is None:
        return value
    (start, length, replica) = run
    block = int(local.block_size)
    total = prod(part.shape)
    if start % block or length % block or total % block:
        return value
    elements_per_byte = length // local.codes.numel()  # elements in a byte
    sizes = {"codes": (local.codes, elements_per_byte), "scale": (local.scale, block)}
    tensors = {
        name: ChunkedTensor(
            shape=(total // size,),
            dtype=data.dtype,
            chunks=(Chunk(offsets=(start // size,), data=data.detach().reshape(-1)),),
            replica=replica,
        )
        for name, (data, size) in sizes.items()
    }
    return {**_describe_blocks(local, part.shape), **tensors}


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
    """Make all ranks describe quantised state alike, and refuse what can't be saved. All ranks must call it.

    Args:
        state: By parameter name and key, values from :func:`of_blocks`.
        shapes: The parameters' shapes, by name.
        runtime: The ranks.

    Returns:
        The state, with descriptions without chunks where a rank holds nothing of a parameter.

    Raises:
        CheckpointValueError: Blocks on some rank are not those of one process, or a rank has plain values.
    """
    own: dict[tuple[str, str], Any] = {}
    for name, values in state.items():
        for key, value in values.items():
            if is_saved_in_blocks(value):
                description = {k: (v.shape, v.dtype) if isinstance(v, ChunkedTensor) else v for k, v in value.items()}
                own[name, key] = description
            elif isinstance(value, Tensor) and value.ndim:
                local = local_tensor(value)
                own[name, key] = None if not local.numel() else "in other blocks" if is_of_blocks(local) else "plain"
    completed = {name: dict(values) for name, values in state.items()}
    by_rank = runtime.gather_objects(own)
    for name, key in dict.fromkeys(
        name_and_key for values_of_rank in by_rank for name_and_key in values_of_rank
    ):  # the same on every rank
        kinds = [values_of_rank.get((name, key)) for values_of_rank in by_rank]
        blocks = next((part for part in kinds if isinstance(part, dict)), None)
        if "in other blocks" in kinds or (blocks is not None and "plain" in kinds):
            raise CheckpointValueError(
                f"{key!r} of {name!r} can't be saved: torchao quantises what each rank holds of it, "
                f"{shapes[name]} of which rank {next(r for r, k in enumerate(kinds) if isinstance(k, str))} "
                "holds a part that does not begin and end between two blocks of the whole.\n"
                "Use a strategy that keeps whole rows on each rank, with a number of ranks that divides the rows into "
                "multiples of block_size elements; or an optimizer whose state is plain, such as AdamW."
            )
        if blocks is not None and own.get((name, key)) is None:
            completed.setdefault(name, {})[key] = {
                k: ChunkedTensor(shape=v[0], dtype=v[1], chunks=(), replica=0) if isinstance(v, tuple) else v
                for k, v in blocks.items()
            }
    return completed


def check_fits_blocks(
    optimizer: torch.optim.Optimizer, part: Part, parameter: nn.Parameter, key: str, saved: Mapping[str, Any]
) -> None:
    """Refuse saved quantised state that this rank can't hold, before anything is restored.

    Args:
        optimizer: The optimizer.
        part: The user's parameter.
        parameter: What the optimizer holds of it.
        key: The key of the state, for the error.
        saved: As from :func:`of_blocks`, its tensors whole or saved.

    Raises:
        CheckpointMismatchError: The optimizer keeps no such state, or this rank's part is not of whole blocks.
    """
    run = _find_run(part, parameter)
    block = int(saved["block_size"])
    state_class = "plain tensors"
    if quantises(optimizer):
        maker: Any = optimizer
        state_class = type(maker._subclass_zeros(torch.zeros(block), bool(saved["signed"]), block)).__name__
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
    if run is None or run[0] % block or run[1] % block:
        raise CheckpointMismatchError(
            f"{key!r} of {part.name!r} was saved in blocks of {block} elements, and this rank's part begins or ends "
            "within one.\nLoad it under a strategy that keeps whole rows on each rank, on a number of ranks that "
            f"divides the rows into multiples of {block} elements, such as 1 or that which saved it; or load only the "
            "weights."
        )


def restored_blocks(
    optimizer: torch.optim.Optimizer, part: Part, parameter: nn.Parameter, saved: Mapping[str, Any]
) -> Any:
    """Restore a rank's part of quantised state that :func:`check_fits_blocks` has let pass.

    Args:
        optimizer: The optimizer.
        part: The user's parameter.
        parameter: What the optimizer holds of it.
        saved: As from :func:`of_blocks`, its tensors whole or saved.
    """
    maker: Any = optimizer
    run = _find_run(part, parameter)
    block = int(saved["block_size"])
    assert run is not None
    local = local_tensor(parameter).detach()
    blocks: Any = torch.zeros_like(local)
    if run[1]:
        blocks = maker._subclass_zeros(local, bool(saved["signed"]), block)
        elements_per_byte = run[1] // blocks.codes.numel()
        for name, data, size in (("codes", blocks.codes, elements_per_byte), ("scale", blocks.scale, block)):
            full = saved[name]
            flat = data.view(-1)
            chunk = Chunk(offsets=(run[0] // size,), data=flat)
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


def describe_whole_state(value: Any) -> Any:
    """Describe whole quantised state, as a plain optimizer has it, as :func:`of_blocks` does; others are unchanged."""
    if not is_of_blocks(value) or isinstance(value, DTensor):
        return value
    return {**_describe_blocks(value, tuple(value.shape)), "codes": value.codes.reshape(-1), "scale": value.scale}


def whole_again(value: Mapping[str, Any]) -> Any:
    """Make whole quantised state of its gathered parts, for a file that a plain optimizer loads.

    Args:
        value: From :func:`of_blocks`, its tensors gathered.
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
