"""Saves of ranks that stand in different folders: what each place holds, what joins them, and what never does."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest

from checkpoint_ranks import ThreadRuntime, on_threads
from cli_checkpoints import run
from damaged_folders import KINDS, refused
from fsdp_core.checkpoint import (
    describe,
    gather,
    is_checkpoint,
    load,
    load_state_dict,
    read_manifest,
    remove,
    saving,
    verify,
)
from fsdp_core.checkpoint.async_save import AsyncSaves
from fsdp_core.checkpoint.format.file_names import is_ours
from fsdp_core.checkpoint.format.manifest import content_checksum
from fsdp_core.checkpoint.format.part_record import PartRecord
from fsdp_core.checkpoint.storage import commit, local_target, writers
from fsdp_core.checkpoint.storage.recognition import is_interrupted
from fsdp_core.checkpoint.tools.listing import find_checkpoints
from fsdp_core.errors import CheckpointError, CheckpointExistsError, CheckpointFormatError
from fsdp_core.runtime import ProcessGroupRuntime, Runtime
from fsdp_core.testing.refusals import assert_says
from versioned_saves import files_in, save_version, state, version_of

Paths = Callable[[int], Path]


class OtherHostsRuntime(ThreadRuntime):
    """Ranks that are threads, with a side channel."""

    def side_channel(self) -> OtherHostsRuntime:
        return self  # these tests never use both at the same time


def save_at(runtime: Runtime, path: Path, version: float = 1.0, **options: Any) -> None:
    save_version(path, version, runtime, **{"scattered": True, **options})


def scatter(paths: Paths, ranks: int = 4, version: float = 1.0, **options: Any) -> list[Any]:
    return on_threads(ranks, lambda runtime: save_at(runtime, paths(runtime.rank), version, **options))


def check(path: Any, version: float = 1.0) -> None:
    """Everything in a checkpoint, or in places, is what was saved."""
    verify(path)
    assert version_of(path) == version
    assert load_state_dict(path)["w"].equal(load(path)["model"]["w"].full())


def per_rank(tmp_path: Path) -> Paths:
    return lambda rank: tmp_path / f"rank{rank}" / "run.ckpt"


def per_host(tmp_path: Path) -> Paths:
    return lambda rank: tmp_path / f"host{rank // 2}" / "run.ckpt"


def in_one_parent(tmp_path: Path) -> Paths:
    return lambda rank: tmp_path / f"run-{rank}.ckpt"


@pytest.fixture
def places(tmp_path: Path) -> list[Path]:
    """The folders of two hosts after a save of four ranks."""
    assert scatter(per_host(tmp_path)) == [None] * 4
    return [per_host(tmp_path)(0), per_host(tmp_path)(2)]


@pytest.mark.parametrize("where", [per_rank, per_host, in_one_parent])
def test_each_rank_writes_where_it_stands_and_gather_joins(tmp_path: Path, where: Callable[[Path], Paths]) -> None:
    paths = where(tmp_path)
    places = list(dict.fromkeys(map(paths, range(4))))
    for version in (1.0, 2.0, 3.0):  # where nothing is, over a save like this one, and over that
        assert scatter(paths, version=version) == [None] * 4
        manifest = read_manifest(places[0])
        save_id = manifest.save_id
        for place in places:
            held = {rank for rank in range(4) if paths(rank) == place}
            sections = ("model", "optimizer")
            expected = {f"{section}/{save_id}-rank-{rank:05d}.safetensors" for section in sections for rank in held}
            if place == places[0]:
                expected |= {"manifest.json", f"state-{save_id}.json", f"state-{save_id}.safetensors"}
            else:
                expected |= {f"parts/{save_id}-rank-{rank:05d}.json" for rank in held}
            assert files_in(place) == expected
            assert not is_interrupted(place)
            assert is_checkpoint(place) == (place == places[0])
        assert [tuple(one.ranks.at(number) for number in range(one.ranks.count)) for one in manifest.places] == [
            tuple(rank for rank in range(4) if paths(rank) == place) for place in places
        ]
        check(places[::-1], version=version)
        out = tmp_path / f"whole-{version}.ckpt"
        done = gather(places[::-1], out)
        assert (done.linked, done.copied, done.duplicates, done.damaged) == (len(manifest.files), 0, {}, {})
        assert read_manifest(out).places == ()
        check(out, version=version)
    for place in places:
        shutil.rmtree(place)
    check(out, version=3.0)  # links outlive the places
    assert not list(tmp_path.rglob(".*"))  # no mark or claim is left
    assert not list(tmp_path.rglob("*replaced"))


def test_gathered_equals_a_plain_save_bit_for_bit(places: list[Path], tmp_path: Path) -> None:
    scatter(lambda rank: tmp_path / "plain.ckpt", scattered=False)
    gather(places, tmp_path / "whole.ckpt", copy=True)
    ours, plain = read_manifest(tmp_path / "whole.ckpt"), read_manifest(tmp_path / "plain.ckpt")

    def sums(manifest: Any) -> dict[str, Any]:
        return {name.replace(manifest.save_id, "ID"): entry for name, entry in manifest.files.items()}

    assert sums(ours) == sums(plain)
    assert (ours.kinds, ours.world_size, ours.aliases) == (plain.kinds, plain.world_size, plain.aliases)


def test_ranks_that_share_a_folder_save_as_ever(tmp_path: Path) -> None:
    path = tmp_path / "host0" / "run.ckpt"
    for version in (1.0, 2.0):
        assert scatter(lambda rank: path, version=version) == [None] * 4
        check(path, version=version)
        manifest = read_manifest(path)
        assert manifest.places == ()
        assert files_in(path) == {"manifest.json", *manifest.files}
        assert [found.name for found in path.parent.iterdir()] == ["run.ckpt"]


def test_folders_that_are_uploaded_into_one_are_whole_by_themselves(tmp_path: Path) -> None:
    scatter(per_rank(tmp_path))
    merged = tmp_path / "merged.ckpt"
    for rank in range(4):  # as Ray does with its workers' folders; no two files have one name
        for name in files_in(per_rank(tmp_path)(rank)):
            (merged / name).parent.mkdir(parents=True, exist_ok=True)
            assert not (merged / name).exists()
            shutil.copy(per_rank(tmp_path)(rank) / name, merged / name)
    check(merged)
    gather(merged, tmp_path / "again.ckpt")
    check(tmp_path / "again.ckpt")
    assert not any(name.startswith("parts/") for name in files_in(tmp_path / "again.ckpt"))
    save_at(ProcessGroupRuntime(), merged, 7.0, scattered=False)
    assert files_in(merged) == {"manifest.json", *read_manifest(merged).files}


def test_one_place_alone_is_refused(places: list[Path], tmp_path: Path) -> None:
    first, second = places
    with pytest.raises(CheckpointFormatError) as caught:
        load(first)
    message = str(caught.value)
    assert_says(message, "is a place of the scattered save", "of 10 files, 4 are missing")
    assert f"rank 2-3 on {writers.new_writer('0' * 12).host}, to {second}" in message
    assert f"fsdp checkpoint gather {first} … OUT" in message
    for reader in (load, verify, load_state_dict, read_manifest, describe):
        with pytest.raises(CheckpointFormatError, match="it holds what rank 2-3 wrote of the scattered save") as caught:
            reader(second)
        assert_says(str(caught.value), f"to {first}.\n", f"fsdp checkpoint gather {second} … OUT")
    copy = shutil.copytree(second, tmp_path / "copy")
    refused([second, copy], r"none of .* holds the manifest")
    refused([second, second], "it holds what rank 2-3 wrote of the scattered save")
    with pytest.raises(CheckpointFormatError, match="rank 2-3 on"):
        gather([first], tmp_path / "out.ckpt")
    refused([first, tmp_path / "nothing"], "there is no folder")
    assert not (tmp_path / "out.ckpt").exists()
    found = {one.path: one for place in places for one in find_checkpoints(place.parent)}
    assert {one.state for one in found.values()} == {"scattered"}
    assert "rank 2-3 on" in found[str(first)].remark
    assert "what rank 2-3 wrote" in found[str(second)].remark


def test_parts_of_two_saves_are_never_joined(tmp_path: Path) -> None:
    scatter(per_host(tmp_path / "a"), version=1.0)
    scatter(per_host(tmp_path / "b"), version=2.0)
    places = {name: per_host(tmp_path / name) for name in "ab"}
    refused([places["a"](0), places["b"](2)], "Parts of different saves are never joined")
    with pytest.raises(CheckpointFormatError, match="Parts of different saves are never joined"):
        gather([places["b"](0), places["a"](2)], tmp_path / "out.ckpt")
    with pytest.raises(CheckpointFormatError, match="hold different checkpoints"):
        gather([places["a"](0), places["b"](0)], tmp_path / "out.ckpt")
    # files of both saves in one place, as after a kill
    for name in files_in(places["a"](2)):
        shutil.copy(places["a"](2) / name, places["b"](2) / name)
    check([places["a"](0), places["b"](2)], version=1.0)
    check([places["b"](0), places["b"](2)], version=2.0)


def test_duplicates_are_named_and_a_spoiled_one_is_passed_over(places: list[Path], tmp_path: Path) -> None:
    second, copy = places[1], shutil.copytree(places[1], tmp_path / "copy.ckpt")
    (victim,) = (second / "model").glob("*rank-00003*")
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.chmod(0o600)
    victim.write_bytes(data)
    done = gather([*places, copy], tmp_path / "out.ckpt")
    check(tmp_path / "out.ckpt")
    assert list(done.damaged) == [str(victim)]
    assert "has the checksum" in done.damaged[str(victim)]
    assert set(done.duplicates) == {name for name in files_in(second) if not name.startswith("parts/")}
    assert done.duplicates[str(victim.relative_to(second))] == [str(second), str(copy)]
    with pytest.raises(CheckpointFormatError, match="is damaged"):
        gather(places, tmp_path / "second.ckpt")
    assert not (tmp_path / "second.ckpt").exists()
    assert not list(tmp_path.glob(".*"))


def test_gather_refuses_to_spoil_its_sources(places: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "out.ckpt"
    for inside in (*places, places[1] / "deeper"):
        with pytest.raises(CheckpointExistsError, match="choose"):
            gather(places, inside, overwrite=True)
    gather(places, out)
    with pytest.raises(CheckpointExistsError, match="already exists"):
        gather(places, out)
    with pytest.raises(CheckpointExistsError, match="files of the same save"):
        gather(places, out, overwrite=True)
    scatter(per_host(tmp_path), version=2.0)
    gather(places, out, overwrite=True)
    check(out, version=2.0)
    assert files_in(out) == {"manifest.json", *read_manifest(out).files}
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointExistsError, match=r"notes\.txt"):
        gather(places, tmp_path / "mine", overwrite=True)


def test_a_plain_checkpoint_in_the_way_of_a_part_goes_only_at_the_end(tmp_path: Path) -> None:
    paths = per_host(tmp_path)
    for place in (paths(0), paths(2)):
        save_at(ProcessGroupRuntime(), place, 5.0, scattered=False)
    scatter(paths, version=2.0)
    assert not is_checkpoint(paths(2))
    check([paths(0), paths(2)], version=2.0)
    assert all(read_manifest(paths(0)).save_id in name for name in files_in(paths(2)))
    scatter(lambda rank: paths(2 - 2 * (rank // 2)), version=3.0)  # rank 0 stands where the others have
    check([paths(0), paths(2)], version=3.0)
    assert all(read_manifest(paths(2)).save_id in name or name == "manifest.json" for place in (paths(0), paths(2))
               for name in files_in(place))  # fmt: skip
    with pytest.raises(CheckpointFormatError, match="of 10 files, 4 are missing"):
        check(paths(2))


@pytest.mark.parametrize("before", ["nothing", "scattered"])
def test_a_save_that_fails_at_any_step_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    paths = per_host(tmp_path)
    if before == "scattered":
        scatter(paths, version=1.0)
    was = files_in(tmp_path)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "no room")

    for owner, name in (
        (local_target.LocalTarget, "claim"),
        (saving.PerHostSave, "write_part_record"),
        (local_target.LocalTarget, "publish"),
        (commit.SaveTarget, "commit"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, fail)
            errors = scatter(paths, version=2.0)
        assert len({str(error) for error in errors}) == 1, errors
        assert isinstance(errors[0], CheckpointError)
        assert "no room" in str(errors[0])
        assert files_in(tmp_path) == was, name
    if before == "scattered":
        check([paths(0), paths(2)], version=1.0)
    assert scatter(paths, version=3.0) == [None] * 4
    check([paths(0), paths(2)], version=3.0)


def test_a_link_is_put_back_if_the_last_step_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = per_host(tmp_path)
    for rank in (0, 2):
        paths(rank).parent.mkdir()
        (paths(rank).parent / "other.ckpt").mkdir()
        paths(rank).symlink_to("other.ckpt")

    def fail(*_: Any) -> None:
        raise OSError(28, "no room")

    with monkeypatch.context() as patched:
        patched.setattr(commit.SaveTarget, "commit", fail)
        assert all(isinstance(error, CheckpointError) for error in scatter(paths))
    for rank in (0, 2):
        assert os.readlink(paths(rank)) == "other.ckpt"
        assert {found.name for found in paths(rank).parent.iterdir()} == {"other.ckpt", "run.ckpt"}
    assert scatter(paths) == [None] * 4
    check([paths(0), paths(2)])
    assert {found.name for found in paths(2).parent.iterdir()} == {"other.ckpt", "run.ckpt"}


def test_in_the_background_and_in_turn(tmp_path: Path) -> None:
    paths = per_host(tmp_path)

    def work(runtime: ThreadRuntime) -> None:
        saves = AsyncSaves(runtime)
        for version in (1.0, 2.0):
            saved = state(version, runtime.rank, runtime.world_size)
            saves.save(paths(runtime.rank), saved, strategy="test", kinds=KINDS, scattered=True)
            saved["model"]["b"].zero_()
        saves.close()

    assert on_threads(4, work, OtherHostsRuntime) == [None] * 4
    check([paths(0), paths(2)], version=2.0)
    assert scatter(paths, version=3.0, one_after_another=True) == [None] * 4
    check([paths(0), paths(2)], version=3.0)


def test_every_rank_may_remove_what_it_sees(tmp_path: Path) -> None:
    paths = per_host(tmp_path)
    for _ in range(3):
        scatter(paths)
        assert on_threads(4, lambda runtime: remove(paths(runtime.rank))) == [None] * 4
        assert files_in(tmp_path) == set()
        assert not list(tmp_path.rglob("run.ckpt"))


def test_in_object_stores(tmp_path: Path) -> None:
    base = f"memory://{uuid.uuid4().hex}"
    paths: Any = lambda rank: f"{base}/host{rank // 2}/run.ckpt"  # noqa: E731
    for version in (1.0, 2.0):
        assert scatter(paths, version=version) == [None] * 4
        check([paths(0), paths(2)], version=version)
    out = f"{base}/whole.ckpt"
    assert gather([paths(0), paths(2)], out).linked == 0
    check(out, version=2.0)
    gather([paths(2), paths(0)], tmp_path / "local.ckpt")
    check(tmp_path / "local.ckpt", version=2.0)
    mixed: Any = lambda rank: paths(0) if rank < 2 else tmp_path / "mixed.ckpt"  # noqa: E731
    assert scatter(mixed, version=3.0) == [None] * 4
    check([paths(0), tmp_path / "mixed.ckpt"], version=3.0)
    names = [name.rpartition("host0/run.ckpt/")[2] for name in fsspec.filesystem("memory").find(f"{base}/host0")]
    assert not [name for name in names if name.startswith(".")]
    assert all(map(is_ours, names))


RECORD = {
    "format": "fsdp-checkpoint-part", "format_version": 1, "save_id": "0" * 12, "rank": 1, "world_size": 2, "host": "b",
    "path": "/x", "manifest": {"host": "a", "path": "/x"},
    "files": {f"model/{'0' * 12}-rank-00001.safetensors": {"size": 8, "checksum": "xxh3:" + "0" * 16}},
}  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"rank": 2}, {"rank": -1}, {"rank": True}, {"rank": 1.0}, {"rank": 10**400}, {"world_size": 0}, {"host": 5},
        {"save_id": "../../etc/pa"}, {"path": "x" * 5000}, {"manifest": []}, {"manifest": {}}, {"files": []},
        {"files": {"../../etc/passwd": {"size": 8, "checksum": "xxh3:" + "0" * 16}}},
        {"files": {f"model/{'0' * 12}-rank-00000.safetensors": {"size": 8, "checksum": "xxh3:" + "0" * 16}}},
        {"files": {f"/{'0' * 12}-rank-00001.safetensors": {"size": 8, "checksum": "xxh3:" + "0" * 16}}},
        {"files": {f"model/{'0' * 12}-rank-00001.safetensors": {"size": 2**60, "checksum": "xxh3:" + "0" * 16}}},
        {"format_version": 2}, {"format": "fsdp-checkpoint"}, {"checksum": "xxh3:" + "0" * 16},
    ],
)  # fmt: skip
def test_hostile_records_are_refused(change: dict[str, Any]) -> None:
    content = {**RECORD, **change}
    signed = content if "checksum" in change else {**content, "checksum": content_checksum(content)}
    with pytest.raises(ValueError, match=r".+"):
        PartRecord.from_json(json.dumps(signed))
    assert PartRecord.from_json(json.dumps({**RECORD, "checksum": content_checksum(RECORD)})).rank == 1


@pytest.mark.parametrize("hostile", [[{"host": "a", "path": "/x", "ranks": [[0, 1, 10**15]]}], [{"host": "a"}], {},
                                    [[]], [{"host": "a", "path": "/x", "ranks": [[0, 0, 10**15]]}],
                                    [{"host": "a", "path": "/x", "ranks": [[0, 1]]}],
                                    [{"host": "a", "path": "/x" * 4096, "ranks": [[0, 1, 1]]}],
                                    [{"host": "a", "path": "/x", "ranks": []}]])  # fmt: skip
def test_hostile_places_are_refused(places: list[Path], hostile: Any) -> None:
    path = places[0] / "manifest.json"
    content = json.loads(path.read_text())
    del content["checksum"]
    content["places"] = hostile
    path.write_text(json.dumps({**content, "checksum": content_checksum(content)}))
    with pytest.raises(CheckpointFormatError):
        read_manifest(path.parent)


def test_links_that_lead_out_of_a_place_are_not_followed(places: list[Path], tmp_path: Path) -> None:
    (victim,) = (places[1] / "model").glob("*rank-00003*")
    secret = tmp_path / "secret"
    shutil.move(victim, secret)
    victim.symlink_to(secret)
    for reader in (load, verify, lambda given: gather(given, tmp_path / "out.ckpt")):
        refused(places, "outside of the checkpoint", by=reader)
    for record in (places[1] / "parts").iterdir():
        record.unlink()
        record.symlink_to("/dev/zero")
    refused(places[1], "it holds what rank 2-3 wrote")
    assert not (tmp_path / "out.ckpt").exists()


def test_the_command_joins_verifies_and_describes(places: list[Path], tmp_path: Path) -> None:
    (first, second), out = places, tmp_path / "out.ckpt"
    message = run("verify", first, status=1).output
    assert_says(message, "of 10 files, 4 are missing", "rank 2-3 on")
    assert "is damaged" not in message
    found = json.loads(run("verify", first, "--json", status=1).stdout)
    assert len(found["elsewhere"]) == 4
    assert set(found["faults"]) == set(found["elsewhere"])
    assert "together are whole" in run("verify", second, first).output
    assert "it holds what rank 2-3 wrote" in run("verify", second, status=1).output
    assert f"rank 2-3 on {writers.new_writer('0' * 12).host}, to {second}" in run("inspect", first).output
    found = json.loads(run("inspect", first, "--json").stdout)["places"]
    assert [(one["ranks"], one["path"]) for one in found] == [("0-1", str(first)), ("2-3", str(second))]
    assert "rank 2-3 on" in run("gather", first, out, status=1).output
    assert "Usage" in run("gather", out, status=2).output
    assert run("gather", second, first, first, out).output.startswith("Gathered 10 files")
    assert "already exists" in run("gather", second, first, out, status=1).output
    assert run("gather", second, first, tmp_path / "copied.ckpt", "--copy", "--no-verify", "--quiet").output == ""
    for path in (out, tmp_path / "copied.ckpt"):
        assert "is whole" in run("verify", path).output
        assert "Scattered" not in run("inspect", path).output
    assert_says(run("list", tmp_path / "host1").output, "scattered", "fsdp checkpoint gather")
