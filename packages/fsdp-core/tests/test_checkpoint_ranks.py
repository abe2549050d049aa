"""Saved on n real ranks, loaded on m: every bit is the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial

import checkpoint_ranks
from fsdp_core.checkpoint import chunked, load_state_dict, read_manifest, verify
from fsdp_core.testing.launching.process_ranks import RankPool

LAYOUTS = [(1, "plain"), (1, "flat"), (2, "flat"), (3, "flat"), (4, "flat"), (4, "hybrid")]
IDS = [f"{layout}{ranks}" for ranks, layout in LAYOUTS]


@pytest.fixture(scope="module")
def saved(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, str], Path]:
    folders = {}
    for ranks, layout in reversed(LAYOUTS):  # the most ranks first: their processes start side by side
        folders[ranks, layout] = tmp_path_factory.mktemp("saved") / f"{layout}{ranks}.ckpt"
        pool.run(ranks, checkpoint_ranks.save_all, folders[ranks, layout], layout, timeout=60)
    return folders


@pytest.mark.parametrize(("ranks", "layout"), LAYOUTS, ids=IDS)
def test_every_layout_loads_into_each_other(
    pool: RankPool, saved: dict[tuple[int, str], Path], ranks: int, layout: str
) -> None:
    equal = pool.run(ranks, checkpoint_ranks.load_all, [saved[source] for source in LAYOUTS], layout, timeout=60)
    assert equal == [[f"{name}{count}.ckpt" for count, name in LAYOUTS]] * ranks


@pytest.mark.parametrize("source", LAYOUTS, ids=IDS)
def test_one_process_without_a_group_reads_the_whole_model(
    saved: dict[tuple[int, str], Path], source: tuple[int, str]
) -> None:
    state_dict = load_state_dict(saved[source])
    expected = {name: whole for name, (whole, _) in checkpoint_ranks.whole_tensors().items()}
    assert list(state_dict) == list(expected)
    for name, whole in expected.items():
        assert (state_dict[name].shape, state_dict[name].dtype) == (whole.shape, whole.dtype)
        assert checkpoint_ranks.bits(state_dict[name]) == checkpoint_ranks.bits(whole), name


@pytest.mark.parametrize("source", LAYOUTS, ids=IDS)
def test_manifest_and_files(saved: dict[tuple[int, str], Path], source: tuple[int, str]) -> None:
    folder = saved[source]
    verify(folder)
    manifest = read_manifest(folder)
    assert (manifest.world_size, manifest.kinds) == (source[0], checkpoint_ranks.KINDS)
    there = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert there == {*manifest.files, "manifest.json"}
    assert "optimizer/0/uneven/exp_avg" in manifest.tensors
    writers = 2 if source == (4, "hybrid") else source[0]
    assert len(manifest.tensors["model/even"].chunks) == writers
    assert (len(manifest.tensors["model/scalar"].chunks), manifest.tensors["model/empty"].chunks) == (1, ())


@pytest.mark.parametrize(("ranks", "layout"), LAYOUTS[1:], ids=IDS[1:])
def test_boxes_are_those_that_torch_computes(pool: RankPool, ranks: int, layout: str) -> None:
    by_rank = pool.run(ranks, checkpoint_ranks.boxes_of, layout, timeout=60)
    replicas = [{replica for name, _, replica in boxes if name == "even"} for boxes in by_rank]
    expected = [0, 0, 1, 1] if layout == "hybrid" else [0] * ranks
    assert replicas == [{replica} for replica in expected]
    scalars = [replica for boxes in by_rank for name, _, replica in boxes if name == "scalar"]
    assert scalars == list(range(ranks))  # every rank has a copy, and each is another one


def test_a_pending_reduction_has_no_boxes(single_rank_mesh: torch.distributed.device_mesh.DeviceMesh) -> None:
    pending = DTensor.from_local(torch.ones(2), single_rank_mesh, [Partial()])
    with pytest.raises(ValueError, match=r"Partial.*redistribute it to Shard\(dim\) and Replicate\(\) first"):
        chunked(pending)


@pytest.fixture
def single_rank_mesh(tmp_path: Path) -> Iterator[torch.distributed.device_mesh.DeviceMesh]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()
