"""Tries an optimizer on small tensors: whether its steps over shards are its steps over whole parameters."""

from __future__ import annotations

import copy
import inspect
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fsdp_core.errors import OptimizerMismatchError
from fsdp_core.gradients.clipping import local_tensor
from fsdp_core.sharding.observed_communication import ObservedCommunication
from fsdp_core.state.layout import Layout

__all__ = ["check_steps", "moves_without_gradients"]

#: The number of steps, and of values of a parameter that are compared; some optimizers evaluate often in a step.
_STEPS = 6
_COMPARED = 7

#: The minimum learning rate of a trial: with a schedule that starts at 0, no difference would be visible.
_RATE = 1e-2

#: The shape of a small tensor, by a parameter's dimensions. Some optimizers treat only large matrices specially.
_SHAPES: dict[int, tuple[int, ...]] = {0: (), 1: (150,), 2: (136, 132), 3: (20, 18, 7), 4: (20, 18, 3, 3)}

#: Held by a thread while it keeps torch from compiling a step that runs only once.
_ALONE = threading.Lock()

#: Relative to a step's largest change: covers the rounding of optimizers that compute in bf16 internally.
_TOLERANCE = 0.05

#: Relative to a value, for each of the two values that a step is the difference of: fp32 rounds by half of it.
_ROUNDED = 2.0**-22

#: Optimizers that need gradients which shards don't have, by class name.
_REFUSED = {
    "SparseAdam": "takes sparse gradients alone, and shards have dense ones. Use torch.optim.Adam, with "
    "nn.Embedding(sparse=False).",
    "Adahessian": "differentiates gradients once more, and those of shards know nothing of how they were computed. Use "
    "another optimizer, such as AdamW.",
}


@dataclass(frozen=True)
class _Kind:
    """Parameters that an optimizer can distinguish only by their values.

    Attributes:
        shape: The shape of the small tensor that represents them.
        mesh: The mesh of a DTensor; ``placements`` are its placements.
        is_flat: Whether each rank holds a contiguous range of the elements.
        trained: Whether they get gradients.
    """

    shape: tuple[int, ...]
    is_flat: bool
    trained: bool
    mesh: DeviceMesh | None = None
    placements: tuple[Any, ...] = ()


