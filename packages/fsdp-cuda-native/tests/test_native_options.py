"""Options of FSDP1's strategies: which of them can't be, what is said of these, and what the others do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import BackboneFinetuning
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import wrap as torch_wrap

import fsdp_core
import fsdp_cuda_native
from fsdp_core.errors import OptimizerMismatchError, ShardingError, UnsupportedCapabilityError
from fsdp_core.initialization.wrap import mark_by_torch_wrap
from fsdp_core.plugins.strategy_info import FrontEnd
from fsdp_core.testing import RankPool, oracle, short_runs
from fsdp_core.testing.oracle import FP32_TOLERANCE, HALF_TOLERANCE, Block, train_plain
from fsdp_core.testing.refusals import assert_says, refusal
from fsdp_core.testing.short_runs import assert_fits_as_plain, run_steps
from fsdp_core.testing.state import sharded_by
from fsdp_core.testing.suite.numerics.parity import assert_same
from fsdp_core.testing.suite.numerics.precision import assert_parts_equal, seen_by_a_block, trained_by_parts
from fsdp_core.testing.suite.refusals.bad_options import BOTH, unfit_options
from fsdp_core.testing.training import Lit, fabric_fit, fit, loader, means, new_fabric, new_trainer
from fsdp_cuda_native import DDPFullyShardedStrategy
from fsdp_cuda_native.plugin import why_not_here
from fsdp_cuda_native.unit_checks import check_not_wrapped, unit_options
from native_runs import FLAT, WHOLE, show_parameter

NAMES = ["fsdp_native", "fsdp_native_full_shard_offload", "ddp_fully_sharded"]
BF16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=True)


class Group:
    """Stands for a process group, which can't be made where tests are collected."""

    def __repr__(self) -> str:
        return "group"


# -- refused by the constructor ----------------------------------------------------------------------------------------

#: Options, and what is said of them.
REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    # of the other backend
    (
        {"reshard_after_forward": False},
        ["'fsdp_native'", "'reshard_after_forward'", "sharding_strategy='FULL_SHARD'", "'SHARD_GRAD_OP'"],
    ),
    ({"mp_policy": MixedPrecisionPolicy()}, ["'mp_policy'", "precision='bf16-mixed'", "mixed_precision"]),
    (
        {"mixed_precision": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
        ["mixed_precision=MixedPrecisionPolicy(", "precision='bf16-mixed'", "fsdp.MixedPrecision", "'fsdp2'"],
    ),
    (
        {"cpu_offload": CPUOffloadPolicy()},
        ["cpu_offload=CPUOffloadPolicy(", "cpu_offload=True", "fsdp.CPUOffload", "'fsdp2'"],
    ),
    ({"tensor_parallel_size": 2}, ["'tensor_parallel_size'", "no tensor parallelism"]),
    ({"context_parallel_size": 2}, ["'context_parallel_size'", "no context parallelism", "strategy='fsdp2'"]),
    ({"flatten_parameters": False}, ["'flatten_parameters'", "'ddp_fully_sharded'"]),
    # two spellings
    (
        {"activation_checkpointing": Block, "activation_checkpointing_policy": {Block}},
        ["activation_checkpointing and activation_checkpointing_policy", "two spellings", "{MyBlock} alone"],
    ),
    (
        {"ignored_modules": [nn.Linear(2, 2)], "ignored_states": [nn.Parameter(torch.ones(2))]},
        ["ignored_modules and ignored_states", "an old and a new spelling", "Write ignored_states alone"],
    ),
    ({"process_group": Group(), "device_mesh": (2,)}, ["process_group and device_mesh", "Write device_mesh alone"]),
    # of torch, but not for users to decide
    ({"device_id": 0}, ["'device_id'", "Leave it out", "devices"]),
    ({"sync_module_states": False}, ["'sync_module_states'", "Leave it out", "rank 0's values always win"]),
    # of nobody
    ({"shardng_strategy": "NO_SHARD"}, ["'shardng_strategy'", "Did you mean 'sharding_strategy'?", "fsdp describe"]),
    ({"use_orig_param": True}, ["'use_orig_param'", "Did you mean 'use_orig_params'?"]),
    ({"cpu_ofload": True}, ["'cpu_ofload'", "Did you mean 'cpu_offload'?"]),
    # values
    ({"sharding_strategy": "FULL"}, ["sharding_strategy='FULL'", "'FULL_SHARD', 'SHARD_GRAD_OP', 'NO_SHARD'"]),
    ({"sharding_strategy": None}, ["sharding_strategy=None", "'FULL_SHARD'", "'HYBRID_SHARD_ZERO2'"]),
    ({"backward_prefetch": "PRE"}, ["backward_prefetch='PRE'", "'BACKWARD_PRE', 'BACKWARD_POST'"]),
    ({"cpu_offload": "yes"}, ["cpu_offload='yes'", "cpu_offload=True"]),
    ({"mixed_precision": "bf16"}, ["mixed_precision='bf16'", "precision='bf16-mixed'"]),
    ({"activation_checkpointing": "Block"}, ["activation_checkpointing='Block'", "=MyBlock, a list of classes"]),
    ({"activation_checkpointing": [Block, "Block"]}, ["activation_checkpointing=[", "=MyBlock, a list of classes"]),
    ({"activation_checkpointing": []}, ["activation_checkpointing=[]", "=MyBlock, a list of classes"]),
    ({"activation_checkpointing": Block()}, ["activation_checkpointing=Block(", "=MyBlock, a list of classes"]),
    ({"activation_checkpointing": int}, ["is not a class of modules", "=MyBlock, a list of classes"]),
    ({"ignored_modules": ["head"]}, ["ignored_modules=['head'] does not name", "ignored_modules=[model.head]"]),
    ({"ignored_modules": "head"}, ["ignored_modules='head' does not name"]),
    ({"ignored_modules": [nn.Linear]}, ["does not name what is ignored"]),
    ({"ignored_states": ["head"]}, ["ignored_states=['head'] does not name", "parameters or modules of it"]),
    ({"device_mesh": 4}, ["device_mesh=4 is not a mesh", "device_mesh=(2, 4)"]),
    ({"device_mesh": "2x2"}, ["device_mesh='2x2' is not a mesh", "device_mesh=(2, 4)"]),
    ({"process_group_backend": "glooo"}, ["process_group_backend='glooo'", "'gloo'", "'cpu:gloo,cuda:nccl'"]),
    ({"process_group_backend": "cpu:glooo,cuda:nccl"}, ["process_group_backend='cpu:glooo,cuda:nccl'", "leave it out"]),
    ({"process_group_backend": 5}, ["process_group_backend=5 is no backend of torch.distributed"]),
    ({"process_group_backend": ""}, ["process_group_backend='' is no backend of torch.distributed"]),
    # what FSDP1 can't do
    ({"use_orig_params": "no"}, ["use_orig_params='no' is neither True nor False", "it is True by default"]),
    ({"limit_all_gathers": 1}, ["limit_all_gathers=1 is neither True nor False"]),
    ({"sync_each_batch": "no"}, ["sync_each_batch='no'", "neither True nor False"]),
]


