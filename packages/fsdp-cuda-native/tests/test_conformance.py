"""The suite of fsdp-core, as every backend's package runs it."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest

from fsdp_core import Capability
from fsdp_core.testing import Ranks, oracle
from fsdp_core.testing.meshes import LINES, DeclaredMesh
from fsdp_core.testing.pairs.dimensions import of_option
from fsdp_core.testing.suite import PresetSuite, StrategySuite
from fsdp_core.testing.suite.numerics.pairs import assert_equals_plain
from fsdp_core.testing.training import accelerator

# FSDP1's own option for what is reshard_after_forward elsewhere
ASKS = {Capability.RESHARD_AFTER_FORWARD: {"sharding_strategy": "SHARD_GRAD_OP"}}


_FLAT = (
    "FSDP1 steps the parameters of a unit as one flat parameter: what no rank has used has a gradient of zeros, on "
    "which weight decay and momentum act"
)


class TestNative(StrategySuite):
    strategy = "fsdp_native"
    asks: ClassVar = ASKS
    meshes: ClassVar = {
        **LINES,
        "replicate 2 x shard 2": DeclaredMesh(
            ranks=4, options={"sharding_strategy": "HYBRID_SHARD", "device_mesh": (2, 2)}
        ),
    }
    own_dimensions: ClassVar = (
        of_option("sharding_strategy", "SHARD_GRAD_OP", "NO_SHARD"),
        of_option("use_orig_params", False),
        of_option("backward_prefetch", "BACKWARD_POST"),
    )
    own_step_options: ClassVar = {
        "replicate 2 x shard 2": meshes["replicate 2 x shard 2"],
        "NO_SHARD": DeclaredMesh(ranks=2, options={"sharding_strategy": "NO_SHARD"}),
        "use_orig_params=False": DeclaredMesh(
            ranks=2, options={"use_orig_params": False, "auto_wrap_policy": oracle.is_layer}
        ),
    }
    refused_steps: ClassVar = {
        # FSDP1 would not reduce what a call in the backward pass after a step computes
        "NO_SHARD": ("cached loss beside another", "function that runs the net in its backward pass"),
        # of the root's flat parameter, a part
        "use_orig_params=False": ("parameters frozen before a backward pass that is forgotten",),
        # on an accelerator: the shards are in host memory
        "cpu_offload": ("module converted to the device that it is on",),
    }
    own_rules: ClassVar = (
        {"mesh": "replicate 2 x shard 2", "sharding_strategy": ("SHARD_GRAD_OP", "NO_SHARD")},
        # one flat parameter can't be frozen in part, nor be in two param groups or optimizers
        {"use_orig_params": "False", "trained": "not a layer"},
        {"use_orig_params": "False", "trained": "not a block", "wrap": "the root"},
        {"use_orig_params": "False", "optimizer": "adamw"},
        {"use_orig_params": "False", "optimizer": "two", "wrap": "the root"},
        # torch.compile can't trace gathered parameters beside reduced gradients that are kept: docs/strategies
        {"compile": "blocks", "accumulate": ("2", "3"), "wrap": ("the root", "layers")},
    )
    refused_pairs: ClassVar = (
        {
            "sharding_strategy": "NO_SHARD",
            "precision": ("bf16-mixed", "16-mixed"),
            "accumulate": ("2", "3"),
            "sync_each_batch": "left out",
            "front_end": ("trainer", "fabric"),
            "use_orig_params": "left out",
        },
    )
    not_in_pairs: ClassVar = {"trained=in some steps": _FLAT}
    expected_failures: ClassVar = {
        "test_ranks_use_different_parameters[unused on all ranks-each step]": _FLAT,
        "test_ranks_use_different_parameters[unused on all ranks-accumulated]": _FLAT,
        "test_ranks_use_different_parameters[nothing used on one rank-each step]": _FLAT,
        "test_ranks_use_different_parameters[a layer called twice-each step]": _FLAT,
        "test_ranks_use_different_parameters[two layers skipped on one rank-each step]": _FLAT,
        "test_ranks_use_different_parameters[a frozen layer skipped on one rank-each step]": _FLAT,
        "test_gradients_are_added_in_full_precision[over micro-batches]": (
            "FSDP1 adds up what it has not reduced in the dtype that it computes in; sync_each_batch=True adds in fp32"
        ),
    }


@pytest.mark.skipif(accelerator() == "cpu", reason="there is nothing to offload from")
def test_offloaded_gradients_of_units_gathered_in_bf16(ranks: Ranks, tmp_path: Path) -> None:
    """A reduced gradient in fp32 is added to by the next pass, whose unit is whole and in bf16."""
    labels = {"sharding_strategy": "NO_SHARD", "cpu_offload": "True", "precision": "bf16-mixed"}
    more = {"front_end": "fabric", "accumulate": "2", "sync_each_batch": "True"}
    assert_equals_plain(ranks, tmp_path, TestNative, **labels, **more)


class TestNativeWithOffload(PresetSuite):
    strategy = "fsdp_native_full_shard_offload"
    preset_of = "fsdp_native"
    asks: ClassVar = ASKS


class TestFairscalesName(PresetSuite):
    strategy = "ddp_fully_sharded"
    preset_of = "fsdp_native"
