"""Lightning's callbacks over shards: averages and summaries see them correctly, and those that can't are refused."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BaseFinetuning, ModelPruning, ModelSummary, WeightAveraging
from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp_core.errors import UnsupportedCapabilityError
from fsdp_core.lightning.features.feature import Feature
from fsdp_core.lightning.outside_steps.exporting import gather_state
from fsdp_core.sharding.sharded import Sharded
from fsdp_core.state.fqn import clean_name

if TYPE_CHECKING:
    from fsdp_core.lightning.trainer_strategy import ShardedTrainerStrategy

__all__ = ["CallbacksOverShards", "check_finetuning", "check_pruning"]


class CallbacksOverShards(Feature):
    """Lets Lightning's callbacks see the module as it was written, and keep shards.

    Args:
        strategy: The strategy.
    """

    def __init__(self, strategy: ShardedTrainerStrategy) -> None:
        self._strategy = strategy

    def module_sharded(self, trainer: pl.Trainer, sharded: Sharded, *, fitting: bool) -> None:
        _shard_averages(trainer, sharded, full=self._strategy.state_dict_type == "full")
        _summarize_written_shapes(trainer, sharded)


def _shard_averages(trainer: pl.Trainer, sharded: Sharded, *, full: bool) -> None:
    """Shard the copies of the module that weight-averaging callbacks keep, and let the callbacks save and load shards.

    The callback saves and restores state with ``state_dict`` and ``load_state_dict`` of both modules, for which a
    sharding library may return a gathered copy, or fail. On these instances they return and load shards.

    Args:
        trainer: The Trainer with the callbacks; nothing is done without weight averaging.
        sharded: The module.
        full: Whether the saved state of an average is full, on rank 0 only, as that of the module.
    """
    for average in _averages(trainer):
        _retie(average.module, sharded.aliases())
        copy = sharded.backend.shard(average.module)
        copy.strategy_name = sharded.strategy_name
        _exchange_sharded_state(average, "module.", copy, full=full)
        _exchange_sharded_state(average.module, "", copy)
        _exchange_sharded_state(sharded.module, "", sharded)


def _averages(trainer: pl.Trainer) -> Iterator[Any]:
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        average = getattr(callback, "_average_model", None) if isinstance(callback, WeightAveraging) else None
        if average is not None:
            yield average


def _retie(copy: nn.Module, tied: Mapping[str, str]) -> None:
    """Tie again what moving the copy to the device has untied, as a move to an XLA device does."""
    parameters = dict(copy.named_parameters(remove_duplicate=False))
    for further, first in tied.items():
        if further in parameters and first in parameters and parameters[further] is not parameters[first]:
            owner, _, name = further.rpartition(".")
            setattr(copy.get_submodule(owner), name, parameters[first])


def _exchange_sharded_state(module: nn.Module, prefix: str, sharded: Sharded, *, full: bool = False) -> None:
    """Make ``module``, which holds the sharded module under ``prefix``, return and load sharded state."""

    def state_dict(*args: Any, **kwargs: Any) -> dict[str, Any]:
        own_buffers = dict(module.named_buffers(recurse=False)) if prefix else {}
        state = gather_state(sharded) if full else sharded.model_state()
        return {**own_buffers, **{prefix + name: value for name, value in state.items()}}

    def load_state_dict(state: Mapping[str, Any], strict: bool = True, assign: bool = False) -> None:
        named = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
        sharded.load_model_state(named, strict)
        if prefix:
            for name, buffer in module.named_buffers(recurse=False):
                if name in state:
                    buffer.copy_(state[name])

    instance: Any = module
    instance.state_dict = state_dict
    instance.load_state_dict = load_state_dict


def _summarize_written_shapes(trainer: pl.Trainer, sharded: Sharded) -> None:
    """Let the summary callbacks of ``trainer`` count the parameters of the module as it was written.

    The module is already sharded when they run. Of an ``example_input_array``, only sizes can be shown: where
    placeholders stand for parameters, the values that pass through the module have no meaning.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, ModelSummary):
            _summarize_unsharded_view(callback, sharded)


