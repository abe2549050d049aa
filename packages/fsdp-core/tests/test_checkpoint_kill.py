"""Saves that are killed: what is committed is always whole, and never older than what was acknowledged.

At random instants; and a rank of a scattered save at any step: no place looks complete before the manifest stands.
"""

from __future__ import annotations

import json
import secrets
import sys

import pytest

import kill_saves
import kill_scattered
from conftest import Site

pytestmark = [pytest.mark.skipif(sys.platform == "win32", reason="Windows has no fork and no SIGKILL")]


@pytest.mark.parametrize(("ranks", "kills"), [(1, 45), (2, 22)])
def test_a_save_killed_at_any_instant_leaves_a_whole_checkpoint(site: Site, ranks: int, kills: int) -> None:
    seed = secrets.randbelow(2**32)
    print(f"seed {seed}")
    (site.path / "saves").mkdir()
    done = site.fork(kill_saves.__file__, str(site.path / "saves"), str(seed), str(kills), str(ranks), check=False)
    assert done.returncode == 0, f"seed {seed}\n{done.stderr}"
    seen = json.loads(done.stdout)
    assert seen["versions"] >= kills  # every process has saved before it was killed
    assert seen["interrupted"] >= kills // 10  # and many were killed while they were writing
    assert seen["left"] == []  # what they have left, the next save has removed
    assert seen["beside"] == ["first", "last.ckpt"]
    assert seen["halves"] > 0  # first saves were killed too, of which a search finds nothing,
    assert seen["hidden"] == []  # and which the next save of the directory has removed


def test_a_rank_killed_at_any_step_leaves_what_was_there(site: Site) -> None:
    done = site.fork(kill_scattered.__file__, str(site.path))
    for case, seen in json.loads(done.stdout).items():
        step, _, before = case.rpartition(", ")
        complete = step in kill_scattered.COMPLETE
        want = 2.0 if complete else 1.0 if before == "replacing" else None
        assert seen["found"] == want, case  # what places hold together is the new one or the old one
        assert not any(seen["alone"]), case  # and no place alone is a checkpoint
        assert "whole" not in seen["states"], case
        assert "damaged" not in seen["states"], case
        if before == "new":
            assert "unfinished" in seen["states"], case
            assert seen["whole"] == [complete, False], case  # a manifest stands once all else does
            assert complete or all(seen["interrupted"]), case  # a search for the last checkpoint finds none
        assert seen["after"] == 3.0, case  # the next save works, and removes what was left
        assert (seen["strange"], seen["beside"]) == ([], ["last.ckpt"] * 2), case
