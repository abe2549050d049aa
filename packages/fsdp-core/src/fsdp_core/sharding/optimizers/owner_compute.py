"""Owner-compute: an optimizer that needs whole parameters steps over each on one rank, and shards get the result."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from math import prod
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fsdp_core.errors import ShardingError
from fsdp_core.gradients.clipping import local_tensor
from fsdp_core.runtime import Runtime
from fsdp_core.sharding.optimizers.owner_failures import OwnerFailure, failed_in, raise_together
from fsdp_core.sharding.optimizers.trial import moves_without_gradients
from fsdp_core.state.chunks import ChunkedTensor, chunked
from fsdp_core.state.coverage import Box
from fsdp_core.state.full_tensor import gather_each
from fsdp_core.state.layout import Layout, Part
from fsdp_core.state.owned import Owners, set_owners
from fsdp_core.torch_private.optimizer_steps import replace_step

__all__ = ["assign_owners", "step_on_owners"]

_log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class _Member:
    """A parameter of the optimizer.

    Attributes:
        sharded: This rank's shard of the parameter, which the optimizer holds between steps.
        part: The user's parameter.
        owner: The rank that updates the parameter.
        boxes: By rank, the boxes of the parameter that the rank holds.
        replicas: By rank, the index of the copy of the parameter that these boxes belong to.
        has_gradient: Whether the parameter has a gradient on any rank in this step.
        full: On the owner, the full parameter that the optimizer steps over. Its memory is freed after the step.
    """

    sharded: nn.Parameter
    part: Part
    owner: int
    boxes: list[list[Box]]
    replicas: list[int]
    has_gradient: bool = False
    full: nn.Parameter | None = None

    def boxes_to_send(self, rank: int) -> list[Box]:
        """The boxes that a rank sends to the owner: of several copies of the parameter, only the first is sent."""
        return self.boxes[rank] if self.replicas[rank] == 0 else []

    def chunks(self, tensor: Tensor, rank: int) -> list[Tensor]:
        """This rank's boxes of a tensor that is laid out as ``sharded``, sharing memory with it."""
        chunked_tensor: ChunkedTensor = chunked(self.part.of(tensor), rank=rank)
        return [cast("Tensor", chunk.data) for chunk in chunked_tensor.chunks]


@dataclass(kw_only=True)
class _Plan:
    """How one optimizer is run.

    Attributes:
        runtime: The ranks.
        members: The optimizer's parameters, in the order of its param groups.
        step: The optimizer's own step, as a function of the optimizer: a plan must not keep the optimizer alive.
        is_hooked: Whether hooks are called around the step. They see the shards, before and after it.
        moves_all: Whether a step also changes parameters that have no gradient.
    """

    runtime: Runtime
    step: Callable[..., Any]
    is_hooked: bool
    moves_all: bool
    members: list[_Member] = field(default_factory=list)


_plans: WeakKeyDictionary[torch.optim.Optimizer, _Plan] = WeakKeyDictionary()


def assign_owners(sizes: Sequence[int], ranks: int, loads: Sequence[int] = ()) -> list[int]:
    """Spread parameters over ranks by size: the largest first, each to the rank that has least so far.

    Args:
        sizes: The number of elements of each parameter.
        ranks: The number of ranks.
        loads: The number of elements that each rank owns already; none by default.

    Returns:
        The owner of each parameter.

    Example:
        >>> assign_owners([4, 9, 4, 1], ranks=2)
        [1, 0, 1, 1]
    """
    load = list(loads) or [0] * ranks
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        owners[index] = load.index(min(load))
        load[owners[index]] += sizes[index]
    return owners


