"""``fsdp checkpoint import`` as a user types it."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click
import fsspec
import pytest
import torch

import cli_checkpoints
from fsdp_core.checkpoint import load, load_state_dict, read_manifest, verify
from fsdp_core.checkpoint.importing import import_checkpoint
from fsdp_core.errors import CheckpointExistsError

run = partial(cli_checkpoints.run, "import")


@pytest.fixture
def ckpt(tmp_path: Path) -> Path:
    """A file of a Trainer, with two param groups."""
    net = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW([{"params": [net.weight]}, {"params": [net.bias], "lr": 0.1}])
    state = {"state_dict": net.state_dict(), "optimizer_states": [optimizer.state_dict()], "lr_schedulers": []}
    rest = {"pytorch-lightning_version": "2.6.0", "epoch": 2, "loops": {"fit_loop": {}}, "callbacks": {}}
    torch.save({**state, **rest, "hyper_parameters": {"lr": 1, "loss": torch.nn.MSELoss()}}, tmp_path / "old.ckpt")
    return tmp_path / "old.ckpt"


def test_from_the_first_message_to_the_checkpoint(ckpt: Path, tmp_path: Path) -> None:
    new, order = tmp_path / "new.ckpt", tmp_path / "order.txt"
    first = run(ckpt, new, status=1)
    assert "'hyper_parameters/loss': torch.nn.modules.loss.MSELoss" in first.stderr
    assert "`--drop hyper_parameters/loss`" in first.stderr
    second = run(ckpt, new, "--drop", "hyper_parameters/loss", status=1)
    assert "type `--parameter-order order.txt`" in second.stderr
    order.write_text("weight\nbias\n")
    done = run(ckpt, new, "--drop", "hyper_parameters/loss", "--parameter-order", order)
    assert done.stdout == (
        f"Imported a full checkpoint of Lightning's Trainer to {new}: the model (2 tensors), optimizer 0, the "
        f"Trainer's loops, the Trainer's callbacks, the Trainer's lr_schedulers.\n"
        f'Use it by   trainer.fit(model, ckpt_path="{new}")\n'
    )
    assert done.stderr == ""
    verify(new)
    assert (load(new)["trainer"]["hyper_parameters"], read_manifest(new).strategy) == ({"lr": 1}, "import")


def test_weights_only(ckpt: Path, tmp_path: Path) -> None:
    assert run(ckpt, tmp_path / "quiet", "--weights-only", "--drop", "hyper_parameters", "-q").output == ""
    done = run(ckpt, tmp_path / "new", "--weights-only", "--drop", "hyper_parameters")
    assert "fsdp_core.load_state_dict(" in done.stdout
    nest = load(tmp_path / "new")
    assert set(nest) == {"model", "trainer"}
    assert set(nest["trainer"]) == {"pytorch-lightning_version", "epoch", "loops"}


def test_prefixes(tmp_path: Path) -> None:
    """Of what DDP gave names, for a LightningModule that holds it; aliases and optimizers by name go with it."""
    weight, old = torch.ones(2, 2), tmp_path / "old.pt"
    optimizer = {"state": {"module.a.w": {"step": torch.ones(())}}, "param_groups": [{"params": ["module.a.w"]}]}
    state = {"net": {"module.a.w": weight, "module.b.w": weight}, "opt": optimizer, "other": optimizer, "step": 3}
    torch.save(state, old)
    done = run(old, tmp_path / "new", "--strip-prefix", "module.", "--add-prefix", "model.")
    assert "The Trainer numbers its optimizers: 0 is 'opt', 1 is 'other'.\n" in done.stdout
    assert "Used only by your own on_load_checkpoint: 'step'.\n" in done.stdout
    assert f'trainer.fit(model, ckpt_path="{tmp_path / "new"}")' in done.stdout
    manifest, nest = read_manifest(tmp_path / "new"), load(tmp_path / "new")
    assert manifest.aliases == {"model/model.b.w": "model/model.a.w"}
    assert [list(one["state"]) for one in nest["optimizer"]] == [["model.a.w"]] * 2
    assert [one["param_groups"] for one in nest["optimizer"]] == [[{"params": ["model.a.w"]}]] * 2
    run(old, tmp_path / "same", "--strip-prefix", "module.")
    assert [*load(tmp_path / "same")] == ["net", "opt", "other", "step"]
    assert read_manifest(tmp_path / "same").aliases == {"net/b.w": "net/a.w"}
    torch.save({**state, "ema": {"module.a.w": weight}, "epoch": 2, "callbacks": []}, old)
    for arguments, told in (
        (["--add-prefix", "model"], "type --add-prefix model."),
        (["--strip-prefix", "model."], "'module.a.w' of net does not begin with 'model.', and 1 more"),
        (["--add-prefix", "model."], "there are 2: net, ema.\nLeave out all but one with `--drop KEY`."),
        (["--add-prefix", "model.", "--drop", "ema"], "Leave it out with `--drop epoch --drop callbacks`"),
    ):
        assert told in run(old, tmp_path / "never", *arguments, status=1).stderr
    assert not (tmp_path / "never").exists()


def test_the_prefix_of_a_trainers_own(ckpt: Path, tmp_path: Path) -> None:
    order = tmp_path / "order.txt"
    order.write_text("weight\nbias\n")
    arguments = ("--drop", "hyper_parameters", "--parameter-order", order, "--add-prefix", "head.")
    run(ckpt, tmp_path / "new", *arguments)
    nest = load(tmp_path / "new")
    assert [*nest["model"]] == ["head.weight", "head.bias"]
    assert [group["params"] for group in nest["optimizer"][0]["param_groups"]] == [["head.weight"], ["head.bias"]]
    assert nest["trainer"]["epoch"] == 2


def test_existing_target_is_replaced_only_with_overwrite(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pt")
    torch.save({"w": torch.zeros(2)}, tmp_path / "b.pt")
    new = tmp_path / "new"
    assert run(tmp_path / "a.pt", new, "--quiet").output == ""
    refused = run(tmp_path / "b.pt", new, status=1)
    assert refused.stderr == f"{new} already exists: import to another path, or type --overwrite.\n"
    assert load_state_dict(new)["w"].tolist() == [1, 1]
    run(tmp_path / "nothing.pt", new, "--overwrite", status=1)
    assert load_state_dict(new)["w"].tolist() == [1, 1]
    run(tmp_path / "b.pt", new, "--overwrite")
    assert load_state_dict(new)["w"].tolist() == [0, 0]
    assert "is a checkpoint of this format already" in run(new, tmp_path / "again", status=1).stderr
    itself = run(tmp_path / "a.pt", tmp_path / "a.pt", "--overwrite", status=1)
    assert "is the checkpoint to be read: choose another path to write to" in itself.stderr
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mine.txt").write_text("mine")
    assert "mine.txt" in run(tmp_path / "a.pt", tmp_path / "folder", "--overwrite", status=1).stderr
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["mine.txt"]


def test_every_option_has_help() -> None:
    from fsdp_core.cli.checkpoint_import import import_checkpoint as command

    assert all(option.help for option in command.params if isinstance(option, click.Option))


def test_remote_source_and_target() -> None:
    files = fsspec.filesystem("memory")
    with files.open("memory://import/old.pt", "wb") as stream:
        torch.save({"w": torch.arange(4.0)}, stream)
    import_checkpoint("memory://import/old.pt", "memory://import/new")
    assert load_state_dict("memory://import/new")["w"].tolist() == [0, 1, 2, 3]
    with pytest.raises(CheckpointExistsError, match=r"--overwrite"):
        import_checkpoint("memory://import/old.pt", "memory://import/new")
    files.rm("memory://import", recursive=True)


def test_progress_reaches_the_whole(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(300, 400), "b": torch.ones(7)}, tmp_path / "old.pt")
    seen: list[tuple[int, int]] = []
    import_checkpoint(tmp_path / "old.pt", tmp_path / "new", on_bytes=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (480_028, 480_028)
