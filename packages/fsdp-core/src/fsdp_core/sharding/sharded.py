"""The contract of a sharded root: steps, clipping and state. Independent of Lightning."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any
from weakref import WeakMethod, WeakSet, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.utils.weak import WeakTensorKeyDictionary

from fsdp_core.errors import CheckpointMismatchError, ShardingError
from fsdp_core.gradients.clipping import clip_grads_by_norm, clip_grads_by_value, is_sharded_dtensor
from fsdp_core.gradients.gathered_values import WrittenValues
from fsdp_core.gradients.step_writes import StepWrites
from fsdp_core.runtime import Runtime
from fsdp_core.sharding.plan import ShardingPlan
from fsdp_core.sharding.precision_strings import ShardPrecision
from fsdp_core.state.chunks import ChunkedTensor
from fsdp_core.state.filling import fill_all
from fsdp_core.state.fqn import aliases, clean_name, named_parameters
from fsdp_core.state.full_tensor import gathered_modules
from fsdp_core.state.held_gradients import HeldGradients, held_at_parameters, restore_at_parameters
from fsdp_core.state.layout import Layout, bytes_held, whole_parts
from fsdp_core.state.optimizer import load_optimizer_state, optimizer_state
from fsdp_core.state.saved_tensor import SavedTensor
from fsdp_core.torch_private.autograd import is_accumulated
from fsdp_core.torch_private.modules import loads_in_its_own_way

if TYPE_CHECKING:
    from fsdp_core.sharding.backend import Backend

__all__ = ["Sharded", "StateTensor", "copy_refusal", "sharded_around", "sharded_of"]

#: The value of a parameter in a checkpoint: a DTensor, a tensor that is the same on every rank, this rank's chunks, or,
#: on loading, a handle to the saved tensor.
StateTensor = Tensor | ChunkedTensor | SavedTensor

#: The attribute of a root, and of the user's module in it, that holds their :class:`Sharded`.
_KEY = "_fsdp_core_sharded"
#: All roots, and the lock that protects the set where ranks are threads.
_all_roots: WeakSet[Sharded] = WeakSet()
_roots_lock = threading.Lock()


class Sharded(ABC):
    """A module that a backend has sharded.

    A module outlives its strategy: this object stays with the module, and the next strategy reuses it if its backend
    has the same :meth:`~fsdp_core.Backend.sharding_config`. A copy or a pickle of the module has none.

    A backend must implement :meth:`no_sync`. The other methods work for libraries that shard in place, expose
    parameters as DTensors and whose ``state_dict()`` shares memory with the module. For other representations, override
    :meth:`unsharded_view`, :meth:`layout` and :meth:`is_shard`. Where modules expose shards as plain tensors, the
    adapters make their ``state_dict()`` raise; code that reads the shards on purpose calls
    ``type(module).state_dict(module)``. Hooks on modules must be functions that call :func:`sharded_of`, not methods,
    because a deep copy of the module has the hooks too.

    Parameters are named by their FQNs in the user's module (see :mod:`fsdp_core.state.fqn`).

    Args:
        root: The module to call: the user's module, or a library's wrapper around it.
        module: The user's module; ``None`` if that is the root.

    Attributes:
        root: The module to call.
        module: The user's module inside the root.
        backend: The current strategy's backend, with its options, runtime and precision.
        plan: How the module was sharded: its class, its parameters before that, its units.
        user_modules: The user's modules by their names in ``named_modules()`` before sharding.
        strategy_name: The name of the strategy that sharded it, for messages.
        written_values: What this rank has written to gathered parameters, where that is kept.
    """

    backend: Backend
    plan: ShardingPlan = ShardingPlan()
    user_modules: Mapping[str, nn.Module] = {}
    strategy_name: str = "a strategy"

    def __init__(self, root: nn.Module, module: nn.Module | None = None) -> None:
        self.root = root
        self.module = root if module is None else module
        self.written_values = WrittenValues()
        #: The names of parameters that represent shards; the user's optimizers and lists may hold these parameters.
        self._stands_for = WeakTensorKeyDictionary()
        self._after_inner_pass: WeakMethod[Callable[[], None]] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Return ``None``: a copy of the module is not sharded.

        Raises:
            ShardingError: The copy would hold this rank's shards as if they were whole, or a strategy or Fabric's
                wrapper is copied.
        """
        # without its module, it is copied as an attribute of a strategy, or of Fabric's wrapper
        is_copied_with_module = any(id(module) in memo for module in self._modules())
        if self.root not in gathered_modules and (self._is_in_pieces() or not is_copied_with_module):
            raise copy_refusal(self.plan.class_name, self.strategy_name)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.root not in gathered_modules and self._is_in_pieces():
            raise ShardingError(
                f"{self.plan.class_name} can't be pickled while {self.strategy_name!r} has it sharded: the file would "
                "hold what the rank that writes it has of it.\n"
                "Save fsdp_core.full_state_dict(module), which all ranks call, or a checkpoint."
            )
        return type(None), ()

    def _modules(self) -> tuple[nn.Module, nn.Module]:
        return self.root, self.module

    def _is_in_pieces(self) -> bool:
        """Whether the module exposes shards as plain parameters, or is inside a library's wrapper."""
        if self.root is not self.module:
            return True
        layout = self.layout()
        return any(part.range is not None for p in self.root.parameters() for part in layout.get(p, ()))

    @property
    def runtime(self) -> Runtime:
        """The ranks that the module is sharded over."""
        return self.backend.runtime

    @property
    def precision(self) -> ShardPrecision:
        """The dtypes of the shards."""
        return self.backend.precision

    # -- what it is made of ----------------------------------------------------------------------------------------

    @contextmanager
    def unsharded_view(self) -> Iterator[None]:
        """A context in which the module's parameters have the shapes and names that the user wrote.

        ``configure_optimizers`` and summaries run in it; the parameters can't be used for computation there. DTensors
        have global shapes anyway.
        """
        yield

    @contextmanager
    def unmanaged(self) -> Iterator[None]:
        """A context in which the user's modules can be called without running any of the library's code.

        :func:`fsdp_core.gathered` replaces parameters by whole values in it. As :meth:`unsharded_view`; a backend whose
        library registers hooks on the user's modules must also disable them.
        """
        with self.unsharded_view():
            yield

    def layout(self) -> Layout:
        """By parameter that an optimizer may hold, the parts of the user's parameters that it consists of.

        A DTensor tells itself which part of its parameter it is.
        """
        return whole_parts(named_parameters(self.root))

    def is_shard(self, parameter: Tensor) -> bool:
        """Whether ranks hold different parts of a parameter that an optimizer holds; true for sharded DTensors."""
        return is_sharded_dtensor(parameter)

    def is_guarded_shard(self, parameter: Tensor) -> bool:
        """Whether users are to be kept from computing with a parameter in a module as if it were the full one.

        True where the parameter is this rank's shard as a plain tensor, and its library only assigns to it. Adapters
        then refuse what users compute with it that is not elementwise, in a training step, in hooks between two steps,
        and after a fit.
        """
        return False

    def bytes_held(self) -> int:
        """The bytes of parameters on this rank; where one rank drives several devices, on the first device."""
        return bytes_held(self.layout())

    def aliases(self) -> dict[str, str]:
        """The additional names of tied parameters and shared buffers. See :func:`fsdp_core.state.aliases`."""
        with self.unsharded_view():
            return aliases(self.module)

    def record_parameter_names(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Record the names of parameters that represent shards: optimizers that hold one are rebound to its shard.

        The module's parameters from before sharding are recorded already. :meth:`unsharded_view` must record the
        stand-ins that it creates, and nothing else: a parameter that the user has added is not one of the module's own.

        Args:
            parameters: Names and parameters. The parameters are not kept alive.
        """
        for name, parameter in parameters:
            self._stands_for[parameter] = name

    def name_of(self, parameter: nn.Parameter) -> str | None:
        """The name of a parameter that was passed to :meth:`record_parameter_names`; ``None`` for others."""
        name: str | None = self._stands_for.get(parameter)
        return name

    # -- steps -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def no_sync(self) -> AbstractContextManager[None]:
        """A context in which backward passes accumulate gradients without reducing them.

        On exit it must turn reduction on again, also after an exception: use ``try`` and ``finally`` around ``yield``.
        """

    def reshard(self) -> None:
        """Free parameters that are still gathered. Called often, mostly with nothing to do.

        A forward pass without a backward pass leaves parameters gathered, which would be stale after a step.
        """

    def suspend_forward(self, loss: Tensor | None = None) -> None:
        """Suspend the root's forward pass in progress, for a backward pass or an optimizer step inside it.

        Manual optimization runs both there, where libraries may support neither.

        Args:
            loss: The tensor that the backward pass starts from; ``None`` before an optimizer step.
        """

    def resume_forward(self) -> None:
        """Resume the root's forward pass after a backward pass or an optimizer step inside it.

        The shards must have their gradients, and the root's parameters must be gathered with their current values.
        Gathered parameters must show those gradients as ``grad``, or raise: see
        :class:`~fsdp_core.sharding.StepGradients`.
        """

    def follow_written_shards(self) -> None:
        """Let the root's forward pass in progress compute with what was written to shards since it has gathered them.

        Called before each call of a part inside a step, mostly with nothing to do. Users write there to what an
        optimizer holds: SAM's second weights, decay by hand, averages that are evaluated.
        """

    def stepped_inside(self) -> None:
        """Gather the root's parameters anew after an optimizer's step under Fabric inside the root's forward pass.

        A method that ``mark_forward_method`` names runs inside the root's forward pass, and may take steps. Called
        after :meth:`reshard`. The default does nothing, for libraries whose :meth:`reshard` frees the parameters also
        inside a forward pass, and which gather them when they are used.
        """

    def is_idle(self) -> bool:
        """Whether neither a forward nor a backward pass of the root runs.

        Asked when a part is called in a backward pass: that is a forward pass of its own if the root is idle, and the
        recomputation of an earlier one if not. The default takes all such calls for recomputations.
        """
        return False

    def accumulates(self) -> bool:
        """Whether the backward pass that runs adds to gradients of the module: ``torch.autograd.grad`` does not."""
        return any(map(is_accumulated, self.root.parameters()))

    @property
    def asks_accumulates(self) -> Callable[[], bool]:
        """A function that asks :meth:`accumulates`, for hooks: it keeps nothing alive, and can be copied with them."""
        return partial(_accumulates, ref(self))

    def follow_inner_passes(self, call: WeakMethod[Callable[[], None]]) -> None:
        """Call a method after each backward pass inside the root's forward pass that has added to gradients.

        Those of :meth:`suspend_forward` need not be among them.
        """
        self._after_inner_pass = call

    def inner_pass_ended(self) -> None:
        """Call what :meth:`follow_inner_passes` has set. Libraries call this when such a backward pass has ended."""
        call = None if self._after_inner_pass is None else self._after_inner_pass()
        if call is not None:
            call()

    def gather_again(self) -> None:
        """Gather the root's own parameters for a call inside a backward pass, which may have freed them already."""

    def end_call(self) -> None:
        """Free parameters after a call outside of a step, unless the graph of a backward pass still holds them."""
        if not self.keeps_graph:
            self.reshard()

    #: The methods that register hooks on a shard which the library calls with the reduced gradient, once per reduction.
    called_hooks: tuple[str, ...] = ()

    #: Whether a backward pass inside a forward pass that began under ``no_grad()`` gives the root's parameters their
    #: gradients: whether an optimizer may step in ``validation_step``.
    trains_in_evaluation: bool = False

    #: Whether parameters stay gathered because a backward pass has recorded its own graph, which holds them.
    keeps_graph: bool = False

    #: Whether the root was called in a backward pass that may still run.
    is_called_in_backward: bool = False

    #: Whether parameters were freed that the graph of :attr:`keeps_graph` holds: the graph can't be differentiated any
    #: more.
    has_freed_parameters_of_graph: bool = False

    def leaves(self) -> Iterable[Tensor]:
        """The tensors to which autograd adds gradients. The default is for libraries where these are parameters."""
        return self.root.parameters()

    def written_since_gathered(self, numel: int, times: int) -> list[str]:
        """The names of parameters whose shards were written to between the forward pass and the backward pass.

        Asked where torch has raised that a backward pass needs a tensor that was written to.

        Args:
            numel: The number of elements of that tensor.
            times: How often it was written to, as torch counts it.
        """
        return []

    def watch_writes(self) -> StepWrites | None:
        """Watch the writes of a run's first step to gathered parameters, which would silently be lost.

        The step is the Trainer's first ``training_step``; under Fabric, the forward passes before the first step of an
        optimizer.

        Called before its forward pass. Return ``None``, as here, if writes to gathered parameters are kept.
        """
        return None

    def keep_writes(self) -> None:
        """Copy what was written to gathered parameters to their shards, and to :attr:`written_values`.

        Called at the end of a step, and inside one by hand before a backward pass or an optimizer's step. A library
        that frees what was written earlier must keep it itself before that.

        Raises:
            ShardingError: What was written can't be kept.
        """

    def show_gradients(self) -> None:
        """Let gathered parameters show the gradients of shards from the beginning of a step, as after a backward pass.

        Called inside a forward pass of the root, at the beginning of a step of manual optimization: gradients of
        earlier steps are there, which ``module.zero_grad()`` is to forget.
        """

    def end_forward(self) -> None:
        """Let what stays gathered after the root's forward pass show the gradients of shards until the backward pass.

        Called after a training step of automatic optimization, before hooks that read and write gradients.
        """

    def follow_requires_grad(self) -> None:
        """Copy ``requires_grad`` from the shards to the gathered parameters.

        Called inside a forward pass of the root, after ``toggle_optimizer`` has changed the shards'.
        """

    def reset(self) -> None:
        """Make the module usable again after an exception in a forward or backward pass."""

    def abandon_forward(self) -> None:
        """Make the module usable again after an exception in a forward pass outside a step.

        Keeps gradients, and forward passes of steps that wait for their backward pass. The default, for libraries that
        can't do that, is :meth:`reset`.
        """
        self.reset()

    @property
    def is_interrupted(self) -> bool:
        """Whether an exception has ended a backward pass, and nothing has mended that. Asked outside of such passes."""
        return False

    def mend_interrupted(self) -> None:
        """Make the module usable again after a backward pass that was interrupted by an exception, if there was one.

        Called before each forward pass of the root: under Fabric, nothing else reports an exception.

        Raises:
            ShardingError: There are gradients, which may be from a part of that backward pass.
        """

    def mend_inside(self) -> None:
        """As :meth:`mend_interrupted`, inside the root's forward pass, which goes on: a step has caught the exception.

        Called if :attr:`is_interrupted`, before a part is called, a loss is differentiated or an optimizer steps.
        """
        self.mend_interrupted()
        self.resume_forward()

    def check_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Refuse gradients that must be equal on ranks, and are not. All ranks must call it.

        Called before an optimizer's first step, and with tensor parallelism before its second, fourth, eighth and so
        on. The default checks nothing.

        Args:
            parameters: The optimizer's parameters, whose gradients are complete.

        Raises:
            ShardingError: Such a gradient differs between ranks.
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
            parameters: An optimizer's parameters.
            max_norm: The maximum norm; ``float("inf")`` to compute the norm without clipping.
            norm_type: The order of the norm, positive.
            error_if_nonfinite: Whether a norm that is not finite raises.

        Returns:
            The norm before clipping, a 0-dim tensor. See :func:`fsdp_core.sharding.clip_grads_by_norm`.
        """
        return clip_grads_by_norm(
            parameters,
            max_norm,
            runtime=self.runtime,
            is_sharded=self.is_shard,
            norm_type=norm_type,
            error_if_nonfinite=error_if_nonfinite,
        )

    def clip_value(self, parameters: Iterable[Tensor], clip_value: float) -> None:
        """Clip each gradient element. See :func:`fsdp_core.sharding.clip_grads_by_value`."""
        clip_grads_by_value(parameters, clip_value)

    # -- state -----------------------------------------------------------------------------------------------------

    def model_state(self) -> dict[str, Any]:
        """The module's state by FQN, sharing memory with it: each value is a :data:`StateTensor`, or extra state."""
        return {clean_name(name): value for name, value in type(self.root).state_dict(self.root).items()}

    def load_model_state(self, state: Mapping[str, Any], strict: bool = True, *, check_only: bool = False) -> None:
        """Restore the module's state, in place. Everything is checked before anything is changed.

        Args:
            state: By FQN: a :data:`StateTensor`, or extra state.
            strict: Whether names and dtypes must match exactly. Shapes must always match.
            check_only: Whether to only check, and change nothing.

        Raises:
            CheckpointMismatchError: They don't match. The module is unchanged.
        """
        own_state = self.model_state()
        resized = self.resized_as_they_load(own_state, state)
        own_state = {name: value for name, value in own_state.items() if name not in resized}
        tensors = {name: value for name, value in _tensors(state).items() if name not in resized}
        fill_all(_tensors(own_state), tensors, strict=strict, cast=not strict, check_only=check_only)
        if check_only:
            return
        # torch does not count that a file is read into the parameters' memory; a graph that has saved them is to raise
        filled = [p for p, parts in self.layout().items() if any(part.name in state for part in parts)]
        increment_version([parameter for parameter in filled if not parameter.is_inference()])
        module = self.module
        with self.unsharded_view():
            # other entries than these, such as extra state, were not filled: state_dict() returns copies of them, which
            # only the module can load
            parameters = module.named_parameters(remove_duplicate=False)
            buffers = module.named_buffers(remove_duplicate=False)
            loaded_names = {clean_name(name) for name, _ in chain(parameters, buffers)} - resized.keys()
            raw_names = {clean_name(name): name for name in type(module).state_dict(module)}
            extra_names = (own_state.keys() | resized.keys()) - loaded_names
            extra = {raw_names[name]: _read(value) for name, value in state.items() if name in extra_names}
            if extra:
                self.let_modules_load(module, extra, resized)
        self.adopt_model_state(own_state)

    def let_modules_load(self, module: nn.Module, values: Mapping[str, Any], resized: Mapping[str, Any]) -> None:
        """Let modules load entries of a state dict in their own ways.

        Args:
            module: The module that is loaded into.
            values: The entries, whole, by the names of :meth:`torch.nn.Module.state_dict`.
            resized: What :meth:`resized_as_they_load` has returned.

        Raises:
            CheckpointMismatchError: A module has not resized a buffer.
        """
        try:
            type(module).load_state_dict(module, values, strict=False)
        except RuntimeError as error:
            if not resized:
                raise
            raise CheckpointMismatchError(
                f"{next(iter(resized))!r} has another shape in the checkpoint, and the module that loads it did not "
                f"resize it ({error}).\nLoad it into the model that it was saved from."
            ) from error

    def resized_as_they_load(self, live: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
        """Saved buffers of another shape than the module's, whose modules may resize them as they load.

        A module that loads its state in a way of its own may do so, as observers of quantization-aware training do, and
        vocabularies that grow. Such modules load the whole saved value.
        """
        resized = {
            name: value
            for name, value in _tensors(state).items()
            if isinstance(live.get(name), Tensor) and live[name].shape != torch.Size(value.shape)
        }
        modules = {clean_name(name): module for name, module in self.module.named_modules()} if resized else {}

        def loads_itself(name: str) -> bool:
            owner, _, attribute = name.rpartition(".")
            module = modules.get(owner)
            if module is None or attribute not in module._buffers:
                return False
            return loads_in_its_own_way(module)

        return {name: value for name, value in resized.items() if loads_itself(name)}

    def adopt_model_state(self, state: Mapping[str, Any]) -> None:
        """Copy the filled result of :meth:`model_state` back to the module. Not needed where they share memory."""

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
        """This rank's gradients, sharing memory with them: its own unreduced ones, and its shards of reduced ones.

        All ranks must call it. A library that stores gradients elsewhere than at the parameters inside :meth:`no_sync`
        must add them.
        """
        return held_at_parameters(self.layout())

    def forget_unreduced(self, names: Collection[str]) -> None:
        """Discard the gradients of these parameters that :meth:`no_sync` has left unreduced.

        Called by ``optimizer.zero_grad()`` during gradient accumulation, after it has done its own work. This default
        clears the gradients that :meth:`accumulated_gradients` returns.
        """
        for name, gradient in self.accumulated_gradients().own.items():
            if name in names:
                gradient.zero_()

    def restore_gradients(
        self, own: Mapping[str, Callable[[], Tensor]], reduced: Mapping[str, Tensor | SavedTensor]
    ) -> None:
        """Restore gradients from :meth:`accumulated_gradients`, before the next forward pass.

        Existing gradients are replaced. All ranks must call it. This default is for gradients that are stored at the
        parameters; a library that stores some elsewhere calls it with the others.

        Args:
            own: Functions that read this rank's unreduced gradients, by parameter name.
            reduced: The gradients that are already reduced, by parameter name.

        Raises:
            CheckpointMismatchError: A gradient belongs to no parameter that can take it, or has another shape.
        """
        restore_at_parameters(self.layout(), type(self.root).__name__, own, reduced)


def copy_refusal(class_name: str, strategy_name: str) -> ShardingError:
    """The error to raise for a copy of a sharded module.

    Args:
        class_name: The user's class.
        strategy_name: The name of the strategy that has it sharded.
    """
    return ShardingError(
        f"a copy of {class_name} was asked for while {strategy_name!r} has it sharded: it would hold what this rank "
        "has of it, as if it were a model.\n"
        "Copy the model before it is sharded, in __init__() or configure_model(), or before fabric.setup(); or copy "
        "the user's module within fsdp_core.gathered(module), on all ranks, where its values are whole."
    )


def sharded_of(module: nn.Module) -> Sharded | None:
    """The :class:`Sharded` of a root or of the user's module in it; ``None`` for any other module.

    Example:
        >>> print(sharded_of(nn.Linear(2, 1)))
        None
    """
    sharded: Sharded | None = module.__dict__.get(_KEY)
    # a shallow copy has the module's attributes
    return sharded if sharded is not None and (module is sharded.root or module is sharded.module) else None


def sharded_around(module: nn.Module) -> tuple[Sharded, str] | None:
    """The sharded root that contains a module, and the module's FQN prefix in it; ``None`` if there is none.

    Args:
        module: A root, the user's module in it, or a submodule.
    """
    with _roots_lock:
        roots = list(_all_roots)
    candidates = [(raw, sharded) for sharded in roots for raw, inner in sharded.root.named_modules() if inner is module]
    if not candidates:
        return None
    raw, sharded = max(candidates, key=lambda candidate: len(candidate[0]))  # the wrapper, rather than the module in it
    name = clean_name(raw)
    return sharded, f"{name}." if name else ""


def attach_sharded(sharded: Sharded) -> None:
    """Attach a :class:`Sharded` to its root and to the user's module."""
    with _roots_lock:
        _all_roots.add(sharded)
    for module in sharded._modules():
        module.__dict__[_KEY] = sharded


def _read(value: Any) -> Any:
    return value.full() if isinstance(value, SavedTensor) else value


def _tensors(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if isinstance(value, StateTensor)}


def _accumulates(reference: ref[Sharded]) -> bool:
    sharded = reference()
    return sharded is None or sharded.accumulates()
