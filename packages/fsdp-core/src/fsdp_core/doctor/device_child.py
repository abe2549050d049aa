"""Tries what a kind of device must provide: ``python -m fsdp_core.doctor.device_child ANSWER KIND``. Imports torch."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from typing import Any

from fsdp_core.doctor.child import answer_with
from fsdp_core.plugins.discovery import error_text

__all__ = ["main"]


def main(file: str, kind: str) -> None:
    """Try one requirement after the other, and answer after each; what has crashed has no result."""
    import torch

    from fsdp_core.device_names import PACKAGES
    from fsdp_core.device_requirements import REQUIREMENTS, one_rank
    from fsdp_core.devices import accelerator_kind

    rows: list[dict[str, Any]] = [
        {
            "name": requirement.name,
            "api": requirement.api.replace("KIND", kind),
            "purpose": requirement.purpose,
            "is_needed": requirement.is_needed,
            "result": None,
        }
        for requirement in REQUIREMENTS
    ]
    if accelerator_kind() != kind:
        actual_kind = accelerator_kind() or "none"
        autoload = os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD")
        hint = "" if autoload is None else f" (TORCH_DEVICE_BACKEND_AUTOLOAD={autoload})"
        needed = f"; install {PACKAGES[kind]}" if kind in PACKAGES else ""
        rows[0]["result"] = (
            f"torch's accelerator in this process is {actual_kind}: the package that registers {kind!r} is not "
            f"installed, does not load by the entry point torch.backends{hint}, or registers nothing where it finds no "
            f"device{needed}"
        )
        answer_with(file, {"requirements": rows, "done": True})
        return
    with ExitStack() as ranks:
        for row, requirement in zip(rows, REQUIREMENTS, strict=True):
            answer_with(file, {"requirements": rows, "trying": requirement.name})
            try:
                if requirement.name == "collectives":
                    ranks.enter_context(one_rank(kind))
                requirement.check(torch.device(kind, 0))
                row["result"] = "there"
            except Exception as error:
                row["result"] = error_text(error)
                if requirement is REQUIREMENTS[0]:  # without a device, the others would try the vendor's library
                    break
    answer_with(file, {"requirements": rows, "done": True})


if __name__ == "__main__":
    main(*sys.argv[1:])
