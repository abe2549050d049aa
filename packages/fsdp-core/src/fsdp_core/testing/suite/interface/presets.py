"""Presets: names of strategies that only fix options of another strategy."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import fsdp_core
from fsdp_core.plugins import registry
from fsdp_core.plugins.capabilities import Capability
from fsdp_core.plugins.strategy_info import FrontEnd
from fsdp_core.testing import Ranks, oracle
from fsdp_core.testing.oracle import train_plain
from fsdp_core.testing.suite.base_class import Clauses, requires
from fsdp_core.testing.suite.checkpoints.trainer_checkpoints import assert_continues
from fsdp_core.testing.suite.numerics.parity import assert_same
from fsdp_core.testing.training import fabric_fit, fit

__all__ = ["PresetClauses"]


class PresetClauses(Clauses):
    """The strategy is a preset of the other one, trains and resumes.

    Attributes:
        preset_of: The strategy for which the whole suite runs.
    """

    preset_of: ClassVar[str]

    def test_it_only_fixes_options_of_the_other(self) -> None:
        """The classes must be the other strategy's, or subclasses that define only options."""
        ours, theirs = fsdp_core.describe(self.strategy), fsdp_core.describe(self.preset_of)
        assert registry.provider(self.strategy) == registry.provider(self.preset_of)
        assert (ours.capabilities, ours.accelerators) == (theirs.capabilities, theirs.accelerators)
        assert not theirs.presets
        front_ends: list[FrontEnd] = ["trainer", "fabric"]
        for front_end in front_ends:
            strategy_class = self.strategy_class(front_end)
            base = self.class_of(self.preset_of, front_end)
            # Without options that are fixed by name, only a subclass can fix any.
            assert ours.presets or strategy_class is not base
            for cls in strategy_class.__mro__[: strategy_class.__mro__.index(base)]:
                defined = {name for name, value in vars(cls).items() if callable(value)}
                assert defined <= {"__init__", "options_class", "new_backend"}, f"{cls} defines {defined}"

    def test_it_trains_as_the_oracle_does(self, ranks: Ranks, tmp_path: Path) -> None:
        """Losses and weights must equal those of one unsharded process."""
        got = ranks.run(2, fit, self.strategy, str(tmp_path), 2, 4, "adamw_groups")
        got += ranks.run(3, fabric_fit, self.strategy, 3, 4, "adamw_groups")
        assert_same(got, train_plain(4, oracle.adamw_groups))

    @requires(Capability.SHARDED_CHECKPOINT)
    def test_it_goes_on_from_a_checkpoint(self, ranks: Ranks, tmp_path: Path) -> None:
        """A sharded checkpoint must be restored bit for bit on another number of ranks, and training must resume."""
        names = {"saver": self.strategy, "reader": self.strategy}
        assert_continues(ranks, tmp_path, **names, saved_on=2, loaded_on=(3,), optimizer="adamw_groups")
