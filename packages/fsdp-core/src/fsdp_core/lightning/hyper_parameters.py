"""Refusing, before a run starts, hyper-parameters that its checkpoints could not hold."""

from __future__ import annotations

from typing import Any

from fsdp_core.checkpoint.plain_data import encode
from fsdp_core.errors import CheckpointValueError

__all__ = ["check_hyper_parameters"]


def check_hyper_parameters(owner: Any, key: str) -> None:
    """Refuse what ``owner.save_hyperparameters()`` took that is neither plain data nor a tensor.

    Args:
        owner: A LightningModule or LightningDataModule.
        key: What Lightning calls them in a checkpoint.

    Raises:
        CheckpointValueError: There is such a thing; the message names all of them.
    """
    refused: dict[str, str] = {}
    for name, value in owner.hparams.items():
        try:
            encode({key: {name: value}}, lambda keys, tensor: None)
        except CheckpointValueError as error:
            refused[name] = str(error)
    if refused:
        first, *more = refused.values()
        places = "\n".join([first, *(text.split("\n", 1)[1] for text in more)])
        raise CheckpointValueError(
            f"{places}\nIn {type(owner).__name__} write self.save_hyperparameters(ignore={list(refused)!r})."
        )
