"""The exact collectives of a step of torch's sharded units, by formula: what a count is compared with.

Both libraries gather a unit before it computes and reduce its gradients after the backward pass. They differ in what
they pad: ``fully_shard`` pads the first dimension of each parameter to a multiple of the ranks; FSDP1 lays the
parameters of a unit one after the other and pads the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, ShardingStrategy

from fsdp_core.rehearsal.collectives import Collective, CollectiveName
from fsdp_core.sharding.plan import ParameterPlan, ShardingPlan
from fsdp_core.sharding.precision_strings import ShardPrecision
from fsdp_core.torch_private.fsdp_units import flattens_original_parameters, ranks_after_forward

__all__ = [
    "Difference",
    "UnitCalls",
    "UnitTraffic",
    "compare_traffic",
    "expected_collectives",
    "ranks_with_rows",
    "traffic_by_unit",
]


@dataclass(frozen=True, kw_only=True)
class UnitTraffic:
    """How a unit communicates.

    Attributes:
        name: Its name in ``named_modules()``; empty for the root.
        numel: The elements of its sharded parameters.
        gathered_numel: The elements that a gather returns, with padding.
        gathered_nbytes: Their bytes, in the dtype of the computation.
        reduced_nbytes: The bytes that a reduction of gradients takes, with padding, in the dtype of reductions; 0 if
            nothing is trained.
        ranks: The number of ranks that it is sharded over.
        replicas: The number of groups of such ranks.
        ranks_with_parts: How many of the ranks hold at least one element.
        ranks_in_backward: The number of ranks that the gather of the backward pass is over; ``None`` if there is none.
        keeps_between_batches: Whether it stays gathered after a backward pass that reduces nothing.
        is_flat: Whether FSDP1 has laid its parameters one after the other.
    """

    name: str
    numel: int
    gathered_numel: int
    gathered_nbytes: int
    reduced_nbytes: int
    ranks: int
    replicas: int = 1
    ranks_with_parts: int = 1
    ranks_in_backward: int | None = None
    keeps_between_batches: bool = False
    is_flat: bool = False

    @property
    def label(self) -> str:
        """Its name, for people."""
        return self.name or "the root"


@dataclass(kw_only=True)
class UnitCalls:
    """How often a unit has run in a step.

    Attributes:
        forwards: Its forward passes.
        with_gradients: Those whose outputs the backward pass goes through.
    """

    forwards: int = 0
    with_gradients: int = 0


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A kind of collective of which the formula has another number than was counted.

    Attributes:
        name: Which collective.
        nbytes: The bytes of one call.
        ranks: The ranks of its group.
        units: The units that call it, by the formula.
        expected: The calls by the formula.
        counted: The calls that were counted.
    """

    name: CollectiveName
    nbytes: int
    ranks: int
    units: tuple[str, ...]
    expected: int
    counted: int


# -- what units communicate --------------------------------------------------------------------------------------------


def traffic_by_unit(
    root: nn.Module, module: nn.Module, plan: ShardingPlan, precision: ShardPrecision, ranks: int, replicas: int = 1
) -> list[UnitTraffic]:
    """How each unit of a sharded module communicates, from its plan: names, shapes and dtypes.

    Of the module itself only this is read: which library has made its units, and whether these stay gathered.

    Args:
        root: What was sharded: FSDP1's wrapper of the module, or the module.
        module: The user's module.
        plan: How it is sharded.
        precision: The dtypes of shards, computation and reduction.
        ranks: The number of ranks that parameters are sharded over.
        replicas: The number of groups of such ranks.

    Returns:
        The units that have sharded parameters, innermost first; none if neither library has made them.
    """
    traffic = []
    for name in (*plan.units, ""):
        parameters = [
            parameter
            for parameter in plan.parameters.values()
            if parameter.unit == name and parameter.tied_to is None and not parameter.is_replicated
        ]
        if not parameters:
            continue
        unit = module.get_submodule(name)
        if isinstance(unit, FSDPModule):
            traffic.append(_by_rows(name, unit, parameters, precision, ranks, replicas))
        elif isinstance(root, FullyShardedDataParallel):
            traffic.append(_flat(name, root, parameters, precision, ranks, replicas))
    return traffic


