"""What ``fsdp checkpoint consolidate`` writes, read by those that it is written for: Lightning and transformers."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from chunked_tensors import in_pieces
from cli_checkpoints import run
from damaged_folders import save_alone
from fsdp_core.state import fqn
from nests import assert_same
from quiet_trainer import quiet_trainer

# -- Lightning ---------------------------------------------------------------------------------------------------------


class Model(lightning.LightningModule):
    """A model with a tied parameter, dropout, two param groups and a scheduler."""

    def __init__(self, width: int = 6, rate: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.wte = nn.Embedding(11, width)
        self.mixer = nn.Sequential(nn.Linear(width, width), nn.Dropout(0.2))
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.wte.weight

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        logits = self.head(self.mixer(self.wte(batch)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch.flatten())

    def configure_optimizers(self) -> Any:
        groups = [{"params": self.mixer.parameters()}, {"params": self.wte.parameters(), "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams["rate"])
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


def trainer(folder: Path, epochs: int) -> lightning.Trainer:
    callbacks = [ModelCheckpoint(folder, save_last=False, every_n_epochs=100)]
    return quiet_trainer(max_epochs=epochs, callbacks=callbacks)


def data() -> DataLoader[Any]:
    tokens = torch.randint(0, 11, (12, 5), generator=torch.Generator().manual_seed(1))
    return DataLoader(tokens, batch_size=4)  # type: ignore[arg-type]


def saved_as_a_folder(file: Path, folder: Path) -> None:
    """What a strategy would have saved of the run that a plain Trainer has saved as a file: by name, in pieces."""
    whole = torch.load(file, weights_only=True)
    order = ["mixer.0.weight", "mixer.0.bias", "wte.weight"]  # as configure_optimizers takes them
    optimizers = [
        {
            "state": {
                order[number]: {key: in_pieces(value, 0, 2) if value.ndim else value for key, value in values.items()}
                for number, values in plain["state"].items()
            },
            "param_groups": [
                {**group, "params": [order[number] for number in group["params"]]} for group in plain["param_groups"]
            ],
        }
        for plain in whole.pop("optimizer_states")
    ]
    weights = OrderedDict((name, in_pieces(tensor, 0, 1)) for name, tensor in whole.pop("state_dict").items())
    save_alone(
        folder, {"model": weights, "optimizer": optimizers, "trainer": whole},
        aliases={"model/head.weight": "model/wte.weight"},
    )  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A plain Trainer's file, and what is consolidated from the folder of the same run."""
    path = tmp_path_factory.mktemp("lightning")
    lightning.seed_everything(3)
    run_one = trainer(path, 2)
    run_one.fit(Model(width=4, rate=0.05), data())
    run_one.save_checkpoint(path / "plain.ckpt")
    saved_as_a_folder(path / "plain.ckpt", path / "folder.ckpt")
    run("consolidate", path / "folder.ckpt", path / "ours.ckpt", "--to", "lightning")
    return path / "plain.ckpt", path / "ours.ckpt"


def test_the_file_is_that_of_a_plain_trainer(files: tuple[Path, Path]) -> None:
    plain, ours = (torch.load(file, weights_only=True) for file in files)
    names = [group.pop("param_names") for group in ours["optimizer_states"][0]["param_groups"]]
    assert names == [["mixer.0.weight", "mixer.0.bias"], ["wte.weight"]]
    assert_same(ours, plain)


def test_load_from_checkpoint_opens_it(files: tuple[Path, Path]) -> None:
    plain, ours = (Model.load_from_checkpoint(file, map_location="cpu") for file in files)
    assert dict(ours.hparams) == dict(plain.hparams) == {"width": 4, "rate": 0.05}
    assert_same(dict(ours.state_dict()), dict(plain.state_dict()))
    assert ours.head.weight is ours.wte.weight


def test_a_plain_trainer_goes_on_from_it_bit_for_bit(files: tuple[Path, Path], tmp_path: Path) -> None:
    ended = []
    for file in files:
        model, going_on = Model(width=4, rate=0.05), trainer(tmp_path, 4)
        lightning.seed_everything(5)
        going_on.fit(model, data(), ckpt_path=file)
        assert (going_on.global_step, going_on.current_epoch) == (12, 4)
        ended.append({**model.state_dict(), "optimizer": going_on.optimizers[0].state_dict()})
    plain, ours = ended
    for state in ended:
        for group in state["optimizer"]["param_groups"]:
            group.pop("param_names", None)
    assert_same(ours, plain)


def test_what_is_imported_from_it_is_the_same_checkpoint(files: tuple[Path, Path], tmp_path: Path) -> None:
    run("import", files[1], tmp_path / "back.ckpt")
    run("diff", files[1].with_name("folder.ckpt"), tmp_path / "back.ckpt")


# -- transformers ------------------------------------------------------------------------------------------------------

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", {"n_layer": 2, "n_head": 2, "n_embd": 8, "vocab_size": 20, "n_positions": 16}),
    "llama": (
        "LlamaConfig",
        {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 8, "intermediate_size": 12, "vocab_size": 20,
         "max_position_embeddings": 16},
    ),
}  # fmt: skip


def config_of(transformers: Any, name: str, tied: bool) -> Any:
    kind, sizes = CONFIGS[name]
    return getattr(transformers, kind)(**sizes, tie_word_embeddings=tied)


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.eval()(torch.arange(6).reshape(1, 6)).logits
    return found


@pytest.mark.parametrize("shard_size", ["5GB", "1kB"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", CONFIGS)
def test_from_pretrained_gives_the_same_logits(
    transformers: Any, tmp_path: Path, name: str, tied: bool, shard_size: str
) -> None:
    torch.manual_seed(2)
    model = transformers.AutoModelForCausalLM.from_config(config_of(transformers, name, tied))
    weights = {
        f"model.{key}": in_pieces(tensor, 0, 1) if tensor.ndim and tensor.shape[0] > 1 else tensor
        for key, tensor in model.state_dict().items()
    }
    aliases = {f"model/model.{alias}": f"model/model.{key}" for alias, key in fqn.aliases(model).items()}
    assert bool(aliases) == tied
    save_alone(tmp_path / "a", {"model": weights | {"loss.weight": torch.ones(3)}}, aliases=aliases)
    model.config.save_pretrained(tmp_path)
    run(
        "consolidate", tmp_path / "a", tmp_path / "hf", "--to", "huggingface", "--strip-prefix", "model.",
        "--config", tmp_path / "config.json", "--max-shard-size", shard_size,
    )  # fmt: skip
    assert (tmp_path / "hf" / "model.safetensors").is_file() == (shard_size == "5GB")
    read, told = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert {kind: found for kind, found in told.items() if found} == {}
    assert logits(read).equal(logits(model))
    assert (read.get_input_embeddings().weight is read.get_output_embeddings().weight) == tied
    read.save_pretrained(tmp_path / "theirs", max_shard_size=shard_size)
    for index in (tmp_path / "theirs").glob("*.index.json"):
        theirs = json.loads(index.read_text())
        ours = json.loads((tmp_path / "hf" / index.name).read_text())
        assert set(ours["weight_map"]) == set(theirs["weight_map"])
        assert ours["metadata"]["total_size"] == theirs["metadata"]["total_size"]
