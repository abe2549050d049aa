"""Measure the project's figures and print them beside their bars.

    python tests-integration/benchmarks/run.py            # minutes, on an otherwise idle machine
    python tests-integration/benchmarks/run.py --quick    # to see that it works; the figures mean little

Writes all that was measured to ``build/benchmarks.json``.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import signal
import sys
from pathlib import Path
from typing import Any

from ranks import run_on_ranks
from rich.console import Console
from rich.table import Table
from startup import fsdp_list, import_torch

ROOT = Path(__file__).parents[2]
PACKAGES = ("fsdp-core", "fsdp-fsdp2", "torch", "lightning")


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    return {
        "processor": model,
        "cores": os.cpu_count(),
        "load before": os.getloadavg()[0],
        "system": platform.platform(),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in PACKAGES},
    }


def table(result: dict[str, Any]) -> Table:
    """Figures beside bars."""
    time, memory, listing, importing = (result[key] for key in ("time", "memory", "fsdp list", "import torch"))
    grid = Table(title="fsdp2 on 2 CPU ranks (gloo)")
    for heading in ("figure", "measured", "bar", "", "detail"):
        grid.add_column(heading)

    def row(figure: str, measured: str, bar: str, met: bool | None, detail: str) -> None:
        mark = {True: "[green]met", False: "[red]not met", None: ""}[met]
        grid.add_row(figure, measured, bar, mark, detail)

    bars = {"fsdp2 / by hand": 1.05, "fsdp2 / ModelParallelStrategy": 1.00, "by hand, again / by hand": None}
    for pair, bar in bars.items():
        wall, cpu, (mine, other) = time["ratios"][pair], time["cpu ratios"][pair]["ratio"], pair.split(" / ")
        milliseconds = " / ".join(f"{time['milliseconds'][name]:.0f}" for name in (mine, other))
        interval = f"95 % in {wall['from']:.3f} to {wall['to']:.3f}, rounds {wall['low']:.3f} to {wall['high']:.3f}"
        detail = f"{interval}; {milliseconds} ms; processor time {cpu:.3f}"
        limit, met = (f"≤ {bar:.2f}", wall["ratio"] <= bar) if bar else ("", None)
        row(f"time per step: {mine} ÷ {other}", f"{wall['ratio']:.3f}", limit, met, detail)
    for name in ("fsdp2", "ModelParallelStrategy"):
        held = memory[name]
        share = (
            f"peak {held['peak'] / 2**20:.1f} MiB; {held['ratio with buffers in transit']:.3f} with buffers in transit"
        )
        met = held["ratio"] <= 1.10 if name == "fsdp2" else None
        figure = "memory ÷ (total ÷ ranks + block)" if name == "fsdp2" else f"  (under {name})"
        row(figure, f"{held['ratio']:.3f}", "≤ 1.10" if name == "fsdp2" else "", met, share)
    heavy = ", ".join(listing["heavy imports"]) or "none"
    row(
        "fsdp list",
        f"{listing['seconds']:.3f} s",
        "< 0.3 s",
        listing["seconds"] < 0.3,
        f"at most {listing['seconds at most']:.3f} s; python alone {listing['seconds for python -c pass']:.3f} s",
    )
    row("  heavy libraries imported", heavy, "none", not listing["heavy imports"], "torch, lightning, torch_xla")
    added = 1000 * importing["seconds"]
    row(
        "added to import torch",
        f"{added:.2f} ms",
        "< 2 ms",
        added < 2,
        f"at most {1000 * importing['seconds at most']:.2f} ms; imports {', '.join(importing['modules'])}",
    )
    return grid


def main() -> None:
    """Measure everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="fsdp2", help="the strategy that is measured as fsdp2")
    parser.add_argument("--rounds", type=int, default=8, help="rounds of the comparison by time")
    parser.add_argument("--steps", type=int, default=20, help="steps of each contender in a round")
    parser.add_argument("--runs", type=int, default=20, help="fresh interpreters for each start-up figure")
    parser.add_argument("--quick", action="store_true", help="2 rounds of 3 steps, 3 runs")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "benchmarks.json")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leave no rank behind
    if args.quick:
        args.rounds, args.steps, args.runs = 2, 3, 3

    result: dict[str, Any] = {"machine": machine()}
    result["fsdp list"] = fsdp_list(args.runs)
    result["import torch"] = import_torch(args.runs)
    result["memory"] = run_on_ranks("memory.py", "--strategy", args.strategy, time_limit=300)
    steps = ("--rounds", args.rounds, "--steps", args.steps)
    result["time"] = run_on_ranks("step_time.py", "--strategy", args.strategy, *steps, time_limit=1800)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1))

    console = Console(width=max(Console().width, 160))
    console.print(table(result))
    console.print(", ".join(f"{key} {value}" for key, value in result["machine"].items()))
    console.print(f"all figures: {args.out}", soft_wrap=True)


if __name__ == "__main__":
    main()
