"""Records what a plugin does to the process while it is loaded, and undoes it where possible."""

from __future__ import annotations

import atexit
import io
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from types import ModuleType
from typing import Any

__all__ = ["HEAVY", "SideEffect", "lasting", "watched"]

HEAVY = ("torch", "torch_xla", "lightning", "lightning_fabric", "pytorch_lightning")
"""The packages that a plugin must not import when it is listed."""

_lasting: list[SideEffect] = []
_watch_lock = threading.RLock()  # two threads that undo each other's changes would leave some of them


@dataclass(frozen=True, kw_only=True)
class SideEffect:
    """One thing that listing a plugin did and should not have done.

    Attributes:
        what: The side effect as a predicate, such as ``"imports torch"``.
        remedy: What its authors should do instead.
    """

    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.what}; {self.remedy}"


def lasting() -> bool:
    """Whether a plugin left threads or exit handlers, which act when the process ends."""
    return bool(_lasting)


@contextmanager
def watched(side_effects: list[SideEffect]) -> Iterator[None]:
    """Record in ``side_effects`` what the block does to the process, and undo it.

    Changes to ``os.environ``, ``sys.path``, the working directory, ``sys.stdout``, ``sys.stderr``,
    ``sys.excepthook`` and ``atexit``'s functions are undone. What the block prints goes to stderr. Modules that it
    imports, threads that it starts and exit handlers that it registers remain.

    Example:
        >>> side_effects = []
        >>> with watched(side_effects):
        ...     os.environ["FSDP_DOCTEST"] = "1"
        >>> "FSDP_DOCTEST" in os.environ, side_effects[0].what
        (False, 'changes os.environ (FSDP_DOCTEST)')
    """
    with _watch_lock:
        undo = _take_snapshot()
        try:
            yield
        finally:
            side_effects += undo()


def _take_snapshot() -> Callable[[], list[SideEffect]]:
    """Take a snapshot of the process. The returned function restores it and reports the differences."""
    loaded = {name for name in HEAVY if name in sys.modules}
    threads = set(threading.enumerate())
    environment = dict(os.environ)
    path = list(sys.path)
    folder = _folder()
    sys_attributes = {name: getattr(sys, name) for name in ("stdout", "stderr", "excepthook")}
    atexit_functions = {name: getattr(atexit, name) for name in ("register", "unregister")}
    handlers: list[str] = []
    printed = _Printed()
    recording = _record_handlers(atexit.register, handlers)
    sys.stdout = printed
    atexit.register = recording

    def undo() -> list[SideEffect]:
        side_effects = _imports(loaded) + _environment(environment)
        if sys.path != path:
            sys.path[:] = path
            side_effects.append(
                SideEffect(what="changes sys.path", remedy="it should install its modules with its package")
            )
        if folder is not None and _folder() != folder:
            os.chdir(folder)
            side_effects.append(
                SideEffect(what="changes the working directory", remedy="it should leave that to users")
            )
        replaced = _put_back(sys, sys_attributes, {"stdout": printed})
        replaced += _put_back(atexit, atexit_functions, {"register": recording})
        if printed.was_used:
            side_effects.append(SideEffect(what="prints to stdout", remedy="it should log, or print nothing"))
        if replaced:
            side_effects.append(
                SideEffect(what=f"replaces {' and '.join(replaced)}", remedy="it should leave that as it is")
            )
        lasting_effects = _threads(threads)
        if handlers:
            what = f"registers exit handlers ({', '.join(dict.fromkeys(handlers))})"
            lasting_effects.append(SideEffect(what=what, remedy="it should do that when a strategy starts"))
        _lasting.extend(lasting_effects)
        return side_effects + lasting_effects

    return undo


def _put_back(module: ModuleType, before: dict[str, Any], stand_ins: dict[str, Any]) -> list[str]:
    """Restore a module's attributes, and name those that were replaced."""
    expected = {**before, **stand_ins}
    replaced = [name for name in before if getattr(module, name, None) is not expected[name]]
    for name, value in before.items():
        setattr(module, name, value)
    return [f"{module.__name__}.{name}" for name in replaced]


class _Printed(io.TextIOBase):
    """Replaces stdout: writes to stderr, and records whether anything was written."""

    was_used = False

    def writable(self) -> bool:
        return True

    def write(self, text: str, /) -> int:
        self.was_used = self.was_used or bool(text)
        if sys.stderr is not None:
            sys.stderr.write(text)
        return len(text)

    def flush(self) -> None:
        if sys.stderr is not None:
            sys.stderr.flush()


def _record_handlers(register: Callable[..., Any], handlers: list[str]) -> Callable[..., Any]:
    """``atexit.register``, recording each handler in ``handlers``, except those of Python's own modules."""

    @wraps(register)
    def recording(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        module = getattr(function, "__module__", None) or type(function).__module__
        if str(module).partition(".")[0] not in sys.stdlib_module_names:
            handlers.append(f"{module}.{getattr(function, '__qualname__', '?')}")
        return register(function, *args, **kwargs)

    return recording


def _imports(before: set[str]) -> list[SideEffect]:
    new = [name for name in HEAVY if name in sys.modules and name not in before]
    if not new:
        return []
    remedy = "it should name its classes by string in StrategyInfo, and import what they need where they are defined"
    return [SideEffect(what=f"imports {' and '.join(new)}", remedy=remedy)]


def _environment(before: dict[str, str]) -> list[SideEffect]:
    changed = sorted(key for key in {*before, *os.environ} if before.get(key) != os.environ.get(key))
    for key in changed:
        if key in before:
            os.environ[key] = before[key]
        else:
            del os.environ[key]
    if not changed:
        return []
    what = f"changes os.environ ({', '.join(changed)})"
    return [SideEffect(what=what, remedy="it should do that when a strategy is built")]


def _threads(before: set[threading.Thread]) -> list[SideEffect]:
    new = [thread for thread in threading.enumerate() if thread not in before]
    if not new:
        return []
    what = f"starts threads ({', '.join(thread.name for thread in new)})"
    return [SideEffect(what=what, remedy="it should start them when a strategy starts, and stop them with it")]


def _folder() -> str | None:
    try:
        return os.getcwd()
    except OSError:
        return None
