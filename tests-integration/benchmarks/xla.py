"""Time per step of the XLA strategies beside hand-written torch_xla loops, on two of XLA's CPU devices.

    python -m nox -s bench -- --xla

Every contender runs in processes of its own, in an order that is shuffled in each round; a figure is the median of the
rounds' ratios. Run it with a Python that has fsdp-xla.
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
CONTENDERS = [(way, one) for way in ("spmd", "classic") for one in ("by-hand", "fabric", "trainer")]


def run(way: str, contender: str, steps: int) -> dict[str, Any]:
    """One contender's report."""
    environment = {**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "2", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "xla_step_time.py"), way, contender, str(steps)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise SystemExit(f"{way} {contender} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    report: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return report


def main() -> None:
    """Run the rounds, check that all trained the same, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--xla", action="store_true", help="what chose this benchmark")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    rounds: list[dict[str, dict[str, Any]]] = []
    for number in range(args.rounds):
        order = random.Random(number).sample(CONTENDERS, len(CONTENDERS))
        rounds.append({f"{way} {one}": run(way, one, args.steps) for way, one in order})
        print(f"round {number + 1} of {args.rounds}", flush=True)
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps(rounds, indent=1))
    for way in ("spmd", "classic"):
        losses = {name: report["loss"] for name, report in rounds[0].items() if name.startswith(way)}
        if max(losses.values()) - min(losses.values()) > 1e-3:
            raise SystemExit(f"they did not train the same, so there is no figure: {losses}")
        base = [one[f"{way} by-hand"] for one in rounds]
        print(f"{way}: by hand {median(one['seconds'] for one in base) * 1e3:.1f} ms, {base[0]['compiles']} programs")
        for contender in ("fabric", "trainer"):
            theirs = [one[f"{way} {contender}"] for one in rounds]
            ratios = sorted(a["seconds"] / b["seconds"] for a, b in zip(theirs, base, strict=True))
            told = f"{median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"
            print(f"{way}: {contender} / by hand {told}, {theirs[0]['compiles']} programs")


if __name__ == "__main__":
    main()
