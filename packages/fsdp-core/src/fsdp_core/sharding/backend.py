"""How a module is sharded: the contract that every backend implements. Knows no Lightning."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, ClassVar
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor, nn

from fsdp_core.device_names import ANY_ACCELERATOR
from fsdp_core.errors import ShardingError
from fsdp_core.initialization.deferred_init import deferred_init
from fsdp_core.initialization.materialize import note_initialisers
from fsdp_core.initialization.wrap import mark_by_torch_wrap
from fsdp_core.mesh import Mesh
from fsdp_core.runtime import Runtime
from fsdp_core.sharding.agreement.arrivals import all_arrive
from fsdp_core.sharding.agreement.same_model import check_same
from fsdp_core.sharding.optimizers.rebinding import rebind_optimizer
from fsdp_core.sharding.options import ShardingOptions
from fsdp_core.sharding.plan import ParameterPlan, ShardingPlan, check_unchanged, plan_module
from fsdp_core.sharding.precision_strings import ShardPrecision
from fsdp_core.sharding.refusals.replaced_parameters import mark_replaced
from fsdp_core.sharding.refusals.unshardable_modules import check_shardable
from fsdp_core.sharding.sequence import SequenceSplit, use_split
from fsdp_core.sharding.sharded import Sharded, keep, sharded_of
from fsdp_core.sharding.units.wrap_policy import select_recomputed
from fsdp_core.state.fqn import named_parameters
from fsdp_core.state.full_tensor import gather_full
from fsdp_core.state.layout import Layout

__all__ = ["Backend", "sharding_config_of"]

log = logging.getLogger(__name__)


class Backend(ABC):
    """Shards modules. It holds what does not depend on a particular module: options, runtime and precision.

    An adapter calls :meth:`bind` once, then :meth:`plan` and :meth:`shard` with each of the user's modules, and from
    then on uses the returned :class:`~fsdp_core.Sharded`. A backend must implement :meth:`shard_module`.

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
        ...     def shard_module(self, module, plan):
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
    accelerators: ClassVar[tuple[str, ...]] = (ANY_ACCELERATOR, "cpu")
    #: Whether an optimizer that looks at whole parameters, such as Muon, may step over each of them on one rank
    #: (see :func:`~fsdp_core.sharding.optimizers.owner_compute.step_on_owners`): what an optimizer holds has its
    #: gradient in ``grad``.
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

    def sharding_config(self) -> dict[str, Any]:
        """The settings that a sharded module can't change any more, by name, for comparison.

        Its options about units, its class and its precision are compared whether or not an override returns them too.
        """
        return {"backend": type(self).__name__, "precision": self.precision, **self.options.sharding_config()}

    # -- planning: nothing of this changes the module ---------------------------------------------------------------

    def plan(self, module: nn.Module) -> ShardingPlan:
        """Plan how to shard a module, without changing it; one on the meta device too.

        The adapters let ranks compare their plans, and then call :meth:`shard` with it.

        Args:
            module: The user's module, not sharded yet.

        Returns:
            The plan. Why the module can't be sharded is its :attr:`~ShardingPlan.refusal`, so that ranks can compare
            that too: a rank that raised here would leave the others waiting.
        """
        config = sharding_config_of(self)
        if sharded_of(module) is not None:
            name = type(module).__name__
            why = ShardingError(
                f"{name} is sharded already, so there is nothing to plan.\n"
                "Read fsdp_core.sharding.sharded_of(module).plan; or call shard(module), which reuses it."
            )
            return ShardingPlan(class_name=name, config=config, refusal=why)
        return plan_module(
            module,
            config,
            check=self.check_shardable,
            units=self.units,
            replicated=self.replicated,
            recomputed=self.recomputed,
            details=self.details,
            local_numels=self.local_numels,
        )

    def check_shardable(self, module: nn.Module) -> None:
        """Refuse a module that can't be sharded. An override also calls this default, which is about any library.

        Raises:
            ShardingError: It has no parameters, a submodule is sharded already, or a parameter has a gradient hook.
        """
        check_shardable(module, sharded_of)

    def units(self, module: nn.Module) -> Sequence[nn.Module]:
        """The submodules that become FSDP units, innermost first, without the root."""
        return ()

    def replicated(self, module: nn.Module) -> Collection[Tensor]:
        """The parameters of which every rank keeps all, although the others are sharded."""
        return ()

    def recomputed(self, module: nn.Module) -> Sequence[nn.Module]:
        """The submodules that recompute their activations in the backward pass, as the option says.

        :meth:`shard_module` passes the plan to :func:`~fsdp_core.sharding.checkpoint_activations`.
        """
        # the option has this name in every backend that declares the capability, and the others have no such option
        return select_recomputed(module, getattr(self.options, "activation_checkpointing_policy", None))

    def details(self, module: nn.Module, units: Sequence[nn.Module]) -> Mapping[str, Mapping[str, Any]]:
        """What else the backend decides about a module, by topic and then by the name of a module.

        Args:
            module: The module.
            units: What :meth:`units` has returned.

        Returns:
            Plain data, or objects of which ranks compare the class alone.

        Raises:
            ShardingError: The module can't be sharded in these units.
        """
        return {}

    def local_numels(self, parameters: Sequence[ParameterPlan]) -> Sequence[int] | None:
        """How many elements this rank will keep of each parameter that one unit shards; ``None``: it does not say.

        Args:
            parameters: The parameters, in the order of the module's, without replicated ones.
        """
        return None

    # -- sharding --------------------------------------------------------------------------------------------------

    def shard(self, module: nn.Module, plan: ShardingPlan | None = None) -> Sharded:
        """Shard ``module`` over all ranks, or reuse a module that is sharded already. All ranks must call it.

        A Trainer calls it again in each stage, and a later strategy with a module that an earlier one has sharded.

        Args:
            module: The user's module, unsharded on every rank; or one that is sharded already, or its root.
            plan: What :meth:`plan` has returned for it, if it has not changed since; ``None`` to plan here, without a
                comparison between ranks.

        Returns:
            The module's :class:`~fsdp_core.Sharded`; its ``root`` is the module to call.

        Raises:
            ShardingError: The module can't be sharded as requested, is not as planned, or was sharded with other
                settings.
        """
        sharded = sharded_of(module)
        if sharded is None:
            if plan is None:
                plan = self.plan(module)
            elif plan.refusal is None:
                check_unchanged(module, plan, sharding_config_of(self))
            sharded = self._shard_as_planned(module, plan)
        else:
            self._check_config(sharded)
        sharded.backend = self
        return sharded

    def _shard_as_planned(self, module: nn.Module, plan: ShardingPlan) -> Sharded:
        if plan.refusal is not None:
            raise plan.refusal
        note_initialisers(module)
        # weak references, so that each parameter is freed as soon as sharding has replaced it
        former_parameters = [(name, ref(parameter)) for name, parameter in named_parameters(module)]
        plan = self._prepare_on_all(module, plan)
        former_parameters += [(name, ref(parameter)) for name, parameter in named_parameters(module)]
        user_modules = WeakValueDictionary(module.named_modules())
        sharded = self.shard_module(module, plan)
        sharded.plan, sharded.user_modules = plan, user_modules
        alive: list[tuple[str, nn.Parameter]] = []
        for name, reference in former_parameters:
            former_parameter = reference()
            if former_parameter is not None:
                alive.append((name, former_parameter))
        sharded.remember(alive)
        sharded_ids = {id(parameter) for parameter in (*sharded.layout(), *sharded.module.parameters())}
        mark_replaced((name, parameter) for name, parameter in alive if id(parameter) not in sharded_ids)
        keep(sharded)
        return sharded

    def _prepare_on_all(self, module: nn.Module, plan: ShardingPlan) -> ShardingPlan:
        """Call :meth:`prepare`, and raise on all ranks if it refuses the module on one, or ranks differ after it."""
        if type(self).prepare is Backend.prepare:
            return plan
        try:
            prepared = self.prepare(module, plan)
        except Exception as error:
            log.error("rank %d can't prepare %s", self.runtime.rank, plan.class_name, exc_info=error)
            prepared = replace(plan, refusal=error)
        # others may wait for this rank in a collective of prepare(): they learn of its error as it ends
        if not all_arrive(self.runtime, has_failed=prepared.refusal is not None) and prepared.refusal is not None:
            raise prepared.refusal
        check_same(self.runtime, plan.class_name, prepared.describe())
        if prepared.refusal is not None:
            raise prepared.refusal
        return prepared

    def prepare(self, module: nn.Module, plan: ShardingPlan) -> ShardingPlan:
        """Do what changes a module before it is sharded, such as running the user's own function over it.

        Ranks compare what an override returns, and what it raises is raised on all of them.

        Args:
            module: The module.
            plan: Its plan, which all ranks have agreed on.

        Returns:
            The plan to shard by: the same one, unless units or parameters have changed.

        Raises:
            ShardingError: The module can't be sharded as requested.
        """
        return plan

    @abstractmethod
    def shard_module(self, module: nn.Module, plan: ShardingPlan) -> Sharded:
        """Shard a module that is not sharded yet, in place.

        All ranks get rank 0's values, and parameters on the meta device are materialised;
        :func:`fsdp_core.sharding.place` does both. Called by :meth:`shard`, which records the result.

        Args:
            module: The root module, unsharded on every rank.
            plan: Which units, and what else, :meth:`plan` and :meth:`prepare` have decided.

        Raises:
            ShardingError: The module can't be sharded as requested.
        """

    def _check_config(self, sharded: Sharded) -> None:
        if sharded.backend is self:
            return
        former = sharded.plan.config
        current = sharding_config_of(self)
        if former["backend"] != current["backend"]:  # options of two backends can't be compared
            current = {"backend": current["backend"]}
        differing = [
            f"{name} {_describe_setting(former.get(name))}, now {_describe_setting(value)}"
            for name, value in current.items()
            if value != former.get(name)
        ]
        if differing:
            raise ShardingError(
                f"{sharded.plan.class_name} was sharded by {sharded.strategy_name!r} before, with other settings: "
                f"{'; '.join(differing)}.\n"
                "Use the same options, or build the module again and load its checkpoint."
            )

    def rebind_optimizers(self, optimizers: Iterable[torch.optim.Optimizer], roots: Sequence[Sharded]) -> None:
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
        layout = {p: parts for layout_of_root in layouts for p, parts in layout_of_root.items()}
        names_of_roots = [_parameters_by_name(layout_of_root) for layout_of_root in layouts]

        def find_sharded(parameter: nn.Parameter) -> nn.Parameter | None:
            if parameter in layout:
                return parameter
            for root, names in zip(roots, names_of_roots, strict=True):
                name = root.name_of(parameter)
                if name is not None:
                    return names.get(name)
            return None

        owners = self.runtime if self.owner_compute else None
        for optimizer in optimizers:
            rebind_optimizer(optimizer, find_sharded, layout, owners)

    def full_tensor(self, value: Any) -> Any:
        """Gather a state tensor on the CPU of rank 0; ``None`` on other ranks. All ranks must call it."""
        gathered = gather_full(value, self.runtime)
        if self.runtime.rank != 0:
            return None
        return gathered.cpu() if isinstance(gathered, Tensor) else gathered


def _parameters_by_name(layout: Layout) -> dict[str, nn.Parameter]:
    """The parameter that an optimizer may hold, by the name of each of its parts."""
    return {part.name: parameter for parameter, parts in layout.items() for part in parts}


def _describe_setting(value: object) -> str:
    return repr(value.name if isinstance(value, ShardPrecision) else value)


def sharding_config_of(backend: Backend) -> dict[str, Any]:
    """A backend's :meth:`Backend.sharding_config`, with the default's entries where an override leaves them out."""
    return {**Backend.sharding_config(backend), **backend.sharding_config()}
