"""Refuses hyper-parameters that a checkpoint can't hold, and those that make Lightning run the code they name."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import PurePath
from typing import Any

import torch
import yaml

from fsdp_core.checkpoint.format.named_code import INSTANTIATOR
from fsdp_core.checkpoint.format.plain_data import encode
from fsdp_core.errors import CheckpointFormatError, CheckpointValueError

__all__ = ["check_hyper_parameters", "refuse_named_classes"]

_CLASS = "_class_path"
_OLD_KEYS = ("hparams", "module_arguments")  # Lightning adds their contents to the hyper-parameters
_MAX_YAML_LENGTH = 2**16  # longer strings are not parsed, but refused
_MAX_LISTED = 5


def check_hyper_parameters(owner: Any, key: str) -> None:
    """Refuse hyper-parameters of ``owner.save_hyperparameters()`` that are neither plain data nor tensors.

    Args:
        owner: A LightningModule or LightningDataModule.
        key: Their key in Lightning's checkpoints.

    Raises:
        CheckpointValueError: There are such hyper-parameters; the message names all of them.
    """
    refused: dict[str, str] = {}
    for name, value in owner.hparams.items():
        try:
            encode({key: {name: value}}, lambda keys, tensor: None)
        except CheckpointValueError as error:
            refused[name] = str(error)
    if refused:
        first, *further = refused.values()
        # the first line of each message is the same, and is written once
        listing = "\n".join([first, *(message.partition("\n")[2] for message in further)])
        raise CheckpointValueError(
            f"{listing}\nIn {type(owner).__name__} write self.save_hyperparameters(ignore={list(refused)!r})."
        )


def refuse_named_classes(checkpoint: Mapping[str, Any], path: object) -> None:
    """Refuse a checkpoint whose hyper-parameters name code that is run to instantiate them.

    Lightning's CLI records in hyper-parameters that it has instantiated a class. ``load_from_checkpoint`` then passes
    them to jsonargparse, which imports and calls what they name: ``{"class_path": …, "init_args": …}``, at any depth
    and in YAML strings, and for some parameters any name. So each name of code must be a class of ``torch.nn`` or
    ``torch.optim`` or a dtype, and the module's own class must be one of Lightning's that is already imported.

    Args:
        checkpoint: The contents, as in a full file of the same run.
        path: Its path, for messages.

    Raises:
        CheckpointFormatError: Other code is named.
    """
    for key in ("hyper_parameters", "datamodule_hyper_parameters"):
        hyper_parameters = checkpoint.get(key)
        if not isinstance(hyper_parameters, Mapping) or INSTANTIATOR not in hyper_parameters:
            continue
        entries = {key: {name: value for name, value in hyper_parameters.items() if name not in (INSTANTIATOR, _CLASS)}}
        for old_key in _OLD_KEYS:
            if old_key in checkpoint:
                entries[old_key] = checkpoint[old_key]
        try:
            findings = [f"  {'/'.join(keys)!r}: {text[:80]!r}" for keys, text in _find_code(entries, (), {})]
        except RecursionError as error:
            raise CheckpointFormatError(f"{path} has {key} that are nested too deeply") from error
        if _CLASS in hyper_parameters and not _is_imported_module(hyper_parameters[_CLASS]):
            findings.append(
                f"  '{key}/{_CLASS}': {str(hyper_parameters[_CLASS])[:80]!r}, which is not an imported module class"
            )
        if findings:
            more = [f"  … and {len(findings) - _MAX_LISTED} more"] if len(findings) > _MAX_LISTED else []
            title = f"{path} names code, and Lightning would import and call it to make a module of its {key}:"
            remedy = (
                "Nothing was run. If you trust the checkpoint, pass weights_only=False to load_from_checkpoint; or "
                f"build the module yourself, and load into it fsdp_core.load_state_dict({str(path)!r})."
            )
            raise CheckpointFormatError("\n".join([title, *findings[:_MAX_LISTED], *more, remedy]))


def _find_code(value: Any, keys: tuple[str, ...], visited: dict[int, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Find names of code in a value, and what may hold such names.

    Args:
        value: A hyper-parameter, or a part of one.
        keys: The keys that lead to it.
        visited: By id, the objects that were searched before.

    Yields:
        The keys that lead to a name, and the text to show.
    """
    if isinstance(value, PurePath):
        value = str(value)
    if isinstance(value, yaml.ScalarNode):
        value = value.value
    if isinstance(value, str):
        text = value.strip()
        is_dotted_name = "." in text and all(part.isidentifier() for part in text.split("."))
        if is_dotted_name:
            if _is_code(text):
                yield keys, value
        elif len(value) > _MAX_YAML_LENGTH:  # it may hold a name, and takes too long to parse
            yield keys, value
        else:
            nested = _parse_nest(value)
            if nested is not None:
                yield from _find_code(nested, keys, visited)
        return
    if id(value) in visited:  # aliases in YAML can repeat the same node many times
        return
    visited[id(value)] = value  # kept alive, or another object could get its id
    for name, item in _entries(value):
        text = str(name.value if isinstance(name, yaml.ScalarNode) else name)
        inner_keys = (*keys, text)
        if text == "class_path":
            name_of_class = item.value if isinstance(item, yaml.ScalarNode) else item
            # jsonargparse looks up a name without a dot among the classes that the parameter's type allows
            if not isinstance(name_of_class, str) or "." not in name_of_class or _is_code(name_of_class):
                yield inner_keys, str(name_of_class)
            continue
        if "class_path" in text or "init_args." in text or ".init_args" in text:  # as jsonargparse flattens a nest
            yield inner_keys, text
        yield from _find_code(name, inner_keys, visited)
        yield from _find_code(item, inner_keys, visited)


def _entries(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, yaml.MappingNode):
        return value.value  # type: ignore[no-any-return]
    if isinstance(value, yaml.SequenceNode):
        return enumerate(value.value)
    if isinstance(value, argparse.Namespace):
        return vars(value).items()
    if isinstance(value, list | tuple | set | frozenset):
        return enumerate(value)
    return ()


def _parse_nest(text: str) -> Any:
    """The YAML nodes of a string that is a nest, as jsonargparse would read it, without constructing objects."""
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError:
        return None
    return None if isinstance(node, yaml.ScalarNode) else node


def _is_code(name: str) -> bool:
    """Whether a name is that of importable code that is not known to be harmless. Nothing is imported."""
    top_package = name.partition(".")[0]
    try:
        if top_package not in sys.modules and find_spec(top_package) is None:
            return False
    except ValueError:  # a module without a spec
        pass
    obj = _find_imported(name)
    if isinstance(obj, torch.dtype):
        return False
    is_torch_class = isinstance(obj, type) and f"{obj.__module__}.".startswith(("torch.nn.modules.", "torch.optim."))
    return not is_torch_class


def _find_imported(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    if module not in sys.modules:
        return None
    return vars(sys.modules[module]).get(attribute)


def _is_imported_module(name: Any) -> bool:
    obj = _find_imported(name) if isinstance(name, str) else None
    if not isinstance(obj, type):
        return False
    for package_name in ("lightning.pytorch", "pytorch_lightning"):
        package = sys.modules.get(package_name)
        if package is not None and issubclass(obj, (package.LightningModule, package.LightningDataModule)):
            return True
    return False
