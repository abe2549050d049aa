"""Signals that come before something else ends a fit."""

from __future__ import annotations

import os
import signal
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from fsdp_core.testing import RankPool
from fsdp_core.testing.training import Lit, loader, new_trainer


class _Fails(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)  # as torchrun sends it when it has lost another rank
        if self.fails:
            raise RuntimeError("a collective has failed")
        return super().training_step(batch, batch_idx)

    fails = False


def warned(tmp: str, fails: bool) -> list[str]:
    module = _Fails()
    module.fails = fails
    run = new_trainer(tmp, "fsdp2", 1, max_steps=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(RuntimeError, match="a collective has failed") if fails else nullcontext():
            run.fit(module, loader(1, 1))
    return [str(one.message) for one in caught if "SIGTERM" in str(one.message)]


@pytest.mark.parametrize("fails", [True, False])
def test_a_fit_that_an_exception_ends_has_not_ended_as_planned(ranks: RankPool, tmp_path: Path, fails: bool) -> None:
    (told,) = ranks.run(1, warned, str(tmp_path), fails)
    assert ["the fit has ended as planned" in one for one in told] == [True] * (not fails)
