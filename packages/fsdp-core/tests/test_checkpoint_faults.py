"""Damaged and foreign folders: each fault is found and named on every rank before any weight changes."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fault_ranks
from damaged_folders import chunk_of, flip, model_file, refused, reseal, rewrite, save_small, state_file
from fsdp_core.checkpoint import is_checkpoint, load, load_state_dict, read_manifest, verify
from fsdp_core.checkpoint.format.manifest import FileEntry, Manifest
from fsdp_core.checkpoint.verifying import share_of
from fsdp_core.errors import CheckpointFormatError, CheckpointMismatchError
from fsdp_core.testing.launching.process_ranks import RankPool
from fsdp_core.testing.refusals import assert_says, refusal


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_small(tmp_path / "run" / "a.ckpt")


def test_the_manifest_is_readable_and_comes_back(folder: Path) -> None:
    text = (folder / "manifest.json").read_text()
    manifest = read_manifest(folder)
    assert (Manifest.from_json(manifest.to_json()), manifest.to_json()) == (manifest, text)
    content = json.loads(text)
    assert content["tensors"]["model/w"]["shape"] == [3, 2]
    assert content["tensors"]["model/w"]["dtype"] == "float32"
    assert max(map(len, text.splitlines())) < 250
    assert content["versions"]["torch"] == str(torch.__version__)


def test_every_flipped_byte_is_found_and_its_file_named(folder: Path) -> None:
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        before = path.read_bytes()
        for position in range(0, len(before), 7):
            flip(path, position)
            refused(folder, path.name.replace(".", r"\."), by=verify)
            with pytest.raises(CheckpointFormatError):
                load(folder)
            path.write_bytes(before)
    verify(folder)


def test_without_verification_only_the_plain_data_is_compared(folder: Path) -> None:
    weights = model_file(folder)
    flip(weights, weights.stat().st_size - 1)
    load(folder, verify=False)
    load_state_dict(folder, verify=False)
    refused(folder, f"{weights.name} has the checksum", by=load_state_dict)
    path = state_file(folder)
    path.write_bytes(path.read_bytes().replace(b'"seen": 3', b'"seen": 4'))
    with pytest.raises(CheckpointFormatError, match=f"{path.name} has the checksum"):
        load(folder, verify=False)


def test_the_tensors_of_plain_data_are_verified_in_any_case(folder: Path) -> None:
    (path,) = folder.glob("state-*.safetensors")
    flip(path, -1)
    for read in (load, load_state_dict):
        with pytest.raises(CheckpointFormatError, match=f"{path.name} has the checksum"):
            read(folder, verify=False)
    with pytest.raises(CheckpointFormatError, match=f"{path.name} has the checksum"):
        load_state_dict(folder, "callbacks")


def test_a_models_weights_are_read_although_the_optimizers_are_damaged(pool: RankPool, tmp_path: Path) -> None:
    pool.run(2, fault_ranks.save_fresh, tmp_path / "c", timeout=60)
    moments = next((tmp_path / "c" / "optimizer").iterdir())
    flip(moments, moments.stat().st_size - 1)
    assert load_state_dict(tmp_path / "c")["scale"].eq(100.0).all()
    refused(tmp_path / "c", f"optimizer/{moments.name} has the checksum")
    weights = next((tmp_path / "c" / "model").iterdir())
    flip(weights, weights.stat().st_size - 1)
    refused(tmp_path / "c", f"model/{weights.name} has the checksum", by=load_state_dict)


def test_at_most_twenty_files_are_named(pool: RankPool, tmp_path: Path) -> None:
    path = save_small(tmp_path / "c")
    rewrite(
        path, lambda c: c["files"].update({f"x{i}": {"size": 1, "checksum": "xxh3:" + "0" * 16} for i in range(30)})
    )
    error = refusal(CheckpointFormatError, lambda: load(path))
    assert error.count("is missing") == 20
    assert "… and 10 more" in error


def test_verify_tells_how_far_it_is(folder: Path) -> None:
    seen: dict[str, int] = {}
    verify(folder, on_bytes=lambda name, count: seen.update({name: seen.get(name, 0) + count}))
    assert seen == {name: entry.size for name, entry in read_manifest(folder).files.items()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(format_version=4), "has format version 4, .* reads version 1 to 3: pip install --upgrade"),
        (lambda c: c.update(format="other"), "it is not one of ours"),
        (lambda c: c.pop("tensors"), "it lacks 'tensors'"),
        (lambda c: c.update(tensors=[1]), "of the wrong type"),
        (lambda c: c.update(world_size="2"), "'2' is not an integer"),
        (lambda c: c.update(save_id="../../x"), "no save has the id"),
        (lambda c: c.update(kinds={"model": "code"}), "neither 'model' nor 'optimizer'"),
        (lambda c: c.update(aliases={"model/x": "model/nothing"}), "refers to 'model/nothing', which is not among"),
        (lambda c: c["tensors"]["model/w"].update(shape=[3, 3]), r"tensor 'model/w': nothing covers \[0:3, 2:3\]"),
        (lambda c: c["tensors"]["model/w"].update(shape=[3, -2]), "tensor 'model/w': no tensor has the shape"),
        (lambda c: c["tensors"]["model/w"].update(dtype="object"), "tensor 'model/w': 'object' is not a dtype"),
        (lambda c: c["tensors"]["model/w"]["chunks"].append(chunk_of(c)), "tensor 'model/w': two chunks cover"),
        (lambda c: chunk_of(c).update(offsets=[1, 0]), "tensor 'model/w': .* does not lie inside"),
        (lambda c: c["files"].update({"../x": c["files"][chunk_of(c)["file"]]}), "does not stay inside the checkpoint"),
        (lambda c: c["state"].update(json="../x"), "the state is in .*, which is not among the files"),
        (lambda c: chunk_of(c).update(file="model/other"), "is in 'model/other', which is not among the files"),
        (lambda c: chunk_of(c).update(key="model/b"), r"'model/w' as 'model/b', of .*, but it holds \(3,\) float32"),
        (
            lambda c: chunk_of(c).update(key="model/x"),
            "should hold .* 'model/w' as 'model/x', .* it holds nothing by that",
        ),
        (lambda c: c["tensors"]["model/w"].update(dtype="int32"), "of shape .* and int32, but it holds .* float32"),
    ],
    ids=range(19),
)
def test_a_manifest_that_does_not_fit_is_refused(
    folder: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    rewrite(folder, change)
    refused(folder, message)


def test_paths_without_a_checkpoint_are_explained(tmp_path: Path, folder: Path) -> None:
    refused(tmp_path / "nothing", "no checkpoint at .*nothing: the path does not exist. Check the path")
    (tmp_path / "file.ckpt").write_bytes(b"x")
    refused(tmp_path / "file.ckpt", "is a file, but a sharded checkpoint is a folder with a manifest.json")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "the folder is empty")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "weights.bin").write_bytes(b"x")
    refused(tmp_path / "foreign", "is not a checkpoint of this format: it has no manifest.json .there is weights.bin")
    for name, of in (("__0_0.distcp", "torch.distributed.checkpoint"), ("model.safetensors", "safetensors, as save")):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_bytes(b"x")
        refused(tmp_path / name, f"It looks like (one of )?{of}.*: type `fsdp checkpoint import .*{name} NEW`")
    xla_shards = Path(__file__).parent / "xla_shards"
    refused(xla_shards, "as Lightning's XLAFSDPStrategy writes: type `fsdp checkpoint import .*xla_shards NEW`")
    (folder / "manifest.json").unlink()
    refused(folder, "a save began and was interrupted before it was committed .* Load an earlier checkpoint")
    (tmp_path / "dangling").symlink_to(tmp_path / "gone")
    refused(tmp_path / "dangling", "the path does not exist")
    assert not any(map(is_checkpoint, tmp_path.iterdir()))


def test_a_key_that_is_not_there_lists_the_models(folder: Path) -> None:
    with pytest.raises(CheckpointMismatchError, match=r"no model under 'generator' in .*a.ckpt. Models in it: 'model'"):
        load_state_dict(folder, "generator")


def test_a_file_that_shrinks_after_the_load_began_is_an_error(folder: Path) -> None:
    bias = load(folder)["model"]["b"]
    path = model_file(folder)
    os.truncate(path, path.stat().st_size - 12)
    with pytest.raises(CheckpointFormatError, match="it was changed since the load began"):
        bias.full()


# -- on ranks ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def good(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "good.ckpt"
    pool.run(2, fault_ranks.save_fresh, path, timeout=60)
    return path


@pytest.fixture
def damaged(good: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    shutil.copytree(good, tmp_path / "damaged.ckpt")
    return tmp_path / "damaged.ckpt"


def only(folder: Path, pattern: str) -> Path:
    (path,) = folder.glob(pattern)
    return path


def exchange(one: Path, other: Path) -> None:
    one_bytes = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(one_bytes)


def exchange_chunks(folder: Path) -> None:
    """Exchange the bytes of two chunks of one shape in a file."""
    path = only(folder, "model/*-rank-00001.*")
    data, size = path.read_bytes(), fault_ranks.ROWS // 2 * 4 * 4
    start = 8 + int.from_bytes(data[:8], "little")  # w and v come first
    one, other, rest = data[start : start + size], data[start + size : start + 2 * size], data[start + 2 * size :]
    path.write_bytes(data[:start] + other + one + rest)


def edit(folder: Path, old: str, new: str) -> None:
    """Edit the manifest, but not its checksum."""
    text = (folder / "manifest.json").read_text()
    assert old in text
    (folder / "manifest.json").write_text(text.replace(old, new, 1))


def exchange_entries(content: dict[str, Any]) -> None:
    """Let two chunks of a manifest change places."""
    one, other = content["tensors"]["model/w"]["chunks"]
    one["file"], other["file"] = other["file"], one["file"]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def cut_and_reseal(folder: Path) -> None:
    for path in folder.glob("model/*"):
        cut(path)
        reseal(folder, path)


def on_file(pattern: str, damage: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda folder: damage(only(folder, pattern))


FILES = ["manifest.json", "model/*-rank-00000.*", "model/*-rank-00001.*", "optimizer/*-rank-00001.*", "state-*.json",
         "state-*.safetensors"]  # fmt: skip

#: What is done to a file: the name of that, what is said of the manifest, and of others.
DAMAGES: dict[str, tuple[Callable[[Path], object], str, list[str]]] = {
    "a flipped byte of": (lambda path: flip(path, -2), "manifest.json", ["has the checksum", "instead of"]),
    "a cut": (cut, "manifest.json", ["bytes instead of"]),
    "no": (Path.unlink, "no complete checkpoint", ["is missing"]),
}

#: What is done to a good folder, and what every rank says of it.
FAULTS: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    **{
        f"{what} {name}": (
            on_file(name, damage), [of_manifest] if name == "manifest.json" else [name.split("*")[0], *words]
        )
        for what, (damage, of_manifest, words) in DAMAGES.items() for name in FILES
    },
    "a flipped byte of a header": (
        lambda folder: flip(only(folder, "model/*-rank-00001.*"), 20),
        ["-rank-00001.safetensors has the checksum"],
    ),
    "two ranks' files exchanged": (
        lambda folder: exchange(*folder.glob("model/*")),
        ["-rank-00000.safetensors has the checksum", "-rank-00001.safetensors has the checksum"],
    ),
    "model and optimizer exchanged": (
        lambda folder: exchange(only(folder, "model/*-rank-00000.*"), only(folder, "optimizer/*-rank-00000.*")),
        ["model/", "optimizer/", "-rank-00000.safetensors has"],
    ),
    "two chunks exchanged": (exchange_chunks, ["-rank-00001.safetensors has the checksum"]),
    "two chunks exchanged in the manifest": (
        lambda folder: rewrite(folder, exchange_entries),
        ["should hold a chunk of 'model/w' as 'model/w@0,0'", "but it holds nothing by that name"],
    ),
    "a manifest edited": (lambda folder: edit(folder, '"offsets": [6, 0]', '"offsets": [5, 0]'),
                          ["it was changed"]),
    "a hole": (lambda folder: rewrite(folder, lambda c: c["tensors"]["model/w"]["chunks"].pop()),
               ["'model/w'", "nothing covers [6:12, 0:4]"]),
    "an overlap": (
        lambda folder: rewrite(folder, lambda c: c["tensors"]["model/w"]["chunks"].append(chunk_of(c))),
        ["'model/w'", "two chunks cover [0:6, 0:4]"],
    ),
    "a newer version": (
        lambda folder: rewrite(folder, lambda c: c.update(format_version=4)),
        ["format version 4", "pip install --upgrade fsdp-core"],
    ),
    "files that are no safetensors": (
        cut_and_reseal,
        ["-rank-00000.safetensors", "-rank-00001.safetensors", "is not a safetensors file"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_every_rank_names_the_fault_and_nothing_has_changed(pool: RankPool, damaged: Path, fault: str) -> None:
    damage, words = FAULTS[fault]
    damage(damaged)
    (message, changed), other = pool.run(2, fault_ranks.restore, [damaged], timeout=60)
    assert other == (message, changed)
    assert not changed
    assert message.startswith("CheckpointFormatError: ")
    assert_says(message, *words)
    assert any(remedy in message for remedy in ("load an earlier", "Load an earlier", "pip install", "manifest.json"))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_whole_checkpoint_is_restored(pool: RankPool, good: Path, ranks: int) -> None:
    assert pool.run(ranks, fault_ranks.restore, [good], timeout=60) == [("", True)] * ranks


def test_a_rank_that_sees_no_checkpoint_is_named(pool: RankPool, good: Path, tmp_path: Path) -> None:
    results = pool.run(2, fault_ranks.restore, [good, tmp_path / "nothing"], timeout=60)
    for message, changed in results:
        assert not changed
        assert_says(message, f"no checkpoint at {tmp_path / 'nothing'}", "(on rank 1 of 2, while loading")


def test_ranks_that_see_different_checkpoints_are_refused(pool: RankPool, good: Path, tmp_path: Path) -> None:
    pool.run(2, fault_ranks.save_fresh, tmp_path / "other", timeout=60)
    results = pool.run(2, fault_ranks.restore, [good, tmp_path / "other"], timeout=60)
    for message, changed in results:
        assert not changed
        assert "the ranks read different checkpoints" in message


def test_the_ranks_divide_the_files() -> None:
    choice = random.Random(5)
    for _ in range(200):
        ranks, writers = choice.randint(1, 9), choice.randint(1, 12)
        files = {
            f"{part}/0123456789ab-rank-{rank:05d}.safetensors": FileEntry(
                size=choice.choice([0, 8, choice.randint(0, 10**9)]), checksum="xxh3:" + "0" * 16
            )
            for part in ("model", "optimizer")
            for rank in range(writers)
        }
        shares = [share_of(files, rank, ranks) for rank in range(ranks)]
        assert sorted(name for share in shares for name in share) == sorted(files)
        sizes = [sum(files[name].size for name in share) for share in shares]
        largest = max(entry.size for entry in files.values())
        assert max(sizes) <= sum(sizes) / ranks + largest


def test_a_rank_of_the_same_layout_examines_what_it_reads() -> None:
    files = {
        f"{part}/0123456789ab-rank-{rank:05d}.safetensors": FileEntry(size=size + rank % 2, checksum="xxh3:" + "0" * 16)
        for part, size in (("model", 1000), ("optimizer", 2000))
        for rank in range(8)
    }
    for rank in range(8):
        assert all(f"-rank-{rank:05d}" in name for name in share_of(files, rank, 8))
        assert len(share_of(files, rank, 8)) == 2
