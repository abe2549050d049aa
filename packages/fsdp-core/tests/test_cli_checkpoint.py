"""``fsdp checkpoint inspect``, ``verify`` and ``diff``, and what all of the commands say of bad input."""

from __future__ import annotations

import json
import os
import pty
import random
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import checkpoint_ranks
from chunked_tensors import in_pieces
from cli_checkpoints import ALIASES, run, save_trained
from conftest import Site
from damaged_folders import flip, rewrite, save_alone
from fsdp_core.checkpoint import read_manifest
from fsdp_core.testing.launching.process_ranks import RankPool
from fsdp_core.testing.refusals import assert_says

NOTHING_HEAVY = "heavy: []\n"


@pytest.fixture(scope="module")
def by_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """The same state, saved on 1, 2 and 3 real ranks."""
    folders = {ranks: tmp_path_factory.mktemp("saved") / f"{ranks}.ckpt" for ranks in (3, 2, 1)}
    with RankPool() as pool:
        for ranks, folder in folders.items():
            layout = "plain" if ranks == 1 else "flat"
            pool.run(ranks, checkpoint_ranks.save_all, folder, layout, timeout=60)
    return folders


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_trained(tmp_path / "a.ckpt")


# -- all commands ------------------------------------------------------------------------------------------------------

COMMANDS: dict[str, Callable[[Path | str, Path], list[object]]] = {
    "inspect": lambda path, out: ["inspect", path],
    "verify": lambda path, out: ["verify", path],
    "diff": lambda path, out: ["diff", path, path],
    "safetensors": lambda path, out: ["consolidate", path, out, "--to", "safetensors"],
    "lightning": lambda path, out: ["consolidate", path, out, "--to", "lightning"],
    "huggingface": lambda path, out: ["consolidate", path, out, "--to", "huggingface"],
    "reshard": lambda path, out: ["reshard", path, out, "--files", 2],
}


@pytest.mark.parametrize("command", [*(name for name in COMMANDS if name != "lightning"), "list"])
def test_no_command_that_copies_bytes_imports_torch(site: Site, tmp_path: Path, command: str) -> None:
    path = save_trained(tmp_path / "a.ckpt")
    arguments = ["list", tmp_path] if command == "list" else COMMANDS[command](path, tmp_path / "out")
    done = site.fsdp("checkpoint", *map(str, arguments))
    assert done.stderr == NOTHING_HEAVY


def test_the_group_lists_its_commands_without_importing_them(site: Site) -> None:
    done = site.fsdp("checkpoint", "--help")
    for command in ("list", "inspect", "verify", "diff", "consolidate", "import", "reshard"):
        assert f"\n  {command} " in done.stdout
    assert done.stderr == NOTHING_HEAVY


def first_file(folder: Path) -> Path:
    return next((folder / "model").iterdir())


def become(folder: Path, content: bytes | None) -> None:
    """Let there be a file instead, or a folder of something else."""
    shutil.rmtree(folder)
    if content is None:
        folder.mkdir()
        (folder / "weights.bin").write_bytes(b"x")
    else:
        folder.write_bytes(content)


