"""Part 7: time per step beside loops by hand, Lightning's strategies and plain torch, and LoRA of a large model.

Each measurement runs in a process of its own, within a time limit of its own, the most valuable first; what fails or
finds no time does not stop the others. What a process prints is in ``speed-*.log``.
"""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import re
import runpy
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from card import HAS_CARD, arguments
from choices import MEASUREMENTS
from records import Records

GPU = Path(__file__).parent
BENCHMARKS = GPU.parent / "benchmarks"

#: NeMo Automodel's figures for LoRA of Llama 3 8B at sequence 4,096 on one H100: the peer to stand beside.
NEMO = {"tokens/s": 12_473, "TFLOP/s": 402, "share of peak": 0.41}

#: Seconds before a process's limit after which it begins no more turns, so that it ends with what it has measured.
RESERVE = 6.0
#: Seconds for a process to end by itself once it is told to.
GRACE = 3.0


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all measurements share.

    Attributes:
        records: Where figures go.
        folder: Where logs and tables go.
        tiny: Whether this is a rehearsal.
        processes: How ranks are started.
    """

    records: Records
    folder: Path
    tiny: bool
    processes: Any

    @property
    def compiler(self) -> str:
        """The backend of ``torch.compile``: a rehearsal generates no code."""
        return "inductor" if HAS_CARD else "aot_eager"


def free_port() -> int:
    """A port of this machine that nothing listens at."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def rank_variables() -> dict[str, str]:
    """The environment of the only rank of a job, as torchrun sets it.

    torchrun itself would import torch in one more process, and leave a rank that hangs half a minute to end.
    """
    own = {"RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    return own | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "TORCHELASTIC_RUN_ID": "card"}


def prepare_processes() -> multiprocessing.context.BaseContext:
    """Set the variables that a rank's Python reads when it starts, and choose how :func:`run_alone` starts ranks.

    Without a card they are forked from a process that has imported what takes seconds. With one each is spawned: torch
    opens the driver to see whether there is a card, and CUDA can't be used in what is forked after that.
    """
    path = os.pathsep.join([str(GPU), *filter(None, [os.environ.get("PYTHONPATH")])])
    os.environ.update({"PYTHONPATH": path, "PYTHONWARNINGS": "ignore", "PYTHONUNBUFFERED": "1"})
    if HAS_CARD:
        return multiprocessing.get_context("spawn")
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["launch_profile", "llama_steps", "peft", "torch._dynamo"])
    return context


def be_script(script: Path, words: Sequence[str], variables: dict[str, str], log: Path) -> None:
    """Be a script, in a process of its own.

    Args:
        script: The file.
        words: Its command line.
        variables: Environment variables besides those of this process.
        log: The file for its output.
    """
    with log.open("wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.environ.update(variables)
    os.chdir(log.parent)
    sys.argv[:] = [str(script), *words]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")


def run_alone(name: str, script: Path, words: Sequence[object], limit: float, setting: Setting) -> dict[str, Any]:
    """Run a script as the only rank, and read what it writes to ``--out``.

    Args:
        name: What its log is called.
        script: The file.
        words: Its command line.
        limit: Seconds after which it is ended.
        setting: How it is started, and the folder for its log.

    Raises:
        RuntimeError: It failed, or the time was up; with the end of its log.
    """
    stem = setting.folder.resolve() / f"speed-{re.sub('[^A-Za-z0-9]+', '-', name)}"
    out, log = stem.with_suffix(".json"), stem.with_suffix(".log")
    out.unlink(missing_ok=True)
    command = [str(word) for word in (*words, "--out", out)]
    process = setting.processes.Process(target=be_script, args=(script, command, rank_variables(), log))
    process.start()
    try:
        process.join(timeout=limit)
        problem = f"{script.name} ended with status {process.exitcode}" if process.exitcode else ""
        if process.exitcode is None:
            problem = f"{script.name} had not ended after {limit:.0f} s, and was ended"
    finally:
        end(process)
    if problem or not out.exists():
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-25:] if log.exists() else []
        raise RuntimeError("\n".join([*lines, problem or f"{script.name} wrote no result"]))
    return dict(json.loads(out.read_text()))