@BOTH
@pytest.mark.parametrize("name", ["fsdp_native", "ddp_fully_sharded"])
def test_every_option_is_a_keyword_of_the_signature(front_end: FrontEnd, name: str) -> None:
    """Where LightningCLI, editors and Sphinx look."""
    foreign = "precision" if front_end == "trainer" else "precision_plugin"
    listed = {option.name: option.default for option in fsdp_core.describe(name).options if option.name != foreign}
    made: Any = fsdp_core.resolve(name, front_end)
    assert {option.name: option.default for option in made.__signature__.parameters.values()} == listed


@BOTH
@pytest.mark.parametrize("name", ["fsdp_native", "ddp_fully_sharded"])
def test_options_that_say_what_always_happens(front_end: FrontEnd, name: str) -> None:
    fsdp_core.resolve(name, front_end)(sync_module_states=True, flatten_parameters=True)


@BOTH
def test_options_that_are_refused_are_told_together(front_end: FrontEnd) -> None:
    made = fsdp_core.resolve("ddp_fully_sharded", front_end)
    refused = {"bucket_cap_mb": 200, "move_grads_to_cpu": True, "sync_module_states": False, "cpu_ofload": True}
    message = refusal(UnsupportedCapabilityError, lambda: made(**refused))
    assert_says(message, "bucket_cap_mb=200", "move_grads_to_cpu=True", "sync_module_states:", "cpu_ofload:")


@pytest.mark.parametrize(
    ("front_end", "options", "words"),
    [
        ("trainer", {"precision": "bf16"}, ["'precision'", "precision= to the Trainer", "precision_plugin"]),
        ("fabric", {"precision_plugin": None}, ["'precision_plugin'", "Under Fabric it is called precision"]),
    ],
)
def test_option_of_the_other_front_end(front_end: FrontEnd, options: dict[str, Any], words: list[str]) -> None:
    made = fsdp_core.resolve("fsdp_native", front_end)
    assert_says(refusal(UnsupportedCapabilityError, lambda: made(**options)), *words)


