"""Metrics of a Trainer on the host, where computing with them is no program that XLA compiles.

Private names of Lightning, checked on 2.6.6. What ``self.log`` collects lies on the device, and so belongs to the step's
program. Lightning then computes with it between steps: the mean of an epoch, and in callbacks whether it is better than
the best. On XLA each of these is a program of its own, compiled in the midst of a run, and no public hook of a strategy
sees the values before.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
from lightning.pytorch.utilities import move_data_to_device
from torch import Tensor

__all__ = ["compute_metrics_on_host"]


class _HostMetrics(_LoggerConnector):
    """Brings metrics to the host where they are looked at: those of an epoch as it ends, others when they are asked for.

    Those of a step stay on the device until then, for the step would be waited for.
    """

    @property
    def metrics(self) -> Any:
        results = self.trainer._results
        if self._first_loop_iter is None and results is not None:
            results.cpu()
        return super().metrics

    @property
    def callback_metrics(self) -> Any:
        return move_data_to_device(super().callback_metrics, "cpu")


def compute_metrics_on_host(trainer: pl.Trainer) -> None:
    """Let what a Trainer logs be brought to the host before anything is computed with it."""
    connector: Any = trainer._logger_connector
    if type(connector) is _LoggerConnector:
        connector.__class__ = _HostMetrics
