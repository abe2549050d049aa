"""FSDP1's options, as users write them and as torch takes them, and what to write instead of other libraries'."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy

from fsdp_core import UnsupportedCapabilityError
from fsdp_core.sharding import ActivationCheckpointingPolicy, ShardingOptions, WrapPolicy, describe_policy, option

__all__ = [
    "ACCEPTED_VALUES",
    "HYBRID",
    "OTHER_OPTIONS",
    "STAY_GATHERED",
    "NativeOptions",
    "check_mixed_precision",
    "parse_member",
    "wants_offload",
]

#: The strategies that shard within groups of ranks, and replicate across them. The second has no public name.
HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)

#: The strategies that leave units gathered between their forward and their backward pass.
STAY_GATHERED = (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy._HYBRID_SHARD_ZERO2)

#: Values of other libraries' options that are accepted, because they describe what happens here.
ACCEPTED_VALUES: Mapping[str, Collection[object]] = {
    "sync_module_states": (True,),
    "flatten_parameters": (True,),
    "data_parallel_size": ("auto",),
    "context_parallel_size": (1,),
    "tensor_parallel_size": (1,),
}

#: What to write instead of FSDP1's options that the strategy decides, and of fsdp2's, Lightning's and fairscale's.
OTHER_OPTIONS: Mapping[str, str] = {
    "device_id": "Leave it out: Lightning's `devices` says where each rank runs.",
    "sync_module_states": "Leave it out: rank 0's values always win.",
    "reshard_after_forward": "Write sharding_strategy='FULL_SHARD' for True, 'SHARD_GRAD_OP' for False.",
    "mp_policy": "Write precision='bf16-mixed' to Trainer or Fabric, or give a mixed_precision.",
    "precision_plugin": "Under Fabric it is called precision.",
    "precision": "Write precision= to the Trainer; a plugin is called precision_plugin here.",
    "data_parallel_size": "Leave it out: all ranks shard; tensor parallelism is not part of 'fsdp_native'.",
    "context_parallel_size": "'fsdp_native' has no context parallelism: write strategy='fsdp2'.",
    "tensor_parallel_size": "'fsdp_native' has no tensor parallelism.",
    "save_distributed_checkpoint": "Write state_dict_type='sharded', or 'full'.",
    "flatten_parameters": "Leave it out: parameters are always flattened. It belongs to 'ddp_fully_sharded'.",
}

E = TypeVar("E", ShardingStrategy, BackwardPrefetch)


def parse_member(option_name: str, enum: type[E], value: E | str) -> E:
    """Return a member of one of torch's enums, given itself or its case-insensitive name.

    Raises:
        UnsupportedCapabilityError: There is no such member.

    Example:
        >>> parse_member("sharding_strategy", ShardingStrategy, "shard_grad_op")
        <ShardingStrategy.SHARD_GRAD_OP: 2>
    """
    if isinstance(value, enum):
        return value
    names = {member.name.strip("_"): member for member in enum}
    named = names.get(str(value).upper().strip("_"))
    if named is None:
        raise UnsupportedCapabilityError(
            f"{option_name}={value!r} is not known to 'fsdp_native'.\nWrite one of: {', '.join(map(repr, names))}."
        )
    return named


def wants_offload(cpu_offload: bool | CPUOffload | None) -> bool:
    """Whether to keep shards in host memory; ``None``, the default of other strategies, means no.

    Raises:
        UnsupportedCapabilityError: The value is neither a bool nor FSDP1's ``CPUOffload``.
    """
    if cpu_offload is None:
        return False
    if isinstance(cpu_offload, CPUOffload):
        return bool(cpu_offload.offload_params)
    if isinstance(cpu_offload, bool):
        return cpu_offload
    raise UnsupportedCapabilityError(
        f"cpu_offload={cpu_offload!r} is not known to 'fsdp_native'.\n"
        "Write cpu_offload=True, or a torch.distributed.fsdp.CPUOffload; "
        "FSDP2's CPUOffloadPolicy belongs to 'fsdp2'."
    )


def classes_to_checkpoint(
    old: type[nn.Module] | Iterable[type[nn.Module]] | None, policy: object
) -> frozenset[type[nn.Module]] | None:
    """Read ``activation_checkpointing``, the older spelling of ``activation_checkpointing_policy``.

    Args:
        old: One module class, or several.
        policy: The value of the newer option.

    Raises:
        UnsupportedCapabilityError: ``old`` is not a module class, or both options are used.
    """
    if old is None:
        return None
    if policy is not None:
        raise UnsupportedCapabilityError(
            "activation_checkpointing and activation_checkpointing_policy are two spellings of one option.\n"
            "Write activation_checkpointing_policy={MyBlock} alone."
        )
    classes = (old,) if isinstance(old, type) or not isinstance(old, Iterable) else tuple(old)
    wrong = [element for element in classes if not (isinstance(element, type) and issubclass(element, nn.Module))]
    if wrong or not classes:
        raise UnsupportedCapabilityError(
            f"activation_checkpointing={old!r} is not a class of modules.\n"
            "Write activation_checkpointing=MyBlock, a list of classes, "
            "or activation_checkpointing_policy with a function."
        )
    return frozenset(classes)


def check_mixed_precision(mixed_precision: object) -> None:
    """Check that the value is FSDP1's ``MixedPrecision`` or ``None``.

    Raises:
        UnsupportedCapabilityError: It is neither.
    """
    if not isinstance(mixed_precision, MixedPrecision | None):
        raise UnsupportedCapabilityError(
            f"mixed_precision={mixed_precision!r} is not known to 'fsdp_native'.\n"
            "Write precision='bf16-mixed' instead, or give a torch.distributed.fsdp.MixedPrecision; "
            "FSDP2's MixedPrecisionPolicy belongs to 'fsdp2'."
        )


def strategy_member(value: ShardingStrategy | str) -> ShardingStrategy:
    """``sharding_strategy`` as torch's enum."""
    return parse_member("sharding_strategy", ShardingStrategy, value)


