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
        answer_with(file, {"error": _with_causes(error), "done": True})
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
        lambda: {"process_groups": devices.group_facts()},
        lambda: {"accelerator": devices.accelerator_kind(), "devices": devices.device_facts()},
    )
    for part in parts:
        try:
            facts |= part()
        except Exception as error:
            facts["error"] = error_text(error)
    answer_with(file, {**facts, "done": True})


def _with_causes(error: BaseException) -> str:
    """An error and what it was raised from: torch says which entry point failed, and the cause why."""
    text = error_text(error)
    while error.__cause__ is not None:
        error = error.__cause__
        text += f" Because of {error_text(error)}"
    return text


if __name__ == "__main__":
    main(*sys.argv[1:])
