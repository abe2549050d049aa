"""Lets Lightning open a sharded folder wherever it opens a file, without one of our strategies.

Checked on Lightning 2.6.6, which reads every checkpoint file with one function and writes it with another, each
imported by name into the modules below. Both are wrapped in every place: a folder with our manifest is read as the
contents of a full file of the same run, and anything else is passed to Lightning's function unchanged. Lightning's own
sharded strategies read their own layouts in other ways; they refuse our folder and say what to write instead. A fit
that resumes in the middle of an epoch warns that its data starts over. A module is never built from hyper-parameters of
a checkpoint that name code, unless the user permits the checkpoint to run code.

``ckpt_path="last"`` takes the last complete checkpoint, and passes over what an interrupted save has left. Which of
several is the last follows from the attempts that led to each, where all of them record their attempts, and not from
the clocks of the hosts that saved.

A function that a version of Lightning does not have is skipped.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from types import ModuleType
from typing import Any

from fsdp_core.errors import CheckpointExistsError, UnsupportedCapabilityError
from fsdp_core.lightning.patching import mark_wrapper, replace_function

__all__ = ["checkpoint_at", "install_opening", "install_search"]

# Functions of Lightning, each by its module and its name there.
#: Those that read files.
_READERS = (("fabric.utilities.cloud_io", "_load"), ("fabric.plugins.io.torch_io", "pl_load"))
#: Those that read files to build a module from them, as ``load_from_checkpoint`` does.
_MODULE_READERS = (("pytorch.core.saving", "pl_load"),)
#: Those that write files.
_WRITERS = (("fabric.utilities.cloud_io", "_atomic_save"), ("fabric.plugins.io.torch_io", "_atomic_save"))
#: Lightning's strategies that read folders of their own.
_OTHER_LAYOUTS = ("FSDPStrategy", "ModelParallelStrategy", "XLAFSDPStrategy")

#: Where the modules above are: in the package that holds both front ends, or in the stand-alone ones.
_PACKAGES = (
    {"fabric": "lightning.fabric", "pytorch": "lightning.pytorch"},
    {"fabric": "lightning_fabric", "pytorch": "pytorch_lightning"},
)


def install_opening(strategies: ModuleType) -> None:
    """Wrap the functions in the modules of Lightning that are imported by now. Idempotent; never undone.

    Args:
        strategies: A module with Lightning's strategy classes, such as ``lightning.pytorch.strategies``. It imports
            most of the modules with these functions. One that is imported later imports wrapped functions.
    """
    for package in _PACKAGES:
        for functions, wrap in (
            (_MODULE_READERS, _wrap_module_reader),
            (_READERS, _wrap_reader),
            (_WRITERS, _wrap_writer),
        ):
            for function_module, name in functions:
                front_end, _, submodule = function_module.partition(".")
                replace_function(sys.modules.get(f"{package[front_end]}.{submodule}"), name, wrap)
    for name in _OTHER_LAYOUTS:
        replace_function(vars(strategies).get(name), "load_checkpoint", _wrap_loader_of_other_layout)
    replace_function(vars(strategies).get("Strategy"), "load_checkpoint", _wrap_loader_of_files)


def install_search() -> None:
    """Exclude incomplete checkpoints from Lightning's search for the last one. Idempotent; never undone.

    To be called once Lightning is fully imported, since callbacks are imported after strategies.
    """
    for package in _PACKAGES:
        module = sys.modules.get(f"{package['pytorch']}.callbacks.model_checkpoint")
        replace_function(getattr(module, "ModelCheckpoint", None), "_find_last_checkpoints", _wrap_search)
        connectors = sys.modules.get(f"{package['pytorch']}.trainer.connectors.checkpoint_connector")
        connector = getattr(connectors, "_CheckpointConnector", None)
        replace_function(connector, "_select_ckpt_path", _wrap_selection)


def checkpoint_at(path: Any) -> Any:
    """The checkpoint that a path stands for: the folder around it, if the path is that of a manifest.

    A search in an object store returns the manifest, as :func:`install_search` says.
    """
    if not isinstance(path, str | Path):
        return path
    from fsdp_core.checkpoint.format.manifest import MANIFEST

    folder = str(path).removesuffix(f"/{MANIFEST}")
    return path if folder == str(path) else folder


@cache  # a function that several modules import has one wrapper
def _wrap_reader(load: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function that reads files read sharded folders, too."""

    @wraps(load)
    def load_file_or_folder(path_or_url: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_sharded_folder(checkpoint_at(path_or_url)):
            return load(path_or_url, *args, **kwargs)
        from fsdp_core.lightning.checkpoints.full.opening import read_full_state

        arguments = inspect.signature(load).bind(path_or_url, *args, **kwargs).arguments
        return read_full_state(checkpoint_at(path_or_url), arguments.get("map_location"))

    return mark_wrapper(load_file_or_folder, load, _wrap_reader)


@cache
def _wrap_module_reader(load: Callable[..., Any]) -> Callable[..., Any]:
    """As :func:`_wrap_reader`, and refuse folders whose hyper-parameters name code that would run."""
    read = _wrap_reader(load)

    @wraps(load)
    def load_to_make_a_module(path_or_url: Any, *args: Any, **kwargs: Any) -> Any:
        is_folder = _is_sharded_folder(path_or_url)
        checkpoint = read(path_or_url, *args, **kwargs)
        arguments = inspect.signature(load).bind(path_or_url, *args, **kwargs).arguments
        if is_folder and arguments.get("weights_only") is not False:
            from fsdp_core.lightning.checkpoints.hyper_parameters import refuse_named_classes

            refuse_named_classes(checkpoint, path_or_url)
        return checkpoint

    return mark_wrapper(load_to_make_a_module, load, _wrap_module_reader)


@cache
def _wrap_writer(save: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function that writes a file replace a sharded folder at the path."""

    @wraps(save)
    def save_file(checkpoint: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        # fsspec would silently move the new file into the folder, and keep the old checkpoint
        if not _is_sharded_folder(filepath):
            return save(checkpoint, filepath, *args, **kwargs)
        from fsdp_core.checkpoint.format.file_names import is_ours
        from fsdp_core.checkpoint.format.manifest import MANIFEST
        from fsdp_core.checkpoint.storage.local_or_remote_folder import open_folder
        from fsdp_core.lightning.checkpoints.full.file import write_in_place_of_checkpoint

        folder = open_folder(filepath)
        if folder.local:
            return write_in_place_of_checkpoint(Path(folder.root), lambda: save(checkpoint, filepath, *args, **kwargs))
        # an object store can hold a file and a folder of one name: the file is written, and then the folder removed
        names = [MANIFEST, *filter(is_ours, folder.files())]
        try:
            save(checkpoint, filepath, *args, **kwargs)
        except IsADirectoryError as error:
            raise CheckpointExistsError(
                f"{filepath} is a sharded checkpoint, a folder, where a file is to be saved.\n"
                "Remove it, or save to another path, such as with another dirpath= in ModelCheckpoint."
            ) from error
        for name in names:
            folder.remove(name)

    return mark_wrapper(save_file, save, _wrap_writer)


@cache
def _wrap_loader_of_other_layout(load_checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    """Let a strategy of Lightning's that reads folders of its own refuse ours, and say what to write instead."""

    @wraps(load_checkpoint)
    def load_own_layout(self: Any, *args: Any, **kwargs: Any) -> Any:
        arguments = inspect.signature(load_checkpoint).bind(self, *args, **kwargs).args
        path = checkpoint_at(arguments[1]) if len(arguments) > 1 else None
        if _is_sharded_folder(path):
            raise UnsupportedCapabilityError(
                f"Lightning's {type(self).__name__} can't open {path}, a sharded checkpoint of fsdp-core's format.\n"
                "Write a strategy that `fsdp list` shows; one device and strategy='ddp' open it too. "
                f"For a file to load with {type(self).__name__}, type: "
                f"fsdp checkpoint consolidate {path} FILE --to lightning"
            )
        return load_checkpoint(self, *args, **kwargs)

    return mark_wrapper(load_own_layout, load_checkpoint, _wrap_loader_of_other_layout)


@cache
def _wrap_loader_of_files(load_checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    """Let Lightning's strategies warn if a fit resumes from a folder whose loader positions they do not restore."""

    @wraps(load_checkpoint)
    def load_and_warn(self: Any, *args: Any, **kwargs: Any) -> Any:
        checkpoint = load_checkpoint(self, *args, **kwargs)
        module = getattr(self, "lightning_module", None)
        signature = inspect.signature(load_checkpoint)
        path = checkpoint_at(signature.bind(self, *args, **kwargs).args[1])
        if module is not None and module.trainer.state.fn == "fit" and _is_sharded_folder(path):
            from fsdp_core.lightning.loaders.trainer_loaders import warn_of_lost_positions

            warn_of_lost_positions(checkpoint)
        return checkpoint

    return mark_wrapper(load_and_warn, load_checkpoint, _wrap_loader_of_files)


@cache
def _wrap_search(find: Callable[..., Any]) -> Callable[..., Any]:
    """Let a callback's search for its last checkpoints pass over what interrupted saves have left."""

    @wraps(find)
    def find_last(self: Any, *args: Any, **kwargs: Any) -> Any:
        paths = (_searched_path(path, self._fs) for path in find(self, *args, **kwargs))
        return {path for path in paths if path is not None}

    return mark_wrapper(find_last, find, _wrap_search)


@cache
def _wrap_selection(select: Callable[..., Any]) -> Callable[..., Any]:
    """Let Lightning resume from the checkpoint that is newest by its attempts, instead of by the hosts' clocks."""

    @wraps(select)
    def select_path(self: Any, state_fn: Any, ckpt_path: Any, *args: Any, **kwargs: Any) -> Any:
        selected = _choose_newest(self, select(self, state_fn, ckpt_path, *args, **kwargs), ckpt_path)
        strategy = self.trainer.strategy
        if hasattr(strategy, "resumes_from"):  # a strategy of ours, which compares the path with the other ranks'
            strategy.resumes_from = None if selected is None else str(selected)
        return selected

    return mark_wrapper(select_path, select, _wrap_selection)


def _choose_newest(connector: Any, selected: Any, ckpt_path: Any) -> Any:
    """The path to resume from: of the last checkpoints of several callbacks the newest, where that is known.

    Args:
        connector: Lightning's connector, which selects a path.
        selected: The path that it has selected.
        ckpt_path: The ``ckpt_path`` that the user has passed.
    """
    if selected is None or ckpt_path not in (None, "last"):
        return selected
    folders_by_path = _last_checkpoints(connector.trainer)
    folders = list(folders_by_path.values())
    if str(selected) not in folders_by_path or not all(map(_is_sharded_folder, folders)):
        return selected
    from fsdp_core.lightning.checkpoints.attempts import find_newest

    newest_folder = None
    # The checkpoint that was saved when a signal came, if no callback saves then. Several runs may share its folder.
    saved_on_signal = connector._hpc_resume_path
    if _is_sharded_folder(saved_on_signal):
        newest_folder = find_newest([*folders, saved_on_signal])
    if newest_folder is None:  # what a signal has left is another run's, and not comparable with the callbacks'
        newest_folder = find_newest(folders)
    if newest_folder is None:
        return selected
    return next((path for path, folder in folders_by_path.items() if folder == newest_folder), newest_folder)


def _last_checkpoints(trainer: Any) -> dict[str, str]:
    """What Lightning chooses from for ``ckpt_path="last"``, with the folder that each path stands for."""
    paths: set[str] = set()
    for callback in trainer.callbacks:
        if hasattr(callback, "_find_last_checkpoints"):
            paths |= {str(path) for path in callback._find_last_checkpoints(trainer)}
        elif type(callback).__name__ == "OnExceptionCheckpoint" and _is_sharded_folder(callback.ckpt_path):
            paths.add(str(callback.ckpt_path))
    return {path: str(checkpoint_at(path)) for path in paths}


def _searched_path(path: str, fs: Any) -> str | None:
    """What a search returns in place of a path that Lightning has found; ``None`` for what an interrupted save left.

    In an object store, a checkpoint is replaced by its manifest, with its protocol: Lightning drops the protocol and
    compares modification times, which folders do not have there.
    """
    from fsdp_core.checkpoint.format.manifest import MANIFEST
    from fsdp_core.checkpoint.storage.local_or_remote_folder import open_folder
    from fsdp_core.checkpoint.storage.recognition import holds_manifest, is_interrupted

    try:
        folder = open_folder(fs.unstrip_protocol(path))
        if is_interrupted(folder):
            return None
        return path if folder.local or not holds_manifest(folder) else f"{folder}/{MANIFEST}"
    except Exception:  # as in _is_sharded_folder
        return path


def _is_sharded_folder(path: Any) -> bool:
    if not isinstance(path, str | Path) or str(path).startswith("http"):
        return False
    from fsdp_core.checkpoint import is_checkpoint
    from fsdp_core.checkpoint.storage.recognition import is_scattered_part

    try:
        return is_checkpoint(path) or is_scattered_part(path)  # reading a part says what is missing
    except Exception:  # an inaccessible path: the error is left to Lightning
        return False
