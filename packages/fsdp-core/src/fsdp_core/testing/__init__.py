"""What a backend's tests need: ranks to run on, an unsharded oracle, and tests to inherit.

``suite`` contains the tests that every sharded strategy must pass. They train in a ``loop.Loop`` or with the functions
of ``training``, compare with ``oracle``, and look at shards by ``state`` and at errors by ``refusals``. ``pairs`` and
``steps`` draw what is trained. ``launching`` starts ranks, ``measuring`` measures what they use, ``reporting`` and
``pytest_plugin`` choose and report clauses, and ``loopback`` is a backend for the kit's own tests. This package itself
imports neither torch nor pytest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdp_core.lazy_names import lazy_names

if TYPE_CHECKING:
    from fsdp_core.testing.launching.calls import Answer, Failure, RankError, answer_of
    from fsdp_core.testing.launching.forking import StartMethod
    from fsdp_core.testing.launching.one_process_ranks import OneProcessRanks
    from fsdp_core.testing.launching.process_ranks import RankKind, RankPool, Ranks
    from fsdp_core.testing.launching.rank_context import RankContext, set_rank_context
    from fsdp_core.testing.state import full_state
    from fsdp_core.testing.training import new_fabric

__all__ = [
    "Answer",
    "Failure",
    "OneProcessRanks",
    "RankContext",
    "RankError",
    "RankKind",
    "RankPool",
    "Ranks",
    "StartMethod",
    "answer_of",
    "full_state",
    "new_fabric",
    "set_rank_context",
]

_HOMES = {
    "Answer": "fsdp_core.testing.launching.calls",
    "Failure": "fsdp_core.testing.launching.calls",
    "RankContext": "fsdp_core.testing.launching.rank_context",
    "OneProcessRanks": "fsdp_core.testing.launching.one_process_ranks",
    "RankError": "fsdp_core.testing.launching.calls",
    "RankKind": "fsdp_core.testing.launching.process_ranks",
    "RankPool": "fsdp_core.testing.launching.process_ranks",
    "Ranks": "fsdp_core.testing.launching.process_ranks",
    "StartMethod": "fsdp_core.testing.launching.forking",
    "answer_of": "fsdp_core.testing.launching.calls",
    "full_state": "fsdp_core.testing.state",
    "new_fabric": "fsdp_core.testing.training",
    "set_rank_context": "fsdp_core.testing.launching.rank_context",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
