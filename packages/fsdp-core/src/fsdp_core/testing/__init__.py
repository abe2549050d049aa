"""What a backend's tests need: ranks to run on, an unsharded oracle, and tests to inherit.

``fsdp_core.testing.suite`` holds the tests that every sharded strategy passes, ``oracle`` their models, data and
tolerances, ``training`` what runs on ranks under Trainer and Fabric, ``state`` what ranks hold, and ``pytest_plugin``
what pytest knows of all that. This package itself imports neither torch nor pytest.
"""

from fsdp_core.testing.ranks import RankError, RankPool, Ranks

__all__ = ["RankError", "RankPool", "Ranks"]
