"""Part 5: time per step beside loops by hand, Lightning's strategies and plain torch, and LoRA of a large model.

Each comparison runs in a process of its own, the most valuable first; what fails or finds no time does not stop the
others.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from card import HAS_CARD, arguments
from records import Records

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from ranks import run_on_ranks

#: NeMo Automodel's figures for LoRA of Llama 3 8B at sequence 4,096 on one H100: the peer to stand beside.
NEMO = {"tokens/s": 12_473, "TFLOP/s": 402, "share of peak": 0.41}

#: Lightning's own strategy on the same shards.
LIGHTNINGS = {"fsdp2": "ModelParallelStrategy", "fsdp_native": "FSDPStrategy"}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Contenders that train a Llama of 1 B in turn, in one process.

    Attributes:
        strategy: The strategy of this project.
        others: Whom it is compared with.
        is_compiled: Whether decoder layers are compiled.
    """

    strategy: str
    others: Sequence[str]
    is_compiled: bool = False

    @property
    def name(self) -> str:
        """What figures call it."""
        return f"1 B, {self.strategy}{', compiled' * self.is_compiled}"


def compare(comparison: Comparison, compiler: str, tiny: bool, limit: float, records: Records) -> None:
    """Run a comparison, and record a ratio for each contender and the strategy's rates.

    Args:
        comparison: Who takes part.
        compiler: The backend of ``torch.compile``.
        tiny: Whether it is a rehearsal.
        limit: Seconds.
        records: Where figures go.
    """
    words = ["--strategy", comparison.strategy, "--contenders", comparison.strategy, *comparison.others]
    words += ["--compiler", compiler] if comparison.is_compiled else []
    words += ["--tiny", "--turns", "3"] if tiny else []
    with records.check(f"{comparison.name}, beside {', '.join(comparison.others)}") as details:
        details |= run_on_ranks("../gpu/llama_steps.py", *words, time_limit=limit, ranks=1)
        if "by hand, again" in comparison.others:
            record_resolution(comparison, details["rates"], records)
        elif "plain torch" in comparison.others:
            ratio = details["ratios"][f"{comparison.strategy} ÷ plain torch"]
            records.figure(f"step time ÷ plain torch, {comparison.name}", ratio["ratio"], **ratio, **details["rates"])
        else:
            record_ratios(comparison, details, records)


def record_ratios(comparison: Comparison, result: dict[str, Any], records: Records) -> None:
    """Record a strategy's time beside the loop by hand and Lightning's, and what it amounts to.

    Args:
        comparison: Who took part.
        result: What :mod:`llama_steps` has measured.
        records: Where figures go.
    """
    for other in comparison.others:
        ratio = result["ratios"][f"{comparison.strategy} ÷ {other}"]
        label, bar = ("loop by hand", 1.01) if other == "by hand" else (other, 1.0)
        records.figure(f"step time ÷ {label}, {comparison.name}", ratio["ratio"], at_most=bar, **ratio)
    rates = result["rates"][comparison.strategy]
    records.figure(f"tokens/s, {comparison.name}", rates["tokens/s"], **result["rates"])
    share = rates["share of peak, torchtitan's count"]
    bar = 0.45 if comparison == COMPARISONS["compiled"] else None
    records.figure(f"share of bf16 peak, {comparison.name}", share, at_least=bar, **rates)


def record_resolution(comparison: Comparison, rates: dict[str, dict[str, float]], records: Records) -> None:
    """Record the loop by hand beside itself, which shows what a ratio can tell apart."""
    ratio = rates["by hand, again"]["ms"] / rates["by hand"]["ms"]
    records.figure(f"loop by hand ÷ itself, {comparison.name}", ratio)


#: How many measurements a rehearsal makes: one of each sort, of which the others are variants.
REHEARSED = 6

COMPARISONS = {
    "eager": Comparison(strategy="fsdp2", others=("by hand", "ModelParallelStrategy")),
    "compiled": Comparison(strategy="fsdp2", others=("by hand", "ModelParallelStrategy"), is_compiled=True),
    "native": Comparison(strategy="fsdp_native", others=("by hand", "FSDPStrategy")),
    "resolution": Comparison(strategy="fsdp2", others=("by hand", "by hand, again")),
    "native, compiled": Comparison(strategy="fsdp_native", others=("by hand", "FSDPStrategy"), is_compiled=True),
    "plain": Comparison(strategy="fsdp2", others=("plain torch",), is_compiled=True),
}


def measure_launches(strategy: str, tiny: bool, limit: float, records: Records) -> None:
    """Measure what a step costs besides computation: a model of many small kernels, beside the loop by hand.

    Args:
        strategy: The strategy's name.
        tiny: Whether it is a rehearsal.
        limit: Seconds.
        records: Where figures go.
    """
    with records.check(f"launch-bound model, {strategy}") as details:
        words = ("--strategy", strategy, "--turns", 3 if tiny else 40, "--seed", 0, "--small")
        measured = run_on_ranks("step_time.py", *words, time_limit=limit, ranks=1)
        details |= {key: measured[key] for key in ("milliseconds", "ratios", "losses differ by")}
        by_hand = next(name for name in measured["milliseconds"] if name.endswith("by hand"))
        milliseconds = measured["milliseconds"][strategy] - measured["milliseconds"][by_hand]
        name = f"fixed cost per step above by hand, launch-bound model, {strategy} (ms)"
        records.figure(name, milliseconds, at_most=0.5, **measured["milliseconds"])


