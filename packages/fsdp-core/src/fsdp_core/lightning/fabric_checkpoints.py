"""``Fabric.save`` and ``Fabric.load``: the user's dict of objects, to a sharded folder or a full file and back."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp_core import checkpoint as checkpoints
from fsdp_core.checkpoint.collective import run_on_all
from fsdp_core.checkpoint.format.state_paths import join_path
from fsdp_core.checkpoint.left_out.restoring import has_left_out, with_base
from fsdp_core.checkpoint.storage.joined_folder import Paths, normalize_paths, shown_paths
from fsdp_core.errors import CheckpointMismatchError, MissingKeyError, OptimizerMismatchError
from fsdp_core.lightning.checkpoints.begun_accumulation import AccumulatedGradients
from fsdp_core.lightning.checkpoints.full.file import gather_full
from fsdp_core.lightning.checkpoints.full.layout import as_trainers_file, number_parameters
from fsdp_core.lightning.checkpoints.local_shards import refuse_local_shards
from fsdp_core.lightning.checkpoints.sharded_or_full import SaveTarget, read_checkpoint, write_file, write_folder
from fsdp_core.lightning.loaders.fabric_loaders import is_left_out, is_loader, load_loader, loader_state
from fsdp_core.lightning.outside_steps.forwarding import sharded_in
from fsdp_core.lightning.outside_steps.redirection import outside_inference_mode
from fsdp_core.sharding.sharded import Sharded
from fsdp_core.state.fqn import aliases
from fsdp_core.state.random_state import RandomState, with_runtime

if TYPE_CHECKING:
    from fsdp_core.lightning.fabric_strategy import ShardedFabricStrategy

__all__ = ["load_checkpoint", "load_module", "module_state", "owner_of", "save_checkpoint"]

_INSTEAD = 'Give the objects themselves: fabric.save(path, {"model": model, "optimizer": optimizer}).'


def owner_of(optimizer: Optimizer, roots: Sequence[Sharded]) -> Sharded:
    """Find the sharded root whose parameters an optimizer holds.

    Raises:
        OptimizerMismatchError: None does, or more than one.
    """
    optimizer_params = {p for group in optimizer.param_groups for p in group["params"]}
    owners = [root for root in roots if not optimizer_params.isdisjoint(root.layout())]
    if len(owners) == 1:
        return owners[0]
    if not owners:
        raise OptimizerMismatchError(
            f"{type(optimizer).__name__} holds no parameter of a model that was set up.\n"
            "Write `model, optimizer = fabric.setup(model, optimizer)` before saving or loading."
        )
    raise OptimizerMismatchError(
        f"{type(optimizer).__name__} holds parameters of {len(owners)} models, whose names may be the same.\n"
        "Use one optimizer per model, or put the models into one nn.ModuleDict and set that up."
    )


@outside_inference_mode()
def module_state(module: nn.Module) -> dict[str, Any]:
    """The state of a module, whether it was set up or not."""
    sharded = sharded_in(module)
    return module.state_dict() if sharded is None else sharded.model_state()


@outside_inference_mode()
def load_module(module: nn.Module, state: Mapping[str, Any], strict: bool, *, check_only: bool = False) -> None:
    """Restore a module, whether it was set up or not; or, with ``check_only``, raise if that would fail."""
    sharded = sharded_in(module)
    if sharded is None:
        _restore_unsharded(module, state, strict, check_only=check_only)
    else:
        sharded.load_model_state(state, strict, check_only=check_only)


@outside_inference_mode()
def save_checkpoint(
    strategy: ShardedFabricStrategy,
    path: str | Path,
    state: dict[str, Any],
    storage_options: Any,
    filters: dict[str, Callable[[str, Any], bool]],
) -> None:
    """Save a dict of modules, optimizers, stateful objects and plain data. All ranks must call it.

    Args:
        strategy: Its backend, runtime and kind of checkpoint.
        path: A folder for sharded checkpoints, a file for full ones.
        state: The user's objects by key.
        storage_options: For the ``CheckpointIO`` that writes full checkpoints.
        filters: By key of ``state``: which names of its state to keep.
    """
    strategy.check_saving(strategy.roots)
    target = strategy.save_target(path)
    with strategy.frozen_parameters.timed_save(), strategy.steps.gradient_guard.while_off():
        _write(strategy, target, state, storage_options, filters)
    if target.is_reported:
        strategy.wait_for_saves()


def _write(
    strategy: ShardedFabricStrategy,
    target: SaveTarget,
    state: dict[str, Any],
    storage_options: Any,
    filters: dict[str, Callable[[str, Any], bool]],
) -> None:
    async_saves = strategy.async_saves
    if async_saves is not None:
        async_saves.wait()  # before memory is allocated for this one
    _warn_of_gradients(strategy, state)
    kept_objects = {key: obj for key, obj in state.items() if not is_left_out(key, obj, strategy.runtime)}
    converted: dict[str, Any] = {}
    tied_paths: dict[str, str] = {}
    base_source = None
    for key, obj in kept_objects.items():
        own_value = value = _state_of(strategy, key, obj)
        if key in filters and isinstance(value, dict):
            value = {name: inner for name, inner in value.items() if filters[key](name, inner)}
        if isinstance(obj, nn.Module):
            sharded = sharded_in(obj)
            first_names: Mapping[str, str] = {}
            if key not in filters:  # a filter may drop the name that a tensor is saved under
                first_names = aliases(obj) if sharded is None else sharded.aliases()
            tied_paths |= {join_path(key, alias): join_path(key, name) for alias, name in first_names.items()}
            if sharded is not None:
                value, source = strategy.frozen_parameters.leave_out(sharded, value, own_value, first_names)
                base_source = base_source or source
        converted[key] = value
    # by path in the state
    kinds = {
        join_path(key): "model" if isinstance(obj, nn.Module) else "optimizer"
        for key, obj in kept_objects.items()
        if isinstance(obj, nn.Module | Optimizer)
    }
    plain_data = {key: value for key, value in converted.items() if join_path(key) not in kinds}
    refuse_local_shards(plain_data, strategy.roots, strategy.optimizers, strategy.runtime, _INSTEAD)
    if strategy.state_dict_type == "full":
        full_state = gather_full(converted, strategy.backend)
        for key, value in full_state.items():
            if kinds.get(join_path(key)) == "optimizer":
                full_state[key] = number_parameters(value)
        write_file(
            strategy,
            target.path,
            full_state,
            gathered_from=converted,
            storage_options=storage_options,
            async_saves=async_saves,
        )
        return
    write_folder(
        strategy,
        target,
        converted,
        storage_options=storage_options,
        async_saves=async_saves,
        kinds=kinds,
        aliases=tied_paths,
        base_source=base_source,
    )


def _state_of(strategy: ShardedFabricStrategy, key: str, obj: Any) -> Any:
    """What a checkpoint holds of one of the user's objects."""
    if isinstance(obj, nn.Module):
        return module_state(obj)
    if isinstance(obj, Optimizer):
        return owner_of(obj, strategy.roots).optimizer_state(obj)
    if is_loader(obj):
        return loader_state(key, obj, strategy.runtime)
    if isinstance(obj, RandomState):
        obj = with_runtime(obj, strategy.runtime)
    return obj.state_dict() if callable(getattr(obj, "state_dict", None)) else obj