#: Options of fairscale's strategy, and what is said of them.
REFUSED_OF_FAIRSCALE: list[tuple[dict[str, Any], list[str]]] = [
    (
        {"reshard_after_forward": False, "sharding_strategy": "FULL_SHARD"},
        ["reshard_after_forward and sharding_strategy", "old and a new spelling", "Write sharding_strategy alone"],
    ),
    (
        {"min_num_params": 1e8, "auto_wrap_policy": {Block}},
        ["min_num_params and auto_wrap_policy", "old and a new spelling", "Write auto_wrap_policy alone"],
    ),
    (
        {"compute_dtype": torch.float16, "mixed_precision": BF16},
        ["compute_dtype and mixed_precision", "old and a new spelling", "Write mixed_precision alone"],
    ),
    (
        {"reshard_after_forward": True, "sharding_strategy": "NO_SHARD"},
        ["reshard_after_forward and sharding_strategy", "Write sharding_strategy alone"],
    ),
    ({"fp32_reduce_scatter": "no"}, ["fp32_reduce_scatter='no' is neither True nor False"]),
    *(
        ({"min_num_params": value}, [f"min_num_params={value!r} is not a number of parameters", "1e8"])
        for value in ("many", -5, 0, True, float("nan"), float("inf"), {Block})
    ),
    *(
        ({"compute_dtype": value}, [f"compute_dtype={value!r} is no floating-point dtype", "torch.bfloat16"])
        for value in ("bf16", 16, torch.int8)
    ),
    ({"flatten_parameters": False}, ["flatten_parameters=False", "only fairscale had", "strategy='fsdp2'"]),
    ({"move_grads_to_cpu": True}, ["move_grads_to_cpu=True", "only fairscale had", "cpu_offload=True"]),
    ({"move_grads_to_cpu": False}, ["move_grads_to_cpu=False", "only fairscale had", "leave it out"]),
    ({"bucket_cap_mb": 200}, ["bucket_cap_mb=200", "only fairscale had", "Leave it out"]),
    ({"state_dict_to_cpu": False}, ["state_dict_to_cpu=False", "only fairscale had", "Leave it out"]),
    (
        {"reshard_after_foward": False},
        ["'ddp_fully_sharded'", "'reshard_after_foward'", "Did you mean 'reshard_after_forward'?"],
    ),
    ({"shardng_strategy": "NO_SHARD"}, ["'ddp_fully_sharded'", "Did you mean 'sharding_strategy'?"]),
    ({"cpu_ofload": True}, ["'ddp_fully_sharded'", "Did you mean 'cpu_offload'?", "auto_wrap_policy"]),
    (
        {"activation_checkpointing": Block, "activation_checkpointing_policy": {Block}},
        ["two spellings", "activation_checkpointing_policy={MyBlock} alone"],
    ),
]


@BOTH
@pytest.mark.parametrize(
    ("name", "options", "words"),
    [*(("fsdp_native", *case) for case in REFUSED), *(("ddp_fully_sharded", *case) for case in REFUSED_OF_FAIRSCALE)],
    ids=show_parameter,
)
def test_option_that_is_refused(front_end: FrontEnd, name: str, options: dict[str, Any], words: list[str]) -> None:
    made = fsdp_core.resolve(name, front_end)
    assert_says(refusal(UnsupportedCapabilityError, lambda: made(**options)), *words)


@BOTH
def test_no_offload_is_what_none_means(front_end: FrontEnd) -> None:
    """As it is the default of other strategies, which code may pass on."""
    for value in (None, False, CPUOffload(offload_params=False)):
        assert fsdp_core.resolve("fsdp_native", front_end)(cpu_offload=value).backend.options.offloads is False


def test_options_of_a_unit() -> None:
    """What torch's ``wrap`` may set of one module, and what only the strategy can."""
    with mark_by_torch_wrap():
        prefetching = torch_wrap(nn.Linear(2, 2), backward_prefetch="backward_post")
        net = nn.Sequential(torch_wrap(nn.Linear(2, 2), sharding_strategy="NO_SHARD"))
        halves = torch_wrap(nn.Linear(2, 2), mixed_precision=MixedPrecisionPolicy())
    assert unit_options("block", prefetching) == {"backward_prefetch": BackwardPrefetch.BACKWARD_POST}
    message = refusal(UnsupportedCapabilityError, lambda: check_not_wrapped(net))
    assert_says(
        message, "wrap(0, sharding_strategy=...)", "for the whole model", "to the strategy", "backward_prefetch"
    )
    message = refusal(UnsupportedCapabilityError, lambda: unit_options("block", halves))
    assert_says(message, "is not known to 'fsdp_native'", "torch.distributed.fsdp.MixedPrecision", "belongs to 'fsdp2'")


def set_up_with_own_options() -> str:
    """What a rank is told where ranks gather the first layer in different dtypes."""
    fabric = new_fabric("fsdp_native", 2)
    with mark_by_torch_wrap():
        first = torch_wrap(nn.Linear(2, 2), mixed_precision=BF16 if fabric.global_rank else MixedPrecision())
    return refusal(ShardingError, lambda: fabric.setup_module(nn.Sequential(first, nn.Linear(2, 2))))


