"""Bad input: each case raises before anything is trained, and says what to type next."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Generic, TypeVar
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffload, MixedPrecision, ShardingStrategy

import fsdp_core
from fsdp_core.errors import ShardingError, UnsupportedCapabilityError
from fsdp_core.plugins.strategy_info import FrontEnd
from fsdp_core.testing import RankPool, oracle
from fsdp_core.testing.refusals import assert_says, refusal
from fsdp_core.testing.suite.refusals.bad_options import BOTH, assert_refused_at_once, unfit_options
from fsdp_core.testing.training import new_fabric

#: Options of FSDP1, and what to write for them here.
FSDP1: dict[str, tuple[Any, list[str]]] = {
    "sharding_strategy": ("SHARD_GRAD_OP", ["'fsdp2'", "reshard_after_forward"]),
    "mixed_precision": (None, ["'fsdp2'", "mp_policy"]),
}

#: What others' options may say, since it is what happens here.
TAKEN: list[dict[str, Any]] = [
    {"sharding_strategy": "FULL_SHARD", "use_orig_params": True, "sync_module_states": True, "limit_all_gathers": True},
    {"sharding_strategy": ShardingStrategy.FULL_SHARD},
    {"data_parallel_size": "auto", "tensor_parallel_size": 1},
    # NeMo's defaults
    {"offload_policy": None, "custom_tp_plan": None, "use_hf_tp_plan": True, "ckpt_save_optimizer": True},
    {"ckpt_load_optimizer": True, "ckpt_load_strict": None, "tp_shard_plan": None},
]

MISUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "FSDP1's CPUOffload": (
        {"cpu_offload": CPUOffload(offload_params=True)},
        ["cpu_offload=CPUOffload", "cpu_offload=True", "'fsdp_native'"],
    ),
    "FSDP1's MixedPrecision": (
        {"mp_policy": MixedPrecision(param_dtype=torch.bfloat16)},
        ["mp_policy=MixedPrecision", "MixedPrecisionPolicy"],
    ),
    "mp_policy string": ({"mp_policy": "bf16"}, ["mp_policy='bf16'", "precision="]),
    "backend of process groups": ({"process_group_backend": "glooo"}, ["process_group_backend='glooo'", "'gloo'"]),
    "reshard string": ({"reshard_after_forward": "yes"}, ["reshard_after_forward='yes'", "True", "None"]),
    "reshard size": ({"reshard_after_forward": 3}, ["reshard_after_forward=3", "divide"]),
}


def misused(tmp: str, front_end: FrontEnd, case: str) -> tuple[str, bool]:
    return unfit_options("fsdp2", tmp, front_end, MISUSED[case][0], UnsupportedCapabilityError)


@BOTH
@pytest.mark.parametrize("option", ["backend", "strategy_name", "runtime"])
def test_argument_that_the_package_passes_itself(front_end: FrontEnd, option: str) -> None:
    words = [f"no option {option!r}", *(["Did you mean 'process_group_backend'?"] * (option == "backend"))]
    assert_refused_at_once(fsdp_core.resolve("fsdp2", front_end), {option: "nccl"}, [*words, "fsdp describe fsdp2"])


@BOTH
@pytest.mark.parametrize("option", FSDP1)
def test_option_of_fsdp1(front_end: FrontEnd, option: str) -> None:
    value, words = FSDP1[option]
    assert_refused_at_once(fsdp_core.resolve("fsdp2", front_end), {option: value}, [option, *words])


@BOTH
@pytest.mark.parametrize("options", TAKEN)
def test_option_that_says_what_always_happens(front_end: FrontEnd, options: dict[str, Any]) -> None:
    fsdp_core.resolve("fsdp2", front_end)(**options)


@BOTH
def test_sizes_are_taken_by_position(front_end: FrontEnd) -> None:
    """As Lightning's and NeMo's strategies have them; with a plan, the model's own, where layers are divided."""
    strategy = fsdp_core.resolve("fsdp2", front_end)
    backend = strategy(1, 2, use_hf_tp_plan=True).backend
    assert (backend.options.sizes["data_parallel_size"], backend.options.sizes["tensor_parallel_size"]) == (1, 2)
    assert backend.options.tp_plan == "auto"
    assert strategy("auto", "auto", use_hf_tp_plan=True).backend.options.tp_plan is None
    told = refusal(UnsupportedCapabilityError, lambda: strategy(1, 2, True))
    assert_says(told, "1, 2, True by position", "data_parallel_size=1, tensor_parallel_size=2")
    told = refusal(UnsupportedCapabilityError, lambda: strategy(1, data_parallel_size=2))
    assert_says(told, "data_parallel_size is given by keyword, too", "data_parallel_size=1")


