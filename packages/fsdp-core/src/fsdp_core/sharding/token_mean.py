"""The mean of a loss over all tokens of a step: of all ranks that see other data, and of all micro-batches."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_core.errors import ShardingError
from fsdp_core.sharding.sequence import current_split
from fsdp_core.sharding.token_windows import CountedMean, current_window, note_mean
from fsdp_core.torch_private.dynamo import outside_of_compilation

__all__ = ["token_mean"]


def token_mean(loss: Tensor, count: Tensor | float, *, accumulated: bool | None = None) -> Tensor:
    """The mean of a loss over the tokens of all ranks, however many each has; its gradient is that of the mean.

    Where ranks average their own means, a rank with few tokens counts as much as one with many. This is the mean that
    one process has of the whole global batch: over data-parallel, replicated and context-parallel ranks, and, for the
    gradient, over the micro-batches that one optimizer step takes. Use it where a mean would stand, with nothing
    multiplied or divided; other losses may be added to it. All ranks must call it equally often; one without a token
    gives a sum and a count of 0. The mean over no token at all is 0, with gradients of 0.

    With ``accumulate_grad_batches`` of a Trainer, each step's gradient is that of the mean over all its tokens, also
    where an epoch ends amid it. Micro-batches that a loop accumulates by hand are declared by ``accumulated=True``, and
    not divided by their number; undeclared, the second one raises.

    Args:
        loss: The sum of the losses of this rank's tokens, or the losses of each, which ``count`` masks.
        count: The number of these tokens, or the sum of their weights; or a mask of them, true, or the weight, where a
            token counts. For losses of each token, the mask has their shape.
        accumulated: By hand, whether several backward passes with such losses make up one step: ``True`` if each is of
            one micro-batch of the step, ``False`` if each is of a loss of its own, and the step takes their sum.

    Returns:
        The mean over the tokens of all ranks, the same on each, in fp32 or wider.

    Raises:
        ShardingError: The loss or the count is no such thing: an integer loss, a mask of another shape, a negative
            number. On an accelerator, where a look at values would wait, a count that is negative or not finite makes
            the mean NaN on all ranks.

    Example:
        >>> losses, is_counted = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([True, True, False])
        >>> token_mean(losses, is_counted)
        tensor(1.5000)
        >>> token_mean((losses * is_counted).sum(), 2)
        tensor(1.5000)
    """
    return _compute_mean(loss, count, accumulated)


@outside_of_compilation  # a collective, and a record of what the step has computed
def _compute_mean(loss: Tensor, count: Tensor | float, accumulated: bool | None) -> Tensor:
    window = current_window()
    fault: ShardingError | None = None
    try:
        total, own_count = _read(loss, count)
    except ShardingError as error:
        # the other ranks are about to add up: they raise too, where they can look, and do not wait for this one
        fault = error
        device = loss.device if isinstance(loss, Tensor) else window.device
        total = own_count = torch.full((), math.nan, device=device)
    wide_dtype = torch.promote_types(total.dtype, torch.float32)
    own = torch.stack([total.detach().to(wide_dtype), own_count.to(total.device, wide_dtype)])
    sums = window.sum_over_ranks(own)
    total_of_all, count_of_all = sums[0], sums[1]
    if fault is not None:
        raise fault
    if _is_readable(own) and math.isnan(float(count_of_all)):
        raise ShardingError(
            "fsdp_core.token_mean() refuses the loss or the count of another rank, whose own error says more.\n"
            "Let all ranks give the sum of their losses, and how many tokens these are of."
        )
    is_empty = (count_of_all == 0) & (total_of_all == 0)
    mean = total_of_all / count_of_all.masked_fill(is_empty, 1)
    if not torch.is_grad_enabled():
        return mean
    window.note_use()
    split = current_split()
    if split is not None:
        split.note_weighted()
    if not total.requires_grad:
        return mean
    counted = CountedMean(window, count, count_of_all, is_empty, accumulated)
    note_mean(counted)
    result: Tensor = _TokenMean.apply(total, mean, counted)  # type: ignore[no-untyped-call]
    return result


class _TokenMean(torch.autograd.Function):
    """The mean over all ranks, as a function of this rank's sum: ranks average gradients, so each has their number."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, mean: Tensor, counted: CountedMean) -> Tensor:
        ctx.counted_mean = counted  # where a survey of the graph finds it
        ctx.dtype = total.dtype
        return mean.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return (gradient * ctx.counted_mean.share()).to(ctx.dtype), None, None