def check_steps(optimizer: torch.optim.Optimizer, layout: Layout, *, owners: bool = False) -> bool:
    """Refuse an optimizer whose steps over shards are not its steps over whole parameters. All ranks must call it.

    A copy of it steps over small tensors, both whole and as this strategy would shard them. An optimizer that can't be
    copied, or that fails over whole tensors too, is accepted with a warning.

    Args:
        optimizer: An optimizer that holds the sharded parameters. It is not changed.
        layout: The parts of the user's parameters that each of them holds.
        owners: Whether the backend can let an optimizer step over whole parameters, each on one rank.

    Returns:
        Whether the optimizer has to be run like that: its update looks at more of a parameter than single elements,
        and over shards it would be wrong, or every rank would compute over every matrix; and it looks at no other one.

    Raises:
        OptimizerMismatchError: Its step fails over shards, or has a different result.
    """
    name = type(optimizer).__name__
    if name in _REFUSED:
        raise OptimizerMismatchError(f"{name} {_REFUSED[name]}")
    kinds = {p: _kind(p, layout) for group in optimizer.param_groups for p in group["params"] if p in layout}
    is_flat = any(kind.is_flat for kind in kinds.values())
    if not is_flat and all(kind.mesh is None for kind in kinds.values()):
        return False
    settings = _settings(optimizer, kinds)
    if settings is not None and (owners, settings) in _right:
        return _right[owners, settings]
    try:
        whole = _course(optimizer, kinds, _as_it_is)
    except Exception as raised:
        warnings.warn(
            f"{name} could not be tried over small tensors{_told(raised)}, so it is not known whether its steps over "
            "shards are right. Compare some losses with those of devices=1.",
            stacklevel=2,
        )
        return False
    odd: _OtherShape | None = None
    failure: Exception | None = None
    alike, gathers = False, False
    try:
        if is_flat:
            alike = _is_right_in_runs(optimizer, kinds, whole)
        else:
            with ObservedCommunication() as communication:
                alike = _alike(_of_this_rank(whole), _course(optimizer, kinds, _as_dtensor))
            # norms and the like are scalars, or have an element for each row or column
            gathers = max(communication.sizes, default=0) > max(sum(kind.shape) for kind in kinds.values())
    except _OtherShape as found:  # on every rank
        odd = found
    except Exception as raised:
        failure = raised
    if not is_flat:
        mesh = next(kind.mesh for kind in kinds.values() if kind.mesh is not None)
        alike, gathers = _on_all_ranks(alike, mesh), not _on_all_ranks(not gathers, mesh)
    if alike and not gathers:
        _right[owners, settings] = False
        return False
    if owners and all(len(layout[p]) == 1 for p in kinds) and _is_right_on_owners(optimizer, kinds, whole):
        _right[owners, settings] = True
        return True
    if alike:
        _right[owners, settings] = False
        return False
    if odd is not None:
        raise _not_saved(name, odd) from None
    if is_flat:
        raise OptimizerMismatchError(
            f"{name} looks at more of a parameter than single elements, such as its shape or a norm, and this strategy "
            f"shows each rank a 1-D piece: it would silently train something else{_told(failure)}.\n"
            "Use an optimizer whose update is elementwise, such as AdamW; or a strategy that shows whole shapes, "
            "such as strategy='fsdp2': the table of optimizers in the documentation says for which that is enough."
        )
    fused = [word for word in ("fused", "foreach") if any(group.get(word) for group in optimizer.param_groups)]
    instead = f"Leave {fused[0]}=True out, or use" if fused else "Use"
    what = "fails over" if failure is not None else "silently trains something else over"
    raise OptimizerMismatchError(
        f"a step of {name} {what} DTensors, which this strategy shows as parameters{_told(failure)}.\n"
        f"{instead} another optimizer, such as AdamW; or, if its update is elementwise, a strategy that shows plain "
        "pieces, such as strategy='fsdp_native'."
    )


def moves_without_gradients(optimizer: torch.optim.Optimizer, layout: Layout) -> bool:
    """Whether a step also changes parameters that have no gradient, as if it were zero.

    A copy of the optimizer steps over small tensors, with gradients and then without. No rank waits for another.

    Args:
        optimizer: An optimizer that holds the sharded parameters. It is not changed.
        layout: The parts of the user's parameters that each of them holds.
    """
    kinds = {p: _kind(p, layout) for group in optimizer.param_groups for p in group["params"]}
    smalls, memo = _smalls(optimizer, kinds, _as_it_is, torch.Generator().manual_seed(0))
    _, step = _copied(optimizer, memo)
    held = [small.held for small in smalls.values()]

    def evaluate() -> Tensor:
        return torch.ones(())

    try:
        with _ALONE, torch.compiler.set_stance("force_eager"):
            for small in smalls.values():
                if small.held.requires_grad:
                    small.set_gradient(0)
            step(evaluate)
            before = [parameter.detach().clone() for parameter in held]
            for parameter in held:
                parameter.grad = None
            step(evaluate)
    except Exception:  # it needs gradients
        return False
    return any(not torch.equal(parameter.detach(), one) for parameter, one in zip(held, before, strict=True))


def _is_right_in_runs(optimizer: torch.optim.Optimizer, kinds: Mapping[nn.Parameter, _Kind], whole: _Course) -> bool:
    """Whether steps over runs of elements are those over whole tensors."""
    first, last = (_course(optimizer, kinds, run) for run in (_first_run, _last_run))
    return _alike(whole, _joined(first, last))


