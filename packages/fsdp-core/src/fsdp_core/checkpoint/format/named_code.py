"""What no plain data of a checkpoint may say: names of code, and URLs of files, that Lightning would run. No torch."""

from __future__ import annotations

from typing import Any

__all__ = ["INSTANTIATOR", "INSTANTIATORS", "find_named_code"]

INSTANTIATOR = "_instantiator"
"""Where hyper-parameters name what makes their class: Lightning's ``load_from_checkpoint`` imports and calls it."""

INSTANTIATORS = ("lightning.pytorch.cli.instantiate_module", "pytorch_lightning.cli.instantiate_module")
"""What Lightning's own command line writes there; from version 2.6.6 on, Lightning calls no others either."""

_HYPER_PARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters")
_PATHS = ("best_model_path", "last_model_path", "kth_best_model_path")


def find_named_code(state: Any) -> list[tuple[tuple[str, ...], str]]:
    """Find what Lightning would import and call, or fetch and unpickle.

    Args:
        state: Plain data as it stands in JSON.

    Returns:
        The keys that lead to each such place, and the reason.

    Example:
        >>> find_named_code({"hyper_parameters": {"lr": 0.1, "_instantiator": INSTANTIATORS[0]}})
        []
        >>> [(keys, why)] = find_named_code({"hyper_parameters": {"_instantiator": "os.system"}})
        >>> keys
        ('hyper_parameters', '_instantiator')
    """
    found: list[tuple[tuple[str, ...], str]] = []
    waiting: list[tuple[tuple[str, ...], Any]] = [((), state)]
    while waiting:
        keys, node = waiting.pop()
        if type(node) is dict:
            if INSTANTIATOR in node and (keys[-1:] not in _LAST or node[INSTANTIATOR] not in INSTANTIATORS):
                found.append(((*keys, INSTANTIATOR), _imported(node[INSTANTIATOR])))
            found += [((*keys, name), _fetched(node[name])) for name in _PATHS if _is_url(node.get(name))]
            waiting += [((*keys, key), item) for key, item in node.items() if type(item) in (dict, list)]
        elif type(node) is list:
            # Pairs make a dict, too; in a set they stand in any order.
            if INSTANTIATOR in node:
                found.append((keys, _imported(node)))
            if len(node) == 2 and node[0] in _PATHS and _is_url(node[1]):
                found.append((keys, _fetched(node[1])))
            waiting += [((*keys, str(i)), item) for i, item in enumerate(node) if type(item) in (dict, list)]
    return found


_LAST = tuple((name,) for name in _HYPER_PARAMETERS)


def _is_url(value: Any) -> bool:
    return isinstance(value, str) and value.startswith("http")


def _imported(value: Any) -> str:
    named = repr(value[:80]) if isinstance(value, str) else "something"
    return (
        f"it names {named}, which Lightning would import and call to make a module of hyper-parameters; only "
        f"{INSTANTIATORS[0]!r}, which Lightning's own command line writes, has a place in them"
    )


def _fetched(value: str) -> str:
    return f"it names {value[:80]!r}, a file that Lightning would fetch and unpickle; no checkpoint is saved to http"
