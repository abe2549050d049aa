"""The forward pass of divided experts: tokens go to the ranks that have their experts, and results come back."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_core import ShardingError
from fsdp_fsdp2.expert_parallel.plans import Contract, number_of_experts

__all__ = ["ExpertForward", "move_rows"]

# torch 2.13 deprecates the second name for the first
_all_to_all: Any = getattr(dist, "all_to_all_single", None)


class _Route(NamedTuple):
    """How many rows this rank sends to each rank that has experts, and gets from each.

    Attributes:
        group: These ranks.
        sent: By rank, the number of rows that are sent to it.
        received: By rank, the number of rows that come from it.
    """

    group: dist.ProcessGroup
    sent: list[int]
    received: list[int]

    def reversed(self) -> _Route:
        """The way back."""
        return _Route(self.group, self.received, self.sent)

    def move(self, rows: Tensor) -> Tensor:
        """Send rows, and receive others. All ranks of the group must call it."""
        arrived = rows.new_empty(sum(self.received), *rows.shape[1:])
        _all_to_all(arrived, rows.contiguous(), self.received, self.sent, group=self.group)
        return arrived


class _MoveRows(torch.autograd.Function):
    """Sends rows to other ranks, and gradients back, multiplied by a factor.

    Several tensors are moved in one function, so that all ranks move their gradients in the same order, whatever else
    their graphs hold.
    """

    @staticmethod
    def forward(ctx: Any, route: _Route, factor: float, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.route, ctx.factor = route, factor
        return tuple(route.move(rows) for rows in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        back = ctx.route.reversed()
        is_needed = ctx.needs_input_grad[2:]
        moved = [back.move(g).mul_(ctx.factor) if n else None for g, n in zip(gradients, is_needed, strict=True)]
        return None, None, *moved


def move_rows(route: _Route, factor: float, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Send rows of some tensors along a route. All ranks of its group must call it.

    Args:
        route: How many rows each rank sends to each.
        factor: What the gradients that come back are multiplied by.
        *tensors: The tensors, of which each has all rows to send.

    Returns:
        The rows that have arrived of each.
    """
    moved: tuple[Tensor, ...] = _MoveRows.apply(route, factor, *tensors)  # type: ignore[no-untyped-call]
    return moved


