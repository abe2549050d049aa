"""Loopback backends with one fault each."""

from __future__ import annotations

import copy
import os
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from fsdp_core.checkpoint import fill_all
from fsdp_core.errors import OptimizerMismatchError
from fsdp_core.gradients.clipping import clip_grads_by_norm
from fsdp_core.initialization.sharded_init import detach_part, kept_as_built
from fsdp_core.lightning.features import sharded_optimizers
from fsdp_core.sharding.plan import ParameterPlan, ShardingPlan
from fsdp_core.sharding.sharded import Sharded
from fsdp_core.state.layout import FlatRange, Part
from fsdp_core.testing.loopback.backend import LoopbackBackend
from fsdp_core.testing.loopback.flat_shards import FlatShard, parameters_with_owners
from fsdp_core.testing.loopback.sharded import LoopbackSharded

# Replicas that a fault lets differ would be told before the clause that is meant for it has compared anything.
sharded_optimizers.check_same_replicas = lambda *_: None


#: By fault.
BACKENDS: dict[str, type[LoopbackBackend]] = {}

Class = TypeVar("Class", bound=type)


def backend(fault: str) -> Callable[[Class], Class]:
    """The class is the backend, the sharded root, or the shards, of the mutant with this fault."""

    def enter(cls: Class) -> Class:
        parts = {"shard_class": FlatShard, "sharded_class": LoopbackSharded}
        changed = {name: cls for name, base in parts.items() if issubclass(cls, base)}
        BACKENDS[fault] = type(cls.__name__, (LoopbackBackend,), changed) if changed else cls
        return cls

    return enter


# -- numbers -----------------------------------------------------------------------------------------------------------


@backend("gradients_not_reduced")
class NotReduced(FlatShard):
    def reduce_scatter(self, gradient: Tensor) -> Tensor:
        return self.padded(gradient).view(-1, self.length)[self.runtime.rank]


@backend("gradients_summed")
class Summed(FlatShard):
    def reduce_scatter(self, gradient: Tensor) -> Tensor:
        return super().reduce_scatter(gradient) * self.runtime.world_size


@backend("gradients_halved")
class Halved(FlatShard):
    """Right on two ranks."""

    def reduce_scatter(self, gradient: Tensor) -> Tensor:
        return super().reduce_scatter(gradient) * self.runtime.world_size / 2


@backend("gradients_off_by_one")
class OffByOne(FlatShard):
    def reduce_scatter(self, gradient: Tensor) -> Tensor:
        return super().reduce_scatter(gradient.reshape(-1).roll(1))


@backend("padding_in_norm")
class PaddedWithOnes(FlatShard):
    """The padding is never gathered, but it is part of the gradient."""

    def padded(self, whole: Tensor) -> Tensor:
        return pad(whole.reshape(-1), (0, self.length * self.runtime.world_size - self.numel), value=1.0)


class DividesByUsers(LoopbackSharded):
    """What becomes of a gradient follows from the share of the ranks that have one."""

    def divide(self, gradient: Tensor, share: float) -> Tensor | None:
        raise NotImplementedError

    def reduce(self) -> None:
        shards = self.shards
        own = torch.tensor([float(shard.gradient is not None) for shard in shards])
        for shard, share in zip(shards, self.runtime.all_reduce(own, "mean").tolist(), strict=True):
            shard.gradient = None if shard.gradient is None else self.divide(shard.gradient, share)
        super().reduce()


@backend("gradients_of_few_dropped")
class NeedsAllRanks(DividesByUsers):
    """What is not used by every rank gets no gradient."""

    def divide(self, gradient: Tensor, share: float) -> Tensor | None:
        return gradient if share == 1.0 else None


@backend("mean_over_users")
class MeanOverUsers(DividesByUsers):
    """A gradient is the mean over those ranks that have one, and not over all."""

    def divide(self, gradient: Tensor, share: float) -> Tensor | None:
        return gradient / share


@backend("evaluation_forgets_micro_batches")
class ForgetsWhenEvaluated(LoopbackSharded):
    """A forward pass without gradients gives up what earlier micro-batches have left to be reduced."""

    def gather(self) -> None:
        if not torch.is_grad_enabled():
            for shard in self.shards:
                shard.gradient = None
        super().gather()