def test_options_of_a_unit_that_differ_between_ranks(ranks: RankPool) -> None:
    for message in ranks.run(2, set_up_with_own_options):
        assert_says(message, "rank 1 has not set up the same Sequential", "wrap() options of '0'", "torch.bfloat16")


def set_up_beside_script() -> tuple[int, ...]:
    net = nn.Sequential(nn.Linear(3, 2), torch.jit.script(nn.ReLU()))
    return tuple(new_fabric("fsdp_native", 1).setup_module(net)(torch.ones(4, 3)).shape)


def test_a_script_without_parameters_stays_as_it_is(ranks: RankPool) -> None:
    assert ranks.run(1, set_up_beside_script) == [(4, 2)]


class Unaligned(nn.Module):
    """Has parameters that each end within 16 bytes, and a unit of its own."""

    def __init__(self) -> None:
        super().__init__()
        with mark_by_torch_wrap():
            self.layers = nn.ModuleList([torch_wrap(nn.Linear(5, 3)), nn.Linear(5, 7), nn.Linear(3, 5)])


def planned_and_held(precision: str, options: dict[str, Any]) -> tuple[int | None, int]:
    fabric = new_fabric("fsdp_native", 3, options, precision=precision)
    net = Unaligned()
    planned = fabric.strategy.backend.plan(net).local_nbytes
    fabric.setup_module(net)
    return planned, sharded_by(fabric.strategy).bytes_held()


@pytest.mark.parametrize(
    ("precision", "options"),
    [
        ("32-true", {}),
        ("bf16-mixed", {}),
        ("bf16-mixed", {"use_orig_params": False}),
        ("32-true", {"mixed_precision": BF16}),
    ],
)
def test_planned_sizes_are_aligned_as_what_is_gathered(
    ranks: RankPool, precision: str, options: dict[str, Any]
) -> None:
    for planned, held in ranks.run(3, planned_and_held, precision, options):
        assert planned == held


def already_wrapped() -> tuple[str, str]:
    dist.init_process_group("gloo")
    inner = FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu"))
    outer = nn.Sequential(inner)
    return refusal(ShardingError, lambda: check_not_wrapped(outer)), refusal(
        ShardingError, lambda: check_not_wrapped(inner)
    )


def test_a_module_that_is_sharded_already(ranks: RankPool) -> None:
    ((part, root),) = ranks.run(1, already_wrapped)
    assert_says(part, "Sequential is already sharded: '0' is a FullyShardedDataParallel", "fsdp_core.wrap(module)")
    assert_says(root, "already sharded: 'the root' is", "auto_wrap_policy={MyBlock}")


def test_a_platform_without_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_not_here() is None
    monkeypatch.setattr(sys, "platform", "emscripten")
    assert_says(str(why_not_here()), "torch has no gloo on the platform 'emscripten'", "use Linux, macOS or Windows")


def test_what_the_package_offers() -> None:
    """Each name of it is found when it is asked for, and kept."""
    kept = {name: vars(fsdp_cuda_native).pop(name, None) for name in fsdp_cuda_native.__all__}
    try:
        assert set(fsdp_cuda_native.__all__) <= set(dir(fsdp_cuda_native))
        assert fsdp_cuda_native.fabric is sys.modules["fsdp_cuda_native.fabric"]
        assert fsdp_cuda_native.DDPFullyShardedStrategy is DDPFullyShardedStrategy
        assert fsdp_cuda_native.__version__ == version("fsdp-cuda-native")
        assert vars(fsdp_cuda_native).keys() >= {"fabric", "DDPFullyShardedStrategy", "__version__"}
        with pytest.raises(AttributeError, match="has no attribute 'FSDP3'"):
            fsdp_cuda_native.FSDP3  # noqa: B018
    finally:
        vars(fsdp_cuda_native).update({name: value for name, value in kept.items() if value is not None})


# -- refused when the ranks are known ----------------------------------------------------------------------------------


def own_group() -> Any:
    """Every rank in a group of one."""
    dist.init_process_group("gloo")
    return [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]


def smaller_mesh() -> Any:
    dist.init_process_group("gloo")
    return init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))["shard"]


HYBRID = {"sharding_strategy": "HYBRID_SHARD"}

