"""From the user's module to shards: by parallelize(), by the user's function, by a configure_model that shards."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader

from fsdp_core import wrap
from fsdp_core.errors import ShardingError, UnsupportedCapabilityError
from fsdp_core.testing import RankPool, oracle
from fsdp_core.testing.oracle import train_plain
from fsdp_core.testing.refusals import assert_says, refusal, was_refused
from fsdp_core.testing.state import full_optimizer_state, full_state, local, sharded_by
from fsdp_core.testing.suite.numerics.parity import assert_same
from fsdp_core.testing.training import Lit, means, new_fabric, new_trainer
from mesh_runs import MESHES, PARALLEL, WIDTH, OwnLoader, new_net, options_of, own_part, plain

pytestmark = pytest.mark.everything

EACH_BLOCK = {"up": ColwiseParallel, "down": RowwiseParallel}


def shard_by_hand(net: Any, mesh: Any, **options: Any) -> Any:
    """As users of ModelParallelStrategy write it: the last block is divided only, and the rest left to the strategy."""
    if mesh["tensor_parallel"].size() > 1:
        for block in net.blocks:
            parallelize_module(block, mesh["tensor_parallel"], {name: style() for name, style in EACH_BLOCK.items()})
    data = mesh["data_parallel"]
    if mesh["data_parallel_replicate"].size() > 1:
        data = mesh["data_parallel_replicate", "data_parallel"]
    for block in net.blocks[:-1]:
        fully_shard(block, mesh=data, ignored_params={block.gain}, **options)
    return net


class ByHand(OwnLoader):
    """Builds and shards its net in ``configure_model``."""

    def __init__(self, empty: bool, again: bool = False) -> None:
        super().__init__("adamw_groups", width=WIDTH)
        self.net, self.empty, self.again = None, empty, again

    def configure_model(self) -> None:
        if self.net is not None:
            return
        with oracle.seeded(1), self.trainer.init_module(empty_init=self.empty):
            self.net = oracle.Net(width=WIDTH)
        shard_by_hand(self.net, self.device_mesh)
        if self.again:
            self.trainer.strategy.parallelize()

    def on_train_start(self) -> None:
        for _ in range(2):
            self.trainer.strategy.parallelize()


def by_hand_on(mesh: str, tmp: str, empty: bool) -> Any:
    options = {**MESHES[mesh].options, "activation_checkpointing_policy": {oracle.Block}}
    run = new_trainer(tmp, "fsdp2", MESHES[mesh].ranks, options, gradient_clip_val=0.05)
    module = ByHand(empty, again=not empty)
    torch.manual_seed(1)  # of a model without memory, when it gets some
    run.fit(module)
    run.save_checkpoint(Path(tmp) / "by hand")
    state = {name.removeprefix("net."): value for name, value in full_state(run.strategy).items()}
    kept = sum(local(p).numel() for p in module.parameters())
    logged = float(run.callback_metrics["loss"])
    again = new_trainer(tmp, "fsdp2", MESHES[mesh].ranks, MESHES[mesh].options, max_epochs=2)
    other = ByHand(not empty)
    again.fit(other, ckpt_path=str(Path(tmp) / "by hand"))
    means_of_both = means(module.losses), means(other.losses)
    moments = [full_optimizer_state(strategy.strategy, strategy.optimizers[0]) for strategy in (run, again)]
    return (means_of_both[0], state), logged, kept, means_of_both[1], moments


@pytest.mark.parametrize(
    ("mesh", "empty"),
    [
        ("shard 2", False),
        ("shard 2", True),
        ("tensor 2", False),
        ("shard 2 x tensor 2", True),
        ("replicate 2 x shard 2", True),
    ],
)
def test_configure_model_that_shards_equals_plain(ranks: RankPool, tmp_path: Path, mesh: str, empty: bool) -> None:
    got = ranks.run(MESHES[mesh].ranks, by_hand_on, mesh, str(tmp_path), empty)
    want = plain("adamw_groups", empty=empty, clip_norm=0.05)
    assert_same([trained for trained, *_ in got], want)
    total = sum(p.numel() for p in oracle.new_net(width=WIDTH).parameters())
    for _, logged, kept, *_ in got:
        assert logged == pytest.approx(want[0][-1], abs=oracle.FP32_TOLERANCE)
        assert kept < 0.8 * total
    second = train_again(empty)
    for *_, resumed, moments in got:
        assert resumed == pytest.approx(second[0], abs=oracle.FP32_TOLERANCE)
        torch.testing.assert_close(moments[1]["net.inp.weight"]["step"], torch.tensor(8.0))


def train_again(empty: bool) -> Any:
    """Eight steps at once, the last four without clipping; the losses of these."""
    net = new_net(empty=empty)
    optimizer = oracle.adamw_groups(net)
    train_plain(4, lambda _: optimizer, net=net, clip_norm=0.05)
    losses, state = train_plain(4, lambda _: optimizer, net=net)
    return losses, state


calls: list[Any] = []


def with_two_arguments(module: Any, mesh: Any) -> Any:
    calls.append(sum(p.is_meta for p in module.parameters()))
    return shard_by_hand(module, mesh)


def with_options(module: Any, mesh: Any, *, tp_plan: Any, **options: Any) -> Any:
    calls.append((sorted(tp_plan), sorted(options)))
    own = {name.removeprefix("blocks.*."): style for name, style in tp_plan.items() if name.startswith("blocks")}
    for block in module.blocks:
        parallelize_module(block, mesh["tensor_parallel"], own)
    first = module.blocks[0]
    fully_shard(first, mesh=mesh["data_parallel"], mp_policy=options["mp_policy"], ignored_params={first.gain})
    return module


def by_function_on(mesh: str, function: Any, empty: bool) -> Any:
    calls.clear()
    options = {**(options_of(mesh) if function is with_options else MESHES[mesh].options), "parallelize_fn": function}
    fabric = new_fabric("fsdp2", MESHES[mesh].ranks, options)
    torch.manual_seed(fabric.global_rank + 5)  # rank 0's values win
    with fabric.init_module(empty_init=empty):
        net: Any = oracle.Net(width=WIDTH)
    if not empty and fabric.global_rank == 0:
        net.load_state_dict(oracle.new_net(width=WIDTH).state_dict())
    torch.manual_seed(1 if fabric.global_rank == 0 else 7)
    if empty:
        model = fabric.setup(net)
        optimizer = fabric.setup_optimizers(oracle.adamw_groups(net))
    else:
        model, optimizer = fabric.setup(net, oracle.adamw_groups(net))
    fabric.strategy.parallelize()  # type: ignore[attr-defined]
    losses = []
    for batch in oracle.global_batches(4):
        x, y = own_part(fabric, batch)
        loss = mse_loss(model(x), y)
        losses.append(loss.detach())
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=0.05)
        optimizer.step()
        optimizer.zero_grad()
    units = [name for name, part in net.named_modules() if isinstance(part, FSDPModule)]
    return (means(losses), full_state(fabric.strategy)), calls, units


@pytest.mark.parametrize(
    ("mesh", "function", "empty"),
    [
        ("replicate 2", with_two_arguments, False),
        ("shard 2 x tensor 2", with_two_arguments, True),
        ("shard 2 x tensor 2", with_options, False),
    ],
)
def test_parallelize_fn_equals_plain(ranks: RankPool, mesh: str, function: Any, empty: bool) -> None:
    got = ranks.run(MESHES[mesh].ranks, by_function_on, mesh, function, empty)
    assert_same([trained for trained, *_ in got], plain("adamw_groups", empty=empty, clip_norm=0.05))
    for _, called, units in got:
        assert len(called) == 1
        if function is with_options:
            assert called[0][0] == ["blocks.*.down", "blocks.*.up", "inp", "out"]
            assert {"mp_policy", "offload_policy", "reshard_after_forward"} <= set(called[0][1])
            assert units == ["", "blocks.0"]
        else:
            assert bool(called[0]) == empty
            assert units == ["", "blocks.0", "blocks.1"]


def raise_on_rank_1(module: nn.Module, device_mesh: Any) -> nn.Module:
    if device_mesh.get_rank():
        raise RuntimeError("no weights here")
    return module


def shard_on_rank_1(module: Any, device_mesh: Any) -> nn.Module:
    if device_mesh.get_rank():
        fully_shard(module.blocks[0].up, mesh=device_mesh["data_parallel"])
    return module


def shard_otherwise_on_rank_1(module: Any, device_mesh: Any) -> nn.Module:
    axis = device_mesh.get_rank()
    for block in module.blocks:
        fully_shard(block.up, mesh=device_mesh["data_parallel"], shard_placement_fn=lambda p: Shard(axis % p.ndim))
    return module


#: Functions, and what is said of what they do.
OTHERWISE_ON_RANK_1 = {
    raise_on_rank_1: "RuntimeError: no weights here",
    shard_on_rank_1: "units of sharding is blocks.0.up, and rank 0's is the whole alone",
    shard_otherwise_on_rank_1: "placement of 'blocks.0.up.weight'",
}


def refused_after_functions() -> list[str]:
    return [
        refusal(
            ShardingError,
            lambda function=function: new_fabric("fsdp2", 2, {"parallelize_fn": function}).setup(  # type: ignore[misc]
                oracle.new_net(width=WIDTH)
            ),
        )
        for function in OTHERWISE_ON_RANK_1
    ]


def test_a_function_that_does_other_things_on_one_rank(ranks: RankPool) -> None:
    for messages in ranks.run(2, refused_after_functions, timeout=60):
        for message, part in zip(messages, OTHERWISE_ON_RANK_1.values(), strict=True):
            assert_says(message, "rank 1 has not set up the same Net as rank 0", part)


def planned_and_held_along_axis_1() -> tuple[int | None, int]:
    fabric = new_fabric("fsdp2", 2)
    net, mesh = nn.Linear(4, 5, bias=False), fabric.strategy.device_mesh["data_parallel"]  # type: ignore[attr-defined]
    fully_shard(net, mesh=mesh, shard_placement_fn=lambda parameter: Shard(1))
    planned = fabric.strategy.backend.plan(net).local_nbytes  # type: ignore[attr-defined]
    fabric.setup_module(net)
    return planned, sharded_by(fabric.strategy).bytes_held()


def test_no_size_is_planned_of_what_the_user_has_sharded(ranks: RankPool) -> None:
    assert ranks.run(2, planned_and_held_along_axis_1) == [(None, 5 * 2 * 4)] * 2


def own_policy_and_ignored() -> Any:
    """A unit keeps its own policy; what it ignores is averaged; modules sharded together are one unit."""
    fabric = new_fabric("fsdp2", 2)
    with oracle.seeded(1):
        net = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
    mesh: Any = fabric.strategy.device_mesh["data_parallel"]  # type: ignore[attr-defined]
    seen: list[torch.dtype] = []
    fully_shard(net[0], mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    fully_shard([net[1], net[2]])  # torch's default, a mesh of all ranks
    fully_shard(net[3], mesh=mesh, ignored_params={net[3].bias})
    fully_shard(net, mesh=mesh)
    net[0].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    net[1].register_forward_pre_hook(lambda module, args: (args[0].float(),))
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    x, _ = oracle.global_batches(1)[0]
    fabric.backward(model(x.chunk(2)[fabric.global_rank]).square().mean())
    optimizer.step()
    return seen, full_state(fabric.strategy)


def test_units_keep_their_own_options(ranks: RankPool) -> None:
    with oracle.seeded(1):
        net = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
    x, _ = oracle.global_batches(1)[0]
    net(x).square().mean().backward()
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    for seen, state in ranks.run(2, own_policy_and_ignored):
        assert seen == [torch.bfloat16]
        torch.testing.assert_close(state, net.state_dict(), rtol=0, atol=oracle.HALF_TOLERANCE)
        # the bias behind all units is the mean over the ranks, and exact but for its inputs
        torch.testing.assert_close(state["3.bias"], net[3].bias.detach(), rtol=0, atol=1e-3)


# -- built without memory ---------------------------------------------------------------------------------------------


def built_empty_on(mesh: str) -> Any:
    fabric = new_fabric("fsdp2", MESHES[mesh].ranks, options_of(mesh))
    torch.manual_seed(fabric.global_rank + 1)
    with fabric.init_module(empty_init=True):
        net = oracle.Net(width=WIDTH)
    torch.manual_seed(1 if fabric.global_rank == 0 else 7)
    fabric.setup(net)
    return full_state(fabric.strategy)


@pytest.mark.parametrize("mesh", PARALLEL)
def test_built_without_memory_equals_unsharded(ranks: RankPool, mesh: str) -> None:
    want = dict(new_net(empty=True).state_dict())
    for state in ranks.run(MESHES[mesh].ranks, built_empty_on, mesh):
        torch.testing.assert_close(state, want, rtol=0, atol=0)


# -- loss parallel, sequence parallel ---------------------------------------------------------------------------------

VOCABULARY = 10


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 6)
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6)
        self.head = nn.Linear(6, VOCABULARY)

    def forward(self, words: torch.Tensor) -> Any:
        x = self.embedding(words)
        return self.head(x + self.down(torch.tanh(self.up(self.norm(x)))))

    def training_step(self, words: torch.Tensor) -> Any:
        return cross_entropy(self(words).flatten(0, 1), words.roll(1, 1).flatten())


def words_plan(prefix: str = "") -> dict[str, Any]:
    """The embedding gives parts of the sequence, the norm runs on them, and the head's vocabulary stays divided."""
    own = {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "norm": SequenceParallel(),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    return {prefix + name: style for name, style in own.items()}


def words(steps: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (steps, 4, 8), generator=torch.Generator().manual_seed(5))


class LitWords(Lit):
    def __init__(self) -> None:
        super().__init__("adamw_groups")
        with oracle.seeded(3):
            self.net = Words()
        self.kinds: set[type] = set()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        loss = self.net.training_step(batch)
        self.kinds.add(type(loss))
        self.losses.append(loss.detach())
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def train_dataloader(self) -> Any:
        mine = [own_part(self.trainer, batch) for batch in words(3)]
        return DataLoader(mine, batch_size=None)


def words_under_trainer(tmp: str, world_size: int) -> Any:
    plan = {**words_plan("net."), "net.norm": PartOfSequence()}
    options = {"tensor_parallel_size": 2, "loss_parallel": True, "tp_plan": plan}
    run = new_trainer(tmp, "fsdp2", world_size, options, gradient_clip_val=0.2, use_distributed_sampler=False)
    module = LitWords()
    run.fit(module)
    state = {name.removeprefix("net."): value for name, value in full_state(run.strategy).items()}
    return (means(module.losses), state), module.kinds, float(run.callback_metrics["loss"])


def words_under_fabric(world_size: int) -> Any:
    plan = {**words_plan(), "norm": PartOfSequence()}
    fabric = new_fabric("fsdp2", world_size, {"tensor_parallel_size": 2, "loss_parallel": True, "tp_plan": plan})
    with oracle.seeded(3):
        net = Words()
    model, optimizer = fabric.setup(net, oracle.adamw_groups(net))
    model.mark_forward_method("training_step")
    losses, kinds = [], set()
    for batch in words(3):
        loss = model.training_step(own_part(fabric, batch))
        losses.append(loss.detach())
        kinds.add(type(loss))
        fabric.backward(loss)
        norm = fabric.clip_gradients(model, optimizer, max_norm=0.2)
        optimizer.step()
        optimizer.zero_grad()
    return (means(losses), full_state(fabric.strategy)), kinds, float(norm)


class PartOfSequence(SequenceParallel):
    """A norm of which each rank gets the whole sequence, runs a part, and returns the whole again."""

    @staticmethod
    def _prepare_input_fn(sequence_sharding: Any, mod: Any, inputs: Any, device_mesh: Any) -> Any:
        from torch.distributed.tensor import DTensor

        sequence = DTensor.from_local(inputs[0], device_mesh, [Replicate()], run_check=False)
        return sequence.redistribute(placements=sequence_sharding)

    @staticmethod
    def _prepare_output_fn(use_local_output: Any, mod: Any, outputs: Any, device_mesh: Any) -> Any:
        return outputs.redistribute(placements=[Replicate()]).to_local()


def plain_words() -> Any:
    with oracle.seeded(3):
        net = Words()
    optimizer = oracle.adamw_groups(net)
    losses, norms = [], []
    for batch in words(3):
        loss = net.training_step(batch)
        losses.append(loss.item())
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), 0.2)))
        optimizer.step()
        optimizer.zero_grad()
    return (losses, dict(net.state_dict())), norms


