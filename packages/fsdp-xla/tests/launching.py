"""Ranks that a program launches: a pool that runs a function as such a program, and a module for it to train.

``ThreadRanks`` calls a function on each rank, and so shows nothing of how ranks are started and of what comes back.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
from torch.utils.data import DataLoader, DistributedSampler

from fsdp_core import load_state_dict
from fsdp_core.testing import Answer, answer_of, oracle
from fsdp_core.testing.training import QUIET, Lit
from fsdp_xla.testing import ThreadRanks
from xla_process import cpu_variables

STEPS = 4


class Launching(ThreadRanks):
    """Calls a function once, in the main thread of a process with so many XLA devices, on which it launches ranks."""

    caller: ClassVar[str] = "launching:once"
    keeps: ClassVar[tuple[str, ...]] = ("PJRT_CPU_ASYNC_CLIENT", "XLA_THREAD_POOL_SIZE", "NPROC")  # the first launch's

    def environment(self, world_size: int) -> dict[str, str]:
        return cpu_variables(world_size)  # what a user sets: the rest is set by the launch

    def call(self, devices: int, function: Callable[..., Any], *args: Any) -> Any:
        """What the function has returned."""
        __tracebackhide__ = True
        return self.run(devices, function, *args)[0]

    def error(self, devices: int, function: Callable[..., Any], *args: Any) -> str:
        """What the function has raised, as a traceback; the process lives on."""
        __tracebackhide__ = True
        told = self.call(devices, _raised, function, *args)
        assert told is not None, f"{function.__name__} raised nothing"
        return str(told)

    def assert_error(self, devices: int, words: Iterable[str], function: Callable[..., Any], *args: Any) -> None:
        """Check that the function raises, and that the traceback has these words."""
        __tracebackhide__ = True
        message = self.error(devices, function, *args)
        for word in words:
            assert word in message, message


class LaunchingSPMD(Launching):
    """The same for ``xla_fsdp_spmd``, whose one process drives all devices and is started by the first launch."""

    keeps: ClassVar[tuple[str, ...]] = (*Launching.keeps, "XLA_USE_SPMD")


def once(world_size: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> list[Answer]:
    return [answer_of(lambda: function(*arguments))]


def _raised(function: Callable[..., Any], *args: Any) -> str | None:
    try:
        function(*args)
    except BaseException:
        return traceback.format_exc()
    return None


def devices() -> int:
    """How many there are in a process that calls a function."""
    return int(os.environ["CPU_NUM_DEVICES"])


def loader(rank: int, steps: int) -> DataLoader[Any]:
    """A rank's part of the oracle's batches."""
    data: Any = oracle.dataset(oracle.BATCH * steps)
    sampler: Any = DistributedSampler(data, devices(), rank, shuffle=False)
    return DataLoader(data, batch_size=oracle.BATCH // devices(), sampler=sampler)


#: What ranks have seen, by file and rank: they are threads, and their modules copies.
seen: dict[str, dict[int, Any]] = {}


class Module(Lit):
    """Keeps what its rank saw under the name of a file; saves that as training ends, as long as there are ranks."""

    def __init__(self, path: Path, optimizer: str = "momentum", steps: int = STEPS, **net: Any) -> None:
        super().__init__(optimizer, **net)
        self.path, self.steps = str(path), steps

    def train_dataloader(self) -> DataLoader[Any]:
        return loader(self.trainer.global_rank, self.steps)

    def val_dataloader(self) -> DataLoader[Any]:
        return loader(self.trainer.global_rank, 1)

    test_dataloader = predict_dataloader = val_dataloader

    def on_train_end(self) -> None:
        held = [p.numel() for group in self.trainer.optimizers[0].param_groups for p in group["params"]]
        seen.setdefault(self.path, {})[self.trainer.global_rank] = {
            "losses": [loss.item() for loss in self.losses],
            "held": sum(held),
        }
        self.trainer.save_checkpoint(self.path)


def trainer(folder: Path, options: dict[str, Any] | None = None, **kwargs: Any) -> L.Trainer:
    from fsdp_xla import XLAFSDPStrategy

    quiet: dict[str, Any] = {
        **QUIET,
        "limit_val_batches": 0,
        "max_epochs": 1,
        "use_distributed_sampler": False,
        "default_root_dir": str(folder),
    }
    quiet["strategy"] = "xla_fsdp" if options is None else XLAFSDPStrategy(**options)
    if "devices" not in kwargs:
        quiet["devices"] = devices()
    return L.Trainer(**{**quiet, **kwargs})


def launch(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call a function on each rank with a Fabric, whose strategy has these options; what rank 0 has returned."""
    from fsdp_xla.fabric import XLAFSDPStrategy

    return L.Fabric(strategy=XLAFSDPStrategy(**options), devices=devices()).launch(function, *args)


def means(ranks: Any) -> list[float]:
    """Of what ranks have seen in each step."""
    return [sum(of_step) / devices() for of_step in zip(*ranks, strict=True)]


def trained(
    path: Path, options: dict[str, Any] | None = None, module: dict[str, Any] | None = None, **kwargs: Any
) -> Any:
    """Fit, and what came of it: each step's loss over all ranks, the weights, what a rank holds."""
    L.seed_everything(3, verbose=False)
    ckpt_path, stage = kwargs.pop("ckpt_path", None), trainer(path.parent, options, **kwargs)
    stage.fit(Module(path, **(module or {})), ckpt_path=ckpt_path)
    ranks = [seen[str(path)][rank] for rank in range(devices())]
    return {
        "losses": means(rank["losses"] for rank in ranks),
        "held": [rank["held"] for rank in ranks],
        "weights": load_state_dict(path),
        "metrics": {name: value.item() for name, value in stage.callback_metrics.items()},
    }
