"""The version of core's contract with plugins, and whether a plugin was built for the installed core."""

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
"""The version of the contract: breaking changes raise the first number, additions the second.

Every release of fsdp-core that raises the first number also raises its own major version (before 1.0: its minor
version). So a plugin's requirement on fsdp-core, such as ``fsdp-core>=0.1,<0.2``, states which contracts it was built
for.
"""

_CORE = "fsdp-core"


def core_requirements(distribution: Distribution | None) -> list[Requirement]:
    """A distribution's requirements on fsdp-core, from its metadata, as ``pip`` reads them; extras are left out.

    Args:
        distribution: From :mod:`importlib.metadata`; ``None`` if there is no metadata.
    """
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.utils import canonicalize_name

    requirements = []
    for text in (distribution.requires if distribution is not None else None) or ():
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue  # reporting it is pip's job
        if canonicalize_name(requirement.name) == _CORE and (
            requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        ):
            requirements.append(requirement)
    return requirements


def check_contract(distribution: Distribution | None) -> None:
    """Refuse a plugin that was built for another version of the contract, before any of its code runs.

    Args:
        distribution: The plugin's distribution; one without a requirement on fsdp-core is accepted.

    Raises:
        ContractVersionError: The installed fsdp-core does not meet the plugin's requirement.
    """
    from packaging.version import Version

    requirements = core_requirements(distribution)
    if distribution is None or not requirements:
        return
    try:
        installed = version(_CORE)
    except PackageNotFoundError:
        return
    # By base version, so that builds between two releases count as the release that they lead up to.
    installed_version = Version(Version(installed).base_version)
    for requirement in requirements:
        unmet = [part for part in requirement.specifier if not part.contains(installed_version, prereleases=True)]
        if unmet:
            raise _error(
                distribution,
                f"{_CORE}{requirement.specifier}",
                installed,
                core_is_older=_is_older(installed_version, unmet),
            )


def has_upper_bound(requirements: Iterable[Requirement]) -> bool:
    """Whether requirements refuse some release of fsdp-core in the far future.

    Example:
        >>> from packaging.requirements import Requirement
        >>> [has_upper_bound([Requirement(f"fsdp-core{text}")]) for text in (">=0.1", ">=0.1,<0.2", "~=0.1.0", "")]
        [False, True, True, False]
    """
    return any(not requirement.specifier.contains("99999", prereleases=True) for requirement in requirements)


def _is_older(installed_version: Version, unmet: Iterable[Specifier]) -> bool:
    """Whether a later version than the installed one could meet a specifier that the installed one does not meet."""
    from packaging.version import Version

    def asks_for_later(specifier: Specifier) -> bool:
        if specifier.operator in (">", "!="):
            return True
        is_upper_bound = specifier.operator in ("<", "<=")
        return not is_upper_bound and installed_version < Version(specifier.version.rstrip(".*"))

    return any(map(asks_for_later, unmet))


def _error(distribution: Distribution, required: str, installed: str, *, core_is_older: bool) -> ContractVersionError:
    upgrade = f'"{required}"' if core_is_older else distribution.name
    return ContractVersionError(
        f"it was built for {required}, but {_CORE} {installed} is installed; "
        f"{_CORE if core_is_older else distribution.name} is the one to upgrade",
        remedy=f"pip install --upgrade {upgrade}",
    )
