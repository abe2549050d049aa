"""The oracle: one unsharded process in fp64, plain torch on whole batches, without any of our code."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fsdp_core.testing.pairs.dimensions import Configuration
from fsdp_core.testing.pairs.net import CLIP, batches, is_last, loss_of, new_net, optimizers

__all__ = ["Run", "train_in_one_process"]


@dataclass(kw_only=True)
class Run:
    """What a run has computed, tensors in fp64.

    Attributes:
        losses: The loss of each micro-batch.
        gradients: The gradients of each step, as the optimizers get them, by name of the parameters that have one.
        norms: The norm of each step and optimizer before clipping, if gradients are clipped by norm.
        weights: The weights and buffers at the end, by name.
        moments: The optimizers' state at the end, by parameter name and key.
    """

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    moments: dict[tuple[str, str], Tensor] = field(default_factory=dict)


def train_in_one_process(configuration: Configuration) -> Run:
    """Train on whole batches in this process.

    Args:
        configuration: What is trained, and how; the sharding is left out of it.
    """
    run = Run()
    net = new_net(configuration).double()
    all_optimizers = optimizers(configuration["optimizer"], net)
    micro_batches_per_step = int(configuration["accumulate"])
    for index, (x, y) in enumerate(batches(torch.float64)):
        loss = loss_of(net(x, index), y)
        run.losses.append(loss.item())
        (loss / micro_batches_per_step).backward()
        if not is_last(index, micro_batches_per_step):
            continue
        for optimizer in all_optimizers:
            _clip(configuration["clip"], optimizer, run.norms)
        run.gradients.append({n: p.grad.clone() for n, p in net.named_parameters() if p.grad is not None})
        for optimizer in all_optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=configuration["zeroed"] == "to none")
    run.weights = {name: tensor.detach().double() for name, tensor in net.state_dict().items()}
    names: dict[Tensor, str] = {parameter: name for name, parameter in net.named_parameters()}
    for optimizer in all_optimizers:
        for parameter, param_state in optimizer.state.items():
            for key, value in param_state.items():
                if value is not None:
                    run.moments[names[parameter], key] = torch.as_tensor(value).double()
    return run


def _clip(limit: str, optimizer: torch.optim.Optimizer, norms: list[float]) -> None:
    """Clip by the norm, by the norm of the largest gradient, by value, or not."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if limit == "norm":
        norms.append(float(nn.utils.clip_grad_norm_(parameters, CLIP["norm"])))
    elif limit == "largest":
        norm = nn.utils.clip_grad_norm_(parameters, CLIP["largest"], norm_type=float("inf"))
        norms.append(float(norm))
    elif limit == "value":
        nn.utils.clip_grad_value_(parameters, CLIP["value"])
