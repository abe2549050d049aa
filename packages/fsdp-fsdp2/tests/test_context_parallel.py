"""Context parallelism: losses, gradients and weights are those of one process that sees whole sequences."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler

import fsdp_core
from fsdp_core.errors import ShardingError, UnsupportedCapabilityError
from fsdp_core.testing import RankPool, oracle, short_runs
from fsdp_core.testing.meshes import DeclaredMesh
from fsdp_core.testing.oracle import Trained
from fsdp_core.testing.refusals import assert_says, refusal
from fsdp_core.testing.short_runs import assert_trained_alike
from fsdp_core.testing.state import full_state
from fsdp_core.testing.training import means, new_fabric, new_trainer
from mesh_runs import assert_moves

pytestmark = pytest.mark.everything

VOCABULARY, WIDTH, HEADS, LENGTH, ROWS, STEPS = 19, 16, 4, 8, 4, 4


class Attention(nn.Module):
    """Grouped-query attention with a mask over the whole sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None, causal: bool) -> Any:
        batch, length, _ = x.shape
        q = self.q(x).view(batch, length, -1, WIDTH // HEADS).transpose(1, 2)
        k, v = self.kv(x).view(batch, length, -1, 2, WIDTH // HEADS).permute(3, 0, 2, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, -1))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None, causal: bool) -> Any:
        x = x + self.attention(self.norm(x), mask, causal)
        return x + self.down(torch.tanh(self.up(x)))


class Transformer(nn.Module):
    """A small transformer. ``kind`` says which positions see which."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.table = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, kind: str = "causal", document: Tensor | None = None) -> Any:
        positions = fsdp_core.sequence_positions(ids.shape[1], ids.device)
        mask: Tensor | None = None
        if kind == "padded":  # of bools, for all queries
            mask = fsdp_core.gather_sequence(ids != 0)[:, None, None, :]
        elif kind == "packed":  # of floats, causal and by document
            assert document is not None
            keys = fsdp_core.gather_sequence(document)
            all_positions = torch.arange(keys.shape[1], device=ids.device)
            sees = (document[:, :, None] == keys[:, None, :]) & (positions[:, None] >= all_positions)
            mask = torch.zeros(sees.shape, device=ids.device).masked_fill(~sees, float("-inf"))[:, None]
        x = self.tokens(ids) + self.table(positions)
        for block in self.blocks:
            x = block(x, mask, kind == "causal")
        return self.head(x)


def new_net() -> Transformer:
    with oracle.seeded(5):
        return Transformer()


def batches(steps: int = STEPS) -> list[dict[str, Tensor]]:
    """Token ids, the last three of each row padding, without labels; and the documents that they belong to."""
    with oracle.seeded(7):
        found = []
        for _ in range(steps):
            ids = torch.randint(1, VOCABULARY, (ROWS, LENGTH))
            ids[:, -3:] = 0
            labels = torch.randint(0, VOCABULARY, (ROWS, LENGTH)).masked_fill(ids == 0, -100)
            labels[:, 0] = -100
            found.append({"ids": ids, "labels": labels, "document": (torch.arange(LENGTH) > 2).long().expand(ROWS, -1)})
        return found


def rows() -> Any:
    return [{key: value[i] for key, value in batch.items()} for batch in batches() for i in range(ROWS)]


def loss_of(logits: Tensor, labels: Tensor, weight: Tensor | None = None) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), weight)


def plain(kind: str = "causal", accumulate: int = 1, clip: float | None = None) -> Trained:
    """The losses and weights of one process, with nothing of ours."""
    net = new_net()
    optimizer = oracle.adamw_groups(net)
    losses = []
    for i, batch in enumerate(batches()):
        loss = loss_of(net(batch["ids"], kind, batch["document"]), batch["labels"])
        losses.append(loss.item())
        (loss / accumulate).backward()
        if (i + 1) % accumulate == 0:
            if clip is not None:
                nn.utils.clip_grad_norm_(net.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return losses, {name: value.detach() for name, value in net.state_dict().items()}


def plan(prefix: str) -> dict[str, Any]:
    columns, rows = ("attention.q", "attention.kv", "up"), ("attention.out", "down")
    styles: dict[str, Any] = {name: ColwiseParallel() for name in columns} | {name: RowwiseParallel() for name in rows}
    return {"tp_plan": {f"{prefix}blocks.*.{name}": style for name, style in styles.items()}}


MESHES: dict[str, DeclaredMesh] = {
    "context 2": DeclaredMesh(ranks=2, options={"context_parallel_size": 2}),
    "context 4": DeclaredMesh(ranks=4, options={"context_parallel_size": 4}),
    "shard 2 x context 2": DeclaredMesh(ranks=4, options={"context_parallel_size": 2, "data_parallel_size": 2}),
    "replicate 2 x context 2": DeclaredMesh(
        ranks=4, options={"context_parallel_size": 2, "data_parallel_size": 1, "data_parallel_replicate_size": 2}
    ),
    "context 2 x tensor 2": DeclaredMesh(
        ranks=4, options={"context_parallel_size": 2, "tensor_parallel_size": 2}, plan=plan
    ),
    "shard 2": DeclaredMesh(ranks=2),
}


def sampled(data: Any, strategy: Any, **options: Any) -> DataLoader[Any]:
    share = strategy.distributed_sampler_kwargs
    sampler: Any = DistributedSampler(data, **share, shuffle=False)
    return DataLoader(data, batch_size=ROWS // share["num_replicas"], sampler=sampler, **options)


class Lit(pl.LightningModule):
    def __init__(self, kind: str = "causal") -> None:
        super().__init__()
        self.net, self.kind = new_net(), kind
        self.losses: list[Tensor] = []
        self.shapes: set[tuple[int, ...]] = set()

    def train_dataloader(self) -> Any:
        assert self.trainer is not None
        return sampled(rows(), self.trainer.strategy)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader

    def loss(self, batch: Any) -> Tensor:
        self.shapes.add(tuple(batch["ids"].shape))
        return loss_of(self.net(batch["ids"], self.kind, batch["document"]), batch["labels"])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.losses.append(loss.detach())
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return fsdp_core.gather_sequence(self.net(batch["ids"], self.kind, batch["document"]))

    def configure_optimizers(self) -> Any:
        return oracle.adamw_groups(self)


def fit_on(mesh: str, tmp: str, kind: str, trainer: dict[str, Any], options: dict[str, Any]) -> Any:
    module = Lit(kind)
    run = new_trainer(tmp, "fsdp2", MESHES[mesh].ranks, {**MESHES[mesh].options_for("net."), **options}, **trainer)
    run.fit(module)
    state = {name.removeprefix("net."): value for name, value in full_state(run.strategy).items()}
    trained = means(module.losses), state
    logged = {name: float(value) for name, value in run.callback_metrics.items()}
    run.test(module, verbose=False)
    tested = float(run.callback_metrics["test_loss"])
    (*_, predicted) = run.predict(module) or ()
    return trained, logged, tested, predicted, module.shapes


@pytest.mark.parametrize("mesh", ["context 2", "shard 2 x context 2"])
def test_trainer_in_every_stage(ranks: RankPool, tmp_path: Path, mesh: str) -> None:
    trainer = {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2, "num_sanity_val_steps": 1}
    got = ranks.run(MESHES[mesh].ranks, fit_on, mesh, str(tmp_path), "causal", trainer, {})
    want = plain(accumulate=2, clip=0.05)
    assert_trained_alike([trained for trained, *_ in got], want)
    net = new_net()
    net.load_state_dict(want[1])
    logits = [net(batch["ids"]) for batch in batches()]
    mean = sum(float(loss_of(y, batch["labels"])) for y, batch in zip(logits, batches(), strict=True)) / STEPS
    shares = MESHES[mesh].ranks // 2
    for rank, (_, logged, tested, predicted, shapes) in enumerate(got):
        assert logged["loss"] == pytest.approx(want[0][-1], abs=oracle.FP32_TOLERANCE)
        assert tested == pytest.approx(mean, abs=oracle.FP32_TOLERANCE)
        assert logged["val_loss"] == pytest.approx(mean, abs=oracle.FP32_TOLERANCE)
        assert shapes == {(ROWS // shares, LENGTH // 2)}
        torch.testing.assert_close(predicted, logits[-1].detach()[rank // 2 :: shares], rtol=1e-4, atol=1e-5)


def fabric_fit_on(mesh: str, kind: str, options: dict[str, Any]) -> Any:
    options = {**MESHES[mesh].options_for(""), **options}
    fabric, _, model, optimizer = short_runs.set_up(
        "fsdp2", options, net=new_net(), optimizer=oracle.adamw_groups, world_size=MESHES[mesh].ranks
    )
    losses = []
    for batch in fabric.setup_dataloaders(sampled(rows(), fabric.strategy)):
        loss = loss_of(model(batch["ids"], kind, batch["document"]), batch["labels"])
        losses.append(loss.detach())
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return means(losses), full_state(fabric.strategy)


def every_kind_on(mesh: str) -> list[Any]:
    recomputed = {"activation_checkpointing_policy": {Block}}
    kinds: list[tuple[str, dict[str, Any]]] = [("causal", recomputed), ("padded", {}), ("packed", {}), ("all", {})]
    return [fabric_fit_on(mesh, kind, options) for kind, options in kinds]


@pytest.mark.parametrize("mesh", ["context 4", "replicate 2 x context 2", "context 2 x tensor 2"])
def test_masks_under_fabric(ranks: RankPool, mesh: str) -> None:
    got = ranks.run(4, every_kind_on, mesh)
    for index, kind in enumerate(("causal", "padded", "packed", "all")):
        assert_trained_alike([by_kind[index] for by_kind in got], plain(kind))


def trained(mesh: str) -> tuple[Any, Any, Any]:
    fabric, _, model, optimizer = short_runs.set_up(
        "fsdp2",
        MESHES[mesh].options_for(""),
        net=new_net(),
        optimizer=oracle.adamw_groups,
        world_size=MESHES[mesh].ranks,
    )
    (batch,) = fabric.setup_dataloaders(DataLoader(batches(1), batch_size=None))  # type: ignore[arg-type]
    fabric.backward(loss_of(model(batch["ids"]), batch["labels"]))
    optimizer.step()
    return fabric, model, optimizer


def test_checkpoints_move_between_meshes(ranks: RankPool, tmp_path: Path) -> None:
    assert_moves(ranks, tmp_path / "both", trained, "context 2 x tensor 2", "context 2", MESHES)
    model = assert_moves(ranks, tmp_path / "context", trained, "context 2", "shard 2", MESHES)
    in_one_process = fsdp_core.load_state_dict(tmp_path / "context")
    torch.testing.assert_close(in_one_process, model, rtol=0, atol=0)


class Dropping(nn.Module):
    """Attention with dropout in it and after it."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(WIDTH, WIDTH)
        self.level = 0.0
        self.kept = torch.zeros(0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        self.level = float(torch.rand(()))
        self.kept = functional.dropout(torch.ones_like(x), 0.5, self.training)
        y = functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5 if self.training else 0.0)
        return functional.dropout(y, 0.5, self.training) * self.kept


def dropped_on() -> Any:
    found = []
    for policy in (None, {Dropping}):
        torch.manual_seed(3)
        fabric = new_fabric("fsdp2", 2, {"context_parallel_size": 2, "activation_checkpointing_policy": policy})
        torch.manual_seed(3)
        net = nn.Sequential(Dropping())
        model = fabric.setup(net)
        x = fabric.strategy.split_batch(torch.ones(2, LENGTH, WIDTH))  # type: ignore[attr-defined]
        torch.manual_seed(4)
        fabric.backward(model(x).sum())
        dropping: Any = net[0]
        gradients = {name: parameter.grad.full_tensor() for name, parameter in net.named_parameters()}
        found.append((dropping.level, dropping.kept, gradients, float(torch.rand(()))))
    return found


def test_dropout_differs_between_parts_and_other_numbers_do_not(ranks: RankPool) -> None:
    (first, first_again), (second, second_again) = ranks.run(2, dropped_on)
    assert (first[0], first[3]) == (second[0], second[3])
    assert not torch.equal(first[1], second[1])
    for once, again in ((first, first_again), (second, second_again)):  # recomputed
        assert once[0] == again[0]
        assert torch.equal(once[1], again[1])
        torch.testing.assert_close(once[2], again[2])


def smoothed(logits: Tensor, labels: Tensor) -> Tensor:
    """With all arguments by position."""
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), None, None, -100, None, "mean", 0.1)


