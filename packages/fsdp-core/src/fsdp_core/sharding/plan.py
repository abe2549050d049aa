"""What a backend is about to do with a module, as plain data: made without changing it, and compared between ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parameter import is_lazy

from fsdp_core.errors import ShardingError
from fsdp_core.initialization.sharded_init import is_part
from fsdp_core.sharding.agreement.same_model import describe_error, describe_tensor, describe_value
from fsdp_core.sharding.refusals.unshardable_modules import refuse_cycles
from fsdp_core.state.fqn import clean_name

__all__ = ["ParameterPlan", "ShardingPlan", "UnitModules", "check_unchanged", "modules_by_unit", "plan_module"]


@dataclass(frozen=True, kw_only=True)
class ParameterPlan:
    """One parameter of a module that is about to be sharded, under one of its names.

    Attributes:
        shape: Its unsharded shape.
        dtype: The dtype that it has before it is sharded.
        requires_grad: Whether it is trained.
        unit: The FQN of the unit that gathers it; empty for the root.
        is_replicated: Whether every rank keeps all of it.
        is_built_in_parts: Whether ranks keep only their part of it already; see :func:`fsdp_core.wrap`.
        tied_to: The first of its names; ``None`` if that is this one.
        local_numel: The number of its elements that this rank will keep; ``None`` if the backend does not say so.
        divided_by: The number of data-parallel ranks that divide its first dimension before it is sharded over the
            others, as experts are.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    unit: str = ""
    is_replicated: bool = False
    is_built_in_parts: bool = False
    tied_to: str | None = None
    local_numel: int | None = field(default=None, compare=False)
    divided_by: int = 1

    @property
    def numel(self) -> int:
        """The number of its elements."""
        return torch.Size(self.shape).numel()

    def __str__(self) -> str:
        if self.tied_to is not None:
            return f"tied to {self.tied_to!r}"
        trained = "trained" if self.requires_grad else "frozen"
        replicated = ", whole on every rank" if self.is_replicated else ""
        in_parts = ", sharded as it was built" if self.is_built_in_parts else ""
        divided = f", divided among {self.divided_by} ranks" if self.divided_by > 1 else ""
        return f"{self.shape} in {self.dtype}, {trained}{replicated}{in_parts}{divided}"


