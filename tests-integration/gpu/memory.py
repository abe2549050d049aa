"""Part 5: the peak of a fit's memory beside the sum on paper, and what fits leave behind.

On paper, the peak of a rank alone is where the forward pass has ended and the backward pass has not begun:

- 16 bytes per parameter: weights, the last step's gradients and two moments of AdamW, all in fp32. Lightning frees the
  gradients after the forward pass; then the new ones come, unit by unit, while what autograd keeps goes.
- What FSDP has gathered, in the dtype of computation: the root, which stays gathered through a step, and two units:
  the last one, which is kept for the backward pass, and the next, which several ranks would prefetch. Of one rank,
  FSDP1 gathers nothing in fp32: it computes with the weights themselves.
- What autograd keeps of the forward pass for the backward pass. It is counted in a pass of the unsharded model
  (``torch.autograd.graph.saved_tensors_hooks``): each storage once, without those of parameters.
- The workspaces of cuBLAS, which torch takes from its allocator once per thread and stream. They are what is freed by
  ``_cuda_clearCublasWorkspaces``.

Unreduced gradients add nothing: a unit's, in the dtype of computation and in that of the reduction, are less than the
last step's gradients, which are gone by then. Nothing is allowed for what operations need for themselves, nor for what
the allocator rounds up: the bar of 1.05 is for these.
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
        is_main: Whether figures leave its name out.
    """

    name: str
    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Tensor], Tensor]
    units: Callable[[nn.Module], Sequence[nn.Module]]
    batch: Callable[[], Tensor]
    is_main: bool = False


def transformer_on_device(size: Size) -> nn.Module:
    """The benchmarks' transformer, initialised where it computes, which takes a card no time."""
    with DEVICE:
        return transformer(size)


