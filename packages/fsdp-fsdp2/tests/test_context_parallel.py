"""Context parallelism: losses, gradients and weights are those of one process that sees whole sequences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler

import fsdp_core
from fsdp_core.errors import ShardingError, UnsupportedCapabilityError
from fsdp_core.testing import RankPool, oracle
from fsdp_core.testing.refusals import assert_says, refusal
from fsdp_core.testing.state import full_optimizer_state, full_state
from fsdp_core.testing.training import means, new_fabric, new_trainer

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
        positions = fsdp_core.sequence_positions(ids.shape[1])
        mask: Tensor | None = None
        if kind == "padded":  # of bools, for all queries
            mask = fsdp_core.gather_sequence(ids != 0)[:, None, None, :]
        elif kind == "packed":  # of floats, causal and by document
            assert document is not None
            keys = fsdp_core.gather_sequence(document)
            sees = (document[:, :, None] == keys[:, None, :]) & (positions[:, None] >= torch.arange(keys.shape[1]))
            mask = torch.zeros(sees.shape).masked_fill(~sees, float("-inf"))[:, None]
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


def plain(kind: str = "causal", accumulate: int = 1, clip: float | None = None) -> tuple[list[float], dict[str, Tensor]]:
    """The losses and weights of one process, with nothing of ours."""
    net = new_net()
    optimizer = oracle.adamw_groups(net)
    losses = []
    for i, batch in enumerate(batches()):
        loss = loss_of(net(batch["ids"], kind, batch["document"]), batch["labels"])
        losses.append(float(loss))
        (loss / accumulate).backward()
        if (i + 1) % accumulate == 0:
            if clip is not None:
                nn.utils.clip_grad_norm_(net.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return losses, {name: value.detach() for name, value in net.state_dict().items()}


def assert_same(got: list[tuple[list[float], dict[str, Tensor]]], want: tuple[list[float], dict[str, Tensor]]) -> None:
    for losses, state in got:
        assert losses == pytest.approx(want[0], abs=oracle.FP32_TOLERANCE)
        torch.testing.assert_close(state, want[1], rtol=oracle.FP32_TOLERANCE, atol=oracle.FP32_TOLERANCE)


PLAN: dict[str, Any] = {
    "blocks.*.attention.q": "colwise",
    "blocks.*.attention.kv": "colwise",
    "blocks.*.attention.out": "rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
}

#: Options and the number of ranks.
MESHES: dict[str, tuple[dict[str, Any], int]] = {
    "context 2": ({"context_parallel_size": 2}, 2),
    "context 4": ({"context_parallel_size": 4}, 4),
    "shard 2 x context 2": ({"context_parallel_size": 2, "data_parallel_size": 2}, 4),
    "replicate 2 x context 2": (
        {"context_parallel_size": 2, "data_parallel_size": 1, "data_parallel_replicate_size": 2},
        4,
    ),
    "context 2 x tensor 2": ({"context_parallel_size": 2, "tensor_parallel_size": 2, "tp_plan": PLAN}, 4),
    "shard 2": ({}, 2),
}


def options_of(mesh: str, prefix: str = "") -> dict[str, Any]:
    styles = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
    options = dict(MESHES[mesh][0])
    if "tp_plan" in options:
        options["tp_plan"] = {prefix + name: styles[style]() for name, style in options["tp_plan"].items()}
    return options


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
    run = new_trainer(tmp, "fsdp2", MESHES[mesh][1], {**options_of(mesh, "net."), **options}, **trainer)
    run.fit(module)
    state = {name.removeprefix("net."): value for name, value in full_state(run.strategy).items()}
    trained = means(module.losses), state
    logged = {name: float(value) for name, value in run.callback_metrics.items()}
    run.test(module, verbose=False)
    (*_, predicted) = run.predict(module) or ()
    return trained, logged, float(run.callback_metrics["test_loss"]), predicted, module.shapes


@pytest.mark.parametrize("mesh", ["context 2", "shard 2 x context 2"])
def test_trainer_in_every_stage(ranks: RankPool, tmp_path: Path, mesh: str) -> None:
    trainer = {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2, "num_sanity_val_steps": 1}
    got = ranks.run(MESHES[mesh][1], fit_on, mesh, str(tmp_path), "causal", trainer, {})
    want = plain(accumulate=2, clip=0.05)
    assert_same([trained for trained, *_ in got], want)
    net = new_net()
    net.load_state_dict(want[1])
    logits = [net(batch["ids"]) for batch in batches()]
    mean = sum(float(loss_of(y, batch["labels"])) for y, batch in zip(logits, batches(), strict=True)) / STEPS
    shares = MESHES[mesh][1] // 2
    for rank, (_, logged, tested, predicted, shapes) in enumerate(got):
        assert logged["loss"] == pytest.approx(want[0][-1], abs=oracle.FP32_TOLERANCE)
        assert tested == pytest.approx(mean, abs=oracle.FP32_TOLERANCE)
        assert logged["val_loss"] == pytest.approx(mean, abs=oracle.FP32_TOLERANCE)
        assert shapes == {(ROWS // shares, LENGTH // 2)}
        torch.testing.assert_close(predicted, logits[-1].detach().chunk(shares)[rank // 2], rtol=1e-4, atol=1e-5)


def fabric_fit_on(mesh: str, kind: str, options: dict[str, Any]) -> Any:
    fabric = new_fabric("fsdp2", MESHES[mesh][1], {**options_of(mesh), **options})
    net = new_net()
    model, optimizer = fabric.setup(net, oracle.adamw_groups(net))
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
        assert_same([by_kind[index] for by_kind in got], plain(kind))
