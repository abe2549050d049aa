"""Train a byte-level GPT on the source of Python's standard library, sharded or not.

The strategy is a string. Nothing else in this file knows about sharding:

    python train_bytes.py --steps 200                                              # one process
    python train_bytes.py --steps 200 --strategy fsdp2 --accelerator cpu --devices 2 --checkpoint run1
    python train_bytes.py --steps 300 --strategy fsdp2 --accelerator cpu --devices 1 --resume run1
    PJRT_DEVICE=CPU python train_bytes.py --steps 300 --strategy xla_fsdp --devices 2 --resume run1

Ranks may be processes that run this file, or be started by `fit` and end with it, as on XLA devices. So what they need
is handed to the Trainer rather than made here by rank, and what they leave behind is in files.

Batches are chosen by step number and shared out among the processes, so a resumed run reads on where the first one
stopped, on however many processes.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import sysconfig
import time
import warnings
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def read_text() -> tuple[Tensor, Tensor]:
    """Read the standard library's ``.py`` files, in the order of their paths.

    Returns:
        Training and validation bytes (uint8, 1-D). Every twentieth file is kept for validation.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(p for p in root.rglob("*.py") if SKIPPED.isdisjoint(p.relative_to(root).parts))
    if len(files) < 20:
        raise SystemExit(f"found only {len(files)} .py files in {root}: this Python carries no source of its library.")
    train = bytearray().join(p.read_bytes() for i, p in enumerate(files) if i % 20)
    held_out = bytearray().join(p.read_bytes() for p in files[::20])
    return torch.frombuffer(train, dtype=torch.uint8), torch.frombuffer(held_out, dtype=torch.uint8)


class Block(nn.Module):
    """One transformer block: causal attention, then an MLP, each normalised first and added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, time, width) to the same shape."""
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c))
        x = x + self.mlp(self.norm2(x))
        return x


class Batches:
    """This rank's windows of every training step, beginning at the step that the Trainer is at.

    A step reads the same windows however many ranks share them, and needs no memory of the steps before it. So a
    checkpoint has no position to keep: after a resume the Trainer's step number is enough.
    """

    def __init__(self, module: ByteGPT, text: Tensor) -> None:
        self.module, self.text = module, text

    def __iter__(self) -> Iterator[Tensor]:
        """Yield bytes (batch size / ranks, context + 1)."""
        trainer, hparams = self.module.trainer, self.module.hparams
        context, size = hparams["context"], hparams["batch_size"]
        for step in count(trainer.global_step):
            starts = torch.randint(len(self.text) - context, (size,), generator=torch.Generator().manual_seed(step))
            mine = starts[trainer.global_rank :: trainer.world_size].tolist()
            yield torch.stack([self.text[i : i + context + 1] for i in mine])


