"""``strategy="fsdp_auto"``: rehearses the fit before a process is started, and trains by what fits and costs least."""

from __future__ import annotations

import json
import logging
import os
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.accelerators import XLAAccelerator
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import distributed, nn

from fsdp_core import devices
from fsdp_core.device_names import ANY_ACCELERATOR, LIGHTNINGS_OWN, REHEARSED
from fsdp_core.errors import ShardingError, UnsupportedCapabilityError, first_line
from fsdp_core.lightning.launchers.notebooks import is_interactive
from fsdp_core.lightning.outside_steps.sharded_modules import size_in_words
from fsdp_core.lightning.private import TrainerLauncher, precision_of, take_strategy
from fsdp_core.plugins import registry
from fsdp_core.rehearsal.candidates import Candidate, candidates_for
from fsdp_core.rehearsal.choosing import Choice, choose, what_to_do_instead
from fsdp_core.rehearsal.forks import call_in_fork
from fsdp_core.rehearsal.planning import Outcome, rehearse_candidate
from fsdp_core.rehearsal.script import fit_of_trainer
from fsdp_core.rehearsal.users_code import line_of_error
from fsdp_core.torch_private.process_groups import forget_groups_of_parent

__all__ = ["AutoStrategy"]

log = logging.getLogger("lightning.pytorch.utilities.rank_zero")

#: The environment variable by which the processes that a launcher starts learn what was chosen.
_CHOICE = "FSDP_AUTO_CHOICE"

#: How long ranks wait for the one that plans.
_PATIENCE = timedelta(minutes=30)

#: Stores by which ranks of this process have agreed. Their server may be that of a process group that comes later.
_STORES: list[Any] = []


class AutoStrategy(DDPStrategy):
    """Trains a fit by the strategy that fits the devices and costs least, found out before a process is started.

    ``Trainer.fit`` is rehearsed on fake tensors, as ``fsdp plan`` does, with DDP and with each installed strategy and
    the options that change its memory. The Trainer then has the strategy that was chosen, and keeps it.

    Args:
        memory: The bytes that each device has. By default they are asked; for CPUs, each rank has a share of the
            host's.

    Raises:
        ShardingError: ``memory`` is no number of bytes. From ``Trainer.fit``: nothing fits, the fit can't be rehearsed,
            or it is no fit.
    """

    strategy_name = "fsdp_auto"

    def __init__(self, memory: float | None = None) -> None:
        super().__init__()
        if memory is not None and (not isinstance(memory, int | float) or isinstance(memory, bool) or memory < 1):
            raise ShardingError(
                f"AutoStrategy(memory={memory!r}) is no number of bytes.\n"
                "Write one, such as memory=80 * 2**30; or nothing, and the devices are asked."
            )
        self.memory = None if memory is None else int(memory)

    def _configure_launcher(self) -> None:
        if isinstance(self.accelerator, XLAAccelerator):
            raise UnsupportedCapabilityError(
                f"{self.strategy_name} can't choose for XLA's devices: strategies there record what they compute for a "
                "compiler, which a rehearsal does not run.\nWrite a strategy by its name, such as one that `fsdp list` "
                "shows on 'xla'."
            )
        self._launcher = _PlanningLauncher(self)


class _PlanningLauncher(TrainerLauncher):
    """Gives a Trainer the strategy that is chosen for its fit, and launches as that does."""

    def __init__(self, strategy: AutoStrategy) -> None:
        self._strategy = strategy

    @property
    def is_interactive_compatible(self) -> bool:
        return True

    def kill(self, signum: Any) -> None:
        """Nothing to do: the chosen strategy's launcher starts processes."""

    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        if trainer is None or not trainer.state.fn or trainer.state.fn.value != "fit":
            raise ShardingError(
                f"strategy={self._strategy.strategy_name!r} chooses for a fit, and this Trainer has not fitted yet.\n"
                "Call trainer.fit() first, whose choice is kept; or write a strategy by its name."
            )
        strategy = self._strategy
        environment = strategy.cluster_environment
        assert environment is not None
        module, loaders, datamodule = args[0], args[1], args[3]
        starts_ranks = not environment.creates_processes_externally
        environment.validate_settings(num_devices=strategy.num_processes, num_nodes=strategy.num_nodes)
        choice = None if starts_ranks else _choice_of_parent(strategy.num_processes * strategy.num_nodes)
        if choice is None:
            choice = _agree(strategy, starts_ranks, lambda: _choose(strategy, trainer, module, loaders, datamodule))
        chosen = take_strategy(trainer, _build(choice), module)
        vars(trainer)["callbacks"].insert(0, _ChosenStrategy(choice))
        if trainer.is_global_zero:
            _announce(choice)
        if chosen.launcher is None:
            return function(*args, **kwargs)
        if starts_ranks:
            os.environ[_CHOICE] = json.dumps(asdict(choice))

        def run_here(*args: Any, **kwargs: Any) -> Any:
            os.environ.pop(_CHOICE, None)  # it was for the processes that were started meanwhile
            return function(*args, **kwargs)

        try:
            return chosen.launcher.launch(run_here, *args, trainer=trainer, **kwargs)
        finally:
            os.environ.pop(_CHOICE, None)  # a notebook's ranks were forked, and have had their own


