"""Saves checkpoints: each rank writes its boxes, then rank 0 checks that they cover every tensor, and commits."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import xxhash
from torch import Tensor

from fsdp_core.checkpoint.collective import run_on_all, run_on_first, total
from fsdp_core.checkpoint.format.base_tensors import Base, BaseSource, BaseTensor
from fsdp_core.checkpoint.format.chunks import chunk_name
from fsdp_core.checkpoint.format.file_names import Section, file_name, files_of, state_file, state_tensors_file
from fsdp_core.checkpoint.format.json_text import check_texts
from fsdp_core.checkpoint.format.manifest import FileEntry, Manifest
from fsdp_core.checkpoint.format.safetensors_file import write_safetensors
from fsdp_core.checkpoint.indexes import (
    FirstRankSummary,
    Index,
    LastSave,
    Message,
    SaveMemory,
    TensorSpec,
    pack_message,
    save_memory_of,
    table_digest,
)
from fsdp_core.checkpoint.merging import Merged, merge_messages
from fsdp_core.checkpoint.planning import Plan, plan_save
from fsdp_core.checkpoint.save_protocols import PerHostSave, SharedSave
from fsdp_core.checkpoint.storage.commit import SaveTarget, choose_target
from fsdp_core.checkpoint.storage.local_or_remote_folder import Folder, StrPath
from fsdp_core.checkpoint.storage.local_target import LocalTarget, choose_local_target, first_local_target
from fsdp_core.errors import CheckpointError, CheckpointValueError
from fsdp_core.runtime import Runtime
from fsdp_core.state.chunks import TensorSource
from fsdp_core.state.coverage import Box
from fsdp_core.state.dtypes import dtype_name

__all__ = ["PreparedSave", "prepare_save", "save"]


def save(
    path: StrPath,
    state: Mapping[str, Any],
    *,
    runtime: Runtime,
    strategy: str,
    kinds: Mapping[str, str],
    aliases: Mapping[str, str] | None = None,
    versions: Mapping[str, str] | None = None,
    overwrite: bool = True,
    one_after_another: bool = False,
    scattered: bool = False,
    base_source: BaseSource | None = None,
) -> None:
    """Save a nest of sharded tensors and plain data as a checkpoint folder. Every rank calls this.

    Each rank writes its boxes without communicating with the others. Then rank 0 checks that the boxes cover every
    tensor exactly, and commits the checkpoint by replacing its manifest atomically: readers find either the complete
    old checkpoint or the complete new one. A failure on any rank is raised on every rank and leaves the path's previous
    content unchanged.

    Args:
        path: A local path or an fsspec URL, on storage that all ranks share. Rank 0's value is used, unless the save is
            scattered.
        state: Dicts, lists and tuples of tensors and plain data (see
            :mod:`fsdp_core.checkpoint.format.plain_data`), under the same keys on every rank.
            DTensors and chunked tensors are saved from all ranks; plain tensors and plain data, from rank 0.
        runtime: The ranks.
        strategy: The name of the strategy that saves, for the manifest.
        kinds: Which parts of the state are a model's or an optimizer's state, by path: ``{"model": "model",
            "optimizer/0": "optimizer"}``. Their tensors are listed in the manifest one by one, as ``model/<FQN>`` and
            ``optimizer/0/<FQN>/exp_avg``; an optimizer's state has the keys ``"state"`` (by FQN) and
            ``"param_groups"``.
        aliases: Additional names of tied parameters: ``{"model/lm_head.weight": "model/wte.weight"}``. The tensor is
            stored once; a load returns it under both names, whether or not the state holds the additional name.
        versions: Package versions to record in the manifest, in addition to torch's and this package's.
        overwrite: Whether an existing checkpoint, file or link at the path may be replaced, once the new checkpoint is
            complete. A folder of anything else is never replaced.
        one_after_another: Whether the ranks of a host write in turn. For tensors that are read only when they are
            written (see :class:`~fsdp_core.state.TensorSource`), only one rank's are then in memory at a time.
        scattered: Whether ranks may stand in different folders: paths that differ, or hosts that share no disk. Each
            then writes to its own path, and the manifest is at rank 0's. Nothing loads such a checkpoint before
            :func:`~fsdp_core.checkpoint.gather` has joined the places, unless they are given to a load together.
        base_source: Where the tensors come from that the state leaves out (:class:`~fsdp_core.state.LeftOut`), to
            record it.

    Raises:
        CheckpointValueError: The state holds values that can't be saved; nothing was written.
        CheckpointExistsError: The path holds something that must not be replaced, and nothing was written. Or another
            job has saved there in the meantime: its checkpoint is in place, and nothing is left of this one.
        CheckpointMismatchError: The ranks' boxes don't form full tensors.
        CheckpointError: Writing failed on some rank, for instance because the disk is full.
    """
    prepared = prepare_save(
        path,
        state,
        runtime=runtime,
        strategy=strategy,
        kinds=kinds,
        aliases=aliases,
        versions=versions,
        overwrite=overwrite,
        scattered=scattered,
        base_source=base_source,
    )
    prepared.write(runtime, one_after_another=one_after_another)


def prepare_save(
    path: StrPath,
    state: Mapping[str, Any],
    *,
    runtime: Runtime,
    strategy: str,
    kinds: Mapping[str, str],
    aliases: Mapping[str, str] | None = None,
    versions: Mapping[str, str] | None = None,
    overwrite: bool = True,
    scattered: bool = False,
    base_source: BaseSource | None = None,
    stage: Callable[[Plan], Plan] = lambda plan: plan,
) -> PreparedSave:
    """Run the first half of :func:`save`, which plans the save and writes nothing. Every rank calls this.

    Args:
        path: As in :func:`save`, like the other arguments.
        state: The state to save.
        runtime: The ranks.
        strategy: The name of the strategy that saves.
        kinds: Which parts of the state are a model's or an optimizer's.
        aliases: Additional names of tied parameters.
        versions: Package versions to record.
        overwrite: Whether an existing checkpoint may be replaced.
        scattered: Whether ranks may stand in different folders.
        base_source: Where the tensors come from that the state leaves out.
        stage: Takes the plan and returns the plan to write, whose tensors may be copies.

    Returns:
        The prepared save, whose :meth:`~PreparedSave.write` is the second half.

    Raises:
        CheckpointError: As in :func:`save`, for errors that are detected before anything is written.
    """
    memory = save_memory_of(runtime)
    last = memory.last

    @cache
    def own_plan() -> Plan:  # first called in the step below, which raises its errors on all ranks
        return stage(plan_save(state, kinds, aliases or {}, runtime.rank))

    def plan_and_decide() -> _Decision | None:
        plan = own_plan()
        if runtime.rank:
            return None
        target = choose_target(path, secrets.token_hex(6), overwrite=overwrite)
        digest = table_digest(_tensor_specs(plan))
        return _Decision(
            target=target,
            first_rank=FirstRankSummary(digest, None if last is None else last.save_id),
            first_path=first_local_target(target).path,
        )

    action = f"preparing to save {os.fspath(path)}"
    decision = run_on_first(runtime, action, plan_and_decide)
    assert decision is not None  # rank 0 returns it
    target = decision.target
    protocol = SharedSave(target, runtime.rank)
    if scattered:
        first_target = first_local_target(target)

        def choose() -> LocalTarget:
            if runtime.rank == 0:
                return first_target
            return choose_local_target(path, first_target, overwrite=overwrite)

        protocol = PerHostSave(run_on_all(runtime, action, choose), runtime.rank, decision.first_path)
    return PreparedSave(
        _protocol=protocol,
        _plan=own_plan(),
        _strategy=strategy,
        _kinds=dict(kinds),
        _versions=dict(versions or {}),
        _base_source=base_source,
        _first_rank=decision.first_rank,
        _last=last,
        _memory=memory,
    )


@dataclass(frozen=True, kw_only=True)
class _Decision:
    """What rank 0 tells the other ranks before a save.

    Attributes:
        target: Where it saves.
        first_rank: What it has already, so that nobody sends it again.
        first_path: The path of its target as it is seen on its host.
    """

    target: SaveTarget
    first_rank: FirstRankSummary
    first_path: str


@dataclass(frozen=True, kw_only=True)
class PreparedSave:
    """A save that is planned but not written; ``_memory`` outlives it, and ``_last`` is what it held at the start."""

    _protocol: SharedSave
    _plan: Plan
    _strategy: str
    _kinds: dict[str, str]
    _versions: dict[str, str]
    _base_source: BaseSource | None
    _first_rank: FirstRankSummary
    _last: LastSave | None
    _memory: SaveMemory

    def write(self, runtime: Runtime, *, one_after_another: bool = False) -> None:
        """Write and commit. Every rank calls this, on any thread.

        Args:
            runtime: The ranks, whose collectives this uses.
            one_after_another: As in :func:`save`. After a rank has failed, the following ones don't write.

        Raises:
            CheckpointError: As in :func:`save`, for errors that are detected only while writing.
        """
        protocol, target = self._protocol, self._protocol.target
        commit = _Commit(target)
        with protocol.counting_as_writer():
            try:
                action = f"writing {target.final}"
                protocol.begin(runtime, action)
                message = self._write_in_turns(runtime, action, one_after_another=one_after_another)
                messages = runtime.gather_objects_to(message)
                self._commit(runtime, commit, messages)
            except CheckpointError:
                protocol.discard(runtime, commit.manifest)
                raise
            self._memory.last = LastSave(target.save_id, message.boxes_digest, commit.merged)
            if runtime.rank == 0:
                commit.remove_leftovers()
            else:
                protocol.remove_earlier_save()

    def _write_in_turns(self, runtime: Runtime, action: str, *, one_after_another: bool) -> Message:
        """Write this rank's chunks, together with the other ranks, or in turn with those of its host."""
        if not one_after_another:
            return run_on_all(runtime, action, partial(self._write_chunks, runtime))
        message: Message | None = None
        turn = 0
        waiting_ranks = runtime.world_size
        while waiting_ranks:
            is_my_turn = runtime.local_rank == turn
            step = partial(self._write_chunks, runtime) if is_my_turn else lambda: None
            message = run_on_all(runtime, action, step) or message
            turn += 1
            (waiting_ranks,) = total(runtime, [runtime.local_rank >= turn])
        assert message is not None  # every rank has had its turn
        return message

    def _commit(self, runtime: Runtime, commit: _Commit, messages: list[Message] | None) -> None:
        """Merge what all ranks have written, and commit it. If all share a folder, both are one step, for speed."""
        action = f"committing {self._protocol.target.final}"

        def merge_and_commit() -> None:
            self._merge(commit, messages)
            commit.run()

        if not self._protocol.is_scattered:
            run_on_all(runtime, action, merge_and_commit)
            return
        run_on_all(runtime, action, partial(self._merge, commit, messages))
        run_on_all(runtime, action, self._protocol.publish)
        run_on_all(runtime, action, commit.run)

    def _merge(self, commit: _Commit, messages: list[Message] | None) -> None:
        """Write the plain data, and make the manifest; on rank 0, which alone has messages."""
        if messages is None:
            return
        protocol, plan = self._protocol, self._plan
        save_id = protocol.target.save_id
        commit.merged = merge_messages(_tensor_specs(plan), messages, self._last)
        manifest = Manifest(
            save_id=save_id,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            strategy=self._strategy,
            versions=_own_versions() | self._versions,
            world_size=len(messages),
            kinds=self._kinds,
            tensors=commit.merged.stored_tensors(lambda key: files_of(plan.section_of[key], save_id)),
            aliases=plan.aliases,
            places=protocol.places(),
            base=_base_of(plan, self._base_source),
            **_write_state(protocol, plan, messages),
        )
        commit.files = protocol.files_of_first(manifest.files)
        commit.manifest = manifest.to_json().encode()

    def _write_chunks(self, runtime: Runtime) -> Message:
        """Write this rank's chunks, and return the message about them for rank 0."""
        plan = self._plan
        target = self._protocol.target
        rank = runtime.rank
        contents: dict[Section, dict[str, Tensor | TensorSource]] = {}
        index = Index(tensors=_tensor_specs(plan))
        for key, tensor in plan.stored.items():
            chunks = tensor.chunks if tensor.replica == 0 else ()
            boxes: list[Box] = []
            for chunk in chunks:
                box = tuple(chunk.offsets), tuple(chunk.data.shape)
                if 0 not in box[1]:
                    boxes.append(box)
                    contents.setdefault(plan.section_of[key], {})[chunk_name(key, tensor.shape, box)] = chunk.data
            index.boxes.append(tuple(boxes))
        for section, content in contents.items():
            index.files[section] = _write_tensors(target.folder, file_name(section, target.save_id, rank), content)
        files = {file_name(section, target.save_id, rank): entry for section, entry in index.files.items()}
        self._protocol.write_part_record(runtime, files)
        return pack_message(index, self._first_rank, self._last)


