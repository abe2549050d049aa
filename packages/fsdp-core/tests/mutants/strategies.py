"""The strategy classes of the mutants: ``trainer_<fault>`` and ``fabric_<fault>``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from fsdp_core.errors import NonFiniteGradientError
from fsdp_core.lightning.checkpoints.sharded_or_full import SaveTarget
from fsdp_core.sharding.plan import ShardingPlan
from fsdp_core.sharding.sharded import Sharded
from fsdp_core.testing.loopback.backend import LoopbackBackend
from fsdp_core.testing.loopback.fabric import LoopbackFabricStrategy
from fsdp_core.testing.loopback.trainer import LoopbackTrainerStrategy
from mutants.backends import BACKENDS
from mutants.faults import CAUGHT


class ForgetsRandomNumbers(LoopbackTrainerStrategy):
    """Goes on with the random numbers of the new run."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        self.features.exact_resume._saved_random_state = None


class SavesWhatChanges(LoopbackTrainerStrategy):
    """Writes in the background what training goes on to change."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.async_saves is not None:
            staging: Any = self.async_saves._staging
            staging.copy = lambda plan, rank, deferred=None: plan


class DoesAll(LoopbackTrainerStrategy):
    """Lets nothing be refused that it does not declare."""

    def setup(self, trainer: pl.Trainer) -> None:
        self.strategy_name = "of no plugin"
        super().setup(trainer)


class TakesPolicy(LoopbackTrainerStrategy):
    """Takes a policy of activation checkpointing, and does nothing about it."""

    def __init__(self, *args: Any, activation_checkpointing_policy: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


class ComparesNothing(LoopbackFabricStrategy):
    """Takes the ranks' models for the same."""

    def _compare_between_ranks(self, module: nn.Module, plan: ShardingPlan | None) -> None: ...


class ShowsPieces(LoopbackTrainerStrategy):
    """Lets a rank's pieces be read as if they were the whole."""

    def _shard(self, module: nn.Module) -> Sharded:
        sharded = super()._shard(module)
        for one in sharded.root.modules():
            vars(one).pop("state_dict", None)
        return sharded


class TakesLateParameters(LoopbackFabricStrategy):
    """Takes parameters that came after sharding for some that stay whole."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        optimizers: Any = self.sharded_optimizers
        optimizers.refuse_late = lambda *_: None


class LooksAtOwnGradients(LoopbackFabricStrategy):
    """Stops before a step on those ranks alone whose own gradients are not finite."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        steps: Any = self.steps
        steps.check_gradients = self.check_own_gradients

    def check_own_gradients(self, optimizer: Any) -> None:
        held = [p for group in optimizer.param_groups for p in group["params"]]
        if not all(bool(p.grad.isfinite().all()) for p in held if p.grad is not None):
            raise NonFiniteGradientError("before step 2 of this run, 1 parameter of SGD.\nset_detect_anomaly")


class GoesOn(LoopbackFabricStrategy):
    """Notes a signal, and tells no rank of it."""

    def told_to_end(self) -> bool:
        return super().told_to_end() and False


class StepsWithoutReduction(LoopbackFabricStrategy):
    """Takes steps whose last backward pass has not reduced what it computed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        control: Any = self._backward_sync_control
        control.check_reduced = lambda *_: None


class GuardsNothing(LoopbackFabricStrategy):
    """Lets torch compute norms of a rank's pieces of gradients."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        gradients: Any = self.steps.gradient_guard
        gradients.on = lambda: None


class SavesApart(LoopbackFabricStrategy):
    """Saves at the path that each rank names, as if all of them were one."""

    def save_target(self, path: Any) -> SaveTarget:
        return SaveTarget(str(path))


class KeepsItsModels(LoopbackFabricStrategy):
    """Keeps all models that it has set up, until it goes itself."""

    def setup_module(self, module: nn.Module) -> nn.Module:
        vars(self).setdefault("kept", []).append(module)
        return super().setup_module(module)


class ComparesRatesOnce(LoopbackTrainerStrategy):
    """Compares no learning rates after the first step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        signals: Any = self.features.preemption._signals
        agree = signals.agree
        signals.agree = lambda is_last, *_: [*agree(is_last), 0, 0]


class PadsPredictions(LoopbackTrainerStrategy):
    """Repeats samples until each rank has as many to predict, as for a training."""

    def process_dataloader(self, dataloader: Any) -> Any:
        sampler: Any = DistributedSampler(dataloader.dataset, self.world_size, self.global_rank, shuffle=False)
        padded = DataLoader(dataloader.dataset, batch_size=dataloader.batch_size, sampler=sampler)
        assert self.lightning_module is not None
        return super().process_dataloader(padded if self.lightning_module.trainer.predicting else dataloader)


class CountsOwnTokens(LoopbackFabricStrategy):
    """Weighs a loss by the tokens of each rank alone."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        token_means: Any = self.token_means
        token_means.sum_over_ranks = lambda tensor: tensor * 2


class WeighsMicroBatchesAlike(LoopbackTrainerStrategy):
    """Leaves the gradients of a step's micro-batches relative to the tokens of the first."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        token_means: Any = self.token_means
        token_means.after_backward = lambda: None


class ForgetsTokens(LoopbackTrainerStrategy):
    """Resumes amid a step without the numbers of tokens that its gradients are of."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        token_means: Any = self.token_means
        token_means.load_state = lambda *_: None


#: Where the fault is not the backend's.
FABRICS: dict[str, type[LoopbackFabricStrategy]] = {
    "ranks_not_compared": ComparesNothing,
    "late_parameters_taken": TakesLateParameters,
    "nonfinite_local": LooksAtOwnGradients,
    "signal_not_told": GoesOn,
    "steps_without_reduction": StepsWithoutReduction,
    "pieces_unguarded": GuardsNothing,
    "saved_apart": SavesApart,
    "models_kept": KeepsItsModels,
    "tokens_of_own": CountsOwnTokens,
}
TRAINERS: dict[str, type[LoopbackTrainerStrategy]] = {
    "random_numbers_not_restored": ForgetsRandomNumbers,
    "async_save_not_copied": SavesWhatChanges,
    "clip_by_norm_unclaimed": DoesAll,
    "checkpointing_claimed": TakesPolicy,
    "option_unclaimed": TakesPolicy,
    "pieces_shown": ShowsPieces,
    "rates_not_compared": ComparesRatesOnce,
    "predictions_padded": PadsPredictions,
    "micro_batches_weighed_alike": WeighsMicroBatchesAlike,
    "tokens_not_restored": ForgetsTokens,
}

for _fault in CAUGHT:
    for _front_end, _base in (
        ("trainer", TRAINERS.get(_fault, LoopbackTrainerStrategy)),
        ("fabric", FABRICS.get(_fault, LoopbackFabricStrategy)),
    ):
        _name, _backend = f"{_front_end}_{_fault}", BACKENDS.get(_fault, LoopbackBackend)
        _members = {"__module__": __name__, "strategy_name": f"loopback_{_fault}", "backend_class": _backend}
        globals()[_name] = type(_name, (_base,), _members)
