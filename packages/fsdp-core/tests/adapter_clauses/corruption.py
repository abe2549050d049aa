"""Damage to a checkpoint on disk, and the error on loading it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fsdp_core.testing import RankPool

__all__ = ["DAMAGE", "OF_RANK_ONE"]


def _replace_by_folder(**files: str) -> Callable[[Path], None]:
    def replace(path: Path) -> None:
        shutil.rmtree(path)
        path.mkdir()
        for name, text in files.items():
            (path / name).write_text(text)

    return replace


def _replace_by_text(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("epoch,loss\n0,1.5\n")


def _replace_by_pickle(path: Path) -> None:
    shutil.rmtree(path)
    torch.save({"state_dict": {}, "hyper_parameters": RankPool}, path)


def _remove(name: str) -> Callable[[Path], None]:
    return lambda path: next(path.rglob(name)).unlink()


def _flip(name: str) -> Callable[[Path], None]:
    """Flip one bit of the last byte."""

    def flip(path: Path) -> None:
        (file,) = path.glob(name)
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))

    return flip


def _exchange(one: str, other: str) -> Callable[[Path], None]:
    def exchange(path: Path) -> None:
        (first,), (second,) = path.glob(one), path.glob(other)
        content = first.read_bytes()
        first.write_bytes(second.read_bytes())
        second.write_bytes(content)

    return exchange


def _cut(name: str) -> Callable[[Path], None]:
    def cut(path: Path) -> None:
        (file,) = path.glob(name)
        file.write_bytes(file.read_bytes()[:-1])

    return cut


def _move_out(name: str) -> Callable[[Path], None]:
    """Move a file out of the checkpoint, and replace it by a link."""

    def move(path: Path) -> None:
        (file,) = path.glob(name)
        file.rename(path.parent / "outside")
        file.symlink_to(path.parent / "outside")

    return move


#: Damage to a valid checkpoint, and parts of the error.
DAMAGE: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "missing": (shutil.rmtree, ["there is no checkpoint", "Check the path"]),
    "no manifest": (
        _remove("manifest.json"),
        ["no complete checkpoint", "manifest.json", "Load an earlier checkpoint"],
    ),
    "no part": (_remove("*-rank-00001.*"), ["rank-00001.safetensors is missing", "load an earlier checkpoint"]),
    "flipped weight": (
        _flip("model/*-rank-00001.*"),
        ["rank-00001.safetensors has the checksum", "Restore these files"],
    ),
    "flipped moment": (
        _flip("optimizer/*-rank-00000.*"),
        ["optimizer/", "rank-00000.safetensors has the checksum", "load an earlier checkpoint"],
    ),
    "flipped loop": (_flip("state-*.json"), [".json has the checksum", "Restore these files"]),
    "flipped callback": (_flip("state-*.safetensors"), ["state-", ".safetensors has the checksum"]),
    "cut part": (_cut("optimizer/*-rank-00001.*"), ["rank-00001.safetensors has", "bytes instead of"]),
    "parts exchanged": (
        _exchange("model/*-rank-00000.*", "model/*-rank-00001.*"),
        ["rank-00000.safetensors has", "rank-00001.safetensors has"],
    ),
    "part outside": (
        _move_out("model/*-rank-00000.*"),
        ["is a link to", "outside of the checkpoint", "Nothing was read"],
    ),
    "foreign folder": (_replace_by_folder(**{"notes.txt": ""}), ["not a checkpoint", "notes.txt", "Check the path"]),
    "folder of Lightning's": (
        _replace_by_folder(**{".metadata": "", "__0_0.distcp": "", "meta.pt": ""}),
        ["not a checkpoint", ".metadata", "fsdp checkpoint import"],
    ),
    "empty folder": (_replace_by_folder(), ["no checkpoint", "empty", "Check the path"]),
    "text": (_replace_by_text, ["is a file", "a sharded checkpoint is a folder", "Check the path"]),
    "pickle": (_replace_by_pickle, ["can't be read", "RankPool", "add_safe_globals"]),
}

#: Damage to a file of rank 1, which a controller, being one rank, doesn't write.
OF_RANK_ONE = ("no part", "flipped weight", "cut part", "parts exchanged")
