"""The meshes that a backend's tests declare: how many ranks, and which options arrange them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["LINES", "DeclaredMesh"]


@dataclass(frozen=True, kw_only=True)
class DeclaredMesh:
    """A mesh on which the suite trains.

    Args:
        ranks: The number of ranks.
        options: The strategy's options that arrange them.
        plan: Called with the prefix of the names of the suite's net (``""`` or ``"net."``); returns further options,
            such as a plan of tensor parallelism, whose keys are names of submodules. The layers of every net of the
            suite have the same names: ``inp``, ``out``, and in each of ``blocks`` ``up`` and ``down``.

    Example:
        >>> mesh = DeclaredMesh(ranks=4, options={"size": 2}, plan=lambda prefix: {"plan": {f"{prefix}inp": "columns"}})
        >>> mesh.options_for("net.")
        {'size': 2, 'plan': {'net.inp': 'columns'}}
    """

    ranks: int
    options: Mapping[str, Any] = field(default_factory=dict)
    plan: Callable[[str], Mapping[str, Any]] | None = None

    def options_for(self, prefix: str) -> dict[str, Any]:
        """The strategy's options for a net whose names begin with ``prefix``."""
        return {**self.options, **(self.plan(prefix) if self.plan is not None else {})}


#: What every strategy has: one axis, over which it shards.
LINES: Mapping[str, DeclaredMesh] = {"shard 2": DeclaredMesh(ranks=2), "shard 4": DeclaredMesh(ranks=4)}
