"""The private names of Lightning that this package uses, each with its reason. Checked on Lightning 2.6.6."""

from __future__ import annotations

# What a strategy's launcher must be; Lightning offers no public class for it.
from lightning.fabric.strategies.launchers.launcher import _Launcher as Launcher

# Fabric asks for a launcher of this class before it says that launch() needs a function.
from lightning.fabric.strategies.launchers.xla import _XLALauncher as LaunchesXLA

# Keeps what is logged; no public hook of a strategy sees the values before something is computed with them.
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector as LoggerConnector

__all__ = ["Launcher", "LaunchesXLA", "LoggerConnector"]
