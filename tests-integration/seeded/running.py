"""Runs chosen clauses for backends that are seeded with faults."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from fsdp_core.testing.reporting.inner_session import Outcome, plugins_in, run_clauses
from seeded.changes import Change, write_packages

__all__ = ["run"]

_MODULE = """\
from fsdp_core.testing.suite import StrategySuite

for strategy in STRATEGIES:
    settings = {"strategy": strategy, "__module__": __name__}
    globals()[f"Test_{strategy}"] = type(f"Test_{strategy}", (StrategySuite,), settings)
"""


def run(
    folder: Path, faults: Mapping[tuple[str, str], tuple[Change, ...]], chosen: Iterable[tuple[str, str]]
) -> dict[tuple[str, str], Outcome]:
    """Run clauses, in an empty folder; see :func:`fsdp_core.testing.reporting.inner_session.run_clauses`.

    Args:
        folder: An empty folder.
        faults: What to seed, as :func:`write_packages` takes it.
        chosen: Strategies, each with the name of a clause as pytest shows it.
    """
    chosen = set(chosen)
    strategies = sorted({strategy for strategy, _ in chosen})
    site = folder / "site"
    site.mkdir()
    write_packages(site, faults)
    with plugins_in(site, Path(__file__).parent.parent):
        return run_clauses(folder, f"STRATEGIES = {strategies}\n\n{_MODULE}", chosen)
