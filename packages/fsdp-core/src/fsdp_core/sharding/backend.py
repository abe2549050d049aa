"""How a module is sharded: the contract that every backend implements. Knows no Lightning."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fsdp_core.errors import ShardingError
from fsdp_core.gradients.clipping import clip_grads_by_norm, clip_grads_by_value, is_sharded_dtensor
from fsdp_core.gradients.step_writes import StepWrites
from fsdp_core.initialization.deferred_init import deferred_init
from fsdp_core.initialization.marking import mark_by_torch_wrap
from fsdp_core.initialization.materialize import note_initialisers
from fsdp_core.runtime import Runtime
from fsdp_core.sharding.precision import ShardPrecision
from fsdp_core.sharding.repointing import repoint
from fsdp_core.sharding.shardable import check_shardable
from fsdp_core.state.chunks import ChunkedTensor
from fsdp_core.state.filling import fill_all
from fsdp_core.state.fqn import aliases, clean_name, named_parameters
from fsdp_core.state.full_tensor import whole
from fsdp_core.state.held_gradients import HeldGradients, held_at_parameters, restore_at_parameters
from fsdp_core.state.layout import Layout, bytes_held, whole_parts
from fsdp_core.state.optimizer import load_optimizer_state, optimizer_state
from fsdp_core.state.saved_tensor import SavedTensor

__all__ = ["Backend", "StateTensor"]

#: What a checkpoint may hold under a parameter's name: a DTensor, a tensor that is the same on every rank, this rank's
#: chunks, or, on loading, a handle on what was saved.
StateTensor = Tensor | ChunkedTensor | SavedTensor


class Backend(ABC):
    """Shards a module and answers for its gradients and its state.

    An adapter calls :meth:`bind` once, then :meth:`shard` with each module of the user's, and from then on passes the
    root that this returned to the other methods: the module itself, or what a library has wrapped around it. Parameters
    go by the names that the user's module gives them (see :mod:`fsdp_core.state.fqn`).

    A backend must write :meth:`shard` and :meth:`no_sync`. The rest is written here for libraries that shard in place
    and show parameters as DTensors, whose ``state_dict()`` shares memory with the module. One that wraps writes
    :meth:`written_module` too, and one that shows something else than the parameters :meth:`as_written`,
    :meth:`layout` and :meth:`holds_part`. Where modules show pieces of parameters, the adapters have their
    ``state_dict()`` raise; what reads the pieces on purpose calls ``type(module).state_dict(module)``.

    Example:
        The smallest backend keeps every parameter whole and averages gradients after the backward pass:

        >>> from contextlib import contextmanager
        >>> from weakref import WeakKeyDictionary
        >>> from fsdp_core.initialization.materialize import place
        >>> from fsdp_core.gradients.replicated import ReplicatedParameters
        >>> class ReplicatingBackend(Backend):
        ...     replicated = WeakKeyDictionary()  # by root, which outlives the strategy and its backend
        ...
        ...     def shard(self, module):
        ...         if not self.is_sharded(module):
        ...             self.check_shardable(module)
        ...             self.remember(module)
        ...             place(list(module.modules()), self.runtime)
        ...             self.replicated[module] = ReplicatedParameters(list(module.parameters()), module, self.runtime)
        ...             self.mark_sharded(module)
        ...         return module
        ...
        ...     @contextmanager
        ...     def no_sync(self, module):
        ...         self.replicated[module].sync = False
        ...         try:
        ...             yield
        ...         finally:
        ...             self.replicated[module].sync = True
        >>> from fsdp_core.runtime import ProcessGroupRuntime
        >>> backend = ReplicatingBackend()
        >>> backend.bind(ProcessGroupRuntime(), ShardPrecision())
        >>> model = backend.shard(nn.Linear(2, 1))
        >>> backend.is_sharded(model), sorted(backend.model_state(model))
        (True, ['bias', 'weight'])

        A later strategy's backend goes on with the module:

        >>> later = ReplicatingBackend()
        >>> later.bind(ProcessGroupRuntime(), ShardPrecision())
        >>> with later.no_sync(later.shard(model)):
        ...     model(torch.ones(1, 2)).sum().backward()
    """

    #: The device types this backend can run on.
    accelerators: ClassVar[tuple[str, ...]] = ("cuda", "cpu")

    runtime: Runtime
    precision: ShardPrecision

    #: Which backend has sharded a root. A module outlives its strategy: the next Trainer goes on with it.
    _owners: ClassVar[weakref.WeakKeyDictionary[nn.Module, Backend]] = weakref.WeakKeyDictionary()
    #: The names of a module's parameters before it was sharded, tied ones under each of theirs.
    _names: ClassVar[weakref.WeakKeyDictionary[nn.Module, tuple[str, ...]]] = weakref.WeakKeyDictionary()
    #: Parameters as they were before sharding, by id: optimizers and lists of the user may hold them still.
    _written: ClassVar[dict[int, tuple[weakref.ref[nn.Parameter], weakref.ref[nn.Module], str]]] = {}

    # -- building and sharding -------------------------------------------------------------------------------------

    def bind(self, runtime: Runtime, precision: ShardPrecision) -> None:
        """Take the world to shard over and the dtypes to do it in. Called before each stage."""
        self.runtime, self.precision = runtime, precision

    def effective_precision(self, precision: ShardPrecision) -> ShardPrecision:
        """What becomes of the precision that the front end asked for, given this backend's own options."""
        return precision

    def init_context(self, empty: bool = False) -> AbstractContextManager[Any]:
        """A context in which the user builds the model.

        Args:
            empty: Whether to build on the meta device; :meth:`shard` then materialises unit by unit, with the values
                that the model would have been built with.
        """
        return deferred_init() if empty else nullcontext()

    def wrap_context(self) -> AbstractContextManager[Any]:
        """A context in which torch's own ``wrap`` marks units, as :func:`fsdp_core.wrap` does anywhere."""
        return mark_by_torch_wrap()

    def units(self, module: nn.Module) -> Sequence[nn.Module]:
        """The submodules that :meth:`shard` makes units of their own. Ranks are compared by it before they begin."""
        return ()

    @abstractmethod
    def shard(self, module: nn.Module) -> nn.Module:
        """Shard ``module`` over the world, in place.

        Idempotent. Rank 0's values win; parameters on the meta device are materialised. Must call :meth:`remember`
        before and :meth:`mark_sharded` after.

        Args:
            module: The root module, whole on every rank.

        Returns:
            The root: what to call from now on.

        Raises:
            ShardingError: The module can't be sharded as asked.
        """

    def written_module(self, root: nn.Module) -> nn.Module:
        """The user's module that a root stands for: itself, if the backend shards in place."""
        return root

    def is_sharded(self, module: nn.Module) -> bool:
        """Whether this very module is sharded already, on terms that this backend shares.

        Raises:
            ShardingError: Another backend, or one with other options, has sharded it.
        """
        owner = self._owners.get(module)
        if owner is None or owner is self:
            return owner is self
        theirs, ours = owner.terms(), self.terms()
        differing = [f"{key} {theirs.get(key)!r}, now {ours[key]!r}" for key in ours if ours[key] != theirs.get(key)]
        if differing:
            raise ShardingError(
                f"{type(module).__name__} was sharded before, on other terms: {'; '.join(differing)}.\n"
                "Use the same options, or build the module anew and load its checkpoint."
            )
        self._owners[module] = self
        return True

    @classmethod
    def owner_of(cls, module: nn.Module) -> Backend | None:
        """The backend that has sharded this very module, or ``None``."""
        return cls._owners.get(module)

    @classmethod
    def root_around(cls, module: nn.Module) -> tuple[nn.Module, str] | None:
        """The sharded root that a module is or is in, and what names in the root begin with; ``None`` if there is none.

        Args:
            module: A root, the module that it stands for, or one inside them.
        """
        found = [(raw, root) for root in list(cls._owners) for raw, inner in root.named_modules() if inner is module]
        if not found:
            return None
        raw, root = max(found, key=lambda one: len(one[0]))  # the wrapper, rather than what it stands for
        name = clean_name(raw)
        return root, f"{name}." if name else ""

    def terms(self) -> dict[str, Any]:
        """What a sharded module can't change any more, by name, for comparison."""
        return {"backend": type(self).__name__, "precision": self.precision}

    def check_shardable(self, module: nn.Module) -> None:
        """Refuse a module that no backend can shard.

        Raises:
            ShardingError: It has no parameters, a part of it is sharded already, or a parameter has a gradient hook.
        """
        check_shardable(module, self.owner_of)
        note_initialisers(module)

    def mark_sharded(self, module: nn.Module) -> None:
        """Note that ``module`` is sharded."""
        self._owners[module] = self

    def remember(self, module: nn.Module) -> None:
        """Note the parameters of ``module`` before they are replaced, so that :meth:`repoint` knows them by name."""
        self._names[module] = tuple(clean_name(name) for name, _ in module.named_parameters(remove_duplicate=False))
        for name, parameter in named_parameters(module):
            self._note_written(module, name, parameter)

    def remembered_names(self, module: nn.Module) -> tuple[str, ...]:
        """The names of parameters that a root's module had before it was sharded, tied ones under each of theirs."""
        return self._names[self.written_module(module)]

    def _note_written(self, module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        key, written = id(parameter), self._written
        gone = weakref.ref(parameter, lambda _: written.pop(key, None))  # which must not keep this backend
        written[key] = (gone, weakref.ref(module), name)

    @contextmanager
    def as_written(self, module: nn.Module) -> Iterator[None]:
        """A context in which the module's parameters have the shapes and names that the user wrote.

        ``configure_optimizers`` and summaries run in it; nothing can be computed with the parameters there. DTensors
        show global shapes by themselves.
        """
        yield

    @contextmanager
    def unmanaged(self, module: nn.Module) -> Iterator[None]:
        """A context in which the user's modules can be called, and nothing of the library's comes of it.

        :func:`fsdp_core.gathered` puts whole values instead of parameters in it. As :meth:`as_written`, and a
        library that has registered hooks on the user's modules leaves them out.
        """
        with self.as_written(module):
            yield

    def layout(self, module: nn.Module) -> Layout:
        """What each parameter that an optimizer may hold has of the user's parameters.

        DTensors say by themselves which part of a parameter they are.
        """
        return whole_parts(named_parameters(module))

    def bytes_held(self, module: nn.Module) -> int:
        """How many bytes of a root's parameters this rank holds; where one rank drives several devices, the first."""
        return bytes_held(self.layout(module))

    def aliases(self, module: nn.Module) -> dict[str, str]:
        """The further names of tied parameters and shared buffers. See :func:`fsdp_core.state.aliases`."""
        with self.as_written(module):
            return aliases(self.written_module(module))

    def repoint(self, optimizers: Iterable[torch.optim.Optimizer], modules: Sequence[nn.Module]) -> None:
        """Let optimizers hold the sharded parameters instead of those that the user built them over.

        Args:
            optimizers: Changed in place; left alone if they hold the sharded parameters already.
            modules: The sharded roots whose parameters they may hold.

        Raises:
            OptimizerMismatchError: An optimizer holds a foreign parameter, or has stepped already.
        """
        layouts: list[Layout] = []
        for module in modules:
            self.reshard(module)  # gathered parameters must not be taken for what an optimizer may hold
            layouts.append(self.layout(module))
        layout = {p: parts for of_module in layouts for p, parts in of_module.items()}
        by_name = [{part.name: p for p, parts in of_module.items() for part in parts} for of_module in layouts]

        def sharded(parameter: nn.Parameter) -> nn.Parameter | None:
            if parameter in layout:
                return parameter
            ref, written_in, name = self._written.get(id(parameter), (None, None, ""))
            if ref is None or written_in is None or ref() is not parameter:
                return None
            for module, named in zip(modules, by_name, strict=True):
                if self.written_module(module) is written_in():
                    return named.get(name)
            return None

        for optimizer in optimizers:
            repoint(optimizer, sharded, layout)

    # -- steps -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def no_sync(self, module: nn.Module) -> AbstractContextManager[None]:
        """A context in which backward passes accumulate gradients without reducing them.

        Leaves reduction on, also after an exception: write ``try`` and ``finally`` around the ``yield``.
        """

    def reshard(self, module: nn.Module) -> None:
        """Free what is still gathered of the parameters. Called often, mostly with nothing to do.

        A forward pass without a backward pass leaves something; used again after a step, it would be stale.
        """

    def suspend_forward(self, module: nn.Module, loss: Tensor | None = None) -> None:
        """Leave a forward pass of the root that is still going on, for a backward pass or an optimizer step inside it.

        Manual optimization takes both there, where a library may be ready for neither.

        Args:
            module: The root.
            loss: What the backward pass starts from; ``None`` before an optimizer step.
        """

    def resume_forward(self, module: nn.Module) -> None:
        """Go on with a forward pass of the root after a backward pass or an optimizer step inside it.

        Gradients must have arrived at the shards, and the root's parameters be gathered with their current values. What
        is gathered must show those gradients as its ``grad``, or raise: see
        :class:`~fsdp_core.sharding.StepGradients`.
        """

    def watch_writes(self, module: nn.Module) -> StepWrites | None:
        """Watch what the user's first ``training_step`` of a run writes to what is gathered in it.

        It would be lost without a word. Written here for libraries whose parameters are what they are gathered to.

        Args:
            module: The root, before its forward pass.
        """
        return None

    def follow_requires_grad(self, module: nn.Module) -> None:
        """Let gathered parameters require gradients as their shards do.

        Called inside a forward pass of the root, when the shards were told to (``toggle_optimizer``).
        """

    def reset(self, module: nn.Module) -> None:
        """Make the module usable again after an exception in a forward or backward pass."""

    def abandon_forward(self, module: nn.Module) -> None:
        """Make the module usable again after an exception in a forward pass that belongs to no step.

        Gradients stay what they are, and so do forward passes of steps that wait for their backward pass. A library
        that can't do that does as :meth:`reset`.
        """
        self.reset(module)

    def mend_interrupted(self, module: nn.Module) -> None:
        """Make the module usable again after a backward pass that an exception has ended, if there was one.

        Called before each forward pass of the root: under Fabric nobody else tells of an exception.

        Raises:
            ShardingError: There are gradients, which may be of a part of that backward pass.
        """

    def holds_part(self, parameter: Tensor) -> bool:
        """Whether ranks hold different parts of what an optimizer holds; DTensors say so by themselves."""
        return is_sharded_dtensor(parameter)

    def clip_norm(
        self,
        parameters: Iterable[Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> Tensor:
        """Clip by the norm of the whole gradient. See :func:`fsdp_core.sharding.clip_grads_by_norm`."""
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

    def model_state(self, module: nn.Module) -> dict[str, Any]:
        """The module's state by name, sharing memory with it: each value a :data:`StateTensor`, or extra state."""
        return {clean_name(name): value for name, value in type(module).state_dict(module).items()}

    def load_model_state(
        self, module: nn.Module, state: Mapping[str, Any], strict: bool = True, *, check_only: bool = False
    ) -> None:
        """Restore the module's state, in place. Everything is checked before anything is changed.

        Args:
            module: A sharded root.
            state: By name: a :data:`StateTensor`, or extra state.
            strict: Whether names must agree exactly and dtypes be the same. Shapes must agree in any case.
            check_only: Whether to change nothing even if all fits.

        Raises:
            CheckpointMismatchError: They don't. The module is unchanged.
        """
        live = self.model_state(module)
        fill_all(_tensors(live), _tensors(state), strict=strict, cast=not strict, check_only=check_only)
        if check_only:
            return
        written = self.written_module(module)
        with self.as_written(module):
            # state_dict() gives copies of what a module keeps otherwise, which only the module can take back
            named = written.named_parameters(remove_duplicate=False), written.named_buffers(remove_duplicate=False)
            kept = {clean_name(name) for name, _ in chain(*named)}
            raw_names = {clean_name(name): name for name in type(written).state_dict(written)}
            extra = {raw_names[n]: _read(value) for n, value in state.items() if n in live and n not in kept}
            if extra:
                type(written).load_state_dict(written, extra, strict=False)
        self.adopt_model_state(module, live)

    def adopt_model_state(self, module: nn.Module, state: Mapping[str, Any]) -> None:
        """Take what :meth:`model_state` gave, now filled, into the module. Nothing is due where they share memory."""

    def optimizer_state(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The optimizer's state by parameter name. See :func:`fsdp_core.state.optimizer_state`."""
        self.reshard(module)
        return optimizer_state(optimizer, self.layout(module), self.runtime)

    def load_optimizer_state(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        state: Mapping[str, Any],
        *,
        check_only: bool = False,
    ) -> None:
        """Restore the optimizer's state. See :func:`fsdp_core.state.load_optimizer_state`."""
        self.reshard(module)
        load_optimizer_state(optimizer, self.layout(module), state, check_only=check_only)

    def accumulated_gradients(self, module: nn.Module) -> HeldGradients:
        """What this rank holds of gradients, sharing memory with them: its own, and its shards of reduced ones.

        All ranks must call it. A library that keeps gradients elsewhere than at the parameters while :meth:`no_sync`
        lasts adds those.
        """
        return held_at_parameters(self.layout(module))

    def forget_unreduced(self, module: nn.Module, names: Collection[str]) -> None:
        """Give up what :meth:`no_sync` has left to reduce of the gradients of these parameters.

        ``optimizer.zero_grad()`` comes here within an accumulation, when it has done what it does by itself. Written
        here for what :meth:`accumulated_gradients` gives.
        """
        for name, gradient in self.accumulated_gradients(module).own.items():
            if name in names:
                gradient.zero_()

    def restore_gradients(
        self, module: nn.Module, own: Mapping[str, Callable[[], Tensor]], reduced: Mapping[str, Tensor | SavedTensor]
    ) -> None:
        """Go on from gradients that :meth:`accumulated_gradients` has found, before the next forward pass.

        All ranks must call it. Written here for gradients that are kept at the parameters; a library that keeps some
        elsewhere calls this with the others.

        Args:
            module: A sharded root, whose gradients are replaced.
            own: Functions that read what this rank has yet to have reduced, by parameter name.
            reduced: What is reduced already, by parameter name.

        Raises:
            CheckpointMismatchError: A gradient is of no parameter that can take it, or has another shape.
        """
        restore_at_parameters(self.layout(module), type(module).__name__, own, reduced)

    def full_tensor(self, value: Any) -> Any:
        """The whole of a state tensor, on the CPU of rank 0; ``None`` on other ranks. All ranks must call it."""
        gathered = whole(value, self.runtime)
        return None if self.runtime.rank else gathered.cpu() if isinstance(gathered, Tensor) else gathered


def _read(value: Any) -> Any:
    return value.full() if isinstance(value, SavedTensor) else value


def _tensors(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if isinstance(value, StateTensor)}
