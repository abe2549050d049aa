"""Ranks of a notebook, or of another interactive session: forked from its process. Checked on Lightning 2.6.6.

A script's ranks run the script again. A notebook has no script, and what its cells define can't be imported in another
process. A forked process has all of it. This does what Lightning's ``ddp_notebook`` does, and besides:

- All ranks end with the call, however it ends: also when the cell is interrupted.
- The weights that come back are gathered from shards.
- Ranks compute with one thread on a CPU. The threads of OpenMP in the notebook's process do not exist in a forked one,
  which would wait for them forever; torch's data loaders do the same for their workers.
- Nothing here initialises the accelerator before the fork: the ranks do. It is an error if something else has done so,
  or if a run on one device has created a process group: gloo keeps its sockets as long as the process lives.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.trainer.states import TrainerFn
from torch.multiprocessing.spawn import start_processes

from fsdp_core import devices
from fsdp_core.errors import UnsupportedCapabilityError
from fsdp_core.lightning.outside_steps.exporting import full_state_dict
from fsdp_core.lightning.private import FabricForkLauncher, TrainerForkLauncher, take_progress

__all__ = ["FabricForkedRanks", "TrainerForkedRanks", "check_interactive", "is_interactive"]


def is_interactive() -> bool:
    """Whether this is a notebook, IPython, or Python's own prompt, as Lightning defines it."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)


def check_interactive(strategy: str, nodes: int) -> None:
    """Refuse to start ranks that an interactive session can't have.

    Args:
        strategy: The strategy's name.
        nodes: ``num_nodes`` of the Trainer or Fabric.

    Raises:
        UnsupportedCapabilityError: Some of the ranks are on other hosts, or this system can't fork.
    """
    if nodes > 1:
        raise UnsupportedCapabilityError(
            f"num_nodes={nodes} in a notebook: {strategy!r} can start ranks on its own host only.\n"
            "Write the cells to a file, and start it on each host: see docs/many-machines.md."
        )
    if "fork" not in multiprocessing.get_all_start_methods():
        raise UnsupportedCapabilityError(
            f"{strategy!r} can't start several ranks from a notebook on {sys.platform}, where processes can't fork.\n"
            "Write devices=1; or write the cells to a file, such as train.py, and run `!python train.py` in a cell."
        )


class FabricForkedRanks(FabricForkLauncher):
    """Runs the function of ``fabric.launch(function)`` on forked ranks.

    Args:
        strategy: The strategy, whose ranks they are.
    """

    def __init__(self, strategy: Any) -> None:
        super().__init__(strategy, start_method="fork")

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a function on every rank, and return what it returns on rank 0."""
        return _run_on_forked_ranks(self._strategy, partial(function, *args, **kwargs))


class TrainerForkedRanks(TrainerForkLauncher):
    """Runs a stage of a Trainer on forked ranks, and brings weights and metrics to the Trainer of this process.

    Args:
        strategy: The strategy, whose ranks they are.
    """

    def __init__(self, strategy: Any) -> None:
        super().__init__(strategy, start_method="fork")
        self._has_fitted = False

    @property
    def has_fitted(self) -> bool:
        """Whether ranks of this Trainer have fitted, and have ended."""
        return self._has_fitted

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Run a stage, and return its results.

        Raises:
            UnsupportedCapabilityError: It is a second fit of the Trainer, whose optimizer ended with the first one.
        """
        fits = trainer is not None and trainer.state.fn == TrainerFn.FITTING
        if fits and self._has_fitted:
            raise UnsupportedCapabilityError(
                "this Trainer has fitted in this notebook before, and its optimizers ended with the ranks of that "
                "fit.\nTo go on, build a Trainer with a larger max_epochs, and fit(model, ckpt_path=...) from a "
                "checkpoint that a ModelCheckpoint of the first one has saved; to begin anew, build one too."
            )
        self._has_fitted |= fits
        if trainer is None:
            return _run_on_forked_ranks(self._strategy, partial(function, *args, **kwargs))
        results, collected = _run_on_forked_ranks(
            self._strategy, lambda: _collect_results(trainer, function(*args, **kwargs), self.get_extra_results)
        )
        if collected["weights"] is not None:
            trainer.lightning_module.load_state_dict(collected["weights"])
        trainer.state = collected["state"]
        take_progress(trainer.fit_loop, collected["progress"])
        for callback, attributes in zip(trainer.checkpoint_callbacks, collected["checkpoints"], strict=True):
            vars(callback).update(attributes)
        self.update_main_process_results(trainer, collected["extra"])
        return results


