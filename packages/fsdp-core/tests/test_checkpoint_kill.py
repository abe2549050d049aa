"""Saves killed at random instants: what is committed is always whole, and never older than what was acknowledged."""

from __future__ import annotations

import json
import secrets
import sys

import pytest

import kill_saves
from conftest import Site

pytestmark = [pytest.mark.skipif(sys.platform == "win32", reason="Windows has no fork and no SIGKILL")]


@pytest.mark.parametrize(("ranks", "kills"), [(1, 70), (2, 35)])
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