@dataclass(frozen=True, kw_only=True)
class ShardingPlan:
    r"""How a backend will shard a module. Made by :meth:`Backend.plan <fsdp_core.Backend.plan>`.

    Two plans of the same model are equal, on every rank and wherever its parameters are: on the meta device too.

    Attributes:
        class_name: The name of the module's class before a library changes the class.
        parameters: The parameters by FQN, in their order, tied ones under each of their names.
        buffers: Shape and dtype of the buffers, in words, by FQN.
        layers: The classes of the modules by name, and the settings of those in ``torch.nn``, such as the p of a
            Dropout.
        units: The names of the FSDP units, innermost first, without the root, as in ``named_modules()``.
        recomputed: The names of the modules that recompute their activations in the backward pass.
        details: What else the backend has decided, by topic and then by the name of a module.
        config: The settings that the sharded module can't change any more, by name.
        refusal: Why the module can't be sharded. Units, recomputed modules and details are empty then.

    Example:
        >>> plan = plan_module(nn.Linear(2, 1, device="meta"), {"cpu_offload": True}, units=lambda module: [])
        >>> print(*plan.describe().items(), sep="\n")
        ("parameter 'weight'", '(1, 2) in torch.float32, trained')
        ("parameter 'bias'", '(1,) in torch.float32, trained')
        ('class of the module', 'Linear(in_features=2, out_features=1, bias=True)')
        ('state', 'not sharded yet')
        ('units of sharding', 'the whole alone')
        >>> plan.numel, plan.nbytes
        (3, 12)
    """

    class_name: str = "a module"
    parameters: Mapping[str, ParameterPlan] = field(default_factory=dict)
    buffers: Mapping[str, str] = field(default_factory=dict)
    layers: Mapping[str, str] = field(default_factory=dict)
    units: tuple[str, ...] = ()
    recomputed: tuple[str, ...] = ()
    details: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    refusal: Exception | None = field(default=None, compare=False)

    @property
    def names(self) -> list[str]:
        """The FQNs of the parameters, tied ones under each of their names."""
        return list(self.parameters)

    @property
    def numel(self) -> int:
        """The number of the elements of all parameters, tied ones counted once."""
        return sum(parameter.numel for parameter in self.parameters.values() if parameter.tied_to is None)

    @property
    def nbytes(self) -> int:
        """The bytes of all unsharded parameters, tied ones counted once."""
        sizes = ((p.numel, p.dtype) for p in self.parameters.values() if p.tied_to is None)
        return sum(numel * dtype.itemsize for numel, dtype in sizes)

    @property
    def local_nbytes(self) -> int | None:
        """The bytes of parameters that this rank will keep, without padding; ``None`` if the backend does not say."""
        untied = [p for p in self.parameters.values() if p.tied_to is None]
        sizes = [p.local_numel * p.dtype.itemsize for p in untied if p.local_numel is not None]
        return sum(sizes) if len(sizes) == len(untied) else None

    def has_parameters(self, name: str) -> bool:
        """Whether a module has parameters, its own or those of modules in it.

        Args:
            name: Its name in ``named_modules()``.
        """
        return clean_name(name) in self._owner_names

    @cached_property
    def _owner_names(self) -> set[str]:
        """The names of modules that have parameters, and of the modules around these, up to the root, ``""``."""
        paths = (name.split(".") for name in self.parameters)
        return {".".join(path[:length]) for path in paths for length in range(len(path))}

    def split_by_unit(self, module: nn.Module) -> list[UnitModules]:
        """The units of a module, innermost first, and the root last.

        Args:
            module: The module that was planned, before units in it are replaced by a library's wrappers.
        """
        names = {submodule: clean_name(name) for name, submodule in module.named_modules()}

        def replicated(owner: nn.Module) -> list[str]:
            """The names of a module's own parameters of which every rank keeps all."""
            prefix = f"{names[owner]}." if names[owner] else ""
            attributes = [name for name, _ in owner.named_parameters(recurse=False, remove_duplicate=False)]
            return [name for name in attributes if self.parameters[f"{prefix}{name}"].is_replicated]

        units = [module.get_submodule(name) for name in self.units]
        return [
            UnitModules(module=unit, own=owners, replicated_names={owner: replicated(owner) for owner in owners})
            for unit, owners in modules_by_unit(units, module)
        ]

    def ties(self) -> list[list[str]]:
        """The names of each parameter that has several."""
        names: dict[str, list[str]] = {}
        for name, parameter in self.parameters.items():
            names.setdefault(parameter.tied_to or name, []).append(name)
        return [tied for tied in names.values() if len(tied) > 1]

    def describe(self) -> dict[str, str]:
        """Describe the module and its units by topic, for :func:`~fsdp_core.sharding.agreement.same_model.check_same`.

        Devices are not described: rank 0 may have loaded the weights, with other ranks on the meta device.
        """
        facts = {f"parameter {name!r}": str(parameter) for name, parameter in self.parameters.items()}
        facts |= {f"buffer {name!r}": buffer for name, buffer in self.buffers.items()}
        facts |= {f"layer {name!r}" if name else "class of the module": layer for name, layer in self.layers.items()}
        facts["state"] = "not sharded yet" if self.refusal is None else describe_error(self.refusal)
        facts["units of sharding"] = ", ".join(map(clean_name, self.units)) or "the whole alone"
        if self.recomputed:
            facts["recomputed activations"] = ", ".join(map(clean_name, self.recomputed))
        for topic, by_name in self.details.items():
            facts |= {f"{topic} of {name or 'the root'!r}": describe_value(value) for name, value in by_name.items()}
        return facts


