"""The program that XLA makes of a step is that of FSDP: weights are gathered, gradients reduced, activations stay."""

from __future__ import annotations

from collections import Counter

import pytest

from spmd_program import HIDDEN, ROWS, WIDTH
from xla_process import start


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Counter[str]]:
    folder = tmp_path_factory.mktemp("spmd_program")
    begun = {
        case: start("spmd_program.py", folder / f"{case}.pt", str(folder / case), flag)
        for case, flag in {"plain": "", "recomputed": "yes"}.items()
    }
    return {case: process.finish() for case, process in begun.items()}


@pytest.mark.parametrize("case", ["plain", "recomputed"])
def test_no_activation_crosses_devices(programs: dict[str, Counter[str]], case: str) -> None:
    sizes = {int(size) for each in programs[case] for size in each.partition("[")[2].strip("]").split(",") if size}
    assert sizes, "no collective was found"
    assert ROWS not in sizes
    assert ROWS // 4 not in sizes


@pytest.mark.parametrize("case", ["plain", "recomputed"])
def test_weights_are_gathered_and_gradients_reduced(programs: dict[str, Counter[str]], case: str) -> None:
    shapes = (f"[{WIDTH},{HIDDEN}]", f"[{HIDDEN},{WIDTH}]")
    gathered = sum(programs[case][f"all-gather f32{shape}"] for shape in shapes)
    reduced = sum(programs[case][f"all-reduce f32{shape}"] for shape in shapes)
    # six weights: forward and backward, but for the first weight, whose input needs no gradient
    assert gathered >= 11
    assert reduced == 6


def test_what_is_recomputed_is_gathered_once_more(programs: dict[str, Counter[str]]) -> None:
    def gathered(case: str) -> int:
        return sum(count for each, count in programs[case].items() if each.startswith("all-gather"))

    assert gathered("recomputed") > gathered("plain")
