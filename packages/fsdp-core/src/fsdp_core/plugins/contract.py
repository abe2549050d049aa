"""The version of what core promises to plugins, and whether a plugin was built for the core that is installed."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import Distribution, PackageNotFoundError, version
from typing import TYPE_CHECKING

from fsdp_core.errors import ContractVersionError

if TYPE_CHECKING:
    from packaging.requirements import Requirement
    from packaging.specifiers import Specifier
    from packaging.version import Version

__all__ = ["CONTRACT_VERSION", "check_contract", "core_requirements", "has_upper_bound"]

CONTRACT_VERSION: tuple[int, int] = (1, 0)
"""The version of the contract: the first number is raised by what breaks plugins, the second by additions.

Every release of fsdp-core that raises the first number also raises its own first number (before 1.0: its second), so
that a plugin says which contracts it was built for by what it requires of fsdp-core, such as ``fsdp-core>=0.1,<0.2``.
"""

_CORE = "fsdp-core"


def core_requirements(distribution: Distribution | None) -> list[Requirement]:
    """What a distribution's metadata require of fsdp-core, as ``pip`` reads it; extras are left out.

    Args:
        distribution: As :mod:`importlib.metadata` finds it; ``None`` has no metadata.
    """
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.utils import canonicalize_name

    found = []
    for text in (distribution.requires if distribution is not None else None) or ():
        try:
            one = Requirement(text)
        except InvalidRequirement:
            continue  # pip's to complain of
        if canonicalize_name(one.name) == _CORE and (one.marker is None or one.marker.evaluate({"extra": ""})):
            found.append(one)
    return found


def check_contract(distribution: Distribution | None) -> None:
    """Refuse a plugin that was built for another version of the contract, before any of its code runs.

    Args:
        distribution: The plugin's; one that requires no version of fsdp-core is let through.

    Raises:
        ContractVersionError: The installed fsdp-core is not one that it requires.
    """
    from packaging.version import Version

    requirements = core_requirements(distribution)
    if distribution is None or not requirements:
        return
    try:
        installed = version(_CORE)
    except PackageNotFoundError:
        return
    # By base version, so that builds between two releases count as the release that they are built towards.
    have = Version(Version(installed).base_version)
    for one in requirements:
        unmet = [part for part in one.specifier if not part.contains(have, prereleases=True)]
        if unmet:
            raise _error(distribution, f"{_CORE}{one.specifier}", installed, core_is_older=_is_older(have, unmet))


def has_upper_bound(requirements: Iterable[Requirement]) -> bool:
    """Whether a release of fsdp-core far in the future would be refused.

    Example:
        >>> from packaging.requirements import Requirement
        >>> [has_upper_bound([Requirement(f"fsdp-core{text}")]) for text in (">=0.1", ">=0.1,<0.2", "~=0.1.0", "")]
        [False, True, True, False]
    """
    return any(not one.specifier.contains("99999", prereleases=True) for one in requirements)


def _is_older(have: Version, unmet: Iterable[Specifier]) -> bool:
    from packaging.version import Version

    return any(
        one.operator in (">", "!=") or (one.operator not in ("<", "<=") and have < Version(one.version.rstrip(".*")))
        for one in unmet
    )


def _error(distribution: Distribution, wanted: str, installed: str, *, core_is_older: bool) -> ContractVersionError:
    upgrade = f'"{wanted}"' if core_is_older else distribution.name
    return ContractVersionError(
        f"it was built for {wanted}, but {_CORE} {installed} is installed; "
        f"{_CORE if core_is_older else distribution.name} is the one to upgrade",
        remedy=f"pip install --upgrade {upgrade}",
    )
