"""How a module is sharded: the contract that every backend implements. Knows no Lightning."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fsdp_core.checkpoint import ChunkedTensor, SavedTensor, fill_all
from fsdp_core.clipping import clip_grads_by_norm, clip_grads_by_value
from fsdp_core.errors import ShardingError
from fsdp_core.fqn import clean_name, named_parameters
from fsdp_core.optimizer_state import load_optimizer_state, optimizer_state, repoint
from fsdp_core.precision import ShardPrecision
from fsdp_core.runtime import Runtime

__all__ = ["Backend", "StateTensor"]

#: What a checkpoint may hold under a parameter's name: a DTensor, a tensor that is the same on every rank, this rank's
#: chunks, or, on loading, a handle on what was saved.
StateTensor = Tensor | ChunkedTensor | SavedTensor


class Backend(ABC):
    """Shards a module and answers for its gradients and its state.

    An adapter calls :meth:`bind` once, then :meth:`shard` with each root module, and from then on passes that module to
    the other methods. Parameters go by the names that the user's module gives them (see :mod:`fsdp_core.fqn`).

    A backend must write :meth:`shard` and :meth:`no_sync`. The rest is written here for libraries that shard in place
    and show parameters as DTensors, whose ``state_dict()`` shares memory with the module.

    Example:
        The smallest backend keeps every parameter whole and averages gradients after the backward pass:

        >>> from contextlib import contextmanager
        >>> from fsdp_core.replicated import ReplicatedParameters
        >>> class ReplicatingBackend(Backend):
        ...     def shard(self, module):
        ...         if not self.is_sharded(module):
        ...             self.remember(module)
        ...             module.to(self.runtime.device)
        ...             self.replicated = ReplicatedParameters(list(module.parameters()), module, self.runtime)
        ...             self.mark_sharded(module)
        ...         return module
        ...
        ...     @contextmanager
        ...     def no_sync(self, module):
        ...         self.replicated.sync = False
        ...         try:
        ...             yield
        ...         finally:
        ...             self.replicated.sync = True
        >>> from fsdp_core.runtime import ProcessGroupRuntime
        >>> backend = ReplicatingBackend()
        >>> backend.bind(ProcessGroupRuntime(), ShardPrecision())
        >>> model = backend.shard(nn.Linear(2, 1))
        >>> backend.is_sharded(model), sorted(backend.model_state(model))
        (True, ['bias', 'weight'])
    """

    #: The device types this backend can run on.
    accelerators: ClassVar[tuple[str, ...]] = ("cuda", "cpu")

    runtime: Runtime
    precision: ShardPrecision

    #: Which backend has sharded a root. A module outlives its strategy: the next Trainer goes on with it.
    _owners: ClassVar[weakref.WeakKeyDictionary[nn.Module, Backend]] = weakref.WeakKeyDictionary()
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
            empty: Whether to build on the meta device; :meth:`shard` then materialises unit by unit.
        """
        return torch.device("meta") if empty else nullcontext()

    @abstractmethod
    def shard(self, module: nn.Module) -> nn.Module:
        """Shard ``module`` over the world, in place.

        Idempotent. Rank 0's values win; parameters on the meta device are materialised. Must call :meth:`remember`
        before and :meth:`mark_sharded` after.

        Args:
            module: The root module, whole on every rank.

        Returns:
            The module to call from now on.

        Raises:
            ShardingError: The module can't be sharded as asked.
        """

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

    def terms(self) -> dict[str, Any]:
        """What a sharded module can't change any more, by name, for comparison."""
        return {"backend": type(self).__name__, "precision": self.precision}

    def mark_sharded(self, module: nn.Module) -> None:
        """Note that ``module`` is sharded."""
        self._owners[module] = self

    def remember(self, module: nn.Module) -> None:
        """Note the parameters of ``module`` before they are replaced, so that :meth:`repoint` knows them by name."""
        for name, parameter in named_parameters(module):
            key = id(parameter)
            gone = weakref.ref(parameter, lambda _, key=key: self._written.pop(key, None))  # type: ignore[misc]
            self._written[key] = (gone, weakref.ref(module), name)

    @contextmanager
    def as_written(self, module: nn.Module) -> Iterator[None]:
        """A context in which the module's parameters have the shapes and names that the user wrote.

        ``configure_optimizers`` and summaries run in it. DTensors show global shapes by themselves.
        """
        yield

    def repoint(self, optimizers: Iterable[torch.optim.Optimizer], modules: Sequence[nn.Module]) -> None:
        """Let optimizers hold the sharded parameters in the place of those that the user built them over.

        Args:
            optimizers: Changed in place; left alone if they hold the sharded parameters already.
            modules: The sharded roots whose parameters they may hold.

        Raises:
            OptimizerMismatchError: An optimizer holds a foreign parameter, or has stepped already.
        """
        for module in modules:
            self.reshard(module)  # gathered parameters must not be taken for what an optimizer may hold
        now = [{clean_name(n): p for n, p in m.named_parameters(remove_duplicate=False)} for m in modules]
        current = {id(p) for named in now for p in named.values()}

        def sharded(parameter: nn.Parameter) -> nn.Parameter | None:
            if id(parameter) in current:
                return parameter
            ref, module_ref, name = self._written.get(id(parameter), (None, None, ""))
            if ref is None or module_ref is None or ref() is not parameter:
                return None
            for module, named in zip(modules, now, strict=True):
                if module is module_ref():
                    return named.get(name)
            return None

        for optimizer in optimizers:
            repoint(optimizer, sharded)

    # -- steps -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def no_sync(self, module: nn.Module) -> AbstractContextManager[None]:
        """A context in which backward passes accumulate gradients without reducing them. Leaves reduction on."""

    def reshard(self, module: nn.Module) -> None:
        """Free what is still gathered of the parameters. Called often, mostly with nothing to do.

        A forward pass without a backward pass leaves something; used again after a step, it would be stale.
        """

    def finish_backward(self, module: nn.Module) -> None:
        """Hand gradients to the shards after a backward pass inside a forward pass of the root that is still going on.

        Manual optimization runs backward passes there, where a library may not see their end.
        """

    def refresh(self, module: nn.Module) -> None:
        """Show the current values of the parameters inside a forward pass of the root that is still going on.

        Manual optimization takes optimizer steps there.
        """

    def follow_requires_grad(self, module: nn.Module) -> None:
        """Let gathered parameters require gradients as their shards do.

        Called inside a forward pass of the root, when the shards were told to (``toggle_optimizer``).
        """

    def reset(self, module: nn.Module) -> None:
        """Make the module usable again after an exception in a forward or backward pass."""

    def clip_norm(
        self,
        parameters: Iterable[Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> Tensor:
        """Clip by the norm of the whole gradient. See :func:`fsdp_core.clipping.clip_grads_by_norm`."""
        return clip_grads_by_norm(
            parameters,
            max_norm,
            runtime=self.runtime,
            norm_type=norm_type,
            error_if_nonfinite=error_if_nonfinite,
        )

    def clip_value(self, parameters: Iterable[Tensor], clip_value: float) -> None:
        """Clip each element. See :func:`fsdp_core.clipping.clip_grads_by_value`."""
        clip_grads_by_value(parameters, clip_value)

    # -- state -----------------------------------------------------------------------------------------------------

    def model_state(self, module: nn.Module) -> dict[str, Any]:
        """The module's state by name, sharing memory with it: each value a :data:`StateTensor`, or extra state."""
        return {clean_name(name): value for name, value in module.state_dict().items()}

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
        # state_dict() gives copies of what a module keeps otherwise, which only the module can take back
        kept = {clean_name(n) for named in (module.named_parameters, module.named_buffers) for n, _ in named(**_EVERY)}
        extra = {name: _whole(value) for name, value in state.items() if name in live and name not in kept}
        if extra:
            module.load_state_dict(extra, strict=False)

    def optimizer_state(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The optimizer's state by parameter name. See :func:`fsdp_core.optimizer_state.optimizer_state`."""
        self.reshard(module)
        return optimizer_state(optimizer, {p: n for n, p in named_parameters(module)})

    def load_optimizer_state(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        state: Mapping[str, Any],
        *,
        check_only: bool = False,
    ) -> None:
        """Restore the optimizer's state. See :func:`fsdp_core.optimizer_state.load_optimizer_state`."""
        self.reshard(module)
        load_optimizer_state(optimizer, {p: n for n, p in named_parameters(module)}, state, check_only=check_only)

    def full_tensor(self, value: Any) -> Any:
        """The whole of a state tensor, on the CPU of rank 0; ``None`` on other ranks. All ranks must call it."""
        if not isinstance(value, Tensor):
            return value if self.runtime.rank == 0 else None
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        return whole.detach().cpu() if self.runtime.rank == 0 else None


_TENSORS = (Tensor, ChunkedTensor, SavedTensor)
_EVERY: dict[str, Any] = {"remove_duplicate": False}


def _whole(value: Any) -> Any:
    return value.full() if isinstance(value, SavedTensor) else value


def _tensors(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if isinstance(value, _TENSORS)}
