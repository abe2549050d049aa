"""Checks that all ranks have set up the same optimizers: with other settings, each would train its shards differently.

All settings are compared once. Those that schedulers and callbacks change are compared after each batch as well, in a
sum that ranks compute anyway: they add up a digest of these settings, and its square. All digests are equal exactly if
the square of their sum is their number times the sum of their squares (Cauchy-Schwarz). Only if they differ, the
settings themselves are exchanged.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator, Sequence

from torch.optim import Optimizer

from fsdp_core.errors import ShardingError
from fsdp_core.runtime import Runtime
from fsdp_core.sharding.agreement.same_model import describe_value

__all__ = ["are_equal", "check_same_optimizers", "check_same_rates", "digest_of_rates", "settings_of"]

_NOTHING = "missing"

#: What schedulers and callbacks change while a run goes on.
_RATES = ("lr", "momentum", "betas", "weight_decay")

#: Relative: hosts with other processors may round a scheduler's cosine differently, in the last bit of each step.
_ROUNDING = 1e-6


def check_same_optimizers(runtime: Runtime, optimizers: Sequence[Optimizer]) -> None:
    """Raise on every rank if the optimizers of any two ranks differ. All ranks must call it.

    The classes of the optimizers are compared, the number of their param groups, and the settings of these: plain data
    by its value, functions and objects by their names. If all agree, ranks exchange only a digest.

    Args:
        runtime: The ranks.
        optimizers: This rank's.

    Raises:
        ShardingError: Two ranks differ. The message names the first difference, and the values by rank.
    """
    if runtime.world_size == 1:
        return
    own_settings = settings_of(optimizers)
    digests = runtime.gather_objects(hashlib.sha256(repr(own_settings).encode()).hexdigest())
    if len(set(digests)) == 1:
        return
    settings_by_rank = [dict(settings) for settings in runtime.gather_objects(own_settings)]
    # in each rank's order, in which the number of groups, for example, comes before what is in them
    names = dict.fromkeys(name for settings in settings_by_rank for name in settings)
    name = next(name for name in names if len({settings.get(name) for settings in settings_by_rank}) > 1)
    ranks: dict[str, list[int]] = {}
    for rank, settings in enumerate(settings_by_rank):
        ranks.setdefault(settings.get(name, _NOTHING), []).append(rank)
    values = ", and ".join(
        f"{value} on rank {', '.join(map(str, ranks_of_value))}" for value, ranks_of_value in ranks.items()
    )
    raise ShardingError(
        f"ranks have set up different optimizers: {name} is {values}. Each would train its shards in its own way.\n"
        "Build the same optimizers on every rank, with groups in the same order. A setting that is drawn or measured "
        "must be one for all: lr = strategy.broadcast(lr) takes rank 0's (trainer.strategy, or fabric.broadcast(lr))."
    )


def digest_of_rates(optimizers: Sequence[Optimizer]) -> int:
    """24 bits that are the same on ranks whose optimizers have the same rates, but for rounding."""
    return zlib.crc32(" ".join(f"{value:.6g}" for _, value in _rates_of(optimizers)).encode()) >> 8


def are_equal(total: int, sum_of_squares: int, count: int) -> bool:
    """Whether numbers are all the same.

    Args:
        total: Their sum.
        sum_of_squares: The sum of their squares.
        count: How many there are.

    Example:
        >>> are_equal(3 + 3 + 3, 9 + 9 + 9, 3), are_equal(2 + 3 + 4, 4 + 9 + 16, 3)
        (True, False)
    """
    return total * total == count * sum_of_squares


def check_same_rates(runtime: Runtime, optimizers: Sequence[Optimizer], when: str) -> None:
    """Raise on every rank if learning rates, momenta or weight decays of any two ranks differ. All ranks must call it.

    Args:
        runtime: The ranks.
        optimizers: This rank's.
        when: When they are compared, in words, for the message.

    Raises:
        ShardingError: Two ranks differ by more than rounding.
    """
    rates_by_rank = [dict(rates) for rates in runtime.gather_objects(list(_rates_of(optimizers)))]
    for location in dict.fromkeys(location for rates in rates_by_rank for location in rates):
        ranks: dict[float | None, list[int]] = {}
        for rank, rates in enumerate(rates_by_rank):
            ranks.setdefault(rates.get(location), []).append(rank)
        values = [value for value in ranks if value is not None]
        if len(values) == len(ranks) and max(values) - min(values) <= _ROUNDING * max(map(abs, values)):
            continue
        description = ", and ".join(
            f"{_NOTHING if value is None else f'{value:.9g}'} on rank {', '.join(map(str, ranks_of_value[:8]))}"
            f"{', …' if len(ranks_of_value) > 8 else ''}"
            for value, ranks_of_value in ranks.items()
        )
        optimizer_name, number, key, index = location
        name = f"{key!r}[{index}]" if key == "betas" else repr(key)
        raise ShardingError(
            f"ranks have changed their optimizers differently: {when}, {name} in param group {number} of "
            f"{optimizer_name} is {description}. Each would train its shards "
            "in its own way.\n"
            "Build the same schedulers on every rank, log what ReduceLROnPlateau monitors with sync_dist=True, and set "
            "rates on all ranks alike: lr = strategy.broadcast(lr) takes rank 0's."
        )


def _rates_of(optimizers: Sequence[Optimizer]) -> Iterator[tuple[tuple[str, int, str, int], float]]:
    """Rates by optimizer, param group, key and index. Tensors are left out: reading one may wait for its device."""
    for index, optimizer in enumerate(optimizers):
        class_name = type(optimizer).__qualname__
        name = class_name if len(optimizers) == 1 else f"optimizer {index} ({class_name})"
        for number, group in enumerate(optimizer.param_groups):
            for key in _RATES:
                value = group.get(key)
                for position, rate in enumerate(value if isinstance(value, tuple | list) else (value,)):
                    if isinstance(rate, int | float):
                        yield (name, number, key, position), rate


def settings_of(optimizers: Sequence[Optimizer]) -> list[tuple[str, str]]:
    """Optimizers as names and values, in order.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> settings_of([torch.optim.SGD([weight], lr=0.1)])[:4]  # doctest: +NORMALIZE_WHITESPACE
        [('the number of optimizers', '1'), ('the class of optimizer 0', 'SGD'),
         ('the number of param groups of SGD', '1'), ('the number of parameters in param group 0 of SGD', '1')]
    """
    settings = [("the number of optimizers", str(len(optimizers)))]
    for index, optimizer in enumerate(optimizers):
        class_name = type(optimizer).__qualname__
        name = class_name if len(optimizers) == 1 else f"optimizer {index} ({class_name})"
        groups = optimizer.param_groups
        settings.append((f"the class of optimizer {index}", class_name))
        settings.append((f"the number of param groups of {name}", str(len(groups))))
        for number, group in enumerate(groups):
            location = f"param group {number} of {name}"
            settings.append((f"the number of parameters in {location}", str(len(group["params"]))))
            options = sorted(group.items(), key=lambda item: str(item[0]))
            settings += [(f"{key!r} in {location}", describe_value(value)) for key, value in options if key != "params"]
    return settings