#: What is done to a good folder, and what is said of it.
BAD_INPUT: dict[str, tuple[Callable[[Path], object], str]] = {
    "nothing": (shutil.rmtree, "the path does not exist. Check the path"),
    "a file": (lambda f: become(f, b"x"), "is a file, but a sharded checkpoint is a folder"),
    "a foreign folder": (lambda f: become(f, None), "is not a checkpoint of this format"),
    "an interrupted save": (lambda f: (f / "manifest.json").unlink(), "interrupted before it was committed"),
    "a newer version": (
        lambda f: rewrite(f, lambda content: content.update(format_version=4)),
        "has format version 4, and this fsdp-core reads version 1 to 3: pip install --upgrade fsdp-core",
    ),
    "a changed manifest": (lambda f: flip(f / "manifest.json", 400), "can't read"),
    "a hole": (
        lambda f: rewrite(f, lambda content: content["tensors"]["model/wte.weight"]["chunks"].pop()),
        "tensor 'model/wte.weight': nothing covers",
    ),
    "a missing file": (lambda f: first_file(f).unlink(), "-rank-00000.safetensors is missing"),
    "a file cut short": (
        lambda f: os.truncate(first_file(f), first_file(f).stat().st_size - 1),
        "-rank-00000.safetensors has ",
    ),
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("case", [*BAD_INPUT, "an unknown scheme"])
def test_unreadable_checkpoint_is_named_by_every_command(folder: Path, tmp_path: Path, case: str, command: str) -> None:
    spoil, message = BAD_INPUT.get(case, (lambda f: None, "can't open nosuchfs://bucket/a.ckpt"))
    spoil(folder)
    path = folder if case in BAD_INPUT else "nosuchfs://bucket/a.ckpt"
    arguments = COMMANDS[command](path, tmp_path / "out")
    if command == "inspect" and case in ("a missing file", "a file cut short"):
        run(*arguments)  # what it tells is in the manifest and in the plain data
        return
    result = run(*arguments, status=1)
    assert message in result.stderr
    assert result.stdout == ""
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize(
    "arguments",
    [
        ["inspect"],
        ["inspect", "a", "b"],
        ["verify", "a", "--yaml"],
        ["diff", "a"],
        ["diff", "a", "b", "--rtol", "-1"],
        ["diff", "a", "b", "--atol", "much"],
        ["consolidate", "a", "b"],
        ["consolidate", "a", "b", "--to", "onnx"],
        ["consolidate", "a", "b", "--to", "safetensors", "--optimizer-key", "optimizer"],
        ["consolidate", "a", "b", "--to", "lightning", "--copy-tied"],
        ["consolidate", "a", "b", "--to", "safetensors", "--max-shard-size", "1GB"],
        ["consolidate", "a", "b", "--to", "huggingface", "--max-shard-size", "large"],
        ["consolidate", "a", "b", "--to", "huggingface", "--max-shard-size", "0GB"],
        ["consolidate", "a", "b", "--to", "huggingface", "--config", "/no/such/config.json"],
        ["reshard", "a", "b"],
        ["reshard", "a", "b", "--files", "0"],
        ["explode", "a"],
        ["import"],
        ["import", "a"],
        ["import", "a", "b", "c"],
        ["import", "a", "b", "--weight-only"],
        ["import", "a", "b", "--parameter-order", "missing.txt"],
    ],
    ids=" ".join,
)
def test_wrong_usage(arguments: list[str]) -> None:
    assert "Error: " in run(*arguments, status=2).stderr


# -- from real ranks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("files", [1, 2, 4])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_what_real_ranks_saved_is_resharded(by_ranks: dict[int, Path], tmp_path: Path, ranks: int, files: int) -> None:
    run("reshard", by_ranks[ranks], tmp_path / "b", "--files", files)
    run("verify", tmp_path / "b")
    run("diff", by_ranks[ranks], tmp_path / "b")
    checkpoint_ranks.load_one(tmp_path / "b", "plain")
    assert len(list((tmp_path / "b" / "model").iterdir())) == files
    assert len(list((tmp_path / "b" / "optimizer").iterdir())) == files
    assert read_manifest(tmp_path / "b").world_size == ranks


# -- inspect -----------------------------------------------------------------------------------------------------------


def test_inspect(folder: Path) -> None:
    shown = run("inspect", folder).stdout
    assert_says(shown, "Saved by  test on 1 rank, 20", f"torch {torch.__version__}")
    rows = [line.split() for line in shown.splitlines()]
    assert ["model", "model", "6", "76", "316", "B", "float32,", "int64"] in rows
    assert ["optimizer/0", "optimizer", "2", "25", "100", "B", "float32"] in rows
    assert ["model/blocks.*.up.weight", "[4,", "6]", "float32", "96", "B", "×", "2"] in rows
    assert ["model/scale", "[]", "float32", "4", "B"] in rows
    assert ["model/head.weight", "=", "model/wte.weight"] in rows
    assert ["epoch", "3"] in rows
    assert ["callbacks/best", "a", "tensor"] in rows
    assert ["callbacks/path", "/runs/a"] in rows
    assert ["callbacks/scores", "2", "entries"] in rows
    assert ["optimizer/0/param_groups/0", "1", "parameter,", "lr", "0.1"] in rows
    assert not any("exp_avg" in line for line in shown.splitlines())


def test_inspect_puts_together_what_is_repeated_and_nothing_else(tmp_path: Path) -> None:
    mlp = {"0.weight": (8, 8), "0.bias": (8,), "1.bias": (8,), "2.weight": (8, 8), "2.bias": (8,), "4.bias": (8,)}
    blocks = {f"blocks.{number}.{name}": size for number in range(12) for name, size in mlp.items()}
    odd = {"a.": (1,), "a.b": (1,), "a..b": (1,), ".": (1,), "9" * 5000: (1,), "." * 5000 + "w": (1,)}
    sizes = {**mlp, **blocks, "steps.7": (2,), "steps.8": (2,), "layer7.w": (2,), "layer8.w": (2,), **odd}
    save_alone(tmp_path / "a", {"model": {name: torch.ones(size) for name, size in sizes.items()}})
    rows = [line.split() for line in run("inspect", tmp_path / "a").stdout.splitlines()]
    shown = {row[0].removeprefix("model/")[:20]: int(row[-1]) if "×" in row else 1 for row in rows if "float32" in row}
    for prefix, times in (("", 1), ("blocks.*.", 12)):
        assert [shown.pop(prefix + name) for name in ("0,2.weight", "0,2.bias", "1,4.bias")] == [2 * times] * 3
    assert [shown.pop(name) for name in ("steps.*", "layer7.w", "layer8.w")] == [2, 1, 1]
    assert shown == {name[:20]: 1 for name in odd} | {"model": 1}


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_file_of_lightning_is_sent_to_import(command: str, tmp_path: Path) -> None:
    torch.save({"state_dict": {"w": torch.ones(2)}, "pytorch-lightning_version": "2.6.6"}, tmp_path / "last.ckpt")
    message = run(command, tmp_path / "last.ckpt", status=1).output
    (line,) = re.findall(r"`fsdp (checkpoint import \S+ )NEW`", message)
    run(*line.split()[1:], tmp_path / "new", "--weights-only")
    assert "model/w" in run("inspect", tmp_path / "new").stdout


def test_inspect_lists_every_tensor_when_asked(folder: Path) -> None:
    rows = [line.split() for line in run("inspect", folder, "--tensors").stdout.splitlines()]
    assert ["model/blocks.1.up.weight", "[4,", "6]", "float32", "96", "B", "2"] in rows
    assert ["optimizer/0/wte.weight/exp_avg", "[6,", "4]", "float32", "96", "B", "2"] in rows
    assert ["model/nothing", "[0,", "4]", "float32", "0", "B", "0"] in rows


def test_inspect_as_json(folder: Path) -> None:
    seen = json.loads(run("inspect", folder, "--json").stdout)
    manifest = read_manifest(folder)
    assert list(seen) == [
        "path", "format_version", "save_id", "created", "strategy", "world_size", "versions", "places", "base",
        "bytes", "parts", "tensors", "aliases", "plain", "files",
    ]  # fmt: skip
    assert seen["save_id"] == manifest.save_id
    assert (seen["strategy"], seen["world_size"], seen["path"]) == ("test", 1, str(folder))
    assert seen["bytes"] == sum(path.stat().st_size for path in folder.rglob("*-*") if path.is_file())
    fields = ("path", "kind", "tensors", "elements", "bytes", "dtypes")
    model = ("model", "model", 6, 76, 316, {"float32": 73, "int64": 3})
    optimizer = ("optimizer/0", "optimizer", 2, 25, 100, {"float32": 25})
    assert seen["parts"] == [dict(zip(fields, part, strict=True)) for part in (model, optimizer)]
    block = {"shape": [4, 6], "dtype": "float32", "bytes": 96, "chunks": 3}
    assert seen["tensors"]["model/blocks.0.up.weight"] == block
    assert seen["aliases"] == ALIASES
    assert seen["plain"] == [
        {"path": "trainer/pytorch-lightning_version", "value": "2.6.6"},
        {"path": "epoch", "value": 3},
        {"path": "callbacks/best", "tensor": "callbacks/best"},
        {"path": "callbacks/path", "value": "/runs/a"},
        {"path": "callbacks/scores", "entries": 2, "names": ["0", "1"]},
        {"path": "optimizer/0/param_groups/0", "value": "1 parameter, lr 0.1"},
    ]
    assert set(seen["files"]) == set(manifest.files)


def test_inspect_shows_several_models_and_what_belongs_to_none(tmp_path: Path) -> None:
    nets = {"disc": {"w": torch.ones(3)}, "note": "x"}
    state = {"gen": {"w": torch.ones(2)}, "nets": nets, "average": {"w": in_pieces(torch.ones(4), 0, 2)}}
    save_alone(tmp_path / "a", state, {"gen": "model", "nets/disc": "model"})
    seen = json.loads(run("inspect", tmp_path / "a", "--json").stdout)
    parts = [("gen", "model", 2), ("nets/disc", "model", 3), (None, "state", 4)]
    assert [(part["path"], part["kind"], part["elements"]) for part in seen["parts"]] == parts
    assert seen["plain"] == [{"path": "nets/note", "value": "x"}, {"path": "average/w", "tensor": "average/w"}]
    assert "elsewhere" in run("inspect", tmp_path / "a").stdout


def test_a_checkpoint_can_not_write_to_the_terminal(tmp_path: Path) -> None:
    evil = "\x1b[2J\x1b]0;title\x07"
    save_alone(tmp_path / "a", {"model": {f"w{evil}": torch.ones(2)}, evil: evil})
    save_alone(tmp_path / "b", {"model": {f"w{evil}": torch.zeros(2)}, evil: evil + "x"})
    outputs = [
        run("inspect", tmp_path / "a").output,
        run("inspect", tmp_path / "a", "--tensors").output,
        run("diff", tmp_path / "a", tmp_path / "b", status=1).output,
        run("consolidate", tmp_path / "a", tmp_path / "o", "--to", "safetensors", "--key", evil, status=1).output,
    ]
    for name, more in (("a", ""), ("b", "x")):
        rewrite(
            tmp_path / name,
            lambda content, more=more: content.update(strategy=evil, created=evil, versions={evil: evil + more}),
        )
    outputs += [run("inspect", tmp_path / "a").output, run("diff", tmp_path / "a", tmp_path / "b", status=1).output]
    for output in outputs:
        assert "\\x1b[2J" in output
        assert "\x1b" not in output


# -- verify ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 3])
def test_verify_a_whole_checkpoint(by_ranks: dict[int, Path], ranks: int) -> None:
    assert f"{by_ranks[ranks]} is whole: " in run("verify", by_ranks[ranks]).stdout
    assert run("verify", by_ranks[ranks], "--quiet").output == ""
    seen = json.loads(run("verify", by_ranks[ranks], "--json").stdout)
    assert list(seen) == ["path", "files", "bytes", "faults", "left_out", "elsewhere"]
    assert seen["faults"] == {}


def test_verify_names_every_fault(folder: Path) -> None:
    names = sorted(read_manifest(folder).files)
    for name in names[1:]:
        flip(folder / name)
    (folder / names[0]).unlink()
    result = run("verify", folder, status=1)
    assert result.stdout == ""
    for name in names:
        assert f"  {name} " in result.stderr
    assert "Restore these files" in result.stderr
    faults = json.loads(run("verify", folder, "--json", status=1).stdout)["faults"]
    assert sorted(faults) == names
    assert faults[names[0]] == "is missing"
    assert all(faults[name].startswith("has the checksum xxh3:") for name in names[1:])
    assert run("verify", folder, "--quiet", status=1).stderr == result.stderr


# -- diff --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("a", "b"), [(1, 2), (2, 3), (3, 1), (3, 3)])
def test_the_same_state_of_other_world_sizes_is_the_same(by_ranks: dict[int, Path], a: int, b: int) -> None:
    shown = run("diff", by_ranks[a], by_ranks[b]).stdout
    assert "The content is the same: 48 tensors, and the plain data." in shown
    assert (f"world size: {a} → {b}" in shown) == (a != b)
    seen = json.loads(run("diff", by_ranks[a], by_ranks[b], "--json").stdout)
    assert list(seen) == ["same", "compared", "facts", "only_a", "only_b", "tied", "tensors", "plain"]
    assert seen["same"] is True
    assert run("diff", by_ranks[a], by_ranks[b], "--quiet").output == ""


def seen_by_diff(a: Path, b: Path, *options: object) -> dict[str, Any]:
    """The differences by kind, without the facts; the exit status must say whether there are any."""
    done = run("diff", a, b, "--json", *options, status=None)
    seen: dict[str, Any] = json.loads(done.stdout)
    assert done.exit_code == (0 if seen.pop("same") else 1)
    run("diff", a, b, "--quiet", *options, status=done.exit_code)
    return {
        kind: differences for kind, differences in seen.items() if differences and kind not in ("facts", "compared")
    }


def test_diff_names_the_first_value_that_differs(folder: Path, tmp_path: Path) -> None:
    def change(state: dict[str, Any]) -> None:
        for tensor, index in ((state["model"]["wte.weight"], (1, 2)), (state["model"]["blocks.1.up.weight"], (0, 1))):
            tensor.chunks[1].data[index] += 0.5
        state["model"]["wte.weight"].chunks[2].data[0, 3] -= 2.0
        state["model"]["steps"] = torch.tensor([0, 1, 7])
        state["callbacks"]["best"] = torch.tensor([0.5, 0.5])

    other = save_trained(tmp_path / "b.ckpt", change)
    seen = seen_by_diff(folder, other)
    assert list(seen) == ["tensors"]
    tensors = seen["tensors"]
    assert list(tensors) == ["model/wte.weight", "model/blocks.1.up.weight", "model/steps", "callbacks/best"]
    found = tensors["model/wte.weight"]
    assert (found["differing"], found["first"], found["max_abs"]) == (2, [3, 2], pytest.approx(2.0, abs=1e-6))
    assert found["values"]["b"] - found["values"]["a"] == pytest.approx(0.5, abs=1e-6)
    assert tensors["model/blocks.1.up.weight"]["first"] == [0, 4]
    same = {"shape": {"a": [3], "b": [3]}, "dtype": {"a": "int64", "b": "int64"}}
    values = {"differing": 1, "first": [2], "values": {"a": 2, "b": 7}, "max_abs": 5.0}
    assert tensors["model/steps"] == {**same, **values}
    shown = run("diff", folder, other, status=1).stdout
    assert "model/steps\n      1 of 3 values, first at [2]: 2 → 7, by 5 at most" in shown
    assert shown.endswith("The content differs.\n")


def test_diff_of_names_shapes_dtypes_and_ties(folder: Path, tmp_path: Path) -> None:
    tied = {"wte.weight": torch.ones(6, 4), "head.weight": torch.ones(6, 4)}
    other = {"scale": torch.ones(2), "steps": torch.arange(3, dtype=torch.int32), "new": torch.ones(1)}
    save_alone(tmp_path / "b", {"model": {**tied, **other}})
    seen = seen_by_diff(folder, tmp_path / "b")
    assert seen["only_b"] == ["model/new"]
    assert "model/nothing" in seen["only_a"]
    assert "optimizer/0/wte.weight/exp_avg" in seen["only_a"]
    assert "callbacks/best" in seen["only_a"]
    assert seen["tied"] == {
        "model/head.weight": {"a": ["model/wte.weight"], "b": []},
        "model/wte.weight": {"a": ["model/head.weight"], "b": []},
    }
    assert seen["tensors"]["model/scale"]["shape"] == {"a": [], "b": [2]}
    assert seen["tensors"]["model/scale"]["differing"] is None
    assert seen["tensors"]["model/steps"]["dtype"] == {"a": "int64", "b": "int32"}
    assert seen["tensors"]["model/steps"]["differing"] == 0
    assert seen["tensors"]["model/head.weight"]["differing"] == 24  # of either name, for it is tied in one alone
    assert seen["plain"]["epoch"] == {"a": 3, "b": "(missing)"}
    shown = run("diff", folder, tmp_path / "b", status=1).stdout
    assert_says(shown, "model/head.weight: model/wte.weight in A, alone in B", "int64 → int32; the values are the same")


def test_which_of_the_tied_names_is_stored_makes_no_difference(tmp_path: Path) -> None:
    weight = torch.ones(2, 2)
    for name, aliases in (("a", {"model/y": "model/x"}), ("b", {"model/x": "model/y"})):
        save_alone(tmp_path / name, {"model": {"x": weight, "y": weight}}, aliases=aliases)
    assert seen_by_diff(tmp_path / "a", tmp_path / "b") == {}


def test_diff_of_plain_data(folder: Path, tmp_path: Path) -> None:
    def change(state: dict[str, Any]) -> None:
        state["epoch"] = 4
        state["optimizer"][0]["param_groups"][0].update(lr=0.1 + 1e-9, betas=[0.9, 0.99], fused=False)
        state["callbacks"]["path"] = "/runs/a"
        state["callbacks"]["scores"] = (float("nan"), 1.5, {})

    other = save_trained(tmp_path / "b.ckpt", change)
    plain = {
        "epoch": {"a": 3, "b": 4},
        "optimizer/0/param_groups/0/lr": {"a": 0.1, "b": 0.1 + 1e-9},
        "optimizer/0/param_groups/0/fused": {"a": None, "b": False},
        "callbacks/path": {"a": "/runs/a", "b": "/runs/a"},  # a path in one, a string in the other
        "callbacks/scores/2": {"a": "(missing)", "b": {}},
    }
    assert seen_by_diff(folder, other) == {"plain": plain}
    del plain["optimizer/0/param_groups/0/lr"]
    assert seen_by_diff(folder, other, "--rtol", 1e-6) == {"plain": plain}


CALLBACK = "ModelCheckpoint{'monitor': 'loss', 'mode': 'min', 'every_n_train_steps': 0, 'every_n_epochs': 1}"


def saved_by_a_run(path: Path, folder: str, version: str = "", best: int = 1, timer: bool = True) -> Path:
    """What a Trainer saves beside weights, in one of several runs that compute the same."""
    files = [f"{folder}/epoch={epoch}{version}.ckpt" for epoch in range(2)]
    scores = {file: torch.tensor(float(epoch)) for epoch, file in enumerate(files)}
    keeps = {"dirpath": folder, "best_model_path": files[best], "best_k_models": scores, "last_model_path": ""}
    callbacks = {CALLBACK: keeps, **({"Timer": {"time_elapsed": {"train": random.random()}}} if timer else {})}
    attempts = [{"id": secrets.token_hex(4), "step": 0}]
    save_alone(path, {"trainer": {"callbacks": callbacks, "fsdp_core": {"attempts": attempts}}})
    return path


def test_diff_of_runs_that_compute_the_same(tmp_path: Path) -> None:
    """Ids of fits, folders and seconds are shown, and don't count; which checkpoint is the best does."""
    first = saved_by_a_run(tmp_path / "a", "/runs/a")
    again = saved_by_a_run(tmp_path / "b", "s3://runs/b/", "-v1")
    assert seen_by_diff(first, again) == {}
    shown = run("diff", first, again).stdout
    callback = f"trainer/callbacks/{CALLBACK[:59]}…"
    assert_says(shown, f"  {callback}/dirpath: /runs/a → s3://runs/b/\n", "  trainer/fsdp_core/attempts/0/id: ")
    assert "  trainer/callbacks/Timer/time_elapsed/train: 0." in shown
    other = saved_by_a_run(tmp_path / "c", "/runs/" + "a" * 80, best=0, timer=False)
    differing = [f"trainer/callbacks/{CALLBACK}/best_model_path", "trainer/callbacks/Timer/time_elapsed/train"]
    assert list(seen_by_diff(first, other)["plain"]) == differing
    shown = run("diff", first, other, status=1).stdout
    assert f"  {callback}/best_model_path: epoch=1.ckpt → epoch=0.ckpt\n" in shown
    assert f"/dirpath: /runs/a → /runs/{'a' * 54}…\n" in shown


def test_paths_in_a_diff_are_readable(tmp_path: Path) -> None:
    names = [f"/data/{'x' * 60}/{name}" for name in "ab"]
    for folder, name in zip("ab", names, strict=True):
        save_alone(tmp_path / folder, {"data": {"file": name, name: 1, "100%": folder}})
    shown = run("diff", tmp_path / "a", tmp_path / "b", status=1).stdout
    end = "x" * 29 + "/"
    assert_says(shown, f"  data/file: …{end}a → …{end}b\n", f"  data/'{names[0]}': 1 → (missing)\n")
    assert "  data/100%: a → b\n" in shown


SPECIAL = torch.tensor([float("nan"), float("inf"), -0.0, 1.0, 2.0])


@pytest.mark.parametrize(
    ("values", "options", "differing", "max_abs"),
    [
        (SPECIAL, [], None, None),
        (torch.tensor([float("nan"), float("inf"), 0.0, 1.0, 2.0]), [], None, None),
        (torch.tensor([0.0, float("inf"), 0.0, 1.0, 2.0]), [], 1, "inf"),
        (torch.tensor([float("nan"), float("-inf"), 0.0, 1.0, 2.0]), ["--atol", 1e30], 1, "inf"),
        (torch.tensor([float("nan"), float("inf"), 0.0, 1.5, 2.5]), [], 2, 0.5),
        (torch.tensor([float("nan"), float("inf"), 0.0, 1.5, 2.5]), ["--atol", 0.5], None, None),
        (torch.tensor([float("nan"), float("inf"), 0.0, 1.5, 2.5]), ["--rtol", 0.25], 1, 0.5),
    ],
    ids=["same", "zeros", "nan", "infinities", "values", "within_atol", "within_rtol_in_part"],
)
def test_tolerances_and_special_values(
    tmp_path: Path, values: torch.Tensor, options: list[object], differing: int | None, max_abs: Any
) -> None:
    save_alone(tmp_path / "a", {"model": {"w": SPECIAL}})
    save_alone(tmp_path / "b", {"model": {"w": values}})
    seen = seen_by_diff(tmp_path / "a", tmp_path / "b", *options)
    if differing is None:
        assert seen == {}
    else:
        found = seen["tensors"]["model/w"]
        assert (found["differing"], found["max_abs"]) == (differing, max_abs)


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int64, torch.bfloat16]
    + [torch.float16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64],
    ids=str,
)
def test_every_dtype_is_compared(tmp_path: Path, dtype: torch.dtype) -> None:
    a, b = torch.ones(5).to(dtype), torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0]).to(dtype)
    save_alone(tmp_path / "a", {"model": {"w": a, "same": a}})
    save_alone(tmp_path / "b", {"model": {"w": b, "same": a}})
    seen = seen_by_diff(tmp_path / "a", tmp_path / "b")
    assert list(seen["tensors"]) == ["model/w"]
    assert (seen["tensors"]["model/w"]["differing"], seen["tensors"]["model/w"]["first"]) == (2, [2])
    run("diff", tmp_path / "a", tmp_path / "b", status=1)


