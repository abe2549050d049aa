"""The exceptions of this project; each message says what was asked, why it can't be, and what to type next."""

from __future__ import annotations

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
    "OptimizerMismatchError",
    "ShardingError",
    "StrategyInfoError",
    "StrategyNotInstalledError",
    "StrategyUnavailableError",
    "UnknownStrategyError",
    "UnsupportedCapabilityError",
]


def printable(text: str) -> str:
    r"""A text without what would move a terminal's cursor or change its colours.

    Example:
        >>> print(printable("a" + chr(27) + "[31mb"))
        a\x1b[31mb
    """
    return text if text.isprintable() else "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in text)


class FSDPError(Exception):
    """The base of every error that this project raises on purpose."""


class UnknownStrategyError(FSDPError, ValueError):
    """No strategy goes by the name that was asked for."""


class StrategyNotInstalledError(UnknownStrategyError):
    """The name is known, but the package that provides it is not installed."""


class DuplicateStrategyError(FSDPError, ValueError):
    """Two installed distributions claim the same strategy name."""


class BrokenStrategyError(FSDPError, RuntimeError):
    """The plugin behind a strategy name failed to load."""


class ContractVersionError(FSDPError, RuntimeError):
    """A plugin was built for another version of the contract than that of the installed fsdp-core.

    Attributes:
        remedy: The command that mends it.
    """

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.remedy = remedy


class StrategyInfoError(FSDPError, ValueError):
    """A plugin describes a strategy in a way that can't be."""


class StrategyUnavailableError(FSDPError, RuntimeError):
    """The strategy is installed, but can't run on this machine; the message holds its probe's reason."""


class UnsupportedCapabilityError(FSDPError, NotImplementedError):
    """The strategy lacks the option that was asked for; the message names one that has it."""


class ShardingError(FSDPError, ValueError):
    """The module can't be sharded as asked (a policy that matches nothing, no parameters, sharded already)."""


class OptimizerMismatchError(FSDPError, ValueError):
    """An optimizer holds parameters that are not the sharded ones."""


class CheckpointError(FSDPError):
    """The base of what can go wrong with a checkpoint.

    Its message may hold names from files that somebody else has made, so it shows as text what would move a terminal's
    cursor or change its colours.
    """

    def __str__(self) -> str:
        text = Exception.__str__(self)  # and not KeyError's, which would show it as a literal
        return "\n".join(map(printable, text.split("\n")))


class CheckpointFormatError(CheckpointError, ValueError):
    """The path holds no complete checkpoint that this version can read."""


class CheckpointMismatchError(CheckpointError, RuntimeError):
    """The checkpoint's names, shapes or dtypes are not those of the objects to restore."""


class MissingKeyError(CheckpointMismatchError, KeyError):
    """A name that was asked for is not in a checkpoint, or in what this rank has of one."""


class CheckpointExistsError(CheckpointError, FileExistsError):
    """The target of a save is already there and must not be replaced."""


class CheckpointValueError(CheckpointError, TypeError):
    """The state to save holds what is neither plain data nor a tensor that the format can store."""