class HeldOut:
    """This rank's share of 64 windows of the text that is not trained on."""

    def __init__(self, module: ByteGPT, text: Tensor) -> None:
        self.module, self.text = module, text

    def __iter__(self) -> Iterator[Tensor]:
        """Yield bytes (at most 8, context + 1)."""
        trainer = self.module.trainer
        windows = self.text.unfold(0, self.module.hparams["context"] + 1, len(self.text) // 64)[:64]
        yield from windows[trainer.global_rank :: trainer.world_size].split(8)


class ByteGPT(pl.LightningModule):
    """A GPT over bytes. ``batch_size`` counts the windows of a step over all processes together."""

    def __init__(
        self,
        width: int = 256,
        layers: int = 4,
        heads: int = 4,
        context: int = 128,
        batch_size: int = 8,
        lr: float = 1e-3,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embed, self.position = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        nn.init.normal_(self.embed.weight, std=0.5)
        nn.init.normal_(self.position.weight, std=0.1)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Predict the byte that follows each byte: (batch, time) to logits (batch, time, 256)."""
        x = self.embed(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def loss(self, windows: Tensor) -> Tensor:
        """Mean cross-entropy, in nats per byte, of windows (batch, context + 1)."""
        tokens = windows.long()
        return F.cross_entropy(self(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())

    def training_step(self, batch: Tensor) -> Tensor:
        """Return the loss of one batch."""
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Tensor) -> None:
        """Log the loss of one held-out batch."""
        self.log("val_loss", self.loss(batch), sync_dist=True, batch_size=len(batch))

    def predict_step(self, batch: tuple[Tensor, int]) -> Tensor:
        """Continue a prompt. Every process runs this with the same seed, because each holds a part of the weights."""
        tokens, count = batch
        dice = torch.Generator().manual_seed(0)
        for _ in range(count):
            logits = self(tokens[:, -self.hparams["context"] :])[:, -1].float().cpu()
            following = torch.multinomial((logits / 0.8).softmax(-1), 1, generator=dice)
            tokens = torch.cat([tokens, following.to(tokens.device)], dim=1)
        return tokens

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW that decays matrices but not biases and norms, after a linear warm-up."""
        groups = [
            {"params": [p for p in self.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in self.parameters() if p.ndim <= 1], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams["lr"], betas=(0.9, 0.95))
        warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warmup, "interval": "step"}}


class StepBar(TQDMProgressBar):
    """A progress bar that counts steps from the very first, resumed or not."""

    @property
    def total_train_batches(self) -> int:
        """Where the bar ends."""
        return self.trainer.max_steps

    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        """What stands behind the bar."""
        shown = trainer.progress_bar_metrics
        return {"loss": f"{shown['loss']:.3f}", "bytes/s": f"{shown['bytes/s']:,.0f}"} if "loss" in shown else {}


class SaveAtTheEnd(pl.Callback):
    """Saves when training ends, while there are ranks that hold what was trained."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save the optimizer too."""
        trainer.save_checkpoint(self.path, weights_only=False)


class Meter(pl.Callback):
    """Shows bytes/s, and writes what ``--log-json`` asks for."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.steps: list[dict[str, float]] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock."""
        self.clock = time.perf_counter()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Note the step's loss (the mean over processes) and speed (their sum)."""
        now = time.perf_counter()
        speed = pl_module.hparams["batch_size"] * pl_module.hparams["context"] / (now - self.clock)
        self.clock = now
        pl_module.log("bytes/s", speed, prog_bar=True)
        loss = float(trainer.callback_metrics["loss"])
        self.steps.append({"step": trainer.global_step, "loss": loss, "bytes_per_s": speed})

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Count what each process holds after its last step; under XLA's SPMD, each device of the one process."""
        parameters = list(pl_module.parameters())
        state = [t for s in trainer.optimizers[0].state.values() for t in s.values() if isinstance(t, Tensor)]
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        if pl_module.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(pl_module.device)
        counts = {
            "parameters": held_bytes(parameters),
            "gradients": held_bytes([p.grad for p in parameters if p.grad is not None]),
            "optimizer": held_bytes(state),
        }
        counts["peak"] = [peak] * len(counts["parameters"])  # the process's resident memory; on CUDA the device's
        gathered: Any = pl_module.all_gather(
            torch.tensor(list(counts.values()), device=pl_module.device).T.contiguous()
        )
        memory = [dict(zip(counts, row, strict=True)) for row in gathered.view(-1, len(counts)).tolist()]
        if self.path and trainer.is_global_zero:
            self.path.write_text(json.dumps({"steps": self.steps, "memory": memory}, indent=1))


def held_bytes(tensors: Iterable[Tensor]) -> list[int]:
    """Bytes that this process holds of some tensors, sharded or not: on its device, or on each of several."""
    xla = sys.modules.get("torch_xla.runtime")
    if xla is None or not xla.is_spmd():
        return [sum(t.to_local().nbytes if isinstance(t, DTensor) else t.nbytes for t in tensors)]
    from torch_xla.distributed.spmd import XLAShardedTensor

    held = [0] * xla.addressable_runtime_device_count()
    for tensor in (t for t in tensors if t.device.type == "xla"):  # counts of steps are on the host
        sharded = XLAShardedTensor(tensor)
        shards = sharded.local_shards if sharded.sharding_spec else []  # every device holds all of what isn't cut
        for device in range(len(held)):
            held[device] += shards[device].data.nbytes if shards else tensor.nbytes
    return held


def main() -> None:
    """Train, validate, and let the model write something."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="auto", help="a name from `fsdp list`, or one of Lightning's")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--devices", default="auto", help="processes; 'auto' takes what Lightning finds")
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--steps", type=int, default=200, help="train until this step, counted from the very first")
    parser.add_argument("--batch-size", type=int, default=8, help="windows per step, over all processes together")
    parser.add_argument("--context", type=int, default=128, help="bytes per window")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate after the warm-up")
    parser.add_argument("--checkpoint", type=Path, help="where to save after the last step")
    parser.add_argument("--resume", type=Path, help="a checkpoint to resume from")
    parser.add_argument("--log-json", type=Path, help="write loss, bytes/s and memory here")
    parser.add_argument("--sample", type=int, default=200, help="bytes of text to generate at the end")
    args = parser.parse_args()

    # The text is in memory already, and validation has a call of its own.
    warnings.filterwarnings("ignore", message=".*(does not have many workers|have no `val_dataloader`)")
    torch.set_float32_matmul_precision("high")
    pl.seed_everything(1234)  # every process builds the same weights
    train, held_out = read_text()
    module = ByteGPT(context=args.context, batch_size=args.batch_size, lr=args.lr)
    trainer = pl.Trainer(
        strategy=args.strategy,
        accelerator=args.accelerator,
        devices=int(args.devices) if args.devices.isdigit() else args.devices,
        precision=args.precision,
        max_steps=args.steps,
        callbacks=[
            Meter(args.log_json),
            StepBar(refresh_rate=5),
            *([SaveAtTheEnd(args.checkpoint)] if args.checkpoint else []),
        ],
        logger=False,
        enable_checkpointing=False,
        use_distributed_sampler=False,  # the batches below are each process's own already
    )
    if args.batch_size % trainer.world_size:
        raise SystemExit(f"--batch-size {args.batch_size} can't be shared equally by {trainer.world_size} processes.")

    trainer.fit(module, Batches(module, train), ckpt_path=args.resume)
    # ranks that ended with fit have left the weights in the checkpoint alone
    (metrics,) = trainer.validate(module, HeldOut(module, held_out), ckpt_path=args.checkpoint, verbose=False)
    requests: Any = [(torch.tensor([list(b"def ")]), args.sample)] if args.sample else []
    samples: Any = []
    if requests:
        samples = trainer.predict(module, DataLoader(requests, batch_size=None), ckpt_path=args.checkpoint)

    if trainer.is_global_zero:
        print(f"\nstep {args.steps}: validation loss {metrics['val_loss']:.3f} nats per byte")
        for sample in samples:
            print(f"a sample:\n{bytes(sample[0].tolist()).decode(errors='replace')}")
        if args.log_json:
            report = {**json.loads(args.log_json.read_text()), **metrics}
            args.log_json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
