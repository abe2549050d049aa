"""Callbacks that write folders of Hugging Face's from shards while a Trainer runs, and read one before it begins."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary, ref

import lightning.pytorch as pl
import torch
from torch import nn

from fsdp_core.errors import CheckpointExistsError, CheckpointValueError, ShardingError
from fsdp_core.huggingface import LoadedFolder, SavedFolder, load_pretrained, save_adapter, save_pretrained
from fsdp_core.lightning.outside_steps.redirection import outside_inference_mode

__all__ = ["LoadPretrained", "SavePretrained"]

#: The names of folders that :class:`SavePretrained` writes.
_STEP = re.compile(r"step-\d{8,}(-v\d+)?")


class SavePretrained(pl.Callback):
    """Writes the model into a folder that ``from_pretrained`` reads, during training and at its end.

    The folders are ``dirpath/step-00000100`` and so on, by the number of optimizer steps. No rank gathers the model;
    see :func:`fsdp_core.huggingface.save_pretrained`. Of a model with adapters of PEFT's, the adapters alone are
    written. Such a folder holds weights only: save checkpoints, too, to resume training. What exists is never replaced:
    a run that finds a folder of the name, or another run's that has been completed meanwhile, writes
    ``step-00000100-v1``.

    Args:
        dirpath: The folder of these folders, on a file system that all ranks share.
        every_n_train_steps: How many optimizer steps to train from one folder to the next; ``None`` for no folders
            after steps.
        every_n_epochs: How many epochs to train from one folder to the next; ``None`` for no folders after epochs.
        at_end: Whether to write one when training ends.
        model: The name of the model in the LightningModule, such as ``"model"`` for ``self.model``; ``None`` if it
            holds one model of transformers or PEFT.
        dtype: As in :func:`~fsdp_core.huggingface.save_pretrained`.
        max_shard_size: As there.
        also: As there.
        keep: How many of this run's folders are kept: older ones are removed once a new one is complete. ``None`` for
            all.

    Attributes:
        written: The paths of the folders that this run has written, and not removed.

    Raises:
        CheckpointValueError: A number is not positive.

    Example:
        >>> trainer = pl.Trainer(strategy="fsdp2", callbacks=[SavePretrained("out", every_n_train_steps=1000, keep=2)],
        ...     accelerator="cpu", logger=False)  # doctest: +SKIP
    """

    def __init__(
        self,
        dirpath: str | os.PathLike[str],
        *,
        every_n_train_steps: int | None = None,
        every_n_epochs: int | None = None,
        at_end: bool = True,
        model: str | None = None,
        dtype: str | torch.dtype | None = None,
        max_shard_size: int = 50 * 10**9,
        also: Sequence[Any] = (),
        keep: int | None = None,
    ) -> None:
        numbers = {"every_n_train_steps": every_n_train_steps, "every_n_epochs": every_n_epochs, "keep": keep}
        for name, value in numbers.items():
            if value is not None and value < 1:
                raise CheckpointValueError(f"{name}={value} is not positive; leave it out for none")
        self.dirpath = os.fspath(dirpath)
        self.at_end = at_end
        self.model = model
        self.keep = keep
        self.every_n_train_steps, self.every_n_epochs = every_n_train_steps, every_n_epochs
        self.options: dict[str, Any] = {"dtype": dtype, "also": also}
        self.max_shard_size = max_shard_size
        self.written: list[str] = []
        self._step_saved = -1

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._step_saved = -1  # forget an earlier run; on resuming, load_state_dict() is called after this

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        every = self.every_n_train_steps
        if every is not None and trainer.global_step and trainer.global_step % every == 0:
            self._save(trainer, pl_module)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.every_n_epochs is not None and (trainer.current_epoch + 1) % self.every_n_epochs == 0:
            self._save(trainer, pl_module)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.at_end:
            self._save(trainer, pl_module)

    def state_dict(self) -> dict[str, Any]:
        return {"written": list(self.written), "step_saved": self._step_saved}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.written = list(state_dict["written"])
        self._step_saved = state_dict.get("step_saved", -1)

    @outside_inference_mode()
    def _save(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> SavedFolder | None:
        if trainer.global_step == self._step_saved or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return None
        strategy = trainer.strategy
        path = os.path.join(self.dirpath, f"step-{trainer.global_step:08d}")
        saved = None
        while saved is None:
            folder: str = strategy.broadcast(_choose_free_path(path) if trainer.is_global_zero else path)
            try:
                saved = self._save_to(folder, _choose_model(pl_module, self.model))
            except CheckpointExistsError:  # on all ranks
                has_another_job_written = strategy.broadcast(os.path.lexists(folder))
                if not has_another_job_written:
                    raise  # else another name is chosen
        self._step_saved = trainer.global_step
        self.written.append(saved.path)
        while self.keep is not None and len(self.written) > self.keep:
            older = self.written.pop(0)
            # the list comes from a checkpoint, which another run, with another folder, may have written
            if trainer.is_global_zero and _is_step_in(self.dirpath, older):
                shutil.rmtree(older, ignore_errors=True)
        return saved

    def _save_to(self, folder: str, module: nn.Module) -> SavedFolder:
        if any(hasattr(part, "peft_config") for part in module.modules()):
            return save_adapter(module, folder, **self.options)
        return save_pretrained(module, folder, **self.options, max_shard_size=self.max_shard_size)


class LoadPretrained(pl.Callback):
    """Reads a folder that ``save_pretrained`` wrote into the shards, before training, validation, test or prediction.

    Each rank reads its own byte ranges; see :func:`fsdp_core.huggingface.load_pretrained`. The folder is not read by a
    run that resumes from a checkpoint (``ckpt_path=``) and has its weights from there, unless the strategy or the
    checkpoint leaves frozen parameters out (``save_frozen=False``): then it is read first.

    Args:
        folder: The folder.
        model: The name of the model in the LightningModule; ``None`` if it holds one model of transformers or PEFT.
        strict: As in :func:`~fsdp_core.huggingface.load_pretrained`.
        cast: As there.

    Attributes:
        loaded: What was loaded; ``None`` before.

    Example:
        A LightningModule that builds its model from a configuration alone, without memory::

            def configure_model(self):
                if not hasattr(self, "model"):
                    with self.trainer.init_module(empty_init=True):
                        self.model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("my-llama"))
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, model: str | None = None, strict: bool = True, cast: bool = False
    ) -> None:
        self.folder = os.fspath(folder)
        self.model = model
        self.options = {"strict": strict, "cast": cast}
        self.loaded: LoadedFolder | None = None

    def on_sanity_check_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._load(trainer, pl_module)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._load(trainer, pl_module)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._load(trainer, pl_module)

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._load(trainer, pl_module)

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._load(trainer, pl_module)

    @outside_inference_mode()
    def load_base(self, pl_module: pl.LightningModule) -> None:
        """Read the folder before a run resumes from a checkpoint that leaves out what it holds. All ranks must call it.

        Strategies with ``save_frozen=False`` call it before they restore a module.
        """
        self.loaded = load_pretrained(_choose_model(pl_module, self.model), self.folder, **self.options)
        _loaded_into[self] = ref(pl_module)

    @outside_inference_mode()  # validation runs in inference mode, and what is read here is trained later
    def _load(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        last_module = _loaded_into.get(self)
        has_loaded = last_module is not None and last_module() is pl_module
        if not has_loaded and trainer.ckpt_path is None and trainer.global_step == 0:
            self.loaded = load_pretrained(_choose_model(pl_module, self.model), self.folder, **self.options)
            _loaded_into[self] = ref(pl_module)


#: The module that a callback has read its folder into; not at the callback, which may be pickled.
_loaded_into: WeakKeyDictionary[LoadPretrained, ref[pl.LightningModule]] = WeakKeyDictionary()


def _is_step_in(dirpath: str, path: str) -> bool:
    """Whether a path is that of a folder which :class:`SavePretrained` has written into ``dirpath``."""
    folder, name = os.path.split(os.path.abspath(path))
    return folder == os.path.abspath(dirpath) and _STEP.fullmatch(name) is not None


def _choose_free_path(path: str) -> str:
    """The path itself, or with a number behind it if something is there, such as another run's folder. For rank 0."""
    number = 0
    candidate = path
    while os.path.lexists(candidate):
        number += 1
        candidate = f"{path}-v{number}"
    return candidate


def _choose_model(module: pl.LightningModule, name: str | None) -> nn.Module:
    if name is None:
        return module
    submodule = getattr(module, name, None)
    if not isinstance(submodule, nn.Module):
        raise ShardingError(
            f"model={name!r} names no module of {type(module).__name__}.\n"
            f"It has {', '.join(repr(child) for child, _ in module.named_children()) or 'none'}."
        )
    return submodule