#: Options that don't fit two ranks, made on each of them, and what is said.
UNFIT: dict[str, tuple[Callable[[], dict[str, Any]], list[str]]] = {
    "hybrid without a mesh": (
        lambda: HYBRID,
        ["'HYBRID_SHARD'", "which ranks to shard over", "device_mesh=", "(2, 1)", "process_group pair", "{MyBlock}"],
    ),
    "zero2 without a mesh": (
        lambda: {"sharding_strategy": ShardingStrategy._HYBRID_SHARD_ZERO2, "auto_wrap_policy": None},
        ["'HYBRID_SHARD_ZERO2'", "which ranks to shard over", "device_mesh="],
    ),
    "hybrid over one group": (
        lambda: {**HYBRID, "process_group": own_group()},
        ["is one group", "HYBRID_SHARD needs two", "process_group=(ranks to shard over", "device_mesh="],
    ),
    "hybrid over a pair of groups of one": (
        lambda: {**HYBRID, "process_group": (own_group(),) * 2},
        ["a group of 1, a group of 1", "2 ranks", "multiplying", "device_mesh="],
    ),
    "hybrid over groups with nothing to shard": (
        lambda: {**HYBRID, "process_group": (own_group(), dist.group.WORLD)},
        ["a group of 1, a group of 2", "HYBRID_SHARD shards", "first more than 1"],
    ),
    "hybrid over more ranks": (lambda: {**HYBRID, "device_mesh": (2, 2)}, ["(2, 2)", "2 ranks", "multiplying"]),
    "hybrid over fewer ranks": (lambda: {**HYBRID, "device_mesh": (1, 1)}, ["(1, 1)", "2 ranks", "multiplying"]),
    "hybrid over one axis": (lambda: {**HYBRID, "device_mesh": (2,)}, ["(2,)", "replicas", "multiplying"]),
    "hybrid over three axes": (lambda: {**HYBRID, "device_mesh": (1, 2, 1)}, ["(1, 2, 1)", "multiplying"]),
    "hybrid with nothing to shard": (
        lambda: {**HYBRID, "device_mesh": (2, 1)},
        ["device_mesh=(2, 1)", "one rank to each replica", "'NO_SHARD'", "strategy='ddp'"],
    ),
    "full shard over two axes": (
        lambda: {"device_mesh": (1, 2)},
        ["(1, 2) has 2 axes", "FULL_SHARD shards over one", "'HYBRID_SHARD'", "leave device_mesh out"],
    ),
    "full shard over more ranks": (lambda: {"device_mesh": (3,)}, ["(3,)", "2 ranks"]),
    "full shard over fewer ranks": (lambda: {"device_mesh": (1,)}, ["(1,)", "2 ranks"]),
    "full shard over a mesh of fewer ranks": (lambda: {"device_mesh": smaller_mesh()}, ["(1,)", "2 ranks"]),
    "full shard over groups of one": (
        lambda: {"process_group": own_group()},
        ["process_group", "all 2 ranks", "Leave process_group out"],
    ),
    "no shard over groups of one": (
        lambda: {"sharding_strategy": "NO_SHARD", "process_group": own_group()},
        ["process_group", "all 2 ranks", "Leave process_group out"],
    ),
    "full shard over a pair of groups": (
        lambda: {"process_group": (own_group(), dist.group.WORLD)},
        ["process_group", "FULL_SHARD", "all 2 ranks", "'HYBRID_SHARD'"],
    ),
}


def unfit(case: str) -> str:
    options = UNFIT[case][0]()
    net = oracle.new_net()
    return refusal(UnsupportedCapabilityError, lambda: new_fabric("fsdp_native", 2, options).setup(net))


@pytest.mark.parametrize("case", UNFIT)
def test_option_that_does_not_fit_the_ranks(ranks: RankPool, case: str) -> None:
    for message in ranks.run(2, unfit, case):
        assert_says(message, *UNFIT[case][1])


def on_uneven_hosts() -> str:
    """Of two hosts, the first has one rank more."""
    fabric = new_fabric("fsdp_native", 3, {"sharding_strategy": "HYBRID_SHARD", "auto_wrap_policy": {Block}})
    strategy: Any = fabric.strategy
    strategy.runtime.local_rank = dist.get_rank() % 2
    return refusal(UnsupportedCapabilityError, lambda: fabric.setup(oracle.new_net()))


def test_hosts_of_different_sizes(ranks: RankPool) -> None:
    for message in ranks.run(3, on_uneven_hosts):
        assert_says(message, "hosts have different numbers of ranks", "device_mesh=", "sharding_strategy='FULL_SHARD'")


def test_module_is_as_it_was_after_a_refusal(ranks: RankPool, tmp_path: Path) -> None:
    ((message, as_it_was),) = ranks.run(
        1, unfit_options, "fsdp_native", str(tmp_path), "trainer", HYBRID, UnsupportedCapabilityError
    )
    assert_says(message, "which ranks to shard over")
    assert as_it_was


