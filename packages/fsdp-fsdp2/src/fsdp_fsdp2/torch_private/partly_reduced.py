"""Gradients that are reduced within a replica, and not yet across replicas."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from fsdp_core import ShardingError
from fsdp_fsdp2.torch_private.parameter_groups import trainable_params

__all__ = ["PartlyReduced"]


class PartlyReduced:
    """Gradients that are reduced within a replica and wait for the all-reduce across replicas.

    ``fully_shard`` keeps them per unit in one flat tensor, in the order of the parameters that had gradients, and does
    not note which these were. It would add to it a flat tensor of other parameters. And if the last backward pass of an
    accumulation does not reach the unit, it would leave the tensor for a later step.

    Attributes:
        used: The parameters for which this rank has computed a gradient since the last all-reduce.
    """

    def __init__(self) -> None:
        self.used: set[Any] = set()
        self._members: dict[Any, list[Any]] = {}  # the parameters in each group's flat tensor

    def __bool__(self) -> bool:
        return bool(self._members)

    def must_all_reduce(self, group: Any) -> bool:
        """Whether a unit must all-reduce now, even if the backward pass does not reach it."""
        return group.all_reduce_grads and group in self._members

    def check(self, group: Any) -> None:
        """Refuse to add gradients of other parameters than those that wait.

        Raises:
            ShardingError: Parameters of the unit were frozen or unfrozen since the last micro-batch.
        """
        members = self._members.get(group)
        if members is not None and (changed := set(trainable_params(group)).symmetric_difference(members)):
            name = min(parameter._param_fqn or parameter._module_info.param_name for parameter in changed)
            raise ShardingError(
                f"{name!r} was frozen or unfrozen between two micro-batches of one optimizer step, whose gradients "
                "wait for the all-reduce across replicas: sync_each_batch='within_replica' keeps them per unit in one "
                "tensor.\nFreeze it after the step or optimizer.zero_grad(), or write sync_each_batch=False or True."
            )

    def record_waiting(self, group: Any) -> None:
        """Record which gradients wait, if any, after a unit's were reduced within the replica, or across replicas."""
        if group._partial_reduce_output is None:
            self._members.pop(group, None)
        else:
            self._members[group] = trainable_params(group)

    def zero(self, shard_ids: Collection[int]) -> None:
        """Give up the gradients of some parameters.

        Args:
            shard_ids: The ids of their shards.
        """
        self.used = {parameter for parameter in self.used if id(parameter.sharded_param) not in shard_ids}
        for group, members in list(self._members.items()):
            sizes = [parameter.padded_sharded_param_size.numel() for parameter in members]
            for parameter, part in zip(members, group._partial_reduce_output.split(sizes), strict=True):
                if id(parameter.sharded_param) in shard_ids:
                    part.zero_()
            if all(id(parameter.sharded_param) in shard_ids for parameter in members):
                group._partial_reduce_output = None
                del self._members[group]

    def forget(self) -> None:
        """Give up all gradients."""
        for group in self._members:
            group._partial_reduce_output = None
        self._members.clear()
        self.used.clear()

    def waiting_gradients(self) -> dict[Any, tuple[list[Any], Tensor]]:
        """By group, the parameters whose gradients wait, and the flat tensor of these, for :meth:`put_back`."""
        return {group: (members, group._partial_reduce_output) for group, members in self._members.items()}

    def put_back(self, waiting: Mapping[Any, tuple[list[Any], Tensor]], used: set[Any]) -> None:
        """Let gradients wait again that :meth:`waiting_gradients` returned.

        Args:
            waiting: What it returned.
            used: The parameters that were used then.
        """
        self.used = used
        for group, (members, flat) in waiting.items():
            self._members[group], group._partial_reduce_output = members, flat
