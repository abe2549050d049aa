"""Metrics of torchmetrics over ranks that are XLA devices; by itself it would ask ``torch.distributed``, in vain.

So a module's metrics are given the ranks when it is set up.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torchmetrics import Metric

from fsdp_core import Runtime
from fsdp_xla.torch_xla_private.devices import on_host

__all__ = ["reduce_metrics_over"]


def reduce_metrics_over(runtime: Runtime, module: nn.Module) -> None:
    """Let the metrics in a module be those of all ranks when they are computed. Nothing is done where there is one.

    A metric that was made with ``dist_sync_fn`` keeps it.

    Args:
        runtime: The ranks, which exchange the metrics' states on the host.
        module: Whose metrics, with those in collections and wrappers.
    """
    if runtime.world_size == 1:
        return

    def gather(state: Tensor, group: Any = None) -> list[Tensor]:
        return [of_rank.to(state.device) for of_rank in runtime.gather_objects(on_host(state))]

    for metric in module.modules():
        if isinstance(metric, Metric) and metric.dist_sync_fn is None:
            metric.dist_sync_fn = gather
            metric.distributed_available_fn = lambda: True
