"""What the Trainer's checkpoints hold, as a sharded folder or a full file, and how a stage is restored from one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.migration import migrate_checkpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.optim import Optimizer

from fsdp_core import checkpoint as checkpoints
from fsdp_core.checkpoint.collective import run_on_all
from fsdp_core.checkpoint.storage.joined_folder import Paths, normalize_paths, shown_paths
from fsdp_core.checkpoint.storage.recognition import holds_ours
from fsdp_core.errors import CheckpointMismatchError, MissingKeyError
from fsdp_core.lightning.checkpoints.deferred_copies import choose_deferred
from fsdp_core.lightning.checkpoints.full.file import gather_full
from fsdp_core.lightning.checkpoints.full.layout import number_parameters
from fsdp_core.lightning.checkpoints.local_shards import refuse_local_shards
from fsdp_core.lightning.checkpoints.patched_io import checkpoint_at
from fsdp_core.lightning.checkpoints.sharded_or_full import (
    OpenedCheckpoint,
    SaveTarget,
    io_for,
    read_checkpoint,
    unwrap_exceptions_of,
    users_io,
    write_file,
    write_folder,
)
from fsdp_core.lightning.features.exact_resume import EXACT_RESUME_KEY
from fsdp_core.lightning.outside_steps.exporting import allow_unreduced_reads, gather_state, refuse_unreduced_reads
from fsdp_core.lightning.outside_steps.redirection import outside_inference_mode
from fsdp_core.lightning.private import set_checkpoint_in_use

if TYPE_CHECKING:
    import lightning.pytorch as pl

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
        #: The optimizer states of a checkpoint that was loaded before the fit has made its optimizers.
        self._pending_optimizer_states: Sequence[Mapping[str, Any]] | None = None
        self._are_optimizers_set_up = False
        #: What the module had when its state was read for the save that is under way, if that may leave some of it out.
        self._own_state: Mapping[str, Any] = {}

    @property
    def _trainer(self) -> pl.Trainer:
        assert self._strategy.lightning_module is not None
        return self._strategy.lightning_module.trainer

    # -- the module ------------------------------------------------------------------------------------------------

    @outside_inference_mode()
    def module_state(self) -> dict[str, Any]:
        """The module's state, full or sharded as the strategy's checkpoints are. All ranks must call it."""
        strategy = self._strategy
        sharded = strategy.sharded
        strategy.check_saving([sharded])
        async_saves = strategy.features.saves.writer
        if async_saves is not None:
            # on_save_checkpoint() of the save that begins may write to shards, which the last save may still copy
            async_saves.finish_copying()
        if strategy.state_dict_type == "full":
            with strategy.step_methods.gradient_guard.paused():
                return gather_state(sharded)
        # until save() or the next step allows it again: hooks would take a norm of this rank's shards for the model's
        refuse_unreduced_reads()
        with strategy.step_methods.gradient_guard.paused():
            state = sharded.model_state()
        self._own_state = dict(state) if strategy.frozen_parameters.are_left_out else {}
        return state

    @outside_inference_mode()
    def load_module(self, checkpoint: Mapping[str, Any], strict: bool) -> None:
        """Restore the module. If a fit resumes, the whole checkpoint is compared before anything is changed."""
        strategy = self._strategy
        with strategy.step_methods.gradient_guard.paused():
            saved_state = checkpoint["state_dict"]
            restored = strategy.frozen_parameters.restore(strategy.sharded, saved_state, self._loader_of_base())
            checkpoint = {**checkpoint, "state_dict": restored}
        is_resuming = self._trainer.state.fn == TrainerFn.FITTING and "optimizer_states" in checkpoint
        if is_resuming:
            description = "comparing the checkpoint with the model"
            with strategy.step_methods.gradient_guard.paused():
                run_on_all(strategy.runtime, description, lambda: self._compare(checkpoint, strict))
        elif strict and (casts := self._find_casts(checkpoint["state_dict"])):
            name, (saved_dtype, own_dtype) = next(iter(casts.items()))
            rank_zero_warn(
                f"{strategy.strategy_name}: {len(casts)} tensors of the checkpoint are cast as they are loaded, "
                f"such as {name!r} from {saved_dtype} to {own_dtype}, because the run that saved it had another "
                f"precision than {strategy.precision_plugin.precision!r}.",
                stacklevel=2,
            )
            strict = False  # so that dtypes may differ; _find_casts() has found no difference in names
        with strategy.step_methods.gradient_guard.paused():
            strategy.sharded.load_model_state(checkpoint["state_dict"], strict)

    def _loader_of_base(self) -> Callable[[], None] | None:
        """What reads the base into the module before a run that resumes: a callback of the user's, if there is one."""
        trainer, module = self._trainer, self._strategy.lightning_module
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            load_base = getattr(callback, "load_base", None)
            if callable(load_base):
                return partial(load_base, module)
        return None

    def _find_casts(self, saved_state: Mapping[str, Any]) -> dict[str, tuple[torch.dtype, torch.dtype]]:
        """The tensors that a load would cast: by name, the dtype in the checkpoint and the module's own.

        Empty if names differ or a dtype is not floating-point: then the load itself raises.
        """
        with self._strategy.step_methods.gradient_guard.paused():
            own_state = self._strategy.sharded.model_state()
        if own_state.keys() != saved_state.keys():
            return {}
        casts: dict[str, tuple[torch.dtype, torch.dtype]] = {}
        for name, own_tensor in own_state.items():
            saved_dtype = getattr(saved_state[name], "dtype", own_tensor.dtype)  # extra state has none
            if saved_dtype == own_tensor.dtype:
                continue
            if not (saved_dtype.is_floating_point and own_tensor.dtype.is_floating_point):
                return {}
            casts[name] = saved_dtype, own_tensor.dtype
        return casts

    def _compare(self, checkpoint: Mapping[str, Any], strict: bool) -> None:
        """Refuse a checkpoint that does not fit the model or an optimizer, before either is changed."""
        sharded = self._strategy.sharded
        sharded.load_model_state(checkpoint["state_dict"], strict, check_only=True)
        late_groups = self._strategy.features.late_param_groups
        for optimizer, present_state, late_state in self._divide_states(checkpoint["optimizer_states"]):
            sharded.load_optimizer_state(optimizer, present_state, check_only=True)
            late_groups.check(optimizer, sharded, late_state)

    # -- optimizers ------------------------------------------------------------------------------------------------

    def before_optimizers(self) -> None:
        """A fit is about to make its optimizers: what is loaded from now on is kept until they are there."""
        self._are_optimizers_set_up = False

    def after_optimizers(self) -> None:
        """A fit has made its optimizers: restore them, if a checkpoint was loaded before."""
        if self._pending_optimizer_states is not None:
            self._restore_optimizers(self._pending_optimizer_states)
        self._are_optimizers_set_up = True
        self._pending_optimizer_states = None

    def load_optimizers(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore the optimizers; before a fit has made them, keep their states for :meth:`after_optimizers`."""
        strategy = self._strategy
        if not self._are_optimizers_set_up:
            self._pending_optimizer_states = checkpoint["optimizer_states"]
            return
        with strategy.step_methods.gradient_guard.paused():
            self._restore_optimizers(checkpoint["optimizer_states"])
        strategy.features.exact_resume.load_state(checkpoint.get(EXACT_RESUME_KEY), self._trainer)

    def _restore_optimizers(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Restore the optimizers. Param groups that an optimizer does not hold yet are restored when they are added."""
        strategy = self._strategy
        late_groups = strategy.features.late_param_groups
        for optimizer, present_state, late_state in self._divide_states(states):
            strategy.sharded.load_optimizer_state(optimizer, present_state)
            late_groups.expect(optimizer, late_state, strategy.param_groups_added)
        late_groups.unfreeze(strategy.optimizers, strategy.sharded, self._trainer)

    def _divide_states(
        self, states: Sequence[Mapping[str, Any]]
    ) -> Iterator[tuple[Optimizer, Mapping[str, Any], Mapping[str, Any]]]:
        """Pair optimizers with their saved states, each divided by whether the optimizer holds the param groups yet.

        Yields:
            An optimizer, the state of the groups that it holds, and the state of those that may be added later.

        Raises:
            CheckpointMismatchError: There are more saved states than optimizers, or fewer.
        """
        strategy = self._strategy
        if len(states) != len(strategy.optimizers):
            raise CheckpointMismatchError(
                f"the checkpoint holds the state of {len(states)} optimizers, but configure_optimizers returned "
                f"{len(strategy.optimizers)}.\nReturn the optimizers that it was saved with."
            )
        layout = strategy.sharded.layout()
        names_by_optimizer = [
            {part.name for group in optimizer.param_groups for p in group["params"] for part in layout.get(p, ())}
            for optimizer in strategy.optimizers
        ]
        for index, (optimizer, state) in enumerate(zip(strategy.optimizers, states, strict=True)):
            names_of_others = set().union(*names_by_optimizer[:index], *names_by_optimizer[index + 1 :])
            late_groups = strategy.features.late_param_groups
            yield optimizer, *late_groups.divide(optimizer, strategy.sharded, state, names_of_others)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """An optimizer's state, full or sharded as the strategy's checkpoints are."""
        users_optimizer = getattr(optimizer, "_optimizer", optimizer)  # in Lightning's wrapper
        with self._strategy.step_methods.gradient_guard.paused():
            return self._strategy.sharded.optimizer_state(users_optimizer)

    # -- whole checkpoints -----------------------------------------------------------------------------------------

    def save(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any) -> None:
        """Save Lightning's checkpoint dict. All ranks must call it.

        Args:
            checkpoint: Lightning's dict, with the backend's state of the module and the optimizers.
            path: A folder for sharded checkpoints, a file for full ones.
            storage_options: For the ``CheckpointIO`` that writes full checkpoints.
        """
        strategy = self._strategy
        allow_unreduced_reads()  # which module_state() has refused for the hooks before this call
        strategy.check_saving(filter(None, [strategy.sharded_or_none]))
        if "optimizer_states" in checkpoint:
            strategy.features.late_param_groups.check_saving()
        target = strategy.save_target(path)
        strategy.features.saves.before_save(target.path)
        with strategy.frozen_parameters.timed_save(), strategy.step_methods.gradient_guard.paused():
            self._write(target, checkpoint, storage_options)
        if target.is_reported:  # to Ray Train, which takes the folder as soon as this returns
            strategy.wait_for_saves()

    def _write(self, target: SaveTarget, checkpoint: dict[str, Any], storage_options: Any) -> None:
        """Divide Lightning's dict into model, optimizers and plain data, and write these in the strategy's form."""
        strategy = self._strategy
        resume = strategy.features.exact_resume
        plain_data = resume.add_positions(checkpoint, self._trainer)
        model_state = plain_data.pop("state_dict")
        optimizer_states = plain_data.pop("optimizer_states", None)  # which a checkpoint of weights alone lacks
        refuse_local_shards(plain_data, [strategy.sharded], strategy.optimizers, strategy.runtime, _ALREADY_SAVED)
        if optimizer_states is not None:
            plain_data[EXACT_RESUME_KEY] = resume.state(strategy.sharded)
        if strategy.state_dict_type == "sharded":
            self._write_folder(target, model_state, optimizer_states, plain_data, storage_options)
            return
        full_state = gather_full({"state_dict": model_state, **plain_data}, strategy.backend)
        if optimizer_states is not None:
            full_optimizers = [gather_full(state, strategy.backend) for state in optimizer_states]
            full_state["optimizer_states"] = [number_parameters(state) for state in full_optimizers]
        write_file(
            strategy,
            target.path,
            full_state,
            gathered_from=(checkpoint, plain_data),
            storage_options=storage_options,
            async_saves=strategy.features.saves.writer,
        )

    def _write_folder(
        self,
        target: SaveTarget,
        model_state: Mapping[str, Any],
        optimizer_states: Sequence[Mapping[str, Any]] | None,
        plain_data: Mapping[str, Any],
        storage_options: Any,
    ) -> None:
        strategy = self._strategy
        first_names = {
            alias: name
            for alias, name in strategy.sharded.aliases().items()
            if alias in model_state and name in model_state  # a hook may have removed names
        }
        own_state, self._own_state = self._own_state, {}
        model_state, base_source = strategy.frozen_parameters.leave_out(
            strategy.sharded, model_state, own_state, first_names
        )
        state: dict[str, Any] = {"model": model_state, "trainer": plain_data}
        kinds = {"model": "model"}  # by path in the state
        if optimizer_states is not None:
            state = {"model": model_state, "optimizer": optimizer_states, "trainer": plain_data}
            kinds |= {f"optimizer/{index}": "optimizer" for index in range(len(optimizer_states))}
        deferred = None
        async_saves = strategy.features.saves.writer
        # before the first step, hooks of the fit's beginning may still write to shards
        if async_saves is not None and not strategy.step_methods.is_before_first_step:
            deferred = choose_deferred(self._trainer, strategy.sharded, strategy.optimizers)
        write_folder(
            strategy,
            target,
            state,
            storage_options=storage_options,
            async_saves=async_saves,
            kinds=kinds,
            aliases={f"model/{alias}": f"model/{name}" for alias, name in first_names.items()},
            base_source=base_source,
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
        path = strategy.agree_on_path(normalize_paths(checkpoint_at(path_or_paths)), "load")
        saved = _as_lightnings_dict(read_checkpoint(strategy, path, weights_only), path)
        saved = strategy.features.exact_resume.place_own_positions(saved, self._trainer)
        if not isinstance(path_or_paths, str | os.PathLike):  # Lightning does the following for a single path alone
            set_checkpoint_in_use(self._trainer, path if isinstance(path, str) else path[0])
            saved, _ = migrate_checkpoint(saved)
        return saved

    def remove(self, path: str) -> None:
        """Remove a checkpoint, after all pending saves. All ranks must call it."""
        strategy = self._strategy

        def remove_what_rank_sees() -> None:
            io = io_for(strategy, path)
            if io is not None:
                io.remove_checkpoint(path)
            # run_in_order() calls one rank of each host first; another has something to remove only if its disk differs
            elif strategy.local_rank == 0 or not strategy.scattered_save or holds_ours(path):
                checkpoints.remove(path)

        with unwrap_exceptions_of(users_io(strategy)):
            strategy.features.saves.run_in_order(f"removing {path}", remove_what_rank_sees, will_exist={path: False})


def _as_lightnings_dict(opened: OpenedCheckpoint, path: Paths) -> dict[str, Any]:
    """What a checkpoint holds, under the keys that Lightning restores from.

    Raises:
        MissingKeyError: A Trainer has not saved it.
    """
    saved: dict[str, Any] = opened.state
    needed_keys = ("model", "trainer") if opened.is_folder else ("state_dict",)
    missing = [key for key in needed_keys if key not in saved]
    if missing:
        displayed_path = shown_paths(path)
        raise MissingKeyError(
            f"{displayed_path} was not saved by a Trainer: it holds {', '.join(map(repr, saved))}, "
            f"and no {missing[0]!r}.\n"
            "Load it with fabric.load(), if Fabric saved it; `fsdp checkpoint consolidate "
            f"{displayed_path} FILE --to lightning` converts its folder to a file that a Trainer opens."
        )
    if not opened.is_folder:
        return saved
    optimizers = {"optimizer_states": saved["optimizer"]} if "optimizer" in saved else {}
    return {"state_dict": saved["model"], **optimizers, **saved["trainer"]}