def test_loss_over_a_divided_vocabulary_equals_plain(ranks: RankPool, tmp_path: Path) -> None:
    want, norms = plain_words()
    assert min(norms) > 0.2  # gradients are clipped
    got = ranks.run(4, words_under_trainer, str(tmp_path), 4)
    assert_same([trained for trained, *_ in got], want)
    for _, kinds, logged in got:
        assert kinds == {torch.Tensor}
        assert logged == pytest.approx(sum(want[0]) / 3, abs=oracle.FP32_TOLERANCE)
    got = ranks.run(2, words_under_fabric, 2)
    assert_same([trained for trained, *_ in got], want)
    for _, kinds, norm in got:
        assert kinds == {torch.Tensor}
        assert norm == pytest.approx(norms[-1], rel=oracle.FP32_TOLERANCE)


# -- plans that models bring ------------------------------------------------------------------------------------------


class Config:
    num_attention_heads, num_key_value_heads = 4, 2


class Attention(nn.Module):
    """As transformers writes it: queries and keys are normed head by head, with one weight for all heads."""

    head_dim = 3

    def __init__(self) -> None:
        super().__init__()
        self.config = Config()
        self.q_proj, self.k_proj = nn.Linear(6, 12, bias=False), nn.Linear(6, 6, bias=False)
        self.v_proj, self.o_proj = nn.Linear(6, 6, bias=False), nn.Linear(12, 6, bias=False)
        self.q_norm = nn.RMSNorm(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (project(x).unflatten(-1, (-1, self.head_dim)) for project in (self.q_proj, self.k_proj, self.v_proj))
        q = self.q_norm(q).transpose(1, 2)
        mixed = nn.functional.scaled_dot_product_attention(q, k.transpose(1, 2), v.transpose(1, 2), enable_gqa=True)
        output: torch.Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return output


class Layers(nn.Module):
    _tp_plan: ClassVar = {
        "embed": "embedding_rowwise",
        "layers.*.q_proj": "colwise",
        "layers.*.k_proj": "colwise",
        "layers.*.v_proj": "colwise",
        "layers.*.o_proj": "rowwise",
        "layers.*.q_norm": "replicated_with_grad_allreduce",
    }
    _fsdp_plan: ClassVar = {"embed": "free_full_weight", "layers.*": "free_full_weight", "norm": "keep_full_weight"}

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(10, 6), nn.ModuleList([Attention(), Attention()])
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 10)

    def forward(self, tokens: torch.Tensor) -> Any:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(self.norm(x))


