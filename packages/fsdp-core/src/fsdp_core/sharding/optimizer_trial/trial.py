"""Tries an optimizer on small tensors: whether its steps over shards are its steps over whole parameters."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from textwrap import shorten
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from fsdp_core.errors import OptimizerMismatchError, first_line
from fsdp_core.runtime import Runtime
from fsdp_core.sharding.observed_communication import ObservedCommunication
from fsdp_core.sharding.optimizer_trial.copies import requires_closure
from fsdp_core.sharding.optimizer_trial.courses import (
    COARSE,
    FINE,
    Ran,
    alike,
    course,
    is_right_in_runs,
    keeps_alike,
    moves_without_gradients_of,
    of_this_rank,
)
from fsdp_core.sharding.optimizer_trial.duration import said_if_it_takes_long
from fsdp_core.sharding.optimizer_trial.of_wholes import DIFFERENTIATES, stepped_whole
from fsdp_core.sharding.optimizer_trial.on_owners import right_on_owners
from fsdp_core.sharding.optimizer_trial.small_tensors import Kind, Shown, as_dtensor, as_it_is, kind_of
from fsdp_core.sharding.optimizer_trial.state import why_lost, why_not_resumed
from fsdp_core.state.block_quantised import quantises
from fsdp_core.state.layout import Layout

__all__ = ["check_steps", "moves_without_gradients"]

#: Optimizers that need gradients which shards don't have, by class name.
_REFUSED = {
    "SparseAdam": "takes sparse gradients alone, and shards have dense ones. Use torch.optim.Adam, with "
    "nn.Embedding(sparse=False).",
    "Adahessian": DIFFERENTIATES,
}

_Kinds = Mapping[nn.Parameter, Kind]


def check_steps(
    optimizer: torch.optim.Optimizer, layout: Layout, *, owners: bool = False, runtime: Runtime | None = None
) -> bool:
    """Refuse an optimizer whose steps over shards are not its steps over whole parameters. All ranks must call it.

    A copy of it steps over small tensors, both whole and as this strategy would shard them, and a further copy resumes
    from its state. An optimizer that can't be copied, or that fails over whole tensors too, is accepted with a warning.

    Args:
        optimizer: An optimizer that holds the sharded parameters. It is not changed.
        layout: The parts of the user's parameters that each of them holds.
        owners: Whether the backend can let an optimizer step over whole parameters, each on one rank.
        runtime: The ranks, which then take one decision; ``None`` if each decides by itself, over flat shards.

    Returns:
        Whether the optimizer has to be run like that: its update looks at more of a parameter than single elements,
        and over shards it would be wrong, or every rank would compute over every matrix; and it looks at no other one.

    Raises:
        OptimizerMismatchError: Its step fails over shards, or has a different result; or its state can't be saved and
            resumed; or it depends on the loss, which each rank has of its own.
    """
    name = type(optimizer).__name__
    if name in _REFUSED:
        raise OptimizerMismatchError(f"{name} {_REFUSED[name]}")
    kinds = {p: kind_of(p, layout) for group in optimizer.param_groups for p in group["params"] if p in layout}
    mesh = next((kind.mesh for kind in kinds.values() if kind.mesh is not None), None)
    is_flat = any(kind.is_flat for kind in kinds.values())
    if not is_flat and mesh is None:
        return False
    settings = _settings(optimizer, kinds)

    def on_all_ranks(fine: bool) -> bool:
        if runtime is not None:
            return not runtime.total([not fine])[0]
        if mesh is None:
            return fine
        flag = torch.tensor(float(fine), device=mesh.device_type)
        dist.all_reduce(flag, dist.ReduceOp.MIN)  # not over one parameter's mesh: others may have larger ones
        return bool(flag)

    # a rank may remember what another does not, such as one that has taken part in more runs
    if on_all_ranks(settings is not None and (owners, settings) in _right):
        return _right[owners, settings]
    with said_if_it_takes_long(name) as doing:
        owned = owners and all(len(layout[p]) == 1 for p in kinds)
        doing("its steps over whole parameters")
        few = {p: kind_of(p, layout, few=True) for p in kinds}
        if settings is None and _draws(optimizer, few):  # those that do may take seconds for each step over more
            _Trial(optimizer, few, is_flat, False, on_all_ranks, doing).decided(owned)
        has_to = _Trial(optimizer, kinds, is_flat, settings is not None, on_all_ranks, doing).decided(owned)
    if settings is not None and has_to is not None:
        _right[owners, settings] = has_to
    return bool(has_to)


class _Trial:
    """A trial of one optimizer.

    Args:
        optimizer: The optimizer.
        kinds: What represents its parameters.
        is_flat: Whether ranks hold contiguous ranges of elements.
        is_torchs: Whether it is one of torch's, whose closures and whose state are known.
        on_all_ranks: Whether something is so on every rank; all ranks call it.
        doing: Called with what is tried from now on.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        kinds: _Kinds,
        is_flat: bool,
        is_torchs: bool,
        on_all_ranks: Callable[[bool], bool],
        doing: Callable[[str], None],
    ) -> None:
        self.optimizer, self.kinds, self.is_flat, self.is_torchs = optimizer, kinds, is_flat, is_torchs
        self.on_all_ranks, self.doing = on_all_ranks, doing
        self.name = type(optimizer).__name__
        self.by_closure = False

    def decided(self, owners: bool) -> bool | None:
        """Whether the optimizer has to step on owners; ``None`` if it can't be tried. Raises if it can't be used."""
        whole, untried = stepped_whole(self.optimizer, self.kinds, self.doing, is_torchs=self.is_torchs)
        if not self.on_all_ranks(whole is not None) or whole is None:
            warnings.warn(
                f"{self.name} could not be tried over small tensors{_told(untried)}, so it is not known whether its "
                "steps over shards are right. Compare some losses with those of devices=1.",
                stacklevel=3,
            )
            return None
        self.by_closure = whole.by_closure
        failure: Exception | None = None
        fine, gathers, lost = False, False, None
        self.doing("whether its steps over shards are those over whole parameters")
        try:
            fine, gathers, lost = self._in_runs(whole) if self.is_flat else self._over_dtensors(whole)
        except Exception as raised:
            failure = raised
        fine = self.on_all_ranks(fine)
        gathers = not self.on_all_ranks(not gathers)
        if fine and not self.is_torchs and self.on_all_ranks(lost is None):
            stepped, shown = (whole, as_it_is) if self.is_flat else (self.over_dtensors, as_dtensor)
            lost = why_not_resumed(self.optimizer, self.kinds, whole, stepped, shown, by_closure=self.by_closure)
        kept = lost if fine else None
        fine = self.on_all_ranks(fine and lost is None)
        if fine and not gathers:
            return False
        if owners:
            self.doing("whether each parameter can be updated apart from the others, on one rank")
            right, of_owners = right_on_owners(
                self.optimizer, self.kinds, whole, is_flat=self.is_flat, is_torchs=self.is_torchs
            )
            if self.on_all_ranks(right and of_owners is None):
                return True
            kept = of_owners if right and not fine else kept
        if fine:
            return False
        self._refuse(kept, failure)

    def _course(self, shown: Shown, **settings: Any) -> Ran:
        return course(self.optimizer, self.kinds, shown, **{"by_closure": self.by_closure, **settings})

    def _in_runs(self, whole: Ran) -> tuple[bool, bool, str | None]:
        """Whether it is right over flat shards; that it gathers nothing; and why its state would be lost."""
        fine, ran = is_right_in_runs(
            self.optimizer,
            self.kinds,
            by_closure=self.by_closure,
            whole=whole,
            tolerance=COARSE if quantises(self.optimizer) else FINE,
        )
        return fine, False, next(filter(None, (why_lost(one) for one in ran)), None)

    def _over_dtensors(self, whole: Ran) -> tuple[bool, bool, str | None]:
        """Whether it is right over DTensors; whether it gathers matrices; and why its state would be lost."""
        with ObservedCommunication() as communication:
            self.over_dtensors = self._course(as_dtensor)
        # norms and the like are scalars, or have an element for each row or column
        gathers = max(communication.sizes, default=0) > max(sum(kind.shape) for kind in self.kinds.values())
        tolerance = COARSE if gathers or quantises(self.optimizer) else FINE
        fine = alike(of_this_rank(whole.values), self.over_dtensors.values, tolerance)
        fine = fine and keeps_alike(whole, self.over_dtensors)
        return fine, gathers, why_lost(self.over_dtensors)

    def _refuse(self, lost: str | None, failure: Exception | None) -> NoReturn:
        name = self.name
        if lost is not None:
            raise OptimizerMismatchError(f"{name} can't be run over shards: {lost}")
        if self.is_flat:
            raise OptimizerMismatchError(
                f"{name} looks at more of a parameter than single elements, such as its shape or a norm, and this "
                f"strategy shows each rank a 1-D piece: it would silently train something else{_told(failure)}.\n"
                "Use an optimizer whose update is elementwise, such as AdamW; or a strategy that shows whole shapes, "
                "such as strategy='fsdp2': the table of optimizers in the documentation says for which that is enough."
            )
        fused = [word for word in ("fused", "foreach") if any(g.get(word) for g in self.optimizer.param_groups)]
        instead = f"Leave {fused[0]}=True out, or use" if fused else "Use"
        what = "fails over" if failure is not None else "silently trains something else over"
        other = "; or strategy='fsdp_native', which shows plain pieces: over those its steps are right"
        raise OptimizerMismatchError(
            f"a step of {name} {what} DTensors, which this strategy shows as parameters{_told(failure)}.\n"
            f"{instead} another optimizer, such as AdamW{other if self._is_right_over_pieces() else ''}."
        )

    def _is_right_over_pieces(self) -> bool:
        kinds = {p: kind.in_runs() for p, kind in self.kinds.items()}
        try:
            right, ran = is_right_in_runs(self.optimizer, kinds, by_closure=self.by_closure)
        except Exception:  # then nothing is said of them
            return False
        return right and all(why_lost(one) is None for one in ran)


