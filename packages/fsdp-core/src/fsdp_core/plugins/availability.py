"""Whether a strategy can run on this machine, checked without importing torch or Lightning."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, version
from symtable import symtable
from typing import Any

from fsdp_core.errors import BrokenStrategyError
from fsdp_core.plugins.discovery import Claim, error_text
from fsdp_core.plugins.side_effects import SideEffect, watched

__all__ = ["check_classes", "import_object", "why_unavailable"]

# Names in a source that can give its module attributes that the source does not name.
_DYNAMIC = frozenset({"__getattr__", "exec", "globals", "setattr", "vars"})


def import_object(reference: str) -> Any:
    """Import the object that ``"module:attribute"`` refers to.

    Example:
        >>> import_object("math:floor")(1.5)
        1
    """
    module, _, attribute = reference.partition(":")
    return getattr(import_module(module), attribute)


def check_classes(claim: Claim) -> None:
    """Check that the classes that a strategy names exist in the sources of their modules; nothing is imported.

    Args:
        claim: The strategy and its provider.

    Raises:
        BrokenStrategyError: A class does not exist.
    """
    info, provider = claim.info, claim.provider
    for role, target in (("Trainer", info.trainer), ("Fabric", info.fabric)):
        reason = None if target is None else _why_not_there(target)
        if reason is not None:
            raise BrokenStrategyError(
                f"strategy {info.name!r} names a {role} class that does not exist: {target!r} ({reason})\n"
                f"Report this to the authors of {provider.name}, or type: pip install --upgrade {provider.name}"
            )


def why_unavailable(claim: Claim) -> str | None:
    """Check a strategy's requirements, then call its probe.

    Args:
        claim: The strategy and its provider.

    Returns:
        The reason why it can't run here, or ``None`` if it can.

    Raises:
        BrokenStrategyError: The probe or a requirement fails, which is a fault of the plugin.
    """
    info = claim.info
    try:
        for requirement in info.requires:
            reason = _why_unmet(requirement)
            if reason is not None:
                return reason
        side_effects: list[SideEffect] = []  # undone, and not reported: listing reports those of loading a plugin
        with watched(side_effects):
            answer = None if info.probe is None else import_object(info.probe)()
        if answer is not None and not isinstance(answer, str):
            raise TypeError(f"{info.probe} returned a {type(answer).__name__} instead of None or a string")
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
    requirement_text = f"{requirement.name}{requirement.specifier}"
    try:
        installed = version(requirement.name)
    except PackageNotFoundError:
        return f'it needs {requirement_text}, which is not installed; type: pip install "{requirement_text}"'
    # By base version, so that vendors' builds such as 2.9.0a0+… count as the release that they lead up to.
    if Version(Version(installed).base_version) not in requirement.specifier:
        return f'it needs {requirement_text}, but {installed} is installed; type: pip install "{requirement_text}"'
    return None


def _why_not_there(reference: str) -> str | None:
    """Why ``"module:attribute"`` can't be imported, as far as can be found out without importing anything.

    Example:
        >>> _why_not_there("logging.handlers:SocketHandler")
        >>> _why_not_there("logging.handlers:SocketHandlr"), _why_not_there("logging.handles:SocketHandler")
        ("logging.handlers has no 'SocketHandlr'", "no module named 'logging.handles'")
    """
    module, _, attribute = reference.partition(":")
    spec: ModuleSpec | None = None
    parts = module.split(".")
    for number in range(len(parts)):
        name = ".".join(parts[: number + 1])
        spec = _spec_of(name, None if spec is None else spec.submodule_search_locations)
        if spec is None or (number + 1 < len(parts) and spec.submodule_search_locations is None):
            return f"no module named {name if spec is None else module!r}"
    try:
        source = spec.loader.get_source(module)  # type: ignore[union-attr]
        names = None if source is None else symtable(source, module, "exec")
    except SyntaxError as error:
        return error_text(error)
    except Exception:  # a loader without sources: importing will show it
        return None
    if names is None or "import *" in source or {attribute, *_DYNAMIC} & set(names.get_identifiers()):
        return None
    return f"{module} has no {attribute!r}"


def _spec_of(name: str, path: Any) -> ModuleSpec | None:
    """The spec of a module: unlike :func:`importlib.util.find_spec`, without importing its parents."""
    spec: ModuleSpec | None = getattr(sys.modules.get(name), "__spec__", None)
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        if spec is None and find is not None:
            spec = find(name, path)
    return spec
