"""Manual optimization: backward passes and steps inside a training step, on two ranks and with SPMD."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import by_hand
from classic_runs import BY_HAND
from fsdp_core.testing.oracle import FP32_TOLERANCE
from fsdp_core.testing.training import loader, new_trainer
from xla_process import ok, results_of, run_script

#: What each case trains, which does the same in one process.
KINDS = {
    "two losses": "TwoLosses",
    "two losses, kept gathered": "TwoLosses",
    "two forward passes": "TwoForwards",
    "accumulated by hand": "Accumulates",
    "clipped by hand": "Clips",
    "flat by hand": "Clips",
    "gan": "Gan",
    "of its own": "OfItsOwn",
}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_script("classic_runs.py", 2, tmp_path_factory.mktemp("two"), *BY_HAND)


@pytest.fixture(scope="module")
def spmd(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("spmd")
    found: dict[str, Any] = results_of("spmd_by_hand.py", folder / "results.pt", str(folder))
    return found


def assert_as_one_process(result: dict[str, Any], kind: str, folder: Path) -> None:
    plain: Any = getattr(by_hand, kind)()
    new_trainer(folder, "auto").fit(plain, loader(4, 1))
    assert result["losses"] == pytest.approx([loss.item() for loss in plain.losses], abs=FP32_TOLERANCE)
    assert list(result["weights"]) == list(plain.state_dict())
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(result["weights"][name], value, atol=FP32_TOLERANCE, rtol=0)


@pytest.mark.parametrize("case", BY_HAND)
def test_ranks_train_as_one_process_does(two: dict[str, Any], case: str, tmp_path: Path) -> None:
    assert_as_one_process(ok(two, case), KINDS[case], tmp_path)


@pytest.mark.parametrize("kind", by_hand.__all__)
def test_spmd_trains_as_one_process_does(spmd: dict[str, Any], kind: str, tmp_path: Path) -> None:
    assert_as_one_process(spmd[kind], kind, tmp_path)