def _summarize_unsharded_view(callback: ModelSummary, sharded: Sharded) -> None:
    summarize = type(callback).on_fit_start

    @wraps(summarize)
    def on_fit_start(trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.strategy.model is not sharded.root:  # the callback is used by another Trainer now
            return summarize(callback, trainer, pl_module)
        with sharded.unsharded_view():
            return summarize(callback, trainer, pl_module)

    instance: Any = callback
    instance.on_fit_start = on_fit_start


def check_finetuning(trainer: pl.Trainer, sharded: Sharded, strategy: str) -> None:
    """Let finetuning callbacks add pieces of parameters, and refuse one that would find no parameters to unfreeze.

    Such a callback unfreezes the parameters that it finds in the user's modules. A library may keep its shards
    elsewhere.

    Args:
        trainer: The Trainer with the callbacks.
        sharded: The module.
        strategy: The name that users type.

    Raises:
        UnsupportedCapabilityError: There is such a callback, and the modules lack some of their parameters.
    """
    finetuning = [callback for callback in trainer.callbacks if isinstance(callback, BaseFinetuning)]  # type: ignore[attr-defined]
    if not finetuning:
        return
    sharded.reshard()
    visible = {clean_name(name): p for name, p in sharded.module.named_parameters(remove_duplicate=False)}
    visible_ids = set(map(id, visible.values()))
    hidden = [name for name in sharded.plan.parameters if name not in visible]
    for parameter, parts in sharded.layout().items():
        if id(parameter) not in visible_ids:
            hidden += [part.name for part in parts]
    if hidden:
        raise UnsupportedCapabilityError(
            f"{type(finetuning[0]).__name__} can't be used with {strategy!r} as it is: it unfreezes the parameters "
            f"that it finds in modules, and {hidden[0]!r} is kept elsewhere here.\n"
            "Give the optimizer all parameters in configure_optimizers(), and freeze and unfreeze them with "
            "requires_grad_() there and in configure_model(); or use a strategy that keeps sharded parameters in "
            "their modules."
        )
    layout = sharded.layout()
    has_pieces = any(part.range is not None for parts in layout.values() for part in parts)
    meshes = {getattr(parameter, "device_mesh", None) for parameter in layout}
    if has_pieces or len(meshes) > 1:  # torch compares no DTensors of several meshes, and none with plain tensors
        _optimizers_of_pieces.update(trainer.optimizers)
        BaseFinetuning.filter_on_optimizer = staticmethod(_filter_on_optimizer)  # type: ignore[method-assign]


#: Optimizers for which :func:`_filter_on_optimizer` replaces Lightning's method.
_optimizers_of_pieces: WeakSet[Optimizer] = WeakSet()
_original_filter = BaseFinetuning.filter_on_optimizer


@wraps(_original_filter)
def _filter_on_optimizer(optimizer: Optimizer, params: Iterable[Tensor]) -> list[Any]:
    """Return the parameters that an optimizer does not hold, where it holds pieces of them.

    Lightning's method compares values. Two pieces may be equal on one rank, or both empty, though their parameters
    differ: that rank would then not train its pieces. Nor can values of DTensors of several meshes be compared.
    """
    plain = getattr(optimizer, "_optimizer", optimizer)  # Lightning's wrapper has the user's there
    if plain not in _optimizers_of_pieces:
        return _original_filter(optimizer, params)
    optimizer_params = {id(p) for group in plain.param_groups for p in group["params"]}
    return [p for p in params if id(p) not in optimizer_params]


def check_pruning(trainer: pl.Trainer, strategy: str) -> None:
    """Refuse a callback that would prune each rank's shards separately, and replace them without the optimizer.

    Args:
        trainer: The Trainer with the callbacks.
        strategy: The name that users type.

    Raises:
        UnsupportedCapabilityError: There is such a callback.
    """
    pruning = [callback for callback in trainer.callbacks if isinstance(callback, ModelPruning)]  # type: ignore[attr-defined]
    if pruning:
        raise UnsupportedCapabilityError(
            f"{type(pruning[0]).__name__} can't be used with {strategy!r}: it chooses among elements of whole weights, "
            "and replaces them by masks and parameters of its own, but each rank has only a shard of a weight.\n"
            "Leave it out, and prune what was trained: load the checkpoint in one process with "
            "load_from_checkpoint(), and use torch.nn.utils.prune there. To prune while training, use strategy='ddp'."
        )