def prefetch_member(value: BackwardPrefetch | str | None) -> BackwardPrefetch | None:
    """``backward_prefetch`` as torch's enum."""
    return None if value is None else parse_member("backward_prefetch", BackwardPrefetch, value)


@dataclass(frozen=True, kw_only=True)
class NativeOptions(ShardingOptions):
    """The options of both strategy classes.

    Raises:
        UnsupportedCapabilityError: A value is not known, or contradicts another.
    """

    process_group_backend: str | None = None
    """As in :func:`torch.distributed.init_process_group`; chosen by device when ``None``."""
    cpu_offload: bool | CPUOffload | None = option(False, part_of="units", describe=wants_offload)
    """Whether shards, gradients and optimizer state live in host memory: a bool, or torch's
    :class:`~torch.distributed.fsdp.CPUOffload`."""
    backward_prefetch: BackwardPrefetch | str | None = option("BACKWARD_PRE", part_of="units", describe=prefetch_member)
    """When the next unit is gathered in the backward pass: torch's enum, or ``"BACKWARD_PRE"``,
    ``"BACKWARD_POST"``; ``None``: when it is needed."""
    mixed_precision: MixedPrecision | None = option(None, part_of="units")
    """A :class:`~torch.distributed.fsdp.MixedPrecision`; overrides ``precision``."""
    activation_checkpointing: type[nn.Module] | Iterable[type[nn.Module]] | None = None
    """A class of modules that recompute their activations in the backward pass, or a list of classes."""
    auto_wrap_policy: WrapPolicy | None = option("auto", part_of="units", describe=describe_policy)
    """Which submodules are gathered and freed together: a set of classes, a function ``module -> bool`` or one of
    torch's policies, ``"auto"`` for the blocks repeated in ``ModuleList`` s, or ``None`` for the root alone."""
    activation_checkpointing_policy: str | ActivationCheckpointingPolicy | None = None
    """As ``activation_checkpointing``, a set of classes, a function ``module -> bool``, or ``"every_2"`` for every
    second repeated block, and so on."""
    sync_each_batch: bool = False
    """Whether gradients are reduced on every micro-batch of an accumulation, which keeps accumulated gradients
    sharded at the cost of more communication."""
    sharding_strategy: ShardingStrategy | str = option("FULL_SHARD", part_of="units", describe=strategy_member)
    """One of torch's :class:`~torch.distributed.fsdp.ShardingStrategy`, or its name: ``"FULL_SHARD"``,
    ``"SHARD_GRAD_OP"``, ``"HYBRID_SHARD"``, ``"HYBRID_SHARD_ZERO2"``, ``"NO_SHARD"``."""
    use_orig_params: bool = option(True, part_of="units")
    """Whether optimizers hold the original parameters instead of one flat parameter per unit."""
    ignored_modules: Iterable[nn.Module] | None = option(None, part_of="units")
    """Modules that are replicated on every rank, with gradients averaged."""
    ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = option(None, part_of="units")
    """The same; takes parameters too."""
    process_group: ProcessGroup | tuple[ProcessGroup, ProcessGroup] | None = option(None, part_of="units")
    """The ranks to shard over; for hybrid sharding a pair, with those to replicate over."""
    device_mesh: DeviceMesh | tuple[int, ...] | None = option(None, part_of="units")
    """The same as a mesh, or as its shape; for hybrid sharding (replicas, ranks of each)."""
    param_init_fn: Callable[[nn.Module], None] | None = option(None, part_of="units")
    """Initializes a module that was built on the meta device."""
    forward_prefetch: bool = option(False, part_of="units")
    """Whether the next unit is gathered before it is needed in the forward pass."""
    limit_all_gathers: bool = option(True, part_of="units")
    """Whether at most two units are gathered ahead, to bound memory."""

    def __post_init__(self) -> None:
        self.strategy, self.prefetch, self.offloads  # noqa: B018  # raise for a value that is not known
        _check_options(self)
        self.checkpointing_policy  # noqa: B018  # raises too

    @cached_property
    def strategy(self) -> ShardingStrategy:
        """``sharding_strategy`` as torch's enum."""
        return strategy_member(self.sharding_strategy)

    @cached_property
    def prefetch(self) -> BackwardPrefetch | None:
        """``backward_prefetch`` as torch's enum."""
        return prefetch_member(self.backward_prefetch)

    @cached_property
    def offloads(self) -> bool:
        """Whether shards live in host memory."""
        return wants_offload(self.cpu_offload)

    @cached_property
    def checkpointing_policy(self) -> ActivationCheckpointingPolicy | None:
        """Which submodules recompute their activations, by either option."""
        policy = self.activation_checkpointing_policy
        return classes_to_checkpoint(self.activation_checkpointing, policy) or policy


