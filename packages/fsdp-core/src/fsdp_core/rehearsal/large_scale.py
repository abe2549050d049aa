"""Rehearses one rank of many: what it communicates, by count and by formula, and what only many ranks show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from fsdp_core.checkpoint.format.file_names import Section
from fsdp_core.checkpoint.format.manifest import FileEntry
from fsdp_core.checkpoint.format.plain_data import decode
from fsdp_core.checkpoint.indexes import FirstRankSummary, Index, TensorSpec, pack_message, table_digest
from fsdp_core.checkpoint.planning import Plan, plan_save
from fsdp_core.errors import UnsupportedCapabilityError
from fsdp_core.lightning.trainer_strategy import ShardedTrainerStrategy
from fsdp_core.mesh import DATA_AXES
from fsdp_core.rehearsal.candidates import Candidate
from fsdp_core.rehearsal.collectives import Collective, CollectiveName, total_sent
from fsdp_core.rehearsal.fabric_loop import CaughtLoop, LoopStrategy
from fsdp_core.rehearsal.fit import Rehearsal, RehearsedRun, rehearse_fit
from fsdp_core.rehearsal.imagined_ranks import Exchange, ImaginedRuntime
from fsdp_core.rehearsal.known_values import Assumption
from fsdp_core.rehearsal.memory import Peak
from fsdp_core.rehearsal.step_marks import STEPS, StepMarks
from fsdp_core.rehearsal.traffic import (
    Difference,
    UnitCalls,
    UnitTraffic,
    compare_traffic,
    expected_collectives,
    traffic_by_unit,
)
from fsdp_core.sharding.plan import ShardingPlan
from fsdp_core.sharding.sharded import Sharded
from fsdp_core.state.chunks import Chunk, ChunkedTensor, chunked
from fsdp_core.state.dtypes import dtype_name
from fsdp_core.state.saved_tensor import SavedTensor
from fsdp_core.torch_private.fake_tensors import tree_leaves, tree_map_only

__all__ = ["CheckpointPlan", "RankRehearsal", "rehearse_rank"]

#: The largest number of elements that 32-bit indexes reach.
_MOST_INDEXED = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class CheckpointPlan:
    """One rank's part of a sharded checkpoint.

    Attributes:
        nbytes: The bytes that this rank writes, and reads again on as many ranks.
        boxes: The pieces of tensors that these are.
        files: The files that all ranks write, if optimizers have state on each that holds parameters.
        verified_files: How many of them each rank compares with their checksums in a load.
        message_nbytes: The bytes in which a rank tells the first one of its pieces.
    """

    nbytes: int
    boxes: int
    files: int
    verified_files: int
    message_nbytes: int


@dataclass(frozen=True, kw_only=True)
class RankRehearsal:
    """What the rehearsal of one rank of many has shown.

    Attributes:
        rank: The rank.
        ranks: The number of ranks.
        data_ranks: How many of them get different batches.
        numel: The number of the model's parameters.
        peak: The moment when most bytes were live.
        operations: The operations of a step.
        collectives: By name: calls in a step, and the bytes that this rank sends.
        units: How units communicate, by formula; empty if the formula is not known.
        unchecked: Why the formula is not known; ``None`` if it is.
        differences: Where the formula has other numbers than were counted.
        beside: The all-reduces and all-to-alls that are no unit's: calls and bytes sent.
        parameters: The number of parameters.
        empty_parameters: How many of them have no element on this rank; ``None`` if the backend does not say so.
        exchanges: The objects that ranks have gathered in host memory, with how often.
        checkpoint: This rank's part of a checkpoint.
        assumptions: What was assumed of values, with how often.
        seconds: The CPU time that it took.
    """

    rank: int
    ranks: int
    data_ranks: int
    numel: int
    peak: Peak
    operations: int
    collectives: Mapping[CollectiveName, tuple[int, int]]
    units: Sequence[UnitTraffic]
    unchecked: str | None
    differences: Sequence[Difference]
    beside: tuple[int, int]
    parameters: int
    empty_parameters: int | None
    exchanges: Counter[Exchange]
    checkpoint: CheckpointPlan
    assumptions: Mapping[Assumption, int] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def padding_ratio(self) -> float:
        """How many elements a gather of all units moves for each element of their parameters."""
        numel = sum(unit.numel for unit in self.units)
        return sum(unit.gathered_numel for unit in self.units) / numel if numel else 1.0

    @property
    def padding_nbytes(self) -> int:
        """The bytes of padding in one gather of all units."""
        padding = (u.gathered_nbytes * (u.gathered_numel - u.numel) // u.gathered_numel for u in self.units)
        return sum(padding)

    @property
    def ranks_without_parameters(self) -> int:
        """How many ranks hold no element of any unit."""
        return min((unit.ranks - unit.ranks_with_parts for unit in self.units), default=0) * (
            self.units[0].replicas if self.units else 1
        )

    def ranks_without_data(self, batches: int | None) -> int:
        """How many ranks get no batch of their own in an epoch.

        Args:
            batches: The batches of an epoch in one process; ``None`` if the loader does not say.
        """
        return 0 if batches is None else max(0, self.data_ranks - batches)

    @property
    def overflowing_units(self) -> list[str]:
        """The units whose gathers have more elements than 32-bit indexes reach."""
        return [unit.label for unit in self.units if unit.gathered_numel > _MOST_INDEXED]


def rehearse_rank(run: RehearsedRun) -> RankRehearsal:
    """Rehearse two optimizer steps, a sharded save and a load as one rank of many.

    Args:
        run: What is rehearsed. Its strategy is one of this project's.

    Raises:
        UnsupportedCapabilityError: The strategy is none that shards parameters by this project.
        Exception: As :func:`~fsdp_core.rehearsal.fit.rehearse_fit`.
    """
    watch = _WatchRank()
    callbacks = [*run.trainer_arguments.get("callbacks", ()), watch]
    rehearsal = rehearse_fit(replace(run, trainer_arguments={**run.trainer_arguments, "callbacks": callbacks}))
    return _rank_rehearsal(watch, rehearsal, run.rank, run.ranks)


def rehearse_rank_of_loop(
    loop: CaughtLoop, candidate: Candidate, rank: int, explain: Callable[[BaseException], str]
) -> RankRehearsal | str:
    """Rehearse two optimizer steps of a loop under Fabric, a sharded save and a load as one rank of many, in a fork.

    Args:
        loop: The loop.
        candidate: The strategy.
        rank: The rank that is played.
        explain: What is returned of an error.
    """
    watch = _WatchRank()

    def summarize(rehearsal: Rehearsal) -> RankRehearsal | str:
        return _rank_rehearsal(watch, rehearsal, rank, candidate.ranks)

    return loop.rehearse(candidate, rank, summarize=summarize, explain=explain, callbacks=[watch])


def _rank_rehearsal(watch: _WatchRank, rehearsal: Rehearsal, rank: int, ranks: int) -> RankRehearsal:
    facts = watch.facts
    assert facts is not None  # the fit has ended, so it has taken its steps
    counted = rehearsal.step.collectives[: facts.collectives]
    differences: list[Difference] = []
    beside: list[Collective] = []
    if facts.unchecked is None:
        differences, beside = compare_traffic(facts.expected, counted)
    plan = facts.plan
    untied = [parameter for parameter in plan.parameters.values() if parameter.tied_to is None]
    says_numels = all(parameter.local_numel is not None for parameter in untied)
    return RankRehearsal(
        rank=rank,
        ranks=ranks,
        data_ranks=facts.data_ranks,
        numel=rehearsal.numel,
        peak=rehearsal.step.peak("cpu"),
        operations=facts.operations,
        collectives=total_sent(counted),
        units=facts.units,
        unchecked=facts.unchecked,
        differences=differences,
        beside=(len(beside), sum(collective.sent for collective in beside)),
        parameters=len(untied),
        empty_parameters=sum(p.local_numel == 0 < p.numel for p in untied) if says_numels else None,
        exchanges=facts.exchanges,
        checkpoint=facts.checkpoint,
        assumptions=rehearsal.assumptions,
        seconds=rehearsal.seconds,
    )


# -- inside of the fit -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Facts:
    """What is read at the end of the last step."""

    plan: ShardingPlan
    data_ranks: int
    units: Sequence[UnitTraffic]
    unchecked: str | None
    expected: Mapping[Any, Counter[str]]
    collectives: int
    operations: int
    exchanges: Counter[Exchange]
    checkpoint: CheckpointPlan


class _WatchRank(pl.Callback):
    """Counts the calls of units in the last step, and plans a checkpoint after it."""

    def __init__(self) -> None:
        self.facts: _Facts | None = None
        self._calls: dict[str, UnitCalls] = {}
        self._batches = 0
        self._is_forward = False
        self._handles: list[Any] = []

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        sharded = _strategy_of(trainer).sharded
        for name in sharded.plan.units:
            self._handles.append(module.get_submodule(name).register_forward_hook(self._counting(name)))

    def _counting(self, name: str) -> Callable[..., None]:
        def count(module: nn.Module, args: Any, output: Any) -> None:
            if self._is_forward:  # and not where a backward pass recomputes activations
                calls = self._calls.setdefault(name, UnitCalls())
                calls.forwards += 1
                tensors = (leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor))
                calls.with_gradients += any(tensor.requires_grad for tensor in tensors)

        return count

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == STEPS - 1:
            self._is_forward = True
            self._batches += 1

    def on_before_backward(self, trainer: pl.Trainer, module: pl.LightningModule, loss: Any) -> None:
        self._is_forward = False

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step < STEPS or self.facts is not None:
            return
        for handle in self._handles:
            handle.remove()
        strategy = _strategy_of(trainer)
        step = next(callback for callback in _callbacks_of(trainer) if isinstance(callback, StepMarks)).step
        collectives, operations = len(step.collectives), step.operations
        units, unchecked = _units_of(strategy, module)
        # a common name of options; strategies without it reduce once in a step
        syncs = bool(getattr(strategy.options, "sync_each_batch", False))
        runtime = strategy.runtime
        assert isinstance(runtime, ImaginedRuntime)
        runtime.answers_for_first = True  # of an optimizer's state, the first rank tells the others what all have
        with strategy.step_methods.gradient_guard.paused():
            writers = max((unit.ranks_with_parts for unit in units), default=runtime.world_size)
            checkpoint = _plan_checkpoint(trainer, strategy.sharded, runtime, writers)
        runtime.answers_for_first = False
        self.facts = _Facts(
            plan=strategy.sharded.plan,
            data_ranks=runtime.mesh.size(DATA_AXES),
            units=units,
            unchecked=unchecked,
            expected=expected_collectives(units, self._calls, self._batches, self._batches if syncs else 1),
            collectives=collectives,
            operations=operations,
            exchanges=Counter(runtime.exchanges),
            checkpoint=checkpoint,
        )


def _callbacks_of(trainer: pl.Trainer) -> list[pl.Callback]:
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return callbacks


def _strategy_of(trainer: pl.Trainer) -> ShardedTrainerStrategy | LoopStrategy:
    strategy: Any = trainer.strategy
    if not isinstance(strategy, ShardedTrainerStrategy | LoopStrategy):
        raise UnsupportedCapabilityError(
            f"{type(strategy).__name__} is no sharded strategy of this project, so its ranks can't be rehearsed.\n"
            "Choose one by --strategy; fsdp list shows them. fsdp plan rehearses DDP as well."
        )
    return strategy


def _units_of(
    strategy: ShardedTrainerStrategy | LoopStrategy, module: nn.Module
) -> tuple[list[UnitTraffic], str | None]:
    """How units communicate by formula; or none, and why it is not known."""
    sharded, mesh = strategy.sharded, strategy.runtime.mesh
    parameters = [p for p in sharded.plan.parameters.values() if not p.is_replicated and p.tied_to is None]
    if any(parameter.local_numel is None for parameter in parameters):
        return [], "the backend does not say how it divides parameters between ranks with these options"
    ranks = mesh.size(("data_parallel", "context_parallel"))
    replicas = mesh.size(("data_parallel_replicate",))
    units = traffic_by_unit(sharded.root, module, sharded.plan, strategy.backend.precision, ranks, replicas)
    if not units and parameters and strategy.runtime.world_size > 1:
        return [], "its units are made neither by torch's fully_shard nor by FullyShardedDataParallel"
    return units, None


# -- checkpoints -------------------------------------------------------------------------------------------------------


class _NoFile:
    """The boxes of a tensor of a planned checkpoint, which has no values."""

    def read_into(self, chunk: Chunk) -> None:
        """Nothing to do: what is read has a shape and no values."""


def _plan_checkpoint(trainer: pl.Trainer, sharded: Sharded, runtime: ImaginedRuntime, writers: int) -> CheckpointPlan:
    """Plan the save of this rank, and compare what a load would find with the module and its optimizers.

    Args:
        trainer: The Trainer, whose fit has taken steps.
        sharded: Its module.
        runtime: The ranks.
        writers: How many of them hold parameters.
    """
    optimizers = trainer.optimizers
    state = {"model": sharded.model_state(), "optimizer": [sharded.optimizer_state(each) for each in optimizers]}
    state = tree_map_only((Tensor, ChunkedTensor), lambda tensor: _without_values(tensor, runtime.rank), state)
    kinds = {"model": "model"} | {f"optimizer/{index}": "optimizer" for index in range(len(optimizers))}
    aliases = {f"model/{alias}": f"model/{name}" for alias, name in sharded.aliases().items()}
    plan = plan_save(state, kinds, aliases, runtime.rank)
    _check_load(plan, sharded, optimizers)
    boxes = _boxes_of(plan)
    box_count = sum(map(len, boxes))
    sections: Counter[Section] = Counter()
    for key, tensor in plan.stored.items():
        if tensor.replica == 0:
            numels = (torch.Size(chunk.data.shape).numel() for chunk in tensor.chunks)
            sections[plan.section_of[key]] += sum(numels) * tensor.dtype.itemsize
    # each of these ranks writes a file of the model and one of its optimizers; the structure is a file of its own
    has_state = not box_count or any(optimizer.state for optimizer in optimizers)
    files = writers * (2 if has_state else 1) + 1
    specs = [TensorSpec(key, tensor.shape, dtype_name(tensor.dtype)) for key, tensor in plan.stored.items()]
    entries = {section: FileEntry(size=size, checksum=f"xxh3:{0:016x}") for section, size in sections.items() if size}
    first_rank = FirstRankSummary(table_digest(specs), None)
    message = pack_message(Index(tensors=specs, boxes=boxes, files=entries), first_rank, None)
    return CheckpointPlan(
        nbytes=sections.total(),
        boxes=box_count,
        files=files,
        verified_files=-(-files // runtime.world_size),
        message_nbytes=message.nbytes,
    )


def _without_values(tensor: Tensor | ChunkedTensor, rank: int) -> ChunkedTensor:
    """A rank's part of a tensor, in pieces that are only described: a save refuses fake tensors."""
    part = chunked(tensor, rank=rank)
    chunks = (
        Chunk(
            offsets=chunk.offsets,
            data=SavedTensor(key="", shape=tuple(chunk.data.shape), dtype=part.dtype, _boxes=_NoFile()),
        )
        for chunk in part.chunks
    )
    return ChunkedTensor(shape=part.shape, dtype=part.dtype, chunks=tuple(chunks), replica=part.replica)


