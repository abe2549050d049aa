"""Checks that all ranks have set up the same optimizers: with other settings, each would train its shards apart."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from torch.optim import Optimizer

from fsdp_core.errors import ShardingError
from fsdp_core.runtime import Runtime
from fsdp_core.sharding.rank_agreement import described

__all__ = ["check_same_optimizers", "settings_of"]

_NOTHING = "missing"


def check_same_optimizers(runtime: Runtime, optimizers: Sequence[Optimizer]) -> None:
    """Raise on every rank if the optimizers of any two ranks differ. All ranks must call it.

    Compared are the classes of optimizers, their param groups, and the settings of these as far as they are plain data;
    of functions and objects, the names. If they agree, ranks exchange only a digest.

    Args:
        runtime: The ranks.
        optimizers: This rank's.

    Raises:
        ShardingError: Two ranks differ. The message names the first difference, and the values by rank.
    """
    if runtime.world_size == 1:
        return
    own = settings_of(optimizers)
    digests = runtime.gather_objects(hashlib.sha256(repr(own).encode()).hexdigest())
    if len(set(digests)) == 1:
        return
    everyones = [dict(settings) for settings in runtime.gather_objects(own)]
    # in the order of the first rank that knows it: what it is in comes before what it holds
    names = dict.fromkeys(name for settings in everyones for name in settings)
    name = next(name for name in names if len({settings.get(name) for settings in everyones}) > 1)
    ranks: dict[str, list[int]] = {}
    for rank, settings in enumerate(everyones):
        ranks.setdefault(settings.get(name, _NOTHING), []).append(rank)
    values = ", and ".join(f"{value} on rank {', '.join(map(str, which))}" for value, which in ranks.items())
    raise ShardingError(
        f"ranks have set up different optimizers: {name} is {values}. Each would train its shards in its own way.\n"
        "Build the same optimizers on every rank, with groups in the same order. A setting that is drawn or measured "
        "must be one for all: lr = strategy.broadcast(lr) takes rank 0's (trainer.strategy, or fabric.broadcast(lr))."
    )


def settings_of(optimizers: Sequence[Optimizer]) -> list[tuple[str, str]]:
    """Optimizers as names and values, in order.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> settings_of([torch.optim.SGD([weight], lr=0.1)])[:4]  # doctest: +NORMALIZE_WHITESPACE
        [('the number of optimizers', '1'), ('the class of optimizer 0', 'SGD'),
         ('the number of param groups of SGD', '1'), ('the number of parameters in param group 0 of SGD', '1')]
    """
    found = [("the number of optimizers", str(len(optimizers)))]
    for index, optimizer in enumerate(optimizers):
        kind = type(optimizer).__qualname__
        which = kind if len(optimizers) == 1 else f"optimizer {index} ({kind})"
        groups = optimizer.param_groups
        found.append((f"the class of optimizer {index}", kind))
        found.append((f"the number of param groups of {which}", str(len(groups))))
        for number, group in enumerate(groups):
            where = f"param group {number} of {which}"
            found.append((f"the number of parameters in {where}", str(len(group["params"]))))
            settings = sorted(group.items(), key=lambda item: str(item[0]))
            found += [(f"{key!r} in {where}", described(value)) for key, value in settings if key != "params"]
    return found
