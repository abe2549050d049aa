"""Refuses parameters that are added to a module after it was sharded, which nothing would shard or reduce."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import nn
from torch.optim import Optimizer

from fsdp_core.errors import ShardingError
from fsdp_core.state.fqn import named_parameters

__all__ = ["refuse_late"]


def refuse_late(module: nn.Module, names: Collection[str], optimizers: Iterable[Optimizer], instead: str) -> None:
    """Refuse trainable parameters that were added after sharding. Frozen ones that no optimizer holds are allowed.

    Args:
        module: The user's module, inside :meth:`fsdp_core.Sharded.unsharded_view`.
        names: The names of its parameters before it was sharded.
        optimizers: The optimizers of its parameters.
        instead: Where to create the parameters instead, as a sentence.

    Raises:
        ShardingError: There are such parameters. The message names them.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2))
        >>> names = [name for name, _ in model.named_parameters()]
        >>> refuse_late(model, names, [], "Make them before fabric.setup().")
        >>> _ = model.append(nn.Linear(2, 1, bias=False))
        >>> refuse_late(model, names, [], "Make them before fabric.setup().")
        Traceback (most recent call last):
            ...
        fsdp_core.errors.ShardingError: '1.weight' was added to the model after it was sharded, ...
    """
    optimizer_params = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    own_names = set(names)
    late = {name: p for name, p in named_parameters(module) if name not in own_names}
    trained = [name for name, p in late.items() if p.requires_grad or id(p) in optimizer_params]
    if trained:
        late_names = ", ".join(map(repr, trained[:5])) + (f" and {len(trained) - 5} more" if len(trained) > 5 else "")
        raise ShardingError(
            f"{late_names} was added to the model after it was sharded, so nothing divides them or averages their "
            "gradients: each rank would train its own. "
            f"The model is a {type(module).__name__}.\n{instead} What is not to be "
            "trained may come at any time, with requires_grad_(False)."
        )
