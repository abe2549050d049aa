"""Loopback backends with one fault each."""

from __future__ import annotations

import os
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from fsdp_core.checkpoint import fill_all
from fsdp_core.errors import OptimizerMismatchError
from fsdp_core.gradients.clipping import clip_grads_by_norm
from fsdp_core.initialization.sharded_init import kept_as_built, let_go_of
from fsdp_core.state.layout import FlatRange, Part
from fsdp_core.testing.loopback.backend import LoopbackBackend, shards_of
from fsdp_core.testing.loopback.flat_shards import FlatShard, places_of

#: By fault.
BACKENDS: dict[str, type[LoopbackBackend]] = {}

Class = TypeVar("Class", bound=type)


def backend(fault: str) -> Callable[[Class], Class]:
    """The class is the backend, or the shards, of the mutant with this fault."""

    def enter(cls: Class) -> Class:
        is_shard = issubclass(cls, FlatShard)
        BACKENDS[fault] = type(cls.__name__, (LoopbackBackend,), {"shard_class": cls}) if is_shard else cls
        return cls

    return enter


# -- numbers -----------------------------------------------------------------------------------------------------------


@backend("gradients_not_reduced")
class NotReduced(FlatShard):
    def reduced(self, gradient: Tensor) -> Tensor:
        return self.padded(gradient).view(-1, self.length)[self.runtime.rank]


@backend("gradients_summed")
class Summed(FlatShard):
    def reduced(self, gradient: Tensor) -> Tensor:
        return super().reduced(gradient) * self.runtime.world_size


@backend("gradients_halved")
class Halved(FlatShard):
    """Right on two ranks."""

    def reduced(self, gradient: Tensor) -> Tensor:
        return super().reduced(gradient) * self.runtime.world_size / 2


@backend("gradients_off_by_one")
class OffByOne(FlatShard):
    def reduced(self, gradient: Tensor) -> Tensor:
        return super().reduced(gradient.reshape(-1).roll(1))


@backend("padding_in_norm")
class PaddedWithOnes(FlatShard):
    """The padding is never gathered, but it is part of the gradient."""

    def padded(self, whole: Tensor) -> Tensor:
        return pad(whole.reshape(-1), (0, self.length * self.runtime.world_size - self.numel), value=1.0)


@backend("gradients_of_few_dropped")
class NeedsAllRanks(LoopbackBackend):
    """What is not used by every rank gets no gradient."""

    def reduce(self, root: nn.Module) -> None:
        shards = shards_of(root)
        own = torch.tensor([float(shard.own is not None) for shard in shards])
        for shard, on_all in zip(shards, self.runtime.all_reduce(own, "min").tolist(), strict=True):
            shard.own = shard.own if on_all else None
        super().reduce(root)


@backend("mean_over_users")
class MeanOverUsers(LoopbackBackend):
    """A gradient is the mean over those ranks that have one, and not over all."""

    def reduce(self, root: nn.Module) -> None:
        shards = shards_of(root)
        own = torch.tensor([float(shard.own is not None) for shard in shards])
        for shard, share in zip(shards, self.runtime.all_reduce(own, "mean").tolist(), strict=True):
            shard.own = None if shard.own is None else shard.own / share
        super().reduce(root)


@backend("unused_zeroed")
class ZerosForUnused(LoopbackBackend):
    """What no rank has used gets a gradient of zeros, on which weight decay acts."""

    def reduce(self, root: nn.Module) -> None:
        for shard in shards_of(root):
            if shard.own is None and shard.held.requires_grad:
                shard.own = shard.held.new_zeros(shard.shape)
        super().reduce(root)


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
            self.backward_pass, self.earlier = this, self.own
        self.own = self.earlier
        super().take_gradient(gathered)


@backend("call_overwrites")
class GathersEachCall(LoopbackBackend):
    """Each call of a module has parameters of its own, of which those of the first call count."""

    shard_class = LastCall

    def shard(self, module: nn.Module) -> nn.Module:
        fresh = not self.is_sharded(module)
        module = super().shard(module)
        for one in module.modules() if fresh else ():
            own = [shard for shard in shards_of(module) if one is not module and shard.places[0][0] is one]
            one.register_forward_pre_hook(lambda _, __, own=own: self._anew(module, own))
        return module

    def _anew(self, root: nn.Module, shards: list[FlatShard]) -> None:
        for shard in shards:
            if len(shard.places) == 1:
                shard.gathered = None
        self.gather(root)