@dataclass(frozen=True, kw_only=True)
class UnitModules:
    """A unit of a plan in the module that is being sharded.

    Attributes:
        module: The unit.
        own: The modules in it that no earlier unit holds.
        replicated_names: By each of these modules, the names of its own parameters of which every rank keeps all.
    """

    module: nn.Module
    own: Sequence[nn.Module]
    replicated_names: Mapping[nn.Module, Sequence[str]]

    def parameters(self) -> set[nn.Parameter]:
        """The parameters that the modules own, as they are now."""
        return {parameter for owner in self.own for parameter in owner.parameters(recurse=False)}

    def replicated(self) -> set[nn.Parameter]:
        """The parameters of these modules of which every rank keeps all."""
        named = ((owner, name) for owner, names in self.replicated_names.items() for name in names)
        return {getattr(owner, name) for owner, name in named}


def plan_module(
    module: nn.Module,
    config: Mapping[str, Any],
    *,
    check: Callable[[nn.Module], object] = lambda module: None,
    units: Callable[[nn.Module], Sequence[nn.Module]],
    replicated: Callable[[nn.Module], Collection[Tensor]] = lambda module: (),
    recomputed: Callable[[nn.Module], Sequence[nn.Module]] = lambda module: (),
    details: Callable[[nn.Module, Sequence[nn.Module]], Mapping[str, Mapping[str, Any]]] = lambda module, units: {},
    local_numels: Callable[[Sequence[ParameterPlan]], Sequence[int] | None] = lambda parameters: None,
) -> ShardingPlan:
    """Plan how a module will be sharded.

    Args:
        module: The module; it is not changed.
        config: The settings that it can't change once it is sharded.
        check: Raises if the module can't be sharded. What it raises, and what the following functions raise, becomes
            the plan's :attr:`~ShardingPlan.refusal`.
        units: Returns the submodules that become FSDP units, innermost first.
        replicated: Returns the parameters of which every rank keeps all.
        recomputed: Returns the submodules that recompute their activations.
        details: Returns what else is decided for the module and its units.
        local_numels: Returns how many elements this rank will keep of each parameter that a unit shards.
    """
    plan = ShardingPlan(class_name=type(module).__name__, config=config)  # if the module can't even be looked at
    try:  # what follows calls code of the user's, on which ranks may differ
        refuse_cycles(module)
        plan = replace(_plan_undecided(module), config=config)
        check(module)
        chosen = list(units(module))
        replicated_ids = {id(parameter) for parameter in replicated(module)}
        decided = details(module, chosen)
        parameters = _plan_units(module, plan.parameters, chosen, replicated_ids)
        parameters |= _plan_sizes(parameters, local_numels)
        names = {submodule: name for name, submodule in module.named_modules()}
        unit_names = tuple(names[unit] for unit in chosen)
        recomputed_names = tuple(names[submodule] for submodule in recomputed(module))
    except Exception as refusal:  # ranks compare it, and each raises its own
        return replace(plan, refusal=refusal)
    return replace(plan, parameters=parameters, units=unit_names, recomputed=recomputed_names, details=decided)


def check_unchanged(module: nn.Module, plan: ShardingPlan, config: Mapping[str, Any]) -> None:
    """Refuse a module that is not, or no longer, as it was planned.

    Args:
        module: The module that is about to be sharded.
        plan: Its plan.
        config: The settings that it is sharded with.

    Raises:
        ShardingError: Its parameters, buffers or layers are others, or the settings are.
    """
    undecided = {name: replace(p, unit="", is_replicated=False, divided_by=1) for name, p in plan.parameters.items()}
    planned = replace(plan, parameters=undecided, units=(), recomputed=(), details={}).describe()
    current = _plan_undecided(module).describe()
    changed = [name for name in {**plan.config, **config} if plan.config.get(name) != config.get(name)]
    planned |= {f"setting {name!r}": repr(plan.config[name]) for name in changed if name in plan.config}
    current |= {f"setting {name!r}": repr(config[name]) for name in changed if name in config}
    for topic in (*planned, *current):
        if planned.get(topic) != current.get(topic):
            raise ShardingError(
                f"{type(module).__name__} is not as it was planned: its {topic} was {planned.get(topic, 'not there')}, "
                f"and is {current.get(topic, 'not there')}.\n"
                "Call plan() with this module after its last change, or call shard(module) alone, which plans it."
            )


