"""What a backend's tests need: ranks to run on."""

from fsdp_core.testing.ranks import RankError, RankPool

__all__ = ["RankError", "RankPool"]