def losses_by_hand() -> Any:
    """Losses whose weighting is the user's, of logits that are the batch itself."""
    fabric = new_fabric("fsdp2", 2, {"context_parallel_size": 2})
    strategy: Any = fabric.strategy
    net = nn.Linear(VOCABULARY, VOCABULARY)
    nn.init.eye_(net.weight)
    nn.init.zeros_(net.bias)
    model = fabric.setup(nn.Sequential(net, SeesAll()))
    batch = {"x": LOGITS, "labels": batches(1)[0]["labels"]}
    weight = torch.linspace(0.5, 2, VOCABULARY, device=fabric.device)

    def run(loss: Any) -> float:
        part = strategy.split_batch(fabric.to_device({"x": batch["x"].clone(), "labels": batch["labels"].clone()}))
        value = loss(model(part["x"]), part["labels"])
        fabric.backward(value)
        return float(fabric.all_reduce(value.detach()))

    def masked_mean(logits: Tensor, labels: Tensor) -> Tensor:
        each = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return each.sum() / (labels != -100).sum()

    def token_mean(logits: Tensor, labels: Tensor) -> Tensor:
        each = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return fsdp_core.token_mean(each.sum(), (labels != -100).sum())

    return (
        run(lambda logits, labels: loss_of(logits, labels, weight)),
        run(token_mean),
        run(lambda logits, labels: loss_of(logits, fsdp_core.shift_labels(labels))),
        run(lambda logits, labels: functional.nll_loss(logits.log_softmax(-1).movedim(-1, 1), labels)),
        run(smoothed),
        refusal(ShardingError, lambda: run(masked_mean)),
        refusal(ShardingError, lambda: run(lambda y, labels: loss_of(y[:, :-1], labels[:, 1:]))),
    )


