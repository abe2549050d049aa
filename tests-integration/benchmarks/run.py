"""Measure the project's figures and print them beside their bars.

    python tests-integration/benchmarks/run.py                          # minutes, on an otherwise idle machine
    python tests-integration/benchmarks/run.py --strategy fsdp_native   # one strategy
    python tests-integration/benchmarks/run.py --quick                  # to see that it works; the figures mean little

Writes all that was measured to ``build/benchmarks.json``.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from contenders import STRATEGIES, contenders
from device import ACCELERATOR, PROCESS_GROUP, RANKS
from index_bytes import SHARDINGS
from ranks import run_on_ranks
from startup import fsdp_list, import_torch
from step_time import joined
from ways import WAYS

import fsdp_core

ROOT = Path(__file__).parents[2]
WHAT = ("training", "meshes", "muon", "checkpoints", "indexes", "start-up")
PACKAGES = ("fsdp-core", "fsdp-fsdp2", "fsdp-cuda-native", "torch", "lightning")


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    distributions = [each for each in importlib.metadata.distributions() if each.name in PACKAGES]
    return {
        "processor": model,
        "cores": os.cpu_count(),
        "load before": os.getloadavg()[0],
        "system": platform.platform(),
        "python": platform.python_version(),
        **{each.name: each.version for each in distributions},
    }


class Row(NamedTuple):
    """One figure beside its bar."""

    figure: str
    measured: str
    bar: str = ""
    met: str = ""
    detail: str = ""


def met(yes: bool) -> str:
    """How a bar and a figure compare, in words."""
    return "met" if yes else "NOT MET"


def beside(figure: str, ratio: float, bar: float | None, detail: str) -> Row:
    """A ratio, which may have a bar."""
    if bar is None:
        return Row(figure, f"{ratio:.3f}", detail=detail)
    return Row(figure, f"{ratio:.3f}", f"≤ {bar:.2f}", met(ratio <= bar), detail)


def step_time(strategy: str, rounds: int, *words: object, ranks: int = RANKS) -> dict[str, Any]:
    """Rounds of :mod:`step_time`, each in processes of its own."""
    of = ("--strategy", strategy, *words)
    return joined(
        [run_on_ranks("step_time.py", *of, "--seed", seed, time_limit=600, ranks=ranks) for seed in range(rounds)]
    )


def strategy_rows(of: dict[str, Any]) -> Iterator[Row]:
    """One strategy beside the loop by hand and Lightning's own."""
    time, fixed, memory = of["time"], of["fixed costs"], of["memory"]
    for (pair, wall), bar in zip(time["ratios"].items(), (1.05, 1.00, None), strict=True):
        milliseconds = " / ".join(f"{time['milliseconds'][name]:.0f}" for name in pair.split(" ÷ "))
        processor_time = time["ratios of processor time"][pair]["ratio"]
        interval = f"95 % in {wall['from']:.3f} to {wall['to']:.3f}"
        detail = f"{interval}; {milliseconds} ms; processor time {processor_time:.3f}"
        yield beside(f"time per step: {pair}", wall["ratio"], bar, detail)
    mine, lightnings, _ = of["calls"]
    more = of["calls"][mine] / of["calls"][lightnings]
    detail = f"{of['calls'][mine]:.0f} / {of['calls'][lightnings]:.0f}"
    yield Row(f"calls of functions per step: {mine} ÷ {lightnings}", f"{more:.4f}", detail=detail)
    for pair, wall in fixed["ratios"].items():
        a, b = (fixed["milliseconds"][name] for name in pair.split(" ÷ "))
        detail = f"{wall['from']:.3f} to {wall['to']:.3f}; {a:.1f} / {b:.1f} ms on one rank"
        yield Row(f"fixed costs of a step: {pair}", f"{wall['ratio']:.3f}", detail=detail)
    if memory:
        for (name, held), bar in zip(memory["contenders"].items(), (1.10, None, None), strict=True):
            with_buffers = f"{held['ratio with buffers in transit']:.3f} with buffers in transit"
            detail = f"peak {held['peak'] / 2**20:.1f} MiB; {with_buffers}"
            yield beside(f"memory ÷ (total ÷ ranks + largest block): {name}", held["ratio"], bar, detail)


