"""What is combined: a dimension is one option of a run and the values that it can have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fsdp_core.plugins.capabilities import Capability
from fsdp_core.plugins.strategy_info import StrategyInfo
from fsdp_core.sharding.units.wrap_policy import describe_policy
from fsdp_core.testing import oracle
from fsdp_core.testing.meshes import DeclaredMesh
from fsdp_core.testing.suite.base_class import needs_of

__all__ = ["DIMENSIONS", "FORBIDDEN", "Configuration", "Dimension", "Value", "declared", "of_option", "options_of"]

#: The label of each dimension's value, by name of the dimension.
Configuration = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Value:
    """One value of a dimension.

    Attributes:
        options: The strategy's options that it sets.
        needs: Capabilities, or names of options, that the strategy must declare, besides what ``options`` request.
        seldom: Whether a run with it takes seconds. It is then drawn only if thousands of configurations are.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    needs: tuple[Capability | str, ...] = ()
    seldom: bool = False


@dataclass(frozen=True, kw_only=True)
class Dimension:
    """One option of a run.

    Attributes:
        name: Its name.
        values: Its values by label; the first is the default.
    """

    name: str
    values: Mapping[str, Value]


def of_option(name: str, *values: Any, seldom: bool = False) -> Dimension:
    """A dimension that is an option of the strategy: left out, or one of these values.

    Args:
        name: The option, and the dimension's name.
        *values: Its values.
        seldom: See :class:`Value`.

    Example:
        >>> list(of_option("reshard_after_forward", True, False).values)
        ['left out', 'True', 'False']
    """
    labels = [value if isinstance(value, str) else describe_policy(value) for value in values]
    options = [Value(options={name: value}, needs=(name,), seldom=seldom) for value in values]
    return Dimension(name=name, values={"left out": Value(), **dict(zip(labels, options, strict=True))})


_ACCUMULATES = (Capability.GRADIENT_ACCUMULATION,)
_MIXED = (Capability.MIXED_PRECISION,)

#: The dimensions of all strategies, from which undeclared values are left out. Added are the mesh and a strategy's own.
DIMENSIONS: tuple[Dimension, ...] = (
    Dimension(
        name="front_end",
        values={
            "trainer": Value(),
            "fabric": Value(),
            "by hand": Value(needs=(Capability.MANUAL_OPTIMIZATION,)),  # under the Trainer
        },
    ),
    Dimension(
        name="precision",
        values={
            "double": Value(),  # a module whose parameters are fp64
            "32-true": Value(),
            "bf16-mixed": Value(needs=_MIXED),
            "16-mixed": Value(needs=(*_MIXED, Capability.GRADIENT_SCALING)),
        },
    ),
    Dimension(name="accumulate", values={"1": Value(), "2": Value(needs=_ACCUMULATES), "3": Value(needs=_ACCUMULATES)}),
    of_option("sync_each_batch", True),
    Dimension(
        name="clip",
        values={
            "nothing": Value(),
            "norm": Value(needs=(Capability.CLIP_BY_NORM,)),
            "largest": Value(needs=(Capability.CLIP_BY_NORM,)),  # by the norm of order infinity
            "value": Value(needs=(Capability.CLIP_BY_VALUE,)),
        },
    ),
    of_option("cpu_offload", True),
    of_option("activation_checkpointing_policy", {oracle.Block}),
    of_option("reshard_after_forward", True, False),
    Dimension(
        name="wrap",
        values={
            "left out": Value(),
            "the root": Value(options={"auto_wrap_policy": None}),
            "blocks": Value(options={"auto_wrap_policy": {oracle.Block}}),
            "layers": Value(options={"auto_wrap_policy": oracle.is_layer}),
        },
    ),
    Dimension(name="compile", values={"nothing": Value(), "blocks": Value(seldom=True)}),
    Dimension(
        name="trained",
        values={
            "all": Value(),
            "not a layer": Value(),
            "not a block": Value(),
            "in some steps": Value(),  # one layer is used by every other micro-batch alone
        },
    ),
    Dimension(name="tied", values={"yes": Value(), "no": Value()}),
    Dimension(name="optimizer", values={"sgd": Value(), "momentum": Value(), "adamw": Value(), "two": Value()}),
    Dimension(name="zeroed", values={"to none": Value(), "in place": Value()}),  # gradients, by zero_grad()
    Dimension(
        name="between",  # what is done with the model after each micro-batch
        values={"nothing": Value(), "evaluated": Value(), "gathered": Value()},
    ),
    Dimension(
        name="resume", values={"no": Value(), "between steps": Value(), "amid a step": Value(needs=_ACCUMULATES)}
    ),
    Dimension(
        name="saved",
        values={
            "sharded": Value(options={"state_dict_type": "sharded"}),
            "full": Value(options={"state_dict_type": "full"}),
        },
    ),
    of_option("async_save", True),
)

#: Combinations that are impossible: labels by dimension, several of one dimension as a tuple, and the reason.
FORBIDDEN: tuple[tuple[Mapping[str, str | tuple[str, ...]], str], ...] = (
    ({"front_end": "trainer", "optimizer": "two"}, "Lightning takes several optimizers for manual optimization alone"),
    ({"front_end": ("trainer", "by hand"), "clip": "largest"}, "the Trainer clips by norms of order 2"),
    ({"accumulate": "1", "resume": "amid a step"}, "a step of one micro-batch has no middle"),
    ({"accumulate": "1", "sync_each_batch": "True"}, "each batch is a step"),
    ({"resume": "no", "saved": "full"}, "nothing is saved"),
    ({"resume": "no", "async_save": "True"}, "nothing is saved"),
)


def _declares(info: StrategyInfo, value: Value) -> bool:
    options = {option.name for option in info.options}
    needs = [*value.needs, *needs_of(value.options)]
    return all(need in (info.capabilities if isinstance(need, Capability) else options) for need in needs)


def declared(
    info: StrategyInfo,
    meshes: Mapping[str, DeclaredMesh],
    own: Iterable[Dimension] = (),
    *,
    seldom: bool = True,
    without: Mapping[str, str] | None = None,
) -> tuple[Dimension, ...]:
    """The dimensions of a strategy, with the values that it declares.

    Args:
        info: The strategy.
        meshes: Its meshes.
        own: Dimensions of this strategy alone.
        seldom: Whether values that take seconds are included.
        without: Reasons by ``"dimension=label"``: values that the strategy is known not to train rightly with.
    """
    mesh = Dimension(name="mesh", values={name: Value() for name in meshes})
    after = Dimension(name="resumed_on", values={"the same": Value(), **mesh.values})
    dimensions = []
    for dimension in (mesh, *DIMENSIONS, after, *own):
        values = {
            label: value
            for label, value in dimension.values.items()
            if _declares(info, value)
            and (seldom or not value.seldom)
            and f"{dimension.name}={label}" not in (without or {})
        }
        if values:
            dimensions.append(Dimension(name=dimension.name, values=values))
    return tuple(dimensions)


def options_of(configuration: Configuration, dimensions: Sequence[Dimension]) -> dict[str, Any]:
    """The strategy's options that a configuration sets, without those of its mesh."""
    options: dict[str, Any] = {}
    for dimension in dimensions:
        options |= dimension.values[configuration[dimension.name]].options
    return options
