"""Two hosts without a shared disk: one path that is another folder for each rank."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from fsdp_core.checkpoint import gather, load_state_dict, read_manifest
from fsdp_core.errors import CheckpointError, CheckpointFormatError, ShardingError
from fsdp_core.testing import RankPool
from fsdp_core.testing.launching.rank_context import rank_context
from fsdp_core.testing.refusals import assert_says, refusal
from fsdp_core.testing.state import full_state
from fsdp_core.testing.training import Lit, loader, new_trainer

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc/self/cwd")

#: A path that is the same on both ranks, and another folder.
DISK = "/proc/self/cwd"


@contextmanager
def own_disk(tmp: str) -> Iterator[None]:
    before, own = os.getcwd(), Path(tmp, f"host{rank_context().rank}")
    own.mkdir(exist_ok=True)
    os.chdir(own)
    try:
        yield
    finally:
        os.chdir(before)


def fit_on(tmp: str, asynchronous: bool) -> dict[str, Any]:
    """Fit with callbacks that keep, remove and link checkpoints; then resume, which is refused."""
    with own_disk(tmp):
        callback = ModelCheckpoint(monitor="loss", save_top_k=1, save_last="link", every_n_train_steps=1)
        callback.dirpath = f"{DISK}/kept"  # its constructor would resolve it
        options = {"scattered_save": True, "async_save": asynchronous}
        kept: dict[str, Any] = {"callbacks": [callback], "enable_checkpointing": True}
        run = new_trainer(tmp, "fsdp2", 2, options, **kept)
        run.fit(Lit("adamw_groups"), loader(4, 2))
        run.save_checkpoint(f"{DISK}/after.ckpt")
        other = new_trainer(tmp, "fsdp2", 2, options, max_epochs=2, **kept)
        refused = refusal(CheckpointFormatError, lambda: other.fit(Lit("adamw_groups"), loader(4, 2), ckpt_path="last"))
        return {
            "refused": refused,
            "names": sorted(path.name for path in Path("kept").iterdir()),
            "linked": Path("kept/last.ckpt").is_symlink() and Path("kept/last.ckpt").is_dir(),
            "state": full_state(run.strategy),
        }


def save_without_asking(tmp: str) -> str:
    with own_disk(tmp):
        run = new_trainer(tmp, "fsdp2", 2, {})
        run.fit(Lit(), loader(1, 2))
        return refusal(CheckpointError, lambda: run.save_checkpoint(f"{DISK}/plain.ckpt"))


def differ(tmp: str) -> str:
    """Only one rank asks for it."""
    run = new_trainer(tmp, "fsdp2", 2, {"scattered_save": rank_context().rank == 1})
    return refusal(ShardingError, lambda: run.fit(Lit(), loader(1, 2)))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_each_host_keeps_removes_and_links_its_own(ranks: RankPool, tmp_path: Path, asynchronous: bool) -> None:
    first, second = ranks.run(2, fit_on, str(tmp_path), asynchronous)
    assert first["names"] == second["names"]
    assert len(first["names"]) == 2
    assert first["names"][-1] == "last.ckpt"
    assert first["linked"]
    assert second["linked"]
    for got in (first, second):
        assert_says(got["refused"], "scattered save", "fsdp checkpoint gather", "rank 1")
    for name in ("after.ckpt", f"kept/{first['names'][0]}"):
        places, out = [tmp_path / f"host{rank}" / name for rank in range(2)], tmp_path / "whole" / name
        manifest = gather(places, out).manifest
        assert read_manifest(places[0]).save_id == manifest.save_id
    state = load_state_dict(tmp_path / "whole" / "after.ckpt")
    assert state.keys() == first["state"].keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in first["state"].items())


def test_hosts_that_share_no_disk_are_told_what_to_write(ranks: RankPool, tmp_path: Path) -> None:
    for told in ranks.run(2, save_without_asking, str(tmp_path)):
        assert_says(told, "rank 0 sees no file at", "scattered_save=True")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_ranks_must_agree(ranks: RankPool, tmp_path: Path) -> None:
    for told in ranks.run(2, differ, str(tmp_path)):
        assert_says(told, "option 'scattered_save' is True, and rank 0's is False")
