"""What test_passed_on_options.py runs on two of XLA's CPU devices: each option that torch_xla is given, turned on."""

from __future__ import annotations

import functools
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from fsdp_core import load_state_dict
from fsdp_core.testing import oracle
from fsdp_core.testing.oracle import FEATURES
from xla_process import save_cases

DEVICES, FOLDER = (int(sys.argv[1]), Path(sys.argv[2])) if __name__ == "__main__" else (1, Path())
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


def trained(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Train on both ranks: the losses over them, the weights, and the dtypes of an activation and of the buffer."""
    from fsdp_xla.fabric import XLAFSDPStrategy

    results: dict[int, Any] = {}

    def train(fabric: L.Fabric) -> None:
        with fabric.init_module():  # ranks are threads, and torch's random generator is the process's
            net = Rows()
        model = fabric.setup_module(net)
        optimizer = fabric.setup_optimizers(oracle.momentum(net))
        losses = []
        for x, y in oracle.global_batches(STEPS):
            x, y = fabric.to_device((x[fabric.global_rank :: DEVICES], y[fabric.global_rank :: DEVICES]))
            loss = mse_loss(model(x).float(), y)
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(fabric.all_reduce(loss.detach()).item())
        fabric.save(FOLDER / name, {"model": model})
        results[fabric.global_rank] = {"losses": losses, "dtypes": [str(dtype) for dtype in net.seen]}

    L.Fabric(strategy=XLAFSDPStrategy(**options), devices=DEVICES).launch(train)
    assert results[0] == results[1]
    return {**results[0], "weights": load_state_dict(FOLDER / name)}


def _options() -> dict[str, dict[str, Any]]:
    from torch_xla.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

    rows = {"shard_param_on_dim_0": True}
    return {
        "execute_sharding_on_init": {"execute_sharding_on_init": False},
        "optimization_barrier_in_forward": {"optimization_barrier_in_forward": False},
        "optimization_barrier_in_backward": {"optimization_barrier_in_backward": False},
        "sync_on_finalization": {"sync_on_finalization": True},
        "disable_reshard_on_root": {"disable_reshard_on_root": False},
        "reduce_scatter_bucket_size_mb": {"reduce_scatter_bucket_size_mb": 1},
        "shard_param_on_dim_0": rows,
        "coalesce_all_gather_ops": {"coalesce_all_gather_ops": True, **rows},
        # of which the root, and each block, own no parameter
        "coalesced, units without parameters": {
            "coalesce_all_gather_ops": True,
            "auto_wrap_policy": {nn.Linear, nn.Sequential},
            **rows,
        },
        "compute_dtype": {"compute_dtype": torch.bfloat16},
        "fp32_reduce_scatter": {"compute_dtype": torch.bfloat16, "fp32_reduce_scatter": True},
        "buffer_dtype": {"buffer_dtype": torch.bfloat16},
        "torch_xla's size policy": {
            "auto_wrap_policy": functools.partial(size_based_auto_wrap_policy, min_num_params=80)
        },
        "torch_xla's transformer policy": {
            "auto_wrap_policy": functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.Sequential})
        },
        "coalesced without rows": {"coalesce_all_gather_ops": True},
        "pin_layout_in_collective_ops": {"pin_layout_in_collective_ops": True},
    }


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    save_cases({name: functools.partial(trained, name, options) for name, options in _options().items()}, FOLDER)
