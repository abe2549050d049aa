"""The order of a Trainer's features, and that a list is kept only for moments that several of them share."""

from __future__ import annotations

import pytest

from fsdp_core.lightning.features.feature import Feature
from fsdp_core.testing.loopback.trainer import LoopbackTrainerStrategy

MOMENTS = [name for name in vars(Feature) if not name.startswith("_")]


def classes() -> list[type[Feature]]:
    return [type(feature) for feature in LoopbackTrainerStrategy().features.in_order]


def test_features_come_in_this_order() -> None:
    names = [cls.__name__ for cls in classes()]
    assert names == [
        "Preemption",  # first, so that a signal that comes while a stage is set up is noted
        "BackgroundSaves",
        "FitChecks",  # before anything is done to the module
        "MetricsOverData",
        "CallbacksOverShards",
        "BaseOfFrozen",
        "ExactResume",  # after all that may draw random numbers as training starts
        "LateParamGroups",
    ]


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_moment_is_shared_by_several_features(moment: str) -> None:
    """One that is not is a plain call, which a reader can follow."""
    assert sum(moment in vars(cls) for cls in classes()) > 1


def test_each_feature_has_a_moment() -> None:
    assert [cls.__name__ for cls in classes() if not any(moment in vars(cls) for moment in MOMENTS)] == []
