"""What a stage refuses before anything is sharded, rather than an hour later."""

from __future__ import annotations

from typing import TYPE_CHECKING

import lightning.pytorch as pl

from fsdp_core.errors import UnsupportedCapabilityError
from fsdp_core.lightning.capability_checks import check_loop
from fsdp_core.lightning.checkpoints.hyper_parameters import check_hyper_parameters
from fsdp_core.lightning.checkpoints.shared_disk import check_all_resume, check_checkpoint_folders
from fsdp_core.lightning.features.callbacks_over_shards import check_pruning
from fsdp_core.lightning.features.feature import Feature
from fsdp_core.lightning.launchers.ray_train import check_reports
from fsdp_core.lightning.loaders.split_batches import refuse_loader_steps
from fsdp_core.lightning.private import logs_graph

if TYPE_CHECKING:
    from fsdp_core.lightning.trainer_strategy import ShardedTrainerStrategy

__all__ = ["FitChecks"]


class FitChecks(Feature):
    """Refuses loops, callbacks, loggers, steps and folders that do not go with the strategy.

    Args:
        strategy: The strategy.
    """

    def __init__(self, strategy: ShardedTrainerStrategy) -> None:
        self._strategy = strategy

    def setup(self, trainer: pl.Trainer, *, fitting: bool) -> None:
        strategy = self._strategy
        name = strategy.strategy_name
        module = trainer.lightning_module
        if fitting:
            check_loop(name, strategy.state_dict_type, trainer, module)
            check_pruning(trainer, name)
            _check_loggers(name, trainer, module)
            if strategy.async_saves is not None:
                check_reports(trainer.callbacks, name)  # type: ignore[attr-defined]
            check_all_resume(strategy.resumes_from, strategy.runtime)
        if strategy.backend.sequence is not None:
            refuse_loader_steps(module, name)
        if fitting and trainer.checkpoint_callbacks and strategy.state_dict_type == "sharded":
            # fail now rather than at the first checkpoint, which may be hours away
            check_hyper_parameters(module, "hyper_parameters")
            datamodule = getattr(trainer, "datamodule", None)
            if datamodule is not None:
                check_hyper_parameters(datamodule, "datamodule_hyper_parameters")
            if strategy.num_nodes > 1 and not strategy.scattered_save:
                check_checkpoint_folders(trainer, strategy.runtime)


def _check_loggers(strategy: str, trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Refuse a logger that runs the sharded model on rank 0 alone, which would wait for the other ranks.

    Raises:
        UnsupportedCapabilityError: There is one, there are several ranks, and the module has an example input.
    """
    graph_logger = next((logger for logger in trainer.loggers if logs_graph(logger)), None)
    if graph_logger is not None and trainer.world_size > 1 and module.example_input_array is not None:
        raise UnsupportedCapabilityError(
            f"{type(graph_logger).__name__}(log_graph=True) runs the model on rank 0 alone to draw its graph, and "
            f"{strategy!r} gathers its layers from all ranks.\n"
            "Leave log_graph out, and draw the graph of a model that is not sharded: "
            "logger.experiment.add_graph(model, example) in a script of its own."
        )
