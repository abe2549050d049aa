"""Expert parallelism: numbers are those of one process, and checkpoints move between sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from expert_models import PLAN, new_net
from fsdp_core.testing import RankPool, oracle
from fsdp_core.testing.short_runs import assert_close_by_name
from fsdp_core.testing.state import full_state
from fsdp_core.testing.training import new_fabric, whole_batches

TOLERANCE = 1e-6
MAX_NORM = 0.05


def own_rows(fabric: Any, tensor: Tensor) -> Tensor:
    runtime = fabric.strategy.runtime
    return tensor.chunk(runtime.data_parallel_world_size)[runtime.data_parallel_rank]


def train_on(world_size: int, options: Mapping[str, Any], favoured: int, accumulate: int, dtype: torch.dtype) -> Any:
    torch.set_num_threads(1)
    fabric = new_fabric("fsdp2", world_size, {"expert_parallel_plan": PLAN, **options})
    net = new_net(favoured=favoured).to(dtype)
    model, optimizer = fabric.setup(net, oracle.adamw_groups(net))
    norms, losses = [], []
    batches = oracle.global_batches(3 * accumulate)
    for index, (x, y) in enumerate(batches, start=1):
        is_last = index % accumulate == 0
        with fabric.no_backward_sync(model, enabled=not is_last):
            loss = mse_loss(model(own_rows(fabric, x.to(dtype))), own_rows(fabric, y.to(dtype)))
            fabric.backward(loss / accumulate)
        losses.append(loss.detach())
        if is_last:
            norms.append(float(fabric.clip_gradients(model, optimizer, max_norm=MAX_NORM)))
            optimizer.step()
            optimizer.zero_grad()
    return norms, losses, full_state(fabric.strategy)


def train_plain(favoured: int, accumulate: int, dtype: torch.dtype) -> Any:
    net = new_net(favoured=favoured).to(dtype)
    optimizer = oracle.adamw_groups(net)
    norms = []
    for index, (x, y) in enumerate(oracle.global_batches(3 * accumulate), start=1):
        (mse_loss(net(x.to(dtype)), y.to(dtype)) / accumulate).backward()
        if index % accumulate == 0:
            norms.append(float(torch.nn.utils.clip_grad_norm_(net.parameters(), MAX_NORM)))
            optimizer.step()
            optimizer.zero_grad()
    return norms, net.state_dict()


MESHES = {
    "experts 2": (2, {"expert_parallel_size": 2}),
    "experts 2 of 4": (4, {"expert_parallel_size": 2}),
    "experts 4": (4, {"expert_parallel_size": 4}),
    "replicate 2 x experts 2": (4, {"expert_parallel_size": 2, "data_parallel_replicate_size": 2}),
}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("favoured", [0, 2])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_equals_one_process(ranks: RankPool, mesh: str, favoured: int, accumulate: int) -> None:
    world_size, options = MESHES[mesh]
    want_norms, want = train_plain(favoured, accumulate, torch.float64)
    for norms, _, state in ranks.run(world_size, train_on, world_size, options, favoured, accumulate, torch.float64):
        assert norms == pytest.approx(want_norms, rel=TOLERANCE)
        if state:
            assert_close_by_name(state, want)