def _draws(optimizer: torch.optim.Optimizer, kinds: _Kinds) -> bool:
    """Whether steps over whole tensors draw random numbers."""
    try:
        return course(optimizer, kinds, as_it_is, by_closure=requires_closure(optimizer)).drew
    except Exception:  # the trial runs into it again
        return False


def moves_without_gradients(optimizer: torch.optim.Optimizer, layout: Layout) -> bool:
    """Whether a step also changes parameters that have no gradient, as if it were zero.

    A copy of the optimizer steps over small tensors, with gradients and then without. No rank waits for another.

    Args:
        optimizer: An optimizer that holds the sharded parameters. It is not changed.
        layout: The parts of the user's parameters that each of them holds.
    """
    kinds = {p: kind_of(p, layout) for group in optimizer.param_groups for p in group["params"]}
    return moves_without_gradients_of(optimizer, kinds)


#: By whether parameters may have owners, and settings that passed in this process, whether they have to. The same on
#: every rank, since all ranks run the same trials in order.
_right: dict[tuple[bool, object], bool] = {}


def _settings(optimizer: torch.optim.Optimizer, kinds: _Kinds) -> object:
    """Everything that a trial depends on, or ``None`` if unknown. Known for torch's optimizers, from their groups."""
    if type(optimizer).__module__.split(".")[:2] != ["torch", "optim"]:
        return None
    return type(optimizer), tuple(
        (
            repr({key: value for key, value in group.items() if key != "params"}),
            tuple(dict.fromkeys((p.device.type, kinds[p].described()) for p in group["params"] if p in kinds)),
        )
        for group in optimizer.param_groups
    )


def _told(failure: BaseException | None) -> str:
    if failure is None:
        return ""
    said = first_line(failure)
    words = f": {shorten(said, 200, placeholder=' …')}" if said else ""
    return f" ({type(failure).__name__}{words})"
