"""Folders that name code for Lightning to run: no reader gives them to it, on any version of Lightning."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

import hostile_openings
from conftest import Site
from damaged_folders import refused, reseal, save_small, state_file
from fsdp_core import load_state_dict
from fsdp_core.checkpoint import describe, load
from fsdp_core.checkpoint.importing import import_checkpoint
from fsdp_core.errors import CheckpointFormatError, CheckpointValueError
from fsdp_core.lightning.checkpoints.full.consolidation import consolidate_lightning
from fsdp_core.lightning.checkpoints.hyper_parameters import check_hyper_parameters
from fsdp_core.lightning.checkpoints.patched_io import install_opening
from hostile_openings import CLI, RAN, Data, Net


@pytest.fixture(autouse=True)
def opened() -> None:
    install_opening(pl.strategies)
    RAN.clear()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_net(tmp_path / "a.ckpt")


def save_net(path: Path, **hyper_parameters: Any) -> Path:
    """Save what a Trainer would; :func:`give` changes it afterwards, as somebody would who means harm."""
    rest = {"epoch": 0, "global_step": 0, "pytorch-lightning_version": pl.__version__, "callbacks": {}}
    rest |= {"hyper_parameters": hyper_parameters} if hyper_parameters else {}
    return save_small(path, {"model": Net().state_dict(), "trainer": rest})


def give(folder: Path, **entries: Any) -> None:
    """Write entries into what the Trainer saved, in the JSON of plain data."""
    path = state_file(folder)
    content = json.loads(path.read_text())
    content["trainer"].update(entries)
    path.write_text(json.dumps(content))
    reseal(folder, path)


HARM = "hostile_openings.run"

NAMED: dict[str, dict[str, Any]] = {
    "hyper-parameters": {"hyper_parameters": {"width": 3, "_instantiator": HARM}},
    "a data module's": {"datamodule_hyper_parameters": {"_instantiator": HARM}},
    "by another's name": {"hyper_parameters": {"_instantiator": "lightning.pytorch.cli.instantiate_class"}},
    "no name at all": {"hyper_parameters": {"_instantiator": [HARM]}},
    "old key": {"hparams": {"_instantiator": HARM}},
    "older key": {"module_arguments": {"_instantiator": HARM}},
    "old key, Lightning's own": {"hparams": {"_instantiator": CLI}},
    "pairs": {"hparams": [["_instantiator", HARM]]},
    "tuples": {"hparams": {"$tuple": [{"$tuple": ["_instantiator", HARM]}]}},
    "a set of pairs": {"hyper_parameters": {"$set": [{"$tuple": ["_instantiator", HARM]}]}},
    "a pair that is a set": {"hparams": [{"$frozenset": [HARM, "_instantiator"]}]},
    "a pair that is a dict": {"hparams": [{"_instantiator": CLI, HARM: 0}]},
    "any keys": {"hyper_parameters": {"$dict": [["_instantiator", HARM], [1, 2]]}},
    "ordered": {"hyper_parameters": {"$ordered": [["_instantiator", HARM]]}},
    "with a factory": {"hyper_parameters": {"$defaultdict": ["list", [["_instantiator", HARM]]]}},
    "counted": {"hyper_parameters": {"$counter": [["_instantiator", HARM]]}},
    "a namespace": {"hparams": {"$namespace": [["_instantiator", HARM]]}},
    "where nobody looks": {"loops": {"a": [{"b": {"_instantiator": HARM}}]}},
    "a model from the web": {"callbacks": {"ModelCheckpoint": {"best_model_path": "http://127.0.0.1:9/evil.ckpt"}}},
    "the last, by pairs": {"callbacks": {"$ordered": [["x", {"$dict": [["last_model_path", "https://a/b"]]}]]}},
}

REFUSED = r"names code, and is not read:\n  'trainer/(.|\n)*\nNothing was run"

READERS: dict[str, Callable[[Path], object]] = {
    "load": load,
    "load_state_dict": load_state_dict,
    "describe": describe,
    "consolidate": lambda path: consolidate_lightning(path, path.parent / "out.ckpt"),
    "module": lambda path: Net.load_from_checkpoint(path),
    "module, trusted": lambda path: Net.load_from_checkpoint(path, weights_only=False),
    "data": lambda path: Data.load_from_checkpoint(path),
}


@pytest.mark.parametrize("how", NAMED)
def test_every_reader_refuses_what_names_code(folder: Path, how: str) -> None:
    give(folder, **NAMED[how])
    for read in READERS.values():
        refused(folder, REFUSED, by=read)
    assert RAN == []
    assert not (folder.parent / "out.ckpt").exists()


def test_fabrics_keys_too(tmp_path: Path) -> None:
    folder = save_small(tmp_path / "a", {"model": Net().state_dict(), "hyper_parameters": {"width": 3}})
    text = state_file(folder).read_text().replace('"width": 3', f'"\\u005finstantiator": "{HARM}"')
    state_file(folder).write_text(text)
    reseal(folder, state_file(folder))
    with pytest.raises(CheckpointFormatError, match=r"'hyper_parameters/_instantiator': it names 'hostile_op"):
        Net.load_from_checkpoint(folder)
    assert RAN == []


def test_what_no_reader_takes_is_not_saved(tmp_path: Path) -> None:
    state = {"model": Net().state_dict(), "trainer": {"hyper_parameters": {"_instantiator": HARM}}}
    with pytest.raises(CheckpointValueError, match="'trainer/hyper_parameters/_instantiator': it names"):
        save_small(tmp_path / "a", state)
    assert not (tmp_path / "a").exists()
    module = Net()
    module.hparams.update(_instantiator=HARM)
    with pytest.raises(CheckpointValueError, match=r"save_hyperparameters\(ignore=\['_instantiator'\]\)"):
        check_hyper_parameters(module, "hyper_parameters")
    module.hparams.update(_instantiator=CLI)
    check_hyper_parameters(module, "hyper_parameters")


@pytest.mark.parametrize("key", ["hyper_parameters", "datamodule_hyper_parameters", "hparams"])
def test_an_import_refuses_it(tmp_path: Path, key: str) -> None:
    file = {"state_dict": Net().state_dict(), "pytorch-lightning_version": pl.__version__, "loops": {}}
    torch.save({**file, key: {"width": 3, "_instantiator": HARM}}, tmp_path / "old.ckpt")
    with pytest.raises(CheckpointValueError, match=f"old.ckpt.*\n.*'{key}/_instantiator': .*\n.*--drop {key}/_inst"):
        import_checkpoint(tmp_path / "old.ckpt", tmp_path / "new")
    assert not (tmp_path / "new").exists()
    import_checkpoint(tmp_path / "old.ckpt", tmp_path / "new", drop=[f"{key}/_instantiator"])
    assert load(tmp_path / "new")["trainer"][key] == {"width": 3}


# -- what Lightning's command line writes ------------------------------------------------------------------------------


def test_what_the_command_line_wrote_is_made_again(tmp_path: Path) -> None:
    spec = {"class_path": "torch.nn.Conv2d", "init_args": {"in_channels": 2, "out_channels": 3, "kernel_size": 1}}
    folder = save_net(
        tmp_path / "a.ckpt", _instantiator=CLI, _class_path="hostile_openings.Net", width=3, part=spec,
        anything=["torch.float16", "gpt2.medium-it", "a: text", "data.csv.gz.nothing", "1.5", "torch.nn.GELU"],
    )  # fmt: skip
    made = vars(Net.load_from_checkpoint(folder))
    assert isinstance(made["part"], nn.Conv2d)
    assert made["anything"][0] == "torch.float16"
    give(folder, hyper_parameters={"_instantiator": CLI, "width": 3})
    assert type(Net.load_from_checkpoint(folder)) is Net


SPEC = {"class_path": "hostile_openings.Harm", "init_args": {"text": "it ran"}}
NESTED: dict[str, dict[str, Any]] = {
    "an argument of any type": {"anything": SPEC},
    "of a type": {"part": {"class_path": "hostile_openings.HarmfulPart", "init_args": {"text": "it ran"}}},
    "by a short name": {"part": {"class_path": "HarmfulPart", "init_args": {"text": "it ran"}}},
    "by dots in keys": {"part": "HarmfulPart", "part.init_args.text": "it ran"},
    "deep": {"anything": [{"a": {"$tuple": [1, SPEC]}}]},
    "in a dict with any keys": {"anything": {"$dict": [["class_path", SPEC["class_path"]], [1, 2]]}},
    "in a class that does no harm": {"part": {"class_path": "torch.nn.Sequential", "dict_kwargs": {"x": SPEC}}},
    "in YAML": {"anything": "{class_path: hostile_openings.Harm, init_args: {text: it ran}}"},
    "in YAML's own letters": {"anything": '{"cl\\u0061ss_path": "hostile_openings.H\\x61rm"}'},
    "in YAML, said again": {"anything": "{a: &x {class_path: hostile_openings.Harm}, b: *x}"},
    "a function": {"call": "hostile_openings.run"},
    "in the last of many texts": {
        "anything": [*(f"{{a: {i}}}" for i in range(99)), "{class_path: hostile_openings.Harm}"]
    },
    "letters that few know": {"call": "hostile_openings.℘"},
    "a module that is not imported": {"call": "hostile_not_imported.run"},
    "a path": {"call": {"$path": "hostile_openings.run"}},
    "a key": {"anything": {"hostile_openings.run": 1}},
    "a text without end": {"anything": "a" * 2**17},
    "the module's class": {"_class_path": "hostile_not_imported.Net"},
    "the module's class, no module": {"_class_path": "hostile_openings.Harm"},
    "the module's class, no name": {"_class_path": 3},
}


@pytest.mark.parametrize("how", NESTED)
def test_names_of_code_in_hyper_parameters_need_trust(folder: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(hostile_openings.not_imported(folder.parent))
    give(folder, hyper_parameters={"_instantiator": CLI, "width": 3, **NESTED[how]})
    with pytest.raises(CheckpointFormatError, match=r"and Lightning would import(.|\n)*pass weights_only=False"):
        Net.load_from_checkpoint(folder)
    give(folder, hyper_parameters={"_instantiator": CLI, "width": 3}, hparams=NESTED[how])
    with pytest.raises(CheckpointFormatError, match="names code, and Lightning would import"):
        Net.load_from_checkpoint(folder)
    assert RAN == []
    assert "hostile_not_imported" not in sys.modules
    assert load_state_dict(folder).keys() == Net().state_dict().keys()


@pytest.mark.parametrize(
    "how", ["an argument of any type", "of a type", "in YAML", "in YAML, said again", "by a short name"]
)
def test_the_names_would_run(folder: Path, how: str) -> None:
    give(folder, hyper_parameters={"_instantiator": CLI, "width": 3, **NESTED[how]})
    Net.load_from_checkpoint(folder, weights_only=False)
    assert RAN


# -- anything anywhere -------------------------------------------------------------------------------------------------


def test_nothing_that_is_put_anywhere_runs(site: Site) -> None:
    done = site.fork(hostile_openings.__file__, str(site.path), "40")
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["ran"] == []
    assert told["control"] == ["it ran"]  # the same, where Lightning gets it
    assert told["ended"]["refused"] > 40
    assert told["ended"]["read"] > 5
