"""Options that torch_xla's wrapper is given: each turned on, on two ranks; those that end the process are refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from fsdp_core import load_state_dict
from fsdp_core.testing import oracle
from fsdp_core.testing.oracle import FEATURES, FP32_TOLERANCE, HALF_TOLERANCE, momentum, train_plain
from fsdp_core.testing.short_runs import run_steps
from fsdp_core.testing.training import own_share
from launching import Launching, launch

STEPS = 3


class Rows(nn.Module):
    """A net without 0-dim parameters, of which a floating-point buffer is a part."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        with oracle.seeded(1):
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(FEATURES, 7), nn.Tanh(), nn.Linear(7, FEATURES)) for _ in range(2)
            )
            self.out = nn.Linear(FEATURES, FEATURES)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, FEATURES))
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = x + block(x)
        x = self.out(x)
        self.seen = [x.dtype, self.scale.dtype]
        return x * self.scale.to(x.dtype)


def trained(path: Path, options: dict[str, Any] | Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Train on both ranks: the losses over them, and the dtypes of an activation and of the buffer."""
    results: dict[int, Any] = {}

    def train(fabric: L.Fabric) -> None:
        with fabric.init_module():  # ranks are threads, and torch's random generator is the process's
            net = Rows()
        model = fabric.setup_module(net)
        optimizer = fabric.setup_optimizers(momentum(net))
        batches = [own_share(fabric, batch) for batch in oracle.global_batches(STEPS)]
        own_losses = run_steps(lambda x: model(x).float(), optimizer, batches, fabric.backward)
        losses = [fabric.all_reduce(loss).item() for loss in own_losses]
        fabric.save(path, {"model": model})
        results[fabric.global_rank] = {"losses": losses, "dtypes": [str(dtype) for dtype in net.seen]}

    launch(train, **(options() if callable(options) else options))
    assert results[0] == results[1]
    found: dict[str, Any] = results[0]
    return found


def assert_trained(result: dict[str, Any], path: Path, tolerance: float) -> None:
    losses, weights = train_plain(STEPS, momentum, net=Rows())
    assert result["losses"] == pytest.approx(losses, abs=tolerance)
    found = {name: value.float() for name, value in load_state_dict(path).items()}
    torch.testing.assert_close(found, weights, atol=tolerance, rtol=0)


def by_size() -> dict[str, Any]:
    from torch_xla.distributed.fsdp.wrap import size_based_auto_wrap_policy

    return {"auto_wrap_policy": partial(size_based_auto_wrap_policy, min_num_params=80)}


def of_transformers() -> dict[str, Any]:
    from torch_xla.distributed.fsdp.wrap import transformer_auto_wrap_policy

    return {"auto_wrap_policy": partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.Sequential})}


ROWS = {"shard_param_on_dim_0": True}

#: What trains as plain torch does.
SAME: dict[str, Any] = {
    "execute_sharding_on_init": {"execute_sharding_on_init": False},
    "optimization_barrier_in_forward": {"optimization_barrier_in_forward": False},
    "optimization_barrier_in_backward": {"optimization_barrier_in_backward": False},
    "sync_on_finalization": {"sync_on_finalization": True},
    "disable_reshard_on_root": {"disable_reshard_on_root": False},
    "reduce_scatter_bucket_size_mb": {"reduce_scatter_bucket_size_mb": 1},
    "shard_param_on_dim_0": ROWS,
    "coalesce_all_gather_ops": {"coalesce_all_gather_ops": True, **ROWS},
    # of which the root, and each block, own no parameter
    "coalesced, units without parameters": {
        "coalesce_all_gather_ops": True,
        "auto_wrap_policy": {nn.Linear, nn.Sequential},
        **ROWS,
    },
    "torch_xla's size policy": by_size,
    "torch_xla's transformer policy": of_transformers,
}


@pytest.mark.parametrize("case", SAME)
def test_numbers_stay_what_they_are(launching: Launching, tmp_path: Path, case: str) -> None:
    result = launching.call(2, trained, tmp_path / "run", SAME[case])
    assert result["dtypes"] == ["torch.float32"] * 2
    assert_trained(result, tmp_path / "run", FP32_TOLERANCE)


@pytest.mark.parametrize(
    ("options", "dtypes"),
    [
        ({"compute_dtype": torch.bfloat16}, ["torch.bfloat16", "torch.float32"]),
        ({"compute_dtype": torch.bfloat16, "fp32_reduce_scatter": True}, ["torch.bfloat16", "torch.float32"]),
        ({"buffer_dtype": torch.bfloat16}, ["torch.float32", "torch.bfloat16"]),
    ],
    ids=["compute_dtype", "fp32_reduce_scatter", "buffer_dtype"],
)
def test_dtypes_are_those_asked_for(
    launching: Launching, tmp_path: Path, options: dict[str, Any], dtypes: list[str]
) -> None:
    """Those of an activation and of the buffer."""
    result = launching.call(2, trained, tmp_path / "run", options)
    assert result["dtypes"] == dtypes
    assert_trained(result, tmp_path / "run", HALF_TOLERANCE)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"coalesce_all_gather_ops": True}, ["coalesce_all_gather_ops=True", "shard_param_on_dim_0=True"]),
        ({"compute_dtype": "bf16"}, ["compute_dtype='bf16' is no floating-point dtype", "=torch.bfloat16"]),
        ({"pin_layout_in_collective_ops": True}, ["pin_layout_in_collective_ops=True", "on the CPU", "Leave it out"]),
    ],
    ids=["coalesced without rows", "a dtype's name", "pin_layout_in_collective_ops"],
)
def test_what_would_end_the_process_is_refused(
    launching: Launching, tmp_path: Path, options: dict[str, Any], words: list[str]
) -> None:
    words = ["UnsupportedCapabilityError", *words]
    launching.assert_error(2, words, trained, tmp_path / "run", options)
