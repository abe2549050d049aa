"""Restores the saved state of param groups that an optimizer gets only after the checkpoint was loaded."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BaseFinetuning
from torch import nn
from torch.optim import Optimizer

from fsdp_core.errors import CheckpointError, CheckpointMismatchError
from fsdp_core.lightning.features.feature import Feature
from fsdp_core.sharding.sharded import Sharded
from fsdp_core.state.optimizer import state_by_name

__all__ = ["LateParamGroups"]


class LateParamGroups(Feature):
    """The saved state of param groups that an optimizer does not hold yet.

    A hook such as ``on_train_start`` may add param groups after the checkpoint was loaded, as it did in the run that
    saved it. Each group gets its saved moments and settings when it is added, and must be there at the optimizer's
    first step: until then nothing is trained and nothing can be saved, so no state is lost.
    """

    def __init__(self) -> None:
        #: By optimizer, the state of the groups that it does not hold yet: ``{"state": …, "param_groups": […]}``.
        self._pending: dict[Optimizer, Mapping[str, Any]] = {}

    def module_sharded(self, trainer: pl.Trainer, sharded: Sharded, *, fitting: bool) -> None:
        """Discard what an earlier fit left, as a fit begins."""
        if fitting:
            for optimizer in self._pending:
                _callbacks_on_added.pop(optimizer, None)
            self._pending.clear()

    def divide(
        self, optimizer: Optimizer, sharded: Sharded, saved: Mapping[str, Any], names_of_others: Collection[str]
    ) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """Divide a saved state into what the optimizer can take now, and what may appear later.

        Args:
            optimizer: The optimizer.
            sharded: The module that it trains.
            saved: From :func:`fsdp_core.state.optimizer_state`, or a plain optimizer's ``state_dict()``.
            names_of_others: The names of parameters that other optimizers hold, which can't appear in this one.

        Returns:
            Two states. The second has the saved groups that may appear later: they consist of parameters of the module,
            none of which an optimizer holds yet. The first has everything else.
        """
        layout = sharded.layout()
        saved = state_by_name(optimizer, layout, saved)
        optimizer_names = {name for group in optimizer.param_groups for name in _names_of(group, sharded)}
        sharded_names = {part.name for parts in layout.values() for part in parts} - set(names_of_others)
        absent = sharded_names - optimizer_names
        present_groups: list[Mapping[str, Any]] = []
        late_groups: list[Mapping[str, Any]] = []
        for group in saved["param_groups"]:
            is_late = bool(group["params"]) and absent.issuperset(group["params"])
            (late_groups if is_late else present_groups).append(group)
        if not late_groups:
            return saved, {}
        late_names = {name for group in late_groups for name in group["params"]}
        present_state = {name: values for name, values in saved["state"].items() if name not in late_names}
        late_state = {name: values for name, values in saved["state"].items() if name in late_names}
        present = {**saved, "state": present_state, "param_groups": present_groups}
        return present, {"state": late_state, "param_groups": late_groups}

    def check(self, optimizer: Optimizer, sharded: Sharded, late: Mapping[str, Any]) -> None:
        """Check that a state fits the parameters, before anything is changed.

        Raises:
            CheckpointMismatchError: A shape differs, or the optimizer keeps no such state.
        """
        if late:
            groups = [{**group, "params": _parameters(sharded, group["params"])} for group in late["param_groups"]]
            with _only_groups(optimizer, groups):
                sharded.load_optimizer_state(optimizer, late, check_only=True)

    def expect(self, optimizer: Optimizer, late: Mapping[str, Any], on_added: Callable[[Optimizer], None]) -> None:
        """Wait for the param groups of a state.

        Args:
            optimizer: The optimizer that is to get them.
            late: The state; nothing is done if it is empty.
            on_added: Called with the optimizer whenever it was given a param group, until it has all of them. The
                function must call :meth:`restore`.
        """
        if late:
            self._pending[optimizer] = late
            _call_when_added(optimizer, on_added)

    def awaits(self, optimizer: Optimizer) -> bool:
        """Whether some of an optimizer's saved param groups are not restored yet."""
        return optimizer in self._pending

    def restore(self, optimizer: Optimizer, sharded: Sharded) -> None:
        """Restore the state of those param groups that the optimizer holds by now.

        Raises:
            CheckpointMismatchError: A group has parameters of several saved groups, or a part of one.
        """
        late = self._pending.get(optimizer)
        if late is None:
            return
        index_by_name = {name: index for index, group in enumerate(late["param_groups"]) for name in group["params"]}
        added_groups: list[dict[str, Any]] = []
        added_indexes: set[int] = set()  # of the saved groups that were added
        for group in optimizer.param_groups:
            names = _names_of(group, sharded)
            first_late_name = next((name for name in names if name in index_by_name), None)
            if first_late_name is None:
                continue
            index = index_by_name[first_late_name]
            saved_names = late["param_groups"][index]["params"]
            if set(names) != set(saved_names):
                raise CheckpointMismatchError(
                    f"a param group of {_listing(names)} was added to {type(optimizer).__name__}, and the checkpoint's "
                    f"has {_listing(saved_names)}.\n"
                    "Add the param groups that it was saved with, each by one call of optimizer.add_param_group()."
                )
            added_groups.append(group)
            added_indexes.add(index)
        if not added_groups:
            return
        saved_groups = [late["param_groups"][index] for index in sorted(added_indexes)]
        added_names = {name for group in saved_groups for name in group["params"]}
        state = {name: values for name, values in late["state"].items() if name in added_names}
        with _only_groups(optimizer, added_groups):
            sharded.load_optimizer_state(optimizer, {"state": state, "param_groups": saved_groups})
        remaining_groups = [group for index, group in enumerate(late["param_groups"]) if index not in added_indexes]
        if remaining_groups:
            remaining_state = {name: values for name, values in late["state"].items() if name not in added_names}
            self._pending[optimizer] = {"state": remaining_state, "param_groups": remaining_groups}
        else:
            del self._pending[optimizer]
            _callbacks_on_added.pop(optimizer, None)

    def unfreeze(self, optimizers: Sequence[Optimizer], sharded: Sharded, trainer: pl.Trainer) -> None:
        """Add the param groups that a ``BaseFinetuning`` callback had added, and unfreeze their parameters.

        The callback itself would do so in ``on_fit_start``, which is too early: Lightning calls that before it loads a
        checkpoint into a sharded module. And it would leave the parameters frozen.
        """
        callbacks = [callback for callback in trainer.callbacks if isinstance(callback, BaseFinetuning)]  # type: ignore[attr-defined]
        if not callbacks:
            return
        for optimizer in optimizers:
            for group in self._pending.get(optimizer, {}).get("param_groups", ()):
                parameters = _parameters(sharded, group["params"])
                BaseFinetuning.make_trainable([m for m in sharded.module.modules() if _holds_any(m, parameters)])
                settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
                optimizer.add_param_group({**settings, "params": parameters})
        for callback in callbacks:
            callback._restarting = False  # else the callback would restore this checkpoint's groups in the next fit

    def check_complete(self, optimizer: Optimizer) -> None:
        """Refuse a step of an optimizer that still lacks param groups.

        Raises:
            CheckpointMismatchError: The optimizer lacks param groups.
        """
        late = self._pending.get(optimizer)
        if late is not None:
            names = [name for group in late["param_groups"] for name in group["params"]]
            raise CheckpointMismatchError(
                f"the checkpoint's optimizer also holds {_listing(names)}, and this {type(optimizer).__name__} doesn't "
                "at its first step.\n"
                "Build the optimizer over the parameters that it was saved with; or add their param groups by "
                "optimizer.add_param_group() in on_train_start, or on_train_epoch_start; or load only the weights."
            )

    def check_saving(self) -> None:
        """Refuse a checkpoint that would lack the state of param groups that have not appeared yet.

        Raises:
            CheckpointError: There are such groups.
        """
        for late in self._pending.values():
            names = [name for group in late["param_groups"] for name in group["params"]]
            raise CheckpointError(
                f"a checkpoint was requested before the optimizer got its parameters {_listing(names)}, whose state "
                "the loaded checkpoint holds: the new one would lack it.\n"
                "Save it after the first step, or add the param groups first."
            )