class ByShape(Lit):
    """An optimizer that treats matrices otherwise than vectors."""

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.parameters() if p.ndim == 2 and p.requires_grad]
        return getattr(torch.optim, self.optimizer_name)(matrices, lr=0.05)


@pytest.mark.parametrize("optimizer", ["Adafactor", "Muon"])
def test_optimizer_that_looks_at_shapes(ranks: RankPool, tmp_path: Path, optimizer: str) -> None:
    """It trains as in one process: over shards on the owners of parameters, and where every rank holds them whole."""
    # Muon computes in bf16, where directions without a gradient get those of rounding errors
    tolerance = 1e-2 if optimizer == "Muon" else FP32_TOLERANCE
    new_module = partial(ByShape, optimizer)
    for world_size, options in ((2, {}), (2, WHOLE), (1, {})):
        assert_fits_as_plain(
            ranks, tmp_path, "fsdp_native", new_module, world_size=world_size, options=options, tolerance=tolerance
        )


def unfit_under_fabric(name: str) -> str:
    fabric = new_fabric("fsdp_native")
    net = oracle.new_net()
    make = getattr(torch.optim, name)
    return refusal(OptimizerMismatchError, lambda: fabric.setup(net, make(net.parameters())))


def test_optimizer_that_looks_at_all_parameters_under_fabric(ranks: RankPool) -> None:
    for message in ranks.run(2, unfit_under_fabric, "LBFGS"):
        assert_says(message, "LBFGS", "strategy='fsdp2'")


# -- parameters that are kept elsewhere --------------------------------------------------------------------------------


def of_flat_parameters(tmp: str) -> tuple[str, list[str], int]:
    """What is said of a callback that unfreezes layers, and of what layers have of their weights; and the losses."""
    options = {"use_orig_params": False}
    tuned, module = Lit(), Lit()
    for one in (tuned, module):
        one.net.frozen.requires_grad_(True)  # one flat parameter is trained as a whole
    run = new_trainer(tmp, "fsdp_native", 2, options, callbacks=[BackboneFinetuning()])
    tuned.backbone = tuned.net.blocks
    message = refusal(UnsupportedCapabilityError, lambda: run.fit(tuned, loader(1, 2)))
    new_trainer(tmp, "fsdp_native", 2, options).fit(module, loader(1, 2))
    parts = [module, module.net, module.net.blocks[0], module.net.blocks[0].up, module.net.out, module.net.inp]
    return message, [refusal(ShardingError, part.state_dict) for part in parts], len(tuned.losses)


def test_layers_whose_parameters_are_one_flat_one(ranks: RankPool, tmp_path: Path) -> None:
    """They hold nothing, which must not be taken for an empty state."""
    for message, of_parts, losses in ranks.run(2, of_flat_parameters, str(tmp_path)):
        assert_says(
            message,
            "BackboneFinetuning can't be used with 'fsdp_native'",
            "'net.inp.weight' is kept elsewhere",
            "a strategy that keeps sharded parameters in their modules",
        )
        assert not losses
        for of_part in of_parts:
            assert_says(of_part, "can't be read while 'fsdp_native' has it sharded", "trainer.save_checkpoint(path)")


# -- a torch without FSDP1 ---------------------------------------------------------------------------------------------

RESOLVE = """
import fsdp_core
from fsdp_cuda_native.plugin import why_not_here
print(why_not_here())
for front_end in ("trainer", "fabric"):
    try:
        fsdp_core.resolve("fsdp_native", front_end)
    except fsdp_core.StrategyUnavailableError as error:
        print(error)
"""


