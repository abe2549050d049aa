"""Time per step of the XLA strategies beside hand-written torch_xla loops, on two of XLA's CPU devices.

    python -m nox -s bench -- --xla

A contender and a loop by hand take turns in one process, some steps each; contenders have processes of their own, in an
order that is shuffled in each round. A figure is the median of the rounds' ratios, which are medians over turns. Run it
with a Python that has fsdp-xla.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
OUT = HERE.parents[1] / "build" / "benchmarks-xla.json"
CONTENDERS = {"spmd": ("fabric", "trainer"), "classic": ("fabric", "trainer", "lightning")}


def run(way: str, contender: str, steps: int, *how: str) -> dict[str, Any]:
    """One contender's report."""
    environment = {**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "2", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "xla_step_time.py"), way, contender, str(steps), *how]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise SystemExit(f"{way} {contender} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    report: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return report


def ratio(report: dict[str, Any], what: str) -> float:
    """The median, over blocks of steps, of a contender's time or processor time by that of the loop by hand."""
    return median(a / b for a, b in zip(report[what], report["by_hand"][what], strict=True))


def told(ratios: list[float]) -> str:
    return f"{median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"


def main() -> None:
    """Count, run the rounds, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--xla", action="store_true", help="what chose this benchmark")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=60, help="a multiple of 5")
    args = parser.parse_args()
    pairs = [(way, one) for way, contenders in CONTENDERS.items() for one in contenders]
    alone = {f"{way} {one}": run(way, one, 10, "alone") for way in CONTENDERS for one in ("by-hand", *CONTENDERS[way])}
    rounds: list[dict[str, dict[str, Any]]] = []
    for number in range(args.rounds):
        order = random.Random(number).sample(pairs, len(pairs))
        rounds.append({f"{way} {one}": run(way, one, args.steps) for way, one in order})
        print(f"round {number + 1} of {args.rounds}", flush=True)
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps({"alone": alone, "rounds": rounds}, indent=1))
    for way, contenders in CONTENDERS.items():
        seconds = median(s for one in rounds for c in contenders for s in one[f"{way} {c}"]["by_hand"]["seconds"])
        print(f"{way}: by hand {seconds * 1e3:.1f} ms, {counted(alone[f'{way} by-hand'])}")
        for one in contenders:
            name = f"{way} {one}"
            times = told([ratio(each[name], "seconds") for each in rounds])
            cpu = told([ratio(each[name], "cpu") for each in rounds])
            print(f"{name} / by hand {times}, processor time {cpu}, {counted(alone[name])}")
    own = [ratio(one["classic fabric"], "seconds") / ratio(one["classic lightning"], "seconds") for one in rounds]
    print(f"classic fabric / lightning {told(own)}")


def counted(report: dict[str, Any]) -> str:
    return f"{report['compiles']} programs, {report['executions']:g} executions a step"


if __name__ == "__main__":
    main()
