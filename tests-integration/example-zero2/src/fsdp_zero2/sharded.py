"""Whole parameters, and the run of elements of each whose gradient and optimizer state a rank keeps (ZeRO-2)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from math import ceil
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from fsdp_core import Runtime, Sharded
from fsdp_core.sharding import EndOfBackward, StepGradients, sharded_of
from fsdp_core.state import (
    FlatRange,
    HeldGradients,
    Layout,
    Part,
    SavedTensor,
    fill,
    named_parameters,
    refuse_half_gradients,
)

if TYPE_CHECKING:
    from fsdp_zero2.backend import ZeRO2Backend

__all__ = ["ZeRO2Sharded"]


class ZeRO2Sharded(Sharded):
    """A module of whole parameters, each cut into one run of elements for each rank.

    A rank's run shares memory with the whole parameter; after a step, :meth:`gather` brings the runs of the others.

    Args:
        root: The module, with the same values on every rank.
        runtime: The ranks.

    Attributes:
        whole: The module's parameters, by name; ``shards`` has the shard of each, and ``parts`` which elements that is.
        end: The end of each backward pass, where gradients are reduced.
        step: What whole parameters show for their gradients, but in a backward pass: those of their shards.
    """

    backend: ZeRO2Backend

    def __init__(self, root: nn.Module, runtime: Runtime, bucket_bytes: int) -> None:
        super().__init__(root)
        self.ranks = runtime.world_size
        self.whole = dict(named_parameters(root))
        self.shards: dict[nn.Parameter, nn.Parameter] = {}
        self.parts: dict[nn.Parameter, tuple[Part, ...]] = {}
        self.step = StepGradients(root)
        for name, whole in self.whole.items():
            size = self._size(whole)
            start = min(runtime.rank * size, whole.numel())
            elements = FlatRange(offset=0, start=start, length=min(size, whole.numel() - start))
            shard = self.shards[whole] = nn.Parameter(_run(whole, elements), requires_grad=whole.requires_grad)
            self.parts[shard] = (Part(name=name, shape=tuple(whole.shape), range=elements),)
            self.step.follow(whole, shard, is_part=False)
        self.buckets = _buckets([*reversed(self.whole.values())], bucket_bytes)
        self.numbers = {whole: number for number, bucket in enumerate(self.buckets) for whole in bucket}
        self.waits: list[set[nn.Parameter]] = []
        self.forget_pass()
        for whole in self.whole.values():
            _call_when_ready(whole, root)
        ended = partial(Sharded.inner_pass_ended, self)  # a pass whose gradients wait, perhaps inside a step
        self.end = EndOfBackward(list(self.whole.values()), root, partial(_reduce, root), call_disabled=ended)
        self.gathered = self.versions()
        root.register_forward_pre_hook(_follow_whole)
        for module in root.modules():
            module.register_forward_pre_hook(partial(_gather_written, root))

    def layout(self) -> Layout:
        return self.parts

    def holds_part(self, parameter: Tensor) -> bool:
        return True

    def forget_pass(self) -> None:
        """Begin with the first bucket, of which no gradient is complete yet."""
        self.next = 0
        self.waits = [set(bucket) for bucket in self.buckets]

    def ready(self, whole: nn.Parameter) -> None:
        """Note a gradient that a backward pass has computed, and reduce the buckets that are complete, in order."""
        if not self.end.enabled:
            return
        number = self.numbers[whole]
        self.waits[number].discard(whole)
        while self.next < len(self.buckets) and not any(w.requires_grad for w in self.waits[self.next]):
            self.reduce_bucket(self.buckets[self.next])
            self.next += 1

    def reduce(self) -> None:
        """Reduce the buckets that wait for what this rank has not used, and what came after its bucket was reduced."""
        for bucket in self.buckets[self.next :]:
            self.reduce_bucket(bucket)
        self.forget_pass()
        late = torch.tensor(float(any(whole.grad is not None for whole in self.whole.values())))
        if self.runtime.all_reduce(late, "max").item():
            for bucket in self.buckets:
                self.reduce_bucket(bucket)

    def reduce_bucket(self, bucket: Sequence[nn.Parameter]) -> None:
        """Add the mean of what the ranks have computed to the gradients of shards, and free it."""
        gradients = [torch.zeros_like(w) if w.grad is None else w.grad.detach() for w in bucket]
        dtype = torch.promote_types(gradients[0].dtype, torch.float32)  # half-precision gradients are summed in fp32
        has = torch.tensor([float(w.grad is not None) for w in bucket], dtype=dtype).expand(self.ranks, -1)
        rows = torch.cat([self._rows([gradient.to(dtype) for gradient in gradients]), has], dim=1)
        *runs, used = self.runtime.reduce_scatter(rows).split([*(self._size(w) for w in bucket), len(bucket)])
        for whole, run, some_rank_has in zip(bucket, runs, used.tolist(), strict=True):
            shard = self.shards[whole]
            if some_rank_has:
                mean = run[: shard.numel()].to(shard.dtype)
                shard.grad = mean if shard.grad is None else shard.grad + mean
            whole.grad = None

    def gather(self) -> None:
        """Give every rank the runs that the others have changed."""
        own = [pad(shard.detach(), (0, self._size(whole) - shard.numel())) for whole, shard in self.shards.items()]
        rows = self.runtime.all_gather(torch.cat(own))
        columns = rows.split([run.numel() for run in own], dim=1)
        for whole, runs in zip(self.shards, columns, strict=True):
            whole.data.copy_(runs.reshape(-1)[: whole.numel()].view(whole.shape))
        self.gathered = self.versions()

    def versions(self) -> list[int]:
        """How often each shard was written to, by an optimizer or by hand."""
        return [shard._version for shard in self.shards.values()]

    @contextmanager
    def own_gradients(self) -> Iterator[None]:
        """Context in which whole parameters have the gradients that no rank has shared yet, and do not show others."""
        self.step.on = False
        try:
            yield
        finally:
            self.step.on = True

    def reshard(self) -> None:
        """Let shards share memory again with parameters to which the module has assigned other memory."""
        for whole, shard in self.shards.items():
            run = _run(whole, self.parts[shard][0].range)
            if run.data_ptr() != shard.data_ptr():
                shard.data = run

    # -- steps -----------------------------------------------------------------------------------------------------

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext() if self.backend.options.sync_each_batch else self.end.disabled()

    def suspend_forward(self, loss: Tensor | None = None) -> None:
        self.step.on = loss is None  # an optimizer's step changes nothing in them

    def resume_forward(self) -> None:
        self.step.on = True

    def follow_requires_grad(self) -> None:
        for whole, shard in self.shards.items():
            whole.requires_grad_(shard.requires_grad)

    def reset(self) -> None:
        with self.own_gradients():
            for whole, shard in self.shards.items():
                whole.grad = shard.grad = None
        self.forget_pass()

    def abandon_forward(self) -> None:
        self.resume_forward()  # and nothing is gathered for one

    def mend_interrupted(self) -> None:
        if self.end.interrupted:
            refuse_half_gradients(self.root, self.layout())
            self.reset()
            self.end.forget()

    # -- state -----------------------------------------------------------------------------------------------------

    def model_state(self) -> dict[str, Any]:
        self.reshard()
        first = self.aliases()
        own = {part.name: part.of(shard) for shard, (part,) in self.parts.items()}
        return {name: own.get(first.get(name, name), value) for name, value in super().model_state().items()}

    def load_model_state(self, state: Mapping[str, Any], strict: bool = True, *, check_only: bool = False) -> None:
        super().load_model_state(state, strict, check_only=check_only)
        if not check_only:
            self.gather()

    def accumulated_gradients(self) -> HeldGradients:
        held = super().accumulated_gradients()
        with self.own_gradients():
            held.own.update((name, whole.grad) for name, whole in self.whole.items() if whole.grad is not None)
        return held

    def restore_gradients(
        self, own: Mapping[str, Callable[[], Tensor]], reduced: Mapping[str, Tensor | SavedTensor]
    ) -> None:
        super().restore_gradients({n: read for n, read in own.items() if n not in self.whole}, reduced)
        with self.own_gradients():
            for name, whole in self.whole.items():
                whole.grad = None
                if name in own:
                    whole.grad = torch.empty_like(whole, requires_grad=False)
                    fill(whole.grad, own[name](), cast=True)

    def _size(self, whole: Tensor) -> int:
        return ceil(whole.numel() / self.ranks)  # the last ones perhaps have fewer

    def _rows(self, tensors: list[Tensor]) -> Tensor:
        """Whole tensors as one row for each rank, which holds its runs of all of them."""
        flat = [pad(t.reshape(-1), (0, self._size(t) * self.ranks - t.numel())).view(self.ranks, -1) for t in tensors]
        return torch.cat(flat, dim=1)


def _run(whole: Tensor, elements: FlatRange) -> Tensor:
    return whole.data.view(-1)[elements.start : elements.start + elements.length]


def _buckets(parameters: Sequence[nn.Parameter], limit: int) -> list[list[nn.Parameter]]:
    """Neighbours of one dtype, up to a number of bytes, or one that is larger."""
    buckets: list[list[nn.Parameter]] = []
    room = 0
    for parameter in parameters:
        if not buckets or room < parameter.nbytes or buckets[-1][0].dtype != parameter.dtype:
            buckets.append([])
            room = limit
        buckets[-1].append(parameter)
        room -= parameter.nbytes
    return buckets


def _call_when_ready(whole: nn.Parameter, root: nn.Module) -> None:
    """Tell the sharded module of each gradient. The hook must not keep the module alive."""
    if not whole.is_floating_point():
        return
    weakly = ref(root)
    required = whole.requires_grad
    whole.requires_grad_(True)  # a hook can't be placed otherwise

    def tell(parameter: Any) -> None:
        alive = weakly()
        if alive is not None and isinstance(sharded := sharded_of(alive), ZeRO2Sharded):
            with sharded.own_gradients():
                sharded.ready(parameter)

    whole.register_post_accumulate_grad_hook(tell)
    whole.requires_grad_(required)


# What hooks of the module call, which a copy of it has too; a copy is not sharded.


def _reduce(root: nn.Module) -> None:
    if isinstance(sharded := sharded_of(root), ZeRO2Sharded):
        sharded.reshard()  # a forward pass may have assigned, within the closure of a step that follows
        with sharded.own_gradients():
            sharded.reduce()


def _gather_written(root: nn.Module, part: nn.Module, args: Any) -> None:
    if isinstance(sharded := sharded_of(root), ZeRO2Sharded) and sharded.gathered != sharded.versions():
        sharded.gather()  # a step has written to what its optimizer holds


def _follow_whole(root: nn.Module, args: Any) -> None:
    if isinstance(sharded := sharded_of(root), ZeRO2Sharded):
        for whole, shard in sharded.shards.items():  # which the user may have frozen or unfrozen
            shard.requires_grad_(whole.requires_grad)