def _read(loss: object, count: object) -> tuple[Tensor, Tensor]:
    """This rank's sum and count.

    Raises:
        ShardingError: They can't be that.
    """
    if not isinstance(loss, Tensor) or not loss.is_floating_point():
        got = f"a tensor of {loss.dtype}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise ShardingError(
            f"fsdp_core.token_mean() was given {got} as the loss.\n"
            "Give it the sum of the losses of this rank's tokens, such as cross_entropy(..., reduction='sum'), or the "
            "losses of each, reduction='none': a tensor of floating-point numbers."
        )
    if isinstance(loss, DTensor):  # ranks that divide a layer have parts, or copies, of it
        loss = loss.full_tensor()
    if isinstance(count, Tensor):
        if isinstance(count, DTensor):
            count = count.full_tensor()
        return _read_tensor(loss, count)
    if isinstance(count, bool) or not isinstance(count, int | float):
        raise ShardingError(
            f"fsdp_core.token_mean() was given {count!r} as the count.\n"
            "Give it how many tokens the loss is of, as a number or a tensor, or a mask of them; a rank without a "
            "token gives 0."
        )
    if not (0 <= count < math.inf):
        raise _count_refusal(str(count))
    return loss.sum(), torch.full((), float(count), device=loss.device, dtype=_wide(loss))


def _read_tensor(loss: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    if count.requires_grad:
        raise ShardingError(
            "the count that fsdp_core.token_mean() was given requires gradients, which it has none of: weights are not "
            "trained.\n"
            "Write count.detach(); or compute a mean whose weights are trained from the values of all ranks, with "
            "self.all_gather(x, sync_grads=True)."
        )
    if count.is_complex():
        raise _count_refusal(f"a tensor of {count.dtype}")
    if loss.ndim and count.ndim and loss.shape != count.shape:
        raise ShardingError(
            f"fsdp_core.token_mean() was given losses of shape {tuple(loss.shape)} and a mask of shape "
            f"{tuple(count.shape)}.\n"
            "Give it a mask with an entry for each loss, mask.expand_as(losses) or mask.reshape(losses.shape); or the "
            "sum of the losses that count, and the mask or their number."
        )
    count = count.detach()
    wide_dtype = _wide(loss)
    if loss.ndim and count.ndim:
        counted_losses = loss.to(wide_dtype)
        if count.dtype == torch.bool:
            total = counted_losses.masked_fill(~count, 0).sum()
        else:
            total = (counted_losses.masked_fill(count == 0, 0) * count).sum()  # padding may have losses of NaN
    else:
        total = loss.sum()
    if count.dtype == torch.bool:
        return total, count.sum().to(loss.device, wide_dtype)
    wide_count = count.to(wide_dtype)
    is_bad = ~((wide_count >= 0) & wide_count.isfinite()).all()
    if _is_readable(count) and bool(is_bad):
        raise _count_refusal(f"{count}" if count.ndim == 0 else f"a mask that holds {float(wide_count.min()):g}")
    return total, wide_count.sum().masked_fill(is_bad, math.nan).to(loss.device)


def _is_readable(tensor: Tensor) -> bool:
    """Whether a look at values waits for no device, and there are values: a rehearsal's tensors have none."""
    return tensor.device.type == "cpu" and type(tensor) is Tensor


def _wide(loss: Tensor) -> torch.dtype:
    return torch.promote_types(loss.dtype, torch.float32)


def _count_refusal(count: str) -> ShardingError:
    return ShardingError(
        f"fsdp_core.token_mean() was given {count} as the count, which is no number of tokens and no weight.\n"
        "Give it how many tokens the loss is of, 0 or more; of labels, `labels != -100` is the mask of those that "
        "count."
    )
