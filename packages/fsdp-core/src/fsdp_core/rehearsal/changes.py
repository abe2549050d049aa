"""What would make a fit fit its devices, where nothing does: each change is rehearsed, not computed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from torch import Tensor

from fsdp_core.rehearsal.candidates import Candidate, candidates_for
from fsdp_core.rehearsal.fabric_loop import CaughtLoop
from fsdp_core.rehearsal.planning import Outcome, rehearse_candidate
from fsdp_core.rehearsal.script import CaughtFit
from fsdp_core.torch_private.fake_tensors import tree_leaves, tree_map_only

__all__ = ["cheapest_changes", "first_rows"]

#: A change in words, with the fit and the candidate that it is rehearsed with.
_Change: TypeAlias = tuple[str, CaughtFit, Candidate]

#: A change that saves less than this part of the peak is not taken further.
_HELPS = 0.01

#: Candidates with whole parameters on each device.
_WHOLE = ("auto", "ddp")

#: The most ranks that are rehearsed.
_MOST_RANKS = 16_384


def cheapest_changes(
    fit: CaughtFit | CaughtLoop, planned: Sequence[tuple[Candidate, Outcome]], memory: int, device: str = "cpu"
) -> list[Outcome]:
    """The smallest changes of either kind that make the fit fit: micro-batches of fewer rows, or more devices.

    Both start from the candidate that needs least. Rows are halved, and ``accumulate_grad_batches`` doubled, so that an
    optimizer step still sees as many. Devices are doubled.

    Args:
        fit: The fit. Of a loop under Fabric, which reads its own loader, no changes are known.
        planned: The candidates that were rehearsed, none of which fits.
        memory: The bytes that a device has.
        device: The kind of device, as :func:`~fsdp_core.rehearsal.planning.rehearse_candidate` takes it.

    Returns:
        What was rehearsed with either change, if it fits; the first needs no other devices.
    """
    rehearsed = [plan for plan in planned if plan[1].error is None]
    if not rehearsed or not isinstance(fit, CaughtFit):
        return []
    candidate, least = min(rehearsed, key=lambda plan: plan[1].needed_bytes)
    kinds = (_with_fewer_rows(fit, candidate), _with_more_devices(fit, _sharded(fit, rehearsed)))
    fitting = (_first_that_fits(changes, least, memory, device) for changes in kinds)
    return [outcome for outcome in fitting if outcome is not None]


def _sharded(fit: CaughtFit, rehearsed: Sequence[tuple[Candidate, Outcome]]) -> Candidate | None:
    """The candidate that shards and needs least; if none was rehearsed, on one device, the first that is installed."""
    sharded = [plan for plan in rehearsed if plan[0].strategy not in _WHOLE]
    if sharded:
        return min(sharded, key=lambda plan: plan[1].needed_bytes)[0]
    on_two, _ = candidates_for(2, fit.module)
    first = next((other for other in on_two if other.strategy not in _WHOLE and not other.options), None)
    return None if first is None else replace(first, ranks=1)


def _first_that_fits(changes: Iterator[_Change], before: Outcome, memory: int, device: str) -> Outcome | None:
    for words, fit, candidate in changes:
        outcome = replace(rehearse_candidate(fit, candidate, device=device), code=words)
        if outcome.fits(memory):
            return outcome
        if outcome.error is not None or outcome.needed_bytes > before.needed_bytes * (1 - _HELPS):
            return None
        before = outcome
    return None


def _with_fewer_rows(fit: CaughtFit, candidate: Candidate) -> Iterator[_Change]:
    rows, parts = _count_rows(fit.batch), 2
    accumulated = fit.trainer_keywords.get("accumulate_grad_batches", 1)
    while rows is not None and rows // parts and isinstance(accumulated, int):
        arguments = {**fit.trainer_keywords, "accumulate_grad_batches": accumulated * parts}
        batches = None if fit.batches is None else fit.batches * parts
        smaller = replace(
            fit, drawn=[first_rows(fit.batch, rows // parts)], batches=batches, trainer_keywords=arguments
        )
        words = f"{candidate.code}, batch_size / {parts}, accumulate_grad_batches={accumulated * parts}"
        yield words, smaller, candidate
        parts *= 2


def _with_more_devices(fit: CaughtFit, candidate: Candidate | None) -> Iterator[_Change]:
    if candidate is None or candidate.as_written is not None:
        return
    ranks = candidate.ranks * 2
    while ranks <= _MOST_RANKS:
        larger = replace(candidate, ranks=ranks)
        words = f"{candidate.code}, on {ranks} devices"
        yield words, fit, larger
        ranks *= 2


def _count_rows(batch: Any) -> int | None:
    """The rows of a batch, the first dimension of its tensors; ``None`` if they differ, or there are none."""
    sizes = {leaf.shape[0] if leaf.ndim else None for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)}
    return sizes.pop() if len(sizes) == 1 else None


def first_rows(batch: Any, count: int) -> Any:
    """The first rows of each tensor of a batch.

    Args:
        batch: Tensors in lists, tuples and dictionaries.
        count: How many rows.

    Example:
        >>> import torch
        >>> first_rows({"x": torch.arange(4), "name": "a"}, 2)
        {'x': tensor([0, 1]), 'name': 'a'}
    """
    return tree_map_only(Tensor, lambda tensor: tensor[:count], batch)
