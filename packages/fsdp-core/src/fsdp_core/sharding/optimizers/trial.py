"""Tries an optimizer on small parameters: whether its steps over shards are its steps over whole parameters."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from textwrap import shorten
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from fsdp_core.errors import OptimizerMismatchError, first_line
from fsdp_core.runtime import Runtime
from fsdp_core.sharding.optimizers.copying import keeps_parameters, requires_closure, takes_closure
from fsdp_core.sharding.optimizers.known import (
    COMPUTES_HESSIAN,
    NEEDS_MATRICES,
    REFUSED,
    is_of_torch,
    is_right_over_shards,
)
from fsdp_core.sharding.optimizers.observed_communication import Communicates, ObservedCommunication
from fsdp_core.sharding.optimizers.small_params import (
    Specs,
    View,
    as_dtensor,
    as_first_shard,
    as_last_shard,
    as_unsharded,
    shrink_specs,
    spec_of,
)
from fsdp_core.sharding.optimizers.trial_run import (
    COARSE,
    FINE,
    SLIGHT,
    TrialRun,
    Values,
    allclose,
    have_close_ends,
    join_shards,
    keeps_same_numbers,
    run_steps,
    shard_values,
)
from fsdp_core.sharding.optimizers.trial_state import why_not_resumed, why_not_saved
from fsdp_core.state.block_quantised import quantises
from fsdp_core.state.layout import Layout

__all__ = ["check_steps", "moves_without_gradients"]

_log = logging.getLogger(__name__)

#: After so many seconds, and again, a trial logs what it is doing: some optimizers take long for each step.
_SILENT_SECONDS = 20.0

#: The losses in the trial of whether steps depend on the loss: rising and falling, no two of them equal.
_VARIED_LOSSES = (8.0, 3.0, 5.0, 0.1)


def check_steps(
    optimizer: torch.optim.Optimizer, layout: Layout, *, owners: bool = False, runtime: Runtime | None = None
) -> bool:
    """Refuse an optimizer whose steps over shards are not its steps over whole parameters. All ranks must call it.

    Of torch's elementwise optimizers that is known. Of any other, a copy steps over small parameters, both whole and as
    this strategy would shard them, and a further copy resumes from its state. An optimizer that can't be copied, or
    that fails over whole parameters too, is accepted with a warning.

    Args:
        optimizer: An optimizer that holds the sharded parameters. It is not changed.
        layout: The parts of the user's parameters that each of them holds.
        owners: Whether the backend can let an optimizer step over whole parameters, each on one rank.
        runtime: The ranks, which then take one decision; ``None`` if each decides by itself, over flat shards.

    Returns:
        Whether the optimizer has to step over whole parameters, each on one rank: its update of a parameter depends on
        all of that parameter's elements and on no other parameter, so that over shards it would be wrong, or every rank
        would compute over every matrix.

    Raises:
        OptimizerMismatchError: Its step fails over shards, or has a different result; or its state can't be saved and
            resumed; or it depends on the loss, which each rank has of its own.
    """
    name = type(optimizer).__name__
    if name in REFUSED:
        raise OptimizerMismatchError(f"{name} {REFUSED[name]}")
    if runtime is not None and runtime.is_rehearsed:
        return owners and name in NEEDS_MATRICES
    specs = {p: spec_of(p, layout) for group in optimizer.param_groups for p in group["params"] if p in layout}
    mesh = next((spec.mesh for spec in specs.values() if spec.mesh is not None), None)
    if mesh is None and not any(spec.is_flat for spec in specs.values()):
        return False
    if is_right_over_shards(optimizer, list(specs)):
        return False

    def holds_on_all_ranks(is_true: bool) -> bool:
        if runtime is not None:
            (ranks_without,) = runtime.total([not is_true])
            return not ranks_without
        if mesh is None:
            return is_true
        flag = torch.tensor(float(is_true), device=mesh.device_type)
        dist.all_reduce(flag, dist.ReduceOp.MIN)  # over all ranks: the mesh of a parameter may have fewer
        return bool(flag)

    may_have_owners = owners and all(len(layout[p]) == 1 for p in specs)
    small_trial = _Trial(optimizer, shrink_specs(specs), holds_on_all_ranks)
    if small_trial.draws_random_numbers_on_any_rank():
        # Steps of such optimizers may take seconds over more elements, and most are refused: refuse over few elements.
        small_trial.needs_owners(may_have_owners)
    return _Trial(optimizer, specs, holds_on_all_ranks).needs_owners(may_have_owners)


def moves_without_gradients(optimizer: torch.optim.Optimizer, layout: Layout) -> bool:
    """Whether a step also changes parameters that have no gradient, as if it were zero.

    A copy of the optimizer steps over small parameters, with gradients and then without. No rank waits for another.

    Args:
        optimizer: An optimizer that holds the sharded parameters. It is not changed.
        layout: The parts of the user's parameters that each of them holds.
    """
    specs = {p: spec_of(p, layout) for group in optimizer.param_groups for p in group["params"]}
    try:
        run = run_steps(optimizer, specs, as_unsharded, steps=range(2), steps_with_gradients=1)
    except Exception:  # it needs gradients
        return False
    return any(not torch.equal(values[1], values[2]) for values in run.values.values())


@dataclass(frozen=True, kw_only=True)
class _Comparison:
    """Steps over shards, compared with those over whole parameters.

    Attributes:
        is_right: Whether they are the same.
        runs: The steps over the shards of each rank that was tried.
        gathers: Whether they gather matrices, so that every rank would compute over every matrix.
    """

    is_right: bool
    runs: list[TrialRun]
    gathers: bool = False


class _Trial:
    """A trial of one optimizer.

    Args:
        optimizer: The optimizer.
        specs: The specs of the optimizer's parameters.
        holds_on_all_ranks: Returns whether a condition holds on every rank; all ranks call it.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, specs: Specs, holds_on_all_ranks: Callable[[bool], bool]
    ) -> None:
        self.optimizer = optimizer
        self.specs = specs
        self.holds_on_all_ranks = holds_on_all_ranks
        self.name = type(optimizer).__name__
        self.is_flat = any(spec.is_flat for spec in specs.values())
        self.tolerance = COARSE if quantises(optimizer) else FINE
        self.by_closure = requires_closure(optimizer)
        self.question = ""
        self.start = time.monotonic()
        self.last_report = time.monotonic()

    def draws_random_numbers_on_any_rank(self) -> bool:
        """Whether steps over whole parameters draw random numbers. All ranks must call it."""
        self.question = "its steps over whole parameters"
        draws = False
        with suppress(Exception):  # the trial runs into it again
            draws = self._run_copy(as_unsharded).drew_random_numbers
        return self._holds_on_any_rank(draws)

    def _holds_on_any_rank(self, is_true: bool) -> bool:
        return not self.holds_on_all_ranks(not is_true)

    def needs_owners(self, may_have_owners: bool) -> bool:
        """Whether the optimizer has to step on owners. Raises if it can't be used at all."""
        reference, error = self._agree_on_unsharded()
        has_reference = self.holds_on_all_ranks(reference is not None)
        if reference is None or not has_reference:
            warnings.warn(
                f"{self.name} could not be tried over small tensors{_describe_error(error)}, so it is not known "
                "whether its steps over shards are right. Compare some losses with those of devices=1.",
                stacklevel=3,
            )
            return False
        self.question = "whether its steps over shards are those over whole parameters"
        is_right = False
        gathers = False
        problem: str | None = None
        error = None
        try:
            if self.is_flat:
                comparison = self._compare_flat(self.specs, reference, self.tolerance)
                run = reference
                view = as_unsharded
            else:
                comparison = self._compare_dtensors(reference)
                (run,) = comparison.runs
                view = as_dtensor
            is_right, gathers = comparison.is_right, comparison.gathers
            problem = _first_problem(comparison.runs)
        except Exception as raised:
            error = raised
        is_right = self.holds_on_all_ranks(is_right)
        gathers = self._holds_on_any_rank(gathers)
        if not is_right:
            problem = None  # wrong steps are the first thing to tell the user
        elif self.holds_on_all_ranks(problem is None):
            problem = why_not_resumed(self.optimizer, self.specs, reference, run, view)
        is_usable = self.holds_on_all_ranks(is_right and problem is None)
        if is_usable and not gathers:
            return False
        if may_have_owners:
            self.question = "whether each parameter can be updated apart from the others, on one rank"
            needs_whole, owner_problem = self._compare_owners(reference)
            if self.holds_on_all_ranks(needs_whole and owner_problem is None):
                return True
            if needs_whole and not is_usable:  # stepping on owners would be the only way, and its problem prevents it
                problem = owner_problem
        if is_usable:
            return False
        self._refuse(problem, error)

    def _run_copy(self, view: View, specs: Specs | None = None, **settings: Any) -> TrialRun:
        settings.setdefault("by_closure", self.by_closure)
        if specs is None:
            specs = self.specs
        return run_steps(self.optimizer, specs, view, before_step=self._log_if_slow, **settings)

    def _agree_on_unsharded(self) -> tuple[TrialRun | None, Exception | None]:
        """What :meth:`_run_unsharded` returns. Where it raises on one rank, this raises on all."""
        refusal: OptimizerMismatchError | None = None
        reference = None
        error = None
        try:
            reference, error = self._run_unsharded()
        except OptimizerMismatchError as raised:
            refusal = raised
        if self.holds_on_all_ranks(refusal is None):
            return reference, error
        if refusal is not None:
            raise refusal
        raise OptimizerMismatchError(
            f"{self.name} can be used on this rank, and another rank has refused it: its error says why. Each rank has "
            "tried the same small steps, so the optimizer behaves differently on ranks.\n"
            "Build it the same on every rank; or use another, such as AdamW."
        )

    def _run_unsharded(self) -> tuple[TrialRun | None, Exception | None]:
        """The steps over whole parameters, or why they fail there too; with a closure only if there has to be one.

        Raises:
            OptimizerMismatchError: Steps depend on losses or on random numbers, or differentiate, or communicate.
        """
        self.question = "its steps over whole parameters"
        try:
            reference = self._run_copy(as_unsharded)
        except Communicates:
            raise OptimizerMismatchError(
                f"{self.name} communicates in its step, as if every process had whole parameters: it expects to run "
                "without sharding, and would wait for ranks that do something else.\n"
                "Use one for a single device instead, such as torch.optim.Muon; or another optimizer, such as AdamW."
            ) from None
        except Exception as error:
            if "does not require grad" in str(error):
                raise OptimizerMismatchError(f"{self.name} {COMPUTES_HESSIAN}") from None
            if self.by_closure or not takes_closure(self.optimizer):
                return None, error
            self.by_closure = True  # its signature says that it needs none, but it does
            try:
                reference = self._run_copy(as_unsharded)
            except Exception:
                return None, error
        self._check_inputs(reference)
        return reference, None

    def _check_inputs(self, reference: TrialRun) -> None:
        """Refuse steps that depend on what each rank has of its own: random numbers and losses."""
        if reference.drew_random_numbers:
            self.question = "whether its steps depend on random numbers"
            if not have_close_ends(reference, self._run_copy(as_unsharded, seed=1)):
                raise OptimizerMismatchError(
                    f"{self.name} draws random numbers in its step, and ranks would draw others for their shards than "
                    "one process does for whole parameters.\nUse an optimizer that draws none, such as AdamW."
                )
        if not takes_closure(self.optimizer) or is_of_torch(self.optimizer):
            return
        self.question = "whether its steps depend on the loss"
        try:
            varied = self._run_copy(as_unsharded, by_closure=True, losses=_VARIED_LOSSES)
            if have_close_ends(reference, varied):
                return
            equal_losses = reference if self.by_closure else self._run_copy(as_unsharded, by_closure=True)
        except Exception:  # it fails with a closure
            return
        if not have_close_ends(equal_losses, varied):
            raise OptimizerMismatchError(
                f"{self.name} scales its steps by the loss that its closure returns, and each rank has the loss of its "
                "own part of the batch: ranks would make different steps of one.\n"
                "Use an optimizer that does not look at the loss, such as AdamW."
            )

    def _compare_flat(self, specs: Specs, reference: TrialRun | None, tolerance: float) -> _Comparison:
        """Compare steps over flat shards with those over whole parameters.

        Few elements come first: an optimizer of matrices may make one with a row for each element of a shard.
        """

        def compare(specs: Specs, expected: TrialRun | None = None, scale: float = 1.0) -> _Comparison:
            if expected is None:
                expected = self._run_copy(as_unsharded, specs, scale=scale)
            first = self._run_copy(as_first_shard, specs, scale=scale)
            last = self._run_copy(as_last_shard, specs, scale=scale)
            is_right = keeps_same_numbers(expected, first) and keeps_same_numbers(expected, last)
            is_right = is_right and allclose(expected.values, join_shards(first.values, last.values), tolerance)
            return _Comparison(is_right=is_right, runs=[first, last])

        small_specs = shrink_specs(specs)
        for scale in (1.0, SLIGHT):
            comparison = compare(small_specs, scale=scale)
            if not comparison.is_right:
                return comparison
        return compare(specs, reference)

    def _compare_dtensors(self, reference: TrialRun) -> _Comparison:
        """Compare steps over DTensors with those over whole parameters."""
        with ObservedCommunication() as communication:
            run = self._run_copy(as_dtensor)
        # norms and the like are scalars, or have an element for each row or column
        gathers = max(communication.sizes, default=0) > max(sum(spec.shape) for spec in self.specs.values())
        is_close = allclose(shard_values(reference.values), run.values, COARSE if gathers else self.tolerance)
        is_right = is_close and keeps_same_numbers(reference, run)
        return _Comparison(is_right=is_right, runs=[run], gathers=gathers)

    def _compare_owners(self, reference: TrialRun) -> tuple[bool, str | None]:
        """Whether an optimizer can step over each parameter apart from the others, and only then is right.

        One whose update is elementwise needs no whole parameters. One that keeps its parameters besides its groups
        would go on with the shards. One that needs a parameter in each group would fail on a rank that owns none. One
        that steps with a closure may compute losses at several points, for which all shards would have to follow.

        Returns:
            The answer; and, if it is yes, why the optimizer must not be used nevertheless, or ``None``.
        """
        if keeps_parameters(self.optimizer) or callable(getattr(self.optimizer, "eval", None)) or self.by_closure:
            return False, None
        if not self.is_flat:
            is_right_if_flat, _ = self._try_flat_shards()
            if is_right_if_flat:
                return False, None
        if reference.drew_random_numbers:
            return True, (
                "it draws random numbers in its step, and each owner would draw others than one process does.\n"
                "Use an optimizer that draws none, such as AdamW."
            )

        def run_each(**settings: Any) -> tuple[Values, bool]:
            runs = {key: self._run_copy(as_unsharded, only=[key], **settings) for key in reference.values}
            keeps = all(keeps_same_numbers(reference, run) for run in runs.values())
            return {key: run.values[key] for key, run in runs.items()}, keeps

        try:
            self._run_copy(as_unsharded, only=[])
            alone, keeps_alone = run_each()
            with_neighbour, keeps_with_neighbour = run_each(has_neighbour=True)
            if not (keeps_alone and keeps_with_neighbour):
                return False, None
            if not (allclose(reference.values, alone, FINE) and allclose(alone, with_neighbour, FINE)):
                return False, None
            slight_alone, _ = run_each(scale=SLIGHT)
            slight_with_neighbour, _ = run_each(scale=SLIGHT, has_neighbour=True)
            if not allclose(slight_alone, slight_with_neighbour, FINE):
                return False, None
        except Exception:
            return False, None
        problem = why_not_saved(reference, is_sharded=False)
        return True, problem or why_not_resumed(self.optimizer, self.specs, reference, reference, as_unsharded)

    def _try_flat_shards(self) -> tuple[bool, bool]:
        """Whether steps over flat shards instead of DTensors would be right; and whether their state can be saved."""
        specs = {p: spec.flattened() for p, spec in self.specs.items()}
        try:
            comparison = self._compare_flat(specs, None, FINE)
        except Exception:  # then the error does not recommend them
            return False, False
        return comparison.is_right, _first_problem(comparison.runs) is None

    def _refuse(self, problem: str | None, error: Exception | None) -> NoReturn:
        if problem is not None:
            raise OptimizerMismatchError(f"{self.name} can't be run over shards: {problem}")
        if self.is_flat:
            raise OptimizerMismatchError(
                f"{self.name} looks at more of a parameter than single elements, such as its shape or a norm, and this "
                f"strategy shows each rank a 1-D piece: it would silently train something else{_describe_error(error)}."
                "\nUse an optimizer whose update is elementwise, such as AdamW; or a strategy that shows whole shapes, "
                "such as strategy='fsdp2': the table of optimizers in the documentation says for which that is enough."
            )
        options = [name for name in ("fused", "foreach") if any(g.get(name) for g in self.optimizer.param_groups)]
        advice = f"Leave {options[0]}=True out, or use" if options else "Use"
        verb = "fails over" if error is not None else "silently trains something else over"
        other_strategy = ""
        is_right_if_flat, is_savable_if_flat = self._try_flat_shards()
        if is_right_if_flat and is_savable_if_flat:
            other_strategy = (
                "; or a strategy that shows plain pieces, over which its steps are right, such as "
                "strategy='fsdp_native'"
            )
        raise OptimizerMismatchError(
            f"a step of {self.name} {verb} DTensors, which this strategy shows as parameters{_describe_error(error)}.\n"
            f"{advice} another optimizer, such as AdamW{other_strategy}."
        )

    def _log_if_slow(self) -> None:
        now = time.monotonic()
        if now - self.last_report >= _SILENT_SECONDS and not (dist.is_initialized() and dist.get_rank()):
            self.last_report = now
            _log.warning(
                "For %.0f s, %s has been tried over small tensors, to find out %s. This is done once, before training; "
                "an optimizer of torch.optim takes less than a second.",
                now - self.start,
                self.name,
                self.question,
            )


def _first_problem(runs: Iterable[TrialRun]) -> str | None:
    """Why the state of one of several runs over shards can't be saved; ``None`` if all can."""
    for run in runs:
        problem = why_not_saved(run, is_sharded=True)
        if problem is not None:
            return problem
    return None


def _describe_error(error: BaseException | None) -> str:
    if error is None:
        return ""
    message = first_line(error)
    words = f": {shorten(message, 200, placeholder=' …')}" if message else ""
    return f" ({type(error).__name__}{words})"
