"""The suite of fsdp-core, as every backend's package runs it."""

from __future__ import annotations

from torch.distributed.fsdp import FSDPModule

from declared_meshes import MESHES
from fsdp_core.testing.suite import PresetSuite, StrategySuite


class TestFSDP2(StrategySuite):
    strategy = "fsdp2"
    meshes = MESHES
    refused_with = None if hasattr(FSDPModule, "reset_iter_state") else "or upgrade to torch"  # before torch 2.13


class TestFSDP2WithOffload(PresetSuite):
    strategy = "fsdp2_cpu_offload"
    preset_of = "fsdp2"
