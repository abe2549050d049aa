"""Checkpoints behind URLs: an S3 server of this process, and fsspec's own memory. Putting the manifest commits."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from urllib.parse import parse_qs
from uuid import uuid4

import boto3
import fsspec
import pytest
import torch
from botocore.loaders import JSONFileLoader
from fsspec.implementations.memory import MemoryFile
from torch import Tensor
from werkzeug.serving import make_server

from checkpoint_ranks import started
from damaged_folders import refused, save_alone
from fsdp_core.checkpoint import is_checkpoint, load, load_state_dict, read_manifest, remove, verify
from fsdp_core.checkpoint.storage.local_or_remote_folder import Folder
from fsdp_core.errors import CheckpointError, CheckpointExistsError
from fsdp_core.testing.launching.process_ranks import RankPool
from fsdp_core.testing.refusals import assert_says
from versioned_saves import Stop, save_version, version_of

PART_BYTES = 5 * 2**20  # the least that S3 takes as a part of an upload
DENIED = b"<?xml version='1.0'?><Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"


@dataclass(frozen=True, kw_only=True)
class Request:
    method: str
    bucket: str
    key: str
    query: dict[str, list[str]]
    headers: dict[str, str]


@dataclass(kw_only=True)
class Store:
    """An S3 server that notes every request, and refuses those that a test picks."""

    url: str
    client: Any
    requests: list[Request] = field(default_factory=list)
    refuse: Callable[[Request], bool] = lambda request: False

    def bucket(self) -> str:
        """A new bucket."""
        name = f"bucket-{uuid4().hex[:8]}"
        self.client.create_bucket(Bucket=name)
        self.requests.clear()
        return name

    def keys(self, bucket: str) -> list[str]:
        return sorted(entry["Key"] for entry in self.client.list_objects_v2(Bucket=bucket).get("Contents", ()))

    def written(self) -> list[str]:
        """The keys of the objects that were put, in the order in which they were, but for what tells who writes."""
        put = [one.key for one in self.requests if one.method == "PUT" and one.key and "partNumber" not in one.query]
        return [key for key in put if "/.writer-" not in key]


@pytest.fixture(scope="module")
def store() -> Iterator[Store]:
    from moto import backends
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

    moto = DomainDispatcherApplication(create_backend_app)

    def app(environ: dict[str, Any], respond: Any) -> Any:
        bucket, _, key = environ["PATH_INFO"].strip("/").partition("/")
        headers = {name[5:].lower(): value for name, value in environ.items() if name.startswith("HTTP_")}
        query = parse_qs(environ["QUERY_STRING"], keep_blank_values=True)
        request = Request(method=environ["REQUEST_METHOD"], bucket=bucket, key=key, query=query, headers=headers)
        opened.requests.append(request)
        if opened.refuse(request):
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            respond("403 Forbidden", [("Content-Type", "application/xml"), ("Content-Length", str(len(DENIED)))])
            return [DENIED]
        return moto(environ, respond)

    server = make_server("127.0.0.1", 0, app, threaded=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    with pytest.MonkeyPatch.context() as patch:
        settings = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "FSSPEC_S3": f'{{"default_block_size": {PART_BYTES}}}',  # read when fsspec is imported, so by the ranks
        }
        for name, value in settings.items():
            patch.setenv(name, value)
        patch.setitem(fsspec.config.conf, "s3", {"default_block_size": PART_BYTES})
        # each filesystem of a save has a session of its own, which would parse botocore's large files anew
        patch.setattr(JSONFileLoader, "load_file", staticmethod(cache(JSONFileLoader().load_file)))
        modules = list(backends.list_of_moto_modules())  # the server lists its folder at every request
        patch.setattr(backends, "list_of_moto_modules", lambda: modules)
        opened = Store(url=settings["AWS_ENDPOINT_URL"], client=boto3.client("s3"))
        yield opened
    server.shutdown()
    thread.join(timeout=10)
    server.server_close()


@pytest.fixture(autouse=True)
def forget(store: Store) -> Iterator[None]:
    yield
    store.refuse = lambda request: False


@pytest.fixture(scope="module")
def pool(store: Store) -> Iterator[RankPool]:
    with RankPool() as ranks:
        yield ranks


@pytest.fixture(params=["s3", "memory"])
def url(request: pytest.FixtureRequest, store: Store) -> str:
    """A path in which nothing is, on either filesystem."""
    return f"s3://{store.bucket()}/runs/last.ckpt" if request.param == "s3" else f"memory:///{uuid4().hex}/last.ckpt"


def names_in(path: str) -> set[str]:
    fs, root = fsspec.core.url_to_fs(path, skip_instance_cache=True)
    return {name.removeprefix(root + "/") for name in fs.find(root)}


def is_tidy(path: str) -> bool:
    """Whether the folder holds what its manifest names, and nothing else."""
    return names_in(path) == {*read_manifest(path).files, "manifest.json"}


def test_saved_overwritten_verified_loaded_and_removed(url: str) -> None:
    assert not is_checkpoint(url)
    for value in (1.0, 2.0, 3.0):
        save_version(url, value)
        assert is_checkpoint(url)
        assert version_of(url) == value
        assert is_tidy(url)
    verify(url)
    assert load_state_dict(url)["b"].tolist() == [3.0, 3.0]
    with pytest.raises(CheckpointExistsError, match=r"already exists, and overwrite=False"):
        save_version(url, 4.0, overwrite=False)
    assert version_of(url) == 3.0
    remove(url)
    assert not is_checkpoint(url)
    assert not names_in(url)
    refused(url, f"no checkpoint at {url}: the path does not exist. Check the path")


def test_nothing_is_renamed_and_the_manifest_is_put_last(store: Store) -> None:
    path = f"s3://{store.bucket()}/c"
    for value in (1.0, 2.0):
        store.requests.clear()
        before = names_in(path)
        save_version(path, value)
        assert not any("x-amz-copy-source" in one.headers for one in store.requests)
        written = store.written()
        assert written[-1] == "c/manifest.json"
        assert sorted(written) == sorted(f"c/{name}" for name in names_in(path))
        # What was there is removed only after the manifest that no longer names it.
        committed = next(i for i, one in enumerate(store.requests) if one.method == "PUT" and "manifest" in one.key)
        removed = [i for i, one in enumerate(store.requests) if one.method == "DELETE" and ".writer-" not in one.key]
        assert len(removed) == len(before - {"manifest.json"})
        assert all(index > committed for index in removed)


def test_no_folder_and_no_bucket_is_made(store: Store) -> None:
    path = "s3://no-such-bucket/c"
    with pytest.raises(CheckpointError, match=r"bucket does not exist.*a bucket or a container must already exist"):
        save_version(path, 1.0)
    assert "no-such-bucket" not in {entry["Name"] for entry in store.client.list_buckets()["Buckets"]}
    refused(path, f"no checkpoint at {path}")


def test_a_whole_bucket_may_be_the_folder_and_outlives_it(store: Store) -> None:
    bucket = store.bucket()
    save_version(f"s3://{bucket}", 1.0)
    assert version_of(f"s3://{bucket}/") == 1.0
    remove(f"s3://{bucket}")
    store.refuse = lambda request: request.method == "PUT" and request.key == "manifest.json"
    with pytest.raises(CheckpointError, match="Access Denied"):
        save_version(f"s3://{bucket}", 2.0)
    assert store.keys(bucket) == []
    assert bucket in {entry["Name"] for entry in store.client.list_buckets()["Buckets"]}


def test_files_of_the_user_stay(url: str) -> None:
    save_version(url, 1.0)
    with fsspec.open(f"{url}/model/notes.txt", "wb") as stream:
        stream.write(b"mine")
    save_version(url, 2.0)
    assert version_of(url) == 2.0
    remove(url)
    assert names_in(url) == {"model/notes.txt"}
    with pytest.raises(CheckpointExistsError, match=r"folder with something else in it \(model/notes.txt\)"):
        save_version(url, 3.0)


def test_a_file_in_the_way_is_refused(url: str) -> None:
    with fsspec.open(url, "wb") as stream:
        stream.write(b"an earlier full checkpoint")
    with pytest.raises(CheckpointExistsError, match=f"{url} is a file, and a checkpoint is a folder: remove it"):
        save_version(url, 1.0)
    with fsspec.open(url, "rb") as stream:
        assert stream.read() == b"an earlier full checkpoint"
    remove(url)
    save_version(url, 1.0)
    assert version_of(url) == 1.0


def test_an_empty_folder_of_a_web_console_is_used(store: Store) -> None:
    bucket = store.bucket()
    store.client.put_object(Bucket=bucket, Key="c/", Body=b"")
    save_version(f"s3://{bucket}/c", 1.0)
    assert version_of(f"s3://{bucket}/c") == 1.0
    save_version(f"s3://{bucket}/c", 2.0)
    assert version_of(f"s3://{bucket}/c") == 2.0
    remove(f"s3://{bucket}/c")
    assert [key for key in store.keys(bucket) if key != "c/"] == []


def test_an_interrupted_save_is_no_checkpoint_and_the_next_one_clears_it(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*args: Any, **kwargs: Any) -> None:
        raise Stop

    for value in (None, 1.0):
        if value is not None:
            save_version(url, value)
        with monkeypatch.context() as patched, contextlib.suppress(Stop):
            patched.setattr(Folder, "commit", die)
            save_version(url, 2.0)
        if value is None:
            assert not is_checkpoint(url)
            refused(url, "a save began and was interrupted before it was committed")
            remove(url)
            assert not names_in(url)
        else:
            assert version_of(url) == value
            assert not is_tidy(url)
    save_version(url, 3.0)
    assert version_of(url) == 3.0
    assert is_tidy(url)


def test_what_another_client_does_is_seen_at_once(store: Store) -> None:
    bucket = store.bucket()
    path = f"s3://{bucket}/c"
    save_version(path, 1.0)
    assert version_of(path) == 1.0
    key = next(key for key in store.keys(bucket) if key.startswith("c/model/"))
    content = store.client.get_object(Bucket=bucket, Key=key)["Body"].read()
    store.client.delete_object(Bucket=bucket, Key=key)
    refused(path, f"{key.removeprefix('c/')} is missing")
    store.client.put_object(Bucket=bucket, Key=key, Body=content[:-1])
    refused(path, f"{key.removeprefix('c/')} has .* bytes instead of")
    store.client.put_object(Bucket=bucket, Key=key, Body=content)
    assert version_of(path) == 1.0
    for key in store.keys(bucket):
        store.client.delete_object(Bucket=bucket, Key=key)
    refused(path, "no checkpoint")
    save_version(path, 2.0, overwrite=False)
    assert version_of(path) == 2.0


@pytest.mark.parametrize("in_background", [False, True])
def test_filesystems_that_remember_listings_see_what_a_save_has_done(store: Store, in_background: bool) -> None:
    folder = f"{store.bucket()}/runs"
    remembering = fsspec.filesystem("s3")

    def seen() -> tuple[bool, list[str]]:
        return remembering.exists(f"{folder}/c"), remembering.ls(folder)

    def do(work: Callable[[], None]) -> None:
        if in_background:
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
        else:
            work()

    save_version(f"s3://{folder}/first", 1.0)
    assert seen() == (False, [f"{folder}/first"])
    do(lambda: save_version(f"s3://{folder}/c", 1.0))
    assert seen() == (True, [f"{folder}/c", f"{folder}/first"])
    do(lambda: remove(f"s3://{folder}/c"))
    assert seen() == (False, [f"{folder}/first"])


def large() -> Tensor:
    return torch.arange(3 * 2**20, dtype=torch.float32).reshape(3 * 2**10, 2**10)  # 12 MiB


def save_large(path: str, shift: float = 0.0) -> None:
    save_alone(path, {"model": {"w": large() + shift}})


def parts(store: Store) -> list[int]:
    return [int(one.query["partNumber"][0]) for one in store.requests if "partNumber" in one.query]


def test_large_files_go_up_in_parts_and_come_back_by_ranges(store: Store) -> None:
    path = f"s3://{store.bucket()}/c"
    save_large(path)
    assert max(parts(store)) >= 2
    nest = load(path, verify=False)
    store.requests.clear()
    assert nest["model"]["w"].read((1000, 5), (3, 7)).equal(large()[1000:1003, 5:12])
    ranges = [one.headers["range"].removeprefix("bytes=").split("-") for one in store.requests]
    assert ranges
    assert sum(int(end) - int(start) + 1 for start, end in ranges) <= 3 * 2**12  # three rows of 4 KiB
    assert nest["model"]["w"].full().equal(large())


def test_an_upload_that_fails_midway_leaves_the_old_checkpoint(store: Store) -> None:
    bucket = store.bucket()
    path = f"s3://{bucket}/c"
    save_large(path)
    before = store.keys(bucket)
    store.requests.clear()
    store.refuse = lambda request: request.query.get("partNumber") == ["2"]
    with pytest.raises(
        CheckpointError, match=rf"writing {path} failed: PermissionError: .*Access Denied.*This user lacks"
    ):
        save_large(path, shift=1.0)
    assert sorted(set(parts(store))) == [1, 2]  # the first had arrived
    assert store.keys(bucket) == before
    assert not store.client.list_multipart_uploads(Bucket=bucket).get("Uploads")  # or they cost money forever
    assert load_state_dict(path)["w"].equal(large())


def test_a_large_tensor_is_passed_on_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The streams of fsspec copy what they are given, so a whole tensor at once would be in memory twice."""
    path, write, sizes = f"memory:///{uuid4().hex}/c", MemoryFile.write, list[int]()

    def noting(stream: MemoryFile, data: Any) -> int:
        sizes.append(len(data))
        return int(write(stream, data))

    monkeypatch.setattr(MemoryFile, "write", noting)
    save_large(path)
    assert 2**22 < max(sizes) <= 2**23
    assert load_state_dict(path)["w"].equal(large())


