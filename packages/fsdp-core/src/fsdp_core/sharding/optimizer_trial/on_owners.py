"""Whether an optimizer can step over each whole parameter on one rank, apart from the others."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from fsdp_core.sharding.optimizer_trial.copies import keeps_parameters
from fsdp_core.sharding.optimizer_trial.courses import (
    FINE,
    SLIGHT,
    Course,
    Ran,
    alike,
    course,
    is_right_in_runs,
    keeps_alike,
    step_over_nothing,
)
from fsdp_core.sharding.optimizer_trial.small_tensors import Kind, as_it_is
from fsdp_core.sharding.optimizer_trial.state import why_not_resumed, why_not_saved

__all__ = ["right_on_owners"]


def right_on_owners(
    optimizer: torch.optim.Optimizer, kinds: Mapping[nn.Parameter, Kind], whole: Ran, *, is_flat: bool, is_torchs: bool
) -> tuple[bool, str | None]:
    """Whether an optimizer can step over each parameter apart from the others, and only then is right.

    One whose update is elementwise needs no whole parameters. One that keeps its parameters besides its groups would go
    on with the shards. One that needs a parameter in each group would fail on a rank that owns none. One that steps
    with a closure may compute losses at several points, for which all shards would have to follow.

    Args:
        optimizer: The optimizer. It is not changed.
        kinds: What represents its parameters.
        whole: Its steps over whole tensors, all together.
        is_flat: Whether it is known already to be wrong over runs of elements.
        is_torchs: Whether it is one of torch's, whose state is known.

    Returns:
        The answer; and, if it can, why it must not nevertheless.
    """
    if keeps_parameters(optimizer) or callable(getattr(optimizer, "eval", None)) or whole.by_closure:
        return False, None
    if not is_flat:
        in_runs = {p: kind.in_runs() for p, kind in kinds.items()}
        with suppress(Exception):
            if is_right_in_runs(optimizer, in_runs, by_closure=False)[0]:
                return False, None
    if whole.drew:
        return True, (
            "it draws random numbers in its step, and each owner would draw others than one process does.\n"
            "Use an optimizer that draws none, such as AdamW."
        )

    def each(**settings: Any) -> tuple[Course, bool]:
        ran = {key: course(optimizer, kinds, as_it_is, by_closure=False, only=key, **settings) for key in whole.values}
        return {key: one.values[key] for key, one in ran.items()}, all(keeps_alike(whole, one) for one in ran.values())

    try:
        step_over_nothing(optimizer, kinds)
        alone, keeps = each()
        beside, keeps_beside = each(beside_others=True)
        if not (keeps and keeps_beside and alike(whole.values, alone, FINE) and alike(alone, beside, FINE)):
            return False, None
        if not alike(each(scale=SLIGHT)[0], each(scale=SLIGHT, beside_others=True)[0], FINE):
            return False, None
    except Exception:
        return False, None
    lost = why_not_saved(whole)
    if lost is None and not is_torchs:
        lost = why_not_resumed(optimizer, kinds, whole, whole, as_it_is, by_closure=False)
    return True, lost
