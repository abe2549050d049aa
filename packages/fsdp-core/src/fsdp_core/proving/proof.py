"""A proof: the references of a caught fit, its strategies on real ranks, and what follows from how they differ."""

from __future__ import annotations

import io
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch

from fsdp_core.errors import ShardingError, first_line
from fsdp_core.plugins import registry
from fsdp_core.plugins.capabilities import Capability
from fsdp_core.proving.batches import batches_of_one_size, join_batches
from fsdp_core.proving.causes import CAUSES, Cause, Variant, find_cause, find_division
from fsdp_core.proving.faults import Fault, find_fault
from fsdp_core.proving.rows_of_ranks import can_read_as_ranks, read_as_rank, read_the_same
from fsdp_core.proving.runs import STEPS, Comparison, Difference, TrainedRun, compare_runs
from fsdp_core.proving.training import Reference, train_in_one_process, train_on_rank
from fsdp_core.rehearsal.candidates import Candidate, candidates_for, option_that_keeps_gathered
from fsdp_core.rehearsal.forks import Failed, call_in_forks
from fsdp_core.rehearsal.script import CaughtFit
from fsdp_core.sharding.units.wrap_policy import repeated_blocks

__all__ = ["ACCUMULATE", "BATCHES", "RANKS", "Proof", "Row", "Verdict", "prove_fit"]

#: Real ranks of a proof.
RANKS = 2

#: Micro-batches of a rank where accumulation is tried: two stand for more.
ACCUMULATE = 2

#: Batches that a proof draws of a loader.
BATCHES = STEPS * RANKS * ACCUMULATE

#: How accumulation is called among the options of a row.
_ACCUMULATION = "accumulate_grad_batches"

