"""Trains by a program without any of our code: a copy of the net for each rank's share, with averaged gradients."""

from __future__ import annotations

import copy

import torch
from torch import nn

from fsdp_core.testing import oracle
from fsdp_core.testing.steps.grammar import Front, Program

__all__ = ["BATCHES", "Outcome", "new_net", "sgd", "train_in_one_process"]

BATCHES = 3

#: Losses and weights, or the error that a step raised.
Outcome = oracle.Trained | str


def new_net(program: Program) -> oracle.Net:
    """The suite's net, with frozen teachers of two of its blocks, which it does not call."""
    net = oracle.new_net()
    if not program.has_norms:
        for block in net.blocks:
            block.norm = nn.Identity()
    net.teachers = copy.deepcopy(net.blocks[:2]).requires_grad_(False)
    return net


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    """SGD without state: for it, no gradient is the same as zeros, since not all backends distinguish the two."""
    return torch.optim.SGD(net.parameters(), lr=0.05)


def train_in_one_process(program: Program, front: Front, shares: int) -> Outcome:
    """Train by a program.

    Args:
        program: The program.
        front: What runs the steps. Automatic optimization clears gradients of the step's own before its backward pass.
        shares: Into how many parts each batch is divided.
    """
    nets = [new_net(program) for _ in range(shares)]
    optimizers = [sgd(net) for net in nets]
    step = program.step()
    losses = []
    try:
        for batch in oracle.global_batches(BATCHES):
            losses_of_shares = []
            for rank, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
                x, y = (tensor[rank::shares] for tensor in batch)
                if front != "automatic":
                    optimizer.zero_grad()
                loss = step(net, x, y, torch.Tensor.backward, optimizer.zero_grad)
                losses_of_shares.append(loss.item())
                if front == "automatic":
                    optimizer.zero_grad()
                loss.backward()
            losses.append(sum(losses_of_shares) / shares)
            _average(nets)
            for optimizer in optimizers:
                optimizer.step()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return losses, {f"net.{name}": tensor.detach().clone() for name, tensor in nets[0].state_dict().items()}


def _average(nets: list[oracle.Net]) -> None:
    """Give each net the mean of all gradients."""
    for copies in zip(*(net.parameters() for net in nets), strict=True):
        if all(p.grad is None for p in copies):
            continue
        mean = torch.stack([torch.zeros_like(p) if p.grad is None else p.grad.detach() for p in copies]).mean(0)
        for p in copies:
            p.grad = mean.clone()