class _NoTokens(torch.autograd.Function):
    """The result of experts that get no token: nothing, and gradients of zero for their parameters.

    So this rank takes part in all collectives of the backward pass, and an optimizer sees the gradients that experts
    without tokens have in one process.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(*parameters)
        return tokens.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient, *(torch.zeros_like(parameter) for parameter in ctx.saved_tensors)


class ExpertForward:
    """The ``forward`` of a module of experts that are divided among ranks. Set it before ``fully_shard``.

    Called with this rank's tokens and what the router has chosen for each, it returns what the original one returns in
    one process. Where the parameters are whole, as in a copy of the module, it is the original one.

    Each rank's experts see the tokens of all ranks of the group, so the gradients of their parameters are sums over
    these ranks, of which ``fully_shard`` takes the mean over the other ranks alone. What comes back to the experts in
    the backward pass is divided by the number of ranks of the group, and what they return to the tokens is multiplied
    by it.

    Args:
        experts: The module. Its parameters become DTensors.
        contract: How it is called.
        name: Its name, for messages.
        group: The ranks that divide the experts, by the experts that they have.
        is_rehearsed: Whether the other ranks are imagined, and tensors have no values: each rank then gets as many
            tokens, and each expert.
    """

    def __init__(
        self,
        experts: nn.Module,
        contract: Contract,
        name: str,
        group: dist.ProcessGroup,
        *,
        is_rehearsed: bool = False,
    ) -> None:
        self.original: Callable[..., Tensor] = experts.forward
        self._experts, self._contract, self._name, self._group = experts, contract, name, group
        self._is_rehearsed = is_rehearsed
        self._number = number_of_experts(experts)
        self._signature = inspect.signature(self.original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(parameter, DTensor) for parameter in self._experts.parameters()):
            return self.original(*args, **kwargs)
        tensors = list(self._signature.bind(*args, **kwargs).arguments.values())
        expected = 3 if self._contract == "top_k" else 2
        if len(tensors) != expected or not all(isinstance(tensor, Tensor) for tensor in tensors):
            listing = ", ".join(type(tensor).__name__ for tensor in tensors)
            raise ShardingError(
                f"{self._name!r} was called with ({listing}), and experts that are divided among ranks take {expected} "
                f"tensors as planned by {self._contract!r}.\n"
                "Change expert_parallel_plan, or give the experts other values as attributes."
            )
        return self._choose_and_call(*tensors) if self._contract == "top_k" else self._call_sorted(*tensors)

    def __reduce__(self) -> tuple[Any, ...]:
        return _return_original, (self.original,)

    def _choose_and_call(self, tokens: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """Send each token to the experts that were chosen for it, and add up their weighted results."""
        rows = tokens.reshape(-1, tokens.shape[-1])
        choices = indices.shape[-1]
        experts_of_pairs = indices.reshape(-1)
        order = torch.argsort(experts_of_pairs, stable=True)
        counts = self._count(experts_of_pairs)
        route, received_counts, sent = self._route(counts, order.shape[0])
        order = order[:sent]  # without pairs that have no expert, which come last
        sent_rows, sent_weights = rows[order // choices], weights.reshape(-1)[order]
        arrived, arrived_weights = move_rows(route, float(self._ranks), sent_rows, sent_weights)
        experts_of_rows = _experts_of_rows(received_counts, route)[:, None].to(indices.dtype)
        results = self._call_own(arrived, experts_of_rows, arrived_weights[:, None])
        (returned,) = move_rows(route.reversed(), 1 / self._ranks, results)
        by_pair = returned.new_zeros(rows.shape[0] * choices, returned.shape[-1]).index_copy(0, order, returned)
        summed: Tensor = by_pair.view(*tokens.shape[:-1], choices, -1).sum(-2)  # no view, of which fully_shard warns
        return summed

    def _call_sorted(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """Send tokens that are sorted by expert."""
        route, received_counts, sent = self._route(counts.long(), tokens.shape[0])
        if sent != tokens.shape[0]:
            raise ShardingError(
                f"{self._name!r} was called with {tokens.shape[0]} tokens, and counts of tokens by expert that add up "
                f"to {sent}.\nCount each token once, with torch.bincount(indices.flatten(), minlength=experts)."
            )
        (arrived,) = move_rows(route, float(self._ranks), tokens)
        order = torch.argsort(_experts_of_rows(received_counts, route), stable=True)
        results = self._call_own(arrived[order], received_counts.sum(0).to(counts.dtype))
        (returned,) = move_rows(route.reversed(), 1 / self._ranks, results[torch.argsort(order)])
        return returned

    @property
    def _ranks(self) -> int:
        return self._group.size()

    def _count(self, experts_of_pairs: Tensor) -> Tensor:
        """By expert, the number of this rank's pairs of a token and an expert.

        A router may write the number of experts for a choice that it does not make.
        """
        counts = torch.zeros(self._number + 1, dtype=torch.int64, device=experts_of_pairs.device)
        counts.scatter_add_(0, experts_of_pairs.long(), torch.ones_like(experts_of_pairs, dtype=torch.int64))
        return counts[:-1]

    def _route(self, counts: Tensor, rows: int) -> tuple[_Route, Tensor, int]:
        """Exchange how many tokens each expert gets. All ranks of the group must call it.

        Args:
            counts: By expert, the number of this rank's tokens.
            rows: The number of this rank's tokens, with those that have no expert.

        Returns:
            The route; by rank and own expert, the number of tokens that come; and the number of this rank's tokens that
            are sent.
        """
        sent_counts = counts.view(self._ranks, -1)
        received_counts = torch.empty_like(sent_counts)
        _all_to_all(received_counts, sent_counts.contiguous(), group=self._group)
        if self._is_rehearsed:
            even = [rows // self._ranks + (rank < rows % self._ranks) for rank in range(self._ranks)]
            return _Route(self._group, even, even), received_counts, rows
        sent, received = torch.stack([sent_counts.sum(1), received_counts.sum(1)]).tolist()
        return _Route(self._group, sent, received), received_counts, sum(sent)

    def _call_own(self, tokens: Tensor, *arguments: Tensor) -> Tensor:
        """Call this rank's experts with the tokens that have come, if any has."""
        with _local_parameters(self._experts, self._number, self._ranks) as parameters:
            if not tokens.shape[0]:
                trained = [parameter for parameter in parameters if parameter.requires_grad]
                no_results: Tensor = _NoTokens.apply(tokens, *trained)  # type: ignore[no-untyped-call]
                return no_results
            results = self.original(tokens, *arguments)
        if not isinstance(results, Tensor) or results.shape != tokens.shape:
            returned = tuple(results.shape) if isinstance(results, Tensor) else type(results).__name__
            raise ShardingError(
                f"{self._name!r} has returned {returned} for tokens of shape {tuple(tokens.shape)}, and experts that "
                "are divided among ranks must return a tensor of the same shape.\n"
                "Compute other results, such as router losses, in the module around."
            )
        return results.to(tokens.dtype)  # ranks without tokens don't know another


def _experts_of_rows(received_counts: Tensor, route: _Route) -> Tensor:
    """By row that has arrived, the index of its expert among this rank's: rows are sorted by rank, then by expert."""
    ranks, experts = received_counts.shape
    indices = torch.arange(experts, device=received_counts.device).repeat(ranks)
    return indices.repeat_interleave(received_counts.flatten(), output_size=sum(route.received))


def _return_original(forward: Callable[..., Any]) -> Callable[..., Any]:
    return forward


@contextmanager
def _local_parameters(experts: nn.Module, number: int, ranks: int) -> Iterator[Sequence[Tensor]]:
    """A context in which modules have this rank's experts alone, as plain tensors.

    ``num_experts`` is their number, where the module has such an attribute.
    """
    shadowed: list[tuple[nn.Module, str]] = []
    local_tensors: list[Tensor] = []
    count = vars(experts).get("num_experts")
    try:
        for module in experts.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if isinstance(parameter, DTensor):
                    local = parameter.to_local()
                    module.__dict__[name] = local  # found before the parameter
                    shadowed.append((module, name))
                    local_tensors.append(local)
        if count == number:
            vars(experts)["num_experts"] = number // ranks
        yield local_tensors
    finally:
        for module, name in shadowed:
            del module.__dict__[name]
        if count is not None:
            vars(experts)["num_experts"] = count
