"""What a Trainer saves and restores: Lightning's checkpoint dict, to a sharded folder or a full file and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import lightning.pytorch as pl
from lightning.fabric.plugins import CheckpointIO
from torch import nn
from torch.optim import Optimizer

from fsdp_core import checkpoint as checkpoints
from fsdp_core.checkpoint.async_save import AsyncSaves
from fsdp_core.errors import CheckpointMismatchError, MissingKeyError
from fsdp_core.lightning.checkpoints.exact_resume import KEY, ExactResume
from fsdp_core.lightning.checkpoints.full_file import gathered, numbered, write_full
from fsdp_core.lightning.checkpoints.local_shards import refuse_local_shards
from fsdp_core.lightning.checkpoints.reading import read_checkpoint
from fsdp_core.lightning.loaders.trainer_loaders import TrainingLoaders
from fsdp_core.runtime import Runtime
from fsdp_core.sharding.backend import Backend

__all__ = ["load_checkpoint", "load_optimizers", "save_checkpoint"]

_ALREADY_SAVED = "Leave it out: the checkpoint holds the model and its optimizers anyway."


class _Strategy(Protocol):
    backend: Backend
    runtime: Runtime
    strategy_name: str
    optimizers: list[Optimizer]

    @property
    def model(self) -> nn.Module | None: ...

    @property
    def lightning_module(self) -> pl.LightningModule | None: ...

    @property
    def fit_saves(self) -> AsyncSaves | None: ...

    @property
    def state_dict_type(self) -> str: ...

    @property
    def sequential_save(self) -> bool: ...

    @property
    def checkpoint_io(self) -> CheckpointIO: ...

    def refuse_storage_options(self, storage_options: Any) -> None: ...


def save_checkpoint(
    strategy: _Strategy,
    path: str,
    checkpoint: dict[str, Any],
    storage_options: Any,
    loaders: TrainingLoaders,
    resume: ExactResume,
) -> None:
    """Save what Lightning has put together. All ranks must call it.

    Args:
        strategy: Its backend, model and kind of checkpoint.
        path: A folder for sharded checkpoints, a file for full ones.
        checkpoint: Lightning's dict, whose state of the module and the optimizers is the backend's.
        storage_options: For the ``CheckpointIO`` that writes full checkpoints.
        loaders: The positions of the training loaders.
        resume: What an exact resume needs besides.
    """
    root = strategy.model
    assert strategy.lightning_module is not None and root is not None
    rest = loaders.save(checkpoint, strategy.lightning_module.trainer, strategy.runtime)
    model, optimizers = rest.pop("state_dict"), rest.pop("optimizer_states", None)
    refuse_local_shards(rest, strategy.backend, [root], strategy.optimizers, strategy.runtime, _ALREADY_SAVED)
    if optimizers is not None:
        rest[KEY] = resume.state(strategy.backend, root)
    if strategy.state_dict_type == "full":
        whole = gathered({"state_dict": model, **rest}, strategy.backend)
        if optimizers is not None:
            whole["optimizer_states"] = [numbered(gathered(state, strategy.backend)) for state in optimizers]
        write_full(
            path,
            whole,
            [checkpoint, rest],
            write=lambda it: strategy.checkpoint_io.save_checkpoint(it, path, storage_options=storage_options),
            runtime=strategy.runtime,
            async_saves=strategy.fit_saves,
        )
        return
    strategy.refuse_storage_options(storage_options)
    tied = strategy.backend.aliases(root)
    state = {"model": model, **({} if optimizers is None else {"optimizer": optimizers}), "trainer": rest}
    kinds = {"model": "model", **{f"optimizer/{i}": "optimizer" for i in range(len(optimizers or ()))}}
    async_saves = strategy.fit_saves
    in_order = partial(checkpoints.save, runtime=strategy.runtime, one_after_another=strategy.sequential_save)
    save = in_order if async_saves is None else async_saves.save
    save(
        path,
        state,
        strategy=strategy.strategy_name,
        kinds=kinds,
        aliases={f"model/{a}": f"model/{b}" for a, b in tied.items() if a in model and b in model},
    )


def load_checkpoint(
    strategy: _Strategy, path: str, weights_only: bool | None, loaders: TrainingLoaders
) -> dict[str, Any]:
    """Read what was saved, by this strategy or another, as the dict that Lightning takes apart.

    Args:
        strategy: Its runtime and what it declares.
        path: A sharded folder or a full file; which of the two is seen from what is there.
        weights_only: ``False`` lets a full file execute code.
        loaders: Take the positions of the training loaders.
    """
    saved, sharded = read_checkpoint(strategy.strategy_name, path, weights_only, strategy.runtime)
    missing = [key for key in (("model", "trainer") if sharded else ("state_dict",)) if key not in saved]
    if missing:
        raise MissingKeyError(
            f"{path} was not saved by a Trainer: it holds {', '.join(map(repr, saved))}, and no {missing[0]!r}.\nLoad "
            f"it with fabric.load(), if Fabric has saved it; of its folder, `fsdp checkpoint consolidate {path} FILE "
            "--to lightning` makes a file that a Trainer opens."
        )
    if sharded:
        rest = saved["trainer"]
        optimizers = {"optimizer_states": saved["optimizer"]} if "optimizer" in saved else {}
        saved = {"state_dict": saved["model"], **optimizers, **rest}
    assert strategy.lightning_module is not None
    return loaders.load(saved, strategy.lightning_module.trainer, strategy.runtime)


def load_optimizers(strategy: _Strategy, states: Sequence[Mapping[str, Any]], *, check_only: bool) -> None:
    """Restore the optimizers, or only see whether they can be.

    Raises:
        CheckpointMismatchError: There are more or fewer, or a state does not fit its optimizer.
    """
    assert strategy.model is not None
    if len(states) != len(strategy.optimizers):
        raise CheckpointMismatchError(
            f"the checkpoint holds the state of {len(states)} optimizers, but configure_optimizers made "
            f"{len(strategy.optimizers)}.\nReturn the optimizers that it was saved with."
        )
    for optimizer, state in zip(strategy.optimizers, states, strict=True):
        strategy.backend.load_optimizer_state(strategy.model, optimizer, state, check_only=check_only)