@backend("unused_zeroed")
class ZerosForUnused(LoopbackSharded):
    """What no rank has used gets a gradient of zeros, on which weight decay acts."""

    def reduce(self) -> None:
        for shard in self.shards:
            if shard.gradient is None and shard.local.requires_grad:
                shard.gradient = shard.local.new_zeros(shard.shape)
        super().reduce()


@backend("second_backward_dropped")
class KnowsLastForward(FlatShard):
    """Only what was gathered last gives its gradient on."""

    def take_gradient(self, gathered: Tensor) -> None:
        if gathered is self.gathered:
            super().take_gradient(gathered)


class LastCall(FlatShard):
    """Of several gradients in one backward pass, the last replaces the others."""

    earlier: Tensor | None = None
    backward_pass = -1

    def take_gradient(self, gathered: Tensor) -> None:
        this = torch._C._current_graph_task_id()
        if this != self.backward_pass:
            self.backward_pass, self.earlier = this, self.gradient
        self.gradient = self.earlier
        super().take_gradient(gathered)


@backend("call_overwrites")
class GathersEachCall(LoopbackBackend):
    """Each call of a module has parameters of its own, of which those of the first call count."""

    shard_class = LastCall

    def shard_module(self, module: nn.Module, plan: ShardingPlan) -> LoopbackSharded:
        sharded = super().shard_module(module, plan)
        for one in module.modules():
            own = [shard for shard in sharded.shards if one is not module and shard.owners[0][0] is one]
            one.register_forward_pre_hook(lambda _, __, own=own: self._anew(sharded, own))
        return sharded

    def _anew(self, sharded: LoopbackSharded, shards: list[FlatShard]) -> None:
        for shard in shards:
            if len(shard.owners) == 1:
                shard.gathered = None
        sharded.gather()


@backend("decided_in_forward")
class DecidesInForward(LoopbackSharded):
    """Whether a backward pass reduces was decided when its forward pass began."""

    syncs = synced = True

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.syncs = False
        try:
            yield
        finally:
            self.syncs = True

    def gather(self) -> None:
        self.synced = self.syncs
        super().gather()

    def reduce(self) -> None:
        if self.synced:
            super().reduce()


@backend("sums_in_half")
class SumsInHalf(FlatShard):
    """Gradients are added up in the dtype that is computed in."""

    def take_gradient(self, gathered: Tensor) -> None:
        super().take_gradient(gathered)
        assert self.gradient is not None
        self.gradient = self.gradient.bfloat16().float()


@backend("buffers_of_own")
class OwnBuffers(LoopbackBackend):
    """Buffers that are not saved are each rank's own."""

    def shard_module(self, module: nn.Module, plan: ShardingPlan) -> LoopbackSharded:
        own = {
            f"{prefix}.{name}".lstrip("."): one.get_buffer(name).clone()
            for prefix, one in module.named_modules()
            for name in one._non_persistent_buffers_set
        }
        sharded = super().shard_module(module, plan)
        for name, buffer in own.items():
            if not buffer.is_meta:
                module.get_buffer(name).copy_(buffer)
        return sharded


@backend("ranks_seeded_alike")
class SeedsRanks(LoopbackBackend):
    """Sharding leaves all ranks with one seed, so that they drop out the same elements."""

    def shard_module(self, module: nn.Module, plan: ShardingPlan) -> LoopbackSharded:
        sharded = super().shard_module(module, plan)
        torch.manual_seed(0)
        return sharded


@backend("tail_truncated")
class Truncated(FlatShard):
    """Elements that the ranks don't divide are left where they were, and forgotten."""

    def __init__(self, names: Any, parameter: nn.Parameter, owners: Any, runtime: Any) -> None:
        count = parameter.numel() // runtime.world_size * runtime.world_size
        self.tail = parameter.detach().reshape(-1)[count:].clone()
        super().__init__(names, parameter, owners, runtime)

    def all_gather(self) -> Tensor:
        flat = super().all_gather().reshape(-1)
        return torch.cat([flat[: self.numel - len(self.tail)], self.tail]).view(self.shape)


@backend("parameters_stale")
class Stale(FlatShard):
    """What was gathered once is used forever."""

    once: Tensor | None = None

    def all_gather(self) -> Tensor:
        if self.once is None:
            self.once = super().all_gather()
        return self.once.clone()


