"""Ranks that are about to do different things are told which rank it is, and the first difference."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy

from checkpoint_ranks import started
from fsdp_core.errors import ShardingError
from fsdp_core.sharding.agreement.same_model import check_same, facts_of_options, facts_of_packages
from fsdp_core.sharding.agreement.same_optimizers import check_same_optimizers
from fsdp_core.sharding.precision_strings import ShardPrecision
from fsdp_core.sharding.units.wrap_policy import describe_policy
from fsdp_core.testing import RankPool

#: What ranks have, and what is said of it.
DIFFERENT: dict[str, tuple[list[Mapping[str, str]], str]] = {
    "a value": ([{"a": "1", "b": "2"}, {"a": "1", "b": "3"}], "rank 1 has .* as rank 0: its b is 3, and rank 0's is 2"),
    "one more": ([{"a": "1"}, {"a": "1", "b": "3"}], "it has a b, 3, and rank 0 has none"),
    "one less": ([{"a": "1", "b": "2"}, {"a": "1"}], "rank 0 has a b, 2, and it has none"),
    "another place": ([{"a": "1", "b": "2"}, {"b": "2", "a": "1"}], "the same parts in another order"),
    "one in the middle": ([{"a": "1", "c": "3"}, {"a": "1", "b": "2", "c": "3"}], "it has a b, 2, and rank 0 has none"),
}


def differ() -> dict[str, str]:
    """What is said of each of the table's ranks, of which the third is as the second."""
    runtime = started()
    said = {}
    runtime.patience = timedelta(hours=1)  # nobody waits for it
    check_same(runtime, "Tiny", {"a": "1"})
    for case, (facts, _) in DIFFERENT.items():
        with pytest.raises(ShardingError) as told:
            check_same(runtime, "Tiny", facts[min(runtime.rank, 1)])
        said[case] = str(told.value)
    runtime.stop()
    return said


def test_every_rank_is_told_at_once() -> None:
    with RankPool() as ranks:
        first, *others = ranks.run(3, differ, timeout=60)
    assert others == [first, first]
    for case, (_, words) in DIFFERENT.items():
        assert re.search(words, first[case])
        assert "Rank 2 differs from it too" in first[case]


@pytest.mark.parametrize(
    "build",
    [
        lambda: ModuleWrapPolicy({nn.Linear, nn.GELU, nn.GLU, nn.Conv1d, nn.LayerNorm, nn.Embedding}),
        lambda: functools.partial(size_based_auto_wrap_policy, min_num_params=100),
        lambda: {nn.Linear, nn.GELU},
        lambda: lambda module: True,
        lambda: MixedPrecision(param_dtype=torch.bfloat16),
        lambda: ShardingStrategy.HYBRID_SHARD,
        lambda: {"a": [nn.Linear(2, 2), torch.zeros(2), object()], "b": ShardPrecision()},
    ],
)
def test_what_was_given_alike_is_described_alike(build: Callable[[], Any]) -> None:
    """Whatever the process has at which address."""
    kept = [build() for _ in range(2)]
    (one,), (other,) = (facts_of_options({"given": value}).values() for value in kept)
    assert one == other
    assert "0x" not in one
    one, other = (facts_of_options({"given": describe_policy(policy)}) for policy in kept)
    assert one == other


def test_options_that_differ_are_described_differently() -> None:
    values = [{nn.Linear}, {nn.Conv1d}, True, 1.0, "auto", MixedPrecision(param_dtype=torch.bfloat16), MixedPrecision()]
    values += [functools.partial(size_based_auto_wrap_policy, min_num_params=n) for n in (1, 2)]
    values += [str(ModuleWrapPolicy({kind})) for kind in (nn.Linear, nn.Conv1d)]
    said = [facts_of_options({"given": value})["option 'given'"] for value in values]
    assert len(set(said)) == len(said)


def test_packages_of_the_models_classes_are_named() -> None:
    from torchmetrics import SumMetric

    facts = facts_of_packages(nn.ModuleList([SumMetric()]), nn.GELU)
    assert {"version of torch", "version of torchmetrics", "version of fsdp_core"} <= facts.keys()
    assert "version of builtins" not in facts


def settled(change: str) -> list[torch.optim.Optimizer]:
    """Optimizers with settings of every kind, one of which is changed."""
    net = nn.Linear(3, 3)
    decay: Any = {"params": [net.weight], "weight_decay": 0.1, "lr": torch.tensor(float("nan"))}
    plain: Any = {"params": [net.bias], "hook": len, "note": object(), "table": torch.zeros(2)}
    groups = [decay, plain]
    if change == "a scalar tensor":
        decay["lr"] = torch.tensor(0.5)
    elif change == "betas":
        plain["betas"] = (0.9, 0.95)
    elif change == "the order of groups":
        groups.reverse()
    elif change == "one group":
        del groups[1]
    elif change == "a function":
        plain["hook"] = min
    elif change == "a setting":
        plain["more"] = True
    elif change == "a number of numpy's":
        plain["eps"] = numpy.float64(1e-8)  # AdamW's own
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, lr=0.01, capturable=False)]
    if change == "another":
        optimizers.append(torch.optim.SGD(net.parameters(), lr=0.1))
    if change == "the class":
        optimizers = [torch.optim.Adam(groups, lr=0.01)]
    return optimizers


#: What the second of three ranks has changed, and what is said of it.
SETTINGS = {
    "a scalar tensor": "'lr' in param group 0 of AdamW is nan in torch.float32 on rank 0, 2, and 0.5 in .* on rank 1",
    "betas": r"'betas' in param group 1 of AdamW is \[0.9, 0.999\] on rank 0, 2, and \[0.9, 0.95\] on rank 1",
    "the order of groups": "in param group 0 of AdamW is ",
    "one group": "the number of param groups of AdamW is 2 on rank 0, 2, and 1 on rank 1",
    "a function": "'hook' in param group 1 of AdamW is len on rank 0, 2, and min on rank 1",
    "a setting": "'more' in param group 1 of AdamW is missing on rank 0, 2, and True on rank 1",
    "another": "the number of optimizers is 1 on rank 0, 2, and 2 on rank 1",
    "the class": "the class of optimizer 0 is AdamW on rank 0, 2, and Adam on rank 1",
}


def differ_in_optimizers() -> dict[str, str]:
    runtime = started()
    check_same_optimizers(runtime, settled("nothing"))  # NaN is equal to itself, and objects differ on all ranks
    check_same_optimizers(runtime, settled("a number of numpy's" if runtime.rank else "nothing"))
    said = {}
    for change in SETTINGS:
        with pytest.raises(ShardingError) as told:
            check_same_optimizers(runtime, settled(change if runtime.rank == 1 else "nothing"))
        said[change] = str(told.value)
    runtime.stop()
    return said


def test_every_rank_is_told_of_other_optimizers() -> None:
    with RankPool() as ranks:
        first, *others = ranks.run(3, differ_in_optimizers, timeout=60)
    assert others == [first, first]
    for change, words in SETTINGS.items():
        assert re.search(words, first[change]), first[change]
        assert "ranks have set up different optimizers" in first[change]
