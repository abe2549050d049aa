"""The optimizers of a strategy: they hold shards, also of what is added to them later, and are compared over ranks."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
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
    from fsdp_core.lightning.features.token_means import TokenMeans
    from fsdp_core.lightning.strategy import ShardedStrategy

__all__ = ["ShardedOptimizers", "is_compared_step"]

#: The parameters that optimizers held when they were last checked.
_last_params: WeakKeyDictionary[Optimizer, list[ref[Tensor]]] = WeakKeyDictionary()


@dataclass(frozen=True)
class _ComparedParams:
    """The parameters of a model that an optimizer holds: their replicas are compared between ranks."""

    root: ref[Sharded]
    params_by_name: Mapping[str, ref[Tensor]]


def is_compared_step(step: int) -> bool:
    """Whether ranks are compared before a step, which is counted from 1: the second, fourth, and each 1,024th are."""
    return step & (step - 1) == 0 or step % 1024 == 0


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
        self._step_counts: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
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
        step = self._step_counts[optimizer] = self._step_counts.get(optimizer, 0) + 1
        if not is_compared_step(step) or runtime.world_size == 1 or runtime.is_rehearsed:
            return
        when = f"before step {step} of {type(optimizer).__name__}"
        if step == 1 or runtime.mesh.tensor_parallel > 1:
            self._check_gradients_and_replicas(optimizer, roots, when)
        else:
            self._check_replicas(optimizer, when)

    def _check_gradients_and_replicas(self, optimizer: Optimizer, roots: Sequence[Sharded], when: str) -> None:
        self._compared_params[optimizer] = compared_params = []
        for root in roots:
            layout = root.layout()  # which frees what a step has gathered: so _check_replicas() does without it
            sharded_params = [p for p in _parameters_of(optimizer) if p in layout]
            if sharded_params:
                named_params = [(layout[p][0].name, p) for p in sharded_params]  # type: ignore[index]
                compared_params.append(_ComparedParams(ref(root), {name: ref(p) for name, p in named_params}))
                check_same_replicas(self._strategy.runtime, root, named_params, when)
                root.check_gradients(sharded_params)

    def _check_replicas(self, optimizer: Optimizer, when: str) -> None:
        """Compare the replicas of the parameters that the optimizer held at its first step."""
        for compared in self._compared_params.get(optimizer, []):
            root = compared.root()
            if root is not None:
                named_refs = compared.params_by_name.items()
                named_params = [(name, p) for name, param_ref in named_refs if (p := param_ref()) is not None]
                check_same_replicas(self._strategy.runtime, root, named_params, when)

    def _rebind(self, optimizers: Sequence[Optimizer], roots: Sequence[Sharded]) -> None:
        """Make optimizers hold shards, and refuse parameters that were added after sharding."""
        strategy = self._strategy
        for root in roots:
            if _is_trained_by(optimizers, root):
                self.refuse_late(root, optimizers)
        strategy.backend.rebind_optimizers(optimizers, roots)
        for optimizer in optimizers:
            self._extend_zero_grad(optimizer, roots)
            _last_params[optimizer] = [ref(parameter) for parameter in _parameters_of(optimizer)]
            refuse_files_of_optimizer(optimizer, _make_shard_test(optimizer, roots), strategy.strategy_name)

    def _extend_zero_grad(self, optimizer: Optimizer, roots: Sequence[Sharded]) -> None:
        """Make ``zero_grad()`` also discard unreduced gradients, which are not stored at the shards."""
        forget, forget_all = (_make_forgetter(self._strategy.token_means, owner) for owner in (optimizer, None))
        optimizer_params = {id(parameter) for parameter in _parameters_of(optimizer)}
        trained_names: list[tuple[ref[Sharded], Collection[str]]] = []
        for root in roots:
            names: set[str] = set()
            for parameter, parts in root.layout().items():
                if id(parameter) in optimizer_params:
                    names.update(part.name for part in parts)
            trained_names.append((ref(root), names))
            all_names = [(ref(root), root.plan.parameters)]
            on_zero_grad(root.module, partial(_discard_gradients, all_names, self.unreduced, forget_all))
        on_zero_grad(optimizer, partial(_discard_gradients, trained_names, self.unreduced, forget))


def _make_forgetter(token_means: TokenMeans, optimizer: Optimizer | None) -> Callable[[], None]:
    """A function that lets token means forget the gradients of an optimizer, or of all; it keeps nothing alive."""
    means_ref, optimizer_ref = ref(token_means), None if optimizer is None else ref(optimizer)

    def forget() -> None:
        live_means = means_ref()
        if live_means is None:
            return
        if optimizer_ref is None:
            live_means.forget_all()
        elif (live_optimizer := optimizer_ref()) is not None:
            live_means.forget(live_optimizer)

    return forget


def _discard_gradients(
    names_by_root: Sequence[tuple[ref[Sharded], Collection[str]]],
    unreduced: WeakSet[Sharded],
    forget: Callable[[], None],
) -> None:
    """Discard unreduced gradients of roots, which are referred to weakly because their modules keep this call.

    Args:
        names_by_root: Roots, each with the names of the parameters whose gradients are discarded.
        unreduced: The roots that have unreduced gradients.
        forget: Forgets how many tokens the gradients are of.
    """
    forget()
    for root_ref, names in names_by_root:
        root = root_ref()
        if root is not None and root in unreduced:
            root.forget_unreduced(names)


def _make_shard_test(optimizer: Optimizer, roots: Sequence[Sharded]) -> Callable[[Tensor], bool]:
    """Return a function that says whether a parameter of an optimizer is a shard.

    The optimizer keeps the function, so it refers to no root, which it would keep alive.
    """
    pieces = WeakTensorKeyDictionary()
    for parameter in _parameters_of(optimizer):
        if any(root.is_shard(parameter) for root in roots):
            pieces[parameter] = True
    return lambda parameter: parameter in pieces


def _parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return list(chain.from_iterable(group["params"] for group in optimizer.param_groups))


def _is_trained_by(optimizers: Iterable[Optimizer], root: Sharded) -> bool:
    """Whether an optimizer holds a shard of a root, a parameter from before sharding, or one that was added since."""
    optimizer_params = [parameter for optimizer in optimizers for parameter in _parameters_of(optimizer)]
    with root.unsharded_view():
        module_params = {id(parameter) for parameter in root.module.parameters()}
    layout = root.layout()
    return any(
        p in layout or id(p) in module_params or root.name_of(cast(nn.Parameter, p)) is not None
        for p in optimizer_params
    )
