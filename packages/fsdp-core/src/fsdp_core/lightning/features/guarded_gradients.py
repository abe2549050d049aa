"""What users compute of gradients and parameters between two steps: right, or refused, and never of a piece."""

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
from fsdp_core.lightning.outside_steps.exporting import refuse_values_of_parts
from fsdp_core.sharding.sharded import Sharded
from fsdp_core.state.owned import owners_of
from fsdp_core.torch_private.modules import is_piece_now

if TYPE_CHECKING:
    from fsdp_core.lightning.fabric_strategy import ShardedFabricStrategy
    from fsdp_core.lightning.trainer_strategy import ShardedTrainerStrategy

__all__ = ["GuardedGradients"]


class GuardedGradients:
    """Refuses computations on gradients that would only see this rank's pieces, while it is on.

    ``torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)`` would otherwise clip each rank's pieces by a norm of
    its own, without a word, where the pieces are plain tensors. DTensors compute over all ranks; of them, the value of
    a result that is not reduced yet can't be read.

    Args:
        strategy: The strategy, whose optimizers and roots are guarded.
    """

    def __init__(self, strategy: ShardedTrainerStrategy | ShardedFabricStrategy) -> None:
        self._strategy = strategy
        self._optimizer_params: list[ref[Tensor]] = []  # those of which the next was computed; they rarely change
        self._in_pieces: list[ref[Tensor]] = []
        self._piece_ids: frozenset[int] = frozenset()
        self._flat_pieces: list[ref[Tensor]] = []
        self._module_pieces: list[ref[Tensor]] = []
        find_parameters_by(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> GuardedGradients:
        return GuardedGradients(copy.deepcopy(self._strategy, memo))

    def on(self) -> None:
        """Refuse them from now on: a backward pass or a step has ended."""
        self._find_pieces()
        guard(self._gradients())
        guard_states(self._states())
        guard_parameters(self._pieces())
        self.guard_flat_pieces()
        refuse_values_of_parts(True)

    def guard_flat_pieces(self) -> None:
        """Refuse them on flat parameters, but for those that are gathered inside a step."""
        guard_parameters(filter(is_piece_now, self._held_flat()))

    def off(self) -> None:
        """Allow them: the library is about to compute with gradients."""
        self._find_pieces()
        unguard_parameters([*self._pieces(), *self._held_flat()])
        unguard(self._gradients())
        unguard_states(self._states())
        refuse_values_of_parts(False)

    def guard_parameters(self, *, between_steps: bool = False) -> None:
        """Refuse those on parameters from now on: they are shards, or user code sees those of units as such.

        Args:
            between_steps: Whether hooks come next. Otherwise a library is about to gather from flat parameters.
        """
        self._find_pieces()
        guard_states(self._states())
        guard_parameters(self._pieces())
        (guard_parameters if between_steps else unguard_parameters)(self._held_flat())
        refuse_values_of_parts(True)

    def add(self, root: Sharded) -> None:
        """Refuse them for another root too, from now on: it was sharded, and perhaps no optimizer trains it."""
        self._find_module_pieces(root)
        self.on()

    @contextmanager
    def while_on(self) -> Iterator[None]:
        """Context of the user's code between such calls, such as a hook."""
        self.on()
        try:
            yield
        finally:
            self.off()

    @contextmanager
    def while_off(self) -> Iterator[None]:
        """Context of the library's code between the user's."""
        self.off()
        try:
            yield
        finally:
            self.on()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context of the library's code that reads or writes pieces between two steps, such as a save."""
        guarded = unguard_parameters(self._pieces())
        unguard_states(self._states())
        try:
            yield
        finally:
            guard_parameters(guarded)
            guard_states(self._states())

    def parameter_of(self, state: Tensor) -> Tensor | None:
        """The piece for which one of the strategy's optimizers keeps a tensor; ``None`` if none does."""
        for optimizer in self._strategy.optimizers if self._piece_ids else ():
            parameter = parameter_of_state(optimizer, state)
            if parameter is not None and id(parameter) in self._piece_ids:
                return parameter
        return None

    def _gradients(self) -> Iterator[Tensor | None]:
        """This rank's pieces of gradients that are plain tensors."""
        return (p.grad for p in self._held_pieces())

    def _states(self) -> list[Tensor]:
        """What optimizers keep for this rank's pieces of parameters."""
        states: list[Tensor] = []
        for optimizer in self._strategy.optimizers if self._piece_ids else ():
            if owners_of(optimizer) is None:  # on an owner they are of whole parameters
                states += states_of_pieces(optimizer, self._held_pieces, self._piece_ids)
        return states

    def _held_pieces(self) -> Iterator[Tensor]:
        """This rank's pieces of parameters that optimizers hold."""
        return _referents(self._in_pieces)

    def _held_flat(self) -> Iterator[Tensor]:
        """Those that a library has flattened, which hooks see."""
        return _referents(self._flat_pieces)

    def _pieces(self) -> Iterator[Tensor]:
        """This rank's pieces of parameters that only users look at."""
        return _referents(self._module_pieces)

    def _find_pieces(self) -> None:
        # without a step of Python for each parameter
        groups = [group["params"] for optimizer in self._strategy.optimizers for group in optimizer.param_groups]
        optimizer_params = list(chain.from_iterable(groups))
        known_params = list(map(operator.call, self._optimizer_params))
        if len(optimizer_params) == len(known_params) and all(map(operator.is_, optimizer_params, known_params)):
            return
        self._optimizer_params = [ref(p) for p in optimizer_params]
        roots = self._strategy.trained_roots
        plain_params = [p for p in optimizer_params if not isinstance(p, DTensor)]
        self._in_pieces = [ref(p) for p in plain_params if any(root.holds_part(p) for root in roots)]
        held = list(self._held_pieces())
        self._piece_ids = frozenset(map(id, held))
        self._flat_pieces = [ref(p) for p in held if isinstance(p, FlatParameter)]
        for root in roots:
            self._find_module_pieces(root)

    def _find_module_pieces(self, root: Sharded) -> None:
        # also those that were found before: a root may be gathered, and its modules hold none of them then
        known_pieces = list(_referents(self._module_pieces))
        known_ids = set(map(id, known_pieces))
        new_pieces = (p for p in root.module.parameters() if id(p) not in known_ids and root.shows_piece(p))
        self._module_pieces = list(map(ref, chain(known_pieces, new_pieces)))


def _referents(references: Iterable[ref[Tensor]]) -> Iterator[Tensor]:
    """What weak references refer to that is still there."""
    for reference in references:
        tensor = reference()
        if tensor is not None:
            yield tensor