def own_plans_on(world_size: int) -> Any:
    fabric = new_fabric("fsdp2", world_size, {"tensor_parallel_size": 2, "tp_plan": "auto"})
    with oracle.seeded(3):
        net = Layers()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.5))
    for tokens in words(2):
        mine = own_part(fabric, tokens)
        fabric.backward(cross_entropy(model(mine).flatten(0, 1), mine.roll(1, 1).flatten()))
        norm = fabric.clip_gradients(model, optimizer, max_norm=0.2)
        optimizer.step()
        optimizer.zero_grad()
    return (
        [name for name, part in net.named_modules() if isinstance(part, FSDPModule)],
        float(norm),
        full_state(fabric.strategy),
    )


def test_plans_that_a_model_brings(ranks: RankPool) -> None:
    with oracle.seeded(3):
        net = Layers()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    for tokens in words(2):
        cross_entropy(net(tokens).flatten(0, 1), tokens.roll(1, 1).flatten()).backward()
        norm = float(nn.utils.clip_grad_norm_(net.parameters(), 0.2))
        optimizer.step()
        optimizer.zero_grad()
    for units, seen, state in ranks.run(4, own_plans_on, 4):
        assert units == ["", "embed", "layers.0", "layers.1"]
        assert seen == pytest.approx(norm, rel=oracle.FP32_TOLERANCE)
        torch.testing.assert_close(state, net.state_dict(), rtol=0, atol=oracle.FP32_TOLERANCE)


