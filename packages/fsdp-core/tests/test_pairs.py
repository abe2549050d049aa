"""Pairs of options: what is drawn, and what a comparison finds."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pytest

from fsdp_core import Capability, Option
from fsdp_core.testing.loopback.plugin import LOOPBACK
from fsdp_core.testing.meshes import LINES, DeclaredMesh
from fsdp_core.testing.pairs.comparing import differences, differing_bits
from fsdp_core.testing.pairs.dimensions import FORBIDDEN, declared, options_of
from fsdp_core.testing.pairs.drawing import coverage, draw, forbids
from fsdp_core.testing.pairs.running import Outcome, Piece, Pieces
from fsdp_core.testing.pairs.unsharded_run import Run, train_in_one_process

_MORE = ("cpu_offload", "activation_checkpointing_policy", "reshard_after_forward", "auto_wrap_policy")

#: A strategy that declares all, with six meshes.
ALL = declared(
    replace(
        LOOPBACK,
        capabilities=frozenset(Capability),
        options=(*LOOPBACK.options, *(Option(name=name) for name in (*_MORE, "sync_each_batch"))),
    ),
    {f"mesh {number}": DeclaredMesh(ranks=2) for number in range(6)},
    seldom=False,
)
RULES = [rule for rule, _ in FORBIDDEN]
DEFAULTS = {one.name: next(iter(one.values)) for one in ALL}


@pytest.mark.parametrize("seed", range(3))
def test_sixty_configurations_cover_all_pairs_that_can_be(seed: int) -> None:
    many = list(islice(draw(ALL, RULES, seed), 200))
    drawn = many[:60]
    covered, can_be = coverage(drawn, ALL, RULES)
    assert covered == can_be > 1500
    assert not any(forbids(rule, one) for rule in RULES for one in many)
    assert drawn == list(islice(draw(ALL, RULES, seed), 60)) != list(islice(draw(ALL, RULES, seed + 1), 60))
    assert all(one.keys() == DEFAULTS.keys() for one in drawn)


def test_a_strategy_is_drawn_with_what_it_declares() -> None:
    own = {one.name: set(one.values) for one in declared(LOOPBACK, LINES)}
    assert (own["precision"], own["clip"]) == ({"double", "32-true"}, {"nothing", "norm", "largest", "value"})
    assert own["cpu_offload"] == own["wrap"] == {"left out"}
    assert own["mesh"] == set(LINES)
    first = {one.name: next(iter(one.values)) for one in declared(LOOPBACK, LINES)}
    options = options_of({**first, "saved": "full"}, declared(LOOPBACK, LINES))
    assert options == {"state_dict_type": "full"}
    without = declared(LOOPBACK, LINES, without={"trained=in some steps": "a reason"})
    assert {one.name: set(one.values) for one in without}["trained"] == own["trained"] - {"in some steps"}


CHOSEN = {**DEFAULTS, "precision": "double", "optimizer": "adamw", "clip": "norm", "accumulate": "2"}
WANT = train_in_one_process(CHOSEN)


def held(values: dict[Any, Any], rank: int) -> Pieces:
    """Copies of everything on two ranks; what has rows is divided between them."""
    pieces: Pieces = {}
    for name, tensor in values.items():
        data = tensor.numpy().copy()
        if data.ndim:
            half = -(-len(data) // 2)
            box, start = (data[:half], 0) if rank == 0 else (data[half:], half)
            boxes = (((start, *[0] * (data.ndim - 1)), box.copy()),)
            pieces[name] = Piece(shape=data.shape, dtype="torch.float64", replica=0, boxes=boxes)
        else:
            pieces[name] = Piece(shape=(), dtype="torch.float64", replica=rank, boxes=(((), data),))
    return pieces


def outcomes_of(run: Run) -> list[Outcome]:
    return [
        Outcome(
            losses=list(run.losses),
            gradients=[held(dict(step), rank) for step in run.gradients],
            norms=list(run.norms),
            weights=held(dict(run.weights), rank),
            moments=held(dict(run.moments), rank),
        )
        for rank in range(2)
    ]


def test_the_oracle_equals_itself() -> None:
    assert differences(outcomes_of(WANT), WANT, CHOSEN) == []
    assert differing_bits(outcomes_of(WANT), outcomes_of(WANT)) == []


def swapped(a: Outcome, b: Outcome) -> None:
    a.moments, b.moments = b.moments, a.moments
    for name, one in a.moments.items():  # each rank says that it holds what the other does
        other = b.moments[name]
        places = [box[0] for box in one.boxes], [box[0] for box in other.boxes]
        if one.shape and one.boxes[0][1].shape == other.boxes[0][1].shape:
            a.moments[name] = replace(one, boxes=tuple(zip(places[1], [box[1] for box in one.boxes], strict=True)))
            b.moments[name] = replace(other, boxes=tuple(zip(places[0], [box[1] for box in other.boxes], strict=True)))


def test_swapped_moments_are_found() -> None:
    outcomes = outcomes_of(WANT)
    swapped(*outcomes)
    found = differences(outcomes, WANT, CHOSEN)
    assert any(told.startswith("moment exp_avg of ('blocks.0.up.weight'") for told in found)


FAULTS = {
    "a copy of its own": ("weight of temperature: rank 1, with copy 1, holds other values than copy 0", "temperature"),
    "a part that nobody holds": ("weight of out.weight: some elements are held [0, 1] times by copy 0", "out.weight"),
    "no moment": ("moment exp_avg: missing [\"('side.0.bias', 'exp_avg')\"]", "side.0.bias"),
    "one part in a thousand million": ("gradient in step 1 of inp.weight", "inp.weight"),
    "a gradient of what has none": ("gradient in step 0: missing [], not the oracle's ['scale']", "scale"),
    "a norm": ("norms [", ""),
    "a loss": ("loss of micro-batch 4", ""),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_found(fault: str) -> None:
    words, name = FAULTS[fault]
    outcomes = outcomes_of(WANT)
    first, last = outcomes
    if fault == "a copy of its own":
        last.weights[name].boxes[0][1][...] += 1e-15 + 1e-9
    elif fault == "a part that nobody holds":
        last.weights[name] = replace(last.weights[name], boxes=())
    elif fault == "no moment":
        for one in outcomes:
            del one.moments[name, "exp_avg"]
    elif fault == "one part in a thousand million":
        first.gradients[1][name].boxes[0][1][...] *= 1 + 1e-9
    elif fault == "a gradient of what has none":
        for one in outcomes:
            one.gradients[0]["scale"] = deepcopy(one.weights["scale"])
    elif fault == "a norm":
        first.norms[0] *= 2
    else:
        last.losses[4] += 1e-6
    assert any(told.startswith(words) for told in differences(outcomes, WANT, CHOSEN))


def test_one_bit_after_a_resume_is_found() -> None:
    resumed = outcomes_of(WANT)
    one = resumed[1].weights["inp.weight"].boxes[0][1]
    one[0, 0] = np.nextafter(one[0, 0], 1)
    assert differing_bits(resumed, outcomes_of(WANT)) == ["weight of inp.weight on rank 1, after the resume"]
