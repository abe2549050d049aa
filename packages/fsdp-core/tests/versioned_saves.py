"""Checkpoints of which every element says its version and its rank, and saves that end at a chosen instant."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from chunked_tensors import rank_rows
from damaged_folders import save_alone
from fsdp_core.checkpoint import load, read_manifest, verify
from fsdp_core.checkpoint.storage import commit, writers
from fsdp_core.runtime import ProcessGroupRuntime, Runtime

SHAPE = (4, 3)


def state(version: float, rank: int = 0, ranks: int = 1, shape: tuple[int, int] = SHAPE) -> dict[str, Any]:
    """This rank's rows, of the given shape, of a weight and its moment; and what all ranks have a copy of."""
    rows = rank_rows(torch.full(shape, version + rank), rank, ranks)
    moments = {"w": {"exp_avg": rows, "step": torch.tensor(version)}}
    return {
        "model": {"w": rows, "b": torch.full((2,), version)},
        "optimizer": [{"state": moments, "param_groups": [{"params": ["w", "b"]}]}],
        "best": torch.tensor([version]),
        "step": version,
        "ranks": ranks,
    }


def save_version(
    path: Any, version: float, runtime: Runtime | None = None, shape: tuple[int, int] = SHAPE, **options: Any
) -> None:
    """Save :func:`state`, over what is there."""
    runtime = runtime or ProcessGroupRuntime()
    save_alone(path, state(version, runtime.rank, runtime.world_size, shape), runtime=runtime, **options)


def version_of(path: Any) -> float:
    """The version of a checkpoint, or of places together, of which a load verifies all; every element must say it."""
    nest = load(path)
    version, ranks = float(nest["step"]), nest["ranks"]
    moment = nest["optimizer"][0]["state"]["w"]
    weight, scalars = nest["model"]["w"].full(), (nest["model"]["b"].full(), moment["step"].full(), nest["best"])
    expected = torch.arange(ranks).repeat_interleave(len(weight) // ranks)[:, None].expand_as(weight) + version
    assert weight.equal(expected), "versions or ranks are mixed"
    assert moment["exp_avg"].full().equal(expected), "versions or ranks are mixed"
    assert all(tensor.eq(version).all() for tensor in scalars), "versions are mixed"
    return version


def files_in(path: Path) -> set[str]:
    """All files and links in a folder."""
    return {str(file.relative_to(path)) for file in path.rglob("*") if not file.is_dir() or file.is_symlink()}


def is_tidy(path: Path) -> bool:
    """Whether a folder holds what its manifest names, whole, nothing else, and nothing was left beside it."""
    verify(path)
    return files_in(path) == {*read_manifest(path).files, "manifest.json"} and not [
        other for other in path.parent.iterdir() if other.name.startswith((f"{path.name}.", "."))
    ]


class Stop(BaseException):
    """Not an Exception: nothing that a save does on failure happens, as if the process had died here."""


def interrupt(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, at: int, error: BaseException | None = None
) -> None:
    """Raise at the ``at``-th call of a function of the operating system, before it does anything."""
    calls, function = iter(range(1, 10_000)), getattr(module, name)

    def stopping(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == at:
            raise error or Stop
        return function(*args, **kwargs)

    monkeypatch.setattr(module, name, stopping)


@contextlib.contextmanager
def another_writer(monkeypatch: pytest.MonkeyPatch, **writer: Any) -> Iterator[pytest.MonkeyPatch]:
    """A context in which saves are those of another process or host."""
    with monkeypatch.context() as patched:
        patched.setattr(commit, "new_writer", lambda *a: dataclasses.replace(writers.new_writer(*a), **writer))
        yield patched


def save_interrupted(monkeypatch: pytest.MonkeyPatch, path: Path, version: float, name: str, at: int) -> None:
    """Save, and end at the ``at``-th call of a function of the operating system."""
    with monkeypatch.context() as patched:
        interrupt(patched, os, name, at)
        with contextlib.suppress(Stop):
            save_version(path, version)