# -- what is refused --------------------------------------------------------------------------------------------------


def returns_nothing(module: Any, mesh: Any) -> None:
    return None


def returns_another(module: Any, mesh: Any) -> Any:
    return nn.Sequential(module)


def in_data(mesh: Any) -> Any:
    return mesh["data_parallel"]


def first_block_on(axis: Any) -> Any:
    def shard(net: Any, mesh: Any) -> Any:
        fully_shard(net.blocks[0], mesh=axis(mesh), ignored_params={net.blocks[0].gain})
        return net

    return shard


def divided(net: Any, mesh: Any) -> Any:
    return parallelize_module(net, mesh["tensor_parallel"], {"blocks.0.up": ColwiseParallel()})


def marked_too(net: Any, mesh: Any) -> Any:
    wrap(net.blocks[1])
    return first_block_on(in_data)(net, mesh)


def never_reduced(net: Any, mesh: Any) -> Any:
    first_block_on(in_data)(divided(net, mesh), mesh).blocks[0].set_requires_gradient_sync(False)
    return net


def has_run_before(net: Any, mesh: Any) -> Any:
    block = first_block_on(in_data)(net, mesh).blocks[0]
    block(torch.ones(2, 6))
    return net


def left_out(net: Any, mesh: Any) -> Any:
    divided(net, mesh)
    block = net.blocks[0]
    fully_shard(block, mesh=mesh["data_parallel"], ignored_params={block.gain, block.up.weight})
    return net


