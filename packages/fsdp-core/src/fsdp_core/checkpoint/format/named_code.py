"""Finds names of code and URLs of files in plain data that Lightning would import or fetch. No torch."""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["INSTANTIATOR", "INSTANTIATORS", "find_named_code"]

INSTANTIATOR = "_instantiator"
"""The hyper-parameter that names a factory, which Lightning's ``load_from_checkpoint`` imports and calls."""

INSTANTIATORS = ("lightning.pytorch.cli.instantiate_module", "pytorch_lightning.cli.instantiate_module")
"""The values that LightningCLI writes; since version 2.6.6, Lightning itself calls no others."""

_HYPER_PARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters")
_PATHS = ("best_model_path", "last_model_path", "kth_best_model_path")


def find_named_code(state: Any) -> list[tuple[tuple[str, ...], str]]:
    """Find values that Lightning would import and call, or fetch and unpickle.

    Args:
        state: Plain data in its JSON form.

    Returns:
        The keys that lead to each such value, and the reason to refuse it.

    Example:
        >>> find_named_code({"hyper_parameters": {"lr": 0.1, "_instantiator": INSTANTIATORS[0]}})
        []
        >>> [(keys, why)] = find_named_code({"hyper_parameters": {"_instantiator": "os.system"}})
        >>> keys
        ('hyper_parameters', '_instantiator')
    """
    named_code: list[tuple[tuple[str, ...], str]] = []
    unvisited: list[tuple[_KeyPath | None, Any]] = [(None, state)]
    while unvisited:
        key_path, node = unvisited.pop()
        if type(node) is dict:
            is_in_hyper_parameters = key_path is not None and key_path.key in _HYPER_PARAMETERS
            if INSTANTIATOR in node and (not is_in_hyper_parameters or node[INSTANTIATOR] not in INSTANTIATORS):
                named_code.append(((*_keys(key_path), INSTANTIATOR), _describe_import(node[INSTANTIATOR])))
            urls = [name for name in _PATHS if _is_url(node.get(name))]
            named_code += [((*_keys(key_path), name), _describe_fetch(node[name])) for name in urls]
            unvisited += [(_KeyPath(key_path, key), item) for key, item in node.items() if type(item) in (dict, list)]
        elif type(node) is list:
            # A list of pairs may also form a dict; in a set, their order is arbitrary.
            if INSTANTIATOR in node:
                named_code.append((_keys(key_path), _describe_import(node)))
            if len(node) == 2 and node[0] in _PATHS and _is_url(node[1]):
                named_code.append((_keys(key_path), _describe_fetch(node[1])))
            unvisited += [
                (_KeyPath(key_path, str(i)), item) for i, item in enumerate(node) if type(item) in (dict, list)
            ]
    return named_code


class _KeyPath(NamedTuple):
    """The keys that lead to a node: its own, and those of its container, which siblings share to save memory."""

    container: _KeyPath | None
    key: str


def _keys(key_path: _KeyPath | None) -> tuple[str, ...]:
    keys = []
    while key_path is not None:
        keys.append(key_path.key)
        key_path = key_path.container
    return tuple(reversed(keys))


def _is_url(value: Any) -> bool:
    return isinstance(value, str) and value.startswith("http")


def _describe_import(value: Any) -> str:
    named = repr(value[:80]) if isinstance(value, str) else "something"
    return (
        f"it names {named}, which Lightning would import and call to make a module of hyper-parameters; only "
        f"{INSTANTIATORS[0]!r}, which Lightning's own command line writes, has a place in them"
    )


def _describe_fetch(value: str) -> str:
    return f"it names {value[:80]!r}, a file that Lightning would fetch and unpickle; no checkpoint is saved to http"
