"""Queries torch's version and devices: ``python -m fsdp_core.doctor.torch_child ANSWER``. Imports torch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any

from fsdp_core.doctor.child import answer_with
from fsdp_core.plugins.discovery import error_text

__all__ = ["main"]


def main(file: str) -> None:
    """Import torch, answer, look at the devices, and answer again."""
    facts: dict[str, Any] = {"error": None}
    began = perf_counter()
    try:
        import torch
    except BaseException as error:  # whatever it is, it is the finding
        answer_with(file, {"error": error_text(error), "done": True})
        return
    facts |= {
        "version": torch.__version__,
        "seconds": round(perf_counter() - began, 3),
        "autoload": any(type(finder).__module__ == "fsdp_core.autoload" for finder in sys.meta_path),
        "threads": torch.get_num_threads(),
    }
    answer_with(file, facts)
    from fsdp_core import devices

    parts: tuple[Callable[[], dict[str, Any]], ...] = (
        devices.build_facts,
        _process_groups,
        lambda: {"accelerator": devices.accelerator_kind(), "devices": devices.device_facts()},
    )
    for part in parts:
        try:
            facts |= part()
        except Exception as error:
            facts["error"] = error_text(error)
    answer_with(file, {**facts, "done": True})


def _process_groups() -> dict[str, Any]:
    import torch.distributed as dist

    if not dist.is_available():
        return {"process_groups": {}}
    available = {}
    for name in ("gloo", "nccl", "mpi", "ucc", "xccl"):
        asks = getattr(dist, f"is_{name}_available", None)
        available[name] = asks is not None and bool(asks())
    other_backends = [
        name for name in getattr(dist.Backend, "backend_list", ()) if name not in available and name != "undefined"
    ]
    return {"process_groups": {**available, **dict.fromkeys(map(str, other_backends), True)}}


if __name__ == "__main__":
    main(*sys.argv[1:])