def step_on_owners(optimizer: torch.optim.Optimizer, layout: Layout, runtime: Runtime) -> None:
    """Make ``optimizer.step()`` update each parameter whole, on its owner. All ranks must call it.

    The ranks send what they hold of weights and gradients to the owners, in one exchange; each owner lets the optimizer
    step over its own; a second exchange returns the weights. Between steps the optimizer holds the sharded parameters,
    so that clipping, schedulers and ``zero_grad()`` work as for any other, and its state is whole, on the owners alone.
    Calling it again adds parameters that the optimizer was given since then.

    Args:
        optimizer: An optimizer whose update of a parameter depends on that parameter alone. It holds the sharded ones.
        layout: The parts of the user's parameters that they hold; one each.
        runtime: The ranks.
    """
    plan = _plans.get(optimizer)
    if plan is None:
        moves_all = moves_without_gradients(optimizer, layout)
        step, is_hooked = replace_step(optimizer, _step)
        plan = _Plan(runtime=runtime, step=step, is_hooked=is_hooked, moves_all=moves_all)
        if runtime.rank == 0:
            _log.info(
                "%s looks at whole parameters: each of them is updated on one of the %d ranks (owner-compute).",
                type(optimizer).__name__,
                runtime.world_size,
            )
    members = {id(member.sharded): member for member in plan.members}
    params = [p for group in optimizer.param_groups for p in group["params"]]
    new_params = [p for p in params if id(p) not in members]
    loads = [0] * runtime.world_size
    for member in plan.members:
        loads[member.owner] += prod(member.part.shape)
    owners = assign_owners([prod(layout[p][0].shape) for p in new_params], runtime.world_size, loads)
    chunked_params = [chunked(layout[p][0].of(p), rank=runtime.rank) for p in new_params]
    names = [layout[p][0].name for p in new_params]
    gathered = runtime.gather_objects(
        [
            (chunked_param.replica, [(chunk.offsets, tuple(chunk.data.shape)) for chunk in chunked_param.chunks], name)
            for chunked_param, name in zip(chunked_params, names, strict=True)
        ]
    )
    _check_same_order(type(optimizer).__name__, [[name for *_, name in entries] for entries in gathered])
    for index, (parameter, owner) in enumerate(zip(new_params, owners, strict=True)):
        members[id(parameter)] = _Member(
            sharded=parameter,
            part=layout[parameter][0],
            owner=owner,
            boxes=[entries[index][1] for entries in gathered],
            replicas=[entries[index][0] for entries in gathered],
        )
    plan.members = [members[id(p)] for p in params]
    set_owners(optimizer, Owners(rank=runtime.rank, by_parameter={m.sharded: m.owner for m in plan.members}))
    _move_initial_state(optimizer, [members[id(p)] for p in new_params], runtime)
    _plans[optimizer] = plan


def _check_same_order(optimizer: str, by_rank: Sequence[Sequence[str]]) -> None:
    """Refuse parameters that ranks hold in different orders: weights would be sent to the wrong parameters."""
    for rank, names in enumerate(by_rank):
        if names != by_rank[0]:
            pairs = zip_longest(by_rank[0], names)
            name_of_rank_0, other_name = next(pair for pair in pairs if pair[0] != pair[1])
            raise ShardingError(
                f"ranks have given {optimizer} parameters in different orders: where rank 0 has {name_of_rank_0!r}, "
                f"rank {rank} has {other_name!r}.\n"
                "Give it model.parameters(), or lists in the same order on every rank; the order of a set differs from "
                "process to process."
            )


def _move_initial_state(optimizer: torch.optim.Optimizer, members: Sequence[_Member], runtime: Runtime) -> None:
    """Gather the state that the optimizer's constructor has made for shards to the owners."""
    for member in members:
        state = optimizer.state.pop(member.sharded, None) if member.sharded in optimizer.state else None
        if not state:
            continue
        sharded_state = {
            key: member.part.of(value)
            for key, value in state.items()
            if isinstance(value, Tensor) and value.ndim and value.shape == member.sharded.shape
        }
        full_state = dict(gather_each(sharded_state, runtime))
        if member.owner == runtime.rank:
            optimizer.state[member.sharded] = {key: full_state.get(key, value) for key, value in state.items()}


def _step(self: torch.optim.Optimizer, *args: Any, **options: Any) -> Any:
    """Replaces an optimizer's ``step``."""
    plan = _plans.get(self)
    if plan is None:  # a copy of the optimizer has none
        return type(self).step(self, *args, **options)
    step = _hooked_step if plan.is_hooked else _step_full_params
    return step(self, *args, **options)