def transformer_of(name: str, size: Size) -> Workload:
    """The benchmarks' transformer."""
    return Workload(
        name=name,
        build=lambda: transformer_on_device(size),
        loss=lambda model, tokens: model(tokens),
        units=lambda model: list(model.blocks),  # type: ignore[arg-type]
        batch=lambda: torch.randint(size.vocabulary, (size.windows, size.context + 1)),
        is_main=True,
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
    """A workload with AdamW, fused: other implementations allocate temporary tensors."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.model = workload.build()
        self.workload = workload

    def training_step(self, tokens: Tensor) -> Tensor:
        return self.workload.loss(self.model, tokens)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, eps=1e-3, fused=True)


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


def collect() -> int:
    """Free what nothing refers to, also what the allocator keeps for later.

    Returns:
        The bytes of cuBLAS's workspaces, which are freed, too: they belong to no fit.
    """
    gc.collect()
    if not HAS_CARD:
        return 0
    synchronize()
    allocated = torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return allocated - torch.cuda.memory_allocated()


def wait_for(is_so: Callable[[], bool]) -> None:
    """Wait two seconds for what ends by itself: a thread, or NCCL's watch over a collective that has ended.

    Args:
        is_so: Whether it has ended.
    """
    for _ in range(20):
        if is_so():
            return
        time.sleep(0.1)
        collect()


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


def bytes_on_paper(strategy: str, workload: Workload, dtype: torch.dtype | None) -> dict[str, int]:
    """The sum that the module's docstring tells, by term, without workspaces.

    Args:
        strategy: The strategy's name.
        workload: The model and its batch.
        dtype: The dtype of computation; ``None`` for fp32.
    """
    model = workload.build()
    parameters, units = count(model), list(map(count, workload.units(model)))
    del model
    collect()
    width = 0 if strategy == "fsdp_native" and dtype is None else (dtype or torch.float32).itemsize
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
        paper = bytes_on_paper(strategy, workload, None if precision == "32-true" else torch.bfloat16)
        collect()
        before = restart_peak()
        fit(strategy, precision, workload, folder)
        peak = measured_peak()
        paper["workspaces"] = collect()
        details |= {"paper": paper, "before": before, "peak": peak}
        ratio, reason = None, {"reason": "the CPU's allocator keeps no statistics; the process's memory is in details"}
        if HAS_CARD:
            ratio, reason = (peak["allocated"] - before["allocated"]) / sum(paper.values()), {}
        label = f"{strategy}, {precision}" if workload.is_main else f"{workload.name}, {strategy}, {precision}"
        records.figure(f"peak memory ÷ paper, {label}", ratio, at_most=1.05, **reason, **details)
        if HAS_CARD:
            wait_for(lambda: torch.cuda.memory_allocated() == before["allocated"])
            left = torch.cuda.memory_allocated()
            shapes = {str(key): n for key, n in living_tensors().items() if key[0] == ACCELERATOR}
            assert left == before["allocated"], f"{left - before['allocated']} bytes are left after a fit: {shapes}"


def resident(name: str) -> int:
    """The memory of this process in bytes.

    Args:
        name: ``"VmRSS"``, now, or ``"VmHWM"``, its peak.
    """
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return 1024 * int(line.split()[1])


def restart_peak() -> dict[str, int]:
    """Let the peak begin anew.

    Returns:
        The memory now, which ``del`` and a collection have left: of the card, or of the process on the CPU.
    """
    if HAS_CARD:
        torch.cuda.reset_peak_memory_stats()
        return {"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()}
    Path("/proc/self/clear_refs").write_text("5")
    return {"resident": resident("VmRSS")}


def measured_peak() -> dict[str, int]:
    """The peak since the last :func:`restart_peak`."""
    if HAS_CARD:
        return {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    return {"resident": resident("VmHWM")}


def living_tensors() -> Counter[tuple[str, tuple[int, ...]]]:
    """The tensors that exist, by device and shape.

    Types are asked, not objects: ``isinstance`` would wake lazy modules and proxies.
    """
    living: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for candidate in gc.get_objects():
        if issubclass(type(candidate), Tensor):
            living[candidate.device.type, tuple(candidate.shape)] += 1
    return living


def resources() -> dict[str, int]:
    """What a process has that a fit could leave behind: memory of the device, threads, open files."""
    measured = {"threads": threading.active_count(), "files": len(os.listdir("/proc/self/fd"))}
    if HAS_CARD:
        measured |= {"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()}
    return measured


def grown(before: dict[str, int]) -> list[str]:
    """What of :func:`resources` a process has more of than before; less is right: a thread may have been ending."""
    now = resources()
    return [name for name in now if now[name] > before[name]]


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
        collect()
        before, at_first = resources(), living_tensors()
        for number in range(1, fits + 1):
            fit(strategy, "32-true", workload, folder)
            collect()
            if number == 1:
                details |= {"before": before, "after 1": resources()}
                details["tensors after 1"] = {str(key): n for key, n in (living_tensors() - at_first).items()}
            if number == 2:
                early, tensors = resources(), living_tensors()
        wait_for(lambda: not grown(early))
        late, more = resources(), living_tensors() - tensors
        details |= {"after 2": early, f"after {fits}": late, "tensors": {str(key): n for key, n in more.items()}}
        assert not details["tensors after 1"], f"tensors are left after a fit: {details['tensors after 1']}"
        assert not more, f"tensors are left: {details['tensors']}"
        assert not grown(early), (
            f"{grown(early)} grew: after 2 fits there was {early}, and after {fits} there is {late}"
        )


def main() -> None:
    """Run the part."""
    words, records = arguments("memory", __doc__)
    deadline = words.deadline
    small = transformer_of("a small transformer", SMALL)
    peaks = [
        (strategy, precision, small if words.tiny else transformer_of("a transformer of 151 M", LARGE))
        for strategy in STRATEGIES
        for precision in PRECISIONS
    ]
    llama = llama_of("a small Llama", TINY) if words.tiny else llama_of("a Llama of 1 B", ONE_B)
    peaks.insert(1, ("fsdp2", "bf16-mixed", llama))
    for strategy in STRATEGIES:  # what a process allocates once and keeps is there from here on
        with records.check(f"a first fit of {strategy}"):
            fit(strategy, "32-true", small, words.out)
    for strategy, precision, workload in peaks:
        name = f"peak of {workload.name}, {strategy}, {precision}"
        if time.monotonic() > deadline:
            records.no_time(name)
        elif workload is llama and importlib.util.find_spec("transformers") is None:
            records.outcome(name, "left out", reason="transformers can't be imported. Type: pip install transformers")
        else:
            measure_peak(strategy, precision, workload, words.out, records)
    for strategy in STRATEGIES:
        if time.monotonic() > deadline:
            records.no_time(f"what fits of {strategy} leave")
        else:
            check_leftovers(strategy, small, words.out, 3 if words.tiny else 10, records)


if __name__ == "__main__":
    main()
