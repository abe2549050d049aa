"""Models of transformers train on meshes as in one process, and their folders are those of transformers itself."""

from __future__ import annotations

import pytest

from fsdp_core.testing import RankPool
from fsdp_core.testing.oracle import Trained
from fsdp_core.testing.suite.numerics.parity import assert_same
from real_models import MESHES, see_transformers, train_plain, train_sharded

LIMIT = 300.0  # seconds, for a machine that does much else

#: The rest is in slow_real_models.py.
CASES = [("shard 2", ["qwen3", "t5"]), ("shard 2 x tensor 2", ["llama", "qwen3", "mixtral", "t5", "llama lora"])]


def on_ranks(names: list[str], mesh: str) -> dict[str, Trained]:
    see_transformers()
    return {name: train_sharded(name, mesh)[0] for name in names}


def plain(names: list[str]) -> dict[str, Trained]:
    see_transformers()
    return {name: train_plain(name) for name in names}


def assert_equals_plain(transformers_ranks: RankPool, mesh: str, names: list[str]) -> None:
    want: dict[str, Trained] = transformers_ranks.run(1, plain, names, timeout=LIMIT)[0]
    got: list[dict[str, Trained]] = transformers_ranks.run(MESHES[mesh][1], on_ranks, names, mesh, timeout=LIMIT)
    for name in names:
        assert_same([of_rank[name] for of_rank in got], want[name])


@pytest.mark.drawn
@pytest.mark.parametrize(("mesh", "names"), CASES, ids=[mesh for mesh, _ in CASES])
def test_training_equals_one_process(transformers_ranks: RankPool, mesh: str, names: list[str]) -> None:
    assert_equals_plain(transformers_ranks, mesh, names)
