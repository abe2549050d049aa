"""torchmetrics' objects: their states are gathered from the ranks that see different batches, or parts of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

import lightning.pytorch as pl
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from fsdp_core.lightning.features.feature import Feature
from fsdp_core.mesh import GRADIENT_AXES
from fsdp_core.runtime import Runtime
from fsdp_core.sharding.sharded import Sharded

__all__ = ["MetricsOverData"]

Gather = Callable[..., list[Tensor]]


class _GatherOverData:
    """Gathers a metric's state from the ranks that see different samples; once pickled, from all ranks.

    Args:
        data: The ranks that see different samples.
    """

    def __init__(self, data: Runtime) -> None:
        self._data = ref(data)

    def __call__(self, state: Tensor, group: Any | None = None) -> list[Tensor]:
        data = self._data()
        if group is None and data is not None:
            group = data.process_group
        gathered: list[Tensor] = gather_all_tensors(state, group)
        return gathered

    def __deepcopy__(self, memo: dict[int, Any]) -> _GatherOverData:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _gather_all, ()


def _gather_all() -> Gather:
    gather: Gather = gather_all_tensors
    return gather


class MetricsOverData(Feature):
    """Lets the metrics in a module gather their states from the ranks that see different batches, or parts of them.

    torchmetrics gathers them from all ranks: tensor-parallel peers, which see the same batch, would each count.
    A metric with a ``process_group`` or ``dist_sync_fn`` of the user's own keeps it.

    Args:
        runtime: The ranks.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def module_sharded(self, trainer: pl.Trainer, sharded: Sharded, *, fitting: bool) -> None:
        self._gather_over_data(trainer.lightning_module)

    def train_start(self, trainer: pl.Trainer, sharded: Sharded) -> None:
        self._gather_over_data(trainer.lightning_module)  # a hook of the module may have made further metrics

    def _gather_over_data(self, module: nn.Module) -> None:
        runtime = self._runtime
        if runtime.mesh.size(GRADIENT_AXES) == runtime.world_size:  # no two ranks see the same samples
            return
        data = runtime.along(*GRADIENT_AXES)  # creates a group of processes the first time, on all ranks
        for metric in module.modules():
            if not isinstance(metric, Metric) or metric.process_group is not None:
                continue
            if metric.dist_sync_fn is None or isinstance(metric.dist_sync_fn, _GatherOverData):
                metric.dist_sync_fn = _GatherOverData(data)
