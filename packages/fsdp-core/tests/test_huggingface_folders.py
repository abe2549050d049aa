"""Folders of safetensors files, read and written in one process and without transformers: odd ones, and callbacks."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fsdp_core.errors import CheckpointExistsError, CheckpointFormatError, CheckpointMismatchError
from fsdp_core.huggingface import load_pretrained, save_pretrained
from fsdp_core.lightning import LoadPretrained, SavePretrained
from fsdp_core.lightning.pretrained_folders import _is_step_in
from fsdp_core.testing.refusals import assert_says, refusal
from quiet_trainer import quiet_trainer


class Pair(nn.Module):
    """Two layers, whose weights may be one parameter."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        if tied:
            self.second.weight = self.first.weight


def filled(tied: bool = False) -> dict[str, Tensor]:
    """Other values than any module has at first."""
    names = Pair(tied).state_dict()
    return {name: torch.full_like(value, number + 2.0) for number, (name, value) in enumerate(names.items())}


def cached(root: Path, target: Callable[[Path], Path]) -> Path:
    """A model as huggingface_hub keeps it: links to blobs, by the hashes of their contents.

    Args:
        root: Where to make it.
        target: From the folder of blobs to the blob, which may be elsewhere.
    """
    blobs, snapshot = root / "models--a--b/blobs", root / "models--a--b/snapshots/0f3c"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    blob = target(blobs)
    save_file(filled(), blob)
    (snapshot / "model.safetensors").symlink_to(os.path.relpath(blob, snapshot))
    return snapshot


def test_the_cache_of_huggingface_hub(tmp_path: Path) -> None:
    module = Pair()
    assert load_pretrained(module, cached(tmp_path, lambda blobs: blobs / "9a1b")).tensors == 4
    torch.testing.assert_close(module.state_dict(), filled(), atol=0, rtol=0)


@pytest.mark.parametrize("kind", ["beside", "blobs are a link"])
def test_links_that_leave_the_cache_are_refused(tmp_path: Path, kind: str) -> None:
    def target(blobs: Path) -> Path:
        secret = tmp_path / "secret"
        secret.mkdir()
        if kind != "beside":
            blobs.rmdir()
            blobs.symlink_to(secret)
        return secret / "file"

    folder = cached(tmp_path, target)
    told = refusal(CheckpointFormatError, lambda: load_pretrained(Pair(), folder))
    assert_says(told, "outside of the checkpoint", "Nothing was read")


@pytest.mark.parametrize("same", [True, False])
def test_a_tied_parameter_under_both_names(tmp_path: Path, same: bool) -> None:
    """One value is taken if it is the same; two are refused, as transformers would not tie them."""
    stored = filled()
    if same:
        stored["second.weight"] = stored["first.weight"].clone()
    save_file(stored, tmp_path / "model.safetensors")
    module = Pair(tied=True)
    if same:
        load_pretrained(module, tmp_path)
        torch.testing.assert_close(module.second.weight.detach(), stored["first.weight"], atol=0, rtol=0)
        return
    before = module.first.weight.detach().clone()
    told = refusal(CheckpointMismatchError, lambda: load_pretrained(module, tmp_path))
    assert_says(told, "'first.weight' and 'second.weight' are one parameter", "tie_word_embeddings=False")
    assert torch.equal(module.first.weight, before)


def test_quantised_weights_are_not_read_without_their_scales(tmp_path: Path) -> None:
    """Skipping the scales and converting the codes would be two options that work, and wrong weights."""
    stored = {**filled(), "first.weight_scale_inv": torch.full((1, 1), 0.5)}
    stored["first.weight"] = stored["first.weight"].to(torch.float8_e4m3fn)
    save_file(stored, tmp_path / "model.safetensors")
    told = refusal(CheckpointMismatchError, lambda: load_pretrained(Pair(), tmp_path, strict=False, cast=True))
    assert_says(told, "1 are quantised", "first.weight", "dequantise")


