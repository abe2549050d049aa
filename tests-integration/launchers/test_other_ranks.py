"""A run that goes on with another number of ranks: what becomes of the global batch is said, or is chosen."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from fsdp_core.lightning import GlobalBatch
from fsdp_core.testing import RankPool
from fsdp_core.testing.oracle import BATCH, RESUME_TOLERANCE, dataset, momentum, train_plain
from fsdp_core.testing.training import Lit, means, new_trainer

STEPS, PER_RANK = 4, 3


def fit(folder: str, ranks: int, size: Any, stop: int, resume: str | None, accumulate: int = 1) -> dict[str, Any]:
    """Fit until a step, on some ranks; the warnings about the batch, and each micro-batch's loss over the ranks."""
    callbacks = [] if size is None else [GlobalBatch(size, per_rank=None if size == "scaled" else PER_RANK)]
    module = Lit("momentum")
    run = new_trainer(folder, "fsdp2", ranks, callbacks=callbacks, max_steps=stop, accumulate_grad_batches=accumulate)
    # Lightning shuffles for training, as torch's DistributedSampler does: into the oracle's order
    order = torch.randperm(BATCH * STEPS, generator=torch.Generator().manual_seed(0)).tolist()
    data: Any = [row for _, row in sorted(zip(order, dataset(BATCH * STEPS), strict=True), key=lambda one: one[0])]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run.fit(module, DataLoader(data, PER_RANK), ckpt_path=resume)
    run.save_checkpoint(f"{folder}/saved-on-{ranks}")
    about = [str(one.message) for one in said if "global batch" in str(one.message)]
    return {"said": about, "losses": means(module.losses), "accumulate": run.accumulate_grad_batches}


def test_the_global_batch_is_kept_or_told_to_change(ranks: RankPool, tmp_path: Path) -> None:
    folder = str(tmp_path)
    first = ranks.run(4, fit, folder, 4, BATCH, 2, None)
    assert [one["accumulate"] for one in first] == [1] * 4
    kept = ranks.run(2, fit, folder, 2, BATCH, STEPS, f"{folder}/saved-on-4")
    assert {(one["accumulate"], *one["said"]) for one in kept} == {(2,)}
    losses, _ = train_plain(STEPS, momentum)
    halves = kept[0]["losses"]
    steps = first[0]["losses"] + [sum(halves[at : at + 2]) / 2 for at in range(0, len(halves), 2)]
    assert steps == pytest.approx(losses, abs=RESUME_TOLERANCE)
    chosen = ranks.run(1, fit, folder, 1, "scaled", 3, f"{folder}/saved-on-4")
    assert chosen[0]["said"] == []
    (told,) = ranks.run(1, fit, folder, 1, None, 3, f"{folder}/saved-on-4")[0]["said"]
    assert told == (
        "the checkpoint was saved on 4 data-parallel ranks, and there are 1 now: the global batch was 12 samples and "
        "is 3 now.\nTo keep it, by accumulation, give the Trainer the callback fsdp_core.lightning.GlobalBatch(12, "
        "per_rank=3). To let it change with the ranks, give it GlobalBatch('scaled'), and adapt the learning rate if "
        "it needs that."
    )
    by_hand = ranks.run(2, fit, folder, 2, None, STEPS, f"{folder}/saved-on-4", 2)
    assert by_hand[0]["said"] == [], "the user has kept it by hand"
