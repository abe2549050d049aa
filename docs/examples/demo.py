"""Train sharded on two processes, resume on one, and draw what happened: ``demo.png``, and as SVG, light and dark.

Three runs of ``train_bytes.py``: a sharded one on two CPU processes that ends with a checkpoint, one that resumes it on
a single process and continues, and an unsharded one (``strategy="auto"``) to compare with. Fails if a run does, if the
loss did not fall, if it jumped at the resume, or if a sharded process holds more than its share.

``--pictures FOLDER`` puts the SVG files elsewhere; those of the README are from ``--quick --pictures docs/pictures``.

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

import matplotlib
from matplotlib.figure import Figure

HERE = Path(__file__).parent
OUT = HERE.parent / "_artifacts" / "demo"
TIME_LIMIT = 900  # seconds for one run
Report = dict[str, Any]
#: Colours by what they are for.
LIGHT = {"ink": "#24292f", "sharded": "#1f6fb4", "resumed": "#d9701e", "alone": "#444444"}
LIGHT |= {"parameters": "#1f6fb4", "gradients": "#8fbbe0", "optimizer": "#c9c9c9"}
DARK = {"ink": "#d8dee6", "sharded": "#6cb2f2", "resumed": "#f29a52", "alone": "#c4c9d0"}
DARK |= {"parameters": "#6cb2f2", "gradients": "#35648f", "optimizer": "#5a6068"}


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
    """The bytes of parameters, gradients and optimizer state that each process of a run holds, or each XLA device."""
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
    if len(held(sharded)) != 2 or max(held(sharded)) > 0.55 * held(unsharded)[0]:
        wrong.append(f"sharded ranks or devices hold {held(sharded)} bytes, of {held(unsharded)[0]} unsharded.")
    return wrong


def draw(
    sharded: Report, resumed: Report, unsharded: Report, strategies: tuple[str, str], path: Path, ink: dict[str, str]
) -> None:
    """Draw the loss across the resume, and the memory per process beside an unsharded run, in colours of a theme."""
    named = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    same_each_time = {"svg.hashsalt": "demo", "savefig.transparent": path.suffix == ".svg"}
    with matplotlib.rc_context({"font.size": 11, **dict.fromkeys(named, ink["ink"]), **same_each_time}):
        figure = Figure(figsize=(6.4, 7.4), layout="constrained")
        above, below = figure.subplots(2, 1, height_ratios=[3, 2], gridspec_kw={"hspace": 0.06})
        draw_losses(above, (sharded, resumed, unsharded), strategies, ink)
        draw_memory(below, (sharded, unsharded), strategies[0], ink)
        for axes in (above, below):
            axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, dpi=130, metadata={"Date": None} if path.suffix == ".svg" else None)


def draw_losses(
    axes: Any, reports: tuple[Report, Report, Report], strategies: tuple[str, str], ink: dict[str, str]
) -> None:
    """Draw the loss of each step of the sharded, the resumed and the unsharded run."""
    sharded, resumed, unsharded = reports
    places = "of XLA's CPU devices" if is_xla(strategies[0]) else "processes"
    hollow: dict[str, Any] = {"linestyle": "none", "marker": "o", "markersize": 5, "markevery": 2, "fillstyle": "none"}
    curves: list[tuple[Report, str, dict[str, Any]]] = [
        (sharded, f'"{strategies[0]}", 2 {places}', {"color": ink["sharded"]}),
        (resumed, f'"{strategies[1]}", resumed on 1 process', {"color": ink["resumed"]}),
        (unsharded, "unsharded, 1 process", {"color": ink["alone"], **hollow}),
    ]
    for report, label, style in curves:
        axes.plot([step["step"] for step in report["steps"]], losses(report), label=label, linewidth=1.4, **style)
    resume = len(sharded["steps"])
    axes.axvline(resume + 0.5, color=ink["alone"], linewidth=0.8)
    axes.annotate(
        f"saved at step {resume} by 2,\nresumed by 1",
        (resume, 0.7),
        xycoords=("data", "axes fraction"),
        xytext=(-8, 0),
        textcoords="offset points",
        ha="right",
    )
    axes.set(xlabel="step", ylabel="loss (nats per byte)")
    legend_above(axes, "Loss across the resume", rows=len(curves))


def draw_memory(axes: Any, reports: tuple[Report, Report], strategy: str, ink: dict[str, str]) -> None:
    """Draw what each rank of the sharded run, or each of its devices, holds beside the unsharded run."""
    sharded, unsharded = reports
    place = "device" if is_xla(strategy) else "rank"
    ranks = [(f'"{strategy}"\n{place} {i} of 2', held_here) for i, held_here in enumerate(sharded["memory"], start=1)]
    bars = dict(reversed([("unsharded\n1 process", unsharded["memory"][0]), *ranks]))
    ends = [0.0] * len(bars)
    for part in ("parameters", "gradients", "optimizer"):
        lengths = [held_here[part] / 2**20 for held_here in bars.values()]
        axes.barh(list(bars), lengths, left=ends, label=part, color=ink[part], height=0.6)
        ends = [end + length for end, length in zip(ends, lengths, strict=True)]
    for y, end in enumerate(ends):
        axes.annotate(f"{end:.1f} MiB", (end, y), xytext=(5, 0), textcoords="offset points", va="center")
    axes.set(xlabel="MiB", xlim=(0, 1.2 * max(ends)))
    legend_above(axes, f"What each {place} holds after a step", columns=3)


def legend_above(axes: Any, title: str, *, columns: int = 1, rows: int = 1) -> None:
    """Write a title and, under it, the legend: above the axes, where there is nothing to cover."""
    axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 0.99), ncols=columns, frameon=False)
    axes.set_title(title, loc="left", fontweight="bold", pad=16 * rows + 14)


def main() -> None:
    """Run, check, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="fsdp2", help="the sharded strategy, by name")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller steps: tens of seconds in all")
    parser.add_argument("--pictures", type=Path, default=OUT, help="where to put the SVG files")
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
    args.pictures.mkdir(parents=True, exist_ok=True)
    light, dark = args.pictures / "demo-light.svg", args.pictures / "demo-dark.svg"
    for picture, ink in {OUT / "demo.png": LIGHT, light: LIGHT, dark: DARK}.items():
        draw(sharded, resumed, unsharded, (args.strategy, then), picture, ink)
    start, saved, end = losses(sharded)[0], mean(losses(sharded)[-10:]), mean(losses(resumed)[-10:])
    print(f"loss: {start:.3f} at step 1, {saved:.3f} at the checkpoint, {end:.3f} at the end")
    print(f"validation loss: {sharded['val_loss']:.3f} at the checkpoint, {resumed['val_loss']:.3f} at the end")
    place = "device" if is_xla(args.strategy) else "process"
    per_place = " and ".join(f"{n / 2**20:.1f}" for n in held(sharded))
    print(f"held per {place}: {per_place} MiB sharded, {held(unsharded)[0] / 2**20:.1f} MiB unsharded")
    peaks = ", ".join(f"{rank['peak'] / 2**20:.0f}" for rank in [*sharded["memory"], *unsharded["memory"]])
    print(f"peak resident memory of the same processes: {peaks} MiB, most of it Python and torch themselves")
    print(f"pictures: {OUT / 'demo.png'}, {light}, {dark}")
    if wrong:
        raise SystemExit("demo failed: " + "\n".join(wrong))


if __name__ == "__main__":
    main()
