"""Which submodules hold experts and how these are called, by the plan of the user or the model; what is refused."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Literal, get_args

from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_core import ShardingError, UnsupportedCapabilityError
from fsdp_core.sharding import Mesh
from fsdp_core.state import clean_name
from fsdp_fsdp2.tensor_parallel.model_plans import matches, plan_entries

__all__ = [
    "Contract",
    "ExpertParallelPlan",
    "check_combination",
    "check_expert_plan",
    "check_units",
    "described_experts",
    "experts_of",
    "number_of_experts",
]

#: How experts are called: ``experts(tokens, indices, weights)``, or ``experts(tokens, counts)`` with sorted tokens.
Contract = Literal["top_k", "sorted"]

#: By pattern of FQNs, in which ``*`` matches within one name between dots, how the experts that match are called.
ExpertParallelPlan = Mapping[str, Contract]

#: How the plans that models of transformers bring name modules of experts: now, and before there was token dispatch.
_STYLES_OF_EXPERTS = ("ep_dispatch_experts", "moe_tp_experts")

_HOW_TO = (
    "Write a dict from patterns of submodule names to how the experts are called: {'layers.*.moe.experts': 'top_k'} "
    "for experts(tokens, indices, weights), or 'sorted' for experts(tokens, counts)."
)


def check_expert_plan(plan: object) -> None:
    """Refuse values of ``expert_parallel_plan`` that are no plan.

    Raises:
        UnsupportedCapabilityError: It is neither a dict of names and contracts, nor ``None``.
    """
    if plan is None:
        return
    is_plan = isinstance(plan, Mapping) and bool(plan)
    if not is_plan or not all(isinstance(k, str) and v in get_args(Contract) for k, v in plan.items()):  # type: ignore[attr-defined]
        raise UnsupportedCapabilityError(f"expert_parallel_plan={plan!r} is not a plan of experts.\n{_HOW_TO}")


def described_experts(plan: ExpertParallelPlan | None) -> object:
    """The plan as plain data, for comparison between ranks and strategies."""
    return None if plan is None else dict(plan)


def check_combination(mesh: Mesh, options: Mapping[str, object]) -> None:
    """Refuse options that don't go together with divided experts.

    Args:
        mesh: The sizes of all axes.
        options: By name, the values of options that don't, with the value under which each of them does nothing.

    Raises:
        UnsupportedCapabilityError: One is given, or layers are divided as well.
    """
    if mesh.expert_parallel == 1:
        return
    asked = f"expert_parallel_size={mesh.expert_parallel}"
    if mesh.tensor_parallel > 1:
        raise UnsupportedCapabilityError(
            f"{asked} does not go together with tensor_parallel_size={mesh.tensor_parallel}: tensor-parallel ranks "
            "have the same tokens, and would each send all of them to the experts.\n"
            "Leave one of the two sizes out."
        )
    for name, value in options.items():
        if value is not None and value is not False:
            raise UnsupportedCapabilityError(f"{asked} does not go together with {name}: {_REASONS[name]}")


_REASONS = {
    "compile": (
        "how many tokens an expert gets is known only when they are sent, and units would be compiled anew for each "
        "number.\nLeave compile out; in models of transformers, experts_implementation='grouped_mm' is one kernel for "
        "all experts of a rank."
    ),
    "parallelize_fn": (
        "a function that shards the module calls fully_shard by itself, and would have to divide the experts, too.\n"
        "Leave parallelize_fn out, and name the units with auto_wrap_policy."
    ),
    "reshard_after_forward": (
        "torch can't keep parameters that other ranks have other parts of over groups of ranks.\n"
        "Write reshard_after_forward=True, False, or None: all but the root and the last unit reshard."
    ),
}


def experts_of(root: nn.Module, plan: ExpertParallelPlan | None, size: int) -> dict[str, Contract]:
    """The names of the submodules that hold experts, and how each is called.

    Args:
        root: The module, not sharded yet.
        plan: The plan; ``None`` for those of the model.
        size: The number of ranks that divide experts.

    Raises:
        ShardingError: A pattern matches no submodule, there is no plan, or a submodule can't be divided.
    """
    if any(isinstance(parameter, DTensor) for parameter in root.parameters()):
        raise ShardingError(
            f"expert_parallel_size={size} was given, and {type(root).__name__} is already sharded in part, by its own "
            "code or by transformers' DistributedConfig. Only one of the two can do it.\n"
            "Load the model without distributed_config, and leave fully_shard and parallelize_module out: the strategy "
            "reads the model's own plan of experts."
        )
    patterns = _own_plan(root, size) if plan is None else plan
    names = [name for name, _ in root.named_modules()]
    contracts: dict[str, Contract] = {}
    for pattern, contract in patterns.items():
        matching = [name for name in names if matches(name, pattern)]
        if not matching and plan is not None:
            close = get_close_matches(pattern, [name for name in names if name], 3, 0.4)
            raise ShardingError(
                f"the pattern {pattern!r} of expert_parallel_plan matches no submodule of {type(root).__name__}.\n"
                f"Names are those of named_modules(), such as {', '.join(map(repr, close or names[1:4]))}; '*' stands "
                "for one name between dots."
            )
        for name in matching:
            if contracts.setdefault(name, contract) != contract:
                raise ShardingError(
                    f"{name!r} matches two patterns of expert_parallel_plan that say differently how it is called.\n"
                    "Write patterns of which one matches each submodule."
                )
    if not contracts:
        raise ShardingError(
            f"the plan of {type(root).__name__} names modules of experts, and it has none: {', '.join(patterns)}.\n"
            "Leave expert_parallel_size out, or build the model with experts."
        )
    for name, contract in contracts.items():
        _check_experts(name, root, contract, size)
    return contracts


def _own_plan(root: nn.Module, size: int) -> dict[str, Contract]:
    """The patterns of modules of experts in the ``_ep_plan`` of submodules."""
    entries = plan_entries(root, "_ep_plan")
    patterns: dict[str, Contract] = {
        pattern: "top_k" for pattern, request, _ in entries if request in _STYLES_OF_EXPERTS
    }
    if not patterns:
        brings = (
            f"brings a plan of experts without one of {', '.join(_STYLES_OF_EXPERTS)}" if entries else "brings none"
        )
        raise ShardingError(
            f"expert_parallel_size={size} needs a plan that says which modules hold experts, and "
            f"{type(root).__name__} {brings}.\n"
            "Write expert_parallel_plan={'layers.*.moe.experts': 'top_k'} with the names of modules whose parameters "
            "are stacked, an expert by index of the first dimension."
        )
    return patterns


def number_of_experts(experts: nn.Module) -> int:
    """The number of experts of a module whose parameters are stacked along the first dimension."""
    return next(parameter.shape[0] for parameter in experts.parameters())


def _check_experts(name: str, root: nn.Module, contract: Contract, size: int) -> None:
    experts = root.get_submodule(name)
    if experts is root:
        raise ShardingError(
            f"{type(root).__name__} holds experts itself, and is the root, which fully_shard shards over all ranks.\n"
            "Make the experts a submodule of it."
        )
    if isinstance(experts, nn.ModuleList | nn.ModuleDict):
        raise ShardingError(
            f"{name!r} is a {type(experts).__name__} of experts, which is never called itself: tokens can't be sent "
            "to other ranks where the model calls one expert after the other.\n"
            "Write a module whose parameters are stacked, with an expert by index of the first dimension, and call it "
            "once for all tokens: experts(tokens, indices, weights)."
        )
    parameters = {clean_name(local): parameter for local, parameter in experts.named_parameters()}
    shapes = {local: tuple(parameter.shape) for local, parameter in parameters.items()}
    counts = {shape[0] if shape else None for shape in shapes.values()}
    if len(counts) != 1 or None in counts:
        listing = ", ".join(f"{local} {shape}" for local, shape in shapes.items()) or "no parameters"
        raise ShardingError(
            f"{name!r} is to be divided by experts, and its parameters are not stacked along a first dimension of one "
            f"size, the number of experts: {listing}.\n"
            "Stack them, and move what all experts share, such as a norm or a router, to a module around."
        )
    count = number_of_experts(experts)
    attribute = getattr(experts, "num_experts", count)
    if attribute != count:
        raise ShardingError(
            f"{name}.num_experts is {attribute}, and its parameters have {count} experts.\nLet both agree."
        )
    if count % size:
        fitting = [n for n in range(2, count + 1) if count % n == 0]
        raise ShardingError(
            f"expert_parallel_size={size} does not divide the {count} experts of {name!r}.\n"
            f"Write a divisor of {count}: {', '.join(map(str, fitting))}."
        )
    buffers = [local for local, buffer in experts.named_buffers() if buffer.numel()]
    if buffers:
        raise ShardingError(
            f"{name!r} is to be divided by experts, and has the buffer {buffers[0]!r}, of which every rank would keep "
            "all.\nMove it to a module around, such as the router."
        )
    _check_not_shared(name, root)
    _check_callable(name, experts, contract)


def _check_not_shared(name: str, root: nn.Module) -> None:
    """Refuse experts that another module has too, or whose parameters have several names."""
    experts = root.get_submodule(name)
    names_of_modules = [fqn for fqn, part in root.named_modules(remove_duplicate=False) if part is experts]
    if len(names_of_modules) > 1:
        raise ShardingError(
            f"{' and '.join(map(repr, names_of_modules))} are one module of experts, which expert_parallel_size can't "
            "divide.\nGive each layer experts of its own, or leave expert_parallel_size out."
        )
    ids = {id(parameter) for parameter in experts.parameters()}
    names_by_id: dict[int, list[str]] = {}
    for fqn, parameter in root.named_parameters(remove_duplicate=False):
        if id(parameter) in ids:
            names_by_id.setdefault(id(parameter), []).append(clean_name(fqn))
    tied = next((names for names in names_by_id.values() if len(names) > 1), None)
    if tied:
        raise ShardingError(
            f"{' and '.join(map(repr, tied))} are one parameter, and {name!r} is to be divided by experts: tied "
            "parameters can't be.\nGive each module parameters of its own, or leave expert_parallel_size out."
        )


def _check_callable(name: str, experts: nn.Module, contract: Contract) -> None:
    arguments = {"top_k": "tokens, indices, weights", "sorted": "tokens, counts"}[contract]
    try:
        inspect.signature(experts.forward).bind(*arguments.split(", "))
    except TypeError as error:
        raise ShardingError(
            f"{name!r} is planned as {contract!r}, and its forward can't be called as experts({arguments}): {error}.\n"
            f"{_HOW_TO}"
        ) from error


def check_units(units: Sequence[nn.Module], experts: Mapping[str, nn.Module]) -> None:
    """Refuse units inside of experts, and experts inside of experts.

    Args:
        units: The chosen units.
        experts: By name, the modules that hold experts.

    Raises:
        ShardingError: There is one.
    """
    for name, module in experts.items():
        inside = [part for part in module.modules() if part is not module]
        inner_unit = next((part for part in inside if part in units or part in experts.values()), None)
        if inner_unit is not None:
            raise ShardingError(
                f"{name!r} is to be divided by experts, and a {type(inner_unit).__name__} in it would be a unit of its "
                "own.\nChoose units around the experts, with auto_wrap_policy={MyBlock}."
            )