def _is_right_on_owners(optimizer: torch.optim.Optimizer, kinds: Mapping[nn.Parameter, _Kind], whole: _Course) -> bool:
    """Whether an optimizer can step over each parameter apart from the others, and only then is right.

    One whose update is elementwise needs no whole parameters. One that communicates in its step expects all parameters
    on each rank. One that keeps its parameters besides its groups would go on with the shards. One that needs a
    parameter in each group would fail on a rank that owns none.
    """
    if _keeps_parameters(optimizer) or callable(getattr(optimizer, "eval", None)):
        return False
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        return False  # it may compute losses at several points, for which all shards would have to follow
    in_runs = {p: replace(kind, is_flat=bool(kind.shape), mesh=None, placements=()) for p, kind in kinds.items()}
    with suppress(Exception):
        if _is_right_in_runs(optimizer, in_runs, _course(optimizer, in_runs, _as_it_is)):
            return False
    try:
        with ObservedCommunication() as communication:
            _step_over_nothing(optimizer, kinds)
            alone = {key: _course(optimizer, kinds, _as_it_is, key)[key] for key in whole}
            beside = {key: _course(optimizer, kinds, _as_it_is, key, True)[key] for key in whole}
    except Exception:
        return False
    return _alike(whole, alone) and _alike(alone, beside) and not communication.sizes


def _step_over_nothing(optimizer: torch.optim.Optimizer, kinds: Mapping[nn.Parameter, _Kind]) -> None:
    """Step a copy of an optimizer whose param groups are empty, as they are on a rank that owns no parameter."""
    _, memo = _smalls(optimizer, kinds, _as_it_is, torch.Generator().manual_seed(0))
    copied, step = _copied(optimizer, memo)
    for group in copied.param_groups:
        group["params"].clear()
    with _ALONE, torch.compiler.set_stance("force_eager"):
        step(lambda: torch.ones(()))


def _keeps_parameters(optimizer: torch.optim.Optimizer) -> bool:
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    groups = {id(optimizer.param_groups), *(id(group) for group in optimizer.param_groups)}

    def finds(value: Any) -> bool:
        if isinstance(value, torch.optim.Optimizer):
            return value is not optimizer and any(finds(inner) for inner in vars(value).values())
        if id(value) in groups:
            return False
        if isinstance(value, dict):
            return any(finds(inner) for pair in value.items() for inner in pair)
        if isinstance(value, list | tuple | set | frozenset):
            return any(map(finds, value))
        return id(value) in held

    return any(finds(value) for name, value in vars(optimizer).items() if name not in ("param_groups", "state"))


def _not_saved(name: str, odd: _OtherShape) -> OptimizerMismatchError:
    return OptimizerMismatchError(
        f"{name} keeps {odd}, of which this strategy could not tell what each rank holds: a checkpoint would hold that "
        "of one rank.\nUse an optimizer whose state is of the parameters' shapes, such as AdamW."
    )


#: By whether parameters may have owners, and settings that passed in this process, whether they have to. The same on
#: every rank, since all ranks run the same trials in order.
_right: dict[tuple[bool, object], bool] = {}


def _settings(optimizer: torch.optim.Optimizer, kinds: Mapping[nn.Parameter, _Kind]) -> object:
    """Everything that a trial depends on, or ``None`` if unknown. Known for torch's optimizers, from their groups."""
    if type(optimizer).__module__.split(".")[:2] != ["torch", "optim"]:
        return None
    return type(optimizer), tuple(
        (
            repr({key: value for key, value in group.items() if key != "params"}),
            tuple(dict.fromkeys((p.device.type, _described(kinds[p])) for p in group["params"] if p in kinds)),
        )
        for group in optimizer.param_groups
    )


def _described(kind: _Kind) -> tuple[object, ...]:
    """A kind without its mesh object, whose process groups must not outlive the run."""
    mesh = kind.mesh and (kind.mesh.device_type, tuple(kind.mesh.mesh.flatten().tolist()))
    return kind.shape, kind.is_flat, kind.trained, kind.placements, mesh