class Lit(pl.LightningModule):
    """Trains by no more than a learning rate of 0."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Pair()

    def training_step(self, batch: Tensor, index: int) -> Any:
        return self.net.second(self.net.first(batch)).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def new_trainer(steps: int, *callbacks: pl.Callback, accumulate: int = 1) -> pl.Trainer:
    options = {"max_steps": steps, "accumulate_grad_batches": accumulate, "enable_checkpointing": False}
    return quiet_trainer(**options, callbacks=list(callbacks))


def batches() -> DataLoader[Any]:
    return DataLoader([torch.ones(1, 4)] * 4, batch_size=None)  # type: ignore[arg-type]


def test_callbacks_in_a_second_fit(tmp_path: Path) -> None:
    """A later run with the same callbacks reads the folder into its own module, and writes its own folders."""
    (tmp_path / "given").mkdir()
    save_file({f"net.{name}": value for name, value in filled().items()}, tmp_path / "given/model.safetensors")
    load, save = LoadPretrained(tmp_path / "given"), SavePretrained(tmp_path / "out", every_n_train_steps=2)
    for _ in range(2):
        module = Lit()
        new_trainer(2, load, save).fit(module, batches())
        torch.testing.assert_close(module.net.state_dict(), filled(), atol=0, rtol=0)
    assert sorted(os.listdir(tmp_path / "out")) == ["step-00000002", "step-00000002-v1"]


@pytest.mark.parametrize("where", ["out", "./out/", None], ids=["relative", "with a dot", "absolute"])
def test_older_folders_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str | None) -> None:
    monkeypatch.chdir(tmp_path)
    new_trainer(3, SavePretrained(where or tmp_path / "out", every_n_train_steps=1, keep=2)).fit(Lit(), batches())
    assert sorted(os.listdir(tmp_path / "out")) == ["step-00000002", "step-00000003"]


def test_a_resumed_run_does_not_write_the_last_folder_again(tmp_path: Path) -> None:
    """After the first of two micro-batches, the number of steps is that of the checkpoint."""
    out = tmp_path / "out"
    first = new_trainer(1, SavePretrained(out, every_n_train_steps=1), accumulate=2)
    first.fit(Lit(), batches())
    first.save_checkpoint(tmp_path / "one.ckpt")
    later = new_trainer(2, SavePretrained(out, every_n_train_steps=1), accumulate=2)
    later.fit(Lit(), batches(), ckpt_path=tmp_path / "one.ckpt")
    assert sorted(os.listdir(out)) == ["step-00000001", "step-00000002"]


class OtherJob:
    """Puts a file at a path while a folder is written that is to appear there, as another job may."""

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name = path, name

    def save_pretrained(self, folder: str) -> None:
        """Put it there, and write something of its own."""
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / self.name).write_text("theirs")
        Path(folder, "tokenizer.json").write_text("{}")


@pytest.mark.parametrize(
    ("name", "overwrite", "replaced"),
    [("model.safetensors", False, False), ("thesis.txt", True, False), ("model.safetensors", True, True)],
)
def test_what_appears_while_a_folder_is_written(tmp_path: Path, name: str, overwrite: bool, replaced: bool) -> None:
    out = tmp_path / "out"

    def save() -> Any:
        return save_pretrained(Pair(), out, also=[OtherJob(out, name)], overwrite=overwrite)

    if replaced:
        save()
        assert sorted(os.listdir(out)) == ["model.safetensors", "tokenizer.json"]
        assert (out / "model.safetensors").read_bytes() != b"theirs"
    else:
        assert_says(refusal(CheckpointExistsError, save), str(out), "which is not replaced")
        assert [(out / one).read_text() for one in os.listdir(out)] == ["theirs"]
    assert os.listdir(tmp_path) == ["out"]


def test_a_callback_takes_the_next_name_if_another_job_has_been_faster(tmp_path: Path) -> None:
    faster = OtherJob(tmp_path / "step-00000001", "model.safetensors")
    save = SavePretrained(tmp_path, every_n_train_steps=1, also=[faster])
    new_trainer(1, save).fit(Lit(), batches())
    assert save.written == [str(tmp_path / "step-00000001-v1")]
    assert sorted(os.listdir(tmp_path)) == ["step-00000001", "step-00000001-v1"]
    assert (faster.path / faster.name).read_text() == "theirs"
    (tmp_path / "step-00000002").symlink_to(tmp_path / "gone")  # exists, as far as a new folder is concerned
    again = SavePretrained(tmp_path, every_n_train_steps=2)
    new_trainer(2, again).fit(Lit(), batches())
    assert again.written == [str(tmp_path / "step-00000002-v1")]


@pytest.mark.parametrize(
    ("path", "is_own"),
    [
        ("out/step-00000100", True),
        ("out/step-00000100-v1", True),
        ("elsewhere/step-00000100", False),
        ("out/notes", False),
        ("out/../step-00000100", False),
        ("out", False),
    ],
)
def test_folders_that_may_be_removed(path: str, is_own: bool) -> None:
    """A resumed run has the list from its checkpoint, whose folders may be those of another run, or anything."""
    assert _is_step_in("out/", path) is is_own
