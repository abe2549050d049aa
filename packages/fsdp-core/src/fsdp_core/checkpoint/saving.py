"""Saving: each rank writes the boxes that it holds, rank 0 checks that they cover everything and publishes."""

from __future__ import annotations

import json
import os
import secrets
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import xxhash
from torch import Tensor

from fsdp_core.checkpoint.agreement import together
from fsdp_core.checkpoint.coverage import Box
from fsdp_core.checkpoint.dtypes import dtype_name
from fsdp_core.checkpoint.folder import Folder, StrPath, open_folder
from fsdp_core.checkpoint.json_text import check_text
from fsdp_core.checkpoint.manifest import MANIFEST, FileEntry, Manifest
from fsdp_core.checkpoint.merging import Index, chunk_name, file_name, merge
from fsdp_core.checkpoint.planning import Plan, plan_save
from fsdp_core.checkpoint.recognition import holds_manifest, is_ours, read_manifest
from fsdp_core.checkpoint.safetensors_file import write_safetensors
from fsdp_core.checkpoint.sources import TensorSource
from fsdp_core.errors import CheckpointError, CheckpointExistsError, CheckpointValueError
from fsdp_core.runtime import Runtime

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
) -> None:
    """Save a nest of sharded tensors and plain data as a checkpoint folder. Every rank calls this.

    Each rank writes the boxes that it holds, without talking to the others meanwhile. Then rank 0 checks that the
    boxes cover every tensor exactly, and publishes the checkpoint by replacing its manifest in one step: whoever reads
    the path finds the old checkpoint or the new one, complete. A failure on any rank is raised on every rank and
    leaves what was at the path as it was.

    Args:
        path: A local path or an fsspec URL, seen alike by all ranks. Rank 0's counts.
        state: Dicts, lists and tuples of tensors and plain data (see :mod:`fsdp_core.checkpoint.plain_data`), under the
            same keys on every rank. DTensors and chunked tensors are saved from all ranks; of plain tensors and plain
            data, rank 0's are saved.
        runtime: The ranks.
        strategy: The name of the strategy that saves, for the manifest.
        kinds: Which parts of the state are a model's or an optimizer's state, by path: ``{"model": "model",
            "optimizer/0": "optimizer"}``. Their tensors are listed in the manifest one by one, as ``model/<FQN>`` and
            ``optimizer/0/<FQN>/exp_avg``; an optimizer's state has the keys ``"state"`` (by FQN) and
            ``"param_groups"``.
        aliases: The further names of tied parameters: ``{"model/lm_head.weight": "model/wte.weight"}``. The tensor is
            stored once; a load gives it under both names, whether or not the state holds the further name.
        versions: Versions of packages to note in the manifest, beside torch's and this package's.
        overwrite: Whether what is at the path may be replaced, once the new checkpoint is complete: a checkpoint, a
            file, or a link, but never a folder of anything else.
        one_after_another: Whether ranks of a host write in turn. With tensors that are only read when they are
            written (see :mod:`fsdp_core.checkpoint.sources`), no more than one rank's are in memory then.

    Raises:
        CheckpointValueError: The state holds what can't be saved; nothing was written.
        CheckpointExistsError: Something is at the path that must not be replaced; nothing was written.
        CheckpointMismatchError: The ranks' boxes don't make whole tensors.
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
    stage: Callable[[Plan], Plan] = lambda plan: plan,
) -> PreparedSave:
    """Take the first half of :func:`save`: everything is decided and nothing is written. Every rank calls this.

    Args:
        path: As in :func:`save`, as all that follows.
        state: What to save.
        runtime: The ranks.
        strategy: The name of the strategy that saves.
        kinds: Which parts of the state are a model's or an optimizer's.
        aliases: The further names of tied parameters.
        versions: Versions of packages to note.
        overwrite: Whether what is at the path may be replaced.
        stage: Takes the plan and gives the one to write, whose tensors may be copies of the first one's.

    Returns:
        The second half.

    Raises:
        CheckpointError: As in :func:`save`, for what can be known before anything is written.
    """
    plan = Plan()

    def prepare() -> _Target | None:
        nonlocal plan
        plan = stage(plan_save(state, kinds, aliases or {}, runtime.rank))
        return _inspect(path, overwrite=overwrite) if runtime.rank == 0 else None

    target = together(runtime, f"preparing to save {os.fspath(path)}", prepare)[0]
    assert target is not None  # rank 0 gives one
    return PreparedSave(
        _target=target, _plan=plan, _strategy=strategy, _kinds=dict(kinds), _versions=dict(versions or {})
    )


@dataclass(frozen=True, kw_only=True)
class PreparedSave:
    """A save of which everything is decided and nothing is written."""

    _target: _Target
    _plan: Plan
    _strategy: str
    _kinds: dict[str, str]
    _versions: dict[str, str]

    def write(self, runtime: Runtime, *, one_after_another: bool = False) -> None:
        """Write and publish. Every rank calls this, on whatever thread.

        Args:
            runtime: The ranks, which this lets talk.
            one_after_another: As in :func:`save`. After a rank that fails, none writes.

        Raises:
            CheckpointError: As in :func:`save`, for what is known only when it is written.
        """
        target, plan = self._target, self._plan
        folder, save_id = target.folder, target.save_id
        named = {MANIFEST}
        try:
            turns = max(runtime.gather_objects(runtime.local_rank)) + 1 if one_after_another else 1
            by_rank: dict[int, Index] = {}
            for turn in range(turns):
                mine = not one_after_another or runtime.local_rank == turn
                write = partial(_write_chunks, folder, save_id, plan, runtime.rank) if mine else lambda: None
                written = together(runtime, f"writing {folder}", write)
                by_rank.update((rank, index) for rank, index in enumerate(written) if index is not None)
            indexes = [by_rank[rank] for rank in sorted(by_rank)]

            def publish() -> None:
                if runtime.rank == 0:
                    manifest = Manifest(
                        save_id=save_id,
                        created=datetime.now(UTC).isoformat(timespec="seconds"),
                        strategy=self._strategy,
                        versions=_own_versions() | self._versions,
                        world_size=runtime.world_size,
                        kinds=self._kinds,
                        tensors=merge(plan, save_id, indexes),
                        aliases=plan.aliases,
                        **_write_state(folder, save_id, plan, indexes),
                    )
                    named.update(manifest.files)
                    folder.publish(MANIFEST, manifest.to_json().encode(), temporary=f".manifest-{save_id}.tmp")
                    if target.aside:
                        folder.move_to(target.final, aside=f"{target.final.root}.{save_id}.replaced")

            together(runtime, f"publishing {folder}", publish)
        except CheckpointError:
            _discard(target, runtime)
            raise
        if runtime.rank == 0:
            _tidy(target.final, named)


@dataclass(frozen=True, kw_only=True)
class _Target:
    """Where a save goes.

    Attributes:
        path: The path that was asked for.
        save_id: What the names of this save's files carry.
        aside: Whether to write beside the path and to move there at the end, for a file or a link is in the way.
    """

    path: str
    save_id: str
    aside: bool

    @property
    def final(self) -> Folder:
        """The folder under the name that it has in the end."""
        return open_folder(self.path)

    @property
    def folder(self) -> Folder:
        """The folder to write to."""
        return replace(self.final, root=f"{self.final.root}.{self.save_id}.partial") if self.aside else self.final


def _inspect(path: StrPath, *, overwrite: bool) -> _Target:
    """Decide where to write, before anything is written."""
    final = open_folder(path)
    kind = final.kind()
    if kind != "missing" and not overwrite:
        raise CheckpointExistsError(
            f"{final} is there already, and overwrite=False: save to another path or pass overwrite=True"
        )
    if kind == "file" and not final.local:
        raise CheckpointExistsError(
            f"{final} is a file, and a checkpoint is a folder: remove it, or save to another path"
        )
    if kind == "folder" and not holds_manifest(final):
        foreign = [name for name in final.files() if not is_ours(name)]
        if foreign or final.size(MANIFEST) is not None:
            more = f" and {len(foreign) - 5} more" if len(foreign) > 5 else ""
            shown = ", ".join((foreign or [MANIFEST])[:5]) + more
            raise CheckpointExistsError(
                f"{final} is a folder with something else in it ({shown}), which a save does not replace: "
                "save to another path, or move it away"
            )
    return _Target(path=os.fspath(path), save_id=secrets.token_hex(6), aside=kind in ("file", "link"))


def _write_chunks(folder: Folder, save_id: str, plan: Plan, rank: int) -> Index:
    contents: dict[str, dict[str, Tensor | TensorSource]] = {}
    index = Index(tensors=[], files={})
    for key, tensor in plan.stored.items():
        boxes: list[Box] = []
        for chunk in tensor.chunks if tensor.replica == 0 else ():
            box = tuple(chunk.offsets), tuple(chunk.data.shape)
            if 0 not in box[1]:
                boxes.append(box)
                content = contents.setdefault(file_name(plan.section_of[key], save_id, rank), {})
                content[chunk_name(key, tensor.shape, box)] = chunk.data
        index.tensors.append((key, tensor.shape, dtype_name(tensor.dtype), boxes))
    for name, content in contents.items():
        index.files[name] = _write_tensors(folder, name, content)
    return index


def _write_tensors(folder: Folder, name: str, tensors: Mapping[str, Tensor | TensorSource]) -> FileEntry:
    with torch.no_grad(), folder.writing(name) as stream:
        size, digest = write_safetensors(stream, tensors)
    return FileEntry(size=size, checksum=f"xxh3:{digest}")


def _write_state(folder: Folder, save_id: str, plan: Plan, indexes: Sequence[Index]) -> dict[str, Any]:
    """Write the plain data and its tensors; gives the manifest's fields about files."""
    files = {name: entry for index in indexes for name, entry in index.files.items()}
    for name, entry in files.items():
        if (size := folder.size(name)) != entry.size:
            seen = "no file" if size is None else f"{size} bytes"
            raise CheckpointError(
                f"rank 0 sees {seen} at {folder.path(name)}, where a rank wrote {entry.size} bytes: "
                "save to a file system that all ranks share"
            )
    state_file, state_tensors = f"state-{save_id}.json", f"state-{save_id}.safetensors" if plan.tensors else None
    if state_tensors is not None:
        files[state_tensors] = _write_tensors(folder, state_tensors, plan.tensors)
    # One line per part of the state; json's own indentation takes as long as all tensors of a small model.
    text = ("{\n" + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in plan.plain.items()) + "\n}\n").encode()
    try:
        check_text(text)
    except ValueError as error:
        raise CheckpointValueError(
            f"can't save this plain data, for readers would refuse it: {error}. Turn what is large into tensors."
        ) from error
    with folder.writing(state_file) as stream:
        stream.write(text)
    files[state_file] = FileEntry(size=len(text), checksum=f"xxh3:{xxhash.xxh3_64_hexdigest(text)}")
    return {"state_file": state_file, "state_tensors": state_tensors, "files": files}