def profile_launches(strategy: str, limit: float, records: Records) -> None:
    """Record the Python functions in which a launch-bound step spends its time, under the strategy and by hand.

    Args:
        strategy: The strategy's name.
        limit: Seconds.
        records: Where they go.
    """
    with records.check(f"profile of a launch-bound step, {strategy}") as details:
        for contender in (strategy, {"fsdp2": "fully_shard by hand", "fsdp_native": "FSDP1 by hand"}[strategy]):
            words = ("--strategy", strategy, "--contender", contender)
            details[contender] = run_on_ranks("calls.py", *words, time_limit=limit / 2, ranks=1)


def measure_lora(compiler: str | None, recompute: bool, tiny: bool, limit: float, records: Records) -> bool:
    """Train LoRA of Llama 3 8B, and record its tokens per second beside NeMo's.

    Args:
        compiler: The backend of ``torch.compile``; ``None`` to compile nothing.
        recompute: Whether decoder layers recompute their activations.
        tiny: Whether it is a rehearsal.
        limit: Seconds.
        records: Where figures go.

    Returns:
        Whether it ran.
    """
    name = f"LoRA of Llama 3 8B{', compiled' * bool(compiler)}{', activation checkpointing' * recompute}"
    words = ["--lora", *(["--compiler", compiler] if compiler else []), *(["--recompute"] if recompute else [])]
    words += ["--tiny", "--turns", "3"] if tiny else ["--turns", "10"]
    with records.check(name) as details:
        details |= run_on_ranks("../gpu/llama_steps.py", *words, time_limit=limit, ranks=1)
        rates = details["rates"]
        records.figure(f"tokens/s, {name}", rates["tokens/s"], rates=rates, NeMo=NEMO)
    return "error" not in details


def measure_lora_as_it_fits(tiny: bool, limit: float, records: Records) -> None:
    """Train LoRA without activation checkpointing, and with it if that does not fit the card."""
    deadline = time.monotonic() + limit
    if not measure_lora(None, False, tiny, limit, records):
        measure_lora(None, True, tiny, deadline - time.monotonic(), records)


def measure_peak(tiny: bool, limit: float, records: Records) -> None:
    """Measure what the card makes of a large product, which is what shares of its peak can be held against."""
    words = ["--peak", *(["--tiny"] if tiny else [])]
    with records.check("a product of large bf16 matrices") as details:
        details |= run_on_ranks("../gpu/llama_steps.py", *words, time_limit=limit, ranks=1)
        rate = details["measured"] / 1e12
        records.figure("product of bf16 matrices of 8192 × 8192 (TFLOP/s)", rate, paper=details["paper"])


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One of the part's measurements.

    Attributes:
        name: What is said of it if it is left out.
        least: Seconds that it takes on a card; with less left, it is not begun.
        measure: Called with the seconds that are left.
        needs: Packages that it imports besides torch and Lightning.
    """

    name: str
    least: float
    measure: Callable[[float], object]
    needs: tuple[str, ...] = ()


def measurements(tiny: bool, records: Records) -> list[Measurement]:
    """All measurements, most valuable first.

    Args:
        tiny: Whether it is a rehearsal.
        records: Where figures go.
    """
    compiler = "inductor" if HAS_CARD else "aot_eager"

    def comparison(name: str, least: float) -> Measurement:
        chosen = COMPARISONS[name]

        def measure(limit: float) -> None:
            compare(chosen, compiler, tiny, limit, records)

        return Measurement(name=chosen.name, least=least, measure=measure, needs=("transformers",))

    def launches(strategy: str) -> Measurement:
        def measure(limit: float) -> None:
            measure_launches(strategy, tiny, limit, records)

        return Measurement(name=f"launch-bound model, {strategy}", least=15, measure=measure)

    needs = ("transformers", "peft")
    every = [
        comparison("eager", 20),
        comparison("compiled", 40),
        launches("fsdp2"),
        comparison("native", 20),
        Measurement(
            name="LoRA of Llama 3 8B",
            least=30,
            measure=lambda limit: measure_lora_as_it_fits(tiny, limit, records),
            needs=needs,
        ),
        Measurement(name="peak", least=10, measure=lambda limit: measure_peak(tiny, limit, records)),
        comparison("resolution", 20),
        launches("fsdp_native"),
        Measurement(name="profile", least=20, measure=lambda limit: profile_launches("fsdp2", limit, records)),
        comparison("native, compiled", 40),
        comparison("plain", 30),
        Measurement(
            name="LoRA of Llama 3 8B, compiled",
            least=60,
            measure=lambda limit: measure_lora(compiler, False, tiny, limit, records),
            needs=needs,
        ),
    ]
    return every[:REHEARSED] if tiny else every


def main() -> None:
    """Run the part."""
    words, records = arguments("speed", __doc__)
    deadline = time.monotonic() + words.seconds
    for measurement in measurements(words.tiny, records):
        left = deadline - time.monotonic()
        absent = [name for name in measurement.needs if importlib.util.find_spec(name) is None]
        if absent:
            reason = f"{' and '.join(absent)} can't be imported. Type: pip install {' '.join(absent)}"
            records.outcome(measurement.name, "left out", reason=reason)
        elif left < (1 if words.tiny else measurement.least):
            reason = f"{max(left, 0):.0f} s were left, and it takes {measurement.least:.0f}"
            records.outcome(measurement.name, "left out", reason=reason)
        else:
            measurement.measure(left)


if __name__ == "__main__":
    main()
