"""Full checkpoints in a format of the user's: a ``CheckpointIO`` is asked as by Lightning's own strategies."""

from __future__ import annotations

import gzip
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, cast

import pytest
import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO
from torch import Tensor
from torch.nn.functional import mse_loss

from fsdp_core.testing import Ranks, oracle
from fsdp_core.testing.oracle import FP32_TOLERANCE
from fsdp_core.testing.state import full_state
from fsdp_core.testing.suite.base_class import Clauses, on_ranks
from fsdp_core.testing.training import Lit, loader, new_fabric, new_trainer

__all__ = ["UsersCheckpointIOSuite"]


class Negating(CheckpointIO):
    """Writes negated weights in a way of its own; who reads or removes them in another way fails, or resumes from them.

    Attributes:
        asked: What it was asked for, and the names of the files.
    """

    def __init__(self) -> None:
        self.asked: list[str] = []

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write it."""
        self.asked.append(f"save {os.path.basename(path)}")
        self.write(_negated(checkpoint), path)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Read it."""
        self.asked.append(f"load {os.path.basename(path)}")
        return _negated(self.read(path))

    def remove_checkpoint(self, path: Any) -> None:
        """Remove it."""
        self.asked.append(f"remove {os.path.basename(path)}")
        self.remove(path)


class Compressed(Negating):
    """Writes ``PATH.gz``."""

    def write(self, checkpoint: dict[str, Any], path: Any) -> None:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with gzip.open(f"{path}.gz", "wb") as file:
            torch.save(checkpoint, cast(IO[bytes], file))

    def read(self, path: Any) -> Any:
        with gzip.open(f"{path}.gz", "rb") as file:
            return torch.load(cast(IO[bytes], file), weights_only=True)

    def remove(self, path: Any) -> None:
        os.remove(f"{path}.gz")


class InFolders(Negating):
    """Makes a folder at the path, in which its file is."""

    def write(self, checkpoint: dict[str, Any], path: Any) -> None:
        os.makedirs(path, exist_ok=True)
        torch.save(checkpoint, os.path.join(path, "negated.pt"))

    def read(self, path: Any) -> Any:
        return torch.load(os.path.join(path, "negated.pt"), weights_only=True)

    def remove(self, path: Any) -> None:
        shutil.rmtree(path)


class Failing(TorchCheckpointIO):
    """Finds its disk full."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Fail."""
        raise OSError("no space left, says the plugin")


