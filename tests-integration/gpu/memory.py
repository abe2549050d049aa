"""Part 6: the peak of a fit's memory beside the sum on paper, and what fits leave behind.

On paper, one rank holds at the peak, which is between the forward and the backward pass, or early in the latter:

- 16 bytes per parameter: weights, the last step's gradients and two moments of AdamW, all in fp32. Lightning frees the
  gradients after the forward pass; then the new ones come, unit by unit.
- What FSDP has gathered, in the dtype of computation: the root, which stays gathered through a step, and two units, of
  which one computes and the next is prefetched.
- What autograd keeps of the forward pass for the backward pass. It is counted in a pass of the unsharded model
  (``torch.autograd.graph.saved_tensors_hooks``): each storage once, without those of parameters.

Nothing is allowed for what operations need for themselves, nor for what the allocator rounds up.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from card import ACCELERATOR, DEVICE, HAS_CARD, arguments, synchronize
from records import Records
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from transformer import Size, transformer

from llama import ONE_B, TINY, LlamaSize, decoder_layers, new_llama

STRATEGIES = ("fsdp2", "fsdp_native")
PRECISIONS = ("32-true", "bf16-mixed")

#: 151 million parameters, 2.4 GB with gradients and moments, and 4,096 tokens per step; small for a rehearsal.
LARGE = Size(width=1024, layers=12, windows=8, context=512)
SMALL = Size(width=64, layers=3, windows=2, context=32)

#: The steps of a fit: all that is allocated lazily is there after two.
STEPS = 4


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is trained.

    Attributes:
        name: What figures call it.
        build: Makes the model, on the default device.
        loss: The loss of a batch.
        units: What FSDP shards one by one, besides the root.
        batch: A batch of tokens in host memory, int64 (sequences, time).
    """

    name: str
    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Tensor], Tensor]
    units: Callable[[nn.Module], Sequence[nn.Module]]
    batch: Callable[[], Tensor]


def transformer_of(name: str, size: Size) -> Workload:
    """The benchmarks' transformer."""
    return Workload(
        name=name,
        build=lambda: transformer(size),
        loss=lambda model, tokens: model(tokens),
        units=lambda model: list(model.blocks),  # type: ignore[arg-type]
        batch=lambda: torch.randint(size.vocabulary, (size.windows, size.context + 1)),
    )


def llama_of(name: str, size: LlamaSize) -> Workload:
    """A Llama of transformers."""
    return Workload(
        name=name,
        build=lambda: new_llama(size),
        loss=lambda model, tokens: model(input_ids=tokens, labels=tokens).loss,
        units=decoder_layers,
        batch=lambda: torch.randint(size.vocabulary, (size.sequences, size.sequence)),
    )


class TrainedWorkload(pl.LightningModule):
    """A workload with AdamW, fused on a card, where other implementations allocate temporary tensors."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.model = workload.build()
        self.workload = workload

    def training_step(self, tokens: Tensor) -> Tensor:
        return self.workload.loss(self.model, tokens)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, eps=1e-3, fused=HAS_CARD)


def fit(strategy: str, precision: str, workload: Workload, folder: Path) -> None:
    """Train a few steps, and leave nothing."""
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator=ACCELERATOR,
        devices=1,
        precision=precision,  # type: ignore[arg-type]
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=folder,
    )
    data = torch.utils.data.DataLoader([workload.batch() for _ in range(STEPS)], batch_size=None)  # type: ignore[arg-type]
    trainer.fit(TrainedWorkload(workload), data)


def collect() -> None:
    """Free what nothing refers to, also what the allocator keeps for later."""
    gc.collect()
    if HAS_CARD:
        synchronize()
        torch.cuda.empty_cache()


def saved_bytes(workload: Workload, dtype: torch.dtype | None) -> int:
    """What autograd keeps of a forward pass of the unsharded model.

    Args:
        workload: The model and its batch.
        dtype: The dtype to which the model is converted and autocast, as mixed precision does; ``None`` for fp32.
    """
    model = workload.build().to(DEVICE)
    if dtype is not None:
        model.to(dtype)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast(ACCELERATOR, dtype or torch.bfloat16, enabled=dtype is not None),
    ):
        loss = workload.loss(model, workload.batch().to(DEVICE))
    total = sum(storages.values())
    del loss, model
    collect()
    return total


def bytes_on_paper(workload: Workload, dtype: torch.dtype | None) -> dict[str, int]:
    """The sum that the module's docstring tells, by term.

    Args:
        workload: The model and its batch.
        dtype: The dtype of computation; ``None`` for fp32.
    """
    model = workload.build()
    parameters, units = count(model), list(map(count, workload.units(model)))
    del model
    collect()
    width = (dtype or torch.float32).itemsize
    return {
        "weights, gradients, moments": 16 * parameters,
        "gathered": width * (parameters - sum(units) + 2 * max(units)),
        "kept for the backward pass": saved_bytes(workload, dtype),
    }


def count(module: nn.Module) -> int:
    """The elements of a module's parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


