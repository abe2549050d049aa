"""Train sharded on two processes, resume on one, and draw what happened.

Three runs of ``train_bytes.py``: a sharded one on two CPU processes that ends with a checkpoint, one that resumes it on
a single process and goes on, and an unsharded one (``strategy="auto"``) to compare with. Fails if a run does, if the
loss did not fall, if it jumped at the resume, or if a sharded process holds more than its share.

With ``--strategy xla_fsdp`` or ``xla_fsdp_spmd`` the sharded run is on two of XLA's CPU devices, in an environment of
its own, whose Python ``FSDP_XLA_PYTHON`` names; it is resumed under ``fsdp2``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib.figure import Figure

HERE = Path(__file__).parent
OUT = HERE.parent / "_artifacts" / "demo"
TIME_LIMIT = 900  # seconds for one run
Report = dict[str, Any]


def train(name: str, **options: object) -> Report:
    """Run ``train_bytes.py`` as a user would, and read the report it leaves.

    Args:
        name: What to call the run.
        options: Command-line options; ``batch_size=8`` becomes ``--batch-size 8``.
    """
    log = OUT / f"{name}.json"
    options = {"accelerator": "cpu", **options, "log_json": log}
    python, on_xla = sys.executable, {}
    if is_xla(str(options.get("strategy"))):
        python = os.environ.get("FSDP_XLA_PYTHON", "")
        on_xla = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(options["devices"])}
        if not python:
            raise SystemExit(
                "demo failed: FSDP_XLA_PYTHON names no Python with fsdp-xla.\n"
                f"Type: python -m nox -s demo -- --strategy {options['strategy']}"
            )
    arguments = [word for k, v in options.items() for word in (f"--{k.replace('_', '-')}", str(v))]
    print(f"\n== {name}: train_bytes.py {' '.join(arguments)}", flush=True)
    # One thread per process, or two processes fight over the cores of a small machine.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **on_xla}
    started = time.perf_counter()
    command = [python, str(HERE / "train_bytes.py"), *arguments]
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        status = process.wait(timeout=TIME_LIMIT)
    except subprocess.TimeoutExpired:
        raise SystemExit(f"demo failed: {name} took more than {TIME_LIMIT} s.") from None
    finally:
        with suppress(ProcessLookupError):  # the run has ended, and so have the processes that it started
            os.killpg(process.pid, signal.SIGKILL)
    if status:
        raise SystemExit(f"demo failed: {name} ended with status {status}.")
    print(f"== {name}: {time.perf_counter() - started:.0f} s")
    return dict(json.loads(log.read_text()))


def is_xla(strategy: str) -> bool:
    """Whether a strategy is one of fsdp-xla's, which has an environment of its own."""
    return strategy.startswith("xla")


def losses(report: Report) -> list[float]:
    """The loss of each step of a run."""
    return [step["loss"] for step in report["steps"]]


def held(report: Report) -> list[int]:
    """The bytes of parameters, gradients and optimizer state that each process of a run holds."""
    return [rank["parameters"] + rank["gradients"] + rank["optimizer"] for rank in report["memory"]]


def check(sharded: Report, resumed: Report, unsharded: Report) -> list[str]:
    """Name everything that is wrong with the three runs."""
    before, after, alone = losses(sharded), losses(resumed), losses(unsharded)
    wrong = []
    if not mean(before[-10:]) < 0.8 * before[0]:
        wrong.append(f"the loss did not fall: {before[0]:.3f} at first, {mean(before[-10:]):.3f} at the checkpoint.")
    if resumed["val_loss"] > sharded["val_loss"] + 0.05:
        wrong.append(f"the resumed run lost ground: from {sharded['val_loss']:.3f} to {resumed['val_loss']:.3f}.")
    if resumed["steps"][0]["step"] != len(before) + 1:
        wrong.append(f"step {resumed['steps'][0]['step']} followed step {len(before)}.")
    if abs(mean(after[:5]) - mean(before[-5:])) > 0.5:
        wrong.append(f"the loss jumped at the resume, from {mean(before[-5:]):.3f} to {mean(after[:5]):.3f}.")
    apart = max(abs(a - b) for a, b in zip(before, alone, strict=False))
    print(f"sharded and unsharded losses differ by at most {apart:.1e} over {min(len(before), len(alone))} steps")
    if apart > 0.05:
        wrong.append(f"sharded and unsharded losses differ by {apart:.3f}.")
    if len(held(sharded)) > 1 and max(held(sharded)) > 0.55 * held(unsharded)[0]:
        wrong.append(f"a sharded process holds {max(held(sharded))} bytes, of {held(unsharded)[0]} unsharded.")
    return wrong


