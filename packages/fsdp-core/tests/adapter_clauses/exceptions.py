"""An exception between two stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from fsdp_core.testing import Ranks
from fsdp_core.testing.refusals import refusal
from fsdp_core.testing.suite.base_class import Clauses
from fsdp_core.testing.training import Lit, loader, new_trainer

__all__ = ["ExceptionsOfAdaptersSuite"]


class RaisesWhenArmed(pl.Callback):
    """Raises before a stage is set up."""

    armed = False

    def setup(self, *args: Any, **kwargs: Any) -> None:
        if self.armed:
            raise ZeroDivisionError("between two stages")


def _between_stages(strategy: str, tmp: str) -> str:
    module, callback = Lit("sgd"), RaisesWhenArmed()
    run = new_trainer(tmp, strategy, 2, callbacks=[callback])
    run.fit(module, loader(1, 2))
    callback.armed = True
    return refusal(ZeroDivisionError, lambda: run.fit(module, loader(1, 2)))


class ExceptionsOfAdaptersSuite(Clauses):
    """Adapters hide no exception of the user."""

    def test_an_exception_between_stages_shows_itself(self, ranks: Ranks, tmp_path: Path) -> None:
        """An exception between two stages must reach the user unchanged."""
        for told in ranks.run(2, _between_stages, self.strategy, str(tmp_path)):
            assert told == "between two stages"