def ragged_batches() -> list[dict[str, Tensor]]:
    """Batches of which each row has another number of labels."""
    found = batches(2)
    for number, batch in enumerate(found):
        for row in range(ROWS):
            batch["labels"][row, 1 + (row + number) % 4 :] = -100
    return found


def token_means_on_parts() -> Trained:
    """A step of two micro-batches on two data-parallel ranks, each with two context-parallel ones."""
    fabric = new_fabric("fsdp2", 4, {"context_parallel_size": 2, "data_parallel_size": 2})
    strategy: Any = fabric.strategy
    net = new_net()
    model, optimizer = fabric.setup(net, oracle.sgd(net))
    means = []
    for number, batch in enumerate(ragged_batches()):
        own = {key: value.chunk(2)[strategy.runtime.data_parallel_rank] for key, value in batch.items()}
        part = strategy.split_batch(fabric.to_device(own))
        with fabric.no_backward_sync(model, enabled=number == 0):
            losses = functional.cross_entropy(
                model(part["ids"]).flatten(0, 1), part["labels"].flatten(), reduction="none"
            )
            loss = fsdp_core.token_mean(losses, part["labels"].flatten() != -100, accumulated=True)
            fabric.backward(loss)
        means.append(loss.item())
    optimizer.step()
    return means, full_state(strategy)


