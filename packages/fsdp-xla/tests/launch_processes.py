"""Launches ranks in processes, which inherit what they run, and then once more after this process has used XLA."""

from __future__ import annotations

import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import torch

from fsdp_core import StrategyUnavailableError
from fsdp_core.testing.refusals import refusal
from fsdp_xla.ranks import launch
from fsdp_xla.torch_xla_private.devices import rank_here
from xla_process import save_cases


class Given:
    """What ranks are to get copies of."""

    changed = False


def launched(given: Given) -> dict[str, Any]:
    unchanged, given.changed = not given.changed, True
    here = rank_here()
    assert here is not None
    drawn = torch.nn.functional.dropout(torch.ones(64, device="xla")).tolist()
    return {"rank": here.rank, "ranks": here.world_size, "unchanged": unchanged, "pid": os.getpid(), "drawn": drawn}


def found() -> dict[str, Any]:
    process: Any = multiprocessing.current_process()
    process._config["daemon"] = False  # a forked script is one, and could start no process
    given, launches = Given(), []
    for _ in range(2):
        torch.manual_seed(7)
        launches.append(launch._run_on_processes(launched, given))
    torch.zeros(1, device="xla").cpu()
    refused = refusal(StrategyUnavailableError, lambda: launch._run_on_processes(launched, given))
    return {"launches": launches, "changed": given.changed, "pid": os.getpid(), "refused": refused}


if __name__ == "__main__":
    save_cases({"found": found}, Path(sys.argv[2]))