@dataclass(frozen=True)
class Failing:
    """A tensor that can't be read to its end."""

    shape: tuple[int, ...] = (2**11, 2**12)  # 32 MiB, which is read in one piece
    dtype: torch.dtype = torch.float32

    def read(self, offsets: Any, lengths: Any) -> Tensor:
        raise OSError("the source is gone")


@pytest.mark.parametrize("sent", [1, 7 * 2**20])
def test_a_file_that_was_written_in_part_is_not_put(store: Store, sent: int) -> None:
    bucket = store.bucket()
    tensors = {"a": torch.zeros(sent, dtype=torch.float64), "b": Failing()}
    with pytest.raises(CheckpointError, match="the source is gone"):
        save_alone(f"s3://{bucket}/c", {"model": tensors})
    assert bool(parts(store)) == (sent > PART_BYTES)  # it had begun
    assert (store.written(), store.keys(bucket)) == ([], [])
    assert not store.client.list_multipart_uploads(Bucket=bucket).get("Uploads")


def test_reading_that_is_not_allowed_is_said(store: Store) -> None:
    path = f"s3://{store.bucket()}/c"
    save_version(path, 1.0)
    store.refuse = lambda request: request.method == "GET" and request.key == "c/manifest.json"
    refused(path, f"can't read {path}: PermissionError: .*This user lacks permission")