def end(process: BaseProcess) -> None:
    """End a process that has not ended by itself. Its helpers, such as inductor's, end with it."""
    if process.exitcode is None:
        process.terminate()
        process.join(timeout=GRACE)
        if process.exitcode is None:
            process.kill()
            process.join()


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Contenders that train a Llama of 1 B in turn, in one process.

    Attributes:
        strategy: The strategy of this project.
        beside: Whom it is compared with.
        is_compiled: Whether units are compiled.
        sequences: Sequences per step. As many as fit beside the contenders' weights and optimizer states.
        options: Further words of :mod:`llama_steps`.
    """

    strategy: str
    beside: Sequence[str]
    is_compiled: bool = False
    sequences: int = 1
    options: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """What figures call it."""
        return f"1 B, {self.strategy}{', compiled' * self.is_compiled}"

    @property
    def title(self) -> str:
        """What checks call it."""
        return f"{self.name}, beside {', '.join(self.beside)}"


COMPARISONS = {
    "eager": Comparison(strategy="fsdp2", beside=("by hand", "ModelParallelStrategy"), options=("--peak",)),
    "compiled": Comparison(strategy="fsdp2", beside=("by hand",), is_compiled=True, sequences=4),
    "native": Comparison(strategy="fsdp_native", beside=("by hand", "FSDPStrategy")),
    "resolution": Comparison(strategy="fsdp2", beside=("by hand", "by hand, again")),
    "native-compiled": Comparison(strategy="fsdp_native", beside=("by hand",), is_compiled=True, sequences=4),
    "plain": Comparison(strategy="fsdp2", beside=("plain torch",)),
    "compiled-lightning": Comparison(
        strategy="fsdp2", beside=("ModelParallelStrategy",), is_compiled=True, sequences=4
    ),
}
#: The bars of ratios, by whom a strategy is compared with.
BARS = {"by hand": 1.01, "ModelParallelStrategy": 1.0, "FSDPStrategy": 1.0}


def compare(comparison: Comparison, setting: Setting, limit: float) -> None:
    """Run a comparison, with fewer sequences if so many don't fit, and record ratios and rates.

    Args:
        comparison: Who takes part.
        setting: Where and how.
        limit: Seconds.
    """
    deadline = time.monotonic() + limit
    words = ["--strategy", comparison.strategy, "--contenders", comparison.strategy, *comparison.beside]
    words += [*comparison.options, *(["--compiler", setting.compiler] if comparison.is_compiled else [])]
    words += ["--tiny", "--turns", "3"] if setting.tiny else ["--turns", "24"]
    sequences = comparison.sequences
    with setting.records.check(comparison.title) as details:
        while True:
            left = deadline - time.monotonic()
            try:
                own = ["--sequences", sequences, "--seconds", f"{left - RESERVE:.1f}"]
                result = run_alone(comparison.title, GPU / "llama_steps.py", [*words, *own], left, setting)
                break
            except RuntimeError as error:
                is_full = "OutOfMemoryError" in str(error)
                if not is_full or sequences == 1 or deadline - time.monotonic() < left / 2:
                    raise
                details[f"{sequences} sequences"] = "do not fit"
                sequences //= 2
        details |= result
        record_comparison(comparison, result, setting.records)


def record_comparison(comparison: Comparison, result: dict[str, Any], records: Records) -> None:
    """Record a strategy's time beside others', and what it amounts to.

    Args:
        comparison: Who took part.
        result: What :mod:`llama_steps` has measured.
        records: Where figures go.
    """
    rates = result["rates"]
    if "by hand, again" in comparison.beside:
        ratio = result["ratios"]["by hand, again ÷ by hand"]
        records.figure(f"loop by hand ÷ itself, {comparison.name}", ratio["ratio"], **ratio)
        return
    if "bf16 peak" in result:
        peak = result["bf16 peak"]
        records.figure("product of bf16 matrices of 8192 × 8192 (TFLOP/s)", peak["matrix product"] / 1e12, **peak)
    for contender in comparison.beside:
        ratio = result["ratios"][f"{comparison.strategy} ÷ {contender}"]
        label = "loop by hand" if contender == "by hand" else contender
        name = f"step time ÷ {label}, {comparison.name}"
        records.figure(name, ratio["ratio"], at_most=BARS.get(contender), **ratio, sequences=result["sequences"])
    if not {"by hand"} & set(comparison.beside):
        return
    own = rates[comparison.strategy]
    records.figure(f"tokens/s, {comparison.name}", own["tokens/s"], **rates, sequences=result["sequences"])
    share = own["share of peak, torchtitan's count"]
    bar = 0.45 if comparison == COMPARISONS["compiled"] else None
    reason = {} if share is not None else {"reason": "the peak of this device is not listed"}
    records.figure(f"share of bf16 peak, {comparison.name}", share, at_least=bar, **reason, **own)


def measure_launches(strategy: str, setting: Setting, limit: float) -> None:
    """Measure what a step costs besides computation: a model of many small kernels, beside the loop by hand.

    Args:
        strategy: The strategy's name.
        setting: Where and how.
        limit: Seconds.
    """
    name = f"launch-bound model, {strategy}"
    with setting.records.check(name) as details:
        turns = 3 if setting.tiny else 50
        words = ("--strategy", strategy, "--turns", turns, "--seed", 0, "--small", "--once")
        seconds = ("--seconds", f"{limit - RESERVE:.1f}")
        measured = run_alone(name, BENCHMARKS / "step_time.py", (*words, *seconds), limit, setting)
        details |= {key: measured[key] for key in ("milliseconds", "ratios", "losses differ by", "turns")}
        by_hand = next(label for label in measured["milliseconds"] if label.endswith("by hand"))
        milliseconds = measured["milliseconds"][strategy] - measured["milliseconds"][by_hand]
        title = f"fixed cost per step above by hand, launch-bound model, {strategy} (ms)"
        setting.records.figure(title, milliseconds, at_most=0.5, **measured["milliseconds"])


def profile_launches(strategy: str, setting: Setting, limit: float) -> None:
    """Write a table of the Python functions in which a launch-bound step spends its time, beside those by hand.

    Args:
        strategy: The strategy's name.
        setting: Where and how.
        limit: Seconds.
    """
    name = f"profile of a launch-bound step, {strategy}"
    with setting.records.check(name) as details:
        target = (setting.folder / f"speed-profile-{strategy}.txt").resolve()
        words = ("--strategy", strategy, "--table", target)
        details["table"] = f"{target.name}, which log.txt holds"
        details["calls per step"] = run_alone(name, GPU / "launch_profile.py", words, limit, setting)


def measure_lora(is_compiled: bool, recompute: bool, setting: Setting, limit: float) -> bool:
    """Train LoRA of Llama 3 8B, and record its tokens per second beside NeMo's.

    Args:
        is_compiled: Whether units are compiled.
        recompute: Whether decoder layers recompute their activations.
        setting: Where and how.
        limit: Seconds.

    Returns:
        Whether it may fit with fewer activations: it ran out of memory.
    """
    name = f"LoRA of Llama 3 8B{', compiled' * is_compiled}{', activation checkpointing' * recompute}"
    words = ["--lora", *(["--compiler", setting.compiler] if is_compiled else [])]
    words += [*(["--recompute"] if recompute else []), "--seconds", f"{limit - RESERVE:.1f}"]
    words += ["--tiny", "--turns", "2"] if setting.tiny else ["--turns", "10"]
    with setting.records.check(name) as details:
        details |= run_alone(name, GPU / "llama_steps.py", words, limit, setting)
        rates = details["rates"]
        setting.records.figure(f"{name}, tokens/s", rates["tokens/s"], rates=rates, NeMo=NEMO)
    return "OutOfMemoryError" in details.get("error", "")


def measure_lora_as_it_fits(setting: Setting, limit: float) -> None:
    """Train LoRA without activation checkpointing, and with it if that does not fit the card."""
    deadline = time.monotonic() + limit
    if measure_lora(False, False, setting, limit):
        measure_lora(False, True, setting, max(1.0, deadline - time.monotonic()))


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One of the part's measurements.

    Attributes:
        name: What is said of it if it is left out.
        least: Seconds that it takes on a card if all goes well; with less left, it is not begun.
        most: Seconds after which it is ended.
        measure: Called with its limit.
        needs: Packages that it imports besides torch and Lightning.
        is_rehearsed: Whether a rehearsal makes it: one of each sort.
    """

    name: str
    least: float
    most: float
    measure: Callable[[float], object]
    needs: tuple[str, ...] = ()
    is_rehearsed: bool = False