@backend("decided_in_forward")
class DecidesInForward(LoopbackBackend):
    """Whether a backward pass reduces was decided when its forward pass began."""

    syncs = synced = True

    @contextmanager
    def no_sync(self, module: nn.Module) -> Iterator[None]:
        self.syncs = False
        try:
            yield
        finally:
            self.syncs = True

    def gather(self, root: nn.Module) -> None:
        self.synced = self.syncs
        super().gather(root)

    def reduce(self, root: nn.Module) -> None:
        if self.synced:
            super().reduce(root)


@backend("sums_in_half")
class SumsInHalf(FlatShard):
    """Gradients are added up in the dtype that is computed in."""

    def take_gradient(self, gathered: Tensor) -> None:
        super().take_gradient(gathered)
        assert self.own is not None
        self.own = self.own.bfloat16().float()


@backend("buffers_of_own")
class OwnBuffers(LoopbackBackend):
    """Buffers that are not saved are each rank's own."""

    def shard(self, module: nn.Module) -> nn.Module:
        own = {
            f"{prefix}.{name}".lstrip("."): one.get_buffer(name).clone()
            for prefix, one in module.named_modules()
            for name in one._non_persistent_buffers_set
        }
        module = super().shard(module)
        for name, buffer in own.items():
            if not buffer.is_meta:
                module.get_buffer(name).copy_(buffer)
        return module


@backend("tail_truncated")
class Truncated(FlatShard):
    """Elements that the ranks don't divide are left where they were, and forgotten."""

    def __init__(self, names: Any, parameter: nn.Parameter, places: Any, runtime: Any) -> None:
        count = parameter.numel() // runtime.world_size * runtime.world_size
        self.tail = parameter.detach().reshape(-1)[count:].clone()
        super().__init__(names, parameter, places, runtime)

    def whole(self) -> Tensor:
        flat = super().whole().reshape(-1)
        return torch.cat([flat[: self.numel - len(self.tail)], self.tail]).view(self.shape)


@backend("parameters_stale")
class Stale(FlatShard):
    """What was gathered once is used forever."""

    once: Tensor | None = None

    def whole(self) -> Tensor:
        if self.once is None:
            self.once = super().whole()
        return self.once.clone()


@backend("frozen_trained")
class Unfreezing(LoopbackBackend):
    def shard(self, module: nn.Module) -> nn.Module:
        module = super().shard(module)
        for shard in shards_of(module):
            shard.held.requires_grad_(True)
        return module


@backend("unfreezing_lost")
class FreezesAsEvaluated(LoopbackBackend):
    """After an evaluation, what is gathered requires gradients as it did then."""

    def shard(self, module: nn.Module) -> nn.Module:
        module = super().shard(module)
        self.frozen: list[FlatShard] = []
        return module

    def gather(self, root: nn.Module) -> None:
        super().gather(root)
        if not torch.is_grad_enabled():
            self.frozen = [shard for shard in shards_of(root) if not shard.held.requires_grad]
        for shard in self.frozen:
            assert shard.gathered is not None
            shard.gathered.requires_grad_(False)


@backend("tied_untied")
class Untying(LoopbackBackend):
    def shard(self, module: nn.Module) -> nn.Module:
        if not self.is_sharded(module):
            for parameter, _, places in list(places_of(module)):
                for owner, name in places[1:]:
                    owner._parameters[name] = nn.Parameter(parameter.detach().clone())
        return super().shard(module)


@backend("rank_0_not_heard")
class OwnValues(LoopbackBackend):
    def shard(self, module: nn.Module) -> nn.Module:
        own = {p: p.detach().clone() for p in module.parameters() if p.ndim}
        written = list(own.values())
        fresh = not self.is_sharded(module)
        module = super().shard(module)
        if fresh:
            for shard, value in zip(shards_of(module), written, strict=True):
                shard.held.data = shard.padded(value).view(-1, shard.length)[self.runtime.rank].clone()
        return module


