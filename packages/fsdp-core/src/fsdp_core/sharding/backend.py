"""How a module is sharded: the contract that every backend implements. Knows no Lightning."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar
from weakref import ref

import torch
from torch import Tensor, nn

from fsdp_core.errors import ShardingError
from fsdp_core.initialization.deferred_init import deferred_init
from fsdp_core.initialization.materialize import note_initialisers
from fsdp_core.initialization.wrap import mark_by_torch_wrap
from fsdp_core.mesh import Mesh
from fsdp_core.runtime import Runtime
from fsdp_core.sharding.mixed_precision import ShardPrecision
from fsdp_core.sharding.options import ShardingOptions
from fsdp_core.sharding.replaced_parameters import mark_replaced
from fsdp_core.sharding.repointing import repoint
from fsdp_core.sharding.sequence import SequenceSplit, use_split
from fsdp_core.sharding.shardable import check_shardable
from fsdp_core.sharding.sharded import Sharded, keep, sharded_of
from fsdp_core.state.fqn import clean_name, named_parameters
from fsdp_core.state.full_tensor import whole
from fsdp_core.state.layout import Layout

__all__ = ["Backend", "terms_of"]


class Backend(ABC):
    """Shards modules. It holds what does not depend on a particular module: options, runtime and precision.

    An adapter calls :meth:`bind` once, then :meth:`shard` with each of the user's modules, and from then on uses the
    returned :class:`~fsdp_core.Sharded`. A backend must implement :meth:`shard_module`.

    Example:
        The smallest backend replicates every parameter and averages gradients after the backward pass. It shows what
        is called when; the suite's clauses about shards are for backends that have shards.

        >>> from contextlib import contextmanager
        >>> from fsdp_core.sharding import ReplicatedParameters, place
        >>> class Replicated(Sharded):
        ...     def __init__(self, root, runtime):
        ...         super().__init__(root)
        ...         self.parameters = ReplicatedParameters(list(root.parameters()), root, runtime)
        ...
        ...     @contextmanager
        ...     def no_sync(self):
        ...         self.parameters.sync = False
        ...         try:
        ...             yield
        ...         finally:
        ...             self.parameters.sync = True
        >>> class ReplicatingBackend(Backend):
        ...     def shard_module(self, module):
        ...         place(list(module.modules()), self.runtime)
        ...         return Replicated(module, self.runtime)
        >>> from fsdp_core import ProcessGroupRuntime
        >>> backend = ReplicatingBackend()
        >>> backend.bind(ProcessGroupRuntime(), ShardPrecision())
        >>> model = nn.Linear(2, 1)
        >>> sharded = backend.shard(model)
        >>> sharded.root is model, sorted(sharded.model_state())
        (True, ['bias', 'weight'])

        A later strategy's backend reuses the module:

        >>> later = ReplicatingBackend()
        >>> later.bind(ProcessGroupRuntime(), ShardPrecision())
        >>> later.shard(model) is sharded, sharded.backend is later
        (True, True)
        >>> with sharded.no_sync():
        ...     model(torch.ones(1, 2)).sum().backward()
    """

    #: The device types this backend can run on.
    accelerators: ClassVar[tuple[str, ...]] = ("cuda", "cpu")
    #: Whether an optimizer that looks at whole parameters, such as Muon, may step over each of them on one rank
    #: (see :func:`~fsdp_core.sharding.owner_compute.owners.step_on_owners`): what an optimizer holds has its gradient
    #: in ``grad``.
    owner_compute: ClassVar[bool] = False

    #: With context parallelism, the sequence dimension of each entry of a batch to split; see :class:`SequenceSplit`.
    context_parallel_dims: Mapping[str, int] | None = None

    #: How the front ends split batches; ``None`` without context parallelism.
    sequence: SequenceSplit | None = None

    options: ShardingOptions = ShardingOptions()
    runtime: Runtime
    precision: ShardPrecision

    def __init__(self, options: ShardingOptions | None = None) -> None:
        if options is not None:
            self.options = options

    def bind(self, runtime: Runtime, precision: ShardPrecision) -> None:
        """Set the runtime to shard over and the dtypes to shard in. Called before each stage, on all ranks."""
        self.runtime, self.precision = runtime, precision
        self.sequence = SequenceSplit.of(runtime, self.context_parallel_dims)
        use_split(self.sequence)

    def mesh(self, world_size: int) -> Mesh:
        """How this backend, with its options, arranges so many ranks. Called before any process group exists.

        Raises:
            UnsupportedCapabilityError: Its options don't fit this number of ranks.
        """
        return Mesh(data_parallel=world_size)

    def effective_precision(self, precision: ShardPrecision) -> ShardPrecision:
        """The precision to use for the one that the front end requested, given this backend's own options."""
        return precision

    def init_context(self, empty: bool = False) -> AbstractContextManager[Any]:
        """A context in which the user builds the model.

        Args:
            empty: Whether to build on the meta device; :meth:`shard` then materialises unit by unit, with the values
                that the model would have had otherwise.
        """
        return deferred_init() if empty else nullcontext()

    def wrap_context(self) -> AbstractContextManager[Any]:
        """A context in which torch's own ``wrap`` marks units, as :func:`fsdp_core.wrap` does anywhere."""
        return mark_by_torch_wrap()

    def prepare(self, module: nn.Module) -> None:
        """Do what changes a module before its units are known, such as running the user's own function over it.

        The adapters call it once the ranks agree on the module, before :meth:`units` and :meth:`shard`. All ranks must
        call it. :meth:`shard_module` must not rely on it: not every caller is an adapter.

        Args:
            module: The root module, not sharded by :meth:`shard` yet.

        Raises:
            ShardingError: The module can't be sharded as requested.
        """

    def units(self, module: nn.Module) -> Sequence[nn.Module]:
        """The submodules that become FSDP units. Used to check that all ranks agree before they shard."""
        return ()

    def terms(self) -> dict[str, Any]:
        """The settings that a sharded module can't change any more, by name, for comparison.

        Its options about units, its class and its precision are compared whether or not an override returns them too.
        """
        return {"backend": type(self).__name__, "precision": self.precision, **self.options.sharding_config()}

    def check_shardable(self, module: nn.Module) -> None:
        """Refuse a module that no backend can shard.

        Raises:
            ShardingError: It has no parameters, a submodule is sharded already, or a parameter has a gradient hook.
        """
        check_shardable(module, sharded_of)
        note_initialisers(module)

    def shard(self, module: nn.Module) -> Sharded:
        """Shard ``module`` over all ranks, or reuse a module that is sharded already. All ranks must call it.

        A Trainer calls it again in each stage, and a later strategy with a module that an earlier one has sharded.

        Args:
            module: The user's module, unsharded on every rank; or one that is sharded already, or its root.

        Returns:
            The module's :class:`~fsdp_core.Sharded`; its ``root`` is the module to call.

        Raises:
            ShardingError: The module can't be sharded as requested, or was sharded with other settings.
        """
        sharded = sharded_of(module)
        if sharded is None:
            self.check_shardable(module)
            names = tuple(clean_name(name) for name, _ in module.named_parameters(remove_duplicate=False))
            class_name = type(module).__name__
            # weak references, so that each parameter is freed as soon as sharding has replaced it
            before = [(name, ref(parameter)) for name, parameter in named_parameters(module)]
            sharded = self.shard_module(module)
            sharded.names, sharded.class_name, sharded.terms = names, class_name, terms_of(self)
            alive = [(name, parameter) for name, one in before if (parameter := one()) is not None]
            sharded.remember(alive)
            kept = {id(parameter) for parameter in (*sharded.layout(), *sharded.written.parameters())}
            mark_replaced((name, parameter) for name, parameter in alive if id(parameter) not in kept)
            keep(sharded)
        else:
            self._check_terms(sharded)
        sharded.backend = self
        return sharded

    def _check_terms(self, sharded: Sharded) -> None:
        if sharded.backend is self:
            return
        theirs, ours = sharded.terms, terms_of(self)
        if theirs["backend"] != ours["backend"]:  # their options can't be compared
            theirs, ours = {"backend": theirs["backend"]}, {"backend": ours["backend"]}
        changed = [key for key in ours if ours[key] != theirs.get(key)]
        differing = [f"{key} {_shown(theirs.get(key))}, now {_shown(ours[key])}" for key in changed]
        if differing:
            raise ShardingError(
                f"{sharded.class_name} was sharded by {sharded.strategy_name!r} before, with other settings: "
                f"{'; '.join(differing)}.\n"
                "Use the same options, or build the module again and load its checkpoint."
            )

    @abstractmethod
    def shard_module(self, module: nn.Module) -> Sharded:
        """Shard a module that is not sharded yet, in place.

        All ranks get rank 0's values, and parameters on the meta device are materialised;
        :func:`fsdp_core.sharding.place` does both. Called by :meth:`shard`, which first refuses what no backend can
        shard, and records the result.

        Args:
            module: The root module, unsharded on every rank.

        Raises:
            ShardingError: The module can't be sharded as requested.
        """

    def repoint(self, optimizers: Iterable[torch.optim.Optimizer], roots: Sequence[Sharded]) -> None:
        """Replace the parameters that optimizers were built over by the sharded ones.

        Args:
            optimizers: Changed in place; left alone if they hold the sharded parameters already.
            roots: The sharded roots whose parameters they may hold.

        Raises:
            OptimizerMismatchError: An optimizer holds a parameter of no root, or has stepped already.
        """
        layouts: list[Layout] = []
        for root in roots:
            root.reshard()  # gathered parameters must not be mistaken for those that an optimizer may hold
            layouts.append(root.layout())
        layout = {p: parts for of_root in layouts for p, parts in of_root.items()}
        by_name = [{part.name: p for p, parts in of_root.items() for part in parts} for of_root in layouts]

        def sharded(parameter: nn.Parameter) -> nn.Parameter | None:
            if parameter in layout:
                return parameter
            for root, named in zip(roots, by_name, strict=True):
                name = root.name_of(parameter)
                if name is not None:
                    return named.get(name)
            return None

        for optimizer in optimizers:
            repoint(optimizer, sharded, layout, self.runtime if self.owner_compute else None)

    def full_tensor(self, value: Any) -> Any:
        """Gather a state tensor on the CPU of rank 0; ``None`` on other ranks. All ranks must call it."""
        gathered = whole(value, self.runtime)
        return None if self.runtime.rank else gathered.cpu() if isinstance(gathered, Tensor) else gathered


def _shown(term: object) -> str:
    return repr(term.name if isinstance(term, ShardPrecision) else term)


def terms_of(backend: Backend) -> dict[str, Any]:
    """A backend's :meth:`Backend.terms`, with those of all backends, which an override may have left out."""
    return {**Backend.terms(backend), **backend.terms()}