def test_token_means_are_over_data_and_parts(ranks: RankPool) -> None:
    net = new_net()
    optimizer = oracle.sgd(net)
    totals, counts = [], []
    for batch in ragged_batches():
        logits = net(batch["ids"]).flatten(0, 1)
        totals.append(functional.cross_entropy(logits, batch["labels"].flatten(), reduction="sum"))
        counts.append(int((batch["labels"] != -100).sum()))
    (sum(totals) / sum(counts)).backward()
    optimizer.step()
    want = [float(total) / count for total, count in zip(totals, counts, strict=True)], net.state_dict()
    assert_trained_alike(ranks.run(4, token_means_on_parts), want)


class SeesAll(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 0 * functional.scaled_dot_product_attention(x, x, x)


with oracle.seeded(11):
    LOGITS = torch.randn(ROWS, LENGTH, VOCABULARY)


def test_losses_are_means_over_all_tokens_or_refused(ranks: RankPool) -> None:
    labels, weight = batches(1)[0]["labels"], torch.linspace(0.5, 2, VOCABULARY)
    want = [
        loss_of(LOGITS, labels, weight),
        loss_of(LOGITS, labels),
        loss_of(LOGITS[:, :-1], labels[:, 1:]),
        loss_of(LOGITS, labels),
        smoothed(LOGITS, labels),
    ]
    for *got, by_hand, shifted in ranks.run(2, losses_by_hand):
        assert got == pytest.approx(list(map(float, want)), abs=oracle.FP32_TOLERANCE)
        assert_says(by_hand, "'labels'", "12, 4", "fsdp_core.token_mean")
        assert_says(shifted, "12 labels", "the next rank holds", "fsdp_core.shift_labels")


class Wrong(nn.Module):
    """A model that is wrong on a part of a sequence."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.inp = kind, nn.Linear(WIDTH, WIDTH)
        self.table = nn.Parameter(torch.zeros(LENGTH, WIDTH))
        self.heads = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.turns = {"cos": torch.ones(LENGTH, WIDTH)}  # no buffer

    def forward(self, x: Tensor) -> Any:
        x, length = self.inp(x), x.shape[1]
        q = x.view(*x.shape[:2], 2, -1).transpose(1, 2)
        match self.kind:
            case "arange":
                x = x + self.table[torch.arange(length)]
            case "table":
                x = x + self.table[:length]
            case "plain table":
                x = x * self.turns["cos"][None, :length]
            case "by hand":
                return torch.softmax(q @ q.mT, -1) @ q
            case "weights":
                return self.heads(x, x, x)[0]
            case "imported":
                return IMPORTED(q, q, q)
            case "local mask":
                mask = torch.ones(length, length, dtype=torch.bool).tril()
                return functional.scaled_dot_product_attention(q, q, q, mask)
            case "class token":
                q = torch.cat([q[:, :, :1], q], 2)
            case "none":
                return x
        return functional.scaled_dot_product_attention(q, q, q, is_causal=True)


IMPORTED = functional.scaled_dot_product_attention

X = torch.zeros(2, LENGTH, WIDTH)

#: What is done with a model, and what the message says.
WRONG: dict[str, list[str]] = {
    "arange": ["torch.arange(4)", "counts the positions", "fsdp_core.sequence_positions"],
    "table": ["(8, 16) was cut to [:4]", "first positions", "table[positions]"],
    "plain table": ["attribute of shape (8, 16) was cut to [:4]", "first positions", "table[positions]"],
    "by hand": ["(2, 2, 4, 4)", "attention by hand", "attn_implementation='sdpa'"],
    "weights": ["need_weights=True", "need_weights=False"],
    "imported": ["imported before", "torch.nn.functional.scaled_dot_product_attention"],
    "local mask": ["(4, 4) has 4 keys", "the 8 of the whole sequence", "fsdp_core.gather_sequence"],
    "class token": ["over 5 positions", "have had 4", "leave context_parallel_size out"],
    "none": ["context parallel on a model without SDPA", "Wrong", "leave context_parallel_size out"],
}

#: Options, a batch, and what is said of it.
BATCHES: dict[str, tuple[dict[str, Any], Any, list[str]]] = {
    "odd": ({}, torch.zeros(2, 7, 3), ["of length 7", "context_parallel_size=2", "such as 8"]),
    "nothing to split": ({}, {"y": torch.zeros(4)}, ["no tensor has a second", "'y' (4,)", "context_parallel_dims"]),
    "sizes": ({}, (X, torch.zeros(2, 3)), ["different sizes", "'0' (2, 8, 16)", "'1' (2, 3)", "parallel_dims="]),
    "a name": ({"context_parallel_dims": {"ids": 1}}, {"x": X}, ["'ids'", "no tensor of the batch", "'x' (2, 8, 16)"]),
    "a dim": ({"context_parallel_dims": {"x": 3}}, {"x": X}, ["'x'", "no dimension 3"]),
}


def refused_on() -> dict[str, str]:
    found = {}
    for name, (options, batch, _) in BATCHES.items():
        fabric = new_fabric("fsdp2", 2, {"context_parallel_size": 2, **options})
        strategy: Any = fabric.strategy
        found[name] = refusal(ShardingError, partial(strategy.split_batch, batch))
    strategy = new_fabric("fsdp2", 2, {"context_parallel_size": 2, "context_parallel_dims": {"0.x": -1}}).strategy
    found["named"] = str([tuple(t.shape) for t in strategy.split_batch([{"x": X, "y": X}])[0].values()])
    found["twice"] = refusal(ShardingError, lambda: strategy.split_batch(strategy.split_batch([{"x": X}])))
    fabric = new_fabric("fsdp2", 2, {"context_parallel_size": 2})
    strategy = fabric.strategy
    found["peers"] = refusal(ShardingError, lambda: strategy.split_batch(X + strategy.runtime.rank))
    for kind in WRONG:
        fabric = new_fabric("fsdp2", 2, {"context_parallel_size": 2, "auto_wrap_policy": None})
        model, strategy = fabric.setup(Wrong(kind)), fabric.strategy
        if kind == "arange":
            found["not split"] = refusal(ShardingError, partial(model, X))
        part = strategy.split_batch(X)
        found[kind] = refusal(ShardingError, partial(model, part))
    found["teacher"] = refusal(ShardingError, lambda: Wrong("")(part))  # was not set up
    with torch.no_grad():
        Wrong("")(X)  # whole sequences
    found["rnn"] = refusal(ShardingError, lambda: fabric.setup(nn.LSTM(2, 2)))
    fabric = new_fabric("fsdp2", 2, {"context_parallel_size": 2})
    by_hand = nn.Sequential(nn.Linear(2, 2))
    fully_shard(by_hand, mesh=fabric.strategy.device_mesh["data_parallel"])  # type: ignore[attr-defined]
    found["own code"] = refusal(UnsupportedCapabilityError, lambda: fabric.setup(by_hand))
    options = {"context_parallel_size": 2, "parallelize_fn": lambda module, device_mesh: module}
    fabric = new_fabric("fsdp2", 2, options)
    found["function"] = refusal(UnsupportedCapabilityError, lambda: fabric.setup(nn.Sequential(nn.Linear(2, 2))))
    return found


def test_what_is_wrong_on_a_part_of_a_sequence(ranks: RankPool) -> None:
    for found in ranks.run(2, refused_on):
        for name, (_, _, words) in BATCHES.items():
            assert_says(found[name], *words)
        for name, words in WRONG.items():
            assert_says(found[name], *words)
        assert found["named"] == "[(2, 8, 8), (2, 8, 16)]"
        assert_says(found["twice"], "'0.x'", "already the part", "split_batch()")
        assert_says(found["peers"], "different batches", "distributed_sampler_kwargs")
        assert_says(found["not split"], "no batch has been split", "split_batch(batch)")
        assert_says(found["teacher"], "over 4 positions", "not context parallel", "fabric.setup(model)")
        assert_says(found["rnn"], "LSTM", "neighbouring positions")
        assert_says(found["own code"], "context_parallel_size=2", "a module that its own code shards", "tp_plan")
        assert_says(found["function"], "context_parallel_size=2 does not go together with parallelize_fn", "tp_plan")


def half_on(precision: str) -> Any:
    options = {"context_parallel_size": 2}
    fabric, _, model, optimizer = short_runs.set_up("fsdp2", options, net=new_net(), precision=precision)
    batch = fabric.strategy.split_batch(fabric.to_device(batches(1)[0]))  # type: ignore[attr-defined]
    loss = loss_of(model(batch["ids"], "padded"), batch["labels"])
    fabric.backward(loss)
    optimizer.step()
    return means([loss.detach()]), full_state(fabric.strategy)


def test_bf16_mixed(ranks: RankPool) -> None:
    net = new_net()
    optimizer, batch = oracle.sgd(net), batches(1)[0]
    loss = loss_of(net(batch["ids"], "padded"), batch["labels"])
    loss.backward()
    optimizer.step()
    for losses, state in ranks.run(2, half_on, "bf16-mixed"):
        assert losses == pytest.approx([float(loss)], abs=oracle.HALF_TOLERANCE)
        torch.testing.assert_close(state, dict(net.state_dict()), rtol=0, atol=oracle.HALF_TOLERANCE)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"context_parallel_size": 3}, ["context_parallel_size=3 does not divide 2 ranks"]),
        ({"context_parallel_dims": {"ids": 1}}, ["without context_parallel_size", "context_parallel_size=2 or more"]),
        ({"context_parallel_dims": ["ids"]}, ["context_parallel_dims=['ids']", "{'input_ids': 1"]),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], words: list[str]) -> None:
    assert_says(refusal(UnsupportedCapabilityError, lambda: new_fabric("fsdp2", 2, options)), *words)


def test_steps_over_the_loader_are_refused(ranks: RankPool, tmp_path: Path) -> None:
    for told in ranks.run(2, fit_by_loader, str(tmp_path)):
        assert_says(told, "training_step(dataloader_iter)", "context_parallel_size", "training_step(batch, batch_idx)")


class ByLoader(Lit):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        return None


def fit_by_loader(tmp: str) -> str:
    run = new_trainer(tmp, "fsdp2", 2, {"context_parallel_size": 2})
    return refusal(UnsupportedCapabilityError, lambda: run.fit(ByLoader()))
