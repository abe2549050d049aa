"""Runs leave nothing behind: no process groups, threads, files or environment variables."""

from __future__ import annotations

import gc
import os
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss

from fsdp_core.plugins.strategy_info import FrontEnd
from fsdp_core.testing import Ranks, oracle
from fsdp_core.testing.launching.rank_context import rank_context
from fsdp_core.testing.loop import Loop
from fsdp_core.testing.suite.base_class import Clauses, on_ranks
from fsdp_core.testing.training import Lit, loader, new_fabric, new_trainer, whole_batches
from fsdp_core.torch_private.process_groups import process_groups

__all__ = ["NOTHING", "LeftoversSuite", "left_behind"]


def _run_trainer(strategy: str, tmp: Path, path: Path | None, options: Mapping[str, Any] | None) -> None:
    """Fit, validate, save, and resume."""
    module = Lit("momentum")
    run = new_trainer(tmp, strategy, 2, options)
    run.fit(module, loader(1, 2), loader(1, 2))
    run.validate(module, loader(1, 2), verbose=False)
    if path is not None:
        run.save_checkpoint(path)
        resumed_run = new_trainer(tmp, strategy, 2, options, max_epochs=2)
        resumed_run.fit(Lit("momentum"), loader(1, 2), ckpt_path=str(path))


def _run_fabric(strategy: str, tmp: Path, path: Path | None, options: Mapping[str, Any] | None) -> None:
    """Set up, step, save, load, and tear down, which ends background saves."""
    loop = Loop(strategy, options=options)
    for x, y in loop.whole_batches(1):
        loop.backward(loop.loss(x, y))
        loop.optimizer.step()
    if path is not None:
        objects = {"model": loop.model, "optimizer": loop.optimizer}
        loop.fabric.save(path, objects)
        loop.fabric.load(path, objects)
    loop.fabric.strategy.teardown()


def left_behind(
    strategy: str, tmp: str, front_end: FrontEnd, saves: bool, options: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Run twice, and find what is left behind. Process groups and threads count from the second run on.

    The first run creates the default process group and threads that watch its ranks, which Lightning keeps until the
    process ends.
    """
    rank = rank_context().rank
    folder = Path(tmp)
    directories = [folder / f"cwd{rank}", folder / f"tmp{rank}"]
    for directory in directories:
        directory.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directories[0])
        patch.setattr(tempfile, "tempdir", str(directories[1]))
        patch.setenv("TMPDIR", str(directories[1]))
        variables = dict(os.environ)
        threads = set[threading.Thread]()
        groups = 0
        run = {"trainer": _run_trainer, "fabric": _run_fabric}[front_end]
        for path in (folder / "first", folder / "second"):
            groups = process_groups()
            threads = set(threading.enumerate())
            run(strategy, folder, path if saves else None, options)
        return {
            "environment variables": sorted(
                name for name in {*os.environ, *variables} if os.environ.get(name) != variables.get(name)
            ),
            "threads": sorted(thread.name for thread in set(threading.enumerate()) - threads),
            "process groups": process_groups() - groups,
            "files": sorted(
                str(path.relative_to(folder)) for directory in directories for path in directory.rglob("*")
            ),
        }


def _find_survivors(strategy: str, tmp: str, front_end: FrontEnd) -> list[str]:
    """Find objects that outlive a run: the module, the backend, or any parameter."""

    def run() -> dict[str, weakref.ref[Any]]:
        if front_end == "trainer":
            module: Any = Lit("momentum")
            trainer = new_trainer(tmp, strategy, 2)
            trainer.fit(module, loader(1, 2))
            used_strategy: Any = trainer.strategy
        else:
            loop = Loop(strategy)
            module = loop.net
            for x, y in loop.whole_batches(1):
                loop.backward(loop.loss(x, y))
                loop.optimizer.step()
            used_strategy = loop.fabric.strategy
        parameters = {f"parameter {name}": weakref.ref(parameter) for name, parameter in module.named_parameters()}
        return {"module": weakref.ref(module), "backend": weakref.ref(used_strategy.backend), **parameters}

    references = run()
    if front_end == "fabric":
        fabric = new_fabric(strategy)  # outlives the models that it has set up
        references |= _replace_models(fabric)
    # Collect repeatedly: values of a weak dictionary become garbage only after their keys, and gc.collect() does
    # nothing while another rank's thread is collecting.
    for _ in range(50):
        gc.collect()
        if all(reference() is None for reference in references.values()):
            break
        time.sleep(0.1)
    return sorted(name for name, reference in references.items() if reference() is not None)


def _replace_models(fabric: Any) -> dict[str, weakref.ref[Any]]:
    """Set up three models with one Fabric, and return references to the first two and to their parameters."""
    references: dict[str, weakref.ref[Any]] = {}
    for use in ("trained", "only called", "last"):
        module = oracle.new_net()
        model, optimizer = fabric.setup(module, oracle.momentum(module))
        for x, y in whole_batches(fabric, 1):
            with torch.set_grad_enabled(use != "only called"):
                loss = mse_loss(model(x), y)
            loss.item()  # runs the recorded program now; XLA would make it part of later programs, on some ranks
            if use != "only called":
                fabric.backward(loss)
                optimizer.step()
        if use != "last":
            parameters = {
                f"{name} of what was {use}": weakref.ref(parameter) for name, parameter in module.named_parameters()
            }
            references |= {f"the module that was {use}": weakref.ref(module), **parameters}
    return references


NOTHING = {"environment variables": [], "threads": [], "process groups": 0, "files": []}


class LeftoversSuite(Clauses):
    """A process is the same after any number of training runs as before."""

    @on_ranks("processes", "one controller")  # ranks in threads share environment variables and files
    @pytest.mark.parametrize("front_end", ["trainer", "fabric"])
    def test_nothing_is_left_behind(self, ranks: Ranks, tmp_path: Path, front_end: FrontEnd) -> None:
        """A run must leave no environment variables, threads, process groups or temporary files behind."""
        for left in ranks.run(2, left_behind, self.strategy, str(tmp_path), front_end, False, None):
            assert left == NOTHING

    @pytest.mark.parametrize("front_end", ["trainer", "fabric"])
    def test_what_nobody_holds_is_gone(self, ranks: Ranks, tmp_path: Path, front_end: FrontEnd) -> None:
        """Unreferenced modules, parameters and backends must be garbage-collected.

        Under Fabric, so must a model when the same Fabric trains another one.
        """
        for alive in ranks.run(2, _find_survivors, self.strategy, str(tmp_path), front_end):
            assert alive == []
