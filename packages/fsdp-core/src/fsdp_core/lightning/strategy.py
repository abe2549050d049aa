"""What both adapters share: where ranks run, how they communicate, and what is refused on all of them."""

from __future__ import annotations

import inspect
import logging
import operator
import os
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from itertools import chain
from typing import Any, ClassVar, Literal, Self, TypeVar, cast
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from fsdp_core.checkpoint.async_save import AsyncSaves
from fsdp_core.checkpoint.storage.joined import shown_paths
from fsdp_core.errors import CheckpointError, ShardingError, UnsupportedCapabilityError
from fsdp_core.gradients.zero_grad import on_zero_grad
from fsdp_core.initialization.sharded_init import check_same_parts
from fsdp_core.lightning.capabilities import check_checkpoint, check_materialization, check_options, require
from fsdp_core.lightning.checkpoints.sharded_or_full import SavePlace
from fsdp_core.lightning.finite_gradients import check_error_if_nonfinite
from fsdp_core.lightning.hooks.redirection import follow_calls, is_inside_forward, normal_tensors
from fsdp_core.lightning.launch_checks import check_launched
from fsdp_core.lightning.notebooks import check_interactive, is_interactive
from fsdp_core.lightning.options import describe_class, signature_of, strategy_options
from fsdp_core.lightning.private import reset_seed
from fsdp_core.lightning.ray_train import RayWorker, ray_worker
from fsdp_core.lightning.setup_checks import (
    check_devices,
    check_scattered_save,
    check_state_dict_type,
    check_waiting,
    hang_duration,
    reduce_op_name,
    set_rank_zero,
)
from fsdp_core.mesh import DATA_AXES, GRADIENT_AXES, Mesh
from fsdp_core.plugins.strategy_info import Capability
from fsdp_core.plugins.unknown_options import refuse_unknown_options
from fsdp_core.runtime import ProcessGroupRuntime, Runtime
from fsdp_core.sharding.backend import Backend, sharding_config_of
from fsdp_core.sharding.gradient_hooks import refuse_gradient_hooks
from fsdp_core.sharding.host_agreement import check_same_packages, versions_of
from fsdp_core.sharding.late_parameters import refuse_late
from fsdp_core.sharding.local_pieces import refuse_files_of_optimizer, refuse_files_of_shards, refuse_state_dicts
from fsdp_core.sharding.mixed_precision import ShardPrecision
from fsdp_core.sharding.optimizer_agreement import check_same_optimizers
from fsdp_core.sharding.options import ShardingOptions, option_names
from fsdp_core.sharding.plan import ShardingPlan
from fsdp_core.sharding.rank_agreement import check_same, facts_of_options, facts_of_packages
from fsdp_core.sharding.sharded import Sharded, sharded_of
from fsdp_core.state.fqn import clean_name
from fsdp_core.state.full_tensor import check_not_gathered
from fsdp_core.watch import watch

__all__ = ["ShardedStrategy", "size_in_words"]

_Path = TypeVar("_Path", str, str | list[str])

#: The parameters that optimizers held when they were last checked.
_held: WeakKeyDictionary[Optimizer, list[ref[Tensor]]] = WeakKeyDictionary()

#: How long torch's collectives wait. Those of NCCL wait a third of it, but Lightning's strategies give them as long.
_TORCHS_TIMEOUT = timedelta(minutes=30)


_SIZES = ("B", "KiB", "MiB", "GiB", "TiB")

_log = logging.getLogger(__name__)