T = TypeVar("T")


class GenericFirst(Generic[T], nn.Linear):
    """Python can't change the class of an instance to what ``fully_shard`` makes of it."""


class Derived(GenericFirst[int]):
    pass


def refused_unit(unit: type[nn.Linear]) -> str:
    fabric = new_fabric("fsdp2", 1, {"auto_wrap_policy": {unit}})
    return refusal(ShardingError, lambda: fabric.setup(nn.Sequential(unit(2, 2), nn.Linear(2, 2))))


@pytest.mark.parametrize("unit", [GenericFirst, Derived])
def test_bases_that_can_not_be_sharded(ranks: RankPool, unit: type[nn.Linear]) -> None:
    (told,) = ranks.run(1, refused_unit, unit)
    assert_says(told, f"{unit.__name__} can't be sharded", "class GenericFirst(Linear, Generic)", "fsdp_native")


@BOTH
def test_options_are_refused_together(front_end: FrontEnd) -> None:
    options = {
        "sharding_strategy": "NO_SHARD",
        "use_orig_params": True,
        "custom_tp_plan": print,
        "sequence_parallel": True,
        "reshard_after_foward": True,
    }
    told = refusal(UnsupportedCapabilityError, lambda: fsdp_core.resolve("fsdp2", front_end)(**options))
    assert_says(told, "no options 'sharding_strategy', 'custom_tp_plan', 'sequence_parallel', 'reshard_after_foward'")
    assert_says(told, "\ncustom_tp_plan: Write tp_plan={pattern: style}", "\nsequence_parallel: Give the norms")
    assert_says(told, "\nreshard_after_foward: Did you mean 'reshard_after_forward'?")
    assert "use_orig_params" not in told


@BOTH
@pytest.mark.parametrize("case", MISUSED)
def test_option_of_fsdp2_that_is_misused(ranks: RankPool, tmp_path: Path, front_end: FrontEnd, case: str) -> None:
    ((told, as_it_was),) = ranks.run(1, misused, str(tmp_path), front_end, case)
    assert_says(told, *MISUSED[case][1])
    assert as_it_was


def hooked() -> str:
    net: Any = oracle.new_net()
    net.blocks[0].up.weight.register_hook(lambda grad: grad * 0)
    return refusal(ShardingError, lambda: new_fabric("fsdp2").setup(net))


def test_gradient_hook_is_told_where_to_go(ranks: RankPool) -> None:
    for told in ranks.run(2, hooked):
        assert_says(told, "register_post_accumulate_grad_hook")


#: What rank 1 is given, besides what all are given, and what is said of it. A version is that of torch.
ALONE: dict[str, tuple[dict[str, Any], list[str]]] = {
    "precision": ({"precision": "bf16-mixed"}, ["its precision is 'bf16-mixed', and rank 0's is '32-true'"]),
    "option": ({"options": {"cpu_offload": True}}, ["option 'cpu_offload' is True, and rank 0's is False"]),
    "policy": ({"options": {"auto_wrap_policy": {torch.nn.LayerNorm}}}, ["'auto_wrap_policy'", "{LayerNorm}"]),
    "units": ({"mark": True}, ["its units of sharding is blocks.1, and rank 0's is blocks.0, blocks.1, blocks.2"]),
    "version": ({"version": "2.99.0"}, ["its version of torch is 2.99.0, and rank 0's is 2."]),
}


def alone(case: str) -> str:
    given = ALONE[case][0] if os.environ["RANK"] == "1" else {}
    net = oracle.new_net()
    if "mark" in given:
        fsdp_core.wrap(net.blocks[1])
    fabric = new_fabric("fsdp2", 2, given.get("options"), given.get("precision"))
    with mock.patch.object(torch, "__version__", given.get("version", torch.__version__)):
        return refusal(ShardingError, lambda: fabric.setup(net))


@pytest.mark.parametrize("case", ALONE)
def test_rank_that_is_set_up_otherwise(ranks: RankPool, case: str) -> None:
    for told in ranks.run(2, alone, case):
        assert_says(told, "rank 1 has not set up the same Net as rank 0", *ALONE[case][1])
