"""The optimizers of a strategy: they hold shards, also of what is added to them later, and are compared over ranks."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, cast
from weakref import WeakKeyDictionary, WeakSet, ref

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from fsdp_core.gradients.zero_grad import on_zero_grad
from fsdp_core.sharding.agreement.same_optimizers import check_same_optimizers
from fsdp_core.sharding.agreement.same_replicas import check_same_replicas
from fsdp_core.sharding.refusals.files_of_shards import refuse_files_of_optimizer
from fsdp_core.sharding.refusals.late_parameters import refuse_late
from fsdp_core.sharding.sharded import Sharded

if TYPE_CHECKING:
    from fsdp_core.lightning.strategy import ShardedStrategy

__all__ = ["ShardedOptimizers"]

#: The parameters that optimizers held when they were last checked.
_last_params: WeakKeyDictionary[Optimizer, list[ref[Tensor]]] = WeakKeyDictionary()


#: A model, and those of its parameters that an optimizer holds, by the user's names.
_ComparedParams = tuple["ref[Sharded]", list[tuple[str, "ref[Tensor]"]]]


class ShardedOptimizers:
    """Makes optimizers hold shards.

    Args:
        strategy: The strategy.

    Attributes:
        unreduced: The roots with unreduced backward passes since the last step.
    """

    def __init__(self, strategy: ShardedStrategy) -> None:
        self._strategy = strategy
        self.unreduced: WeakSet[Sharded] = WeakSet()
        self._steps_compared: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._compared_params: WeakKeyDictionary[Optimizer, list[_ComparedParams]] = WeakKeyDictionary()

    def take(self, optimizers: Sequence[Optimizer], roots: Sequence[Sharded]) -> None:
        """Compare new optimizers over all ranks, and make them hold shards. All ranks must call it."""
        check_same_optimizers(self._strategy.runtime, optimizers)
        self._rebind(optimizers, roots)

    def follow_added_parameters(self, optimizer: Optimizer, roots: Sequence[Sharded]) -> None:
        """Make an optimizer hold shards of the parameters that it was given since the last check, or refuse these."""
        current = _parameters_of(optimizer)
        previous = _last_params.get(optimizer, [])
        if len(current) != len(previous) or not all(map(operator.is_, current, map(operator.call, previous))):
            name = type(optimizer).__name__
            self._strategy.runtime.rendezvous(f"a change of the parameters of {name}, of which all ranks hold parts,")
            self._rebind([optimizer], roots)

    def refuse_late(self, sharded: Sharded, optimizers: Iterable[Optimizer] = ()) -> None:
        """Refuse parameters that were added to the module after it was sharded."""
        with sharded.unsharded_view():
            refuse_late(sharded.module, sharded.plan.names, optimizers, self._strategy.creation_hint)

    def check_first_gradients(self, optimizer: Optimizer, roots: Sequence[Sharded]) -> None:
        """Let roots check the gradients of an optimizer's first step. All ranks must call it.

        With tensor parallelism, those of the second, fourth, eighth step and so on too, and of every 1,024th: a
        gradient may be zero at first, behind a gate or a layer that is initialised to zeros, parameters may be
        unfrozen or added later, and one rank may draw a random number that its peers do not. Before these steps,
        replicas of parameters are compared as well, whatever the mesh.
        """
        runtime = self._strategy.runtime
        optimizer = getattr(optimizer, "_optimizer", optimizer)  # Lightning's wrapper around the user's
        step = self._steps_compared[optimizer] = self._steps_compared.get(optimizer, 0) + 1
        is_due = step & (step - 1) == 0 or step % 1024 == 0
        if not is_due or runtime.world_size == 1:
            return
        when = f"before step {step} of {type(optimizer).__name__}"
        if step > 1 and runtime.mesh.tensor_parallel == 1:
            for root_ref, params_by_name in self._compared_params.get(optimizer, []):
                compared_root = root_ref()
                named_params = [(name, p) for name, param_ref in params_by_name if (p := param_ref()) is not None]
                if compared_root is not None:
                    check_same_replicas(runtime, compared_root, named_params, when)
            return
        compared_params: list[_ComparedParams] = []
        for root in roots:
            layout = root.layout()  # which frees what a step has gathered, so not before each step that is compared
            sharded_params = [p for p in _parameters_of(optimizer) if p in layout]
            if sharded_params:
                named_params = [(layout[p][0].name, p) for p in sharded_params]  # type: ignore[index]
                compared_params.append((ref(root), [(name, ref(p)) for name, p in named_params]))
                check_same_replicas(runtime, root, named_params, when)
                root.check_gradients(sharded_params)
        self._compared_params[optimizer] = compared_params

    def _rebind(self, optimizers: Sequence[Optimizer], roots: Sequence[Sharded]) -> None:
        """Make optimizers hold shards, and refuse parameters that were added after sharding."""
        strategy = self._strategy
        for root in roots:
            if _is_held(root, optimizers):
                self.refuse_late(root, optimizers)
        strategy.backend.rebind_optimizers(optimizers, roots)
        for optimizer in optimizers:
            self._follow_zero_grad(optimizer, roots)
            _last_params[optimizer] = [ref(parameter) for parameter in _parameters_of(optimizer)]
            refuse_files_of_optimizer(optimizer, _shard_test(optimizer, roots), strategy.strategy_name)

    def _follow_zero_grad(self, optimizer: Optimizer, roots: Sequence[Sharded]) -> None:
        """Make ``zero_grad()`` also discard unreduced gradients, which are not stored at the shards."""
        optimizer_params = {id(parameter) for parameter in _parameters_of(optimizer)}
        trained: list[tuple[ref[Sharded], set[str]]] = []
        for root in roots:
            names: set[str] = set()
            for parameter, parts in root.layout().items():
                if id(parameter) in optimizer_params:
                    names.update(part.name for part in parts)
            trained.append((ref(root), names))
            on_zero_grad(root.module, partial(_discard_unreduced, ref(root), self.unreduced))
        unreduced = self.unreduced

        def discard() -> None:
            for root_ref, names in trained:
                root = root_ref()
                if root is not None and root in unreduced:
                    root.forget_unreduced(names)

        on_zero_grad(optimizer, discard)


def _discard_unreduced(root_ref: ref[Sharded], unreduced: WeakSet[Sharded]) -> None:
    root = root_ref()
    if root is not None and root in unreduced:
        root.forget_unreduced(root.plan.parameters)


def _shard_test(optimizer: Optimizer, roots: Sequence[Sharded]) -> Callable[[Tensor], bool]:
    """Return a function that says whether a parameter of an optimizer is a shard.

    The optimizer keeps the function, so it refers to no root, which it would keep alive.
    """
    pieces = WeakTensorKeyDictionary()
    for parameter in _parameters_of(optimizer):
        if any(root.holds_part(parameter) for root in roots):
            pieces[parameter] = True
    return lambda parameter: parameter in pieces


def _parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return list(chain.from_iterable(group["params"] for group in optimizer.param_groups))


def _is_held(root: Sharded, optimizers: Iterable[Optimizer]) -> bool:
    """Whether an optimizer holds a parameter of a root: a shard, one from before sharding, or one added since."""
    optimizer_params = [parameter for optimizer in optimizers for parameter in _parameters_of(optimizer)]
    with root.unsharded_view():
        module_params = {id(parameter) for parameter in root.module.parameters()}
    layout = root.layout()
    return any(
        p in layout or id(p) in module_params or root.name_of(cast(nn.Parameter, p)) is not None
        for p in optimizer_params
    )
