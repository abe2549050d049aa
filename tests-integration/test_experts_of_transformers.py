"""Experts of transformers' models, by the plans that these bring, train as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fsdp_core.testing import RankPool
from fsdp_core.testing.state import full_state
from fsdp_core.testing.training import new_fabric
from real_models import MESHES, batches, new_model, see_transformers

FAMILIES = ["mixtral", "qwen3_moe", "deepseek", "gpt_oss"]
LIMIT = 300.0  # seconds, for a machine that does much else

#: In fp64; measured differences stay below 1e-14. In fp32, for kernels that compute in no other: see the oracle's.
TOLERANCE, FP32_TOLERANCE = 1e-6, 1e-5
MAX_NORM = 0.5


def new_experts(family: str, implementation: str) -> Any:
    """A model whose experts are called one after the other (``"eager"``) or all in one (``"grouped_mm"``)."""
    model: Any = new_model(family)
    model.set_experts_implementation(implementation)
    return model.double() if implementation == "eager" else model


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5)


def train_plain(implementation: str) -> Any:
    see_transformers()
    trained = {}
    for family in FAMILIES:
        model = new_experts(family, implementation)
        optimizer, norms = adamw(model), []
        for batch in batches(family):
            model(**batch, use_cache=False).loss.backward()
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
            optimizer.step()
            optimizer.zero_grad()
        trained[family] = norms, {name: value.detach() for name, value in model.state_dict().items()}
    return trained


def train_on(mesh: str, implementation: str) -> Any:
    see_transformers()
    options, world_size = MESHES[mesh]
    trained = {}
    for family in FAMILIES:
        fabric: Any = new_fabric("fsdp2", world_size, options)
        net = new_experts(family, implementation)
        model, optimizer = fabric.setup(net, adamw(net))
        rank, norms = fabric.strategy.runtime.data_parallel_rank, []
        for batch in batches(family):
            rows = {key: value.chunk(world_size)[rank] for key, value in batch.items()}
            fabric.backward(model(**rows, use_cache=False).loss)
            norms.append(float(fabric.clip_gradients(model, optimizer, max_norm=MAX_NORM)))
            optimizer.step()
            optimizer.zero_grad()
        trained[family] = norms, full_state(fabric.strategy)
    return trained


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("mesh", "implementation"),
    [("experts 2 of 4", "eager"), ("experts 2", "eager"), ("experts 4", "eager"), ("experts 2", "grouped_mm")],
)
def test_experts_equal_one_process(transformers_ranks: RankPool, mesh: str, implementation: str) -> None:
    (want,) = transformers_ranks.run(1, train_plain, implementation, timeout=LIMIT)
    tolerance = TOLERANCE if implementation == "eager" else FP32_TOLERANCE
    for got in transformers_ranks.run(MESHES[mesh][1], train_on, mesh, implementation, timeout=LIMIT):
        for family in FAMILIES:
            norms, state = got[family]
            want_norms, want_state = want[family]
            assert norms == pytest.approx(want_norms, rel=tolerance)
            assert state.keys() == want_state.keys()
            for name, value in want_state.items():
                torch.testing.assert_close(state[name], value, rtol=tolerance, atol=tolerance, msg=f"{family}: {name}")
