"""Checks of a first forward pass on a part of a sequence, for code that takes the part for the whole."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fsdp_core import ShardingError

if TYPE_CHECKING:
    from fsdp_fsdp2.context_parallel.attention_and_losses import ContextParallel

__all__ = ["FirstPass", "unsplit_length_error"]

#: torch's own function: this file is imported before it is replaced.
_ATTENTION = torch.nn.functional.scaled_dot_product_attention
_SOFTMAX = {torch.softmax, torch.nn.functional.softmax, Tensor.softmax}
_POSITIONS = "Positions of this rank's part are fsdp_core.sequence_positions(length)"


def unsplit_length_error(length: int, lengths: Collection[int]) -> ShardingError:
    """The error to raise for attention over a length that no part of a batch has had."""
    if not lengths:
        return ShardingError(
            "context parallelism was asked for, and no batch has been split: every rank computes on whole sequences.\n"
            "Write batch = fabric.strategy.split_batch(batch), or let fabric.setup_dataloaders() set up the loader."
        )
    listing = ", ".join(map(str, sorted(lengths)[:8]))
    return ShardingError(
        f"attention was called over {length} positions, and the parts of batches on this rank have had {listing}.\n"
        "Was this batch split? fabric.setup_dataloaders() and fabric.strategy.split_batch() do it. Models that add "
        "tokens to a sequence, or generate with a cache, can't be split: leave context_parallel_size out."
    )


class FirstPass(TorchFunctionMode):
    """Refuses what is known to be wrong on a part of a sequence. Used in the first pass in training and in evaluation.

    Args:
        context: The module's context parallelism.
        root: The module.
    """

    def __init__(self, context: ContextParallel, root: nn.Module) -> None:
        super().__init__()
        self._context = context
        self._lengths = frozenset(context.split.lengths)
        self._tables = {id(table) for table in (*root.buffers(), *root.parameters(), *_plain_tables(root))}

    def begin(self) -> None:
        """Check operations from now on."""
        self.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """Check no more."""
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self._context.is_calling_torch:
            self._check(func, args, kwargs)
        return func(*args, **kwargs)

    def _check(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if func is _ATTENTION:
            raise ShardingError(
                "attention was called by a name that was imported before the strategy replaced it (from "
                "torch.nn.functional import scaled_dot_product_attention): it sees this rank's part of the sequence "
                "alone.\nCall it as torch.nn.functional.scaled_dot_product_attention."
            )
        if func in _SOFTMAX and isinstance(args[0] if args else None, Tensor):
            scores = args[0].shape
            if len(scores) > 3 and scores[-1] in self._lengths and scores[-2] in self._lengths:
                raise ShardingError(
                    f"a softmax over scores of shape {tuple(scores)} looks like attention by hand, which sees this "
                    "rank's part of the sequence alone.\n"
                    "Call torch.nn.functional.scaled_dot_product_attention (attn_implementation='sdpa' for "
                    "transformers), or leave context_parallel_size out."
                )
        if self._context.models_with_positions:
            return
        if func is torch.arange and _arange_end(args, kwargs) in self._lengths:
            raise ShardingError(
                f"torch.arange({_arange_end(args, kwargs)}) in the model counts the positions of this rank's part of "
                f"the sequence from 0, on every rank.\n{_POSITIONS}; or give them to the model in the batch. If it "
                "counts something else, of which there are as many, make it once in __init__()."
            )
        if func is Tensor.__getitem__ and (id(args[0]) in self._tables or isinstance(args[0], nn.Parameter)):
            cut = _cut_length(args[0], args[1], self._lengths)
            if cut is not None:
                raise ShardingError(
                    f"a parameter, buffer or attribute of shape {tuple(args[0].shape)} was cut to [:{cut}], the length "
                    f"of this rank's part of the sequence: every rank gets the first positions.\n{_POSITIONS}, "
                    "with which the table can be indexed: table[positions]."
                )


def _plain_tables(root: nn.Module) -> Iterator[Tensor]:
    """The tensors that modules hold as plain attributes, or in tuples, lists and dicts there, such as rotary tables."""
    for module in root.modules():
        for name, value in vars(module).items():
            if name not in ("_parameters", "_buffers", "_modules"):
                if isinstance(value, dict):
                    items = list(value.values())
                else:
                    items = list(value) if isinstance(value, list | tuple) else [value]
                yield from (item for item in items if isinstance(item, Tensor))


def _arange_end(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """The end of an ``arange`` from 0 by steps of 1; ``None`` for any other."""
    start, end, step = kwargs.get("start", 0), kwargs.get("end"), kwargs.get("step", 1)
    if len(args) == 1:
        (end,) = args
    elif args:
        start, end, step = (*args, step)[:3]
    return end if type(end) is int and start == 0 and step == 1 else None


def _cut_length(table: Tensor, index: Any, lengths: Collection[int]) -> int | None:
    """Which of some lengths an index cuts a longer dimension of a table to; ``None`` if none."""
    indices = [item for item in (index if isinstance(index, tuple) else (index,)) if item is not None]
    if any(isinstance(item, Tensor) and item.dtype == torch.bool for item in indices):
        return None  # a mask may stand for several dimensions
    ellipsis = next((i for i, item in enumerate(indices) if item is Ellipsis), None)
    if ellipsis is not None:
        indices[ellipsis : ellipsis + 1] = [slice(None)] * (table.ndim - len(indices) + 1)
    for size, item in zip(table.shape, indices, strict=False):
        is_from_start = isinstance(item, slice) and item.start in (None, 0) and item.step in (None, 1)
        if is_from_start and type(item.stop) is int and item.stop in lengths and size > item.stop:
            return int(item.stop)
    return None