def _choice_of_parent(ranks: int) -> Choice | None:
    """What the process has chosen that has started this one, if that was for so many ranks: a script may fit twice."""
    words = os.environ.get(_CHOICE)
    if words is None:
        return None
    try:
        choice = Choice(**json.loads(words))
    except (TypeError, ValueError):
        raise ShardingError(
            f"the environment variable {_CHOICE} is {words!r}, which is no choice of fsdp_auto. By it, processes that "
            f"fsdp_auto starts learn what it has chosen.\nType `unset {_CHOICE}`, and start the script again."
        ) from None
    if choice.ranks != ranks:
        return None
    del os.environ[_CHOICE]
    return choice


def _build(choice: Choice) -> str | Strategy:
    """The strategy that was chosen, as the Trainer takes it."""
    if choice.strategy == "ddp":
        return "ddp_notebook" if is_interactive() else "ddp"
    strategy: str | Strategy = Candidate(strategy=choice.strategy, options=choice.options, ranks=choice.ranks).build()
    return strategy


def _announce(choice: Choice) -> None:
    code = 'strategy="ddp_notebook"' if _build(choice) == "ddp_notebook" else choice.code
    log.info(f"fsdp_auto: {code}, on {_count(choice.ranks)}.")
    log.info(f"Why: {choice.reason}.")
    log.info("To write it down, give the Trainer the first line; `fsdp plan` shows what else there is.")
    for assumption in choice.assumptions:
        log.info(f"Assumed: {assumption}")


def _count(devices: int) -> str:
    return f"{devices} device{'s' * (devices > 1)}"


def _choose(strategy: AutoStrategy, trainer: pl.Trainer, module: Any, loaders: Any, datamodule: Any) -> Choice:
    """Rehearse the fit with each candidate, in a process that is forked for it, and choose."""
    ranks = strategy.num_processes * strategy.num_nodes
    kind = (strategy.parallel_devices or [torch.device("cpu")])[0].type
    is_ready = kind != "cpu" and devices.is_initialized(kind)
    here = strategy.memory or (_device_memory(kind, strategy.num_processes) if is_ready else None)

    def plan() -> tuple[int, list[tuple[Candidate, Outcome]], dict[str, str]] | str:
        try:
            forget_groups_of_parent()  # of an earlier fit of this process
            memory = here or _device_memory(kind, strategy.num_processes)
            fit = fit_of_trainer(trainer, module, loaders, datamodule, precision_of(trainer))
            wanted, refused = _candidates(kind, ranks, fit.module)
            device = kind if kind in REHEARSED else REHEARSED[0]
            planned = [(candidate, rehearse_candidate(fit, candidate, device=device)) for candidate in wanted]
            return memory, planned, refused
        except ShardingError as error:
            return f"nothing can be chosen: {error}"
        except Exception as error:
            failure = f"{type(error).__name__}: {first_line(error)}{line_of_error(error)}"
            return f"the fit could not be rehearsed, so that nothing can be chosen: {failure}.\n{what_to_do_instead()}"

    try:
        answer = call_in_fork(plan)
    except ShardingError as error:  # its process was ended
        answer = f"the fit could not be rehearsed, so that nothing can be chosen: {error}.\n{what_to_do_instead()}"
    if isinstance(answer, str):
        raise ShardingError(answer)
    memory, planned, refused = answer
    if not planned:
        raise ShardingError(
            f"no installed strategy that can be rehearsed runs on {kind!r} devices, so that nothing can be chosen.\n"
            "Type `fsdp list` to see what runs where, and write a strategy by its name."
        )
    if all("Autograd-and-Fork" in str(outcome.error) for _, outcome in planned):
        raise ShardingError(
            "nothing can be chosen here: this process has run a backward pass, and where there is an accelerator, "
            "torch then runs none in processes that are forked, as rehearsals are.\n"
            "Write a strategy by its name, of those that `fsdp list` shows; or fit in another process, or first."
        )
    return choose(planned, memory, refused)