def measurements(setting: Setting) -> dict[str, Measurement]:
    """All measurements by the names in :data:`choices.MEASUREMENTS`.

    Args:
        setting: Where and how.
    """

    def comparison(key: str, least: float, most: float, is_rehearsed: bool = False) -> Measurement:
        chosen = COMPARISONS[key]
        return Measurement(
            name=chosen.title,
            least=least,
            most=most,
            measure=lambda limit: compare(chosen, setting, limit),
            needs=("transformers",),
            is_rehearsed=is_rehearsed,
        )

    def launches(strategy: str, is_rehearsed: bool = False) -> Measurement:
        return Measurement(
            name=f"launch-bound model, {strategy}",
            least=22,
            most=45,
            measure=lambda limit: measure_launches(strategy, setting, limit),
            is_rehearsed=is_rehearsed,
        )

    def profile(strategy: str, is_rehearsed: bool = False) -> Measurement:
        return Measurement(
            name=f"profile of a launch-bound step, {strategy}",
            least=18,
            most=45,
            measure=lambda limit: profile_launches(strategy, setting, limit),
            is_rehearsed=is_rehearsed,
        )

    needs = ("transformers", "peft")
    return {
        "eager": comparison("eager", 25, 50, is_rehearsed=True),
        "compiled": comparison("compiled", 40, 75, is_rehearsed=True),
        "launches": launches("fsdp2", is_rehearsed=True),
        "native": comparison("native", 25, 45, is_rehearsed=True),
        "resolution": comparison("resolution", 25, 45, is_rehearsed=True),
        "lora": Measurement(
            name="LoRA of Llama 3 8B",
            least=25,
            most=60,
            measure=lambda limit: measure_lora_as_it_fits(setting, limit),
            needs=needs,
            is_rehearsed=True,
        ),
        "profile": profile("fsdp2", is_rehearsed=True),
        "native-launches": launches("fsdp_native"),
        "native-compiled": comparison("native-compiled", 40, 75),
        "plain": comparison("plain", 20, 40),
        "native-profile": profile("fsdp_native"),
        "lora-compiled": Measurement(
            name="LoRA of Llama 3 8B, compiled",
            least=50,
            most=90,
            measure=lambda limit: measure_lora(True, False, setting, limit),
            needs=needs,
        ),
        "compiled-lightning": comparison("compiled-lightning", 40, 75),
    }