def _plan_undecided(module: nn.Module) -> ShardingPlan:
    """What there is in a module, before anything is decided."""
    return ShardingPlan(
        class_name=type(module).__name__,
        parameters=_plan_parameters(module),
        buffers={name: describe_tensor(buffer) for name, buffer in module.named_buffers()},
        layers={name: _describe_layer(submodule) for name, submodule in module.named_modules()},
    )


def _plan_units(
    module: nn.Module, parameters: Mapping[str, ParameterPlan], units: Sequence[nn.Module], replicated: Collection[int]
) -> dict[str, ParameterPlan]:
    """The parameters with their units; ``replicated`` has the ids of those of which every rank keeps all."""
    names = {submodule: name for name, submodule in module.named_modules()}
    unit_by_id = {
        id(parameter): clean_name(names[unit])
        for unit, owners in modules_by_unit(units, module)
        for submodule in owners
        for parameter in submodule.parameters(recurse=False)
    }
    ids = {clean_name(name): id(parameter) for name, parameter in module.named_parameters(remove_duplicate=False)}
    return {
        name: replace(parameter, unit=unit_by_id.get(ids[name], ""), is_replicated=ids[name] in replicated)
        for name, parameter in parameters.items()
    }


def _plan_parameters(module: nn.Module) -> dict[str, ParameterPlan]:
    """The parameters as they are, before units are known; without those of lazy modules, which have no shape yet."""
    first_names: dict[int, str] = {}
    parameters: dict[str, ParameterPlan] = {}
    for raw_name, parameter in module.named_parameters(remove_duplicate=False):
        name = clean_name(raw_name)
        first_name = first_names.setdefault(id(parameter), name)
        if not is_lazy(parameter):
            parameters[name] = ParameterPlan(
                shape=tuple(parameter.shape),
                dtype=parameter.dtype,
                requires_grad=parameter.requires_grad,
                is_built_in_parts=is_part(parameter),
                tied_to=None if first_name == name else first_name,
            )
    return parameters


def _plan_sizes(
    parameters: Mapping[str, ParameterPlan], local_numels: Callable[[Sequence[ParameterPlan]], Sequence[int] | None]
) -> dict[str, ParameterPlan]:
    """The parameters with ``local_numel``; without those of which it is not known."""
    sized = {name: replace(p, local_numel=p.numel) for name, p in parameters.items() if p.is_replicated}
    by_unit: dict[str, list[str]] = {}
    for name, parameter in parameters.items():
        if parameter.tied_to is None and not parameter.is_replicated:
            by_unit.setdefault(parameter.unit, []).append(name)
    for names in by_unit.values():
        numels = local_numels([parameters[name] for name in names])
        if numels is None:
            continue
        for name, numel in zip(names, numels, strict=True):
            sized[name] = replace(parameters[name], local_numel=numel)
    return sized


def modules_by_unit(units: Iterable[nn.Module], root: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Module]]]:
    """The units, innermost first, and the root last, each with the modules in it that no earlier one holds."""
    assigned: set[nn.Module] = set()
    for unit in (*units, root):
        own = [module for module in unit.modules() if module not in assigned]
        assigned.update(own)
        yield unit, own


def _describe_layer(module: nn.Module) -> str:
    """A layer's class, and what torch's own layers show of their settings."""
    # fully_shard gives a module a subclass with another name: describe the user's class in either case
    layer_class = next(base for base in type(module).__mro__ if not issubclass(base, FSDPModule))
    is_torch_layer = layer_class.__module__.startswith("torch.nn.modules.")
    # which shows its parameters, which are described by themselves, and devices, which may differ between ranks
    is_container = isinstance(module, nn.ParameterList | nn.ParameterDict)
    settings = module.extra_repr() if is_torch_layer and not is_container else ""
    return f"{layer_class.__qualname__}({settings})" if settings else layer_class.__qualname__
