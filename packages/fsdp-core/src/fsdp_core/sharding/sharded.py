"""A sharded root: what a step needs of it, and what its state is. Knows no Lightning."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from fsdp_core.errors import ShardingError
from fsdp_core.gradients.clipping import clip_grads_by_norm, clip_grads_by_value, is_sharded_dtensor
from fsdp_core.gradients.step_writes import StepWrites
from fsdp_core.runtime import Runtime
from fsdp_core.sharding.mixed_precision import ShardPrecision
from fsdp_core.state.chunks import ChunkedTensor
from fsdp_core.state.filling import fill_all
from fsdp_core.state.fqn import aliases, clean_name, named_parameters
from fsdp_core.state.full_tensor import gathered_modules
from fsdp_core.state.held_gradients import HeldGradients, held_at_parameters, restore_at_parameters
from fsdp_core.state.layout import Layout, bytes_held, whole_parts
from fsdp_core.state.optimizer import load_optimizer_state, optimizer_state
from fsdp_core.state.saved_tensor import SavedTensor

if TYPE_CHECKING:
    from fsdp_core.sharding.backend import Backend

__all__ = ["Sharded", "StateTensor", "sharded_around", "sharded_of"]

#: What a checkpoint may hold under a parameter's name: a DTensor, a tensor that is the same on every rank, this rank's
#: chunks, or, on loading, a handle on what was saved.
StateTensor = Tensor | ChunkedTensor | SavedTensor

#: Where a root, and the module that it stands for, keep what is known of them.
_KEY = "_fsdp_core_sharded"
#: Every root there is, and what keeps ranks that are threads from adding one while another looks.
_all: WeakSet[Sharded] = WeakSet()
_looking = threading.Lock()


class Sharded(ABC):
    """What is known of a module that a backend has sharded.

    A module outlives its strategy: the object stays with it, and the next strategy, whose backend agrees on
    :meth:`~fsdp_core.Backend.terms`, goes on with it. A copy of the module, or a pickle, has none.

    A backend must write :meth:`no_sync`. The rest is written here for libraries that shard in place and show parameters
    as DTensors, whose ``state_dict()`` shares memory with the module. One that shows something else than the parameters
    writes :meth:`as_written`, :meth:`layout` and :meth:`holds_part`. Where modules show pieces of parameters, the
    adapters have their ``state_dict()`` raise; what reads the pieces on purpose calls
    ``type(module).state_dict(module)``. Hooks on modules are functions that ask :func:`sharded_of`, and not methods: a
    deep copy of the module has the hooks too.

    Parameters go by the names that the user's module gives them (see :mod:`fsdp_core.state.fqn`).

    Args:
        root: What to call: the user's module, or what a library has wrapped around it.
        written: The user's module; ``None`` if that is the root.

    Attributes:
        root: What to call.
        written: The user's module that the root stands for.
        backend: That of the strategy that trains it now: its options, its ranks and its precision.
        terms: What the module was sharded on; see :meth:`~fsdp_core.Backend.terms`.
        names: The names of the module's parameters before it was sharded, tied ones under each of theirs.
        class_name: That of the module's class before it was sharded, for messages; libraries change it.
        strategy_name: The name of the strategy that has sharded it, for messages.
    """

    backend: Backend
    terms: Mapping[str, Any]
    names: tuple[str, ...]
    class_name: str = "a module"
    strategy_name: str = "a strategy"

    def __init__(self, root: nn.Module, written: nn.Module | None = None) -> None:
        self.root, self.written = root, root if written is None else written
        #: Parameters that stand for shards, by what they are called: optimizers and lists of the user may hold them.
        self._stands_for = WeakTensorKeyDictionary()

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of the module is not sharded.

        Raises:
            ShardingError: It would hold this rank's pieces as if they were whole, or is one of a strategy or of what
                Fabric has returned.
        """
        is_with_module = any(id(module) in memo for module in self._modules())
        if self.root not in gathered_modules and (self._is_in_pieces() or not is_with_module):
            raise ShardingError(
                f"a copy of {self.class_name} was asked for while {self.strategy_name!r} has it sharded: it would hold "
                "what this rank has of it, as if it were a model.\n"
                "Copy the model before it is sharded, in __init__() or configure_model(), or before fabric.setup(); or "
                "copy the user's module within fsdp_core.gathered(module), on all ranks, where its values are whole."
            )

    def __reduce__(self) -> tuple[Any, ...]:
        if self.root not in gathered_modules and self._is_in_pieces():
            raise ShardingError(
                f"{self.class_name} can't be pickled while {self.strategy_name!r} has it sharded: the file would hold "
                "what the rank that writes it has of it.\n"
                "Save fsdp_core.full_state_dict(module), which all ranks call, or a checkpoint; or pickle the user's "
                "module within fsdp_core.gathered(module)."
            )
        return type(None), ()

    def _modules(self) -> tuple[nn.Module, nn.Module]:
        return self.root, self.written

    def _is_in_pieces(self) -> bool:
        """Whether the module shows pieces as plain parameters, or is inside of a library's wrapper."""
        if self.root is not self.written:
            return True
        layout = self.layout()
        return any(part.range is not None for p in self.root.parameters() for part in layout.get(p, ()))

    @property
    def runtime(self) -> Runtime:
        """The ranks that it is sharded over."""
        return self.backend.runtime

    @property
    def precision(self) -> ShardPrecision:
        """The dtypes of its shards."""
        return self.backend.precision

    # -- what it is made of ----------------------------------------------------------------------------------------

    @contextmanager
    def as_written(self) -> Iterator[None]:
        """A context in which the module's parameters have the shapes and names that the user wrote.

        ``configure_optimizers`` and summaries run in it; nothing can be computed with the parameters there. DTensors
        show global shapes by themselves.
        """
        yield

    @contextmanager
    def unmanaged(self) -> Iterator[None]:
        """A context in which the user's modules can be called, and nothing of the library's comes of it.

        :func:`fsdp_core.gathered` puts whole values instead of parameters in it. As :meth:`as_written`, and a
        library that has registered hooks on the user's modules leaves them out.
        """
        with self.as_written():
            yield

    def layout(self) -> Layout:
        """What each parameter that an optimizer may hold has of the user's parameters.

        DTensors say by themselves which part of a parameter they are.
        """
        return whole_parts(named_parameters(self.root))

    def holds_part(self, parameter: Tensor) -> bool:
        """Whether ranks hold different parts of what an optimizer holds; DTensors say so by themselves."""
        return is_sharded_dtensor(parameter)

    def bytes_held(self) -> int:
        """How many bytes of the parameters this rank holds; where one rank drives several devices, the first."""
        return bytes_held(self.layout())

    def aliases(self) -> dict[str, str]:
        """The further names of tied parameters and shared buffers. See :func:`fsdp_core.state.aliases`."""
        with self.as_written():
            return aliases(self.written)

    def remember(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Note parameters that stand for shards by their names: an optimizer that holds one is re-pointed to its shard.

        Those that the module had before it was sharded are noted already. What :meth:`as_written` puts instead of
        shards is to be noted there, and nothing else: a parameter that the user has added is none of the module's own.

        Args:
            parameters: By name. They are not kept alive.
        """
        for name, parameter in parameters:
            self._stands_for[parameter] = name

    def name_of(self, parameter: nn.Parameter) -> str | None:
        """What the user calls a parameter that :meth:`remember` was given; ``None`` if it was not."""
        name: str | None = self._stands_for.get(parameter)
        return name

    # -- steps -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def no_sync(self) -> AbstractContextManager[None]:
        """A context in which backward passes accumulate gradients without reducing them.

        Leaves reduction on, also after an exception: write ``try`` and ``finally`` around the ``yield``.
        """

    def reshard(self) -> None:
        """Free what is still gathered of the parameters. Called often, mostly with nothing to do.

        A forward pass without a backward pass leaves something; used again after a step, it would be stale.
        """

    def suspend_forward(self, loss: Tensor | None = None) -> None:
        """Leave a forward pass of the root that is still going on, for a backward pass or an optimizer step inside it.

        Manual optimization takes both there, where a library may be ready for neither.

        Args:
            loss: What the backward pass starts from; ``None`` before an optimizer step.
        """

    def resume_forward(self) -> None:
        """Go on with a forward pass of the root after a backward pass or an optimizer step inside it.

        Gradients must have arrived at the shards, and the root's parameters be gathered with their current values. What
        is gathered must show those gradients as its ``grad``, or raise: see
        :class:`~fsdp_core.sharding.StepGradients`.
        """

    def watch_writes(self) -> StepWrites | None:
        """Watch what the user's first ``training_step`` of a run writes to what is gathered in it.

        Called before its forward pass. What is written there would be lost without a word. ``None``, as here, is for
        libraries whose parameters are what they are gathered to.
        """
        return None

    def follow_requires_grad(self) -> None:
        """Let gathered parameters require gradients as their shards do.

        Called inside a forward pass of the root, when the shards were told to (``toggle_optimizer``).
        """

    def reset(self) -> None:
        """Make the module usable again after an exception in a forward or backward pass."""

    def abandon_forward(self) -> None:
        """Make the module usable again after an exception in a forward pass that belongs to no step.

        Gradients stay what they are, and so do forward passes of steps that wait for their backward pass. A library
        that can't do that does as :meth:`reset`.
        """
        self.reset()

    def mend_interrupted(self) -> None:
        """Make the module usable again after a backward pass that an exception has ended, if there was one.

        Called before each forward pass of the root: under Fabric nobody else tells of an exception.

        Raises:
            ShardingError: There are gradients, which may be of a part of that backward pass.
        """

    def clip_norm(
        self,
        parameters: Iterable[Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> Tensor:
        """Clip gradients by their norm over all ranks. All ranks must call it, with the same parameters.

        Args:
            parameters: Those of an optimizer.
            max_norm: What their norm is clipped to; ``float("inf")`` to compute it alone.
            norm_type: The order of the norm, positive.
            error_if_nonfinite: Whether a norm that is not finite raises.

        Returns:
            The norm before clipping, a 0-dim tensor. See :func:`fsdp_core.sharding.clip_grads_by_norm`.
        """
        return clip_grads_by_norm(
            parameters,
            max_norm,
            runtime=self.runtime,
            is_sharded=self.holds_part,
            norm_type=norm_type,
            error_if_nonfinite=error_if_nonfinite,
        )

    def clip_value(self, parameters: Iterable[Tensor], clip_value: float) -> None:
        """Clip each element. See :func:`fsdp_core.sharding.clip_grads_by_value`."""
        clip_grads_by_value(parameters, clip_value)

    # -- state -----------------------------------------------------------------------------------------------------

    def model_state(self) -> dict[str, Any]:
        """The module's state by name, sharing memory with it: each value a :data:`StateTensor`, or extra state."""
        return {clean_name(name): value for name, value in type(self.root).state_dict(self.root).items()}

    def load_model_state(self, state: Mapping[str, Any], strict: bool = True, *, check_only: bool = False) -> None:
        """Restore the module's state, in place. Everything is checked before anything is changed.

        Args:
            state: By name: a :data:`StateTensor`, or extra state.
            strict: Whether names must agree exactly and dtypes be the same. Shapes must agree in any case.
            check_only: Whether to change nothing even if all fits.

        Raises:
            CheckpointMismatchError: They don't. The module is unchanged.
        """
        live = self.model_state()
        fill_all(_tensors(live), _tensors(state), strict=strict, cast=not strict, check_only=check_only)
        if check_only:
            return
        written = self.written
        with self.as_written():
            # state_dict() gives copies of what a module keeps otherwise, which only the module can take back
            named = written.named_parameters(remove_duplicate=False), written.named_buffers(remove_duplicate=False)
            kept = {clean_name(name) for name, _ in chain(*named)}
            raw_names = {clean_name(name): name for name in type(written).state_dict(written)}
            extra = {raw_names[n]: _read(value) for n, value in state.items() if n in live and n not in kept}
            if extra:
                type(written).load_state_dict(written, extra, strict=False)
        self.adopt_model_state(live)

    def adopt_model_state(self, state: Mapping[str, Any]) -> None:
        """Take what :meth:`model_state` gave, now filled, into the module. Nothing is due where they share memory."""

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The optimizer's state by parameter name. See :func:`fsdp_core.state.optimizer_state`."""
        self.reshard()
        return optimizer_state(optimizer, self.layout(), self.runtime)

    def load_optimizer_state(
        self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any], *, check_only: bool = False
    ) -> None:
        """Restore the optimizer's state. See :func:`fsdp_core.state.load_optimizer_state`."""
        self.reshard()
        load_optimizer_state(optimizer, self.layout(), state, check_only=check_only)

    def accumulated_gradients(self) -> HeldGradients:
        """What this rank holds of gradients, sharing memory with them: its own, and its shards of reduced ones.

        All ranks must call it. A library that keeps gradients elsewhere than at the parameters while :meth:`no_sync`
        lasts adds those.
        """
        return held_at_parameters(self.layout())

    def forget_unreduced(self, names: Collection[str]) -> None:
        """Give up what :meth:`no_sync` has left to reduce of the gradients of these parameters.

        ``optimizer.zero_grad()`` comes here within an accumulation, when it has done what it does by itself. Written
        here for what :meth:`accumulated_gradients` gives.
        """
        for name, gradient in self.accumulated_gradients().own.items():
            if name in names:
                gradient.zero_()

    def restore_gradients(
        self, own: Mapping[str, Callable[[], Tensor]], reduced: Mapping[str, Tensor | SavedTensor]
    ) -> None:
        """Go on from gradients that :meth:`accumulated_gradients` has found, before the next forward pass.

        The gradients that are there are replaced. All ranks must call it. Written here for gradients that are kept at
        the parameters; a library that keeps some elsewhere calls this with the others.

        Args:
            own: Functions that read what this rank has yet to have reduced, by parameter name.
            reduced: What is reduced already, by parameter name.

        Raises:
            CheckpointMismatchError: A gradient is of no parameter that can take it, or has another shape.
        """
        restore_at_parameters(self.layout(), type(self.root).__name__, own, reduced)


