"""Adds a prefix to names or strips it: a LightningModule may hold a plain model as ``self.model``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fsdp_core.checkpoint.format.state_paths import join_path, split_path
from fsdp_core.checkpoint.importing.layouts import KEPT_WITH_WEIGHTS, TRAINER_MARK, Imported
from fsdp_core.errors import CheckpointMismatchError, CheckpointValueError

__all__ = ["rename_parameters"]

#: The version whose layout is written, so that Lightning does not migrate it as an older one.
_LIGHTNING_VERSION = "2.6.0"

#: Keys that the Trainer would read as its own progress, or as the module's arguments.
_TRAINER_KEYS = KEPT_WITH_WEIGHTS | {"state_dict", "optimizer_states", "lr_schedulers", "callbacks"}


def rename_parameters(imported: Imported, *, strip_prefix: str = "", add_prefix: str = "") -> Imported:
    """Rename the parameters and buffers of models and optimizers.

    Args:
        imported: The content of a source.
        strip_prefix: A prefix to remove from each name, such as ``"module."``, which DDP adds.
        add_prefix: A prefix to add to each name, such as ``"model."``. The state is then laid out as the Trainer's.

    Returns:
        The renamed content.

    Raises:
        CheckpointMismatchError: A name lacks the prefix, or the state can't be laid out as the Trainer's.
        CheckpointValueError: A prefix does not end in a dot.
    """
    for option, prefix in (("--strip-prefix", strip_prefix), ("--add-prefix", add_prefix)):
        if prefix and not prefix.endswith("."):
            raise CheckpointValueError(f"{option} {prefix} does not end in a dot: type {option} {prefix}.")

    def rename(name: str) -> str:
        return add_prefix + name.removeprefix(strip_prefix)

    def rename_part(path: str, value: Any) -> Any:
        part_type = imported.kinds.get(path)
        if part_type is not None:
            _require_prefix(path, value, part_type, strip_prefix)
            return _rename_keys(value, part_type, rename)
        if type(value) is list:  # the Trainer's optimizers
            return [rename_part(f"{path}/{index}", item) for index, item in enumerate(value)]
        return value

    def rename_path(path: str) -> str:
        key, name = split_path(path)
        return join_path(key, rename(name))

    imported.state = {key: rename_part(join_path(key), value) for key, value in imported.state.items()}
    imported.aliases = {rename_path(alias): rename_path(path) for alias, path in imported.aliases.items()}
    if add_prefix and not imported.is_trainer_state:
        return _lay_out_for_trainer(imported)
    return imported


def _rename_keys(value: Mapping[str, Any], part_type: str, rename: Callable[[str], str]) -> dict[str, Any]:
    if part_type == "model":
        return {rename(name): leaf for name, leaf in value.items()}
    return {
        "state": {rename(name): values for name, values in value["state"].items()},
        "param_groups": [
            {**group, "params": [rename(name) for name in group["params"]]} for group in value["param_groups"]
        ],
    }


def _require_prefix(path: str, value: Mapping[str, Any], part_type: str, prefix: str) -> None:
    if part_type == "model":
        parameter_names = list(value)
    else:
        parameter_names = [name for group in value["param_groups"] for name in group["params"]]
    names_without_prefix = [name for name in parameter_names if not name.startswith(prefix)]
    if names_without_prefix:
        more = f", and {len(names_without_prefix) - 1} more don't" if len(names_without_prefix) > 1 else ""
        prefixes = sorted({name.split(".")[0] + "." for name in parameter_names if "." in name})
        raise CheckpointMismatchError(
            f"{names_without_prefix[0]!r} of {path} does not begin with {prefix!r}{more}. Names there begin with "
            f"{' or '.join(prefixes) or 'nothing in common'}.\n"
            "Type another --strip-prefix, leave these parts out with --drop, or optimizers with --weights-only."
        )


def _lay_out_for_trainer(imported: Imported) -> Imported:
    """Lay the state out as the Trainer does, so that ``ckpt_path=`` and ``load_from_checkpoint`` open it."""
    models, optimizers = list[str](), list[str]()
    other_state: dict[str, Any] = {}
    for key, value in imported.state.items():
        part_type = imported.kinds.get(join_path(key))
        if part_type == "model":
            models.append(key)
        elif part_type == "optimizer":
            optimizers.append(key)
        else:
            other_state[key] = value
    if len(models) > 1:
        raise CheckpointMismatchError(
            f"--add-prefix is for one model, and there are {len(models)}: {', '.join(models)}.\n"
            "Leave out all but one with `--drop KEY`."
        )
    conflicting = [key for key in other_state if key in _TRAINER_KEYS]
    if conflicting:
        raise CheckpointMismatchError(
            f"the Trainer reads {', '.join(map(repr, conflicting))} as its own progress, and would resume from there.\n"
            f"Leave it out with `{' '.join(f'--drop {key}' for key in conflicting)}`: training begins at its first "
            "epoch."
        )
    trainer: dict[str, Any] = {**other_state, TRAINER_MARK: _LIGHTNING_VERSION, "epoch": 0, "global_step": 0}
    state: dict[str, Any] = {"model": imported.state[models[0]]}
    kinds = {"model": "model"}
    if optimizers:
        state["optimizer"] = [imported.state[key] for key in optimizers]
        kinds.update({f"optimizer/{index}": "optimizer" for index in range(len(optimizers))})
        trainer["lr_schedulers"] = []
    if len(optimizers) > 1:
        numbered = ", ".join(f"{index} is {key!r}" for index, key in enumerate(optimizers))
        imported.notes.append(f"The Trainer numbers its optimizers: {numbered}.")
    if other_state:
        imported.notes.append(f"Used only by your own on_load_checkpoint: {', '.join(map(repr, other_state))}.")

    def move_into_model(path: str) -> str:
        _, name = split_path(path)
        return join_path("model", name)

    return Imported(
        state={**state, "trainer": trainer},
        kinds=kinds,
        aliases={move_into_model(alias): move_into_model(path) for alias, path in imported.aliases.items()},
        source=imported.source,
        is_trainer_state=True,
        notes=imported.notes,
    )