@dataclass
class _Commit:
    """The last step of a save, on rank 0; on other ranks it stays empty and does nothing.

    Attributes:
        target: Where the manifest goes.
        merged: The merged indexes of all ranks.
        manifest: The manifest, as soon as it is made.
        files: The files beside it.
        previous: The manifest that it has replaced.
    """

    target: SaveTarget
    merged: Merged | None = None
    manifest: bytes | None = None
    files: Mapping[str, FileEntry] = field(default_factory=dict)
    previous: bytes | None = None

    def run(self) -> None:
        if self.manifest is not None:
            self.previous = self.target.commit(self.manifest, self.files)

    def remove_leftovers(self) -> None:
        assert self.manifest is not None
        self.target.remove_leftovers(self.manifest, self.previous)


def _tensor_specs(plan: Plan) -> list[TensorSpec]:
    return [TensorSpec(key, tensor.shape, dtype_name(tensor.dtype)) for key, tensor in plan.stored.items()]


def _base_of(plan: Plan, source: BaseSource | None) -> Base | None:
    """The manifest's record of the tensors that are left out."""
    if not plan.left_out:
        return None
    tensors = {
        key: BaseTensor(shape=leaf.shape, dtype_name=dtype_name(leaf.dtype), digest=leaf.digest)
        for key, leaf in plan.left_out.items()
    }
    return Base(source=source, tensors=tensors)


