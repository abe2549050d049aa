"""The strategies for Fabric, under the same names as those for the Trainer in :mod:`fsdp_xla`."""

from __future__ import annotations

from fsdp_xla.classic.fabric import XLAFSDPStrategy
from fsdp_xla.spmd.fabric import XLASPMDStrategy

__all__ = ["XLAFSDPStrategy", "XLASPMDStrategy"]