def draw(sharded: Report, resumed: Report, unsharded: Report, strategies: tuple[str, str], path: Path) -> None:
    """Draw the loss across the resume, and the memory per process beside an unsharded run."""
    strategy, then = strategies
    places = "of XLA's CPU devices" if is_xla(strategy) else "processes"
    figure = Figure(figsize=(12, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[3, 2])
    blue, orange, grey = "#1f6fb4", "#d9701e", "#444444"
    hollow: dict[str, Any] = {"linestyle": "none", "marker": "o", "markersize": 5, "markevery": 2, "fillstyle": "none"}
    curves: list[tuple[Report, str, dict[str, Any]]] = [
        (sharded, f'"{strategy}", 2 {places}', {"color": blue}),
        (resumed, f'"{then}", resumed on 1 process', {"color": orange}),
        (unsharded, "unsharded, 1 process", {"color": grey, **hollow}),
    ]
    for report, label, style in curves:
        left.plot([step["step"] for step in report["steps"]], losses(report), label=label, linewidth=1.2, **style)
    resume = len(sharded["steps"])
    left.axvline(resume, color=grey, linewidth=0.8)
    left.annotate(
        f"saved at step {resume} by 2,\nresumed by 1",
        (resume, 0.6),
        xycoords=("data", "axes fraction"),
        xytext=(-8, 0),
        textcoords="offset points",
        ha="right",
    )
    left.set(title="Loss across the resume", xlabel="step", ylabel="loss (nats per byte)")
    left.legend(edgecolor="none", framealpha=1.0)

    bars = {"unsharded\n1 process": unsharded["memory"][0]}
    ranks = sharded["memory"]
    if len(ranks) > 1:
        bars |= {f'"{strategy}"\nrank {i + 1} of {len(ranks)}': rank for i, rank in enumerate(ranks)}
    else:
        bars[f'"{strategy}"\none process, 2 devices'] = ranks[0]
    bottom = [0.0] * len(bars)
    for part, color in [("parameters", blue), ("gradients", "#8fbbe0"), ("optimizer", "#c9c9c9")]:
        heights = [rank[part] / 2**20 for rank in bars.values()]
        right.bar(list(bars), heights, bottom=bottom, label=part, color=color, width=0.6)
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    for x, height in enumerate(bottom):
        right.annotate(f"{height:.1f} MiB", (x, height), xytext=(0, 3), textcoords="offset points", ha="center")
    right.set(title="What each rank holds after a step", ylabel="MiB", ylim=(0, 1.12 * max(bottom)))
    right.legend(frameon=False, loc="upper right", reverse=True)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def main() -> None:
    """Run, check, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="fsdp2", help="the sharded strategy, by name")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller steps: tens of seconds in all")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leave no run behind
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)

    size = {"batch_size": 8, "context": 64 if args.quick else 128}
    steps, more, alone = (40, 20, 10) if args.quick else (300, 100, 40)
    checkpoint = OUT / "checkpoint"
    sharded = train("sharded", strategy=args.strategy, devices=2, steps=steps, checkpoint=checkpoint, sample=0, **size)
    then = "fsdp2" if is_xla(args.strategy) else args.strategy
    resumed = train("resumed", strategy=then, devices=1, steps=steps + more, resume=checkpoint, **size)
    unsharded = train("unsharded", devices=1, steps=alone, sample=0, **size)

    print("\n== demo")
    wrong = check(sharded, resumed, unsharded)
    picture = OUT / "demo.png"
    draw(sharded, resumed, unsharded, (args.strategy, then), picture)
    start, saved, end = losses(sharded)[0], mean(losses(sharded)[-10:]), mean(losses(resumed)[-10:])
    print(f"loss: {start:.3f} at step 1, {saved:.3f} at the checkpoint, {end:.3f} at the end")
    print(f"validation loss: {sharded['val_loss']:.3f} at the checkpoint, {resumed['val_loss']:.3f} at the end")
    per_process = " and ".join(f"{n / 2**20:.1f}" for n in held(sharded))
    print(f"held per process: {per_process} MiB sharded, {held(unsharded)[0] / 2**20:.1f} MiB unsharded")
    peaks = ", ".join(f"{rank['peak'] / 2**20:.0f}" for rank in [*sharded["memory"], *unsharded["memory"]])
    print(f"peak resident memory of the same processes: {peaks} MiB, most of it Python and torch themselves")
    print(f"picture: {picture}")
    if wrong:
        raise SystemExit("demo failed: " + "\n".join(wrong))


if __name__ == "__main__":
    main()