def _warn_of_gradients(strategy: ShardedFabricStrategy, state: dict[str, Any]) -> None:
    """Warn of accumulated gradients that are not saved."""
    modules_with_gradients = [obj.module for obj in state.values() if isinstance(obj, AccumulatedGradients)]
    models = [obj for obj in state.values() if isinstance(obj, nn.Module)]
    roots = [root for root in strategy.accumulating if any(sharded_in(model) is root for model in models)]
    forgotten = [root for root in roots if not any(root.module is module for module in modules_with_gradients)]
    if forgotten and strategy.runtime.rank == 0:
        warnings.warn(
            "this checkpoint is saved between the micro-batches of a step, without the gradients that they have "
            "accumulated: a run that resumes from it lacks them.\n"
            "Save after optimizer.step(), or put fsdp_core.AccumulatedGradients(model) next to the model in the state.",
            stacklevel=2,
        )


@outside_inference_mode()
def load_checkpoint(
    strategy: ShardedFabricStrategy, path_or_paths: Paths, state: Any, strict: bool, weights_only: bool | None
) -> dict[str, Any]:
    """Restore what :func:`save_checkpoint` saved, in place.

    Args:
        strategy: Its backend and models.
        path_or_paths: A sharded folder or a full file, which is detected; or several, the places of a scattered save.
        state: The user's objects by key; a module or an optimizer alone, whose state is the whole checkpoint; or
            nothing, to get everything back.
        strict: Whether every key must exist, and the FQNs in modules must match.
        weights_only: ``False`` lets a full file execute code.

    Returns:
        What was not restored into ``state``. Tensors of models and optimizers are full if everything was requested,
        and otherwise :class:`~fsdp_core.checkpoint.SavedTensor` handles, whose ``full()`` reads them.

    Raises:
        MissingKeyError: A key does not exist.
        CheckpointMismatchError: A name, shape or dtype doesn't fit.
    """
    strategy.wait_for_saves()
    with strategy.steps.gradient_guard.while_off():
        path = strategy.agree_on_path(normalize_paths(path_or_paths), "load")
        return _load(strategy, path, state, strict, weights_only)