def meshes(rounds: int, turns: int) -> dict[str, Any]:
    """Each way to train under ``fsdp2`` beside the loop by hand: time, memory and collectives of a step."""
    return {
        name: {
            "counts": run_on_ranks("mesh_counts.py", "--way", name, time_limit=600, ranks=way.ranks),
            "time": step_time("fsdp2", rounds, "--way", name, "--turns", turns, ranks=way.ranks),
        }
        for name, way in WAYS.items()
    }


#: What is added to each batch: whether any rank was told to end or is out of batches, in place of Lightning's broadcast
#: of whether rank 0 has received SIGTERM.
OF_EACH_BATCH = "all-reduce"


def mesh_rows(of: dict[str, Any]) -> Iterator[Row]:
    """The ways of :mod:`ways`."""
    for name, way in of.items():
        pair, wall = next(iter(way["time"]["ratios"].items()))
        itself = list(way["time"]["ratios"].values())[-1]
        milliseconds = " / ".join(f"{way['time']['milliseconds'][one]:.0f}" for one in pair.split(" ÷ "))
        processor_time = way["time"]["ratios of processor time"][pair]["ratio"]
        detail = (
            f"95 % in {wall['from']:.3f} to {wall['to']:.3f}; {milliseconds} ms; processor time {processor_time:.3f}; "
            f"by hand beside itself {itself['ratio']:.3f}"
        )
        ratio = wall["ratio"]
        yield Row(f"time per step, {name}: {pair}", f"{ratio:.3f}", "≤ 1.03", met(ratio <= 1.03), detail)
    for name, way in of.items():
        mine, by_hand = (way["counts"]["contenders"][one]["collectives"] for one in ("fsdp2", "by hand"))
        own = {kind: count - WAYS[name].accumulate * (kind == OF_EACH_BATCH) for kind, count in mine.items()}
        own = {kind: count for kind, count in own.items() if count}
        fewer = all(own.get(kind, 0) <= by_hand.get(kind, 0) for kind in {*own, *by_hand})
        yield Row(f"collectives of a step, {name}", _counts(own), "by hand", met(fewer), f"by hand {_counts(by_hand)}")
    for name, way in of.items():
        held = way["counts"]["contenders"]
        ratio = held["fsdp2"]["ratio"]
        detail = f"{held['fsdp2']['held'] / 2**20:.1f} MiB; by hand {held['by hand']['ratio']:.3f}"
        figure = f"parameters, gradients, optimizer ÷ on paper, {name}"
        yield Row(figure, f"{ratio:.3f}", "≤ 1.08", met(ratio <= 1.08), detail)


def _counts(collectives: dict[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(collectives.items())) or "none"


def muon_rows(of: dict[str, Any]) -> Iterator[Row]:
    """Muon's steps on the owners of matrices, beside those of ranks that all see every matrix."""
    for (pair, ratio), bar in zip(of["ratios"].items(), (0.7, None), strict=True):
        milliseconds = " / ".join(f"{of['milliseconds'][name]:.0f}" for name in pair.split(" ÷ "))
        detail = f"95 % in {ratio['from']:.3f} to {ratio['to']:.3f}; {milliseconds} ms"
        yield beside(f"Muon's step on {of['ranks']} ranks: {pair}", ratio["ratio"], bar, detail)


def checkpoints(strategy: str, *, quick: bool) -> dict[str, Any]:
    """Save, load, load on three ranks what two have saved, and consolidate."""
    folder = Path(tempfile.mkdtemp(prefix="checkpoints-", dir=ROOT / "build"))
    words = ("--strategy", strategy, "--folder", folder, "--turns", 3 if quick else 9, *(["--small"] if quick else []))
    try:
        result = {"on two ranks": run_on_ranks("checkpoint_time.py", *words, time_limit=1200, ranks=2)}
        result["held"] = run_on_ranks("checkpoint_time.py", *words, "--held", time_limit=1200, ranks=2)
        if ACCELERATOR == "cpu" or RANKS > 2:
            more = run_on_ranks("checkpoint_time.py", *words, "--reshard", time_limit=1200, ranks=3)
            result["on three ranks"] = more
        result["consolidate"] = consolidate(folder / "ours", folder / "whole.safetensors")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return result


def indexes(*, quick: bool) -> list[dict[str, Any]]:
    """What saves on very many ranks cost rank 0 and the others, each in a process of its own."""
    asked = [("fsdp2", 64)] if quick else [("fsdp2", 64), ("fsdp2", 1024), *((name, 16384) for name in SHARDINGS)]
    script = Path(__file__).with_name("index_bytes.py")
    found = []
    for sharding, ranks in asked:
        command = [sys.executable, script, "--ranks", str(ranks), "--sharding", sharding]
        found.append(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=1200).stdout))
    return found


