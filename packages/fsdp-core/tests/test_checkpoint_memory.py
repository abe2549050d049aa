"""How much memory a save and a load take above the shards that a rank holds: no more than a staging buffer."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import memory_ranks
from fsdp_core.checkpoint.format.safetensors_file import STAGING_BYTES
from fsdp_core.testing.launching.process_ranks import RankPool
from fsdp_core.testing.measuring.memory import is_measurable

pytestmark = [pytest.mark.skipif(not is_measurable(), reason="only Linux resets a process's peak")]

LIMIT = 1.2 * STAGING_BYTES


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("states")  # of 128 MiB
    yield path
    shutil.rmtree(path)


def check(what: str, peaks: list[int]) -> None:
    print(what, *(f"{peak / 2**20:.1f} MiB" for peak in peaks))
    assert max(peaks) <= LIMIT


def test_a_save_and_loads_of_any_layout(pool: RankPool, folder: Path) -> None:
    """One test, for the states take a while to write."""
    for layout in ("rows", "strided"):
        check(f"save {layout}", pool.run(2, memory_ranks.save_peak, folder, layout, timeout=120))
    for layout in ("rows", "strided", "columns"):
        check(f"load into {layout}", pool.run(2, memory_ranks.load_peak, folder / "rows", layout, timeout=120))
    check("load in one process", pool.run(1, memory_ranks.whole_peak, folder / "rows", timeout=120))


def test_an_import_passes_pieces_on(pool: RankPool, folder: Path) -> None:
    (peak,) = pool.run(1, memory_ranks.import_peak, folder, timeout=120)
    assert peak < 80e6  # 20 to 32, as malloc keeps pieces
