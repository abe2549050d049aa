"""What multi-rank runs need on XLA's CPU client, which was not made for them. Never active on a TPU.

:class:`ThreadRanks` and :class:`SPMDRanks` are what the conformance suite runs on.
"""

from fsdp_xla.testing.ranks import SPMDRanks, ThreadRanks

__all__ = ["SPMDRanks", "ThreadRanks"]