def test_large_integers_are_compared_exactly(tmp_path: Path) -> None:
    for name, value in (("a", 2**60), ("b", 2**60 + 1)):
        save_alone(tmp_path / name, {"model": {"w": torch.tensor([value])}})
    assert seen_by_diff(tmp_path / "a", tmp_path / "b")["tensors"]["model/w"]["differing"] == 1


def test_diff_goes_on_over_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsdp_core.checkpoint.tools.comparing.BLOCK_BYTES", 64)
    a = torch.arange(600.0).reshape(10, 6, 10)
    b = a.clone()
    b[4, 3, 2] = b[9, 5, 9] = -1.0
    save_alone(tmp_path / "a", {"model": {"w": in_pieces(a, 1, 2, 5)}, "small": a})
    save_alone(tmp_path / "b", {"model": {"w": in_pieces(b, 2, 3)}, "small": b})
    tensors = seen_by_diff(tmp_path / "a", tmp_path / "b")["tensors"]
    for name in ("model/w", "small"):
        assert (tensors[name]["differing"], tensors[name]["first"], tensors[name]["max_abs"]) == (2, [4, 3, 2], 600.0)


def test_more_than_twenty_differences_are_counted(tmp_path: Path) -> None:
    for name, value in (("a", 0.0), ("b", 1.0)):
        state = {"model": {f"w{number}": torch.full((1,), value) for number in range(25)}}
        save_alone(tmp_path / name, state)
    shown = run("diff", tmp_path / "a", tmp_path / "b", status=1).stdout
    assert_says(shown, "Tensors that differ (25)", "… and 5 more (--json has all)")
    assert len(json.loads(run("diff", tmp_path / "a", tmp_path / "b", "--json", status=1).stdout)["tensors"]) == 25


# -- progress ----------------------------------------------------------------------------------------------------------


def on_a_terminal(*arguments: object) -> str:
    """What a command shows on a terminal, on stdout and stderr."""
    ours, theirs = pty.openpty()
    done = subprocess.Popen(
        [sys.executable, "-c", "from fsdp_core.cli import main; main()", "checkpoint", *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(theirs)
    shown = b""
    try:
        while part := os.read(ours, 4096):
            shown += part
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    assert done.wait(timeout=60) == 0, shown
    return shown.decode()


def test_a_terminal_shows_progress_unless_quiet(folder: Path, tmp_path: Path) -> None:
    shown = on_a_terminal("reshard", folder, tmp_path / "b", "--files", 2)
    assert_says(shown, "Writing", "100%", f"to {tmp_path / 'b'}.")
    assert on_a_terminal("reshard", folder, tmp_path / "c", "--files", 2, "--quiet") == ""