def _candidates(kind: str, ranks: int, module: nn.Module) -> tuple[list[Candidate], dict[str, str]]:
    """The candidates that run on so many devices of a kind, and what would run there and can't be rehearsed, with why.

    Lightning's own strategies know its own kinds alone.
    """
    if kind in LIGHTNINGS_OWN:
        whole = [Candidate(strategy="auto")] if ranks == 1 else [Candidate(strategy="ddp", ranks=ranks)]
        if ranks == 1:
            return whole, {}
    else:
        whole = []
    candidates, refused = candidates_for(max(2, ranks), module)
    sharded = [replace(candidate, ranks=ranks) for candidate in candidates if candidate.strategy not in ("auto", "ddp")]
    here = [candidate for candidate in sharded if _runs_on(candidate.strategy, kind)]
    infos = registry.strategies()  # of a package that does not load, nothing is known
    return [*whole, *here], {name: why for name, why in refused.items() if name not in infos or _runs_on(name, kind)}


def _runs_on(strategy: str, kind: str) -> bool:
    accelerators = registry.describe(strategy).accelerators
    return kind in accelerators or (kind != "cpu" and ANY_ACCELERATOR in accelerators)


def _device_memory(kind: str, ranks_here: int) -> int:
    """The bytes of each device of a kind; for CPUs, each rank's share of the host's."""
    if kind == "cpu":
        return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // max(1, ranks_here))
    memory = [facts["memory"] for facts in devices.device_facts()]
    if not memory or None in memory:
        raise ShardingError(
            f"how much memory the devices {kind!r} have is not told by torch.\n"
            "Say it: strategy=AutoStrategy(memory=...), in bytes, from fsdp_core.rehearsal.auto_strategy."
        )
    return int(min(memory))


def _agree(strategy: AutoStrategy, starts_ranks: bool, plan: Callable[[], Choice]) -> Choice:
    """Let the first of the processes that are there plan, and tell the others what was chosen, or why nothing was."""
    environment = strategy.cluster_environment
    assert environment is not None
    if starts_ranks:  # one process of each host is there
        rank, processes = environment.node_rank(), strategy.num_nodes
    else:
        rank, processes = strategy.global_rank, strategy.num_nodes * strategy.num_processes
    if processes == 1:
        return plan()
    answer = _plan_in_words(plan) if rank == 0 else ""
    answer = _tell_others(answer, rank, processes, environment)
    result: Mapping[str, Any] = json.loads(answer)
    if "error" in result:
        raise ShardingError(result["error"])
    return Choice(**result["choice"])


def _plan_in_words(plan: Callable[[], Choice]) -> str:
    try:
        return json.dumps({"choice": asdict(plan())})
    except ShardingError as error:
        return json.dumps({"error": str(error)})
    except Exception as error:  # the others wait for an answer
        traceback.print_exc()
        return json.dumps({"error": f"nothing could be chosen: {type(error).__name__}: {error}"})


def _tell_others(answer: str, rank: int, processes: int, environment: Any) -> str:
    """Send the first process's answer to all: by the process group, if there is one, or a store of its own."""
    if distributed.is_initialized():
        answers = [answer]
        distributed.broadcast_object_list(answers, src=0)
        return answers[0]
    address = f"tcp://{environment.main_address}:{environment.main_port}"
    rendezvous: Any = distributed.rendezvous  # type: ignore[attr-defined]
    store, _, _ = next(rendezvous(address, rank=rank, world_size=processes, timeout=_PATIENCE))
    _STORES.append(store)
    key = f"fsdp_auto/{len(_STORES)}"
    if rank == 0:
        store.set(key, answer)
    return str(store.get(key).decode())


class _ChosenStrategy(pl.Callback):
    """Stores what was chosen in checkpoints, says if a resume has chosen something else, and what a step has needed."""

    def __init__(self, choice: Choice) -> None:
        self._choice = choice
        self._first_step: int | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._first_step = trainer.global_step

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if self._first_step is None or trainer.global_step < self._first_step + 2:
            return  # in its first step, an optimizer has no state yet
        self._first_step = None
        measured = devices.peak_bytes(trainer.strategy.root_device) if trainer.is_global_zero else None
        if measured:
            log.info(
                f"fsdp_auto: {size_in_words(self._choice.peak_bytes)} were expected at the peak, and "
                f"{size_in_words(measured)} are what it was until now: {self._choice.peak_bytes / measured:.2f} of it."
            )

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint["fsdp_auto"] = {"code": self._choice.code, "devices": self._choice.ranks}

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        before = checkpoint.get("fsdp_auto")
        now = {"code": self._choice.code, "devices": self._choice.ranks}
        if before is not None and before != now and trainer.is_global_zero:
            log.info(
                f"fsdp_auto: the checkpoint was written on {_count(before['devices'])} by {before['code']}; "
                "this run goes on by its own choice."
            )
