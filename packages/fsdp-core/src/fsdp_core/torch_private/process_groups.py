"""Process groups, and the collectives that they have run."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

__all__ = [
    "Collective",
    "default_store",
    "forget_groups_of_parent",
    "is_default_group",
    "last_collective",
    "process_groups",
    "set_default_backend",
]


def default_store() -> Any:
    """The store of the default process group; ``None`` without a process group.

    There is no public way to get it. Unlike a collective, it can be used while other ranks wait in a collective.
    """
    return dist.distributed_c10d._get_default_store() if dist.is_initialized() else None


#: Groups that were forgotten, which this process must not destroy.
_FORGOTTEN: list[Any] = []


def forget_groups_of_parent() -> None:
    """Forget the process groups of the process that this one was forked from, without ending or telling them.

    The threads of a group are the parent's, and so are its connections: to destroy it would wait for threads that are
    not there. Nothing public leaves groups alone.
    """
    if not dist.is_initialized():
        return
    c10d: Any = dist.distributed_c10d
    world = c10d._world
    tables = (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config, world.pg_to_tag)
    for table in (*tables, world.tags_to_pg, world.pg_coalesce_state):
        _FORGOTTEN.append((world.default_pg, dict(table)))
        table.clear()
    c10d._update_default_pg(None)
    c10d._unregister_all_process_groups()
    world.group_count = 0


@dataclass(frozen=True, kw_only=True)
class Collective:
    """What torch's flight recorder holds of a collective.

    Attributes:
        name: Such as ``"gloo:all_reduce"``.
        shapes: The shapes and dtypes of its inputs, such as ``"(2, 3) float"``.
        group: The group, in torch's words; empty for the group of all ranks.
        sequence: The number of collectives of all ranks that this rank has entered, this one included.
        has_ended: Whether it is over.
        seconds_ago: The seconds since this rank entered it.
    """

    name: str
    shapes: str
    group: str
    sequence: int
    has_ended: bool
    seconds_ago: float


_c10d: Any = torch._C._distributed_c10d  # whose stubs lack the recorder


#: How torch calls the group of all ranks.
_ALL_RANKS = "default_pg"


#: torch's flight recorders: that of gloo, and that of NCCL, which only builds with CUDA have.
_RECORDERS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")


def last_collective() -> Collective | None:
    """The last collective that this process has entered; ``None`` if torch's flight recorders hold none.

    A recorder keeps the newest ``TORCH_FR_BUFFER_SIZE`` collectives of all groups, one those of NCCL and another those
    of gloo: a group for GPUs has both. No public name reads them while the process runs: torch writes NCCL's to a file
    when NCCL gives up.
    """
    recorders = [_flight_record(name) for name in _RECORDERS] if dist.is_initialized() else []
    entries = [entry for recorder in recorders for entry in recorder]
    if not entries:
        return None
    last = max(entries, key=lambda entry: (int(entry["time_created_ns"]), int(entry["record_id"])))
    # NCCL and gloo each count their own collectives: the numbers of those over all ranks, by recorder
    numbers_of_all_ranks = [
        [int(entry["collective_seq_id"]) for entry in recorder if _ALL_RANKS in entry["process_group"]]
        for recorder in recorders
    ]
    shapes = [
        f"({', '.join(map(str, size))}) {dtype.lower()}"
        for size, dtype in zip(last["input_sizes"], last["input_dtypes"], strict=False)
    ]
    return Collective(
        name=str(last["profiling_name"]),
        shapes=", ".join(shapes) or "nothing",
        group="" if _ALL_RANKS in last["process_group"] else " ".join(map(str, last["process_group"])),
        sequence=sum(map(max, filter(None, numbers_of_all_ranks))) if any(numbers_of_all_ranks) else -1,
        has_ended=bool(last["retired"]),
        seconds_ago=max(0.0, time.time() - int(last["time_created_ns"]) / 1e9),
    )


def _flight_record(name: str) -> list[dict[str, Any]]:
    """What a flight recorder holds; nothing if torch was built without it."""
    dump = getattr(_c10d, name, None)
    return [] if dump is None else json.loads(dump()).get("entries") or []


def is_default_group(group: Any) -> bool:
    """Whether this is the group of all ranks that exists now; no public name returns the group itself."""
    return dist.is_initialized() and dist.distributed_c10d._get_default_group() is group


def process_groups() -> int:
    """The number of process groups, the default one included; torch has no public count."""
    return len(torch.distributed.distributed_c10d._world.pg_map)


def set_default_backend(kind: str) -> None:
    """Let a kind of device's backend be the default one of the group of all ranks, which torch asks for hooks.

    torch 2.9 to 2.13 set it for NCCL alone: they look for a package's backend, in capitals, among the group's, in small
    letters. Without it, the group's end warns that there is no backend of type 0.

    Args:
        kind: The kind.
    """
    backends = dict(entry.split(":") for entry in dist.get_backend_config().split(",") if ":" in entry)
    if kind in backends:
        types: Any = dist.ProcessGroup.BackendType
        group: Any = dist.distributed_c10d._get_default_group()
        group._set_default_backend(dist.Backend.backend_type_map.get(backends[kind], types.CUSTOM))