def _write_tensors(folder: Folder, name: str, tensors: Mapping[str, Tensor | TensorSource]) -> FileEntry:
    with torch.no_grad(), folder.writing(name) as stream:
        size, digest = write_safetensors(stream, tensors)
    return FileEntry(size=size, checksum=f"xxh3:{digest}")


def _write_state(protocol: SharedSave, plan: Plan, messages: Sequence[Message]) -> dict[str, Any]:
    """Write the plain data and its tensors, and return the manifest's fields about files."""
    folder, save_id = protocol.target.folder, protocol.target.save_id
    files = dict(entry for rank, message in enumerate(messages) for entry in message.entries(save_id, rank))
    _check_sizes_seen(folder, protocol.files_of_first(files))
    plain_file = state_file(save_id)
    state_tensors = state_tensors_file(save_id) if plan.tensors else None
    if state_tensors is not None:
        files[state_tensors] = _write_tensors(folder, state_tensors, plan.tensors)
    texts = _plain_texts(plan.plain)
    digest = xxhash.xxh3_64()
    with folder.writing(plain_file) as stream:
        for text in texts:
            stream.write(text)
            digest.update(text)
    files[plain_file] = FileEntry(size=sum(map(len, texts)), checksum=f"xxh3:{digest.hexdigest()}")
    return {"state_file": plain_file, "state_tensors": state_tensors, "files": files}