def sharded_of(module: nn.Module) -> Sharded | None:
    """What is known of a sharded root, or of the module that it stands for; ``None`` if this very module is neither.

    Example:
        >>> print(sharded_of(nn.Linear(2, 1)))
        None
    """
    found: Sharded | None = module.__dict__.get(_KEY)
    # a shallow copy has what the module has
    return found if found is not None and (module is found.root or module is found.written) else None


def sharded_around(module: nn.Module) -> tuple[Sharded, str] | None:
    """The sharded root that a module is or is in, and what names in the root begin with; ``None`` if there is none.

    Args:
        module: A root, the module that it stands for, or one inside them.
    """
    with _looking:
        roots = list(_all)
    found = [(raw, one) for one in roots for raw, inner in one.root.named_modules() if inner is module]
    if not found:
        return None
    raw, sharded = max(found, key=lambda one: len(one[0]))  # the wrapper, rather than what it stands for
    name = clean_name(raw)
    return sharded, f"{name}." if name else ""


def keep(sharded: Sharded) -> None:
    """Let a root, and the module that it stands for, have what is known of them."""
    with _looking:
        _all.add(sharded)
    for module in sharded._modules():
        module.__dict__[_KEY] = sharded


def _read(value: Any) -> Any:
    return value.full() if isinstance(value, SavedTensor) else value


def _tensors(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if isinstance(value, StateTensor)}