@contextmanager
def _only_groups(optimizer: Optimizer, groups: Sequence[dict[str, Any]]) -> Iterator[None]:
    """A context in which an optimizer has only these param groups, for functions that restore all that it has.

    It must remain the same object: by it, other code looks up how state is kept (whole on owners, or quantised).
    """
    all_groups = list(optimizer.param_groups)
    state = dict(optimizer.state)
    optimizer.param_groups[:] = groups  # in place: other objects may hold the list
    try:
        yield
    finally:
        optimizer.param_groups[:] = all_groups
        for parameter, values in state.items():  # loading has replaced the state by that of these groups
            optimizer.state.setdefault(parameter, values)


def _names_of(group: Mapping[str, Any], sharded: Sharded) -> list[str]:
    layout = sharded.layout()
    return [part.name for p in group["params"] for part in layout.get(p, ())]


def _parameters(sharded: Sharded, names: Iterable[str]) -> list[nn.Parameter]:
    params_by_name = {part.name: p for p, parts in sharded.layout().items() for part in parts}
    return list(dict.fromkeys(params_by_name[name] for name in names))  # several names may be of one flat parameter


def _holds_any(module: nn.Module, parameters: Sequence[nn.Parameter]) -> bool:
    return any(parameter is p for parameter in module.parameters(recurse=False) for p in parameters)


def _listing(names: Sequence[str]) -> str:
    listing = ", ".join(repr(name) for name in names[:5])
    return listing if len(names) <= 5 else f"{listing} and {len(names) - 5} more"


# -- calls when a group is added ---------------------------------------------------------------------------------------

_callbacks_on_added: WeakKeyDictionary[Optimizer, Callable[[Optimizer], None]] = WeakKeyDictionary()
_torch_add_param_group = Optimizer.add_param_group


def _call_when_added(optimizer: Optimizer, callback: Callable[[Optimizer], None]) -> None:
    """Call a function after each ``add_param_group()`` of an optimizer, or of Lightning's wrapper around it.

    torch has no hook for that call, and Lightning's wrapper looks the method up at the class: so torch's method is
    replaced, once for the process, by one that does nothing more for other optimizers.
    """
    _callbacks_on_added[optimizer] = callback
    if Optimizer.add_param_group is not _add_param_group:
        Optimizer.add_param_group = _add_param_group  # type: ignore[method-assign]


@wraps(_torch_add_param_group)
def _add_param_group(self: Optimizer, param_group: dict[str, Any]) -> None:
    _torch_add_param_group(self, param_group)
    users_optimizer = vars(self).get("_optimizer", self)  # in Lightning's wrapper
    callback = _callbacks_on_added.get(users_optimizer)
    if callback is not None:
        callback(users_optimizer)