def index_rows(of: list[dict[str, Any]]) -> Iterator[Row]:
    """The figures of :mod:`index_bytes`."""
    for one in of:
        which, first, second = f"{one['ranks']} ranks, {one['sharding']}", one["first save"], one["second save"]
        for name, save, bar in (("first", first, 10), ("second", second, 1)):
            sent = f"a rank sends {save['most bytes of a rank']} bytes, all {save['bytes to rank 0'] / 1e6:.2f} MB"
            detail = f"{sent}; manifest {save['bytes of the manifest'] / 1e6:.2f} MB"
            seconds = save["seconds"]
            yield Row(f"merging, {name} save: {which}", f"{seconds:.2f} s", f"≤ {bar} s", met(seconds <= bar), detail)
        peak, other = first["peak memory of rank 0"], first["peak memory of the last rank"]
        yield Row(f"memory of rank 0: {which}", f"{peak / 1e6:.0f} MB", "≤ 1000 MB", met(peak <= 1e9))
        yield Row(f"memory of another rank: {which}", f"{other / 1e6:.1f} MB", "≤ 10 MB", met(other <= 1e7))


_STARTER = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def consolidate(source: Path, target: Path) -> dict[str, Any]:
    """How much memory the command takes at its peak, beside a Python that only imports torch."""
    fsdp = str(Path(sys.executable).with_name("fsdp"))
    command = [fsdp, "checkpoint", "consolidate", str(source), str(target), "--to", "safetensors"]
    peaks = {}
    for name, words in (("command", command), ("import torch", [sys.executable, "-c", "import torch"])):
        # A process begins with the peak of the one that started it, so a small one has to.
        found = subprocess.run([sys.executable, "-c", _STARTER, *words], check=True, capture_output=True, text=True)
        peaks[name] = 1024 * int(found.stdout.splitlines()[-1])
    return {"bytes": target.stat().st_size, "peak memory": peaks}


def checkpoint_rows(of: dict[str, Any]) -> Iterator[Row]:
    """Saving and loading, beside torch's own."""
    two, whole = of["on two ranks"], of["consolidate"]
    three = of.get("on three ranks", {"ratios": {}, "medians": {}})
    pairs = (*two["ratios"], *of["held"]["ratios"], *three["ratios"])
    bars = dict(zip(pairs, (1.10, 1.10, 0.15, 0.05, 1.50), strict=False))
    for part in (two, of["held"], three):
        for pair, ratio in part["ratios"].items():
            seconds = " / ".join(f"{part['medians'][name]:.2f}" for name in pair.split(" ÷ "))
            detail = f"95 % in {ratio['from']:.3f} to {ratio['to']:.3f}; {seconds} s"
            yield Row(pair, f"{ratio['ratio']:.3f}", f"≤ {bars[pair]:.2f}", met(ratio["ratio"] <= bars[pair]), detail)
    for name, ratio in two["extra memory ÷ (shard + staging)"].items():
        bar = 1.2 if name in ("save", "load") else None
        detail = f"{two['extra memory'][name] / 2**20:.0f} MiB beside a shard of {two['shard'] / 2**20:.0f} MiB"
        yield beside(f"extra memory ÷ (shard + staging): {name}", ratio, bar, detail)
    peak, alone = (whole["peak memory"][name] / 1e9 for name in ("command", "import torch"))
    detail = f"import torch alone {alone:.3f} GB; writes {whole['bytes'] / 1e9:.2f} GB"
    yield Row("peak memory of `consolidate`", f"{peak:.3f} GB", "≤ 0.25 GB", met(peak <= 0.25), detail)