@backend("left_gathered")
class LeftGathered(LoopbackBackend):
    """Parameters are whole until a backward pass, which may never come."""

    def reshard(self, module: nn.Module) -> None:
        if any(shard.held.grad is not None for shard in shards_of(module)):
            super().reshard(module)


@backend("memory_kept")
class KeepsMemory(FlatShard):
    """The shard is a part of the memory that the whole parameter had."""

    def __init__(self, names: Any, parameter: nn.Parameter, places: Any, runtime: Any) -> None:
        whole = self.kept = parameter.detach()
        super().__init__(names, parameter, places, runtime)
        self.held.data = self.padded(whole).view(runtime.world_size, self.length)[runtime.rank]


@backend("parts_not_put_together")
class PartsOfItsOwn(LoopbackBackend):
    """A layer that is marked as it is built has the elements that rank 0 keeps, and zeros."""

    def wrap_context(self) -> AbstractContextManager[Any]:
        return kept_as_built(vars(self).get("runtime"))

    def shard(self, module: nn.Module) -> nn.Module:
        for parameter in module.parameters():
            part = let_go_of(parameter)
            if part is not None:
                parameter.data = part.opened().nan_to_num()
        return super().shard(module)


# -- optimizers --------------------------------------------------------------------------------------------------------


@backend("optimizer_stale")
class NotRepointing(LoopbackBackend):
    def repoint(self, optimizers: Iterable[torch.optim.Optimizer], modules: Any) -> None:
        pass


@backend("optimizer_foreign")
class TakesForeign(LoopbackBackend):
    def repoint(self, optimizers: Iterable[torch.optim.Optimizer], modules: Any) -> None:
        with suppress(OptimizerMismatchError):
            super().repoint(optimizers, modules)


@backend("group_options_lost")
class OneOfAllGroups(LoopbackBackend):
    """All param groups have the options of the first."""

    def repoint(self, optimizers: Iterable[torch.optim.Optimizer], modules: Any) -> None:
        optimizers = list(optimizers)
        super().repoint(optimizers, modules)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group.update({key: value for key, value in optimizer.param_groups[0].items() if key != "params"})


# -- clipping ----------------------------------------------------------------------------------------------------------


