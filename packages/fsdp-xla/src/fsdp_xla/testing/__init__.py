"""Support for multi-rank runs on XLA's CPU client, which was not designed for them. Never active on a TPU.

The conformance suite runs on :class:`ThreadRanks` and :class:`SPMDRanks`.
"""

from fsdp_xla.testing.ranks import SPMDRanks, ThreadRanks

__all__ = ["SPMDRanks", "ThreadRanks"]
