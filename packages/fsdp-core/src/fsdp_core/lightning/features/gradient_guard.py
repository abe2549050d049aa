"""Refuses what users would compute from one rank's pieces of gradients and parameters, as if these were whole."""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any
from weakref import ref

from torch import Tensor
from torch.distributed.fsdp import FlatParameter
from torch.distributed.tensor import DTensor

from fsdp_core.gradients.piece_places import find_parameters_by
from fsdp_core.gradients.piece_states import parameter_of_state, states_of_pieces
from fsdp_core.gradients.step_gradients import (
    guard,
    guard_parameters,
    guard_states,
    unguard,
    unguard_parameters,
    unguard_states,
)
from fsdp_core.lightning.outside_steps.exporting import allow_unreduced_reads, refuse_unreduced_reads
from fsdp_core.sharding.sharded import Sharded
from fsdp_core.state.owned import owners_of
from fsdp_core.torch_private.modules import is_piece_now

if TYPE_CHECKING:
    from fsdp_core.lightning.fabric_strategy import ShardedFabricStrategy
    from fsdp_core.lightning.trainer_strategy import ShardedTrainerStrategy

__all__ = ["GradientGuard"]


class GradientGuard:
    """Refuses, while it is on, computations that would only see this rank's pieces of gradients or parameters.

    Where the pieces are plain tensors, ``torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)`` would otherwise
    silently clip each rank's by a norm of its own. DTensors compute over all ranks; of theirs, reading a result that
    is not reduced yet is refused.

    Args:
        strategy: The strategy, whose optimizers and roots are guarded.
    """

    def __init__(self, strategy: ShardedTrainerStrategy | ShardedFabricStrategy) -> None:
        self._strategy = strategy
        #: The optimizers' parameters when the pieces below were looked for: only if these change, they are looked for
        #: again.
        self._optimizer_params: list[ref[Tensor]] = []
        self._optimizer_piece_refs: list[ref[Tensor]] = []
        self._piece_ids: frozenset[int] = frozenset()  # of the tensors in _optimizer_piece_refs
        self._flat_piece_refs: list[ref[Tensor]] = []
        self._module_piece_refs: list[ref[Tensor]] = []
        find_parameters_by(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> GradientGuard:
        return GradientGuard(copy.deepcopy(self._strategy, memo))

    def on(self) -> None:
        """Refuse such computations from now on: a backward pass or a step has ended."""
        self._find_pieces()
        guard(self._gradients())
        guard_states(self._states())
        guard_parameters(self._pieces())
        self.guard_flat_pieces()
        refuse_unreduced_reads()

    def guard_flat_pieces(self) -> None:
        """Refuse computations on flat parameters, except on those that are gathered inside a step."""
        guard_parameters(filter(is_piece_now, self._flat_parameters()))

    def off(self) -> None:
        """Allow all computations from now on: the library is about to compute with gradients."""
        self._find_pieces()
        unguard_parameters([*self._pieces(), *self._flat_parameters()])
        unguard(self._gradients())
        unguard_states(self._states())
        allow_unreduced_reads()

    def guard_parameters(self, *, between_steps: bool = False) -> None:
        """Refuse computations on parameters, and on what optimizers keep for them, from now on.

        Args:
            between_steps: Whether to refuse computations on flat parameters too, for the hooks between two steps. In a
                step they are allowed, since the library gathers from flat parameters.
        """
        self._find_pieces()
        guard_states(self._states())
        guard_parameters(self._pieces())
        if between_steps:
            guard_parameters(self._flat_parameters())
        else:
            unguard_parameters(self._flat_parameters())
        refuse_unreduced_reads()

    def add(self, root: Sharded) -> None:
        """Refuse such computations on the parameters of a root that was sharded now, and may have no optimizer."""
        self._find_module_pieces(root)
        self.on()

    @contextmanager
    def while_on(self) -> Iterator[None]:
        """A context for the user's code amid the library's, such as a hook."""
        self.on()
        try:
            yield
        finally:
            self.off()

    @contextmanager
    def while_off(self) -> Iterator[None]:
        """A context for the library's code amid the user's."""
        self.off()
        try:
            yield
        finally:
            self.on()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context for library code that reads or writes pieces between two steps, such as a save."""
        guarded = unguard_parameters([*self._pieces(), *self._flat_parameters()])
        unguard_states(self._states())
        try:
            yield
        finally:
            guard_parameters(guarded)
            guard_states(self._states())

    def parameter_of(self, state: Tensor) -> Tensor | None:
        """The piece for which one of the strategy's optimizers keeps a state tensor; ``None`` if none does."""
        for optimizer in self._strategy.optimizers if self._piece_ids else ():
            parameter = parameter_of_state(optimizer, state)
            if parameter is not None and id(parameter) in self._piece_ids:
                return parameter
        return None

    def _gradients(self) -> Iterator[Tensor | None]:
        """This rank's pieces of gradients that are plain tensors."""
        return (p.grad for p in self._optimizer_pieces())

    def _states(self) -> list[Tensor]:
        """What optimizers keep for this rank's pieces of parameters."""
        states: list[Tensor] = []
        for optimizer in self._strategy.optimizers if self._piece_ids else ():
            keeps_full_states = owners_of(optimizer) is not None
            if not keeps_full_states:
                states += states_of_pieces(optimizer, self._optimizer_pieces, self._piece_ids)
        return states

    def _optimizer_pieces(self) -> Iterator[Tensor]:
        """This rank's pieces of parameters that optimizers hold, as plain tensors."""
        return _referents(self._optimizer_piece_refs)

    def _flat_parameters(self) -> Iterator[Tensor]:
        """Those of an optimizer's pieces that are flat parameters of a library, which hooks see."""
        return _referents(self._flat_piece_refs)

    def _pieces(self) -> Iterator[Tensor]:
        """This rank's pieces of parameters that modules show to users."""
        return _referents(self._module_piece_refs)

    def _find_pieces(self) -> None:
        """Find this rank's pieces again if the optimizers hold other parameters than before."""
        # map and chain loop over parameters in C: this runs several times a step
        groups = [group["params"] for optimizer in self._strategy.optimizers for group in optimizer.param_groups]
        optimizer_params = list(chain.from_iterable(groups))
        known_params = list(map(operator.call, self._optimizer_params))
        if len(optimizer_params) == len(known_params) and all(map(operator.is_, optimizer_params, known_params)):
            return
        self._optimizer_params = [ref(p) for p in optimizer_params]
        roots = self._strategy.trained_roots
        plain_params = [p for p in optimizer_params if not isinstance(p, DTensor)]
        self._optimizer_piece_refs = [ref(p) for p in plain_params if any(root.is_shard(p) for root in roots)]
        pieces = list(self._optimizer_pieces())
        self._piece_ids = frozenset(map(id, pieces))
        self._flat_piece_refs = [ref(p) for p in pieces if isinstance(p, FlatParameter)]
        for root in roots:
            self._find_module_pieces(root)

    def _find_module_pieces(self, root: Sharded) -> None:
        """Add the pieces that a root's modules show now to those that are known."""
        # known pieces are kept: the root may be gathered now, and then its modules hold none
        known_pieces = list(_referents(self._module_piece_refs))
        known_ids = set(map(id, known_pieces))
        new_pieces = (p for p in root.module.parameters() if id(p) not in known_ids and root.is_guarded_shard(p))
        self._module_piece_refs = list(map(ref, chain(known_pieces, new_pieces)))


def _referents(references: Iterable[ref[Tensor]]) -> Iterator[Tensor]:
    """The tensors that weak references refer to, without those that are gone."""
    for reference in references:
        tensor = reference()
        if tensor is not None:
            yield tensor
