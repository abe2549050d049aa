"""How a strategy saves under both front ends: where ranks save, in which form, and when they may."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterable
from typing import Any, Literal, TypeVar

from lightning.fabric.plugins import CheckpointIO

from fsdp_core.checkpoint.async_save import AsyncSaves
from fsdp_core.checkpoint.storage.joined_folder import shown_paths
from fsdp_core.errors import CheckpointError, ShardingError, UnsupportedCapabilityError
from fsdp_core.lightning.capability_checks import check_checkpoint
from fsdp_core.lightning.checkpoints.frozen_parameters import FrozenParameters
from fsdp_core.lightning.checkpoints.sharded_or_full import SaveTarget
from fsdp_core.lightning.outside_steps.redirection import is_inside_forward
from fsdp_core.lightning.strategy_ranks import StrategyRanks
from fsdp_core.sharding.sharded import Sharded
from fsdp_core.state.full_tensor import check_not_gathered

__all__ = ["SavingStrategy"]

_Path = TypeVar("_Path", str, str | list[str])

_log = logging.getLogger(__name__)


class SavingStrategy(StrategyRanks):
    """A base of every strategy's class: saves. Comes before Lightning's class in the MRO.

    Attributes:
        state_dict_type: ``"sharded"`` for a folder, ``"full"`` for one file.
        async_saves: Writes checkpoints in the background; ``None`` if a save returns once everything is written.
        sequential_save: Whether the ranks of a host write their shards of a checkpoint one after another.
        scattered_save: Whether each rank saves a checkpoint at a path of its own.
        frozen_parameters: What is left out of checkpoints since it was not trained.
    """

    state_dict_type: Literal["sharded", "full"]
    async_saves: AsyncSaves | None
    sequential_save: bool = False
    scattered_save: bool = False
    frozen_parameters: FrozenParameters
    _checkpoint_io: CheckpointIO | None

    def _take_saving_options(self) -> None:
        options = self.options
        self.state_dict_type, self.scattered_save = options.state_dict_type, options.scattered_save
        self.async_saves = AsyncSaves(self.runtime) if options.async_save else None
        self.frozen_parameters = FrozenParameters(options, type(self).__name__)

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """Writes full files; the user's own ``CheckpointIO`` also reads and removes them."""
        adapter: Any = super()  # Lightning's class, which comes after this one
        io: CheckpointIO = adapter.checkpoint_io
        return io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        if self.state_dict_type == "sharded":
            raise UnsupportedCapabilityError(
                f"{type(io).__name__} can't write sharded checkpoints, which every rank writes its own part of.\n"
                f"Leave it out, or write strategy={type(self).__name__}(state_dict_type='full')."
            )
        self._checkpoint_io = io

    def refuse_storage_options(self, storage_options: Any) -> None:
        """Raise if options for a ``CheckpointIO`` are given, but none writes the checkpoint."""
        if storage_options is not None:
            raise UnsupportedCapabilityError(
                "storage_options can't be used with sharded checkpoints, which no CheckpointIO writes.\n"
                f"Leave them out, or write strategy={type(self).__name__}(state_dict_type='full')."
            )

    def check_saving(self, roots: Iterable[Sharded]) -> None:
        """Refuse a checkpoint inside a step, or of a form that the strategy does not declare.

        Args:
            roots: The modules that it holds.

        Raises:
            ShardingError: A root is gathered.
            UnsupportedCapabilityError: The strategy does not declare the form.
        """
        for sharded in roots:
            check_not_gathered(sharded.root, "a checkpoint")
            if is_inside_forward(sharded.root):
                raise ShardingError(
                    "a checkpoint was requested inside a step, whose forward pass needs the gathered parameters.\n"
                    "Save it in a hook after the step, such as on_train_batch_end()."
                )
        form = self.state_dict_type
        check_checkpoint(self.strategy_name, form, f"a checkpoint with state_dict_type={form!r}")

    def wait_for_saves(self) -> None:
        """Wait until all requested checkpoints are complete, also with ``async_save=True``. All ranks must call it.

        Raises:
            CheckpointError: A checkpoint could not be saved.
        """
        if self.async_saves is not None:
            self.async_saves.wait()

    def _let_saves_finish(self, exception: BaseException) -> None:
        """Wait for pending saves; a failure is added as a note to ``exception``, which is the one to raise."""
        try:
            self.wait_for_saves()
        except CheckpointError as failure:
            exception.add_note(f"{type(failure).__name__}: {failure}")
            if not isinstance(exception, Exception):  # an interrupt, whose notes are not shown
                _log.error("%s", failure)

    def save_target(self, path: Any) -> SaveTarget:
        """Where this rank saves a checkpoint: at rank 0's path, unless saves are scattered. All ranks must call it.

        Under Ray Train, ranks that name one checkpoint in different folders save apart: each reports its own folder,
        and Ray joins them.
        """
        own_path = os.fspath(path)
        if self.scattered_save:
            return SaveTarget(own_path, scattered=True)
        if self._worker is not None:
            folder, name = os.path.split(own_path)
            first_folder, first_name = os.path.split(self.runtime.broadcast_object(own_path, src=0))
            other_folders, other_names = self.runtime.total([folder != first_folder, name != first_name])
            if other_folders and not other_names:
                if self.state_dict_type == "sharded":
                    return SaveTarget(own_path, scattered=True, is_reported=True)
                return SaveTarget(os.path.join(first_folder, name))  # one file, which rank 0 reports
        return SaveTarget(self.agree_on_path(own_path, "save to"))

    def agree_on_path(self, paths: _Path, action: str) -> _Path:
        """Return the path, or paths, that rank 0 was given, and warn if this rank's differ. All ranks must call it."""
        first: _Path = self.runtime.broadcast_object(paths, src=0)
        if _make_absolute(first) != _make_absolute(paths):
            alternative = " scattered_save=True lets each rank save at its own." if action == "save to" else ""
            warnings.warn(
                f"{self.strategy_name}: rank {self.runtime.rank} was told to {action} {shown_paths(paths)}, and rank 0 "
                f"to {action} {shown_paths(first)}: all ranks take part in one checkpoint, at rank 0's path.\n"
                "Give all ranks the same path: leave what differs between them, such as the rank or a metric that was "
                f"logged without sync_dist=True, out of its name.{alternative}",
                stacklevel=2,
            )
        return first


def _make_absolute(paths: str | list[str]) -> list[str]:
    listed = [paths] if isinstance(paths, str) else paths
    return [path if "://" in path else os.path.abspath(path) for path in listed]