@backend("frozen_trained")
class Unfreezing(LoopbackBackend):
    def shard(self, module: nn.Module, plan: ShardingPlan | None = None) -> Sharded:
        sharded: Any = super().shard(module, plan)
        for shard in sharded.shards:
            shard.local.requires_grad_(True)
        return sharded


@backend("unfreezing_lost")
class FreezesAsEvaluated(LoopbackSharded):
    """After an evaluation, what is gathered requires gradients as it did then."""

    frozen: tuple[FlatShard, ...] = ()

    def gather(self) -> None:
        super().gather()
        if not torch.is_grad_enabled():
            self.frozen = tuple(shard for shard in self.shards if not shard.local.requires_grad)
        for shard in self.frozen:
            assert shard.gathered is not None
            shard.gathered.requires_grad_(False)


def _untie(module: nn.Module) -> None:
    for parameter, _, owners in list(parameters_with_owners(module)):
        for owner, name in owners[1:]:
            owner._parameters[name] = nn.Parameter(parameter.detach().clone())


@backend("plan_unties")
class UntiesWhilePlanning(LoopbackBackend):
    def units(self, module: nn.Module) -> list[nn.Module]:
        _untie(module)
        return []


@backend("tied_untied")
class Unties(LoopbackBackend):
    def shard_module(self, module: nn.Module, plan: ShardingPlan) -> LoopbackSharded:
        _untie(module)
        return super().shard_module(module, plan)


