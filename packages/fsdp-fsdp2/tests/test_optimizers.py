"""Optimizers over shards."""

from __future__ import annotations

from fsdp_core.testing import RankPool
from fsdp_core.testing.suite.optimizers import assert_all_trained, built_after_evaluation


def test_groups_by_ndim_can_be_made_of_shards(ranks: RankPool) -> None:
    """DTensors show the shapes that the user wrote, outside of ``configure_optimizers`` too."""
    for got in ranks.run(2, built_after_evaluation, "fsdp2", "adamw_groups"):
        assert_all_trained(got)