class ShardedStrategy:
    """The half of a strategy that is the same under Trainer and Fabric. Comes before Lightning's class.

    A package's strategy names its options and its backend, once for both front ends, and inherits the rest::

        class Theirs(ShardedStrategy):
            strategy_name = "theirs"
            options_class = TheirsOptions
            backend_class = TheirsBackend

        class TheirsStrategy(Theirs, ShardedTrainerStrategy): ...

    The constructor takes the options by keyword; its signature and the class's docstring follow from ``options_class``.

    Attributes:
        strategy_name: The name that users type.
        options_class: The class of the options.
        backend_class: The class of the backend, which is made of them.
        positional: The names of the options that may be given by position.
        left_out: The names of options of all strategies that this one does not take.
        others_options: By option of another library, what to write instead.
        happens_anyway: Values of such options that ask for what happens anyway.
        options: The options of this strategy.
        backend: How modules are sharded.
        runtime: How the ranks communicate.
        state_dict_type: ``"sharded"`` or ``"full"``.
        timeout: How long a collective may wait for the other ranks.
        async_saves: Writes checkpoints in the background; ``None`` if a save returns once everything is written.
        sequential_save: Whether the ranks of a host write their shards of a checkpoint one after another.
        scattered_save: Whether each rank saves a checkpoint where it stands.
        error_if_nonfinite: Whether to raise before a step whose gradients are not finite.
        hang_timeout: How long ranks may wait for each other at one place before all end; ``None`` to watch nothing.
        make_before: Where users can create parameters before sharding, as a sentence.
        log: Lightning's logger for rank 0, whose level users set.
    """

    strategy_name: str
    options_class: ClassVar[type[ShardingOptions]] = strategy_options(ShardingOptions)
    backend_class: ClassVar[type[Any]]  # a Backend, made of the options
    positional: ClassVar[Sequence[str]] = ()
    left_out: ClassVar[Collection[str]] = ()
    others_options: ClassVar[Mapping[str, str]] = {}
    happens_anyway: ClassVar[Mapping[str, Collection[object]]] = {}

    make_before: ClassVar[str]

    launcher_class: ClassVar[Any]
    _fork_launcher_class: ClassVar[Any]  # in notebooks
    log: ClassVar[logging.Logger]
    __signature__: ClassVar[inspect.Signature]

    options: Any  # of options_class
    backend: Backend
    runtime: Runtime
    state_dict_type: Literal["sharded", "full"]
    timeout: timedelta | None
    async_saves: AsyncSaves | None
    sequential_save: bool = False
    scattered_save: bool = False
    error_if_nonfinite: bool = False
    hang_timeout: timedelta | None = None
    _worker: RayWorker | None = None  # under Ray Train
    _unreduced: WeakSet[Sharded]  # roots with unreduced backward passes since the last step

    _built_with: tuple[tuple[Any, ...], dict[str, Any]]  # the constructor's arguments

    # of Lightning's ParallelStrategy
    cluster_environment: ClusterEnvironment | None
    parallel_devices: list[torch.device] | None
    num_nodes: int
    local_rank: int
    node_rank: int
    global_rank: int
    world_size: int

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.options_class = strategy_options(cls.options_class)
        cls.__signature__ = signature_of(cls, ShardedStrategy)  # otherwise Sphinx would show that of __new__
        if "__init__" not in vars(cls):
            cls.__init__ = _constructor(cls)  # type: ignore[method-assign]  # of its own, for jsonargparse to read
        cls.__doc__ = describe_class(cls, cls.options_class, cls.__signature__.parameters)

    def __new__(cls, *args: Any, **options: Any) -> Self:
        # before the constructor, which may not accept the refused options at all
        check_options(cls, args, options)
        strategy = super().__new__(cls)
        strategy._built_with = args, options
        return strategy

    def _take_options(self, positional: Sequence[Any], given: Mapping[str, Any]) -> None:
        """Read the constructor's arguments, and make the backend and the runtime, before Lightning's constructor runs.

        Args:
            positional: Those that were given by position.
            given: Those that were given by keyword.

        Raises:
            UnsupportedCapabilityError: An option is unknown, or can't be used.
        """
        values = self._by_name(positional, given)
        names = [name for name in option_names(self.options_class) if name not in self.left_out]
        unknown = {name: value for name, value in values.items() if name not in names}
        near = {"backend": "Did you mean 'process_group_backend'?"} if "process_group_backend" in names else {}
        refused: list[str] = []
        try:
            instead = {**near, **self.others_options}
            refuse_unknown_options(self.strategy_name, type(self), unknown, instead, always=self.happens_anyway)
        except UnsupportedCapabilityError as error:
            refused.append(str(error))
        try:
            self.options = options = self.options_class(**{name: values[name] for name in names if name in values})
        except UnsupportedCapabilityError as error:
            refused.append(str(error))
        if refused:
            raise UnsupportedCapabilityError("\n".join(refused))
        check_state_dict_type(options.state_dict_type)
        check_waiting(options.timeout, options.async_save)
        check_error_if_nonfinite(options.error_if_nonfinite)
        check_scattered_save(options.scattered_save, options.state_dict_type)
        self.scattered_save, self.error_if_nonfinite = options.scattered_save, options.error_if_nonfinite
        self.hang_timeout = hang_duration(options.hang_timeout)
        self.state_dict_type, self.timeout = options.state_dict_type, options.timeout
        self.backend, self.runtime = self.new_backend(), self.new_runtime()
        self.async_saves = AsyncSaves(self.runtime) if options.async_save else None
        self._unreduced = WeakSet()
        self._steps_compared: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()

    def _by_name(self, positional: Sequence[Any], given: Mapping[str, Any]) -> dict[str, Any]:
        """The constructor's arguments by name."""
        values = dict(zip(self.positional, positional, strict=False))
        twice = [name for name in values if name in given]
        if len(positional) > len(self.positional) or twice:
            name = type(self).__name__
            why = f"{twice[0]} is given by keyword too" if twice else f"only {len(self.positional)} can be so given"
            raise TypeError(
                f"{name} was given {len(positional)} options by position, and {why}.\n"
                f"Write keywords: {name}({', '.join(f'{each}=...' for each in self.positional[:2])}, ...)."
            )
        return {**values, **given}

    def new_backend(self) -> Backend:
        """The backend, made of the options."""
        backend: Backend = self.backend_class(self.options)
        return backend

    def new_cluster_environment(self) -> ClusterEnvironment | None:
        """Where the ranks run; ``None``: Lightning finds out."""
        return cast(ClusterEnvironment | None, self.options.cluster_environment)

    def new_runtime(self) -> Runtime:
        """How the ranks communicate: a process group, unless a strategy says otherwise."""
        return ProcessGroupRuntime(getattr(self.options, "process_group_backend", None))

    def require(self, capability: Capability, asked: str) -> None:
        """Raise :class:`~fsdp_core.errors.UnsupportedCapabilityError` if the strategy does not declare it."""
        require(self.strategy_name, capability, asked)

    def _shard(self, module: nn.Module) -> Sharded:
        """Shard a module, or take over one that is sharded already. All ranks must call it."""
        if not hasattr(self.backend, "runtime"):
            raise ShardingError(
                f"{self.strategy_name}: its ranks were not started in this process.\n"
                "Call fabric.launch() of the same Fabric before its setup(); where launch(function) starts the ranks, "
                "do in the function what needs them."
            )
        reused = sharded_of(module)
        plan = self.backend.plan(module) if reused is None else None
        self._compare_between_ranks(module, plan)
        check_materialization(self.strategy_name, module)
        with normal_tensors():
            sharded = self.backend.shard(module, plan)
        if reused is None:
            sharded.strategy_name = self.strategy_name
        else:
            self._refuse_late(sharded)
        layout = sharded.layout()
        has_parts = any(isinstance(p, DTensor) or sharded.holds_part(p) for p in layout)
        if has_parts or sharded.written is not sharded.root:
            follow_calls(sharded, meet=has_parts)
        refuse_state_dicts(sharded.root, sharded.plan.names, layout, self.strategy_name)
        refuse_files_of_shards(sharded.root, self.strategy_name)
        held = [(clean_name(name), parameter) for name, parameter in sharded.root.named_parameters()]
        optimizer_params = [(of[0].name, parameter) for parameter, of in layout.items()]
        refuse_gradient_hooks([*held, *optimizer_params], sharded.called_hooks)
        if reused is None:
            _announce(self.log, sharded)
        return sharded

    def _refuse_late(self, sharded: Sharded, optimizers: Iterable[Optimizer] = ()) -> None:
        """Refuse parameters that were added to the module after it was sharded."""
        with sharded.as_written():
            refuse_late(sharded.written, sharded.plan.names, optimizers, self.make_before)

    def _take_optimizers(self, optimizers: Sequence[Optimizer], roots: Sequence[Sharded]) -> None:
        """Compare new optimizers over all ranks, and make them hold shards. All ranks must call it."""
        check_same_optimizers(self.runtime, optimizers)
        self._repoint(optimizers, roots)

    def _repoint(self, optimizers: Sequence[Optimizer], roots: Sequence[Sharded]) -> None:
        """Make optimizers hold shards, and refuse parameters that were added after sharding."""
        for root in roots:
            if _is_held(root, optimizers):
                self._refuse_late(root, optimizers)
        self.backend.repoint(optimizers, roots)
        for optimizer in optimizers:
            self._follow_zero_grad(optimizer, roots)
            _held[optimizer] = [ref(parameter) for parameter in _parameters_of(optimizer)]
            refuse_files_of_optimizer(optimizer, _held_in_parts(optimizer, roots), self.strategy_name)

    def _follow_zero_grad(self, optimizer: Optimizer, roots: Sequence[Sharded]) -> None:
        """Make ``zero_grad()`` also discard unreduced gradients, which are not stored at the shards."""
        held = {id(parameter) for parameter in _parameters_of(optimizer)}
        trained: list[tuple[ref[Sharded], set[str]]] = []
        for root in roots:
            parts = [part for p, parts in root.layout().items() if id(p) in held for part in parts]
            trained.append((ref(root), {part.name for part in parts}))
            on_zero_grad(root.written, partial(_discard_unreduced, ref(root), self._unreduced))
        unreduced = self._unreduced

        def discard() -> None:
            for one, names in trained:
                root = one()
                if root is not None and root in unreduced:
                    root.forget_unreduced(names)

        on_zero_grad(optimizer, discard)

    def _follow_added_parameters(self, optimizer: Optimizer, roots: Sequence[Sharded]) -> None:
        """Re-point or refuse parameters that an optimizer was given since the last check, before it is stepped."""
        now, known = _parameters_of(optimizer), _held.get(optimizer, [])
        if len(now) != len(known) or not all(map(operator.is_, now, map(operator.call, known))):
            name = type(optimizer).__name__
            self.runtime.meet(f"a change of the parameters of {name}, of which all ranks hold parts,")
            self._repoint([optimizer], roots)

    def _check_first_gradients(self, optimizer: Optimizer, roots: Sequence[Sharded]) -> None:
        """Let roots check the gradients of an optimizer's first step. All ranks must call it.

        With tensor parallelism, those of the second, fourth, eighth step and so on too, and of every 1,024th: a
        gradient may be zero at first, behind a gate or a layer that is initialised to zeros, parameters may be
        unfrozen or added later, and one rank may draw a random number that its peers do not.
        """
        optimizer = getattr(optimizer, "_optimizer", optimizer)  # Lightning's wrapper around the user's
        step = self._steps_compared[optimizer] = self._steps_compared.get(optimizer, 0) + 1
        is_due = step == 1 or (self.runtime.mesh.tensor_parallel > 1 and (step & (step - 1) == 0 or step % 1024 == 0))
        if not is_due or self.runtime.world_size == 1:
            return
        for root in roots:
            layout = root.layout()
            if held := [p for p in _parameters_of(optimizer) if p in layout]:
                root.check_gradients(held)

    def _compare_between_ranks(self, module: nn.Module, plan: ShardingPlan | None) -> None:
        """Raise on all ranks if they are about to do different things. All ranks must call it.

        Args:
            module: The module.
            plan: How this rank is about to shard it; ``None`` if it is sharded already.
        """
        if self.runtime.world_size == 1:
            return
        facts = self._describe_run(module, sharding_config_of(self.backend) if plan is None else plan.config)
        facts |= {"state": "sharded already"} if plan is None else plan.describe()
        check_same(self.runtime, type(module).__name__, facts)
        if plan is not None and plan.refusal is None:  # otherwise sharding raises on all ranks, or is not needed
            check_same_parts(module, self.runtime)

    def _describe_run(self, module: nn.Module, config: Mapping[str, Any]) -> dict[str, str]:
        """Describe packages and options, by topic, for comparison with the other ranks.

        Args:
            module: The module that is sharded.
            config: How it is sharded.
        """
        options = {
            "state_dict_type": self.state_dict_type,
            "async_save": self.async_saves is not None,
            "sequential_save": self.sequential_save,
            "scattered_save": self.scattered_save,
            "error_if_nonfinite": self.error_if_nonfinite,
            "hang_timeout": self.hang_timeout,
            **{name: value for name, value in config.items() if name != "precision"},
        }
        return {
            **facts_of_packages(module, type(self), type(self.backend)),
            "strategy": repr(self.strategy_name),
            "precision": repr(self.shard_precision.name),
            **facts_of_options(options),
        }

    @contextmanager
    def _no_sync(self, sharded: Sharded) -> Iterator[None]:
        """The root's ``no_sync``, exited as if nothing was raised in it, since some have no ``finally``.

        Otherwise every gradient would silently be ``None`` after an exception.
        """
        sharded.backend = self.backend  # another strategy may have used the module in between
        context = sharded.no_sync()
        context.__enter__()
        try:
            yield
        finally:
            context.__exit__(None, None, None)

    def _check_empty_init(self, empty_init: bool | None) -> None:
        if empty_init:
            self.require(Capability.META_INIT, "empty_init=True")

    def _check_saving(self, roots: Iterable[Sharded]) -> None:
        for sharded in roots:
            check_not_gathered(sharded.root, "a checkpoint")
            if is_inside_forward(sharded.root):
                raise ShardingError(
                    "a checkpoint was requested inside a step, whose forward pass needs the gathered parameters.\n"
                    "Save it in a hook after the step, such as on_train_batch_end()."
                )
        kind = self.state_dict_type
        check_checkpoint(self.strategy_name, kind, f"a checkpoint with state_dict_type={kind!r}")

    def wait_for_saves(self) -> None:
        """Wait until all requested checkpoints are complete, also with ``async_save=True``. All ranks must call it.

        Raises:
            CheckpointError: A checkpoint could not be saved.
        """
        if self.async_saves is not None:
            self.async_saves.wait()

    def _let_saves_finish(self, exception: BaseException) -> None:
        """Wait for pending saves; a failure is added as a note to ``exception``, which is the one to raise."""
        try:
            self.wait_for_saves()
        except CheckpointError as failure:
            exception.add_note(f"{type(failure).__name__}: {failure}")
            if not isinstance(exception, Exception):  # an interrupt, whose notes are not shown
                _log.error("%s", failure)

    @property
    def shard_precision(self) -> ShardPrecision:
        """The dtypes of the shards."""
        raise NotImplementedError

    @property
    def root_device(self) -> torch.device:
        """The device of this rank."""
        if self._worker is not None:
            return self._worker.device
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """The number of ranks on this host."""
        return len(self.parallel_devices or ()) if self._worker is None else self._worker.local_world_size

    def _numbers(self) -> tuple[int, int]:
        """This rank and the number of ranks, which are known before they have joined."""
        if self._worker is not None:
            return self._worker.rank, self._worker.world_size
        return self.node_rank * self.num_processes + self.local_rank, self.num_nodes * self.num_processes

    @property
    def mesh(self) -> Mesh:
        """How the ranks are arranged."""
        return self.runtime.mesh

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The sampler's arguments: every data-parallel rank gets its own part of the data.

        Before the ranks have joined, they follow from their numbers, as under Lightning's own strategies.
        """
        rank, ranks = self._numbers()
        if self.runtime.world_size == 1 < ranks:
            mesh = self.backend.mesh(ranks)
            return {"num_replicas": mesh.size(DATA_AXES), "rank": mesh.coordinate(rank, DATA_AXES)}
        return {"num_replicas": self.runtime.data_parallel_world_size, "rank": self.runtime.data_parallel_rank}

    def _number_ranks(self) -> None:
        """Set the rank in the cluster environment and in Lightning's rank-zero helpers."""
        environment = self.cluster_environment
        self._worker = ray_worker(environment, ShardedStrategy)
        if environment is not None:
            rank, ranks = self._numbers()
            environment.set_global_rank(rank)
            environment.set_world_size(ranks)
        set_rank_zero(self.global_rank)

    def _configure_launcher(self) -> None:
        environment = self.cluster_environment
        assert environment is not None
        forks = is_interactive() and self.num_processes > 1 and not environment.creates_processes_externally
        precision = None if forks else self.shard_precision  # which the ranks check: see check_devices
        check_devices(self.strategy_name, self.backend, self.parallel_devices, precision)
        if self._worker is not None:
            self._worker.check_devices(self.parallel_devices or ())
        else:
            check_launched(self.cluster_environment, self.num_processes, self.num_nodes)
        self.backend.mesh(self._numbers()[1])  # fail before any process is started
        if environment.creates_processes_externally:
            return
        if is_interactive():  # one rank needs no process of its own
            check_interactive(self.strategy_name, self.num_nodes)
            self._launcher = self._fork_launcher_class(self) if forks else None
        else:
            self._launcher = self.launcher_class(environment, self.num_processes, self.num_nodes)

    def _join_world(self) -> None:
        """Start the runtime with the other ranks, and bind the backend to it."""
        reset_seed()
        self._number_ranks()
        environment = self.cluster_environment
        assert environment is not None
        check_devices(self.strategy_name, self.backend, [self.root_device], self.shard_precision)
        mesh = self.backend.mesh(self.world_size)
        self.runtime.start(
            rank=self.global_rank,
            local_rank=self.local_rank,
            world_size=self.world_size,
            device=self.root_device,
            address=environment.main_address,
            port=environment.main_port,
            timeout=self._patience(),
        )
        if self.num_nodes > 1:
            check_same_packages(self.runtime, versions_of(type(self), type(self.backend), type(self.runtime)))
        if self._worker is not None:
            self.num_nodes = self._worker.nodes(self.runtime, self.num_nodes)
        self.runtime.mesh = mesh
        self.backend.bind(self.runtime, self.shard_precision)
        if self.hang_timeout is not None and self.world_size > 1 and isinstance(self.runtime, ProcessGroupRuntime):
            watch(self.runtime, self.hang_timeout, environment.main_address, partial(_progress_of, ref(self)))

    def _patience(self) -> timedelta | None:
        """How long a collective waits: longer than it takes to find out which rank hangs, which says more."""
        if self.timeout is not None or self.hang_timeout is None:
            return self.timeout
        if not isinstance(self.runtime, ProcessGroupRuntime):  # its own waiting names who did not come
            return self.hang_timeout
        return max(_TORCHS_TIMEOUT, self.hang_timeout) + timedelta(minutes=1)

    def progress(self) -> str:
        """How far this rank is, in words, for messages about ranks that are lost or hang."""
        raise NotImplementedError

    def _reduced(self, tensor: Any, group: Any | None, reduce_op: Any) -> Any:
        """Reduce a tensor over the ranks with different batches or parts; other values are returned unchanged."""
        if not isinstance(tensor, Tensor):
            return tensor
        if isinstance(tensor, DTensor):  # such as a loss inside loss_parallel(): its ranks have parts, or copies, of it
            tensor = tensor.full_tensor()
        ranks = self.runtime.along(*GRADIENT_AXES) if group is None else self.runtime
        return ranks.all_reduce(tensor, reduce_op_name(reduce_op), group)

    def all_gather(self, tensor: Tensor | float, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Stack the tensors of the ranks with different batches, or parts of them, along a new first dimension.

        A number becomes a tensor, as in the module's and in Fabric's ``all_gather``.
        """
        if not isinstance(tensor, Tensor):
            tensor = torch.tensor(tensor, device=self.root_device)
        ranks = self.runtime.along(*GRADIENT_AXES) if group is None else self.runtime
        return ranks.all_gather(tensor, group, sync_grads)

    def split_batch(self, batch: Any) -> Any:
        """This rank's part of a batch along the sequence; the batch itself without context parallelism.

        The batches of a Trainer, and of loaders that Fabric has set up, are split already. Context-parallel ranks must
        call it with the same batch.

        Raises:
            ShardingError: The batch can't be split as the options say, or is a part already.
        """
        return batch if self.backend.sequence is None else self.backend.sequence.split(batch)

    def _check_loss(self) -> None:
        if self.backend.sequence is not None:
            self.backend.sequence.check_loss()

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks, or any of them, decide for something. All ranks must call it."""
        vote = torch.tensor(float(decision), device=self.root_device)
        return bool(self.runtime.all_reduce(vote, "min" if all else "max"))

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        self.runtime.barrier()

    def place_of(self, path: Any) -> SavePlace:
        """Where this rank saves a checkpoint: at rank 0's path, unless saves are scattered. All ranks must call it.

        Under Ray Train, ranks that name one checkpoint in different folders save apart: each reports its own folder,
        and Ray joins them.
        """
        own = os.fspath(path)
        if self.scattered_save:
            return SavePlace(own, scattered=True)
        if self._worker is not None:
            folder, name = os.path.split(own)
            folder_of_first, name_of_first = os.path.split(self.broadcast(own))
            folders, names = self.runtime.total([folder != folder_of_first, name != name_of_first])
            if folders and not names:
                if self.state_dict_type == "sharded":
                    return SavePlace(own, scattered=True, is_reported=True)
                return SavePlace(os.path.join(folder_of_first, name))  # one file, which rank 0 reports
        return SavePlace(self.first_of(own, "save to"))

    def first_of(self, paths: _Path, doing: str) -> _Path:
        """The path, or the paths, that rank 0 was given; a warning if this rank's differ. All ranks must call it."""
        first: _Path = self.broadcast(paths)
        if _absolute(first) != _absolute(paths):
            scattered = " scattered_save=True lets each rank save at its own." if doing == "save to" else ""
            warnings.warn(
                f"{self.strategy_name}: rank {self.global_rank} was told to {doing} {shown_paths(paths)}, and rank 0 "
                f"to {doing} {shown_paths(first)}: all ranks take part in one checkpoint, at rank 0's path.\n"
                "Give all ranks the same path: leave what differs between them, such as the rank or a metric that was "
                f"logged without sync_dist=True, out of its name.{scattered}",
                stacklevel=2,
            )
        return first

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Broadcast the object of rank ``src`` to all ranks."""
        return self.runtime.broadcast_object(obj, src)

    def _check_checkpoint_io(self, io: CheckpointIO) -> None:
        if self.state_dict_type == "sharded":
            raise UnsupportedCapabilityError(
                f"{type(io).__name__} can't write sharded checkpoints, which every rank writes its own part of.\n"
                f"Leave it out, or write strategy={type(self).__name__}(state_dict_type='full')."
            )

    def refuse_storage_options(self, storage_options: Any) -> None:
        """Raise if options for a ``CheckpointIO`` are given, but none writes the checkpoint."""
        if storage_options is not None:
            raise UnsupportedCapabilityError(
                "storage_options can't be used with sharded checkpoints, which no CheckpointIO writes.\n"
                f"Leave them out, or write strategy={type(self).__name__}(state_dict_type='full')."
            )


def _constructor(cls: type[ShardedStrategy]) -> Callable[..., None]:
    """A constructor that passes everything on, with the signature of its class."""

    def __init__(self: Any, *positional: Any, **options: Any) -> None:
        super(cls, self).__init__(*positional, **options)

    this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    constructor: Any = __init__
    constructor.__qualname__, constructor.__module__ = f"{cls.__qualname__}.__init__", cls.__module__
    constructor.__signature__ = cls.__signature__.replace(parameters=[this, *cls.__signature__.parameters.values()])
    constructor.is_generated = True
    return __init__


def _progress_of(strategy: ref[ShardedStrategy]) -> str:
    known = strategy()
    return "" if known is None else known.progress()


def _discard_unreduced(of: ref[Sharded], unreduced: WeakSet[Sharded]) -> None:
    root = of()
    if root is not None and root in unreduced:
        root.forget_unreduced(root.plan.parameters)


def _held_in_parts(optimizer: Optimizer, roots: Sequence[Sharded]) -> Callable[[Tensor], bool]:
    """Whether an optimizer's parameter is a shard. The optimizer keeps the result, which must not keep the roots."""
    pieces = WeakTensorKeyDictionary()
    for parameter in _parameters_of(optimizer):
        if any(root.holds_part(parameter) for root in roots):
            pieces[parameter] = True
    return lambda parameter: parameter in pieces


def _parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return list(chain.from_iterable(group["params"] for group in optimizer.param_groups))


def _absolute(paths: str | list[str]) -> list[str]:
    return [one if "://" in one else os.path.abspath(one) for one in ([paths] if isinstance(paths, str) else paths)]


def _is_held(root: Sharded, optimizers: Iterable[Optimizer]) -> bool:
    """Whether an optimizer holds a parameter of a root, sharded, from before sharding, or added since."""
    held = [parameter for optimizer in optimizers for parameter in _parameters_of(optimizer)]
    with root.as_written():
        now = {id(parameter) for parameter in root.written.parameters()}
    layout = root.layout()
    return any(p in layout or id(p) in now or root.name_of(cast(nn.Parameter, p)) is not None for p in held)


def _announce(log: logging.Logger, sharded: Sharded) -> None:
    """Log on rank 0 what was sharded, over what, and what a rank holds of it."""
    runtime, plan = sharded.runtime, sharded.plan
    if runtime.rank != 0 or not log.isEnabledFor(logging.INFO):
        return
    units = len(plan.units)
    in_units = f"{units} unit{'s' if units > 1 else ''} and the root" if units else "the root alone"
    log.info(
        f"{sharded.strategy_name}: {plan.class_name} is sharded over {runtime.described()}, in {in_units}; "
        f"the first holds {size_in_words(sharded.bytes_held())} of {size_in_words(plan.nbytes)} of parameters."
    )


def size_in_words(size: int) -> str:
    """A number of bytes in the unit that leaves one to four digits.

    Example:
        >>> size_in_words(1000), size_in_words(1536), size_in_words(7 * 2**30)
        ('1000 B', '1.5 KiB', '7.0 GiB')
    """
    power = min(max(0, (size.bit_length() - 1) // 10), len(_SIZES) - 1)
    return f"{size / 2 ** (10 * power):.1f} {_SIZES[power]}" if power else f"{size} B"
