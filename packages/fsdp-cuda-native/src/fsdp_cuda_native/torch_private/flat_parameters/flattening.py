"""What is done to units once, when they are made: how they are flattened, and what users may do with their pieces.

FSDP1 flattens a unit in ``FlatParamHandle.flatten_tensors``, which copies full parameters into one flat tensor.
Parameters that were sharded while they were built have no full copy: here their parts are gathered directly into the
flat tensor, so that no unit exists twice. Afterwards FSDP1 shows users its pieces as plain tensors, without a word when
they compute something with a piece that is right only of the whole parameter. So core is told which elements each piece
holds, and refuses that; and under ``use_orig_params=False``, where modules inside a unit have no parameters at all,
loops over these are refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp._flat_param import FlatParamHandle

from fsdp_core.sharding import (
    KeptPart,
    PiecePlace,
    guard_parameters,
    outside_of_compilation,
    place_piece,
    unguard_parameters,
)
from fsdp_cuda_native.flattened_parts import RunningCalls, refuse_parts
from fsdp_cuda_native.torch_private.flat_parameters.units import handle_of, units_of

__all__ = ["flattening_parts", "place_pieces", "refuse_parts_of", "unguard_during_calls"]


@contextmanager
def flattening_parts(parts: Mapping[nn.Parameter, KeptPart]) -> Iterator[None]:
    """Context in which FSDP1 can flatten parameters without memory, of which each rank has kept a part.

    Args:
        parts: By parameter, the part that this rank has kept.
    """
    if not parts:
        yield
        return
    handle_class: Any = FlatParamHandle
    flatten_of_torch = handle_class.flatten_tensors

    def flatten_from_parts(handle: FlatParamHandle, tensors: list[Tensor], aligned_numel: int) -> Tensor:
        # aligned_numel is 0 for parameters: FSDP1 passes what pads them as tensors
        numels = [tensor.numel() for tensor in tensors]
        flat = tensors[0].new_empty(sum(numels))
        for tensor, target in zip(tensors, flat.split(numels), strict=True):
            if isinstance(tensor, nn.Parameter) and tensor in parts:
                parts[tensor].gather(target)
            else:
                target.copy_(tensor.detach().as_strided((tensor.numel(),), (1,)))  # in memory order
        return flat

    handle_class.flatten_tensors = flatten_from_parts
    try:
        yield
    finally:
        handle_class.flatten_tensors = flatten_of_torch


def place_pieces(unit: FSDP, names: Mapping[nn.Module, str]) -> None:
    """Note which elements of a unit's parameters ranks hold: core refuses to combine pieces that hold different ones.

    Args:
        unit: The unit, whose handle is one of ours.
        names: The user's names of modules.
    """
    handle = handle_of(unit)
    flat = handle.flat_param
    shard_size = flat._local_shard.numel()
    position: dict[str, Any] = {"shard": handle.rank, "replicas": getattr(unit, "_inter_node_pg", None)}
    if flat._params is None:
        layout = (shard_size, *flat._shapes)  # units of the same shapes are divided alike
        place_piece(flat, PiecePlace(names[unit.module], layout, **position))
        return
    for parameter, info, shape, numel, start in zip(
        flat._params, flat._param_infos, flat._shapes, flat._numels, handle.offsets(), strict=True
    ):
        first_rank = start // shard_size
        last_rank = (start + max(numel, 1) - 1) // shard_size
        # where in the parameter the elements of the next rank begin
        boundaries = tuple(rank * shard_size - start for rank in range(first_rank + 1, last_rank + 1))
        layout = (tuple(shape), first_rank, boundaries)
        name = f"{names[info.module]}.{info.param_name}".removeprefix(".")
        place_piece(parameter, PiecePlace(name, layout, **position))


def unguard_during_calls(units: Sequence[FSDP]) -> None:
    """Let FSDP1 gather from flat parameters that are guarded, in each call of a unit.

    Core guards the flat parameters that optimizers hold (``use_orig_params=False``): it refuses what users compute
    with them. FSDP1 computes with them too. After the call, those that are freed again are guarded again, if any was
    guarded before it.
    """
    flat_refs = [weakref.ref(flat) for unit in units if (flat := handle_of(unit).flat_param)._params is None]
    if not flat_refs:
        return
    were_guarded: list[bool] = []  # for each running call: units call units
    for unit in units:
        unit.register_forward_pre_hook(partial(_unguard, flat_refs, were_guarded), prepend=True)
        unit.register_forward_hook(partial(_guard_again, flat_refs, were_guarded), always_call=True)


@outside_of_compilation
def _unguard(flat_refs: Iterable[weakref.ref[Any]], were_guarded: list[bool], *_: Any) -> None:
    guarded = unguard_parameters(flat for flat_ref in flat_refs if (flat := flat_ref()) is not None)
    were_guarded.append(bool(guarded))


@outside_of_compilation
def _guard_again(flat_refs: Iterable[weakref.ref[Any]], were_guarded: list[bool], *_: Any) -> None:
    if were_guarded and were_guarded.pop():
        flat_params = [flat for flat_ref in flat_refs if (flat := flat_ref()) is not None]
        guard_parameters(flat for flat in flat_params if flat.data_ptr() == flat._local_shard.data_ptr())


def refuse_parts_of(root: FSDP, names: Mapping[nn.Module, str]) -> None:
    """Refuse to loop over the parameters of modules inside units, and to freeze them, under ``use_orig_params=False``.

    FSDP1 leaves such modules without parameters: ``module.requires_grad_(False)`` would silently freeze nothing.

    Args:
        root: The root. Nothing is refused in units that keep the original parameters.
        names: The user's names of modules.
    """
    lacking_by_part: dict[nn.Module, list[tuple[nn.Module, str]]] = {}  # the owner and name of each parameter
    running = RunningCalls()
    for unit in units_of(root):
        flat = handle_of(unit).flat_param
        if flat._params is not None:
            continue
        flattened = [(info.module, info.param_name) for info in (*flat._param_infos, *flat._shared_param_infos)]
        for part in unit.module.modules():
            if part is not unit.module and not isinstance(part, FSDP):
                inside = set(part.modules())
                lacking = [(owner, name) for owner, name in flattened if owner in inside]
                lacking_by_part.setdefault(part, []).extend(lacking)
        if unit is not root:  # a step runs inside the root's call, and must not loop over parts
            running.count_calls(unit.module)
    for part, lacking in lacking_by_part.items():
        if part in names and lacking:
            refuse_parts(part, names[part], lacking, running)
