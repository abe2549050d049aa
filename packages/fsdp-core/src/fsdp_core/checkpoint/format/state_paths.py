"""Paths into a state: ``optimizer/0/blocks.1.weight/exp_avg``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from fsdp_core.errors import CheckpointValueError

__all__ = ["escape", "find_part", "join_path", "split_path"]


def join_path(*keys: str) -> str:
    """Join keys to a path; a slash inside a key is escaped as ``%2F``.

    Example:
        >>> join_path("optimizer", "0"), join_path("nets/generator")
        ('optimizer/0', 'nets%2Fgenerator')
    """
    return "/".join(map(escape, keys))


@lru_cache(maxsize=4096)  # a state repeats its keys, such as those of the optimizer's state for each parameter
def escape(key: str) -> str:
    """Escape a key as one step of a path."""
    return key.replace("%", "%25").replace("/", "%2F")


def split_path(path: str) -> list[str]:
    """Split a path from :func:`join_path` into its keys."""
    return [key.replace("%2F", "/").replace("%25", "%") for key in path.split("/")]


def find_part(state: Any, path: str) -> Any:
    """Return the part of a nest at a path such as ``optimizer/0``.

    Raises:
        CheckpointValueError: The path does not exist; the message lists the existing keys.
    """
    node = state
    walked_keys = list[str]()
    for key in split_path(path):
        try:
            node = node[key] if isinstance(node, Mapping) else node[int(key)]
        except (KeyError, IndexError, ValueError, TypeError):
            node_name = repr("/".join(walked_keys)) if walked_keys else "the state"
            keys: Iterable[Any] = ()
            if isinstance(node, Mapping):
                keys = node
            elif hasattr(node, "__len__"):
                keys = range(len(node))
            key_list = ", ".join(map(str, keys)) or "nothing"
            raise CheckpointValueError(f"no {path!r} in the state: {node_name} has {key_list}") from None
        walked_keys.append(key)
    return node