def _local_norm(
    of: LoopbackBackend, parameters: Iterable[Tensor], max_norm: float, norm_type: float, error: bool
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
class LocalNorm(LoopbackBackend):
    def clip_norm(self, parameters: Any, max_norm: Any, norm_type: Any = 2.0, error_if_nonfinite: Any = False) -> Any:
        return _local_norm(self, parameters, max_norm, norm_type, error_if_nonfinite)


@backend("infinite_norm_local")
class LocalInfiniteNorm(LoopbackBackend):
    def clip_norm(self, parameters: Any, max_norm: Any, norm_type: Any = 2.0, error_if_nonfinite: Any = False) -> Any:
        if norm_type == float("inf"):
            return _local_norm(self, parameters, max_norm, norm_type, error_if_nonfinite)
        return super().clip_norm(parameters, max_norm, norm_type, error_if_nonfinite)


@backend("norm_of_other_order")
class AlwaysRootOfSquares(LoopbackBackend):
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
class NormOfAll(LoopbackBackend):
    """Clips by the norm of all that the module has, also of what another optimizer holds."""

    def shard(self, module: nn.Module) -> nn.Module:
        self.root = weakref.ref(module)
        return super().shard(module)

    def clip_norm(self, parameters: Any, max_norm: Any, norm_type: Any = 2.0, error_if_nonfinite: Any = False) -> Any:
        root = self.root()
        assert root is not None
        return super().clip_norm(list(self.layout(root)), max_norm, norm_type, error_if_nonfinite)


@backend("norm_nonfinite")
class NeverRaises(LoopbackBackend):
    def clip_norm(self, parameters: Any, max_norm: Any, norm_type: Any = 2.0, error_if_nonfinite: Any = False) -> Any:
        return super().clip_norm(parameters, max_norm, norm_type)


@backend("clip_value_ignored")
class NoClipping(LoopbackBackend):
    def clip_value(self, parameters: Iterable[Tensor], clip_value: float) -> None:
        pass


# -- accumulation ------------------------------------------------------------------------------------------------------


@backend("micro_batches_twice")
class CountsTwice(LoopbackBackend):
    """Reduces every micro-batch, and keeps what it has reduced for the last one too."""

    accumulating = False

    @contextmanager
    def no_sync(self, module: nn.Module) -> Iterator[None]:
        self.accumulating = True
        yield
        self.accumulating = False

    def reduce(self, root: nn.Module) -> None:
        kept = [shard.own for shard in shards_of(root)]
        super().reduce(root)
        if self.accumulating:
            for shard, own in zip(shards_of(root), kept, strict=True):
                shard.own = own


@backend("micro_batches_lost")
class DropsMicroBatches(LoopbackBackend):
    @contextmanager
    def no_sync(self, module: nn.Module) -> Iterator[None]:
        with super().no_sync(module):
            yield
        for shard in shards_of(module):
            shard.own = None


@backend("sync_left_off")
class LeavesSyncOff(LoopbackBackend):
    @contextmanager
    def no_sync(self, module: nn.Module) -> Iterator[None]:
        context = super().no_sync(module)
        context.__enter__()
        self.kept = context  # else it would end with the last reference to it
        yield


@backend("sync_left_off_by_exceptions")
class WithoutFinally(LoopbackBackend):
    @contextmanager
    def no_sync(self, module: nn.Module) -> Iterator[None]:
        context = self.kept = super().no_sync(module)
        context.__enter__()
        yield
        context.__exit__(None, None, None)


@backend("zero_grad_forgets_shards_alone")
class KeepsUnreduced(LoopbackBackend):
    def forget_unreduced(self, module: nn.Module, names: Any) -> None:
        pass


@backend("no_sync_ignored")
class AlwaysSyncs(LoopbackBackend):
    @contextmanager
    def no_sync(self, module: nn.Module) -> Iterator[None]:
        yield


# -- loops -------------------------------------------------------------------------------------------------------------


@backend("stale_in_forward")
class StaleInForward(LoopbackBackend):
    """After a step that is taken inside the forward pass, the values from before it are used."""

    def resume_forward(self, module: nn.Module) -> None:
        for shard in shards_of(module):
            if shard.gathered is None and shard in self.before:
                shard.gathered = self.before[shard]
                shard.put(shard.gathered)

    def reshard(self, module: nn.Module) -> None:
        self.before = {shard: shard.gathered for shard in shards_of(module) if shard.gathered is not None}
        super().reshard(module)


@backend("requires_grad_not_followed")
class KeepsRequiringGrad(LoopbackBackend):
    """What is gathered when an optimizer is toggled inside the forward pass is trained, or not, as it was before."""

    def follow_requires_grad(self, module: nn.Module) -> None:
        pass


@backend("gradients_hidden_in_step")
class HidesGradients(LoopbackBackend):
    """What is gathered after a backward pass inside the forward pass has no gradient, and does not say so."""

    def resume_forward(self, module: nn.Module) -> None:
        super().resume_forward(module)
        self.suspend_forward(module)


@backend("writes_unwatched")
class DoesNotWatchWrites(LoopbackBackend):
    """What a step writes to what is gathered is lost without a word."""

    def watch_writes(self, module: nn.Module) -> None:
        return None


@backend("interrupted_counts")
class NotReset(LoopbackBackend):
    """Gradients of a backward pass that an exception has ended are part of the next."""

    def reset(self, module: nn.Module) -> None:
        self.reshard(module)


@backend("calls_drop_gradients")
class GivesUpGradients(LoopbackBackend):
    """An exception in a call outside of a step costs the gradients that wait for theirs."""

    def abandon_forward(self, module: nn.Module) -> None:
        self.reset(module)
        for parameter in self.layout(module):
            parameter.grad = None


@backend("interruption_unnoticed")
class Unaware(LoopbackBackend):
    """Nobody tells it of an exception under Fabric, and it does not look."""

    def mend_interrupted(self, module: nn.Module) -> None:
        pass


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
class WrappedNames(LoopbackBackend):
    """A wrapper's part is in the names."""

    def model_state(self, module: nn.Module) -> dict[str, Any]:
        return {f"wrapped.{name}": value for name, value in super().model_state(module).items()}


@backend("buffer_not_saved")
class WithoutBuffers(LoopbackBackend):
    def model_state(self, module: nn.Module) -> dict[str, Any]:
        buffers = {name for name, _ in module.named_buffers()}
        return {name: value for name, value in super().model_state(module).items() if name not in buffers}


@backend("buffer_not_restored")
class KeepsBuffers(LoopbackBackend):
    def load_model_state(self, module: nn.Module, state: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        kept = {name: buffer.clone() for name, buffer in module.named_buffers()}
        super().load_model_state(module, state, *args, **kwargs)
        for name, buffer in module.named_buffers():
            buffer.copy_(kept[name])


@backend("moment_not_saved")
class WithoutMomentum(LoopbackBackend):
    def optimizer_state(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        state = super().optimizer_state(module, optimizer)
        kept = {name: {k: v for k, v in of.items() if k != "momentum_buffer"} for name, of in state["state"].items()}
        return {**state, "state": kept}


@backend("options_not_restored")
class KeepsOptions(LoopbackBackend):
    """Of the options of param groups, the learning rate alone is the checkpoint's."""

    def load_optimizer_state(self, module: nn.Module, optimizer: Any, state: Any, *, check_only: bool = False) -> None:
        kept = [{k: v for k, v in group.items() if k not in ("params", "lr")} for group in optimizer.param_groups]
        super().load_optimizer_state(module, optimizer, state, check_only=check_only)
        for group, options in zip(optimizer.param_groups, kept, strict=True):
            group.update(options)


@backend("moments_of_frozen_dropped")
class DropsFrozen(LoopbackBackend):
    def load_optimizer_state(self, module: nn.Module, optimizer: Any, state: Any, *, check_only: bool = False) -> None:
        super().load_optimizer_state(module, optimizer, state, check_only=check_only)
        for parameter in [p for p in optimizer.state if not p.requires_grad and not check_only]:
            del optimizer.state[parameter]


class LoadedBeside(FlatShard):
    """Computes with what was loaded, beside what is trained."""

    loaded: Tensor | None = None

    def whole(self) -> Tensor:
        if self.loaded is None:
            return super().whole()
        return self.runtime.all_gather(self.loaded).reshape(-1)[: self.numel].view(self.shape)


@backend("weights_loaded_beside_optimizer")
class TrainsWhatWasThere(LoopbackBackend):
    """Weights that are loaded without an optimizer's state are computed with until the first step, and then gone."""

    shard_class = LoadedBeside

    def load_model_state(self, module: nn.Module, state: Any, strict: bool = True, *, check_only: bool = False) -> None:
        before = [shard.held.detach().clone() for shard in shards_of(module)]
        super().load_model_state(module, state, strict, check_only=check_only)
        for shard, kept in zip(shards_of(module), before, strict=True):
            if not check_only:
                shard.loaded = shard.held.detach().clone()
                shard.held.data.copy_(kept)

    def load_optimizer_state(self, module: nn.Module, optimizer: Any, state: Any, *, check_only: bool = False) -> None:
        super().load_optimizer_state(module, optimizer, state, check_only=check_only)
        for shard in shards_of(module):
            if shard.loaded is not None:
                shard.held.data.copy_(shard.loaded)
                shard.loaded = None

    def repoint(self, optimizers: Iterable[torch.optim.Optimizer], modules: Any) -> None:
        optimizers, modules = list(optimizers), list(modules)
        super().repoint(optimizers, modules)
        for optimizer in optimizers:
            optimizer.register_step_post_hook(lambda *_: self._forget(modules))

    def _forget(self, modules: Any) -> None:
        for shard in [shard for module in modules for shard in shards_of(module)]:
            shard.loaded = None


@backend("moments_by_position")
class ByPosition(LoopbackBackend):
    """As torch's own optimizers, whose parameters have numbers and no names."""

    def load_optimizer_state(self, module: nn.Module, optimizer: Any, state: Any, *, check_only: bool = False) -> None:
        now = self.optimizer_state(module, optimizer)
        held = [name for group in now["param_groups"] for name in group["params"]]
        saved = [name for group in state["param_groups"] for name in group["params"]]
        if len(held) == len(saved):
            renamed = dict(zip(saved, held, strict=True))
            groups = [{**g, "params": [renamed[name] for name in g["params"]]} for g in state["param_groups"]]
            state = {"state": {renamed[name]: of for name, of in state["state"].items()}, "param_groups": groups}
        super().load_optimizer_state(module, optimizer, state, check_only=check_only)


@backend("saved_group_divided")
class DividesGroups(LoopbackBackend):
    """Every param group gets the settings of the one that its parameters were saved in."""

    def load_optimizer_state(self, module: nn.Module, optimizer: Any, state: Any, *, check_only: bool = False) -> None:
        saved = {name: group for group in state["param_groups"] for name in group["params"]}
        now = self.optimizer_state(module, optimizer)["param_groups"]
        groups = [{**saved[group["params"][0]], "params": group["params"]} for group in now]
        super().load_optimizer_state(module, optimizer, {**state, "param_groups": groups}, check_only=check_only)


@backend("gradients_not_restored")
class ForgetsGradients(LoopbackBackend):
    def restore_gradients(self, module: nn.Module, own: Any, reduced: Any) -> None:
        pass


@backend("strict_ignored")
class NeverStrict(LoopbackBackend):
    def load_model_state(
        self, module: nn.Module, state: Mapping[str, Any], strict: bool = True, *, check_only: bool = False
    ) -> None:
        super().load_model_state(module, state, False, check_only=check_only)


@backend("changed_before_check")
class LoadsThenChecks(LoopbackBackend):
    def load_model_state(
        self, module: nn.Module, state: Mapping[str, Any], strict: bool = True, *, check_only: bool = False
    ) -> None:
        live = self.model_state(module)
        fits = {name: value for name, value in state.items() if name in live and value.shape == live[name].shape}
        fill_all({name: live[name] for name in fits}, fits)
        super().load_model_state(module, state, strict, check_only=check_only)


@backend("terms_forgotten")
class WithoutTerms(LoopbackBackend):
    """Goes on with a sharded module whatever it is asked for."""

    def terms(self) -> dict[str, Any]:
        return {}


# -- leftovers ---------------------------------------------------------------------------------------------------------


@backend("group_left_open")
class LeavesGroup(LoopbackBackend):
    def shard(self, module: nn.Module) -> nn.Module:
        torch.distributed.new_group()
        return super().shard(module)


@backend("thread_left_running")
class LeavesThread(LoopbackBackend):
    def shard(self, module: nn.Module) -> nn.Module:
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        return super().shard(module)


@backend("variable_left_set")
class LeavesVariable(LoopbackBackend):
    def shard(self, module: nn.Module) -> nn.Module:
        os.environ["LOOPBACK"] = "1"
        return super().shard(module)


@backend("file_left_behind")
class LeavesFile(LoopbackBackend):
    def shard(self, module: nn.Module) -> nn.Module:
        with tempfile.NamedTemporaryFile(delete=False) as file:
            file.write(b"a cache of its own")
        return super().shard(module)


@backend("module_kept")
class KeepsModules(LoopbackBackend):
    kept: ClassVar[list[nn.Module]] = []

    def shard(self, module: nn.Module) -> nn.Module:
        self.kept.append(module)
        return super().shard(module)


# -- what the plugin says ----------------------------------------------------------------------------------------------


@backend("signature_differs")
class OtherSignature(LoopbackBackend):
    def clip_value(self, parameters: Iterable[Tensor], limit: float) -> None:
        super().clip_value(parameters, limit)


@backend("accelerator_unclaimed")
class RunsElsewhereToo(LoopbackBackend):
    accelerators = ("cuda", "cpu")