def beside_a_bare_torch(tmp_path: Path, *command: str) -> str:
    """Run Python where ``torch`` is a package of that name without FSDP1."""
    bare = tmp_path / "site" / "torch" / "distributed" / "fsdp"
    bare.mkdir(parents=True)
    for folder in (bare, bare.parent, bare.parent.parent):
        (folder / "__init__.py").write_text("")
    environ = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run([sys.executable, *command], env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_torch_without_fsdp1_is_listed(tmp_path: Path) -> None:
    command = ("-c", "from fsdp_core.cli import main; main()", "list", "--json")
    rows = {row["name"]: row for row in json.loads(beside_a_bare_torch(tmp_path, *command))["strategies"]}
    for name in NAMES:
        assert rows[name]["status"] == "unavailable"
        assert_says(
            rows[name]["reason"], "no longer ships FullyShardedDataParallel", "'fsdp2'", "pip install fsdp-fsdp2"
        )


def test_a_torch_without_fsdp1_is_refused(tmp_path: Path) -> None:
    probe, *lines = beside_a_bare_torch(tmp_path, "-c", RESOLVE).strip().split("\n")
    assert_says(probe, "no longer ships FullyShardedDataParallel", "'fsdp2'", "pip install fsdp-fsdp2")
    assert len([line for line in lines if "'fsdp_native'" in line and "can't run here" in line]) == 2


# -- what can be -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("ddp_fully_sharded", {"cpu_offload": True, "activation_checkpointing": Block}),
        ("ddp_fully_sharded", {"reshard_after_forward": False, "min_num_params": 50}),
        ("ddp_fully_sharded", {"flatten_parameters": True, "bucket_cap_mb": 25, "fp32_reduce_scatter": True}),
        ("fsdp_native", {"cpu_offload": CPUOffload(offload_params=True)}),
        ("fsdp_native", {"cpu_offload": CPUOffload(offload_params=False), "sync_each_batch": True}),
        ("fsdp_native", {"activation_checkpointing": [Block, nn.LayerNorm]}),
        ("fsdp_native", {"mixed_precision": MixedPrecision()}),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else value,
)
def test_option_that_leaves_numbers_alone(
    ranks: RankPool, tmp_path: Path, strategy: str, options: dict[str, Any]
) -> None:
    got = ranks.run(2, fit, strategy, str(tmp_path), 2, 3, "momentum", options)
    if strategy == "ddp_fully_sharded":
        got += ranks.run(2, fabric_fit, strategy, 2, 3, "momentum", options)
    assert_same(got, train_plain(3, oracle.momentum))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cpu_offload": True},
        {"auto_wrap_policy": {nn.Linear}},
        {"auto_wrap_policy": {nn.Linear}, "cpu_offload": True},
        {"auto_wrap_policy": {nn.Linear}, "activation_checkpointing_policy": {nn.Linear}},
        {"activation_checkpointing_policy": {nn.Linear}, "sharding_strategy": "SHARD_GRAD_OP"},
        # of docs/migration.md
        {"mixed_precision": MixedPrecision(torch.float16, reduce_dtype=torch.float16, buffer_dtype=torch.float16)},
    ],
    ids=show_parameter,
)
def test_what_a_step_calls_is_cast_as_by_the_root(ranks: RankPool, tmp_path: Path, options: dict[str, Any]) -> None:
    """With ``mixed_precision`` alone, whose units leave their inputs as they are."""
    chosen = {"auto_wrap_policy": None, "mixed_precision": MixedPrecision(param_dtype=torch.bfloat16), **options}
    for trained in ranks.run(2, trained_by_parts, "fsdp_native", str(tmp_path), chosen):
        assert_parts_equal(trained)


class Compiled(Lit):
    """Blocks that are compiled by what traces the backward pass too."""

    def __init__(self) -> None:
        super().__init__("momentum")
        for block in self.net.blocks:
            block.compile(backend="aot_eager")


def test_units_that_the_user_compiles(ranks: RankPool, tmp_path: Path) -> None:
    """A graph takes what is gathered for it, whose class torch's check of a graph's first call must know."""
    assert_fits_as_plain(ranks, tmp_path, "fsdp_native", Compiled, options={"auto_wrap_policy": {Block}})


@pytest.mark.parametrize("strategy", NAMES)
def test_names_are_strategies_with_their_presets(strategy: str) -> None:
    quiet: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "strategy": strategy}
    for made in (pl.Trainer(logger=False, enable_checkpointing=False, **quiet).strategy, Fabric(**quiet).strategy):
        used: Any = made
        assert used.backend.options.offloads is (strategy == "fsdp_native_full_shard_offload")
        assert used.backend.options.strategy is ShardingStrategy.FULL_SHARD
        assert used.backend.options.use_orig_params is True
    trainers: Any = fsdp_core.resolve(strategy, "trainer")(cpu_offload=True)
    assert isinstance(trainers, DDPFullyShardedStrategy) is (strategy == "ddp_fully_sharded")


def fit_in_precision(strategy: str, tmp: str, precision: Any) -> tuple[list[float], str, bool]:
    module = Lit("momentum")
    run = new_trainer(tmp, strategy, 2, precision=precision)
    run.fit(module, loader(3, 2))
    plugin: Any = run.precision_plugin
    return means(module.losses), str(run.precision), plugin.scaler is not None


@pytest.mark.parametrize(
    ("precision", "meant"), [(16, "16-mixed"), ("16", "16-mixed"), ("bf16", "bf16-mixed"), (32, "32-true")]
)
def test_precision_in_old_words(ranks: RankPool, tmp_path: Path, precision: Any, meant: str) -> None:
    want, _ = train_plain(3, oracle.momentum)
    for losses, name, scaled in ranks.run(2, fit_in_precision, "ddp_fully_sharded", str(tmp_path), precision):
        assert losses == pytest.approx(want, rel=HALF_TOLERANCE)
        assert (name, scaled) == (meant, meant == "16-mixed")