def _failed(strategy: str, tmp: str) -> tuple[str, str]:
    """The class and the text of what a save raises on this rank."""
    fabric = new_fabric(strategy, 2, {"state_dict_type": "full", "checkpoint_io": Failing()})
    model = fabric.setup_module(oracle.new_net())
    try:
        fabric.save(Path(tmp, "run.ckpt"), {"model": model})
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def _negated(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """The checkpoint with each weight's negative, under the key that Lightning or this module's Fabric loop has."""
    key = "state_dict" if "state_dict" in checkpoint else "model"
    return {**checkpoint, key: {name: -tensor for name, tensor in checkpoint[key].items()}}


def _trained(
    strategy: str, tmp: str, options: Mapping[str, Any] | None, wraps: bool, made: type[Compressed | InFolders]
) -> tuple[list[str], list[str], dict[str, Tensor]]:
    """Under the Trainer: what was asked, which files are left, and the weights, after a fit, a resume and a validation.

    Lightning's ``AsyncCheckpointIO``, if it wraps, does not order removals after writes: nothing is removed then.
    """
    io = made()
    folder = Path(tmp, "checkpoints")
    weights: dict[str, Tensor] = {}
    for epochs, path in ((2, None), (3, str(folder / "last.ckpt"))):
        keep = ModelCheckpoint(folder, filename="{epoch}", save_last=True, save_top_k=-1 if wraps else 1)
        plugins = [AsyncCheckpointIO(io) if wraps else io]
        arguments: dict[str, Any] = {"plugins": plugins, "max_epochs": epochs, "enable_checkpointing": True}
        run = new_trainer(tmp, strategy, 2, options, callbacks=[keep], **arguments)
        module = Lit("momentum")
        run.fit(module, loader(2, 2), ckpt_path=path, weights_only=False)
        if path is not None:
            run.validate(module, loader(2, 2), ckpt_path=path, weights_only=False, verbose=False)
            of_lightning = strategy == "ddp"
            state = module.state_dict() if of_lightning else full_state(run.strategy)
            weights = {name: tensor.detach().clone() for name, tensor in state.items()}
    return sorted(io.asked) if wraps else io.asked, sorted(os.listdir(folder)), weights


def _trained_by_fabric(strategy: str, tmp: str) -> tuple[list[str], dict[str, Tensor], dict[str, Tensor]]:
    """What was asked, the weights when a checkpoint was saved, and after a step and loading."""
    io = Compressed()
    fabric = new_fabric(strategy, 2, {"state_dict_type": "full", "checkpoint_io": io})
    net = oracle.new_net()
    model, optimizer = fabric.setup(net, oracle.momentum(net))
    states = []
    for index, (x, y) in enumerate(fabric.setup_dataloaders(loader(2, 2))):
        fabric.backward(mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        if index == 0:
            fabric.save(Path(tmp, "run.ckpt"), {"model": model, "optimizer": optimizer})
            states.append(full_state(fabric.strategy))
    fabric.load(Path(tmp, "run.ckpt"), {"model": model, "optimizer": optimizer})
    return io.asked, states[0], full_state(fabric.strategy)


class UsersCheckpointIOSuite(Clauses):
    """With ``state_dict_type="full"``, a user's ``CheckpointIO`` writes, reads and removes checkpoints."""

    @on_ranks("processes")  # which DDP runs on
    @pytest.mark.parametrize(
        ("options", "wraps", "made"),
        [
            pytest.param({}, False, Compressed, id="alone"),
            pytest.param({}, False, InFolders, id="of folders"),
            pytest.param({}, True, Compressed, id="in Lightning's AsyncCheckpointIO"),
            pytest.param({"async_save": True}, False, Compressed, id="in the background"),
        ],
    )
    def test_users_io_is_asked_as_under_ddp(
        self, ranks: Ranks, tmp_path: Path, options: dict[str, Any], wraps: bool, made: type[Compressed | InFolders]
    ) -> None:
        """In a fit, its resume and a validation, on the same ranks as under DDP; the weights must be the same, too."""
        options = {"state_dict_type": "full", **options}
        got = ranks.run(2, _trained, self.strategy, str(tmp_path / "ours"), options, wraps, made)
        want = ranks.run(2, _trained, "ddp", str(tmp_path / "ddp"), None, wraps, made)
        for (asked, left, weights), (wanted, wanted_left, wanted_weights) in zip(got, want, strict=True):
            assert (asked, left) == (wanted, wanted_left)
            assert weights.keys() == wanted_weights.keys()
            for name, tensor in wanted_weights.items():
                assert torch.allclose(weights[name], tensor, rtol=0, atol=FP32_TOLERANCE), name

    def test_users_io_is_asked_by_fabric(self, ranks: Ranks, tmp_path: Path) -> None:
        """By rank 0 to save, by all ranks to load; loaded weights must be those that were saved."""
        for rank, (asked, saved, loaded) in enumerate(ranks.run(2, _trained_by_fabric, self.strategy, str(tmp_path))):
            writes = rank == 0 or ranks.kind == "one controller"
            assert asked == ["save run.ckpt"] * writes + ["load run.ckpt"]
            assert all(torch.equal(loaded[name], tensor) for name, tensor in saved.items())

    @on_ranks("processes")
    def test_what_users_io_raises_reaches_its_rank(self, ranks: Ranks, tmp_path: Path) -> None:
        """As it is, for an ``except OSError``; the other ranks must get an error that names the rank and the text."""
        first, second = ranks.run(2, _failed, self.strategy, str(tmp_path))
        assert first == ("OSError", "no space left, says the plugin")
        assert second[0] == "CheckpointError"
        assert "no space left, says the plugin" in second[1]
        assert "on rank 0 of 2" in second[1]