def _boxes_of(plan: Plan) -> list[tuple[Any, ...]]:
    """The pieces of each tensor that this rank writes."""
    return [
        tuple(
            (tuple(chunk.offsets), tuple(chunk.data.shape))
            for chunk in (tensor.chunks if tensor.replica == 0 else ())
            if 0 not in chunk.data.shape
        )
        for tensor in plan.stored.values()
    ]


def _check_load(plan: Plan, sharded: Sharded, optimizers: Sequence[Any]) -> None:
    """Compare what a load of the planned checkpoint returns with the module and its optimizers, as a resume does."""

    def handle(tag: str, name: Any) -> Any:
        if tag == "$tensor":
            return plan.tensors[name]
        key = plan.aliases.get(name, name)
        tensor = plan.stored[key]
        if tensor.shape == () and plan.section_of[key] == "optimizer":
            return 0.0  # a number of steps, which a load would read
        return SavedTensor(key=key, shape=tensor.shape, dtype=tensor.dtype, _boxes=_NoFile())

    nest: Any = decode(plan.plain, handle)
    sharded.load_model_state(nest["model"], True, check_only=True)
    for optimizer, optimizer_state in zip(optimizers, nest["optimizer"], strict=True):
        sharded.load_optimizer_state(optimizer, optimizer_state, check_only=True)