def test_credentials_that_are_not_there_are_said(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "/dev/null")
    fs = fsspec.filesystem("s3")
    fs.clear_instance_cache()
    refused("s3://bucket/c", "can't read s3://bucket/c: NoCredentialsError")
    with pytest.raises(CheckpointError, match="preparing to save s3://bucket/c failed: NoCredentialsError"):
        save_version("s3://bucket/c", 1.0)
    fs.clear_instance_cache()


def save_and_load_on_a_rank(path: str, value: float) -> str:
    """Save on this rank, and load what all have saved; the error if there is one."""
    runtime = started()
    try:
        save_version(path, value, runtime)
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    runtime.barrier()
    assert load(path, runtime=runtime)["model"]["w"].full()[:, 0].tolist() == [value] * 4 + [value + 1] * 4
    return "saved"


def test_ranks_that_are_processes(store: Store, pool: RankPool) -> None:
    ranks, bucket = 2, store.bucket()
    path = f"s3://{bucket}/c"
    for value in (1.0, 3.0):  # the same processes: none may remember what was there before
        assert pool.run(ranks, save_and_load_on_a_rank, path, value, timeout=60) == ["saved"] * ranks
        assert version_of(path) == value
        assert is_tidy(path)
    assert not any("x-amz-copy-source" in one.headers for one in store.requests)
    assert set(store.written()[-1:]) == {"c/manifest.json"}
    before = store.keys(bucket)
    store.refuse = lambda request: request.method == "PUT" and "rank-00001" in request.key
    errors = pool.run(ranks, save_and_load_on_a_rank, path, 4.0, timeout=60)
    assert len(set(errors)) == 1
    assert_says(errors[0], f"(on rank 1 of {ranks}, while writing {path})", "Access Denied")
    assert store.keys(bucket) == before
    assert version_of(path) == 3.0


@pytest.mark.parametrize("step", ["mark", "writing", "commit", "remove"])
def test_another_job_that_saves_meanwhile(url: str, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the two is whole whenever that is, and it is one that has reported success."""
    save_version(url, 1.0)
    function, once = getattr(Folder, step), iter([True])

    def saving_too(self: Folder, *args: Any, **kwargs: Any) -> Any:
        if next(once, False):
            save_version(url, 3.0)
        return function(self, *args, **kwargs)

    monkeypatch.setattr(Folder, step, saving_too)
    told = pytest.raises(CheckpointExistsError, match=f"another job has saved to {url} while this one did")
    warned = pytest.warns(UserWarning, match="it also holds files of another save")
    # Just before the manifest is put nothing can tell; the job that puts its own then finds the other's files.
    with {"commit": warned, "remove": contextlib.nullcontext()}.get(step, told):
        save_version(url, 2.0)
    assert version_of(url) == (2.0 if step == "commit" else 3.0)
    assert is_tidy(url) == (step != "commit")
