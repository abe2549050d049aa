"""Whether a strategy can run on this machine, asked without importing torch or Lightning."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fsdp_core.discovery import Claim, error_text
from fsdp_core.errors import BrokenStrategyError
from fsdp_core.side_effects import SideEffect, watched

__all__ = ["import_object", "why_unavailable"]


def import_object(reference: str) -> Any:
    """Import what ``"module:attribute"`` names.

    Example:
        >>> import_object("math:floor")(1.5)
        1
    """
    module, _, attribute = reference.partition(":")
    return getattr(import_module(module), attribute)


def why_unavailable(claim: Claim) -> str | None:
    """Ask a strategy's requirements, then its probe.

    Args:
        claim: The strategy and its provider.

    Returns:
        The reason why it can't run here, or ``None`` if it can.

    Raises:
        BrokenStrategyError: If asking fails, which is a fault of the plugin.
    """
    info = claim.info
    try:
        for requirement in info.requires:
            reason = _why_unmet(requirement)
            if reason is not None:
                return reason
        noted: list[SideEffect] = []
        with watched(noted):
            answer = None if info.probe is None else import_object(info.probe)()
        if answer is not None and not isinstance(answer, str):
            raise TypeError(f"{info.probe} returned a {type(answer).__name__} where None or a reason is due")
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise BrokenStrategyError(
            f"strategy {info.name!r} can't say whether it runs here: "
            f"the probe of {claim.provider} failed: {error_text(error)}\n"
            f"Report this to the authors of {claim.provider.name}, or type: "
            f"pip install --upgrade {claim.provider.name}"
        ) from error
    return answer


def _why_unmet(text: str) -> str | None:
    from packaging.requirements import Requirement
    from packaging.version import Version

    requirement = Requirement(text)
    if requirement.marker is not None and not requirement.marker.evaluate():
        return None
    wanted = f"{requirement.name}{requirement.specifier}"
    try:
        installed = version(requirement.name)
    except PackageNotFoundError:
        return f'it needs {wanted}, which is not installed; type: pip install "{wanted}"'
    # By base version, so that vendors' builds such as 2.9.0a0+… count as the release that they are built towards.
    if Version(Version(installed).base_version) not in requirement.specifier:
        return f'it needs {wanted}, but {installed} is installed; type: pip install "{wanted}"'
    return None