def _check_sizes_seen(folder: Folder, files: Mapping[str, FileEntry]) -> None:
    """Refuse to go on where rank 0 does not see in its folder what ranks have written there."""
    for name, entry in files.items():
        size = folder.size(name)
        if size != entry.size:
            size_seen = "no file" if size is None else f"{size} bytes"
            raise CheckpointError(
                f"rank 0 sees {size_seen} at {folder.path(name)}, where a rank wrote {entry.size} bytes: "
                "save to a file system that all ranks share, or with scattered_save=True (scattered=True of "
                "fsdp_core.checkpoint.save), with which each rank writes where it stands"
            )


def _plain_texts(plain: Mapping[str, Any]) -> list[bytes]:
    """Return the plain data as JSON, in pieces of one file."""
    # One line per part of the state: json's own indentation takes as long as writing all tensors of a small model.
    texts = [b"{\n"]
    for number, (key, value) in enumerate(plain.items()):
        texts += [b",\n" if number else b"", f"{json.dumps(key)}: ".encode(), json.dumps(value).encode()]
    texts.append(b"\n}\n")
    try:
        check_texts(texts)
    except ValueError as error:
        raise CheckpointValueError(
            f"can't save this plain data, because readers would refuse it: {error}. Convert large values to tensors."
        ) from error
    return texts


def _own_versions() -> dict[str, str]:
    versions = {"torch": str(torch.__version__)}
    try:
        versions["fsdp-core"] = version("fsdp-core")
    except PackageNotFoundError:  # run from a source tree that is not installed
        versions["fsdp-core"] = "unknown"
    return versions