def _told(failure: object) -> str:
    words = str(failure).strip().splitlines() if failure is not None else []
    return f" ({type(failure).__name__}: {words[0][:200]})" if words else ""


def _kind(parameter: nn.Parameter, layout: Layout) -> _Kind:
    part, *more = layout[parameter]
    written = (prod(part.shape),) if more else part.shape
    shape = _SHAPES.get(len(written), (6, 5, 4, *(3 for _ in written[3:])))
    is_flat = part.range is not None and bool(shape)
    if not isinstance(parameter, DTensor):
        return _Kind(shape, is_flat, parameter.requires_grad)
    ranks = parameter.device_mesh.size()
    rows, uneven = parameter.shape[0], parameter.shape[0] % ranks
    first = 1 if rows < ranks else max(1, shape[0] // ranks) * ranks + (1 if uneven else 0)
    dims = [first, *shape[1:]]
    for dim in {placement.dim for placement in parameter.placements if isinstance(placement, Shard)} - {0}:
        dims[dim] = max(1, dims[dim] // ranks) * ranks
        dims[-1] = -(-dims[-1] // (2 * ranks)) * 2 * ranks  # parts of a row have pairs of elements, as rows have
    return _Kind(tuple(dims), False, parameter.requires_grad, parameter.device_mesh, parameter.placements)


#: By param group and kind, the flattened values of the small tensor at each gradient computation, of shape
#: ``(times, elements)``.
_Course = dict[tuple[int, _Kind], Tensor]

#: Returns the part of a small tensor that the optimizer gets.
_Shown = Callable[[Tensor, _Kind], Tensor]


def _as_it_is(tensor: Tensor, kind: _Kind) -> Tensor:
    return tensor


def _first_run(tensor: Tensor, kind: _Kind) -> Tensor:
    return tensor.reshape(-1)[: _cut(tensor)] if kind.is_flat else tensor


def _last_run(tensor: Tensor, kind: _Kind) -> Tensor:
    return tensor.reshape(-1)[_cut(tensor) :] if kind.is_flat else tensor


def _cut(tensor: Tensor) -> int:
    return tensor.numel() * 5 // 26 * 2  # even, see _gradient


def _as_dtensor(tensor: Tensor, kind: _Kind) -> Tensor:
    return tensor if kind.mesh is None else distribute_tensor(tensor, kind.mesh, kind.placements, src_data_rank=None)


def _joined(first: _Course, last: _Course) -> _Course:
    """Join two ranks' parts of each small tensor. One may have evaluated more often than the other."""
    return {
        key: torch.cat([a[: len(last[key])], last[key][: len(a)]], 1) if key[1].is_flat else a
        for key, a in first.items()
    }


def _of_this_rank(whole: _Course) -> _Course:
    """This rank's expected part of each small tensor, if it is a DTensor."""
    shown = ((key, _as_dtensor(course.new_zeros(key[1].shape), key[1])) for key, course in whole.items())
    return {
        key: torch.stack([local_tensor(_as_dtensor(now.view(shard.shape), key[1])).reshape(-1) for now in whole[key]])
        for key, shard in shown
    }


def _on_all_ranks(fine: bool, mesh: DeviceMesh) -> bool:
    flag = torch.tensor(float(fine), device=mesh.device_type)
    dist.all_reduce(flag, dist.ReduceOp.MIN)  # not over one parameter's mesh: others may have larger ones
    return bool(flag)


@dataclass(kw_only=True)
class _Small:
    """A small tensor that represents a parameter.

    Attributes:
        held: The parameter that the optimizer steps over.
        target: The values that minimize the loss, of the shape of this rank's part of ``held``.
        signs: Factors that flip the sign of some gradient elements, of the shape of ``target``.
        spikes: Factors that make some gradient elements large, of the shape of ``target``.
        is_matrix: Whether the parameter has several dimensions.
    """

    held: nn.Parameter
    target: Tensor
    signs: Tensor
    spikes: Tensor
    is_matrix: bool

    def set_gradient(self, step: int) -> None:
        """Set the gradient of a step, without communication."""
        now = local_tensor(self.held.detach())
        grad = 3.0 * (now - self.target)
        if step in (1, 2):
            grad *= self.signs  # some optimizers compare signs with those of the momentum
        elif step == 3 and self.is_matrix:  # some check whether a row's gradient is orthogonal to it
            pairs = now.reshape(-1, 2)
            grad = torch.stack([pairs[:, 1], -pairs[:, 0]], 1).view(now.shape)
        elif step == 4:  # some compare its size with that of earlier gradients
            grad *= self.spikes
        if isinstance(self.held, DTensor):
            self.held.grad = torch.zeros_like(self.held.detach())
            local_tensor(self.held.grad).copy_(grad)
        else:
            self.held.grad = grad


def _course(
    optimizer: torch.optim.Optimizer,
    kinds: Mapping[nn.Parameter, _Kind],
    shown: _Shown,
    only: tuple[int, _Kind] | None = None,
    beside_others: bool = False,
) -> _Course:
    """Step a copy of the optimizer over the parts of small tensors that ``shown`` returns.

    With ``only``, over a single one; or, if it is ``beside_others``, over one more in its group, whose gradient is
    now much larger and now much smaller: this one's steps must be the same.
    """
    generator = torch.Generator().manual_seed(0)
    smalls, memo = _smalls(optimizer, kinds, shown, generator)
    seen: list[list[Tensor]] = []
    copied, step = _copied(optimizer, memo)
    for index, group in enumerate(copied.param_groups if only is not None else ()):
        group["params"][:] = [smalls[only].held] if only is not None and index == only[0] else []
    other: _Small | None = None
    if only is not None and beside_others:
        other = _small(only[1], smalls[only].held.device, shown, generator)
        copied.param_groups[only[0]]["params"].append(other.held)

    def evaluate(number: int) -> Tensor:
        if len(seen) <= _COMPARED:
            seen.append([local_tensor(small.held.detach()).reshape(-1).clone() for small in smalls.values()])
        for small in smalls.values():
            if small.held.requires_grad:
                small.set_gradient(number)
        if other is not None and other.held.requires_grad:
            other.set_gradient(number)
            assert other.held.grad is not None
            other.held.grad *= 1e3 if number % 2 else 1e-3
        return torch.ones(())

    # ranks that are threads share the stance; ranks that wait for each other in a step are never threads
    with nullcontext() if shown is _as_dtensor else _ALONE, torch.compiler.set_stance("force_eager"):
        for number in range(_STEPS):
            evaluate(number)
            step(partial(evaluate, number))
    evaluate(_STEPS)
    if shown is not _as_it_is:
        _check_state(copied, [small.held for small in smalls.values()])
    return dict(zip(smalls, (torch.stack(values) for values in zip(*seen, strict=True)), strict=True))


def _smalls(
    optimizer: torch.optim.Optimizer, kinds: Mapping[nn.Parameter, _Kind], shown: _Shown, generator: torch.Generator
) -> tuple[dict[tuple[int, _Kind], _Small], dict[int, Any]]:
    """A small tensor for each kind in each param group, and what it replaces, by the id of the parameter."""
    smalls: dict[tuple[int, _Kind], _Small] = {}
    memo: dict[int, Any] = {}
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            kind = kinds[parameter]
            if (index, kind) not in smalls:
                smalls[index, kind] = _small(kind, parameter.device, shown, generator)
            memo[id(parameter)] = smalls[index, kind].held
    return smalls, memo


class _OtherShape(Exception):
    """Optimizer state that can't be saved."""


def _check_state(optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor]) -> None:
    """Refuse state that is neither a scalar nor of its parameter's shape: which part a rank holds is unknown."""
    if isinstance(optimizer, torch.optim.LBFGS):
        return  # handled separately
    for parameter in parameters:
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor) and value.numel() > 1 and value.shape != parameter.shape:
                raise _OtherShape(f"{key!r} of shape {tuple(value.shape)} for a parameter of {tuple(parameter.shape)}")


def _small(kind: _Kind, device: torch.device, shown: _Shown, generator: torch.Generator) -> _Small:
    start, target, signs = (torch.randn(kind.shape, generator=generator) for _ in range(3))
    spikes = torch.ones(kind.shape)
    spikes.reshape(-1)[_cut(spikes) :] = 30.0
    target.reshape(-1)[: _cut(target)] *= (
        4.0  # so that the norms of the pieces differ, also relative to the parameter's
    )
    signs.reshape(-1)[: _cut(signs)] -= 1.5  # so that most signs flip in one piece, and few in the other
    signs.reshape(-1)[_cut(signs) :] += 1.5
    where = device.type if device.type == "cuda" else "cpu"
    start, target, signs, spikes = (one.to(where) for one in (start, target, signs, spikes))
    return _Small(
        held=nn.Parameter(shown(start, kind).detach().clone(), requires_grad=kind.trained),
        target=local_tensor(shown(target, kind)),
        signs=local_tensor(shown(signs.sign(), kind)),
        spikes=local_tensor(shown(spikes, kind)),
        is_matrix=len(kind.shape) > 1,
    )


def _alike(want: _Course, got: _Course) -> bool:
    """Whether each step changed the same elements by the same amounts."""
    for key, values in want.items():
        if values.shape != got[key].shape:
            return False
        expected, found = values.diff(dim=0), got[key].diff(dim=0)
        largest = expected.abs().amax(1, keepdim=True) if expected.numel() else expected
        rounded = _ROUNDED * values.abs().amax() if values.numel() else 0.0
        if not bool(((expected - found).abs() <= _TOLERANCE * largest + rounded).all()):
            return False
    return True


def _copied(
    optimizer: torch.optim.Optimizer, memo: dict[int, Any]
) -> tuple[torch.optim.Optimizer, Callable[[Callable[[], Tensor]], Any]]:
    """A copy of an optimizer with its parameters replaced everywhere; and the copy's step function.

    Args:
        optimizer: The optimizer.
        memo: The replacements, by the id of the parameter.
    """
    copied: Any = object.__new__(type(optimizer))
    state = {
        memo[id(p)]: {key: _small_state(value, p, memo[id(p)]) for key, value in values.items()}
        for p, values in optimizer.state.items()
        if id(p) in memo
    }
    kept = {name: value for name, value in vars(optimizer).items() if name not in ("step", "state")}
    kept = {name: type(value)() if name.endswith("_hooks") else value for name, value in kept.items()}
    vars(copied).update(copy.deepcopy(kept, {**memo, id(optimizer): copied}))
    if "state" in vars(optimizer):  # otherwise the state is an inner optimizer's
        copied.state = type(optimizer.state)(dict, state)  # a defaultdict
    for group in copied.param_groups:
        group["params"][:] = dict.fromkeys(group["params"])  # in place, because other objects may hold the list
        if isinstance(group.get("lr"), float):
            group["lr"] = max(group["lr"], _RATE)
    train = getattr(copied, "train", None)
    if callable(train):
        train()  # schedule-free optimizers need it
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        return copied, lambda evaluate: copied.step(evaluate)
    return copied, lambda evaluate: copied.step()


def _small_state(value: Any, parameter: Tensor, stand_in: Tensor) -> Any:
    """A value of the state that an optimizer creates before its first step, converted for a small tensor."""
    if isinstance(value, Tensor) and value.shape == parameter.shape and value.ndim:
        local = value.to_local() if isinstance(value, DTensor) else value
        fill = local.reshape(-1)[0].item() if local.numel() else 0.0
        return torch.full_like(stand_in.detach(), fill, dtype=value.dtype)
    return copy.deepcopy(value)
