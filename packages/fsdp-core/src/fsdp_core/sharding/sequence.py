"""Context parallelism, as far as no library is concerned: batches are split once along the sequence dimension."""

from __future__ import annotations

import copy
import dataclasses
import zlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fsdp_core.errors import ShardingError
from fsdp_core.runtime import Runtime

__all__ = [
    "IGNORED",
    "SequenceSplit",
    "batch_entries",
    "current_split",
    "gather_sequence",
    "sequence_positions",
    "shift_labels",
    "use_split",
]

#: The label that losses of torch leave out by default.
IGNORED = -100

#: On a tensor that is a part of a batch already.
_IS_PART = "_fsdp_core_sequence_part"

_current: SequenceSplit | None = None


class SequenceSplit:
    """Splits batches into equal, contiguous parts of the sequence, one for each context-parallel rank.

    Args:
        runtime: The ranks. All must create it: it needs a process group of the context-parallel ones.
        dims: By name of a batch's entry, its sequence dimension; the other entries stay whole. ``None``: every tensor
            with two dimensions or more is split along dimension 1, if these sizes agree.

    Attributes:
        ranks: The context-parallel peers of this rank.
        lengths: The lengths that parts have had, in elements along the sequence dimension.
        targets: By the number of elements in a part of an integer entry, such as labels, how many would be left if a
            loss shifted labels within the part: one fewer for each sequence.
    """

    def __init__(self, runtime: Runtime, dims: Mapping[str, int] | None = None) -> None:
        self.ranks = runtime.along("context_parallel")
        self.rank = self.ranks.rank
        self.size = self.ranks.world_size
        self.dims = dims
        self.lengths: set[int] = set()
        self.targets: dict[int, int] = {}
        #: Of the last batch: the names of integer entries, and how many labels are not ignored in each rank's part.
        self._counts: list[tuple[str, Tensor]] = []
        self._last_parts: dict[str, Tensor] = {}
        self._is_weighted = self._is_compared = False

    @classmethod
    def of(cls, runtime: Runtime, dims: Mapping[str, int] | None) -> SequenceSplit | None:
        """The split that a runtime's mesh asks for; ``None`` without context parallelism."""
        return cls(runtime, dims) if runtime.mesh.context_parallel > 1 else None

    def split(self, batch: Any) -> Any:
        """This rank's part of a batch, of the same structure. Context-parallel peers must call it with the same batch.

        Args:
            batch: A tensor, or nested dicts, lists, tuples and dataclasses of tensors. It is not changed.

        Raises:
            ShardingError: No tensor can be split, sizes differ, a sequence can't be divided, the batch was split
                before, or peers have different batches. What was split before is known by a mark on the part, and by
                the values of the last batch's parts, since a copy, such as one on another device, has no mark.
        """
        use_split(self)  # current_split() is None after a Trainer's stage
        entries = dict(batch_entries(batch))
        dims = self._choose_dims(entries)
        split_names = [name for name in dims if getattr(entries[name], _IS_PART, False)]
        if self._is_copy_of_last({name: entries[name] for name in dims}):
            split_names = split_names or list(dims)
        if split_names:
            raise ShardingError(
                f"{_quote_name(split_names[0])} of the batch is already the part of this rank, and would be split "
                "twice.\n"
                "Loaders that were set up, and batches of the Trainer, are split already: leave out split_batch()."
            )
        self._compare(entries)
        self._counts = []
        self._last_parts = {}
        for name, dim in dims.items():
            self._check_divides(name, entries[name], dim)

        def take_part_of_entry(name: str, tensor: Tensor) -> Tensor:
            return self._take_part(name, tensor, dims[name]) if name in dims else tensor

        return _replace_tensors(batch, take_part_of_entry)

    def _choose_dims(self, entries: dict[str, Tensor]) -> dict[str, int]:
        """The sequence dimension of each entry to split."""
        if self.dims is not None:
            for name, dim in self.dims.items():
                entry = entries.get(name)
                if entry is None or not -entry.ndim <= dim < entry.ndim:
                    reason = "is no tensor of the batch" if entry is None else f"has no dimension {dim}"
                    raise ShardingError(
                        f"context_parallel_dims names {_quote_name(name)}, which {reason}; its tensors are "
                        f"{_shapes(entries)}.\nWrite the names as they are here, with dimensions from 0."
                    )
            return {name: dim % entries[name].ndim for name, dim in self.dims.items()}
        dims = {name: 1 for name, tensor in entries.items() if tensor.ndim > 1}
        sizes = {entries[name].shape[1] for name in dims}
        if len(sizes) != 1:
            reason = "tensors have different sizes in dimension 1" if sizes else "no tensor has a second dimension"
            raise ShardingError(
                f"context_parallel_size={self.size} splits each batch along its sequence, and {reason}: "
                f"{_shapes(entries)}.\n"
                "Write context_parallel_dims={'input_ids': 1, 'labels': 1} with the entries of your batch to split, "
                "and their sequence dimensions; entries of a tuple are named '0', '1', and so on. A model whose "
                "sequence is not in the batch, such as one of image patches, can't be split: leave "
                "context_parallel_size out."
            )
        return dims

    def _check_divides(self, name: str, tensor: Tensor, dim: int) -> None:
        length = tensor.shape[dim]
        if length % self.size:
            raise ShardingError(
                f"the sequence of {_quote_name(name)}, of length {length}, can't be divided into "
                f"context_parallel_size={self.size} equal parts.\n"
                f"Pad sequences to a multiple of {self.size}, such as {-(-length // self.size) * self.size}, with "
                f"labels of {IGNORED}; or choose another size."
            )

    def _take_part(self, name: str, tensor: Tensor, dim: int) -> Tensor:
        """Cut this rank's part out of an entry, and record its length and its labels."""
        length = tensor.shape[dim] // self.size
        part = tensor.narrow(dim, self.rank * length, length).contiguous()
        setattr(part, _IS_PART, True)
        self._last_parts[name] = part
        self.lengths.add(length)
        if not tensor.is_floating_point() and tensor.dtype != torch.bool:
            sequences = part.numel() // length
            self.targets[part.numel()] = sequences * (length - 1)
            is_counted = (tensor.movedim(dim, 0) != IGNORED).reshape(self.size, -1)
            self._counts.append((name, is_counted.sum(1)))
        return part

    def _is_copy_of_last(self, entries: Mapping[str, Tensor]) -> bool:
        """Whether these are the parts of the last batch, perhaps on another device or in another dtype."""
        pairs = [(tensor, self._last_parts.get(name)) for name, tensor in entries.items()]
        return all(
            last is not None and last.shape == tensor.shape and _holds_same(tensor, last) for tensor, last in pairs
        )

    def _compare(self, entries: dict[str, Tensor]) -> None:
        """Compare the first batch with those of the peers."""
        if self._is_compared:
            return
        self._is_compared = True
        own_entries = [(name, tuple(tensor.shape), _checksum(tensor)) for name, tensor in entries.items()]
        entries_by_rank = self.ranks.gather_objects(own_entries)
        if any(entries != entries_by_rank[0] for entries in entries_by_rank):
            raise ShardingError(
                "context-parallel ranks have different batches, of which each would compute a part.\n"
                "Let samplers go by data-parallel rank, DistributedSampler(data, "
                "**strategy.distributed_sampler_kwargs), or let Lightning add the sampler; and seed what is random in "
                "the dataset by that rank too."
            )

    def weight(self, total: Tensor, count: Tensor | float) -> Tensor:
        """This rank's share of a mean over the tokens of all context-parallel ranks: their average is that mean.

        Args:
            total: The sum over this rank's tokens.
            count: The number, or the weight, of these tokens.
        """
        wide_dtype = torch.promote_types(total.dtype, torch.float32)
        own_count = torch.as_tensor(count, device=total.device).detach().to(wide_dtype).clone()
        count_of_all = self.ranks.all_reduce(own_count, "sum")
        if torch.is_grad_enabled():
            self.note_weighted()
        return total * (self.size / count_of_all).to(total.dtype)

    def note_weighted(self) -> None:
        """Record that a loss was computed that knows how many tokens each rank has."""
        self._is_weighted = True

    def check_loss(self) -> None:
        """Refuse a loss that is the mean over this rank's tokens if ranks have different numbers of them.

        Called before each backward pass. It waits for the device only if nothing has weighted the loss.

        Raises:
            ShardingError: Ranks leave out different numbers of labels, and no loss was weighted since the last call.
        """
        was_weighted = self._is_weighted
        self._is_weighted = False
        if was_weighted:
            return
        for name, counts in self._counts:
            counts_by_rank = counts.tolist()
            if len(set(counts_by_rank)) > 1:
                numbers = ", ".join(map(str, counts_by_rank))
                raise ShardingError(
                    f"of the labels {_quote_name(name)}, context-parallel ranks have {numbers} "
                    f"that are not {IGNORED}, and no loss was computed that knows it: the average of their means is "
                    "not the mean over the batch.\n"
                    "Call torch.nn.functional.cross_entropy(..., reduction='mean') through its module, which is "
                    "corrected; or write loss = fsdp_core.token_mean(sum_of_losses, number_of_tokens)."
                )


