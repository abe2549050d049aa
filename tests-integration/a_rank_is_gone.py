"""Trains on ranks of which one, in its sixth step, does what ends a run: ``python a_rank_is_gone.py HOW RANK FRONT``.

The ranks are started as by torchrun, one process each.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

STEP = 5


def wait_for_ever() -> None:
    threading.Event().wait()


def call_alone() -> None:
    torch.distributed.barrier()


def fail() -> None:
    raise ValueError("a bad batch")


WAYS: dict[str, Callable[[], None]] = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "exits": lambda: os._exit(0),
    "leaves": lambda: sys.exit(0),
    "waits": wait_for_ever,
    "calls-alone": call_alone,
    "raises": fail,
}

HOW, WHO, FRONT = sys.argv[1], int(sys.argv[2]), sys.argv[3]
RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def do(step: int) -> None:
    if step == STEP and HOW == "cut-off":
        print("is at the step", flush=True)
        while not Path("cut").exists():
            time.sleep(0.05)
    if step == STEP and RANK == WHO and HOW in WAYS:
        WAYS[HOW]()


def do_alone() -> None:
    """What a rank does in ``prepare_data()`` or ``rank_zero_first()``, while others wait in Lightning's barrier."""
    if RANK == WHO and HOW in ("waits-alone", "stopped-alone"):
        WAYS[HOW.removesuffix("-alone")]()


class Rows(IterableDataset[Tensor]):
    """As many rows as nobody knows before: on one rank fewer, if that is what is asked."""

    def __iter__(self) -> Iterator[Tensor]:
        for row, one in enumerate(torch.ones(10 + (STEP if HOW == "fewer" and RANK == WHO else 14), 4)):
            if HOW == "worker-waits" and RANK == WHO and row == 2 * STEP:
                Path("worker").write_text(str(os.getpid()))
                wait_for_ever()
            yield one


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))

    def prepare_data(self) -> None:
        do_alone()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        do(batch_idx)
        loss: Tensor = self.net(batch).mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main() -> None:
    torch.set_num_threads(1)
    if HOW == "older-torch" and RANK == WHO:
        torch.__version__ = "2.12.1"
    hosts = RANKS // int(os.environ["LOCAL_WORLD_SIZE"])
    common = {"accelerator": "cpu", "devices": RANKS // hosts, "num_nodes": hosts, "strategy": STRATEGY}
    if FRONT == "fabric":
        fabric = L.Fabric(**common)
        fabric.launch()
        if HOW.endswith("-alone"):
            with fabric.rank_zero_first():
                do_alone()
        model, optimizer = fabric.setup(net := nn.Linear(4, 8), torch.optim.SGD(net.parameters(), lr=0.1))
        for step in range(14):
            do(step)
            loss = model(torch.ones(2, 4)).mean()
            if not (step == STEP and RANK == WHO and HOW == "skips"):
                fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        return
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "max_epochs": 1}
    L.Trainer(**common, **quiet, enable_model_summary=False).fit(
        Model(), DataLoader(Rows(), batch_size=2, num_workers=HOW == "worker-waits")
    )


if __name__ == "__main__":
    from fsdp_fsdp2 import fabric, trainer

    OF_FRONT = fabric.FSDP2Strategy if FRONT == "fabric" else trainer.FSDP2Strategy
    STRATEGY = OF_FRONT(hang_timeout=float(os.environ["HANG_SECONDS"]))
    try:
        main()
    except Exception:  # as Python ends; a forked process would end in another way
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        atexit._run_exitfuncs()
        os._exit(1)
    except SystemExit:
        atexit._run_exitfuncs()
        os._exit(0)
    atexit._run_exitfuncs()
