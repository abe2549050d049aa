"""Full weights of a model while it trains, one after the other, within a budget of memory."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import add
from typing import Any, Literal

import torch
import xxhash
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fsdp_core.checkpoint.collective import gather_to_all, run_on_first
from fsdp_core.errors import CheckpointMismatchError, ShardingError, UnsupportedCapabilityError
from fsdp_core.huggingface.held_model import HeldModel, find_model, find_part, is_adapted, is_model
from fsdp_core.huggingface.saving import as_dtype
from fsdp_core.huggingface.stored_names import names_to_store, stored_views
from fsdp_core.huggingface.views import View
from fsdp_core.lightning.outside_steps.exporting import users_module_in
from fsdp_core.lightning.outside_steps.redirection import outside_inference_mode
from fsdp_core.runtime import ProcessGroupRuntime, Runtime
from fsdp_core.sharding.sharded import StateTensor
from fsdp_core.sizes import parse_size
from fsdp_core.state.boxes import cut
from fsdp_core.state.buckets import (
    MIN_RUN_BYTES,
    Bucket,
    BucketedTensor,
    exchange,
    fill_from,
    plan_buckets,
    run_bytes_within,
)
from fsdp_core.state.chunks import Chunk, ChunkedTensor, chunked
from fsdp_core.state.coverage import Box
from fsdp_core.state.full_tensor import check_covered

__all__ = ["SentWeights", "stream_weights"]

log = logging.getLogger(__name__)

_ACTION = "stream_weights()"
_DIGEST_BLOCK_BYTES = 16 * 2**20  # of a tensor that is copied to the host at a time


class SentWeights:
    """What a receiver has of a model: which weights :func:`fsdp_core.stream_weights` need not yield again.

    It is empty at first. Each stream that gets it as ``changed_since`` and is iterated to its end notes in it what it
    has yielded: a digest of what this rank holds of each tensor, not the tensors.
    """

    def __init__(self) -> None:
        self._description: tuple[Any, ...] | None = None
        self._digests: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"SentWeights({len(self._digests)} tensors)"


@dataclass(kw_only=True)
class _Stream:
    """What one call of :func:`stream_weights` yields.

    Attributes:
        runtime: The ranks.
        own: What this rank holds, by published name.
        names: By each of these names, all names to yield the tensor under.
        extra: What is not a tensor, by name.
        watched: Tensors over the module's memory, and their versions.
    """

    runtime: Runtime
    own: Mapping[str, ChunkedTensor] = field(repr=False)
    names: Mapping[str, Sequence[str]] = field(repr=False)
    extra: Mapping[str, Any] = field(repr=False)
    watched: Sequence[tuple[Tensor, int]] = field(repr=False)

    def has_changed(self) -> bool:
        """Whether a tensor of the module was written to since the stream began."""
        return any(_version(tensor) != version for tensor, version in self.watched)


def stream_weights(
    model: nn.Module,
    names: Literal["hf"] | None = None,
    dtype: str | torch.dtype | None = None,
    budget: int | str = "1GiB",
    changed_since: SentWeights | None = None,
) -> Iterator[tuple[str, Any]]:
    """Yield the full tensors of a model one by one, while it trains. All ranks must call it and iterate to the end.

    Small tensors are gathered together by one collective, and a large one by several, so that gathering takes at most
    ``budget`` of memory besides the tensor that is yielded. Each is a copy of its own, on this rank's device, which the
    caller may keep or change. They come in the same order each time. A model that is not sharded yields its own
    tensors, without communication.

    A rank that leaves the loop early gathers what is left, and drops it, because other ranks wait for its part; where
    the iterator is kept in a variable, call its ``close()``. Other ranks wait for a rank that does neither as long as
    :attr:`Runtime.patience <fsdp_core.Runtime>`, and then raise an error that names it.

    Args:
        model: A LightningModule, what ``fabric.setup`` returned, or a module inside one of them; for ``names="hf"``, as
            :func:`fsdp_core.huggingface.save_pretrained` takes it.
        names: ``None`` for the names that ``model.state_dict()`` had before sharding; the names of a tied parameter
            follow one another, and share one tensor. ``"hf"`` for the names and shapes in which transformers publishes
            the model, as ``save_pretrained`` stores it.
        dtype: The dtype to yield floating-point tensors in, which are converted before they are sent; ``None`` for
            their own.
        budget: A number of bytes, or a size such as ``"512MiB"``. A budget that is smaller than the largest tensor is
            noted in the log.
        changed_since: What the receiver has: tensors that have not changed since are left out. A tensor has changed if
            its bytes have. At first, an empty :class:`SentWeights`.

    Yields:
        Names and full tensors. A tensor that is not sharded, such as a buffer, is this rank's own. Extra state, which
        is not a tensor, is yielded at the end, as it is.

    Raises:
        ShardingError: It was called inside a step, or with other arguments than on another rank; the model has no
            values yet; weights changed before the stream's end; or another rank did not call it.
        UnsupportedCapabilityError: With ``names="hf"``, the model has no published names, or has adapters of PEFT's, or
            is stored in a form that can't be computed from shards.
        CheckpointMismatchError: ``changed_since`` is of another model, or of streams with another ``names`` or
            ``dtype``.
        CheckpointValueError: ``dtype`` is no floating-point dtype.
        ValueError: ``budget`` is no size.

    Example:
        In a callback, to a server that generates::

            def on_train_batch_end(self, trainer, module, *_):
                for name, tensor in fsdp_core.stream_weights(module.model, names="hf", dtype="bfloat16"):  # all ranks
                    if trainer.is_global_zero:
                        self.server.update(name, tensor)

        Where nothing is sharded:

        >>> sent = SentWeights()
        >>> model = nn.Linear(2, 1)
        >>> [name for name, _ in stream_weights(model, changed_since=sent)]
        ['weight', 'bias']
        >>> _ = model.bias.data.fill_(5.0)
        >>> list(stream_weights(model, changed_since=sent))
        [('bias', tensor([5.]))]
    """
    budget_bytes = _budget_bytes(budget)
    stored_dtype = None if dtype is None else as_dtype(dtype)
    if names not in (None, "hf"):
        raise ValueError(f"names={names!r} is not supported.\nWrite names='hf', or names=None for the model's own.")
    if changed_since is not None and not isinstance(changed_since, SentWeights):
        raise TypeError(
            f"changed_since={changed_since!r} is not what a receiver has.\n"
            "Make one sent = fsdp_core.SentWeights(), and pass changed_since=sent to each stream."
        )
    with outside_inference_mode(), torch.no_grad():
        stream = _open_stream(model, names)
        tensors, news = _agree(stream, (names, stored_dtype, budget_bytes), changed_since)
        world_size = stream.runtime.world_size
        max_run_bytes = run_bytes_within(budget_bytes, world_size, stream.runtime.device)
        buckets = plan_buckets(tensors, world_size, max_run_bytes)
    _note_small_budget(tensors, budget_bytes, world_size)
    return _iterate(stream, tensors, buckets, changed_since or SentWeights(), news)


def _budget_bytes(budget: int | str) -> int:
    try:
        size = parse_size(budget) if isinstance(budget, str) else budget
    except ValueError as error:
        raise ValueError(f"budget={budget!r}: {error}") from error
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ValueError(f"budget={budget!r} is no size.\nWrite a number of bytes, or such as '1GiB'.")
    return size


def _open_stream(model: nn.Module, names: str | None) -> _Stream:
    """Find what this rank holds, under the names to yield."""
    module = users_module_in(model)
    if isinstance(module, DistributedDataParallel):
        module = module.module
    part = find_part(module, _ACTION) if names is None else find_model(module, _ACTION)
    # each process of DDP has the full model, and need not call this together with others
    runtime = ProcessGroupRuntime() if part.sharded is None else part.runtime
    if part.sharded is None:
        runtime = _Alone()
        runtime.device = next((p.device for p in module.parameters()), torch.device("cpu"))
    values = part.values()
    _check_has_values(part, values)
    tensors = {name: value for name, value in values.items() if isinstance(value, StateTensor)}
    state = {name: chunked(value, rank=runtime.rank) for name, value in tensors.items()}
    watched = [value for value in tensors.values() if isinstance(value, Tensor)]
    watched += [chunk.data for value in state.values() for chunk in value.chunks if isinstance(chunk.data, Tensor)]
    if part.sharded is not None:
        watched += part.sharded.layout()  # what optimizers write to, which may be other tensors over the same memory
    versions = [(tensor, _version(tensor)) for tensor in watched]
    if names is None:
        tied = part.first_names()
        published: dict[str, list[str]] = {}
        for name in tensors:
            published.setdefault(tied.get(name, name), []).append(name)
        own = {name: state[name] for name in published}
        extra = {name: value for name, value in values.items() if name not in tensors}
        return _Stream(runtime=runtime, own=own, names=published, extra=extra, watched=versions)
    views = _published_views(part, runtime, state)
    own = {name: _view_chunks(view, state[view.source]) for name, view in views.items()}
    return _Stream(runtime=runtime, own=own, names={name: [name] for name in own}, extra={}, watched=versions)


class _Alone(ProcessGroupRuntime):
    """This process alone, whether or not there is a process group."""

    @property
    def _is_alone(self) -> bool:
        return True


def _check_has_values(part: HeldModel, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if part.sharded is None and isinstance(value, DTensor):
            raise ShardingError(
                f"stream_weights() was called with a {type(part.module).__name__} whose {name!r} is a DTensor, and no "
                "strategy of this project has sharded it.\nPass the LightningModule that the Trainer trains, or what "
                "fabric.setup() returned; or gather each tensor with its own full_tensor()."
            )
        if isinstance(value, Tensor) and (value.is_meta or nn.parameter.is_lazy(value)):
            raise ShardingError(
                f"stream_weights() was called with a {type(part.module).__name__} whose {name!r} has no values yet.\n"
                "Call it after the strategy has set the model up: in a hook such as on_train_start() or later, or with "
                "what fabric.setup() returned."
            )


def _published_views(part: HeldModel, runtime: Runtime, state: Mapping[str, ChunkedTensor]) -> dict[str, View]:
    """Return the tensors that transformers publishes, as rank 0 finds them. All ranks must call it."""
    tied = part.first_names()

    def find_views() -> dict[str, View] | None:
        with part.unsharded_view() as model:  # on every rank
            if not is_model(model):
                raise UnsupportedCapabilityError(
                    f"stream_weights(names='hf') was called with a {type(model).__name__}, which is no model of "
                    "transformers: its weights have no published names.\n"
                    "Leave names out, for the module's own; or pass the model in it, such as self.model."
                )
            if is_adapted(model):
                raise UnsupportedCapabilityError(
                    f"stream_weights(names='hf') was called with a {type(model).__name__} with adapters of PEFT's, "
                    "which the published model does not have.\nLeave names out, for the names in PEFT's model."
                )
            return None if runtime.rank else stored_views(model, state, names_to_store(model, state, tied))

    views = run_on_first(runtime, "finding the published names of the weights", find_views)
    assert views is not None  # rank 0 returns them
    return views


def _view_chunks(view: View, source: ChunkedTensor) -> ChunkedTensor:
    """Return this rank's part of a published tensor, sharing memory with its part of the module's tensor."""
    chunks = []
    for chunk in source.chunks:
        common = view.overlap((chunk.offsets, tuple(chunk.data.shape)))
        if common is None:
            continue
        (offsets, lengths), (stored_offsets, _) = common
        assert isinstance(chunk.data, Tensor)  # a rank's shards of a model are in memory
        begins = [offset - begin for offset, begin in zip(offsets, chunk.offsets, strict=True)]
        data = chunk.data[tuple(slice(begin, begin + n) for begin, n in zip(begins, lengths, strict=True))]
        chunks.append(Chunk(offsets=stored_offsets, data=view.as_stored(data)))
    return ChunkedTensor(shape=view.shape, dtype=source.dtype, chunks=tuple(chunks), replica=source.replica)


def _agree(
    stream: _Stream, arguments: tuple[Any, ...], changed_since: SentWeights | None
) -> tuple[dict[str, BucketedTensor], SentWeights]:
    """Exchange what ranks hold, and choose the tensors to gather. All ranks must call it.

    Returns:
        The tensors, and what a receiver of them has afterwards, where there is a ``changed_since``.
    """
    names, dtype, _ = arguments
    shapes = [(name, value.shape, value.dtype) for name, value in stream.own.items()]
    news = SentWeights()
    news._description = description = (names, dtype, shapes)

    def describe() -> Any:
        if changed_since is not None:
            _check_receiver(changed_since, description)
            news._digests = {name: _digest(value) for name, value in stream.own.items()}
        former = {} if changed_since is None else changed_since._digests
        changed = [name for name in stream.own if changed_since is None or former.get(name) != news._digests[name]]
        boxes = {name: (value.replica, _boxes(value)) for name, value in stream.own.items()}
        return (*arguments, changed_since is None, shapes), boxes, changed

    by_rank = gather_to_all(stream.runtime, "beginning stream_weights()", describe)
    for rank, (arguments_of_rank, _, _) in enumerate(by_rank):
        if arguments_of_rank != by_rank[0][0]:
            raise ShardingError(
                f"rank {rank} called stream_weights() with another model or other arguments than rank 0.\n"
                "Pass the same model, names, dtype, budget and changed_since on all ranks."
            )
    changed_on_any = {name for _, _, changed in by_rank for name in changed}
    tensors = {}
    for name, value in stream.own.items():
        if name not in changed_on_any:
            continue
        stored_dtype = dtype if dtype is not None and value.dtype.is_floating_point else value.dtype
        boxes_by_rank = [boxes[name] for _, boxes, _ in by_rank]
        check_covered(value.shape, [boxes for replica, boxes in boxes_by_rank if replica == 0], name)
        tensors[name] = BucketedTensor(value.shape, stored_dtype, boxes_by_rank)
    return tensors, news


def _check_receiver(changed_since: SentWeights, description: tuple[Any, ...]) -> None:
    former = changed_since._description
    if former is None or former == description:
        return
    if former[:2] != description[:2]:
        raise CheckpointMismatchError(
            f"changed_since is of streams with names={former[0]!r}, dtype={former[1]}, and this one has "
            f"names={description[0]!r}, dtype={description[1]}.\n"
            "Pass an empty fsdp_core.SentWeights(), with which all is sent."
        )
    different = next(
        (name for (name, *_), entry in zip(former[2], description[2], strict=False) if (name, *_) != entry),
        "the number of tensors",
    )
    raise CheckpointMismatchError(
        f"changed_since is of streams of another model: {different!r} is not the same in both.\n"
        "Pass the one of this model; or an empty fsdp_core.SentWeights(), with which all is sent."
    )


def _boxes(value: ChunkedTensor) -> list[Box]:
    return [(tuple(chunk.offsets), tuple(chunk.data.shape)) for chunk in value.chunks]


def _digest(value: ChunkedTensor) -> str:
    """A digest of what this rank holds of a tensor, and of where it lies."""
    digest = xxhash.xxh3_128(repr((value.replica, _boxes(value))).encode())
    for chunk in value.chunks:
        assert isinstance(chunk.data, Tensor)  # a rank's shards of a model are in memory
        for offsets, lengths in cut(tuple(chunk.data.shape), chunk.data.dtype.itemsize, _DIGEST_BLOCK_BYTES):
            block = chunk.data[tuple(map(slice, offsets, map(add, offsets, lengths)))]
            flat = block.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
            digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _note_small_budget(tensors: Mapping[str, BucketedTensor], budget: int, world_size: int) -> None:
    sizes = {name: torch.Size(tensor.shape).numel() * tensor.dtype.itemsize for name, tensor in tensors.items()}
    largest = max(sizes, key=lambda name: sizes[name], default=None)
    if largest is not None and sizes[largest] > budget and (largest, budget) not in _noted:
        _noted.add((largest, budget))
        least = MIN_RUN_BYTES * (2 * world_size + 1)
        own = f" Gathering takes {least} bytes at least." if budget < least else ""
        log.info(
            "stream_weights(): the budget of %d bytes is smaller than %r of %d bytes, which is gathered in parts; the "
            "tensor itself takes its own size besides.%s",
            budget,
            largest,
            sizes[largest],
            own,
        )


#: Names and budgets of which a note is in the log already.
_noted: set[tuple[str, int]] = set()


def _iterate(
    stream: _Stream,
    tensors: Mapping[str, BucketedTensor],
    buckets: Sequence[Bucket],
    sent: SentWeights,
    news: SentWeights,
) -> Iterator[tuple[str, Any]]:
    full: Tensor | None = None
    done = 0
    try:
        for bucket in buckets:
            gathered = _gather(stream, bucket, tensors)
            done += 1
            for name, pieces in bucket.pieces.items():
                full = _fill(stream, name, tensors[name], pieces, gathered, full)
                if name in bucket.completed:
                    if name == next(reversed(bucket.pieces)):
                        gathered = None
                    yield from _under_all_names(stream, name, full)
                    full = None
            gathered = None  # before the next bucket takes memory
        yield from stream.extra.items()
    except GeneratorExit:
        if not sys.is_finalizing():
            for bucket in buckets[done:]:  # other ranks wait for this rank's part
                _gather(stream, bucket, tensors)
        raise
    sent._description, sent._digests = news._description, news._digests


def _under_all_names(stream: _Stream, name: str, full: Tensor) -> Iterator[tuple[str, Tensor]]:
    for published in stream.names[name]:
        yield published, full


@outside_inference_mode()
def _gather(stream: _Stream, bucket: Bucket, tensors: Mapping[str, BucketedTensor]) -> Tensor | None:
    """Gather a bucket. All ranks must call it.

    Raises:
        ShardingError: Weights have changed on some rank; or another rank has stopped iterating.
    """
    has_changed = stream.has_changed()
    gathered: Tensor | None = None
    if bucket.run_bytes:
        stream.runtime.rendezvous("stream_weights(), which all ranks must iterate to the end,")
        gathered, has_changed = exchange(bucket, tensors, stream.own, stream.runtime, has_changed)
    if has_changed:
        raise ShardingError(
            "weights were written to between two tensors of stream_weights(): what came before is of other weights "
            "than what would follow.\n"
            "Iterate to the end before the next step; collect in a list what is to be sent later."
        )
    return gathered


@outside_inference_mode()
@torch.no_grad()
def _fill(
    stream: _Stream,
    name: str,
    tensor: BucketedTensor,
    pieces: Sequence[Any],
    gathered: Tensor | None,
    full: Tensor | None,
) -> Tensor:
    """Copy the pieces of a tensor to where they belong, in a new tensor if there is none."""
    if full is None:
        full = torch.empty(tensor.shape, dtype=tensor.dtype, device=stream.runtime.device)
    if gathered is None or not pieces:
        for chunk in stream.own[name].chunks:
            assert isinstance(chunk.data, Tensor)  # a rank's shards of a model are in memory
            full.copy_(chunk.data)
    else:
        fill_from(gathered, pieces, full)
    return full