@backend("plan_miscounts")
class CountsPadding(LoopbackBackend):
    def local_numels(self, parameters: Sequence[ParameterPlan]) -> list[int]:
        return [-(-parameter.numel // self.runtime.world_size) for parameter in parameters]


@backend("rank_0_not_heard")
class OwnValues(LoopbackBackend):
    def shard_module(self, module: nn.Module, plan: ShardingPlan) -> LoopbackSharded:
        own = {p: p.detach().clone() for p in module.parameters() if p.ndim}
        written = list(own.values())
        sharded = super().shard_module(module, plan)
        for shard, value in zip(sharded.shards, written, strict=True):
            shard.local.data = shard.padded(value).view(-1, shard.length)[self.runtime.rank].clone()
        return sharded


@backend("left_gathered")
class LeftGathered(LoopbackSharded):
    """Parameters are whole until a backward pass, which may never come."""

    def reshard(self) -> None:
        if any(shard.local.grad is not None for shard in self.shards):
            super().reshard()


@backend("memory_kept")
class KeepsMemory(FlatShard):
    """The shard is a part of the memory that the whole parameter had."""

    def __init__(self, names: Any, parameter: nn.Parameter, owners: Any, runtime: Any) -> None:
        whole = self.kept = parameter.detach()
        super().__init__(names, parameter, owners, runtime)
        self.local.data = self.padded(whole).view(runtime.world_size, self.length)[runtime.rank]


@backend("parts_not_put_together")
class PartsOfItsOwn(LoopbackBackend):
    """A layer that is marked as it is built has the elements that rank 0 keeps, and zeros."""

    def wrap_context(self) -> AbstractContextManager[Any]:
        return kept_as_built(vars(self).get("runtime"))

    def shard_module(self, module: nn.Module, plan: ShardingPlan) -> LoopbackSharded:
        for parameter in module.parameters():
            part = detach_part(parameter)
            if part is not None:
                parameter.data = part.to_full_shape().nan_to_num()
        return super().shard_module(module, plan)


# -- what is not done --------------------------------------------------------------------------------------------------

#: By fault: a method that does nothing.
IGNORED: dict[str, tuple[type[LoopbackBackend | LoopbackSharded], str]] = {
    "optimizer_stale": (LoopbackBackend, "rebind_optimizers"),
    "clip_value_ignored": (LoopbackSharded, "clip_value"),
    "zero_grad_forgets_shards_alone": (LoopbackSharded, "forget_unreduced"),
    # what is gathered when an optimizer is toggled inside the forward pass is trained, or not, as it was before
    "requires_grad_not_followed": (LoopbackSharded, "follow_requires_grad"),
    # what a step writes to what is gathered is lost without a word
    "writes_unwatched": (LoopbackSharded, "watch_writes"),
    # nobody tells it of an exception under Fabric, and it does not look
    "interruption_unnoticed": (LoopbackSharded, "mend_interrupted"),
    "gradients_not_restored": (LoopbackSharded, "restore_gradients"),
}
for _fault, (_class, _method) in IGNORED.items():
    backend(_fault)(type(_class)("Ignores", (_class,), {_method: lambda *_, **__: None}))


# -- optimizers --------------------------------------------------------------------------------------------------------


@backend("optimizer_foreign")
class TakesForeign(LoopbackBackend):
    def rebind_optimizers(self, optimizers: Iterable[torch.optim.Optimizer], roots: Any) -> None:
        with suppress(OptimizerMismatchError):
            super().rebind_optimizers(optimizers, roots)


@backend("group_options_lost")
class OneOfAllGroups(LoopbackBackend):
    """All param groups have the options of the first."""

    def rebind_optimizers(self, optimizers: Iterable[torch.optim.Optimizer], roots: Any) -> None:
        optimizers = list(optimizers)
        super().rebind_optimizers(optimizers, roots)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group.update({key: value for key, value in optimizer.param_groups[0].items() if key != "params"})


# -- clipping ----------------------------------------------------------------------------------------------------------


def _local_norm(
    of: LoopbackSharded, parameters: Iterable[Tensor], max_norm: float, norm_type: float, error: bool
) -> Tensor:
    return clip_grads_by_norm(
        parameters,
        max_norm,
        runtime=of.runtime,
        is_sharded=lambda _: False,
        norm_type=norm_type,
        error_if_nonfinite=error,
    )


@backend("norm_local")
class LocalNorm(LoopbackSharded):
    def clip_norm(self, parameters: Any, max_norm: Any, norm_type: Any = 2.0, error_if_nonfinite: Any = False) -> Any:
        return _local_norm(self, parameters, max_norm, norm_type, error_if_nonfinite)


@backend("infinite_norm_local")
class LocalInfiniteNorm(LoopbackSharded):
    def clip_norm(self, parameters: Any, max_norm: Any, norm_type: Any = 2.0, error_if_nonfinite: Any = False) -> Any:
        if norm_type == float("inf"):
            return _local_norm(self, parameters, max_norm, norm_type, error_if_nonfinite)
        return super().clip_norm(parameters, max_norm, norm_type, error_if_nonfinite)


@backend("norm_of_other_order")
class AlwaysRootOfSquares(LoopbackSharded):
    """The norms of parameters are combined as if their order were 2."""

    def clip_norm(self, parameters: Any, max_norm: Any, norm_type: Any = 2.0, error_if_nonfinite: Any = False) -> Any:
        if norm_type == float("inf"):
            return super().clip_norm(parameters, max_norm, norm_type, error_if_nonfinite)
        parameters = [p for p in parameters if p.grad is not None]
        norms = [super(AlwaysRootOfSquares, self).clip_norm([p], 1e9, norm_type) for p in parameters]
        total = torch.stack(norms).norm()
        for parameter in parameters:
            parameter.grad.mul_(torch.clamp(max_norm / (total + 1e-6), max=1.0))
        return total


@backend("norm_of_all")
class NormOfAll(LoopbackSharded):
    """Clips by the norm of all that the module has, also of what another optimizer holds."""

    def clip_norm(self, parameters: Any, max_norm: Any, norm_type: Any = 2.0, error_if_nonfinite: Any = False) -> Any:
        return super().clip_norm(list(self.layout()), max_norm, norm_type, error_if_nonfinite)


@backend("norm_nonfinite")
class NeverRaises(LoopbackSharded):
    def clip_norm(self, parameters: Any, max_norm: Any, norm_type: Any = 2.0, error_if_nonfinite: Any = False) -> Any:
        return super().clip_norm(parameters, max_norm, norm_type)


# -- accumulation ------------------------------------------------------------------------------------------------------


@backend("micro_batches_twice")
class CountsTwice(LoopbackSharded):
    """Reduces every micro-batch, and keeps what it has reduced for the last one too."""

    accumulating = False

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.accumulating = True
        yield
        self.accumulating = False

    def reduce(self) -> None:
        kept = [shard.gradient for shard in self.shards]
        super().reduce()
        if self.accumulating:
            for shard, own in zip(self.shards, kept, strict=True):
                shard.gradient = own


@backend("micro_batches_lost")
class DropsMicroBatches(LoopbackSharded):
    @contextmanager
    def no_sync(self) -> Iterator[None]:
        with super().no_sync():
            yield
        for shard in self.shards:
            shard.gradient = None


@backend("sync_left_off")
class LeavesSyncOff(LoopbackSharded):
    @contextmanager
    def no_sync(self) -> Iterator[None]:
        context = super().no_sync()
        context.__enter__()
        self.kept = context  # else it would end with the last reference to it
        yield


@backend("sync_left_off_by_exceptions")
class WithoutFinally(LoopbackSharded):
    @contextmanager
    def no_sync(self) -> Iterator[None]:
        context = self.kept = super().no_sync()
        context.__enter__()
        yield
        context.__exit__(None, None, None)


@backend("no_sync_ignored")
class AlwaysSyncs(LoopbackSharded):
    @contextmanager
    def no_sync(self) -> Iterator[None]:
        yield


# -- loops -------------------------------------------------------------------------------------------------------------


@backend("stale_in_forward")
class StaleInForward(LoopbackSharded):
    """After a step that is taken inside the forward pass, the values from before it are used."""

    def resume_forward(self) -> None:
        for shard in self.shards:
            if shard.gathered is None and shard in self.before:
                shard.gathered = self.before[shard]
                shard.give_to_owners(shard.gathered)

    def reshard(self) -> None:
        self.before = {shard: shard.gathered for shard in self.shards if shard.gathered is not None}
        super().reshard()


@backend("gradients_hidden_in_step")
class HidesGradients(LoopbackSharded):
    """What is gathered after a backward pass inside the forward pass has no gradient, and does not say so."""

    def resume_forward(self) -> None:
        super().resume_forward()
        self.suspend_forward()


@backend("interrupted_counts")
class NotReset(LoopbackSharded):
    """Gradients of a backward pass that an exception has ended are part of the next."""

    def reset(self) -> None:
        self.reshard()


@backend("calls_drop_gradients")
class GivesUpGradients(LoopbackSharded):
    """An exception in a call outside of a step costs the gradients that wait for theirs."""

    def abandon_forward(self) -> None:
        self.reset()
        for parameter in self.layout():
            parameter.grad = None


def _copied_if_container(given: Any) -> Any:
    return copy.copy(given) if isinstance(given, list | dict) else given


@backend("containers_copied")
class CopiesContainers(LoopbackBackend):
    """Units are called with copies of the lists and dictionaries that they are given."""

    def shard_module(self, module: nn.Module, plan: ShardingPlan) -> LoopbackSharded:
        for unit in module.modules():
            if unit is not module:
                unit.register_forward_pre_hook(lambda _, args: tuple(map(_copied_if_container, args)))
        return super().shard_module(module, plan)


# -- checkpoints -------------------------------------------------------------------------------------------------------


@backend("state_off_by_one")
class DescribedOffByOne(FlatShard):
    """Trains as it should, and says of its elements that they are the next ones."""

    @property
    def part(self) -> Part:
        part = super().part
        assert part.range is not None
        start, length = part.range.start, part.range.length
        last = start + length == self.numel
        run = FlatRange(offset=0, start=start if last else start + 1, length=length)
        return Part(name=part.name, shape=part.shape, range=run)


@backend("names_wrapped")
class WrappedNames(LoopbackSharded):
    """A wrapper's part is in the names."""

    def model_state(self) -> dict[str, Any]:
        return {f"wrapped.{name}": value for name, value in super().model_state().items()}


@backend("frozen_as_built")
class FrozenAsBuilt(LoopbackSharded):
    """Loads nothing into frozen parameters, since they were not trained."""

    def load_model_state(self, state: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        kept = {parameter: parameter.detach().clone() for parameter in self.layout() if not parameter.requires_grad}
        super().load_model_state(state, *args, **kwargs)
        for parameter, value in kept.items():
            parameter.data.copy_(value)


@backend("buffer_not_saved")
class WithoutBuffers(LoopbackSharded):
    def model_state(self) -> dict[str, Any]:
        buffers = {name for name, _ in self.root.named_buffers()}
        return {name: value for name, value in super().model_state().items() if name not in buffers}


@backend("buffers_saved_of_last_rank")
class BuffersOfLastRank(LoopbackSharded):
    def model_state(self) -> dict[str, Any]:
        state = super().model_state()
        for name, buffer in self.root.named_buffers():
            if name in state:
                state[name] = self.runtime.broadcast(buffer.clone(), self.runtime.world_size - 1)
        return state

    def adopt_model_state(self, state: Mapping[str, Any]) -> None:
        super().adopt_model_state(state)
        for name, buffer in self.root.named_buffers():
            if name in state:
                buffer.copy_(state[name])


@backend("buffer_not_restored")
class KeepsBuffers(LoopbackSharded):
    def load_model_state(self, state: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        kept = {name: buffer.clone() for name, buffer in self.root.named_buffers()}
        super().load_model_state(state, *args, **kwargs)
        for name, buffer in self.root.named_buffers():
            buffer.copy_(kept[name])


@backend("moment_not_saved")
class WithoutMomentum(LoopbackSharded):
    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        state = super().optimizer_state(optimizer)
        kept = {name: {k: v for k, v in of.items() if k != "momentum_buffer"} for name, of in state["state"].items()}
        return {**state, "state": kept}


@backend("options_not_restored")
class KeepsOptions(LoopbackSharded):
    """Of the options of param groups, the learning rate alone is the checkpoint's."""

    def load_optimizer_state(self, optimizer: Any, state: Any, *, check_only: bool = False) -> None:
        kept = [{k: v for k, v in group.items() if k not in ("params", "lr")} for group in optimizer.param_groups]
        super().load_optimizer_state(optimizer, state, check_only=check_only)
        for group, options in zip(optimizer.param_groups, kept, strict=True):
            group.update(options)


@backend("moments_of_frozen_dropped")
class DropsFrozen(LoopbackSharded):
    def load_optimizer_state(self, optimizer: Any, state: Any, *, check_only: bool = False) -> None:
        super().load_optimizer_state(optimizer, state, check_only=check_only)
        for parameter in [p for p in optimizer.state if not p.requires_grad and not check_only]:
            del optimizer.state[parameter]


@backend("late_groups_left_alone")
class OptimizersAlone(LoopbackSharded):
    """Restores what an optimizer holds when a checkpoint is loaded, and nothing that it is given later."""

    def load_optimizer_state(self, optimizer: Any, state: Any, *, check_only: bool = False) -> None:
        restored = vars(self).setdefault("restored", set())
        if id(optimizer) not in restored:
            super().load_optimizer_state(optimizer, state, check_only=check_only)
        if not check_only:
            restored.add(id(optimizer))


class LoadedBeside(FlatShard):
    """Computes with what was loaded, beside what is trained."""

    loaded: Tensor | None = None

    def all_gather(self) -> Tensor:
        if self.loaded is None:
            return super().all_gather()
        return self.runtime.all_gather(self.loaded).reshape(-1)[: self.numel].view(self.shape)


class SteppedBeside(LoopbackSharded):
    def load_model_state(self, state: Any, strict: bool = True, *, check_only: bool = False) -> None:
        before = [shard.local.detach().clone() for shard in self.shards]
        super().load_model_state(state, strict, check_only=check_only)
        for shard, kept in zip(self.shards, before, strict=True):
            if not check_only:
                shard.loaded = shard.local.detach().clone()
                shard.local.data.copy_(kept)

    def load_optimizer_state(self, optimizer: Any, state: Any, *, check_only: bool = False) -> None:
        super().load_optimizer_state(optimizer, state, check_only=check_only)
        for shard in self.shards:
            if shard.loaded is not None:
                shard.local.data.copy_(shard.loaded)
                shard.loaded = None


@backend("weights_loaded_beside_optimizer")
class TrainsWhatWasThere(LoopbackBackend):
    """Weights that are loaded without an optimizer's state are computed with until the first step, and then gone."""

    shard_class = LoadedBeside
    sharded_class = SteppedBeside

    def rebind_optimizers(self, optimizers: Iterable[torch.optim.Optimizer], roots: Any) -> None:
        optimizers, roots = list(optimizers), list(roots)
        super().rebind_optimizers(optimizers, roots)
        for optimizer in optimizers:
            optimizer.register_step_post_hook(lambda *_: self._forget(roots))

    def _forget(self, roots: Any) -> None:
        for shard in [shard for root in roots for shard in root.shards]:
            shard.loaded = None


@backend("moments_by_position")
class ByPosition(LoopbackSharded):
    """As torch's own optimizers, whose parameters have numbers and no names."""

    def load_optimizer_state(self, optimizer: Any, state: Any, *, check_only: bool = False) -> None:
        now = self.optimizer_state(optimizer)
        held = [name for group in now["param_groups"] for name in group["params"]]
        saved = [name for group in state["param_groups"] for name in group["params"]]
        if len(held) == len(saved):
            renamed = dict(zip(saved, held, strict=True))
            groups = [{**g, "params": [renamed[name] for name in g["params"]]} for g in state["param_groups"]]
            state = {"state": {renamed[name]: of for name, of in state["state"].items()}, "param_groups": groups}
        super().load_optimizer_state(optimizer, state, check_only=check_only)


@backend("saved_group_divided")
class DividesGroups(LoopbackSharded):
    """Every param group gets the settings of the one that its parameters were saved in."""

    def load_optimizer_state(self, optimizer: Any, state: Any, *, check_only: bool = False) -> None:
        saved = {name: group for group in state["param_groups"] for name in group["params"]}
        now = self.optimizer_state(optimizer)["param_groups"]
        groups = [{**saved[group["params"][0]], "params": group["params"]} for group in now]
        super().load_optimizer_state(optimizer, {**state, "param_groups": groups}, check_only=check_only)


@backend("strict_ignored")
class NeverStrict(LoopbackSharded):
    def load_model_state(self, state: Mapping[str, Any], strict: bool = True, *, check_only: bool = False) -> None:
        super().load_model_state(state, False, check_only=check_only)


@backend("changed_before_check")
class LoadsThenChecks(LoopbackSharded):
    def load_model_state(self, state: Mapping[str, Any], strict: bool = True, *, check_only: bool = False) -> None:
        live = self.model_state()
        fits = {name: value for name, value in state.items() if name in live and value.shape == live[name].shape}
        fill_all({name: live[name] for name in fits}, fits)
        super().load_model_state(state, strict, check_only=check_only)


@backend("terms_forgotten")
class WithoutTerms(LoopbackBackend):
    """Goes on with a sharded module whatever it is asked for."""

    def sharding_config(self) -> dict[str, Any]:
        return dict.fromkeys(super().sharding_config())


# -- leftovers ---------------------------------------------------------------------------------------------------------


def _leave_file(_: nn.Module) -> None:
    with tempfile.NamedTemporaryFile(delete=False) as file:
        file.write(b"a cache of its own")


_kept_modules: list[nn.Module] = []

#: By fault: what sharding a module leaves behind.
LEFT_BEHIND: dict[str, Callable[[nn.Module], object]] = {
    "group_left_open": lambda module: torch.distributed.new_group(),
    "thread_left_running": lambda module: threading.Thread(target=threading.Event().wait, daemon=True).start(),
    "variable_left_set": lambda module: os.environ.update(LOOPBACK="1"),
    "file_left_behind": _leave_file,
    "module_kept": _kept_modules.append,
}


def _leaving(leave: Callable[[nn.Module], object]) -> type[LoopbackBackend]:
    class Leaves(LoopbackBackend):
        def shard(self, module: nn.Module, plan: ShardingPlan | None = None) -> Sharded:
            leave(module)
            return super().shard(module, plan)

    return Leaves


BACKENDS |= {fault: _leaving(leave) for fault, leave in LEFT_BEHIND.items()}


# -- what the plugin says ----------------------------------------------------------------------------------------------


@backend("signature_differs")
class OtherSignature(LoopbackSharded):
    def clip_value(self, parameters: Iterable[Tensor], limit: float) -> None:
        super().clip_value(parameters, limit)


@backend("accelerator_unclaimed")
class RunsElsewhereToo(LoopbackBackend):
    accelerators = ("cuda", "cpu")
