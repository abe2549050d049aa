"""Finds out whether all hosts see one folder, before anything is saved there. No torch."""

from __future__ import annotations

import os
import secrets
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from fsdp_core.checkpoint.collective import run_on_all, run_on_first, total
from fsdp_core.checkpoint.storage.local_or_remote_folder import Folder, StrPath, open_folder
from fsdp_core.errors import CheckpointError
from fsdp_core.runtime import Runtime

__all__ = ["check_shared"]

#: How long a host may take to see what another has written: network file systems cache listings for a while.
_SECONDS = 3.0

#: The places that the ranks of a runtime share.
_shared: WeakKeyDictionary[Runtime, set[str]] = WeakKeyDictionary()


@dataclass(frozen=True, kw_only=True)
class _Sign:
    """What rank 0 writes, and one rank of each host looks for.

    Attributes:
        path: The folder.
        name: The file's name.
        host: The host that writes it.
    """

    path: str
    name: str
    host: str


def check_shared(path: StrPath, runtime: Runtime) -> None:
    """Raise on all ranks if a host does not see what rank 0 writes to a folder. All ranks must call it.

    Rank 0 creates the folder, and an empty file in it that it removes again. A folder is looked at once for each
    runtime. Each rank takes part in one broadcast and three sums.

    Args:
        path: A local path or an fsspec URL of a folder, which may not exist yet. Rank 0's value is used.
        runtime: The ranks.

    Raises:
        CheckpointError: A host does not see it, or rank 0 can't write there. The message names hosts and path.
    """
    shared_paths = _shared.setdefault(runtime, set())
    sign = run_on_first(runtime, f"looking at {os.fspath(path)}", lambda: _make_sign(path, runtime, shared_paths))
    if sign is None:
        return
    folder = open_folder(sign.path)

    def write_sign() -> None:
        if runtime.rank == 0:
            folder.mark(sign.name)

    try:
        run_on_all(runtime, f"writing to {folder}", write_sign)
        is_looking = runtime.local_rank == 0 and runtime.rank != 0
        is_missing = is_looking and not _sees_sign(folder, sign)
        (hosts_without,) = total(runtime, [is_missing])
    finally:
        if runtime.rank == 0:
            with suppress(Exception):  # if it stays, it is an empty file whose name explains it
                folder.remove(sign.name)
    if not hosts_without:
        shared_paths.add(os.fspath(path))
        shared_paths.add(sign.path)
        return
    host_without = socket.gethostname() if is_missing else None
    gathered_hosts = runtime.gather_objects_to(host_without)
    report = None
    if gathered_hosts is not None:  # on rank 0
        hosts_by_rank = {rank: host for rank, host in enumerate(gathered_hosts) if host is not None}
        report = _describe_unshared(sign, hosts_by_rank)
    raise CheckpointError(runtime.broadcast_object(report))


def _make_sign(path: StrPath, runtime: Runtime, shared_paths: set[str]) -> _Sign | None:
    """Rank 0's sign; ``None`` if it knows that the folder is shared. Of other ranks, ``None``."""
    requested_path = os.fspath(path)
    if runtime.rank != 0 or requested_path in shared_paths:
        return None
    return _Sign(path=requested_path, name=f".seen-by-all-hosts-{secrets.token_hex(6)}", host=socket.gethostname())


def _sees_sign(folder: Folder, sign: _Sign) -> bool:
    """Whether this host sees the file, at once or within the time limit."""

    def is_there() -> bool:
        folder.fs.invalidate_cache()
        return bool(folder.fs.exists(folder.path(sign.name)))

    deadline = time.monotonic() + _SECONDS
    while True:
        with suppress(Exception):  # an error, too, means that this host does not see it
            if is_there():
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)


def _describe_unshared(sign: _Sign, hosts_by_rank: dict[int, str]) -> str:
    hosts = list(dict.fromkeys(hosts_by_rank.values()))
    more = f" and {len(hosts) - 8} more" if len(hosts) > 8 else ""
    ranks = ", ".join(str(rank) for rank in list(hosts_by_rank)[:8])
    return (
        f"the hosts do not share {sign.path}, where checkpoints are to be saved: what {sign.host} (rank 0) writes "
        f"there, {', '.join(hosts[:8])}{more} (rank {ranks}) can't see.\nEvery rank writes its part of a checkpoint, "
        "and a load reads all parts: save to a folder of a file system that all hosts mount at the same path, such as "
        "ModelCheckpoint(dirpath='/shared/run'), or to a bucket, 's3://bucket/run'. With state_dict_type='full', "
        "rank 0 alone writes one file."
    )