class _Gathered(torch.autograd.Function):
    """Concatenates the parts of all ranks; the gradient of a part is the sum of what all ranks have for it."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, dim: int, ranks: Runtime) -> Tensor:
        ctx.dim, ctx.ranks = dim, ranks
        return torch.cat(ranks.all_gather(part.detach()).unbind(), dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ranks = ctx.ranks
        # in fp32 or wider, as the gradient of the unsplit keys would be accumulated
        wide_dtype = torch.promote_types(gradient.dtype, torch.float32)
        rows = torch.stack(gradient.chunk(ranks.world_size, ctx.dim)).to(wide_dtype)
        return ranks.reduce_scatter(rows, "sum").to(gradient.dtype), None, None


def current_split() -> SequenceSplit | None:
    """How the running strategy splits batches; ``None`` without context parallelism, and after a Trainer's stage."""
    return _current


def use_split(split: SequenceSplit | None) -> None:
    """Set what :func:`current_split` returns."""
    global _current
    _current = split


def gather_sequence(part: Tensor, dim: int = 1) -> Tensor:
    """Concatenate the parts of a sequence that context-parallel ranks hold, on each of them. Gradients flow back.

    The tensor itself without context parallelism, so that a model which uses it runs anywhere. All context-parallel
    ranks must call it.

    Args:
        part: This rank's part.
        dim: Its sequence dimension.

    Example:
        A padding mask for attention, whose keys are those of the whole sequence:

        >>> padding = torch.tensor([[True, True, False]])
        >>> gather_sequence(padding)[:, None, None, :].shape
        torch.Size([1, 1, 1, 3])
    """
    if _current is None:
        return part
    gathered: Tensor = _Gathered.apply(part, dim % part.ndim, _current.ranks)  # type: ignore[no-untyped-call]
    return gathered


