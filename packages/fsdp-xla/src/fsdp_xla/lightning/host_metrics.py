"""Metrics of a Trainer on the host, where computing with them compiles no XLA program.

Device tensors that are passed to ``self.log`` belong to the step's program. Everything else must be on the host:

- Lightning computes with logged values between steps: the mean of an epoch, or a callback's comparison with the best
  value. On XLA, each of these is a separate program, compiled in the middle of a run.
- Lightning puts numbers on the device. XLA treats 0 and 1 as constants, so a step that logs 1.0 would be a different
  program from one that logs 0.5, and the first step that adds to a sum a different one from the second.
- Lightning puts counts, such as the lengths of dataloaders, on the device to reduce them. Reading one would run a
  program.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import move_data_to_device
from torch import Tensor, nn
from torchmetrics import Metric

from fsdp_core import Runtime
from fsdp_xla.lightning.private import LoggerConnector, ResultCollection, ResultMetric
from fsdp_xla.torch_xla_private.devices import as_data, on_host

__all__ = ["compute_metrics_on_host", "count_on_host", "log_numbers_on_host", "reduce_metrics_over"]


class _HostMetrics(LoggerConnector):
    """Moves the metrics of an epoch to the host at its end, and other metrics when they are read.

    Metrics of a step stay on the device until then, because moving them waits for the step.
    """

    @property
    def metrics(self) -> Any:
        results = self.trainer._results
        if self._first_loop_iter is not None or results is None:
            return super().metrics
        for result in results.values():
            if result.is_tensor:  # otherwise it is the module's own torchmetrics.Metric, which is still in use
                result.to(device="cpu")
        return move_data_to_device(super().metrics, "cpu")

    @property
    def callback_metrics(self) -> Any:
        metrics = super().callback_metrics
        metrics.update(move_data_to_device(metrics, "cpu"))  # in place: callbacks may write to the result
        return metrics


class _DataMetric(ResultMetric):
    """Moves its sums to the device as data.

    A sum of 0 would be a constant, and the first step of an epoch a different program from the second.
    """

    def to(self, *args: Any, **kwargs: Any) -> _DataMetric:
        values_before: dict[str, Any] = {
            name: (getattr(self, name), default) for name, default in self._defaults.items()
        }
        super().to(*args, **kwargs)
        for name, (value, default) in values_before.items():
            device = getattr(self, name).device
            if device.type == "xla" and value.device.type == "cpu":
                setattr(self, name, as_data(value, device))
                self._defaults[name] = as_data(default, device)
        return self


class _Results(ResultCollection):
    def __setitem__(self, key: str, metric: Any) -> None:
        if type(metric) is ResultMetric:
            metric.__class__ = _DataMetric
        super().__setitem__(key, metric)


def compute_metrics_on_host(trainer: pl.Trainer) -> None:
    """Move what a Trainer logs to the host before anything is computed with it."""
    connector: Any = trainer._logger_connector
    if type(connector) is LoggerConnector:
        connector.__class__ = _HostMetrics
    training_loop = trainer.fit_loop.epoch_loop
    for loop in (training_loop, training_loop.val_loop, trainer.validate_loop, trainer.test_loop):
        if type(loop._results) is ResultCollection:
            loop._results.__class__ = _Results


def log_numbers_on_host(module: pl.LightningModule) -> None:
    """Make ``self.log`` of this module keep numbers on the host, until ``log`` is removed from the instance."""
    if "log" in vars(module):
        return
    log = module.log

    @wraps(log)
    def log_on_host(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        log(name, torch.tensor(float(value)) if isinstance(value, int | float) else value, *args, **kwargs)

    module.log = log_on_host  # type: ignore[method-assign]


def count_on_host(value: Any) -> Any:
    """Move a count, which is a 0-dim integer tensor, to host memory. Anything else is returned unchanged.

    Example:
        >>> count_on_host("no tensor"), count_on_host(torch.tensor(7)).device.type
        ('no tensor', 'cpu')
    """
    is_count = isinstance(value, Tensor) and not value.ndim and not value.is_floating_point()
    return on_host(value) if is_count else value


def reduce_metrics_over(runtime: Runtime, module: nn.Module) -> None:
    """Compute a module's torchmetrics over all ranks, which are XLA devices and unknown to ``torch.distributed``.

    With one rank this does nothing. A metric that was built with ``dist_sync_fn`` keeps it.

    Args:
        runtime: The ranks, which exchange the metrics' states on the host.
        module: The module; metrics in collections and wrappers count too.
    """
    if runtime.world_size == 1:
        return

    def gather(state: Tensor, group: Any = None) -> list[Tensor]:
        return [state_of_rank.to(state.device) for state_of_rank in runtime.gather_objects(on_host(state))]

    for metric in module.modules():
        if isinstance(metric, Metric) and metric.dist_sync_fn is None:
            metric.dist_sync_fn = gather
            metric.distributed_available_fn = lambda: True