def _check_options(options: NativeOptions) -> None:
    """Refuse options that contradict each other, or that torch does not accept."""
    if options.ignored_modules is not None and options.ignored_states is not None:
        raise UnsupportedCapabilityError(
            "ignored_modules and ignored_states are an old and a new spelling of one option.\n"
            "Write ignored_states alone; it takes modules as well as parameters."
        )
    if options.process_group is not None and options.device_mesh is not None:
        raise UnsupportedCapabilityError(
            "process_group and device_mesh both specify the ranks to shard over.\nWrite device_mesh alone."
        )
    _check_ignored("ignored_modules", options.ignored_modules, (nn.Module,), "modules of the model")
    _check_ignored("ignored_states", options.ignored_states, (nn.Module, nn.Parameter), "parameters or modules of it")
    check_mixed_precision(options.mixed_precision)
    if not isinstance(options.device_mesh, DeviceMesh | tuple | None):
        raise UnsupportedCapabilityError(
            f"device_mesh={options.device_mesh!r} is not a mesh.\n"
            "Write a DeviceMesh, or its shape: device_mesh=(2, 4) makes 2 replicas that shard over 4 ranks each."
        )
    if not isinstance(options.sync_each_batch, bool):
        raise UnsupportedCapabilityError(
            f"sync_each_batch={options.sync_each_batch!r} is neither True nor False.\n"
            "Write False to reduce gradients once per optimizer step, or True to reduce them on every micro-batch."
        )


def _check_ignored(name: str, ignored: object, classes: tuple[type, ...], description: str) -> None:
    if ignored is None or (isinstance(ignored, Iterable) and not isinstance(ignored, Collection | nn.Module)):
        return  # of a generator, nothing can be looked at before it is used
    if not isinstance(ignored, Collection) or not all(isinstance(each, classes) for each in ignored):
        raise UnsupportedCapabilityError(
            f"{name}={ignored!r} does not name what is ignored.\nWrite a list of {description}: {name}=[model.head]."
        )
