"""Puts together what ranks hold, and compares it with the oracle and with a run that was not stopped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fsdp_core.testing.oracle import FP32_TOLERANCE, HALF_TOLERANCE
from fsdp_core.testing.pairs.dimensions import Configuration
from fsdp_core.testing.pairs.net import MICRO_BATCHES, is_last
from fsdp_core.testing.pairs.running import Outcome, Piece, Pieces
from fsdp_core.testing.pairs.unsharded_run import Run

__all__ = ["DOUBLE_TOLERANCE", "differences", "differing_bits"]

#: For fp64. The order of additions differs between one process and several; measured differences stay below 1e-15, and
#: a fault of a billionth of a gradient is detected.
DOUBLE_TOLERANCE = 1e-12

#: By label of a precision that is not half: how far a tensor may be from the oracle's, relative to its own norm plus a
#: tenth of the largest norm of its quantity. The latter is for sums that cancel out, which are as inexact as their
#: terms.
_TOLERANCES: Mapping[str, float] = {"double": DOUBLE_TOLERANCE, "32-true": FP32_TOLERANCE}

#: The factor for half precision with clipping by value: clipping makes large elements small, but not their errors.
_CLIPPED_BY_VALUE = 10.0

Array = np.ndarray[Any, Any]


def _join(pieces_of_ranks: Sequence[Piece | None], name: str, messages: list[str]) -> Array:
    """Join the pieces of all ranks to one tensor, and add what is wrong with the pieces to ``messages``."""
    pieces = {rank: piece for rank, piece in enumerate(pieces_of_ranks) if piece is not None}
    full: Array = np.zeros(next(iter(pieces.values())).shape)
    copy_counts: Array = np.zeros(full.shape, dtype=int)
    for piece in pieces.values():
        own_boxes = piece.boxes if piece.replica == 0 else ()
        for offsets, data in own_boxes:
            box = tuple(slice(o, o + n) for o, n in zip(offsets, data.shape, strict=True))
            full[box] = data
            copy_counts[box] += 1
    if (copy_counts != 1).any():
        messages.append(f"{name}: some elements are held {sorted(set(copy_counts.ravel().tolist()))} times by copy 0")
    for rank, piece in pieces.items():
        for offsets, data in piece.boxes:
            box = tuple(slice(o, o + n) for o, n in zip(offsets, data.shape, strict=True))
            if not np.array_equal(full[box], data, equal_nan=True):
                messages.append(f"{name}: rank {rank}, with copy {piece.replica}, holds other values than copy 0")
    return full


def _join_all(pieces_of_ranks: Sequence[Pieces], quantity: str, messages: list[str]) -> dict[Any, Array]:
    # All ranks' names, since a rank that holds nothing of a tensor may not have its name.
    names = dict.fromkeys(name for pieces in pieces_of_ranks for name in pieces)
    return {
        name: _join([pieces.get(name) for pieces in pieces_of_ranks], f"{quantity} of {name}", messages)
        for name in names
    }


def _compare(got: Mapping[Any, Array], want: Mapping[Any, Array], quantity: str, tolerance: float) -> list[str]:
    messages = []
    if got.keys() != want.keys():
        messages.append(
            f"{quantity}: missing {sorted(map(str, want.keys() - got.keys()))}, "
            f"not the oracle's {sorted(map(str, got.keys() - want.keys()))}"
        )
    largest = max((float(np.linalg.norm(value)) for value in want.values()), default=0.0)
    for name in want.keys() & got.keys():
        if got[name].shape != want[name].shape:
            messages.append(f"{quantity} of {name}: of shape {got[name].shape} instead of {want[name].shape}")
            continue
        norm = float(np.linalg.norm(want[name]))
        error = float(np.linalg.norm(got[name] - want[name]))
        if not error <= tolerance * (norm + 0.1 * largest):  # also if the error is NaN
            messages.append(f"{quantity} of {name}: {error:.3g} from the oracle's {norm:.3g}")
    return messages


def _arrays(tensors: Mapping[Any, Any]) -> dict[Any, Array]:
    return {name: np.asarray(tensor.numpy()) for name, tensor in tensors.items()}


def differences(
    outcomes: Sequence[Outcome], want: Run, configuration: Configuration, skipped_batches: int = 0
) -> list[str]:
    """What differs between a run on ranks and the oracle; empty if nothing does.

    Args:
        outcomes: What each rank has.
        want: The oracle's run.
        configuration: What was trained, and how.
        skipped_batches: The number of micro-batches that the run did not see, because it was resumed.
    """
    tolerance = _TOLERANCES.get(configuration["precision"], HALF_TOLERANCE)
    accumulate = int(configuration["accumulate"])
    if tolerance == HALF_TOLERANCE and configuration["clip"] == "value":
        tolerance *= _CLIPPED_BY_VALUE
    messages: list[str] = []
    losses = np.mean([outcome.losses for outcome in outcomes], axis=0)
    if len(losses) != MICRO_BATCHES - skipped_batches:
        return [f"{len(losses)} micro-batches instead of {MICRO_BATCHES - skipped_batches}"]
    for index, (loss, wanted_loss) in enumerate(
        zip(losses, want.losses[skipped_batches:], strict=True), start=skipped_batches
    ):
        if not abs(loss - wanted_loss) <= tolerance * (1 + abs(wanted_loss)):
            messages.append(f"loss of micro-batch {index}: {loss} instead of {wanted_loss}")
    skipped_steps = sum(is_last(index, accumulate) for index in range(skipped_batches))
    # Manual steps are inside a forward pass, where gradients are not recorded.
    if configuration["front_end"] != "by hand":
        wanted_steps = want.gradients[skipped_steps:]
        gradients_of_ranks = [outcome.gradients for outcome in outcomes]
        steps = zip(wanted_steps, *gradients_of_ranks, strict=True)
        for step, (wanted_gradients, *pieces_of_ranks) in enumerate(steps, start=skipped_steps):
            quantity = f"gradient in step {step}"
            gradients = _join_all(pieces_of_ranks, quantity, messages)
            messages += _compare(gradients, _arrays(wanted_gradients), quantity, tolerance)
    for outcome in outcomes:
        wanted_norms = want.norms[len(want.norms) - len(outcome.norms) :]
        if not np.allclose(outcome.norms, wanted_norms, rtol=tolerance, atol=0):
            messages.append(f"norms {outcome.norms} instead of {wanted_norms}")
            break
    weights = _join_all([outcome.weights for outcome in outcomes], "weight", messages)
    messages += _compare(weights, _arrays(want.weights), "weight", tolerance)
    moments = _join_all([outcome.moments for outcome in outcomes], "moment", messages)
    wanted_moments = _arrays(want.moments)
    for key in sorted({key for _, key in wanted_moments}):  # the largest norm differs between keys
        got = {name: value for name, value in moments.items() if name[1] == key}
        wanted = {name: value for name, value in wanted_moments.items() if name[1] == key}
        messages += _compare(got, wanted, f"moment {key}", tolerance)
    return messages


def differing_bits(resumed: Sequence[Outcome], uninterrupted: Sequence[Outcome]) -> list[str]:
    """What differs in any bit between a resumed run and the one that went on, on the same mesh."""
    messages = []
    for rank, (outcome, expected) in enumerate(zip(resumed, uninterrupted, strict=True)):
        if outcome.losses != expected.losses[len(expected.losses) - len(outcome.losses) :]:
            messages.append(f"losses on rank {rank} after the resume: {outcome.losses}, without it {expected.losses}")
        for quantity, got, want in (
            ("weight", outcome.weights, expected.weights),
            ("moment", outcome.moments, expected.moments),
        ):
            messages += [
                f"{quantity} of {name} on rank {rank}, after the resume"
                for name in want
                if name not in got or not _is_bit_equal(got[name], want[name])
            ]
    return messages


def _is_bit_equal(a: Piece, b: Piece) -> bool:
    if (a.shape, a.dtype, a.replica, len(a.boxes)) != (b.shape, b.dtype, b.replica, len(b.boxes)):
        return False
    return all(
        offsets_a == offsets_b and np.array_equal(data_a, data_b, equal_nan=True)
        for (offsets_a, data_a), (offsets_b, data_b) in zip(a.boxes, b.boxes, strict=True)
    )
