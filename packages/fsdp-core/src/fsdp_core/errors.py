"""The exceptions of this project, and its warnings about faults of its own while Lightning is imported.

Each message says what was requested, why it fails, and what to type next.
"""

from __future__ import annotations

import sys
import traceback

__all__ = [
    "BrokenStrategyError",
    "CheckpointError",
    "CheckpointExistsError",
    "CheckpointFormatError",
    "CheckpointMismatchError",
    "CheckpointValueError",
    "ContractVersionError",
    "DuplicateStrategyError",
    "FSDPError",
    "MissingKeyError",
    "NonFiniteGradientError",
    "OptimizerMismatchError",
    "ShardingError",
    "StrategyInfoError",
    "StrategyNotInstalledError",
    "StrategyUnavailableError",
    "UnknownStrategyError",
    "UnsupportedCapabilityError",
]


def printable(text: str) -> str:
    r"""Escape the control characters in a text, which could move a terminal's cursor or change its colours.

    Example:
        >>> print(printable("a" + chr(27) + "[31mb"))
        a\x1b[31mb
    """
    return text if text.isprintable() else "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in text)


def first_line(error: BaseException) -> str:
    r"""The first line of an exception's message; for an assertion without a message, the line of code.

    Example:
        >>> first_line(ValueError("lr is negative\nWrite a positive one"))
        'lr is negative'
    """
    line = next(iter(str(error).strip().splitlines()), "")
    if not line and isinstance(error, AssertionError) and error.__traceback__ is not None:
        return traceback.extract_tb(error.__traceback__)[-1].line or ""
    return line


class FSDPError(Exception):
    """The base class of every error that this project raises on purpose."""


class UnknownStrategyError(FSDPError, ValueError):
    """No strategy has the requested name."""


class StrategyNotInstalledError(UnknownStrategyError):
    """The name is known, but the package that provides it is not installed."""


class DuplicateStrategyError(FSDPError, ValueError):
    """Two installed distributions claim the same strategy name."""


class BrokenStrategyError(FSDPError, RuntimeError):
    """The plugin behind a strategy name failed to load."""


class ContractVersionError(FSDPError, RuntimeError):
    """A plugin was built for a different version of the contract than the installed fsdp-core has.

    Attributes:
        remedy: The command that fixes it.
    """

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.remedy = remedy


class StrategyInfoError(FSDPError, ValueError):
    """A plugin's description of a strategy is invalid."""


class StrategyUnavailableError(FSDPError, RuntimeError):
    """The strategy is installed, but can't run on this machine; the message includes the probe's reason."""


class UnsupportedCapabilityError(FSDPError, NotImplementedError):
    """The strategy lacks the requested option; the message names a strategy that has it."""


class ShardingError(FSDPError, ValueError):
    """The module can't be sharded as requested (a policy that matches nothing, no parameters, already sharded)."""


class OptimizerMismatchError(FSDPError, ValueError):
    """An optimizer holds parameters that are not the sharded ones."""


class NonFiniteGradientError(FSDPError, FloatingPointError):
    """A gradient holds NaN or infinity before an optimizer step; none was taken. See ``error_if_nonfinite``."""


class CheckpointError(FSDPError):
    """The base class of errors about checkpoints.

    Messages may contain names from files that others created, so control characters, which could move a
    terminal's cursor or change its colours, are escaped.
    """

    def __str__(self) -> str:
        text = Exception.__str__(self)  # not KeyError's, which would show it as a literal
        return "\n".join(map(printable, text.split("\n")))


class CheckpointFormatError(CheckpointError, ValueError):
    """The path contains no complete checkpoint that this version can read."""


class CheckpointMismatchError(CheckpointError, RuntimeError):
    """The checkpoint's names, shapes or dtypes don't match the objects to restore."""


class MissingKeyError(CheckpointMismatchError, KeyError):
    """A requested name is not in a checkpoint, or not in this rank's part of it."""


class CheckpointExistsError(CheckpointError, FileExistsError):
    """The target of a save already exists and must not be replaced."""


class CheckpointValueError(CheckpointError, TypeError):
    """The state to save contains a value that is neither plain data nor a tensor that the format can store."""


def warn_of_fault(name: str, error: Exception) -> None:
    """Warn that the registry of one of Lightning's strategy modules lacks our names."""
    warn(
        f"fsdp-core could not enter its strategy names in {name}: {type(error).__name__}: {error}\n"
        "Lightning works without them. `fsdp doctor` shows what is wrong."
    )


def warn(message: str) -> None:
    """Warn, but never raise: under ``python -W error`` an exception would fail the user's own import."""
    import warnings

    try:
        warnings.warn(message, RuntimeWarning, stacklevel=2)
    except RuntimeWarning:
        print(f"warning: {message}", file=sys.stderr)
