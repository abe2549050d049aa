"""What the Trainer's checkpoints hold, as a sharded folder or a full file, and how a stage is restored from one."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.migration import migrate_checkpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.optim import Optimizer

from fsdp_core import checkpoint as checkpoints
from fsdp_core.checkpoint.collective import run_on_all
from fsdp_core.checkpoint.storage.joined import Paths, paths_of, shown_paths
from fsdp_core.checkpoint.storage.recognition import holds_ours
from fsdp_core.errors import CheckpointMismatchError, MissingKeyError
from fsdp_core.lightning.checkpoints.deferred_copies import choose_deferred
from fsdp_core.lightning.checkpoints.full.file import gather_full
from fsdp_core.lightning.checkpoints.full.layout import number_parameters
from fsdp_core.lightning.checkpoints.local_shards import refuse_local_shards
from fsdp_core.lightning.checkpoints.patched_io import checkpoint_at
from fsdp_core.lightning.checkpoints.sharded_or_full import (
    SaveTarget,
    io_for,
    own_exceptions,
    read_checkpoint,
    users_io,
    write_file,
    write_folder,
)
from fsdp_core.lightning.features.exact_resume import KEY
from fsdp_core.lightning.outside_steps.exporting import gather_state, refuse_values_of_parts
from fsdp_core.lightning.outside_steps.redirection import normal_tensors
from fsdp_core.lightning.private import resume_from

if TYPE_CHECKING:
    from fsdp_core.lightning.trainer_strategy import ShardedTrainerStrategy

__all__ = ["TrainerCheckpoints"]

_ALREADY_SAVED = "Leave it out: the checkpoint holds the model and its optimizers anyway."


class TrainerCheckpoints:
    """Saves and restores the state of a strategy's module, its optimizers and what resumes need.

    Args:
        strategy: The strategy.
    """

    def __init__(self, strategy: ShardedTrainerStrategy) -> None:
        self._strategy = strategy
        #: What the optimizers of the next fit are to be restored from, once they are made.
        self._optimizer_states: Sequence[Mapping[str, Any]] | None = None
        self._are_optimizers_set_up = False

    # -- the module ------------------------------------------------------------------------------------------------

    @normal_tensors()
    def module_state(self) -> dict[str, Any]:
        """The module's state, of the kind that checkpoints hold. All ranks must call it."""
        strategy = self._strategy
        sharded = strategy.sharded
        strategy.check_saving([sharded])
        saves = strategy.features.saves.writer
        if saves is not None:
            saves.finish_copying()  # of the last save: on_save_checkpoint() of this one may write to shards
        if strategy.state_dict_type == "full":
            with strategy.step_methods.gradient_guard.paused():
                return gather_state(sharded)
        # hooks can't compute with values of shards, until the checkpoint is saved or a step begins
        refuse_values_of_parts(True)
        with strategy.step_methods.gradient_guard.paused():
            return sharded.model_state()

    @normal_tensors()
    def load_module(self, checkpoint: Mapping[str, Any], strict: bool) -> None:
        """Restore the module. If a fit resumes, the whole checkpoint is compared before anything is changed."""
        strategy = self._strategy
        assert strategy.lightning_module is not None
        if strategy.lightning_module.trainer.state.fn == TrainerFn.FITTING and "optimizer_states" in checkpoint:
            description = "comparing the checkpoint with the model"
            with strategy.step_methods.gradient_guard.paused():
                run_on_all(strategy.runtime, description, lambda: self._compare(checkpoint, strict))
        elif strict and (cast_tensors := self._other_dtypes(checkpoint["state_dict"])):
            name, saved, own_dtype = cast_tensors[0]
            rank_zero_warn(
                f"{strategy.strategy_name}: {len(cast_tensors)} tensors of the checkpoint are cast as they are loaded, "
                f"such as {name!r} from {saved} to {own_dtype}, because the run that saved it had another precision "
                f"than {strategy.precision_plugin.precision!r}.",
                stacklevel=2,
            )
            strict = False  # for dtypes; _other_dtypes() has found the names to be the same
        with strategy.step_methods.gradient_guard.paused():
            strategy.sharded.load_model_state(checkpoint["state_dict"], strict)

    def _other_dtypes(self, saved: Mapping[str, Any]) -> list[tuple[str, torch.dtype, torch.dtype]]:
        """The tensors that a load would cast: each one's name, its dtype in the checkpoint, and the module's dtype.

        Empty if names differ or a dtype is not floating-point: then the load itself raises.
        """
        with self._strategy.step_methods.gradient_guard.paused():
            live = self._strategy.sharded.model_state()
        if live.keys() != saved.keys():
            return []
        different: list[tuple[str, torch.dtype, torch.dtype]] = []
        for name, tensor in live.items():
            saved_dtype = getattr(saved[name], "dtype", tensor.dtype)  # extra state has none
            if saved_dtype == tensor.dtype:
                continue
            if not (saved_dtype.is_floating_point and tensor.dtype.is_floating_point):
                return []
            different.append((name, saved_dtype, tensor.dtype))
        return different

    def _compare(self, checkpoint: Mapping[str, Any], strict: bool) -> None:
        """Refuse a checkpoint that does not fit the model or an optimizer, before either is changed."""
        self._strategy.sharded.load_model_state(checkpoint["state_dict"], strict, check_only=True)
        self._load_optimizers(checkpoint["optimizer_states"], check_only=True)

    # -- optimizers ------------------------------------------------------------------------------------------------

    def before_optimizers(self) -> None:
        """Let what is loaded from now on wait for the optimizers, which a fit is about to make."""
        self._are_optimizers_set_up = False

    def after_optimizers(self) -> None:
        """Restore the optimizers of a fit from what was loaded before they were there."""
        if self._optimizer_states is not None:
            self._load_optimizers(self._optimizer_states, check_only=False)
        self._are_optimizers_set_up = True
        self._optimizer_states = None

    def load_optimizers(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore the optimizers; or, before a fit has set them up, do so as soon as it has."""
        strategy = self._strategy
        if not self._are_optimizers_set_up:
            self._optimizer_states = checkpoint["optimizer_states"]
            return
        with strategy.step_methods.gradient_guard.paused():
            self._load_optimizers(checkpoint["optimizer_states"], check_only=False)
        assert strategy.lightning_module is not None
        strategy.features.exact_resume.load_state(checkpoint.get(KEY), strategy.lightning_module.trainer)

    def _load_optimizers(self, states: Sequence[Mapping[str, Any]], *, check_only: bool) -> None:
        """Restore the optimizers, or only check whether they can be.

        Param groups that an optimizer does not hold yet are restored when they are added.

        Raises:
            CheckpointMismatchError: The number of optimizers differs, or a state does not fit its optimizer.
        """
        strategy = self._strategy
        if len(states) != len(strategy.optimizers):
            raise CheckpointMismatchError(
                f"the checkpoint holds the state of {len(states)} optimizers, but configure_optimizers returned "
                f"{len(strategy.optimizers)}.\nReturn the optimizers that it was saved with."
            )
        sharded = strategy.sharded
        late_groups = strategy.features.late_param_groups
        layout = sharded.layout()
        param_names = [
            {part.name for group in optimizer.param_groups for p in group["params"] for part in layout.get(p, ())}
            for optimizer in strategy.optimizers
        ]
        for index, (optimizer, state) in enumerate(zip(strategy.optimizers, states, strict=True)):
            names_of_others = set().union(*param_names[:index], *param_names[index + 1 :])
            present, late = late_groups.divide(optimizer, sharded, state, names_of_others)
            sharded.load_optimizer_state(optimizer, present, check_only=check_only)
            if check_only:
                late_groups.check(optimizer, sharded, late)
            else:
                late_groups.expect(optimizer, late, strategy.param_groups_added)
        if not check_only:
            assert strategy.lightning_module is not None
            late_groups.unfreeze(strategy.optimizers, sharded, strategy.lightning_module.trainer)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """An optimizer's state, of the kind that checkpoints hold."""
        with self._strategy.step_methods.gradient_guard.paused():
            return self._strategy.sharded.optimizer_state(getattr(optimizer, "_optimizer", optimizer))

    # -- whole checkpoints -----------------------------------------------------------------------------------------

    def save(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any) -> None:
        """Save Lightning's checkpoint dict. All ranks must call it.

        Args:
            checkpoint: Lightning's dict, with the backend's state of the module and the optimizers.
            path: A folder for sharded checkpoints, a file for full ones.
            storage_options: For the ``CheckpointIO`` that writes full checkpoints.
        """
        strategy = self._strategy
        refuse_values_of_parts(False)
        strategy.check_saving(filter(None, [strategy.sharded_or_none]))
        if "optimizer_states" in checkpoint:
            strategy.features.late_param_groups.check_saving()
        target = strategy.save_target(path)
        strategy.features.saves.before_save(target.path)
        with strategy.step_methods.gradient_guard.paused():
            self._write(target, checkpoint, storage_options)
        if target.is_reported:  # to Ray Train, which takes the folder as soon as this returns
            strategy.wait_for_saves()

    def _write(self, target: SaveTarget, checkpoint: dict[str, Any], storage_options: Any) -> None:
        strategy = self._strategy
        resume = strategy.features.exact_resume
        writer = strategy.features.saves.writer
        assert strategy.lightning_module is not None
        sharded = strategy.sharded
        plain = resume.add_positions(checkpoint, strategy.lightning_module.trainer)
        model, optimizers = plain.pop("state_dict"), plain.pop("optimizer_states", None)
        refuse_local_shards(plain, [sharded], strategy.optimizers, strategy.runtime, _ALREADY_SAVED)
        if optimizers is not None:
            plain[KEY] = resume.state(sharded)
        if strategy.state_dict_type == "full":
            full_state = gather_full({"state_dict": model, **plain}, strategy.backend)
            if optimizers is not None:
                full_optimizers = [gather_full(state, strategy.backend) for state in optimizers]
                full_state["optimizer_states"] = [number_parameters(state) for state in full_optimizers]
            write_file(strategy, target.path, full_state, [checkpoint, plain], storage_options, writer)
            return
        tied = sharded.aliases()
        state = {"model": model, "trainer": plain}
        kinds = {"model": "model"}
        if optimizers is not None:
            state = {"model": model, "optimizer": optimizers, "trainer": plain}
            kinds |= {f"optimizer/{index}": "optimizer" for index in range(len(optimizers))}
        deferred = None
        if writer is not None and not strategy.step_methods.is_first:
            deferred = choose_deferred(strategy.lightning_module.trainer, sharded, strategy.optimizers)
        write_folder(
            strategy,
            target,
            state,
            storage_options,
            writer,
            kinds=kinds,
            aliases={f"model/{a}": f"model/{b}" for a, b in tied.items() if a in model and b in model},
            deferred=deferred,
        )

    def load(self, path_or_paths: Paths, weights_only: bool | None) -> dict[str, Any]:
        """Read a checkpoint of this strategy or another as the dict that Lightning restores from.

        Args:
            path_or_paths: A sharded folder or a full file, which is detected; or several, the places of a scattered
                save.
            weights_only: ``False`` lets a full file execute code.
        """
        strategy = self._strategy
        strategy.wait_for_saves()
        path = strategy.agree_on_path(paths_of(checkpoint_at(path_or_paths)), "load")
        saved, sharded = read_checkpoint(strategy, path, weights_only)
        needed_keys = ("model", "trainer") if sharded else ("state_dict",)
        missing = [key for key in needed_keys if key not in saved]
        if missing:
            displayed_path = shown_paths(path)
            raise MissingKeyError(
                f"{displayed_path} was not saved by a Trainer: it holds {', '.join(map(repr, saved))}, "
                f"and no {missing[0]!r}.\n"
                "Load it with fabric.load(), if Fabric saved it; `fsdp checkpoint consolidate "
                f"{displayed_path} FILE --to lightning` converts its folder to a file that a Trainer opens."
            )
        if sharded:
            plain = saved["trainer"]
            optimizers = {"optimizer_states": saved["optimizer"]} if "optimizer" in saved else {}
            saved = {"state_dict": saved["model"], **optimizers, **plain}
        assert strategy.lightning_module is not None
        trainer = strategy.lightning_module.trainer
        saved = strategy.features.exact_resume.own_positions(saved, trainer)
        if not isinstance(path_or_paths, str | os.PathLike):  # Lightning does the following for a single path alone
            resume_from(trainer, path if isinstance(path, str) else path[0])
            saved, _ = migrate_checkpoint(saved)
        return saved

    def remove(self, path: str) -> None:
        """Remove a checkpoint, after all pending saves. All ranks must call it."""
        strategy = self._strategy

        def remove() -> None:
            io = io_for(strategy, path)
            if io is not None:
                io.remove_checkpoint(path)
            # of a scattered save, first of each host's ranks; then whoever still sees it
            elif strategy.local_rank == 0 or not strategy.scattered_save or holds_ours(path):
                checkpoints.remove(path)

        with own_exceptions(users_io(strategy)):
            strategy.features.saves.run_in_order(f"removing {path}", remove, {path: False})