#: What a ModelCheckpoint records of its checkpoints, for ``ckpt_path="best"`` and for users.
_CHECKPOINT_ATTRIBUTES = ("best_model_path", "best_model_score", "best_k_models", "last_model_path")


def _collect_results(
    trainer: Any, results: Any, collect_extra: Callable[[Any], Any]
) -> tuple[Any, dict[str, Any]] | None:
    """What rank 0 returns from a stage: its results, and what the notebook's Trainer takes over from it.

    All ranks must call it; others than rank 0 return ``None``.
    """
    fitted = trainer.state.fn == TrainerFn.FITTING
    weights = full_state_dict(trainer.lightning_module) if fitted else None  # all ranks gather
    if not trainer.is_global_zero:
        return None
    checkpoints = [
        {name: vars(callback)[name] for name in _CHECKPOINT_ATTRIBUTES if name in vars(callback)}
        for callback in trainer.checkpoint_callbacks
    ]
    collected = {
        "weights": weights,
        "state": trainer.state,
        "progress": trainer.fit_loop.state_dict(),
        "checkpoints": checkpoints,
        "extra": collect_extra(trainer),
    }
    return results, collected


def _run_on_forked_ranks(strategy: Any, run: Callable[[], Any]) -> Any:
    """Run a function on every rank of this host, and return what it returns on the first."""
    device_type = strategy.root_device.type
    if devices.is_accelerator(strategy.root_device) and devices.is_initialized(device_type):
        raise UnsupportedCapabilityError(
            f"{strategy.strategy_name!r} can't start ranks from this notebook: {device_type!r} is initialised in its "
            "process, and a forked one can't use it then.\n"
            f"Restart the kernel, and run nothing on the device before: no .to({device_type!r}), no "
            f"torch.{device_type} call but "
            "device_count() and is_available(). The ranks move the model by themselves."
        )
    if torch.distributed.is_initialized():
        raise UnsupportedCapabilityError(
            f"{strategy.strategy_name!r} can't start ranks from this notebook: a run on one device has created a "
            "process group in its process, and forked processes would share the sockets of that.\n"
            "Restart the kernel, and run with several devices first; or go on with devices=1."
        )
    _ = strategy.cluster_environment.main_port  # chosen now, the same for all ranks
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "result")
        context = start_processes(
            _run_rank, args=(strategy, run, path), nprocs=strategy.num_processes, start_method="fork", join=False
        )
        try:
            while not context.join():
                pass
        except BaseException:  # also an interrupt of the cell
            for process in context.processes:
                process.kill()
            for process in context.processes:
                process.join()
            raise
        if not os.path.exists(path):  # the interrupt has reached the ranks, and not yet this process
            raise KeyboardInterrupt
        # written by rank 0 into a folder that only this user can write to
        return torch.load(path, weights_only=False)


def _run_rank(index: int, strategy: Any, run: Callable[[], Any], path: str) -> None:
    os.environ["LOCAL_RANK"] = str(index)
    torch.set_num_threads(1)
    result = move_data_to_device(run(), "cpu")
    if index == 0:
        torch.save(result, path)
    strategy.runtime.stop()  # lets the device finish what other ranks wait for: no exit handler runs in a fork
