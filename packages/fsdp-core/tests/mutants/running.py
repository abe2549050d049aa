"""Runs chosen clauses for the mutants, and for the backend that they are of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from fsdp_core.plugins.discovery import discover
from fsdp_core.testing.launching import forking
from fsdp_core.testing.reporting.inner_session import Outcome, plugins_in, run_clauses

__all__ = ["SOUND", "run"]

#: The strategy that the mutants are mutants of.
SOUND = "loopback"

#: What ranks would import when they are started anew; Lightning imports s3fs to see if a checkpoint's path is on S3.
PRELOADED = ("mutants.strategies", "s3fs")

_ENTRY_POINTS = "[fsdp.strategies]\nmutants = mutants.plugin\n"

_MODULE = """\
import pytest

pytest.register_assert_rewrite("adapter_clauses")

from adapter_clauses import AdapterSuite
from fsdp_core.testing.suite import StrategySuite


def suite_with(clause):
    bases = (*StrategySuite.__mro__, *AdapterSuite.__mro__)
    return next(base for base in bases if clause in vars(base))


classes = dict.fromkeys((suite_with(clause), strategy) for strategy, clause in CHOSEN)
for number, (suite, strategy) in enumerate(classes):
    globals()[f"Test{number}"] = type(f"Test{number}", (suite,), {"strategy": strategy, "__module__": __name__})
"""


@contextmanager
def _installed(folder: Path) -> Iterator[None]:
    """A context in which loopback and the mutants are installed, for this process, its ranks and its subprocesses."""
    from lightning.fabric import strategies as of_fabric
    from lightning.pytorch import strategies as of_trainer

    from fsdp_core.lightning.registration.entries import enter

    info = folder / "mutants-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mutants\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(_ENTRY_POINTS)
    tests = Path(__file__).parent.parent
    registries: list[Any] = [of_fabric.STRATEGY_REGISTRY, of_trainer.StrategyRegistry]
    with plugins_in(folder, tests, tests / "loopback_site"):
        for module in (of_fabric, of_trainer):
            enter(module)
        try:
            yield
        finally:
            discover.cache_clear()
            for registry in registries:
                for name in [name for name in registry if name == SOUND or name.startswith(f"{SOUND}_")]:
                    del registry[name]


def run(folder: Path, chosen: Iterable[tuple[str, str]]) -> dict[tuple[str, str], Outcome]:
    """Run clauses, in an empty folder; see :func:`fsdp_core.testing.reporting.inner_session.run_clauses`."""
    chosen = set(chosen)
    folder.mkdir(exist_ok=True)
    clauses = sorted({(strategy, clause.partition("[")[0]) for strategy, clause in chosen})
    preloads = mock.patch.object(forking, "preloads", [*forking.preloads, *PRELOADED])
    with _installed(folder / "site"), preloads:
        return run_clauses(folder, f"CHOSEN = {clauses}\n\n{_MODULE}", chosen)
