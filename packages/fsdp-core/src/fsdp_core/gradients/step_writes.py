"""Noticing what a step or a forward pass writes to gathered parameters, which is lost when they are freed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from fsdp_core.errors import ShardingError
from fsdp_core.gradients.gathered_values import differs
from fsdp_core.runtime import Runtime
from fsdp_core.torch_private.dynamo import outside_of_compilation

__all__ = ["ComparedShards", "GatheredShard", "StepWrites", "check_writes"]


class StepWrites(Protocol):
    """Notices what the user's ``training_step``, or a forward pass under Fabric, writes to gathered parameters.

    Attributes:
        is_agreed_on: Whether ranks agree at the end of the step on what was written to: what one has found, all raise.
    """

    is_agreed_on: bool

    def renew(self) -> None:
        """Start over, after an optimizer's step inside the training step."""
        ...

    def written(self) -> str | None:
        """The name of a parameter that was written to since it was gathered; of those flattened together, any name."""
        ...

    def stop(self) -> None:
        """End the watch, with the step."""
        ...


def check_writes(
    writes: StepWrites,
    ranks: Runtime | None = None,
    *,
    by: str = "training_step()",
    instead: str = "in on_train_batch_end()",
) -> None:
    """Refuse what was written to gathered parameters. Called before they are freed or gathered again.

    Args:
        writes: What has watched the step.
        ranks: The ranks, all of which must then call this at the end of a step. A rank only sees what was written to
            its own part, and what one of them has found is raised on all. ``None`` where some ranks may not call it.
        by: What may have written, for the error.
        instead: Where to write, for the error.

    Raises:
        ShardingError: Something was written.
    """
    own_name = writes.written()
    if ranks is not None and writes.is_agreed_on and not ranks.total([own_name is not None])[0]:
        return
    names = ranks.gather_objects(own_name) if ranks is not None and writes.is_agreed_on else [own_name]
    written = [(rank, name) for rank, name in enumerate(names) if name is not None]
    if written:
        rank, name = written[0]
        rank_text = f" on rank {rank}" if len(written) < len(names) else ""
        raise ShardingError(
            f"{by} has written to {name!r}{rank_text}, which is gathered for the step: what is written to it is "
            "lost when it is freed.\n"
            f"Write {instead}, where parameters are shards: what is elementwise, such as "
            "p.data.clamp_(-0.01, 0.01) for p in self.critic.parameters(), is right there under every strategy. For "
            "anything else, write within fsdp_core.gathered(module, modifier_rank=0) there. A layer that constrains "
            "its weight in its own forward() can compute the constrained one instead: register_parametrization() of "
            "torch.nn.utils.parametrize."
        )


@dataclass(frozen=True, kw_only=True)
class GatheredShard:
    """A shard that a library gathers for a step.

    Attributes:
        name: What the user calls the parameter, or the first of those that are flattened in it.
        shard: Reads what this rank keeps between steps.
        gathered: Reads the same elements of what is gathered, in the same shape; ``None`` while nothing is.
        assigned: Returns the name of a gathered parameter that was given other memory, by an assignment to its
            ``.data``; for libraries that do not read it back from there.
    """

    name: str
    shard: Callable[[], Tensor]
    gathered: Callable[[], Tensor | None]
    assigned: Callable[[], str | None] = lambda: None


class ComparedShards:
    """Compares what is gathered with the shards that it was gathered from.

    It needs as much memory as the shards, and waits for the device. Modules that gather for their own forward pass, and
    free at its end, are compared at that end too, before a hook of theirs frees.

    Args:
        shards: What is gathered in the step, by a module at the end of whose forward pass it is still gathered when
            hooks run.

    Example:
        >>> import torch
        >>> module = nn.Module()
        >>> shard = torch.ones(2)
        >>> gathered = shard.clone()
        >>> weight = GatheredShard(name="weight", shard=lambda: shard, gathered=lambda: gathered)
        >>> writes = ComparedShards({module: [weight]})
        >>> check_writes(writes)
        >>> _ = gathered.clamp_(-0.01, 0.01)
        >>> check_writes(writes)
        Traceback (most recent call last):
            ...
        fsdp_core.errors.ShardingError: training_step() has written to 'weight', which is gathered for the step: ...
        >>> writes.stop()
    """

    is_agreed_on = True

    def __init__(self, shards: Mapping[nn.Module, Iterable[GatheredShard]]) -> None:
        self._shards = {module: tuple(shards_of_module) for module, shards_of_module in shards.items()}
        self._written_name: str | None = None
        self._hooks = [module.register_forward_hook(self._compare, prepend=True) for module in self._shards]
        self.renew()

    def renew(self) -> None:
        """Compare with the shards as they are now, from now on."""
        self._before = {shard: shard.shard().detach().clone() for shards in self._shards.values() for shard in shards}

    def written(self) -> str | None:
        """The name of the first parameter whose gathered values differ from its shard's."""
        for module in self._shards:
            self._compare(module)
        return self._written_name

    def stop(self) -> None:
        """Compare no longer."""
        for hook in self._hooks:
            hook.remove()

    @outside_of_compilation
    def _compare(self, module: nn.Module, *_: Any) -> None:
        if self._written_name is None:
            for shard in self._shards[module]:
                self._written_name = shard.assigned() or (shard.name if self._is_written(shard) else None)
                if self._written_name is not None:
                    return

    def _is_written(self, shard: GatheredShard) -> bool:
        gathered = shard.gathered()
        return gathered is not None and differs(gathered.detach(), self._before[shard])
