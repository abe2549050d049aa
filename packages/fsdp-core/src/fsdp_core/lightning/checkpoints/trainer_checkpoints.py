"""Saves and restores Lightning's checkpoint dict, as a sharded folder or a full file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import lightning.pytorch as pl
from torch.optim import Optimizer

from fsdp_core.checkpoint.async_save import AsyncSaves
from fsdp_core.checkpoint.storage.joined import Paths, shown_paths
from fsdp_core.errors import CheckpointMismatchError, MissingKeyError
from fsdp_core.lightning.checkpoints.deferred_copies import copied_before_a_step
from fsdp_core.lightning.checkpoints.exact_resume import KEY, ExactResume
from fsdp_core.lightning.checkpoints.full.file import gathered
from fsdp_core.lightning.checkpoints.full.layout import numbered
from fsdp_core.lightning.checkpoints.late_param_groups import LateParamGroups
from fsdp_core.lightning.checkpoints.local_shards import refuse_local_shards
from fsdp_core.lightning.checkpoints.sharded_or_full import (
    SavePlace,
    SavingStrategy,
    read_checkpoint,
    write_file,
    write_folder,
)
from fsdp_core.lightning.loaders.trainer_loaders import TrainingLoaders
from fsdp_core.sharding.sharded import Sharded

__all__ = ["load_checkpoint", "load_optimizers", "save_checkpoint"]

_ALREADY_SAVED = "Leave it out: the checkpoint holds the model and its optimizers anyway."


class _Strategy(SavingStrategy, Protocol):
    optimizers: list[Optimizer]
    late_param_groups: LateParamGroups

    def param_groups_added(self, optimizer: Optimizer) -> None: ...

    @property
    def sharded(self) -> Sharded: ...

    @property
    def lightning_module(self) -> pl.LightningModule | None: ...

    @property
    def fit_saves(self) -> AsyncSaves | None: ...

    @property
    def has_trained(self) -> bool: ...


def save_checkpoint(
    strategy: _Strategy,
    place: SavePlace,
    checkpoint: dict[str, Any],
    storage_options: Any,
    loaders: TrainingLoaders,
    resume: ExactResume,
) -> None:
    """Save Lightning's checkpoint dict. All ranks must call it.

    Args:
        strategy: Its backend, model and kind of checkpoint.
        place: A folder for sharded checkpoints, a file for full ones.
        checkpoint: Lightning's dict, with the backend's state of the module and the optimizers.
        storage_options: For the ``CheckpointIO`` that writes full checkpoints.
        loaders: The positions of the training loaders.
        resume: What exact resume needs in addition.
    """
    assert strategy.lightning_module is not None
    sharded = strategy.sharded
    rest = loaders.save(checkpoint, strategy.lightning_module.trainer, strategy.runtime)
    model, optimizers = rest.pop("state_dict"), rest.pop("optimizer_states", None)
    refuse_local_shards(rest, [sharded], strategy.optimizers, strategy.runtime, _ALREADY_SAVED)
    if optimizers is not None:
        rest[KEY] = resume.state(sharded)
    if strategy.state_dict_type == "full":
        whole = gathered({"state_dict": model, **rest}, strategy.backend)
        if optimizers is not None:
            whole["optimizer_states"] = [numbered(gathered(state, strategy.backend)) for state in optimizers]
        write_file(strategy, place.path, whole, [checkpoint, rest], storage_options, strategy.fit_saves)
        return
    tied = sharded.aliases()
    state = {"model": model, **({} if optimizers is None else {"optimizer": optimizers}), "trainer": rest}
    kinds = {"model": "model", **{f"optimizer/{i}": "optimizer" for i in range(len(optimizers or ()))}}
    write_folder(
        strategy,
        place,
        state,
        storage_options,
        strategy.fit_saves,
        kinds=kinds,
        aliases={f"model/{a}": f"model/{b}" for a, b in tied.items() if a in model and b in model},
        deferred=None
        if strategy.fit_saves is None or not strategy.has_trained
        else copied_before_a_step(strategy.lightning_module.trainer, sharded, strategy.optimizers),
    )


def load_checkpoint(
    strategy: _Strategy, path: Paths, weights_only: bool | None, loaders: TrainingLoaders
) -> dict[str, Any]:
    """Read a checkpoint of this strategy or another as the dict that Lightning restores from.

    Args:
        strategy: Its runtime and what it declares.
        path: A sharded folder or a full file, which is detected; or several, the places of a scattered save.
        weights_only: ``False`` lets a full file execute code.
        loaders: Get the positions of the training loaders.
    """
    saved, sharded = read_checkpoint(strategy, path, weights_only)
    missing = [key for key in (("model", "trainer") if sharded else ("state_dict",)) if key not in saved]
    if missing:
        shown = shown_paths(path)
        raise MissingKeyError(
            f"{shown} was not saved by a Trainer: it holds {', '.join(map(repr, saved))}, and no {missing[0]!r}.\nLoad "
            f"it with fabric.load(), if Fabric saved it; `fsdp checkpoint consolidate {shown} FILE --to lightning` "
            "converts its folder to a file that a Trainer opens."
        )
    if sharded:
        rest = saved["trainer"]
        optimizers = {"optimizer_states": saved["optimizer"]} if "optimizer" in saved else {}
        saved = {"state_dict": saved["model"], **optimizers, **rest}
    assert strategy.lightning_module is not None
    return loaders.load(saved, strategy.lightning_module.trainer, strategy.runtime)


def load_optimizers(strategy: _Strategy, states: Sequence[Mapping[str, Any]], *, check_only: bool) -> None:
    """Restore the optimizers, or only check whether they can be.

    Param groups that an optimizer does not hold yet are restored when they are added.

    Raises:
        CheckpointMismatchError: The number of optimizers differs, or a state does not fit its optimizer.
    """
    if len(states) != len(strategy.optimizers):
        raise CheckpointMismatchError(
            f"the checkpoint holds the state of {len(states)} optimizers, but configure_optimizers returned "
            f"{len(strategy.optimizers)}.\nReturn the optimizers that it was saved with."
        )
    sharded, late_groups = strategy.sharded, strategy.late_param_groups
    layout = sharded.layout()
    held = [
        {part.name for group in optimizer.param_groups for p in group["params"] for part in layout.get(p, ())}
        for optimizer in strategy.optimizers
    ]
    for index, (optimizer, state) in enumerate(zip(strategy.optimizers, states, strict=True)):
        elsewhere = set().union(*held[:index], *held[index + 1 :])
        now, late = late_groups.divide(optimizer, sharded, state, elsewhere)
        sharded.load_optimizer_state(optimizer, now, check_only=check_only)
        if check_only:
            late_groups.check(optimizer, sharded, late)
        else:
            late_groups.expect(optimizer, late, strategy.param_groups_added)
    if not check_only:
        assert strategy.lightning_module is not None
        late_groups.unfreeze(strategy.optimizers, sharded, strategy.lightning_module.trainer)