Verdict: TypeAlias = Literal["same", "differs", "can't tell", "refused"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """What two runs that must agree have shown, as plain data.

    Attributes:
        what: The run that was compared, in words.
        with_what: What it was compared with, in words.
        verdict: Whether they are the same.
        words: What differs first, or why that can't be told.
        worst: The largest difference of gradients, relative to the largest element of each.
        cause: The cause's name; empty if there is none.
        remedy: What to write instead.
        strategy: The strategy's name, ``"script"`` for the object that the script builds; empty for the references.
        options: The options of this row's run.
        seconds: How long it took.
    """

    what: str
    with_what: str
    verdict: Verdict
    words: str = ""
    worst: float = 0.0
    cause: str = ""
    remedy: str = ""
    strategy: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def repeated_by(self) -> str:
        """Options of the command that repeat this row alone."""
        if not self.strategy:
            return "--only references"
        words = [f"--only {self.strategy}"]
        return " ".join(words + [f"--option '{name}={json.dumps(value)}'" for name, value in self.options.items()])


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What a proof of one fit has shown.

    Attributes:
        rows: What was compared: the references first.
        dtype: What was computed in, such as ``"fp64"``.
        not_run: The installed strategies that were not run, with why.
    """

    rows: Sequence[Row]
    dtype: str
    not_run: Mapping[str, str]

    def differences(self, accepted: Sequence[str] = ()) -> list[Row]:
        """The rows that differ, without those whose cause is accepted.

        Args:
            accepted: Names of causes.
        """
        return [row for row in self.rows if row.verdict == "differs" and row.cause not in accepted]

    @property
    def unclear(self) -> list[Row]:
        """The rows that can't tell."""
        return [row for row in self.rows if row.verdict == "can't tell"]


@dataclass(frozen=True, kw_only=True)
class _References:
    whole_batch: TrainedRun | Failed
    whole_accumulated: TrainedRun | Failed
    in_turn: TrainedRun | Failed
    in_turn_accumulated: TrainedRun | Failed
    perturbed: Sequence[tuple[TrainedRun | Failed, TrainedRun | Failed]]
    seconds: float

    @property
    def stability(self) -> list[tuple[TrainedRun, TrainedRun]]:
        """Runs, each with the same run with changed weights."""
        return [
            (run, changed)
            for run, changed in self.perturbed
            if isinstance(run, TrainedRun) and isinstance(changed, TrainedRun)
        ]

    @property
    def random(self) -> str:
        run = self.in_turn if isinstance(self.whole_batch, Failed) else self.whole_batch
        return "" if isinstance(run, Failed) else run.random


class _Prover:
    """Runs references and strategies of a fit.

    Args:
        fit: What the script trains.
        seconds: How long one run may take.
    """

    def __init__(self, fit: CaughtFit, seconds: float) -> None:
        self.fit, self._seconds = fit, seconds
        self._batches = batches_of_one_size(fit.drawn, BATCHES)
        self._whole_batches: list[Any] = []
        self.dtype = torch.float64
        self.cannot_join = ""
        try:
            self._whole_batches = [join_batches(self._batches[i : i + RANKS]) for i in range(0, BATCHES, RANKS)]
        except ShardingError as error:
            self.cannot_join = first_line(error)

    def run_references(self) -> _References:
        """The references in fp64; in fp32 if an operator does not know fp64."""
        references = self._run_references()
        if isinstance(references.whole_batch, Failed) and isinstance(references.in_turn, Failed):
            self.dtype = torch.float32
            in_single = self._run_references()
            if isinstance(in_single.whole_batch, TrainedRun) or isinstance(in_single.in_turn, TrainedRun):
                return in_single
            self.dtype = torch.float64
        return references

    def _run_references(self) -> _References:
        started = time.monotonic()
        is_manual = not self.fit.module.automatic_optimization
        not_played = Failed(words="manual optimization steps by itself, so ranks can't be played in turn")
        references: dict[str, Reference] = {}
        if not self.cannot_join:
            references["whole"] = self.reference(in_turn=False)
            references["whole_accumulated"] = self.reference(in_turn=False, accumulate=ACCUMULATE)
        if not is_manual:
            references["in_turn"] = self.reference(in_turn=True)
            references["in_turn_accumulated"] = self.reference(in_turn=True, accumulate=ACCUMULATE)
        runs = dict(zip(references, self.train(list(references.values())), strict=True))
        whole_batch = runs.get("whole", Failed(words=self.cannot_join))
        is_alone = isinstance(whole_batch, TrainedRun) and whole_batch.communicates
        if is_alone:  # with whom, if all rows are here?
            alone = [self.reference(in_turn=False, accumulate=n, is_alone=True) for n in (1, ACCUMULATE)]
            whole_batch, runs["whole_accumulated"] = self.train(alone)
        in_turn = runs.get("in_turn", not_played)
        # a rank's part may be less stable than a whole batch, as batch norms over two rows are
        bases = [(run, turn) for run, turn in ((whole_batch, False), (in_turn, True)) if isinstance(run, TrainedRun)]
        changed = self.train(
            [self.reference(in_turn=turn, is_alone=is_alone and not turn, is_perturbed=True) for _, turn in bases]
        )
        return _References(
            whole_batch=whole_batch,
            whole_accumulated=runs.get("whole_accumulated", whole_batch),
            in_turn=in_turn,
            in_turn_accumulated=runs.get("in_turn_accumulated", not_played),
            perturbed=[(run, other) for (run, _), other in zip(bases, changed, strict=True)],
            seconds=time.monotonic() - started,
        )

    def train_variants(self, variants: Sequence[Variant]) -> list[TrainedRun | Failed]:
        return self.train([self.reference(**vars(variant)) for variant in variants])

    def reference(self, *, in_turn: bool, accumulate: int = 1, **rest: Any) -> Reference:
        batches = self._batches[: STEPS * RANKS * accumulate] if in_turn else self._whole_batches[: STEPS * accumulate]
        return Reference(batches=batches, ranks=RANKS, in_turn=in_turn, accumulate=accumulate, dtype=self.dtype, **rest)

    def train(self, references: Sequence[Reference]) -> list[TrainedRun | Failed]:
        return self._call([partial(train_in_one_process, self.fit, reference) for reference in references])

    def _call(self, trainings: Sequence[Callable[[], TrainedRun]]) -> list[TrainedRun | Failed]:
        def pack(training: Callable[[], TrainedRun]) -> bytes:
            packed = io.BytesIO()
            torch.save(asdict(training()), packed)  # tensors, which must outlive the process
            return packed.getvalue()

        results = call_in_forks([partial(pack, training) for training in trainings], self._seconds)
        return [
            result
            if isinstance(result, Failed)
            else TrainedRun.from_data(torch.load(io.BytesIO(result), weights_only=True))
            for result in results
        ]

    def without_clipping(self) -> _Prover:
        """A prover of the same fit, of which nothing is clipped, in the dtype of this one."""
        keywords = {name: value for name, value in self.fit.trainer_keywords.items() if name != "gradient_clip_val"}
        prover = _Prover(replace(self.fit, trainer_keywords=keywords), self._seconds)
        prover.dtype = self.dtype
        return prover

    def run_strategy(
        self, candidate: Candidate, accumulate: int, *, observes: bool = False
    ) -> list[TrainedRun | Failed]:
        """The run as each of the ranks has seen it."""
        batches = self._batches[: STEPS * RANKS * accumulate]
        with tempfile.TemporaryDirectory(prefix="fsdp-prove-") as folder:
            trainings: list[Callable[[], TrainedRun]] = [
                partial(
                    train_on_rank,
                    self.fit,
                    candidate,
                    batches[rank::RANKS],
                    accumulate=accumulate,
                    dtype=self.dtype,
                    rank=rank,
                    store=str(Path(folder, "ranks")),
                    seconds=self._seconds,
                    observes=observes,
                )
                for rank in range(RANKS)
            ]
            return self._call(trainings)

    def read_as_ranks(self) -> list[list[str] | Failed]:
        """Digests of the batches that real ranks read."""
        with tempfile.TemporaryDirectory(prefix="fsdp-prove-") as folder:
            store = str(Path(folder, "ranks"))
            reads = [
                partial(read_as_rank, self.fit, rank=rank, ranks=RANKS, store=store, seconds=self._seconds)
                for rank in range(RANKS)
            ]
            return call_in_forks(reads, self._seconds)


def prove_fit(
    fit: CaughtFit,
    *,
    seconds: float = 120.0,
    only: str | None = None,
    options: Mapping[str, Any] | None = None,
    tell: Callable[[str], None] = lambda words: None,
) -> Proof:
    """Train a fit in every way that must agree, and compare.

    Args:
        fit: What the script trains, with :data:`BATCHES` batches.
        seconds: How long one run may take.
        only: The strategy that is tried: its name, ``"script"`` for the object that the script builds, or
            ``"references"`` for none. ``None`` for all.
        options: The options of that strategy; ``None`` for all sets that are worth a run.
        tell: Is told what is run next.

    Raises:
        ShardingError: ``only`` names nothing that can be run.
    """
    candidates, not_run = candidates_for(RANKS, fit.module, fit.trainer_keywords.get("strategy"))
    candidates = [candidate for candidate in candidates if candidate.ranks == RANKS and not candidate.options]
    if only is not None:
        candidates = _chosen(candidates, only, not_run)
    prover = _Prover(fit, seconds)
    tell("in one process")
    references = prover.run_references()
    rows: list[Row] = []
    base_runs: list[TrainedRun] = []
    for candidate in candidates:
        has_failed: list[frozenset[str]] = []
        option_sets = _option_sets(candidate, fit) if options is None else [dict(options)]
        for option_set in option_sets:
            if any(failed <= option_set.keys() for failed in has_failed):
                continue
            accumulate = int(option_set.get(_ACCUMULATION, 1))
            own = {name: value for name, value in option_set.items() if name != _ACCUMULATION}
            with_options = replace(candidate, options={**candidate.options, **own})
            tell(_code_of(with_options, accumulate))
            started = time.monotonic()
            runs = prover.run_strategy(with_options, accumulate)
            row = _row_of_strategy(prover, with_options, references, runs, accumulate)
            row = replace(
                row,
                what=_code_of(with_options, accumulate),
                strategy=_name(candidate),
                options=option_set,
                seconds=time.monotonic() - started,
            )
            if row.verdict == "refused" and not option_set:  # nothing of this strategy is proven
                row = replace(row, verdict="can't tell")
            rows.append(row)
            if row.verdict != "same":
                has_failed.append(frozenset(option_set))
            if accumulate == 1 and isinstance(runs[0], TrainedRun):
                base_runs.append(runs[0])
    rows.insert(0, _row_of_references(prover, references, base_runs))
    if only in (None, "references") and can_read_as_ranks(fit):
        tell("what ranks read")
        rows[1:1] = _rows_of_data(prover)
    return Proof(rows=rows, dtype=f"fp{prover.dtype.itemsize * 8}", not_run=not_run)


def _chosen(candidates: Sequence[Candidate], only: str, not_run: Mapping[str, str]) -> list[Candidate]:
    chosen = [candidate for candidate in candidates if _name(candidate) == only]
    if not chosen and only != "references":
        names = ", ".join(map(_name, candidates))
        why = f": {not_run[only]}" if only in not_run else ""
        raise ShardingError(f"--only {only} names nothing that can be run{why}.\nWrite one of: references, {names}.")
    return chosen


def _name(candidate: Candidate) -> str:
    """What ``--only`` calls it: ``"script"`` for the object that the script builds."""
    return candidate.strategy if candidate.as_written is None else "script"


def _option_sets(candidate: Candidate, fit: CaughtFit) -> Iterator[dict[str, Any]]:
    """Sets of options, smaller ones first: none, each by itself, and each pair."""
    axes: dict[str, Any] = {}
    if candidate.as_written is None and candidate.strategy in registry.strategies():
        info = registry.strategies()[candidate.strategy]
        axes |= option_that_keeps_gathered(info)
        if repeated_blocks(fit.module) and Capability.ACTIVATION_CHECKPOINTING in info.capabilities:
            axes["activation_checkpointing_policy"] = "every_1"
        if "data_parallel_replicate_size" in {option.name for option in info.options}:
            axes["data_parallel_replicate_size"] = RANKS
    if fit.module.automatic_optimization:
        axes[_ACCUMULATION] = ACCUMULATE
    for size in range(3):
        for names in combinations(axes, size):
            yield {name: axes[name] for name in names}


def _code_of(candidate: Candidate, accumulate: int) -> str:
    return candidate.code + (f", {_ACCUMULATION}={accumulate}" if accumulate > 1 else "")


def _row_of_strategy(
    prover: _Prover,
    candidate: Candidate,
    references: _References,
    runs: Sequence[TrainedRun | Failed],
    accumulate: int,
) -> Row:
    """How a strategy's run differs from the ranks in turn; or from the whole batch, if it is as that one."""
    row = Row(what="", with_what="ranks in turn", verdict="can't tell")
    failures = [run for run in runs if isinstance(run, Failed)]
    if failures:
        first = next((failure for failure in failures if failure.is_refusal), failures[0])
        return replace(row, verdict="refused" if first.is_refusal else "can't tell", words=first.words)
    expected = references.in_turn if accumulate == 1 else references.in_turn_accumulated
    compared = _compare_ranks(references, expected, runs)
    if compared is not None and compared[1].agrees:
        return replace(row, verdict="same", worst=compared[1].worst)
    whole_batch = references.whole_batch if accumulate == 1 else references.whole_accumulated
    with_whole = _compare_ranks(references, whole_batch, runs)
    if with_whole is not None and with_whole[1].agrees:
        return replace(row, with_what="whole batch", verdict="same", worst=with_whole[1].worst)
    if compared is None:
        assert isinstance(expected, Failed)
        return replace(row, words=f"nothing to compare with: {expected.words}")
    rank, comparison = compared
    ranks_run = runs[rank]
    if isinstance(whole_batch, TrainedRun) and whole_batch.communicates and isinstance(ranks_run, TrainedRun):
        division = find_division(whole_batch, ranks_run, RANKS)
        if division is not None:
            words = f"gradients on rank {rank} are not those of the whole batch: {division.words}"
            return replace(
                row, with_what="whole batch", verdict="differs", words=words, cause="divided", remedy=division.remedy
            )
    unclear = comparison.unclear
    if not unclear and isinstance(expected, TrainedRun) and expected.communicates:
        unclear = "the step asks the strategy to communicate, which the ranks in turn can't"
    if not unclear and references.random:
        unclear = f"the step draws random numbers by {references.random}"
    if unclear:
        return replace(row, words=unclear, worst=comparison.worst)
    assert comparison.difference is not None
    assert isinstance(expected, TrainedRun) and isinstance(runs[rank], TrainedRun)
    fault = _fault_of(prover, candidate, references, expected, runs, rank, comparison.difference, accumulate)
    if fault.name == "backend":
        observed = prover.run_strategy(candidate, accumulate, observes=True)[rank]
        if isinstance(observed, TrainedRun) and torch.finfo(observed.coarsest).eps > torch.finfo(expected.coarsest).eps:
            dtype = str(observed.coarsest).removeprefix("torch.")
            reason = f"the strategy computes in {dtype}, in which orders of addition differ"
            return replace(row, words=f"{reason} ({comparison.difference.words})", worst=comparison.worst)
    words = f"{comparison.difference.words}, on rank {rank}: {fault.words}"
    return replace(row, verdict="differs", words=words, worst=comparison.worst, cause=fault.name, remedy=fault.remedy)


def _fault_of(
    prover: _Prover,
    candidate: Candidate,
    references: _References,
    expected: TrainedRun,
    runs: Sequence[TrainedRun | Failed],
    rank: int,
    difference: Difference,
    accumulate: int,
) -> Fault:
    trained = [run for run in runs if isinstance(run, TrainedRun)]

    def train_in_turn(**how: Any) -> TrainedRun | Failed:
        return prover.train([prover.reference(in_turn=True, accumulate=accumulate, **how)])[0]

    def agrees_without_clipping() -> bool:
        if not prover.fit.trainer_keywords.get("gradient_clip_val"):
            return False
        unclipped = prover.without_clipping()
        (reference,) = unclipped.train([unclipped.reference(in_turn=True, accumulate=accumulate)])
        compared = _compare_ranks(references, reference, unclipped.run_strategy(candidate, accumulate))
        return compared is not None and compared[1].agrees

    return find_fault(
        expected,
        trained,
        rank,
        difference,
        accumulate=accumulate,
        detail=partial(train_in_turn, records_details=True),
        train_with_old_weights=partial(train_in_turn, undoes_steps=True),
        agrees_without_clipping=agrees_without_clipping,
    )


def _compare_ranks(
    references: _References, expected: TrainedRun | Failed, runs: Sequence[TrainedRun | Failed]
) -> tuple[int, Comparison] | None:
    """The rank that differs first, or rank 0, and its comparison; ``None`` if there is nothing to compare with."""
    if isinstance(expected, Failed):
        return None
    trained = [run for run in runs if not isinstance(run, Failed)]
    comparisons = [compare_runs(expected, _as_coarse_as(expected, run), references.stability) for run in trained]

    def first(rank: int) -> tuple[bool, int, bool]:
        difference = comparisons[rank].difference
        if difference is None:
            return comparisons[rank].agrees, 0, False
        return False, difference.step, difference.of == "weight"

    rank = min(range(len(comparisons)), key=first)
    return rank, comparisons[rank]


def _rows_of_data(prover: _Prover) -> list[Row]:
    """Whether ranks read different rows; nothing, if batches are too few to tell."""
    started = time.monotonic()
    digests = prover.read_as_ranks()
    row = Row(what="rows that a rank reads", with_what="other rank", verdict="same", seconds=time.monotonic() - started)
    read = [each for each in digests if not isinstance(each, Failed)]
    for failure in digests:
        if isinstance(failure, Failed):
            return [replace(row, verdict="can't tell", words=f"the loader can't be read on ranks: {failure.words}")]
    are_same = read_the_same(read)
    if are_same:
        return [
            replace(
                row,
                verdict="differs",
                words=f"{CAUSES['data']}: their first two batches are the same",
                cause="data",
                remedy="Leave use_distributed_sampler=True, or give each rank its part by a sampler of its own, or in "
                "an iterable dataset by self.trainer.global_rank.",
            )
        ]
    return [] if are_same is None else [row]


def _as_coarse_as(expected: TrainedRun, run: TrainedRun) -> TrainedRun:
    """A strategy's run, judged by what the module computes in: what the strategy rounds by itself is a difference."""
    return replace(run, coarsest=expected.coarsest)


def _row_of_references(prover: _Prover, references: _References, strategies: Sequence[TrainedRun]) -> Row:
    row = Row(what="each rank in turn", with_what="whole batch", verdict="can't tell", seconds=references.seconds)
    whole_batch, in_turn = references.whole_batch, references.in_turn
    ranks_agree = False
    if isinstance(whole_batch, TrainedRun):
        ranks_agree = any(compare_runs(whole_batch, run, references.stability).agrees for run in strategies)
    for run in (whole_batch, in_turn):
        if isinstance(run, Failed):
            return replace(row, what="real ranks", verdict="same") if ranks_agree else replace(row, words=run.words)
    assert isinstance(whole_batch, TrainedRun) and isinstance(in_turn, TrainedRun)
    comparison = compare_runs(whole_batch, in_turn, references.stability)
    if comparison.agrees:
        for name, step in in_turn.buffers.items():
            words = f"buffer {name} differs between ranks after step {step + 1}"
            remedy = "Update it from all ranks: self.all_gather(value).mean(0) is the mean over them."
            return replace(row, verdict="differs", words=words, cause="buffer", remedy=remedy, worst=comparison.worst)
        return replace(row, verdict="same", worst=comparison.worst)
    row = replace(row, worst=comparison.worst)
    if ranks_agree:  # the step communicates by itself, which one process can't play
        return replace(row, what="real ranks", verdict="same", worst=0.0)
    if comparison.unclear:
        return replace(row, words=comparison.unclear)
    if references.random:
        return replace(row, words=f"the step draws random numbers by {references.random}")
    if in_turn.communicates:
        return replace(row, words="the step asks the strategy to communicate, which the ranks in turn can't")
    assert comparison.difference is not None
    cause: Cause = find_cause(prover.fit.module, whole_batch, in_turn, comparison.difference, prover.train_variants)
    if cause.name == "batchnorm" and prover.fit.trainer_keywords.get("sync_batchnorm"):
        return replace(row, words="sync_batchnorm=True makes batch norms one over all ranks, on GPUs alone")
    words = f"{comparison.difference.words}: {cause.words}"
    return replace(row, verdict="differs", words=words, cause=cause.name, remedy=cause.remedy)