def sequence_positions(length: int, device: torch.device | None = None) -> Tensor:
    """The positions of this rank's part of a sequence: ``arange(length)`` without context parallelism.

    Args:
        length: The length of the part.
        device: Where to create them.

    Example:
        >>> sequence_positions(3)
        tensor([0, 1, 2])
    """
    first = 0 if _current is None else _current.rank * length
    # not by arange(length), which a backend may refuse in a model as positions that count from 0 on each rank
    return torch.ones(length, dtype=torch.int64, device=device).cumsum(0) + (first - 1)


def shift_labels(labels: Tensor, dim: int = 1, ignored: int = IGNORED) -> Tensor:
    """The labels of next-token prediction: at each position that of the next one, also if another rank holds it.

    All context-parallel ranks must call it.

    Args:
        labels: This rank's part of the labels.
        dim: Their sequence dimension.
        ignored: The label of the last position, which has no next one.

    Example:
        >>> shift_labels(torch.tensor([[5, 6, 7]]))
        tensor([[   6,    7, -100]])
    """
    first = labels.narrow(dim, 0, 1)
    after = torch.full_like(first, ignored)
    if _current is not None:
        firsts = _current.ranks.all_gather(first)
        after = firsts[_current.rank + 1] if _current.rank + 1 < _current.size else after
    return torch.cat([labels.narrow(dim, 1, labels.shape[dim] - 1), after], dim)


def batch_entries(batch: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of a batch, each with its name: keys, indices and fields, joined by dots."""
    if isinstance(batch, Tensor):
        yield name, batch
    for key, value in _items(batch):
        yield from batch_entries(value, f"{name}.{key}" if name else key)


def _items(batch: Any) -> list[tuple[str, Any]]:
    if isinstance(batch, Mapping):
        return [(str(key), value) for key, value in batch.items()]
    if isinstance(batch, list | tuple):
        return [(str(index), value) for index, value in enumerate(batch)]
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return [(field.name, getattr(batch, field.name)) for field in dataclasses.fields(batch)]
    return []


def _replace_tensors(batch: Any, part: Callable[[str, Tensor], Tensor], name: str = "") -> Any:
    """A copy of a batch with other tensors."""
    if isinstance(batch, Tensor):
        return part(name, batch)
    items = _items(batch)
    if not items:
        return batch
    prefix = f"{name}." if name else ""
    values = [_replace_tensors(value, part, f"{prefix}{key}") for key, value in items]
    if isinstance(batch, Mapping):
        changed = dict(zip(batch, values, strict=True))
        if not isinstance(batch, MutableMapping):
            return changed
        copied = copy.copy(batch)
        copied.update(changed)
        return copied
    if isinstance(batch, list | tuple):
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    copied = copy.copy(batch)
    for (field, _), value in zip(items, values, strict=True):
        object.__setattr__(copied, field, value)  # setattr() of a frozen dataclass raises
    return copied


def _holds_same(tensor: Tensor, other: Tensor) -> bool:
    a = tensor.detach()
    b = other.detach().to(tensor)
    return bool(((a == b) | ((a != a) & (b != b))).all())  # NaN is equal to itself


def _checksum(tensor: Tensor) -> int:
    return zlib.crc32(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def _shapes(entries: dict[str, Tensor]) -> str:
    return ", ".join(f"{_quote_name(name)} {tuple(tensor.shape)}" for name, tensor in entries.items()) or "none"


def _quote_name(name: str) -> str:
    return repr(name) if name else "the tensor"
