"""What a step, a set-up that failed, or another model leaves behind in a process: nothing uses it later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss
from torch.nn.utils import prune

import test_context_parallel as context
from fsdp_core import full_state_dict
from fsdp_core.errors import ShardingError
from fsdp_core.sharding.agreement import arrivals
from fsdp_core.sharding.agreement.same_model import check_same
from fsdp_core.testing import RankPool, oracle, short_runs
from fsdp_core.testing.oracle import Trained, train_plain
from fsdp_core.testing.refusals import assert_says, refusal
from fsdp_core.testing.state import full_state
from fsdp_core.testing.suite.numerics.parity import assert_same
from fsdp_core.testing.training import means, new_fabric, new_trainer
from test_parallelize import LitWords, PartOfSequence, Words, words, words_plan

#: What is called between a backward pass and the optimizer's step.
CALLS: dict[str, Callable[[Any, Tensor], Any]] = {
    "a layer of the root": lambda net, x: net.inp(x),
    "a unit": lambda net, x: net.blocks[0](x),
}


def called_before_steps(options: dict[str, Any]) -> dict[str, Trained]:
    found = {}
    for name, call in CALLS.items():
        fabric, net, model, optimizer = short_runs.set_up("fsdp2", options)
        losses = []
        for x, y in oracle.global_batches(3):
            loss = mse_loss(model(x), y)
            losses.append(loss.detach())
            fabric.backward(loss)
            with torch.no_grad():
                call(net, x)
            optimizer.step()
            optimizer.zero_grad()
        found[name] = means(losses), full_state(fabric.strategy)
    return found


def test_what_was_gathered_ahead_is_not_used_after_a_step(ranks: RankPool) -> None:
    """A call of a part gathers units ahead that it does not reach: a step later, their parameters are others."""
    want = train_plain(3, oracle.sgd)
    for found in ranks.run(2, called_before_steps, {"forward_prefetch_depth": 2}):
        assert_same(list(found.values()), want)


def pruned_while_gathered() -> tuple[str, str]:
    told = []
    for is_pruned in (True, False):
        fabric = new_fabric("fsdp2", 2, {"auto_wrap_policy": None})
        net = oracle.new_net()
        model = fabric.setup_module(net)
        x, y = oracle.global_batches(1)[0]
        model(x)  # the root stays gathered
        if is_pruned:
            prune.l1_unstructured(net.inp, "weight", amount=0.5)
            told.append(refusal(ShardingError, lambda net=net: full_state_dict(net)))
        else:
            array = net.inp.weight.detach().numpy()
            try:
                fabric.backward(mse_loss(model(x), y))
            except RuntimeError as error:
                told.append("\n".join([str(error), *error.__notes__]))
            del array
    return told[0], told[1]


def test_gathered_memory_that_is_kept(ranks: RankPool) -> None:
    """Reading freed memory ended the process; an array keeps what a unit frees."""
    for pruned, array in ranks.run(2, pruned_while_gathered):
        assert_says(pruned, "'inp.weight_orig'", "which has freed it", "before fabric.setup()")
        assert_says(array, "not resizable", "parameter.detach().clone().numpy()")


def pruned_before() -> Trained:
    options = {"auto_wrap_policy": {oracle.Block}}
    fabric, _, model, optimizer = short_runs.set_up("fsdp2", options, net=new_pruned(), optimizer=oracle.momentum)
    losses = short_runs.run_steps(model, optimizer, oracle.global_batches(3), fabric.backward)
    return means(losses), full_state(fabric.strategy)


def new_pruned() -> oracle.Net:
    net = oracle.new_net()
    prune.l1_unstructured(net.inp, "weight", amount=0.5)
    return net


def test_what_is_pruned_before_trains(ranks: RankPool) -> None:
    assert_same(ranks.run(2, pruned_before), train_plain(3, oracle.momentum, net=new_pruned()))


class WordsByHand(LitWords):
    """Runs two backward passes in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        for half in batch.chunk(2):
            loss = self.net.training_step(half)
            self.losses.append(loss.detach())
            self.manual_backward(loss / 2)
        optimizer.step()
        optimizer.zero_grad()


