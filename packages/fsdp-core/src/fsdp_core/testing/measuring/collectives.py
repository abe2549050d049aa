"""Counts the collectives that a rank takes part in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from fsdp_core.testing import oracle
from fsdp_core.testing.training import new_fabric

__all__ = ["Layer", "count_collectives", "count_in_steps"]

WIDTH = 6


class Layer(nn.Linear):
    """A unit of the modules of :func:`count_in_steps`."""


def _new_layers() -> nn.Module:
    """A root with a layer of its own and three units, the last of which computes its output."""
    layers = (nn.Linear(WIDTH, WIDTH), Layer(WIDTH, WIDTH), nn.Tanh(), Layer(WIDTH, WIDTH), nn.Tanh())
    return nn.Sequential(*layers, Layer(WIDTH, WIDTH))


def count_collectives(work: Callable[[], object], name: str) -> int:
    """The number of collectives of one kind during ``work``, on process groups.

    Args:
        work: What this rank does.
        name: What torch's name of the collective contains, such as ``"allgather"``.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        work()
    profiler: Any = profile.profiler
    names = [event.name() for event in profiler.kineto_results.events()]  # faster than key_averages()
    return sum("c10d::" in event_name and name in event_name for event_name in names)


def count_in_steps(strategy: str, shard_by_hand: Callable[[nn.Module], nn.Module]) -> tuple[dict[str, Any], ...]:
    """Count the gathers and the reductions of some steps on each of two ranks. Each step is taken once before.

    Args:
        strategy: The name of the strategy, which shards each :class:`Layer` under Fabric.
        shard_by_hand: Shards such a module with the strategy's library alone.

    Returns:
        The numbers of gathers and reductions by kind of step: those of the strategy, and those by hand.
    """
    fabric = new_fabric(strategy, 2, {"auto_wrap_policy": {Layer}})
    nets = [_new_layers(), _new_layers()]
    fabric_models = [fabric.setup(net, oracle.sgd(net))[0] for net in nets]
    hand_sharded = [shard_by_hand(_new_layers()) for _ in nets]
    return _count(fabric_models, fabric.backward), _count(hand_sharded, Tensor.backward)


def _count(nets: Sequence[Callable[[Tensor], Tensor]], backward: Callable[[Tensor], Any]) -> dict[str, Any]:
    """Count the gathers and reductions of steps with two modules; the second generates what the first judges."""
    judge, generate = nets
    x = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH)

    def plain_step() -> None:
        backward(mse_loss(judge(x), x.flip(1)))

    def input_gradient() -> None:
        point = x.clone().requires_grad_(True)
        torch.autograd.grad(judge(point).sum(), point)

    def adversarial_steps() -> None:
        generated = generate(x)
        backward(judge(x).mean() - judge(generated.detach()).mean())
        backward(-judge(generate(x)).mean())

    counts = {}
    for name, step in {
        "plain": plain_step,
        "gradient of an input": input_gradient,
        "two networks": adversarial_steps,
    }.items():
        step()
        counts[name] = tuple(count_collectives(step, collective) for collective in ("allgather", "reduce_scatter"))
    return counts