def startup_rows(listing: dict[str, Any], importing: dict[str, Any]) -> Iterator[Row]:
    """What is paid before anything trains."""
    alone = f"at most {listing['seconds at most']:.3f} s; python alone {listing['seconds for python -c pass']:.3f} s"
    heavy = ", ".join(listing["heavy imports"])
    yield Row("`fsdp list`", f"{listing['seconds']:.3f} s", "< 0.3 s", met(listing["seconds"] < 0.3), alone)
    yield Row("heavy libraries that it imports", heavy or "none", "none", met(not heavy), "torch, lightning, torch_xla")
    added, at_most = 1000 * importing["seconds"], 1000 * importing["seconds at most"]
    detail = f"at most {at_most:.2f} ms; imports {', '.join(importing['modules'])}"
    yield Row("added to `import torch`", f"{added:.2f} ms", "< 2 ms", met(added < 2), detail)


def print_table(rows: list[Row]) -> None:
    """Print a Markdown table."""
    header = Row("figure", "measured", "bar", "", "detail")
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in (header, Row(*("-" * width for width in widths)), *rows):
        print("|", " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)), "|")


def main() -> None:
    """Measure everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    installed = [name for name in STRATEGIES if name in fsdp_core.strategies()]
    parser.add_argument(
        "--strategy", nargs="+", choices=STRATEGIES, default=installed, help="by default: all that are installed"
    )
    parser.add_argument("--what", nargs="+", choices=WHAT, default=WHAT, help="by default: everything")
    parser.add_argument("--rounds", type=int, default=8, help="rounds of the comparison by time, in fresh processes")
    parser.add_argument("--turns", type=int, default=15, help="turns in each of them")
    parser.add_argument("--runs", type=int, default=20, help="fresh interpreters for each start-up figure")
    parser.add_argument("--quick", action="store_true", help="2 rounds of 3 turns, 3 runs")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "benchmarks.json")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leave no rank behind
    if args.quick:
        args.rounds, args.turns, args.runs = 2, 3, 3

    result: dict[str, Any] = {"machine": machine(), "strategies": {}, "checkpoints": {}}
    if "start-up" in args.what:
        result["fsdp list"] = fsdp_list(args.runs)
        result["import torch"] = import_torch(args.runs)
    (ROOT / "build").mkdir(exist_ok=True)
    for strategy in args.strategy if "checkpoints" in args.what else ():
        result["checkpoints"][strategy] = checkpoints(strategy, quick=args.quick)
    if "indexes" in args.what:
        result["indexes"] = indexes(quick=args.quick)
    for strategy in args.strategy if "training" in args.what else ():
        of = ("--strategy", strategy)
        result["strategies"][strategy] = {
            # One rank holds everything whole.
            "memory": run_on_ranks("memory.py", *of, time_limit=300) if RANKS > 1 else None,
            "time": step_time(strategy, args.rounds, "--turns", args.turns),
            "calls": {
                name: median(
                    run_on_ranks("calls.py", *of, "--contender", name, time_limit=300, ranks=1)["calls"]
                    for _ in range(1 if args.quick else 5)
                )
                for name in contenders(strategy)
            },
            "fixed costs": step_time(strategy, max(1, args.rounds // 2), "--turns", 4 * args.turns, "--small", ranks=1),
        }
    if "meshes" in args.what and "fsdp2" in args.strategy:
        result["meshes"] = meshes(max(1, args.rounds // 2), args.turns)
    if "muon" in args.what and "fsdp2" in args.strategy and (ACCELERATOR == "cpu" or RANKS >= 4):
        result["muon"] = run_on_ranks("muon_time.py", "--turns", 4 * args.turns, time_limit=900, ranks=4)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1))

    print(f"\n{RANKS} ranks on {ACCELERATOR}, {PROCESS_GROUP}\n")
    rows = [row for of in result["strategies"].values() for row in strategy_rows(of)]
    rows += mesh_rows(result.get("meshes", {}))
    rows += muon_rows(result["muon"]) if "muon" in result else ()
    for strategy, of in result["checkpoints"].items():
        rows += [row._replace(figure=f"{strategy}: {row.figure}") for row in checkpoint_rows(of)]
    rows += index_rows(result.get("indexes", []))
    if "start-up" in args.what:
        rows += startup_rows(result["fsdp list"], result["import torch"])
    print_table(rows)
    print("\n" + ", ".join(f"{key} {value}" for key, value in result["machine"].items()))
    print(f"all figures: {args.out}")


if __name__ == "__main__":
    main()