def _step_full_params(self: torch.optim.Optimizer, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
    plan = _plans[self]
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    with torch.no_grad():
        members = _members_to_step(plan)
        failure = _gather_to_owners(plan, members)
        if failure is None:
            failure = _step_own_params(self, plan, members, options)
        _scatter_from_owners(plan, members, type(self).__name__, failure)
    return loss


def _step_own_params(
    optimizer: torch.optim.Optimizer, plan: _Plan, members: Sequence[_Member], options: Mapping[str, Any]
) -> OwnerFailure | None:
    """Let the optimizer step over the parameters that this rank owns. Returns why it could not."""
    try:
        with _holding_full_params(optimizer, plan, members):
            plan.step(optimizer, **options)
    except Exception as error:
        own_members = [m for m in members if m.owner == plan.runtime.rank and m.full is not None]
        return failed_in(error, [(m.part.name, m.full, m.full.grad) for m in own_members if m.full is not None])
    return None


_hooked_step = torch.optim.Optimizer.profile_hook_step(_step_full_params)


def _members_to_step(plan: _Plan) -> list[_Member]:
    """The parameters to step over: those that have a gradient on any rank.

    A rank that holds no element of a parameter can't know whether it has one. All parameters are stepped over if the
    optimizer treats a missing gradient as zeros.
    """
    members, runtime = plan.members, plan.runtime
    if not members:
        return []
    flags = torch.tensor([float(member.sharded.grad is not None) for member in members], device=runtime.device)
    for member, flag in zip(members, runtime.all_reduce(flags, "max").tolist(), strict=True):
        member.has_gradient = bool(flag)
    return [member for member in members if plan.moves_all or member.has_gradient]


def _gather_to_owners(plan: _Plan, members: Sequence[_Member]) -> OwnerFailure | None:
    """Gather full weights and gradients on their owners. Returns why this rank can't send its part."""
    runtime = plan.runtime
    failure = None
    rank = runtime.rank
    ranks = range(runtime.world_size)
    for (device, dtype), group in _group_by_dtype(members).items():
        outgoing: list[list[Tensor]] = [[] for _ in ranks]
        for member in group:
            if member.boxes_to_send(rank):
                outgoing[member.owner] += member.chunks(member.sharded, rank)
                if not member.has_gradient:
                    continue
                grad = member.sharded.grad
                if grad is None or grad.dtype != member.sharded.dtype:
                    failure = failure or OwnerFailure(
                        message=f"which has {'no gradient' if grad is None else f'a gradient in {grad.dtype}'} of its "
                        f"part of {member.part.name!r}, which is in {member.sharded.dtype}. Let the gradient be in the "
                        "parameter's dtype; or use an optimizer whose update is elementwise, such as AdamW"
                    )
                    grad = torch.zeros_like(member.sharded)
                outgoing[member.owner] += member.chunks(grad, rank)
        own_members = [member for member in group if member.owner == rank]
        # a weight, and a gradient of the same shape if there is one
        sizes = [
            sum((1 + m.has_gradient) * prod(lengths) for m in own_members for _, lengths in m.boxes_to_send(sender))
            for sender in ranks
        ]
        incoming = _exchange(runtime, outgoing, sizes, device, dtype)
        for member in own_members:
            weight = torch.empty(member.part.shape, dtype=dtype, device=device)
            if member.full is None:
                member.full = nn.Parameter(weight, requires_grad=member.sharded.requires_grad)
            member.full.requires_grad_(member.sharded.requires_grad)  # the user may have frozen it since the last step
            member.full.data = weight
            member.full.grad = torch.empty_like(weight) if member.has_gradient else None
        for sender, tensor in enumerate(incoming):
            pieces = _ReceivedPieces(tensor)
            for member in own_members:
                assert member.full is not None
                full_tensors = [member.full.data]
                if member.full.grad is not None:
                    full_tensors.append(member.full.grad)
                for full in full_tensors:
                    for offsets, lengths in member.boxes_to_send(sender):
                        full[_slices_of((offsets, lengths))] = pieces.take(lengths)
    return failure


def _scatter_from_owners(plan: _Plan, members: Sequence[_Member], optimizer: str, failure: OwnerFailure | None) -> None:
    """Return the weights to all shards, and free the full parameters.

    Before its first weights each rank sends every other rank a flag: whether it has failed. If one has, all raise.

    Raises:
        ShardingError: A rank has failed.
    """
    runtime = plan.runtime
    rank = runtime.rank
    ranks = range(runtime.world_size)
    if failure is not None and not members:  # there is no exchange, so no other rank waits for this one
        raise ShardingError(f"{optimizer} has failed: {failure.message}") from failure.error
    has_sent_flag = False
    for (device, dtype), group in _group_by_dtype(members).items():
        own_members = [member for member in group if member.owner == rank]
        outgoing = [
            [cast("Tensor", m.full).data[_slices_of(box)] for m in own_members for box in m.boxes[receiver]]
            for receiver in ranks
        ]
        boxes_by_owner = [[box for m in group if m.owner == owner for _, box in m.boxes[rank]] for owner in ranks]
        sizes = [sum(map(prod, boxes)) for boxes in boxes_by_owner]
        if not has_sent_flag:
            flag = torch.full((1,), float(failure is not None), dtype=dtype, device=device)
            outgoing = [[flag, *to_rank] for to_rank in outgoing]
            sizes = [size + 1 for size in sizes]
        incoming = [_ReceivedPieces(received) for received in _exchange(runtime, outgoing, sizes, device, dtype)]
        del outgoing
        if not has_sent_flag:
            has_sent_flag = True
            if bool(torch.cat([pieces.take((1,)) for pieces in incoming]).any()):
                for member in members:
                    _free_full(member)
                raise_together(runtime, optimizer, failure)
        for member in own_members:
            _free_full(member)
        for member in group:
            for (_, lengths), chunk in zip(member.boxes[rank], member.chunks(member.sharded, rank), strict=True):
                chunk.copy_(incoming[member.owner].take(lengths))


def _free_full(member: _Member) -> None:
    if member.full is not None:
        member.full.data = member.full.data.new_empty(0)
        member.full.grad = None


def _exchange(
    runtime: Runtime,
    outgoing: Sequence[Sequence[Tensor]],
    sizes: Sequence[int],
    device: torch.device,
    dtype: torch.dtype,
) -> Sequence[Tensor]:
    """Send tensors to each rank, and return a flat tensor from each rank, of as many elements as ``sizes`` says."""
    flat = [tensor.reshape(-1) for tensor in chain.from_iterable(outgoing)]
    sent = torch.cat(flat) if flat else torch.empty(0, dtype=dtype, device=device)
    item = dtype.itemsize  # bytes, which every collectives library can send
    counts = [item * sum(tensor.numel() for tensor in to_rank) for to_rank in outgoing]
    received = runtime.all_to_all(sent.view(torch.uint8), counts, [item * size for size in sizes])
    runs: Sequence[Tensor] = received.view(dtype).split(list(sizes))
    return runs


class _ReceivedPieces:
    """The elements that one rank has sent, taken in the order in which it sent them."""

    def __init__(self, run: Tensor) -> None:
        self._run = run
        self._offset = 0

    def take(self, lengths: tuple[int, ...]) -> Tensor:
        begin = self._offset
        self._offset = self._offset + prod(lengths)
        return self._run[begin : self._offset].view(lengths)


def _slices_of(box: Box) -> tuple[slice, ...]:
    return tuple(slice(offset, offset + length) for offset, length in zip(*box, strict=True))


def _group_by_dtype(members: Sequence[_Member]) -> Mapping[tuple[torch.device, torch.dtype], list[_Member]]:
    """Members by device and dtype, in the same order on every rank."""
    groups: dict[tuple[torch.device, torch.dtype], list[_Member]] = {}
    for member in members:
        groups.setdefault((local_tensor(member.sharded).device, member.sharded.dtype), []).append(member)
    return groups


@contextmanager
def _holding_full_params(optimizer: torch.optim.Optimizer, plan: _Plan, members: Sequence[_Member]) -> Iterator[None]:
    """A context in which the optimizer holds the full parameters that this rank owns, with their state."""
    own_members = {id(m.sharded): m for m in members if m.owner == plan.runtime.rank}
    groups = [list(group["params"]) for group in optimizer.param_groups]
    state = optimizer.state
    try:
        for group in optimizer.param_groups:
            group["params"][:] = [own_members[id(p)].full for p in group["params"] if id(p) in own_members]
        for member in own_members.values():
            assert member.full is not None
            if member.sharded in state:
                state[member.full] = state.pop(member.sharded)
        yield
    finally:
        for group, params in zip(optimizer.param_groups, groups, strict=True):
            group["params"][:] = params
        for member in own_members.values():
            if member.full is not None and member.full in state:
                state[member.sharded] = state.pop(member.full)