def main() -> None:
    """Run the part."""
    words, records = arguments(
        "speed",
        __doc__,
        lambda parser: parser.add_argument("--measure", nargs="+", choices=MEASUREMENTS, default=MEASUREMENTS),
    )
    deadline = words.deadline
    setting = Setting(records=records, folder=words.out, tiny=words.tiny, processes=prepare_processes())
    known = measurements(setting)
    is_chosen = words.measure != MEASUREMENTS
    for measurement in (known[name] for name in words.measure):
        left = deadline - time.monotonic()
        absent = [name for name in measurement.needs if importlib.util.find_spec(name) is None]
        if absent:
            reason = f"{' and '.join(absent)} can't be imported. Type: pip install {' '.join(absent)}"
            records.outcome(measurement.name, "left out", reason=reason)
        elif words.tiny and not measurement.is_rehearsed and not is_chosen:
            records.outcome(measurement.name, "left out", reason="a rehearsal makes one measurement of each sort")
        elif left < (8 if words.tiny else measurement.least):
            reason = f"{max(left, 0):.0f} s were left, and it takes {measurement.least:.0f}"
            records.no_time(measurement.name, reason)
        else:
            measurement.measure(min(left, measurement.most * (4 if words.tiny else 1)))  # other work may use the CPU


if __name__ == "__main__":
    main()