def measure_peak(strategy: str, precision: str, workload: Workload, folder: Path, records: Records) -> None:
    """Record the peak of a fit's memory beside the sum on paper.

    Args:
        strategy: The strategy's name.
        precision: Lightning's precision string.
        workload: What is trained.
        folder: Where the Trainer may write.
        records: Where figures go.
    """
    with records.check(f"peak of {workload.name}, {strategy}, {precision}") as details:
        paper = bytes_on_paper(workload, None if precision == "32-true" else torch.bfloat16)
        collect()
        before = torch.cuda.memory_allocated() if HAS_CARD else 0
        if HAS_CARD:
            torch.cuda.reset_peak_memory_stats()
        fit(strategy, precision, workload, folder)
        details |= {"paper": paper}
        ratio = None
        reason = {} if HAS_CARD else {"reason": "the CPU's allocator keeps no statistics"}
        if HAS_CARD:
            details["allocated"] = torch.cuda.max_memory_allocated() - before
            details["reserved"] = torch.cuda.max_memory_reserved()
            ratio = details["allocated"] / sum(paper.values())
        records.figure(
            f"peak memory ÷ paper, {workload.name}, {strategy}, {precision}", ratio, at_most=1.05, **reason, **details
        )


def living_tensors() -> Counter[tuple[str, tuple[int, ...]]]:
    """The tensors that exist, by device and shape."""
    living: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for candidate in gc.get_objects():
        if isinstance(candidate, Tensor):
            living[candidate.device.type, tuple(candidate.shape)] += 1
    return living


def resources() -> dict[str, int]:
    """What a process has that a fit could leave behind: memory of the device, threads, open files."""
    measured = {"threads": threading.active_count(), "files": len(os.listdir("/proc/self/fd"))}
    if HAS_CARD:
        measured |= {"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()}
    return measured


def check_leftovers(strategy: str, workload: Workload, folder: Path, fits: int, records: Records) -> None:
    """Check that fits leave no tensors behind, and that the last of many leaves what the second has left.

    Args:
        strategy: The strategy's name.
        workload: What is trained.
        folder: Where the Trainer may write.
        fits: How many there are.
        records: Where it is said.
    """
    with records.check(f"{fits} fits of {strategy} in one process leave nothing") as details:
        for number in range(1, fits + 1):
            fit(strategy, "32-true", workload, folder)
            collect()
            if number == 2:
                early, tensors = resources(), living_tensors()
        late, more = resources(), living_tensors() - tensors
        details |= {"after 2": early, f"after {fits}": late, "tensors": {str(key): n for key, n in more.items()}}
        assert not more, f"tensors are left: {details['tensors']}"
        grown = [name for name in late if late[name] > early[name]]  # a thread may have been about to end
        assert not grown, f"{', '.join(grown)} grew: after 2 fits there was {early}, and after {fits} there is {late}"


def main() -> None:
    """Run the part."""
    words, records = arguments("memory", __doc__)
    deadline = time.monotonic() + words.seconds
    small = transformer_of("a small transformer", SMALL)
    peaks = [
        (strategy, precision, small if words.tiny else transformer_of("a transformer of 151 M", LARGE))
        for strategy in STRATEGIES
        for precision in PRECISIONS
    ]
    llama = llama_of("a small Llama", TINY) if words.tiny else llama_of("a Llama of 1 B", ONE_B)
    peaks.insert(1, ("fsdp2", "bf16-mixed", llama))
    for strategy, precision, workload in peaks:
        name = f"peak of {workload.name}, {strategy}, {precision}"
        if time.monotonic() > deadline:
            records.outcome(name, "left out", reason="the time was up")
        elif workload is llama and importlib.util.find_spec("transformers") is None:
            records.outcome(name, "left out", reason="transformers can't be imported. Type: pip install transformers")
        else:
            measure_peak(strategy, precision, workload, words.out, records)
    for strategy in STRATEGIES:
        if time.monotonic() > deadline:
            records.outcome(f"what fits of {strategy} leave", "left out", reason="the time was up")
        else:
            check_leftovers(strategy, small, words.out, 10, records)


if __name__ == "__main__":
    main()
