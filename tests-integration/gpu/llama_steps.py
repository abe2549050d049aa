"""Time of a step of a Llama, of several contenders in turn, or of LoRA alone. A script that one rank runs."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from llama import EIGHT_B, ONE_B, TINY, LlamaModule, LlamaSize, contenders, flops_per_token, new_llama, train_by_trainer

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from device import ACCELERATOR, finish
from ranks import be_a_rank
from step_time import compare
from turns import Turn, take_turns

import fsdp_core
from fsdp_core.testing.oracle import HALF_TOLERANCE

#: The dense bf16 rates of cards, without sparsity, in FLOP/s, by what their names contain. Source: NVIDIA's datasheets.
PEAKS = {"H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "A100": 312e12, "L40S": 362e12, "B200": 2250e12}


def bf16_peak() -> float | None:
    """The card's bf16 rate on paper; ``None`` for one that is not listed, and on the CPU."""
    name = torch.cuda.get_device_name() if ACCELERATOR == "cuda" else ""
    return next((peak for part, peak in PEAKS.items() if part in name), None)


def measured_peak(tiny: bool) -> float:
    """The rate of a large product of random bf16 matrices, in FLOP/s: what can be had of the rate on paper."""
    size, products = (256, 3) if tiny else (8192, 50)
    a, b = torch.randn(2, size, size, device=ACCELERATOR, dtype=torch.bfloat16)
    out = torch.empty_like(a)
    for _ in range(products // 3):
        torch.mm(a, b, out=out)
    finish()
    began = time.perf_counter()
    for _ in range(products):
        torch.mm(a, b, out=out)
    finish()
    return products * 2 * size**3 / (time.perf_counter() - began)


def rates(seconds: float, size: LlamaSize, flops: dict[str, float]) -> dict[str, float | None]:
    """What a time per step amounts to.

    Args:
        seconds: The time of a step.
        size: The model and its batch.
        flops: Operations per token, by how they are counted.
    """
    peak = bf16_peak()
    figures: dict[str, float | None] = {"ms": 1000 * seconds, "tokens/s": size.tokens / seconds}
    for counting, operations in flops.items():
        rate = operations * size.tokens / seconds
        figures[f"TFLOP/s, {counting} count"] = rate / 1e12
        figures[f"share of peak, {counting} count"] = None if peak is None else rate / peak
    return figures


def compare_contenders(
    strategy: str, compiler: str | None, names: list[str], size: LlamaSize, turns: int, deadline: float
) -> dict[str, Any]:
    """Let contenders take turns, in one process, and compare the first with each of the others.

    Args:
        strategy: The strategy on whose shards they train.
        compiler: The backend of ``torch.compile`` for units; ``None`` to compile nothing.
        names: Who takes part.
        size: What they train.
        turns: How many steps of each are timed.
        deadline: When no turn begins any more, on the clock of :func:`time.monotonic`.

    Raises:
        RuntimeError: Their losses differ.
    """
    trains = contenders(strategy, compiler)
    loops = [Turn(name, partial(trains[name], size)) for name in names]
    take_turns(loops, turns=turns, deadline=deadline)
    losses = torch.stack([torch.stack(loop.losses).float() for loop in loops])
    difference = float((losses.amax(0) - losses.amin(0)).max())
    if not difference <= HALF_TOLERANCE:  # also if one is not a number
        raise RuntimeError(f"the contenders don't train the same: their losses differ by {difference:.1e}")
    seconds = {loop.name: loop.seconds for loop in loops}
    flops = flops_per_token(new_llama(size, device=torch.device("meta")), size)  # without memory
    first, *others = names
    pairs = [(first, other) for other in others]
    if {"by hand", "by hand, again"} <= seconds.keys():  # the ratio of a thing to itself
        pairs.append(("by hand, again", "by hand"))
    return {
        "losses differ by": difference,
        "losses": {loop.name: [float(loss) for loss in (loop.losses[0], loop.losses[-1])] for loop in loops},
        "turns": len(loops[0].seconds),
        "sequences": size.sequences,
        "rates": {name: rates(median(times), size, flops) for name, times in seconds.items()},
        "ratios": {f"{one} ÷ {other}": compare(seconds, one, other) for one, other in pairs},
        "peak memory in GiB": torch.cuda.max_memory_allocated() / 2**30 if ACCELERATOR == "cuda" else None,
    }


def train_lora(size: LlamaSize, compiler: str | None, recompute: bool, steps: int, deadline: float) -> dict[str, Any]:
    """Train adapters of a frozen Llama under ``fsdp2`` in bf16, and time its steps.

    Args:
        size: The base model, with random weights.
        compiler: The backend of ``torch.compile`` for units; ``None`` to compile nothing.
        recompute: Whether decoder layers recompute their activations.
        steps: How many steps are timed, after three that are not.
        deadline: When no step begins any more if there is one, on the clock of :func:`time.monotonic`.
    """
    from peft import LoraConfig, get_peft_model

    layers = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    base: Any = new_llama(size, torch.bfloat16)
    parameters = sum(parameter.numel() for parameter in base.parameters())
    model = get_peft_model(base, LoraConfig(r=16, target_modules=layers, task_type="CAUSAL_LM"))
    options: dict[str, Any] = {"compile": {"backend": compiler}} if compiler else {}
    if recompute:
        options["activation_checkpointing_policy"] = {type(base.model.layers[0])}
    seconds: list[float] = []
    began = time.perf_counter()

    def after_step(step: int, loss: Tensor, module: nn.Module, optimizer: Optimizer) -> bool:
        nonlocal began
        finish()
        if step >= 3:
            seconds.append(time.perf_counter() - began)
        began = time.perf_counter()
        return len(seconds) < steps and not (seconds and time.monotonic() > deadline)

    strategy = fsdp_core.resolve("fsdp2", "trainer")(**options)
    train_by_trainer(strategy, LlamaModule(model), size, after_step, "bf16-true")
    # forward, and the gradients of activations: none of the frozen weights
    operations = {"NeMo's": 4.0 * parameters}
    return {
        "rates": rates(median(seconds), size, operations),
        "steps": len(seconds),
        "activation checkpointing": recompute,
        "peak memory in GiB": torch.cuda.max_memory_allocated() / 2**30 if ACCELERATOR == "cuda" else None,
    }


def main() -> None:
    """Be the rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", choices=("fsdp2", "fsdp_native"), default="fsdp2")
    parser.add_argument("--contenders", nargs="+", default=[])
    parser.add_argument("--compiler", help="the backend of torch.compile; without it, nothing is compiled")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--recompute", action="store_true", help="activation checkpointing, for LoRA")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--peak", action="store_true", help="measure the rate of a matrix product, too")
    parser.add_argument("--sequences", type=int, default=1, help="sequences per step")
    parser.add_argument("--seconds", type=float, default=600.0, help="no turn begins after that, but for three")
    parser.add_argument("--out", type=Path, required=True)
    words = parser.parse_args()
    deadline = time.monotonic() + words.seconds

    def measure() -> dict[str, Any]:
        rates = {"paper": bf16_peak(), "matrix product": measured_peak(words.tiny)} if words.peak else None
        product: dict[str, Any] = {"bf16 peak": rates} if rates else {}
        if words.lora:
            size = TINY if words.tiny else EIGHT_B
            return product | train_lora(size, words.compiler, words.recompute, words.turns, deadline)
        size = replace(TINY if words.tiny else ONE_B, sequences=words.sequences)
        return product | compare_contenders(
            words.strategy, words.compiler, words.contenders, size, words.turns, deadline
        )

    be_a_rank(measure, words.out)


if __name__ == "__main__":
    main()