def fabric_in_old_words() -> list[float]:
    options = {"activation_checkpointing": Block}
    fabric, _, model, optimizer = short_runs.set_up(
        "ddp_fully_sharded", options, optimizer=oracle.momentum, precision=16
    )
    return means(run_steps(model, optimizer, fabric.setup_dataloaders(loader(3, 2)), fabric.backward))


def test_precision_in_old_words_under_fabric(ranks: RankPool) -> None:
    want, _ = train_plain(3, oracle.momentum)
    for losses in ranks.run(2, fabric_in_old_words):
        assert losses == pytest.approx(want, rel=HALF_TOLERANCE)


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("fsdp_native", {"mixed_precision": BF16}),
        ("ddp_fully_sharded", {"compute_dtype": torch.bfloat16}),
        ("ddp_fully_sharded", {"compute_dtype": torch.bfloat16, "fp32_reduce_scatter": True}),
    ],
    ids=show_parameter,
)
def test_computation_in_half_precision(ranks: RankPool, tmp_path: Path, strategy: str, options: dict[str, Any]) -> None:
    """It wins over the precision string, which is left at its default here."""
    want, _ = train_plain(3, oracle.sgd)
    for got in ranks.run(2, seen_by_a_block, strategy, str(tmp_path), None, options):
        assert got["losses"] == pytest.approx(want, rel=HALF_TOLERANCE)
        assert (got["shards"], got["grads"]) == ({torch.float32}, {torch.float32})
        assert (got["weight"], got["input"]) == (torch.bfloat16, torch.bfloat16)


def recomputed(tmp: str, strategy: str, options: dict[str, Any]) -> int:
    """How often the layers of blocks are called in one step."""
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    module = Lit("sgd")
    for block in module.net.blocks:
        block.up.register_forward_hook(count)
    new_trainer(tmp, strategy, 2, options).fit(module, loader(1, 2))
    return calls


@pytest.mark.parametrize("strategy", ["fsdp_native", "ddp_fully_sharded"])
@pytest.mark.parametrize(
    ("classes", "calls"), [(None, 3), (Block, 6), ([Block], 6), ((nn.LayerNorm, Block), 6), (nn.LayerNorm, 3)]
)
def test_classes_that_recompute(ranks: RankPool, tmp_path: Path, strategy: str, classes: Any, calls: int) -> None:
    """Three blocks: each runs once forward, and once more in the backward pass if it recomputes."""
    options = {"activation_checkpointing": classes}
    assert ranks.run(2, recomputed, str(tmp_path), strategy, options) == [calls] * 2


def fill_with_ones(module: nn.Module) -> None:
    module.to_empty(device="cpu", recurse=False)
    for parameter in module.parameters(recurse=False):
        nn.init.ones_(parameter)


def built_empty() -> tuple[list[float], bool]:
    fabric = new_fabric("fsdp_native", 2, {"param_init_fn": fill_with_ones, "auto_wrap_policy": {nn.Linear}})
    with fabric.init_module(empty_init=True):
        net = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 6))
    was_empty = all(p.is_meta for p in net.parameters())
    model = fabric.setup_module(net)
    optimizer = fabric.setup_optimizers(oracle.sgd(model))
    losses = run_steps(model, optimizer, oracle.global_batches(2), fabric.backward)
    assert not any(p.is_meta for p in sharded_by(fabric.strategy).root.parameters())
    return [loss.item() for loss in losses], was_empty


def test_param_init_fn(ranks: RankPool) -> None:
    net = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 6))
    for parameter in net.parameters():
        nn.init.ones_(parameter)
    want, _ = train_plain(2, oracle.sgd, net=net)
    for losses, was_empty in ranks.run(2, built_empty):
        assert was_empty
        assert losses == pytest.approx(want, abs=FP32_TOLERANCE)


class LooksAtNorms(Lit):
    """Reads norms of what optimizers hold, in a hook between steps, and of a micro-batch whose step is to come."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        parameter = optimizer.param_groups[0]["params"][0]
        self.messages.append(refusal(UnsupportedCapabilityError, lambda: parameter.norm()))
        self.messages.append(refusal(UnsupportedCapabilityError, lambda: parameter.grad.norm()))


def norms_of_flat_parameters(tmp: str) -> list[str]:
    module = LooksAtNorms()
    new_trainer(tmp, "fsdp_native", 2, FLAT, accumulate_grad_batches=2).fit(module, loader(4, 2))
    return module.messages


def test_norms_of_flat_parameters_in_a_hook(ranks: RankPool, tmp_path: Path) -> None:
    for messages in ranks.run(2, norms_of_flat_parameters, str(tmp_path)):
        assert len(messages) == 4
        for message in messages:
            assert_says(message, "would see this rank's piece of it alone")