def _own_versions() -> dict[str, str]:
    versions = {"torch": str(torch.__version__)}
    try:
        versions["fsdp-core"] = version("fsdp-core")
    except PackageNotFoundError:  # run from a source tree that is not installed
        versions["fsdp-core"] = "unknown"
    return versions


def _discard(target: _Target, runtime: Runtime) -> None:
    """Take back what a failed save has written, unless its last step has published it all the same."""
    final, save_id = target.final, target.save_id
    if not together(runtime, "reading the manifest", lambda: runtime.rank == 0 and _is_published(final, save_id))[0]:
        together(runtime, "removing a failed save", lambda: _remove_files_of(target, runtime.rank))
        if runtime.rank == 0:
            target.folder.remove_empty()


def _is_published(folder: Folder, save_id: str) -> bool:
    try:
        return read_manifest(folder).save_id == save_id
    except CheckpointError:
        return False


def _remove_files_of(target: _Target, rank: int) -> None:
    mine = f"{target.save_id}-rank-{rank:05d}."
    for name in target.folder.files():
        if mine in name or (rank == 0 and target.save_id in name) or (rank == 0 and target.aside):
            target.folder.remove(name)


def _tidy(folder: Folder, named: set[str]) -> None:
    """Remove what earlier saves have left: files that the manifest doesn't name, folders of interrupted saves."""
    try:
        for name in folder.files():
            if is_ours(name) and name not in named:
                folder.remove(name)
        folder.remove_empty()
        for leftover in folder.interrupted_beside():
            for name in filter(is_ours, leftover.files()):  # whatever else has come into it is the user's
                leftover.remove(name)
            leftover.remove_empty()
    except OSError as error:
        warnings.warn(f"{folder} is saved, but files of an earlier save remain in it: {error}", stacklevel=3)
