"""The suite of fsdp-core, as every backend's package runs it."""

from __future__ import annotations

from typing import ClassVar

from torch.distributed.fsdp import FSDPModule

from declared_meshes import MESHES, MESHES_OF_EXPERTS
from fsdp_core.testing.meshes import DeclaredMesh
from fsdp_core.testing.suite import PresetSuite, StrategySuite


class TestFSDP2(StrategySuite):
    strategy = "fsdp2"
    meshes: ClassVar = {**MESHES, **MESHES_OF_EXPERTS}
    own_step_options: ClassVar = {
        "replicate 2 x shard 2": MESHES["replicate 2 x shard 2"],
        "resharded over 2 of 4 ranks": DeclaredMesh(ranks=4, options={"reshard_after_forward": 2}),
    }
    refused_steps: ClassVar = {
        front: () if hasattr(FSDPModule, "reset_iter_state") else ("backward pass that an exception ends, and another",)
        for front in ("fabric", "automatic", "accumulated", "by hand", "by hand, with raw backward passes")
    } | {"cpu_offload": ("module converted to the device that it is on",)}  # on an accelerator: it is in host memory
    refused_with = None if hasattr(FSDPModule, "reset_iter_state") else "or upgrade to torch"  # before torch 2.13


class TestFSDP2WithOffload(PresetSuite):
    strategy = "fsdp2_cpu_offload"
    preset_of = "fsdp2"