def words_by_hand(tmp: str) -> Trained:
    plan = {**words_plan("net."), "net.norm": PartOfSequence()}
    options = {"tensor_parallel_size": 2, "loss_parallel": True, "tp_plan": plan}
    module = WordsByHand()
    run = new_trainer(tmp, "fsdp2", 2, options, use_distributed_sampler=False)
    run.fit(module)
    return means(module.losses), {name.removeprefix("net."): value for name, value in full_state(run.strategy).items()}


def test_loss_parallel_holds_after_a_backward_pass_inside_a_step(ranks: RankPool, tmp_path: Any) -> None:
    """torch's context does not nest: that of the backward pass ended that of the step."""
    with oracle.seeded(3):
        net = Words()
    optimizer = oracle.adamw_groups(net)
    losses = []
    for batch in words(3):
        for half in batch.chunk(2):
            loss = net.training_step(half)
            losses.append(loss.item())
            (loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same(ranks.run(2, words_by_hand, str(tmp_path)), (losses, dict(net.state_dict())))


def returns_nothing(module: Any, mesh: Any) -> None:
    return None


def fails_half_way(module: Any, mesh: Any) -> Any:
    fully_shard(module.blocks[0], mesh=mesh["data_parallel"], ignored_params={module.blocks[0].gain})
    raise ShardingError("half way")


def set_up_twice() -> dict[str, tuple[str, str]]:
    def refused(function: Any) -> tuple[str, str]:
        fabric = new_fabric("fsdp2", 2, {"parallelize_fn": function})
        net = oracle.new_net()
        first, second = (refusal(ShardingError, lambda: fabric.setup(net)) for _ in range(2))
        return first, second

    return {function.__name__: refused(function) for function in (returns_nothing, fails_half_way)}


def test_function_that_failed_is_not_taken_for_done(ranks: RankPool) -> None:
    for told in ranks.run(2, set_up_twice):
        for first in told["returns_nothing"]:  # it is called again
            assert_says(first, "returned None", "return module")
        first, second = told["fails_half_way"]
        assert first == "half way"
        assert_says(second, "parallelize_fn was given", "already sharded in part", "'blocks.0'")


def fails_on_rank_1(module: Any, mesh: Any) -> Any:
    if dist.get_rank() == 1:
        raise ValueError("rank 1 alone")
    dist.barrier()
    return module


def set_up_where_rank_1_fails() -> str:
    arrivals.PATIENCE_SECONDS = 1.0  # in this process, which other tests use too: the others fail on all ranks
    fabric = new_fabric("fsdp2", 2, {"parallelize_fn": fails_on_rank_1})
    net = oracle.new_net()
    if fabric.global_rank == 0:
        return refusal(ShardingError, lambda: fabric.setup(net))
    message = refusal(ValueError, lambda: fabric.setup(net))
    # what the end of this process would do: let rank 0 go on
    dist.barrier()
    refusal(ShardingError, lambda: check_same(fabric.strategy.runtime, "Net", {}))
    return message


def test_function_that_fails_on_a_rank_does_not_wait_for_ranks_that_wait_for_it(ranks: RankPool) -> None:
    _, message = ranks.run(2, set_up_where_rank_1_fails)
    assert message == "rank 1 alone"


def after_context_parallel() -> Trained:
    """A model without context parallelism, while a context-parallel one still exists."""
    _, model, _ = context.trained("context 2")
    got: Trained = context.fabric_fit_on("shard 2", "causal", {"activation_checkpointing_policy": {context.Block}})
    assert model is not None
    return got


def test_model_is_recomputed_without_context_parallelism_of_another(ranks: RankPool) -> None:
    assert_same(ranks.run(2, after_context_parallel), context.plain())