def _load(
    strategy: ShardedFabricStrategy, path: Paths, state: Any, strict: bool, weights_only: bool | None
) -> dict[str, Any]:
    saved = read_checkpoint(strategy, path, weights_only).state
    if isinstance(state, dict) and "state_dict" in state and "state_dict" not in saved:
        saved = as_trainers_file(saved) or saved  # a Trainer's folder, asked for by the keys of a Trainer's file
    if isinstance(state, nn.Module | Optimizer):
        if isinstance(state, nn.Module):
            saved = _with_left_out(strategy, state, saved)
        _restore(strategy, state, saved, strict)
        return {}
    is_everything_returned = state is None
    state = {} if state is None else state
    missing = [key for key in state if key not in saved and not is_left_out(key, state[key], strategy.runtime)]
    if strict and missing:  # is_left_out(): saves leave such a loader out
        raise MissingKeyError(
            f"{shown_paths(path)} holds no {missing[0]!r}; it holds {', '.join(map(repr, saved))}.\n"
            "Load only keys that it holds, or load with strict=False."
        )
    saved_keys = [key for key in state if key in saved]
    modules_first = sorted(saved_keys, key=lambda key: not isinstance(state[key], nn.Module))
    modules = {key: state[key] for key in modules_first if isinstance(state[key], nn.Module)}
    saved = {**saved, **{key: _with_left_out(strategy, module, saved[key]) for key, module in modules.items()}}
    if strategy.frozen_parameters.base is not None:
        saved = with_base(saved, strategy.frozen_parameters.base, strategy.runtime)

    def compare_all() -> None:
        for key in modules_first:
            _restore(strategy, state[key], saved[key], strict, check_only=True)

    # all objects are compared before the first is changed
    run_on_all(strategy.runtime, f"comparing {shown_paths(path)} with what it is loaded into", compare_all)
    for key in modules_first:
        is_restored = _restore(strategy, state[key], saved[key], strict)
        if not is_restored:
            state[key] = _materialize(saved[key])
    # the full state of an optimizer that was not requested may not fit on one rank
    remaining = {key: value for key, value in saved.items() if key not in state}
    return _materialize(remaining) if is_everything_returned else remaining


def _with_left_out(strategy: ShardedFabricStrategy, module: nn.Module, saved: Any) -> Any:
    """A module's saved state, in which what the checkpoint leaves out is there. All ranks must call it."""
    sharded = sharded_in(module)
    if sharded is not None:
        return strategy.frozen_parameters.restore(sharded, saved)
    if not has_left_out(saved):
        return saved
    return strategy.frozen_parameters.restore_unsharded(saved, module.state_dict(), strategy.runtime)


def _restore(strategy: ShardedFabricStrategy, obj: Any, value: Any, strict: bool, *, check_only: bool = False) -> bool:
    """Restore one object in place, and return whether that is possible: plain data can only be replaced."""
    if isinstance(obj, nn.Module):
        load_module(obj, value, strict, check_only=check_only)
    elif isinstance(obj, Optimizer):
        owner_of(obj, strategy.roots).load_optimizer_state(obj, value, check_only=check_only)
    elif is_loader(obj):
        load_loader(obj, _materialize(value), strategy.runtime, check_only=check_only)
    elif callable(getattr(obj, "load_state_dict", None)):
        if not check_only:
            if isinstance(obj, RandomState):
                obj = with_runtime(obj, strategy.runtime)
            # each rank reads only its own gradients
            obj.load_state_dict(value if isinstance(obj, AccumulatedGradients) else _materialize(value))
    else:
        return False
    return True


def _restore_unsharded(module: nn.Module, value: Mapping[str, Any], strict: bool, *, check_only: bool) -> None:
    """Restore a module that was not set up, as plain Fabric does.

    Args:
        module: The module.
        value: Its state by name.
        strict: Whether FQNs must match exactly.
        check_only: Whether only to check, without changing anything.

    Raises:
        CheckpointMismatchError: It does not fit, or the module has no memory yet.
    """
    own_state = module.state_dict()
    empty = [name for name, tensor in own_state.items() if isinstance(tensor, Tensor) and tensor.is_meta]
    if empty:
        raise CheckpointMismatchError(
            f"{type(module).__name__} has no memory yet to load {empty[0]!r} into: it was built on the meta device.\n"
            "Write `model = fabric.setup(model)` first, and load then."
        )
    saved_tensors = {
        name: tensor for name, tensor in value.items() if isinstance(tensor, Tensor | checkpoints.SavedTensor)
    }
    own_tensors = {name: tensor for name, tensor in own_state.items() if isinstance(tensor, Tensor)}
    checkpoints.fill_all(own_tensors, saved_tensors, strict=strict, cast=not strict, check_only=check_only)
    names_of_extra_state = [name for name in value if name in own_state and name not in own_tensors]
    if names_of_extra_state and not check_only:
        module.load_state_dict({name: _materialize(value[name]) for name in names_of_extra_state}, strict=False)


def _materialize(value: Any) -> Any:
    """Replace handles on saved tensors by the tensors."""
    if isinstance(value, dict):
        return {k: _materialize(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_materialize(v) for v in value]
    if type(value) is tuple:
        return tuple(_materialize(v) for v in value)
    return value.full() if isinstance(value, checkpoints.SavedTensor) else value