def changed_on_meta(net: Any, mesh: Any) -> Any:
    net = oracle.Net(width=WIDTH).to("meta")
    nn.init.ones_(first_block_on(in_data)(net, mesh).blocks[0].up.weight)
    return net


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2)


#: What the module's code does to a net, options of the strategy, and what the message says. On 2 x 2 ranks.
REFUSED: dict[str, tuple[Any, dict[str, Any], list[str]]] = {
    "parallelize_fn returns None": (None, {"parallelize_fn": returns_nothing}, ["returned None", "return module"]),
    "parallelize_fn returns another module": (
        None,
        {"parallelize_fn": returns_another},
        ["returned a Sequential instead of the Net", "Replace submodules"],
    ),
    "parallelize_fn divides nothing": (
        None,
        {"parallelize_fn": first_block_on(in_data)},
        ["tensor_parallel_size=2", "no layer is divided", "parallelize_module"],
    ),
    "wrap beside parallelize_fn": (
        lambda net, mesh: setattr(net, "marked", wrap(net.blocks[0])),
        {"parallelize_fn": divided},
        ["marked by wrap()", "parallelize_fn"],
    ),
    "sharded beside parallelize_fn": (
        first_block_on(in_data),
        {"parallelize_fn": divided},
        ["parallelize_fn was given", "Net is already sharded in part", "fully_shard to 'blocks.0'"],
    ),
    "sharded beside tp_plan": (
        first_block_on(in_data),
        {"tp_plan": {"blocks.*.up": ColwiseParallel()}},
        ["tp_plan was given", "fully_shard to 'blocks.0'", "Leave tp_plan out"],
    ),
    "divided beside tp_plan": (
        divided,
        {"tp_plan": {"blocks.*.up": ColwiseParallel()}},
        ["tp_plan was given", "parallelize_module to the module of 'blocks.0.up.weight'"],
    ),
    "sharded beside a policy": (
        first_block_on(in_data),
        {"auto_wrap_policy": {oracle.Block}},
        ["auto_wrap_policy was given", "configure_model()", "remove those calls"],
    ),
    "sharded beside wrap": (marked_too, {}, ["marked by wrap()", "fully_shard to 'blocks.0'"]),
    "sharded over all ranks": (
        first_block_on(lambda mesh: init_device_mesh("cpu", (4,), mesh_dim_names=("everyone",))),
        {},
        ["'blocks.0.up.weight'", "[0, 1, 2, 3]", "data-parallel ranks", "device_mesh['data_parallel']"],
    ),
    "sharded over the wrong axis": (
        first_block_on(lambda mesh: mesh["tensor_parallel"]),
        {},
        ["was sharded over the ranks", "fully_shard(module, mesh=device_mesh['data_parallel'])"],
    ),
    "divided over the wrong axis": (
        lambda net, mesh: parallelize_module(net, mesh["data_parallel"], {"blocks.0.up": ColwiseParallel()}),
        {},
        ["was divided over the ranks", "device_mesh['tensor_parallel']"],
    ),
    "never reduced": (
        None,
        {"parallelize_fn": never_reduced},
        ["gradients of 'blocks.0' would not be reduced", "fabric.no_backward_sync(model)"],
    ),
    "run before": (has_run_before, {}, ["'blocks.0' of Net was called after fully_shard", "on_fit_start()"]),
    "left out": (left_out, {}, ["'blocks.0.up.weight'", "ignore", "Leave it out of ignored_params"]),
    "changed on meta": (changed_on_meta, {}, ["'blocks.0.up.weight' was changed", "meta device", "before fully_shard"]),
    "attention of torch's": (
        lambda net, mesh: Attending(),
        {"tp_plan": {"attention.out_proj": RowwiseParallel()}},
        ["'attention.out_proj'", "nn.MultiheadAttention", "never happen", "scaled_dot_product_attention"],
    ),
    "heads of a config": (
        lambda net, mesh: FewHeads(),
        {"tp_plan": {"k_proj": ColwiseParallel()}},
        ["num_key_value_heads=1", "does not divide"],
    ),
    "a style that transformers has": (
        lambda net, mesh: Experts(),
        {"tp_plan": "auto"},
        ["'moe_tp_experts'", "Experts", "colwise"],
    ),
    "a policy that matches nothing": (
        None,
        {"tp_plan": {"blocks.*.up": ColwiseParallel()}, "auto_wrap_policy": {nn.Conv1d}},
        ["{Conv1d} matches no submodule of Net", "LayerNorm"],
    ),
    "a unit of another plan": (
        lambda net, mesh: setattr(net, "_fsdp_plan", {"inp": "somehow"}),
        {"tp_plan": {"blocks.*.up": ColwiseParallel()}},
        ["'somehow' for 'inp'", "keep_full_weight", "auto_wrap_policy={MyBlock}"],
    ),
}