def _by_rows(
    name: str,
    unit: FSDPModule,
    parameters: Sequence[ParameterPlan],
    precision: ShardPrecision,
    ranks: int,
    replicas: int,
) -> UnitTraffic:
    """Of ``fully_shard``: a shard has as many rows of each parameter as the first rank's, the others are padded.

    Experts that are divided among ranks before are sharded over the others, along a dimension that these divide evenly,
    if there is one.
    """
    divided_by = parameters[0].divided_by  # the same for all of a unit
    ranks //= divided_by
    if any(parameter.dtype.is_complex for parameter in parameters):
        precision = ShardPrecision()  # torch would reduce them in a real dtype

    def is_even(parameter: ParameterPlan) -> bool:
        shape = (parameter.shape[0] // divided_by, *parameter.shape[1:])
        return divided_by > 1 and any(size % ranks == 0 for size in shape)

    def padded(parameter: ParameterPlan) -> int:
        numel = parameter.numel // divided_by
        rows = parameter.shape[0] // divided_by
        return numel if is_even(parameter) else -(-rows // ranks) * ranks * (numel // max(1, rows))

    def compute_dtype(parameter: ParameterPlan) -> torch.dtype:
        return (parameter.dtype.is_floating_point and precision.compute) or parameter.dtype

    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return UnitTraffic(
        name=name,
        numel=sum(parameter.numel for parameter in parameters) // divided_by,
        gathered_numel=sum(map(padded, parameters)),
        gathered_nbytes=sum(padded(parameter) * compute_dtype(parameter).itemsize for parameter in parameters),
        reduced_nbytes=sum(padded(p) * (precision.reduce or compute_dtype(p)).itemsize for p in trained),
        ranks=ranks,
        replicas=replicas,
        ranks_with_parts=max(
            ranks if is_even(p) else ranks_with_rows(p.shape[0] // divided_by, ranks) for p in parameters
        ),
        ranks_in_backward=ranks_after_forward(unit),
    )


def ranks_with_rows(rows: int, ranks: int) -> int:
    """How many ranks have rows of a parameter, of which each has as many as the first until none are left.

    Args:
        rows: The size of its first dimension.
        ranks: The number of ranks.

    Example:
        >>> ranks_with_rows(8, 4), ranks_with_rows(9, 4), ranks_with_rows(3, 4)
        (4, 3, 3)
    """
    return -(-rows // max(1, -(-rows // ranks)))


#: FSDP1's strategies that gather a unit again in the backward pass.
_RESHARDING = (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)


def _flat(
    name: str,
    root: FullyShardedDataParallel,
    parameters: Sequence[ParameterPlan],
    precision: ShardPrecision,
    ranks: int,
    replicas: int,
) -> UnitTraffic:
    """Of FSDP1: the parameters one after the other, each aligned, all of it padded to a multiple of the ranks."""
    compute = precision.compute or parameters[0].dtype
    align = 16 // compute.itemsize if flattens_original_parameters(root) else 1
    end = 0
    for parameter in parameters:
        end = -(-end // align) * align + parameter.numel
    rows = -(-end // ranks)
    reshards = root.sharding_strategy in _RESHARDING
    is_trained = any(parameter.requires_grad for parameter in parameters)
    return UnitTraffic(
        name=name,
        numel=sum(parameter.numel for parameter in parameters),
        gathered_numel=rows * ranks,
        gathered_nbytes=rows * ranks * compute.itemsize,
        reduced_nbytes=rows * ranks * (precision.reduce or compute).itemsize if is_trained else 0,
        ranks=ranks,
        replicas=replicas,
        ranks_with_parts=ranks_with_rows(end, ranks),
        # the root stays gathered until the backward pass, which begins with it
        ranks_in_backward=ranks if reshards and name else None,
        keeps_between_batches=not reshards,
        is_flat=True,
    )


# -- collectives -------------------------------------------------------------------------------------------------------

_Key = tuple[CollectiveName, int, int]


def expected_collectives(
    units: Iterable[UnitTraffic], calls: Mapping[str, UnitCalls], batches: int, reduced_batches: int
) -> dict[_Key, Counter[str]]:
    """The collectives of an optimizer step: by name, bytes of a call and ranks, the number of calls of each unit.

    Args:
        units: How units communicate.
        calls: How often units have run in the step, in the order in which their first forward passes ended. A unit
            without an entry has not; the root has for each micro-batch.
        batches: The number of micro-batches.
        reduced_batches: The number of micro-batches whose gradients are reduced.
    """
    expected: dict[_Key, Counter[str]] = {}
    successors = dict(zip(calls, [*calls][1:], strict=False))
    of_root = UnitCalls(forwards=batches, with_gradients=batches)

    def add(name: CollectiveName, nbytes: int, ranks: int, unit: UnitTraffic, times: int) -> None:
        if ranks > 1 and nbytes and times:
            expected.setdefault((name, nbytes, ranks), Counter())[unit.label] += times

    for unit in units:
        own = calls.get(unit.name, UnitCalls()) if unit.name else of_root
        gathers = min(own.forwards, reduced_batches) if unit.keeps_between_batches else own.forwards
        add("all-gather", unit.gathered_nbytes, unit.ranks, unit, gathers)
        if unit.ranks_in_backward is not None:
            if unit.is_flat:  # it is freed when its gradients are complete, after the last of its calls
                again = min(own.with_gradients, batches)
            elif own.with_gradients:
                again = own.forwards
            else:  # nothing needs it in the backward pass, but it is gathered ahead where the one after it runs
                successor = calls.get(successors.get(unit.name, ""), UnitCalls())
                again = min(own.forwards, successor.with_gradients)
            add("all-gather", unit.gathered_nbytes, unit.ranks_in_backward, unit, again)
        reductions = min(own.with_gradients, reduced_batches)
        add("reduce-scatter", unit.reduced_nbytes, unit.ranks, unit, reductions)
        add("all-reduce", unit.reduced_nbytes // unit.ranks, unit.replicas, unit, reductions)
    return expected


def compare_traffic(
    expected: Mapping[_Key, Mapping[str, int]], counted: Iterable[Collective]
) -> tuple[list[Difference], list[Collective]]:
    """Compare the collectives by formula with those that were counted.

    Args:
        expected: What :func:`expected_collectives` returns.
        counted: The collectives of the same step.

    Returns:
        The differences, and the counted collectives that no unit needs: all-reduces of norms, losses, parameters that
        stay whole, and the all-to-alls of tokens that are sent to experts.
    """
    by_key: dict[_Key, list[Collective]] = {}
    for collective in counted:
        if collective.ranks > 1:
            by_key.setdefault((collective.name, collective.nbytes, collective.ranks), []).append(collective)
    differences = []
    beside: list[Collective] = []
    for key in dict.fromkeys((*expected, *by_key)):
        name, nbytes, ranks = key
        calls = expected.get(key, {})
        if not calls and name not in ("all-gather", "reduce-scatter"):
            beside += by_key[key]
            continue
        expected_count, count = sum(calls.values()), len(by_key.get(key, ()))
        if expected_count != count:
            differences.append(
                Difference(
                    name=name, nbytes=nbytes, ranks=ranks, units=tuple(calls), expected=expected_count, counted=count
                )
            )
    return differences, beside