class FewHeads(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.config.num_key_value_heads = 1  # type: ignore[misc]


class Experts(nn.Module):
    _tp_plan: ClassVar = {"experts": "moe_tp_experts"}

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Linear(2, 2)


_REFUSALS = (ShardingError, UnsupportedCapabilityError)


def refused_on_ranks() -> dict[str, str]:
    messages = {}
    for case, (code, options, _) in REFUSED.items():
        fabric = new_fabric("fsdp2", 4, {"tensor_parallel_size": 2, **options})
        net = oracle.new_net(width=WIDTH)
        net = (code(net, fabric.strategy.device_mesh) if code else None) or net  # type: ignore[attr-defined]
        messages[case] = refusal(_REFUSALS, lambda net=net, fabric=fabric: fabric.setup(net))  # type: ignore[misc]
    return messages


def test_refused_by_name_on_all_ranks(ranks: RankPool) -> None:
    for messages in ranks.run(4, refused_on_ranks, timeout=200):
        amiss = {case: messages[case] for case, (*_, parts) in REFUSED.items() if not says(messages[case], parts)}
        assert not amiss, "\n".join(f"{case}: {message}" for case, message in amiss.items())


def says(message: str, parts: list[str]) -> bool:
    return was_refused(message) and all(part in message for part in parts)


def not_a_function(module: Any) -> Any:
    return module


#: Options that are refused when the strategy is built, and what the message says.
BAD_OPTIONS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "no function": ({"parallelize_fn": "shard"}, ["parallelize_fn='shard'", "def parallelize(module, device_mesh"]),
    "one argument": ({"parallelize_fn": not_a_function}, ["not_a_function", "a module and a mesh", "mp_policy"]),
    "an option is dropped": (
        {"parallelize_fn": returns_another, "cpu_offload": True},
        ["offload_policy was given", "returns_another", "does not take it"],
    ),
    "loss_parallel is no bool": ({"loss_parallel": "vocabulary"}, ["loss_parallel='vocabulary'", "True or False"]),
}


@pytest.mark.parametrize("front_end", ["trainer", "fabric"])
def test_refused_before_any_process_starts(tmp_path: Path, front_end: str) -> None:
    for options, parts in BAD_OPTIONS.values():
        start = partial(new_trainer, tmp_path) if front_end == "trainer" else new_fabric
        assert_says(refusal(UnsupportedCapabilityError, partial(start, "fsdp2", 2, options)), *parts)


def test_parallelize_before_there_is_a_module() -> None:
    from fsdp_fsdp2 import FSDP2Strategy, fabric

    with pytest.raises(ShardingError, match=r"before there is a module(?s:.*)trainer.fit\(module\)"):
        FSDP2Strategy().parallelize()
    with pytest.raises(ShardingError, match=r"before there is a module(?s:.*)fabric.setup\(model\)"):
        fabric.FSDP2Strategy().parallelize()
