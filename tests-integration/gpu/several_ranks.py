"""Part 3: ranks that share one card over NCCL, or have one each: clauses of the suite, meshes, and which backend talks.

NCCL refuses two ranks of one host on one device. With a host's name for each rank (``NCCL_HOSTID``) it takes them for
hosts that talk through sockets, so each rank is a node with one device: ``num_nodes=2, devices=1``. Where there are
as many cards as ranks, each rank has one of its own.

The groups of tests run side by side, each in a pytest session of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from card import ACCELERATOR, HAS_CARD, arguments
from clause_records import AT_MOST, FILE, GROUP, TESTS
from records import RECORDS, Records, read_records

from fsdp_core.testing import RankPool, oracle
from fsdp_core.testing.training import new_fabric

ROOT = Path(__file__).parents[2]
RANKS = 4
STRATEGIES = ("fsdp2", "fsdp_native")

#: How many tests of each group a rehearsal on the CPU runs, one after another: `nox -s everything` runs them there.
REHEARSED = 2


def test_groups() -> dict[str, list[str]]:
    """The tests as pytest's node ids, by group."""
    packages = {"fsdp2": "fsdp-fsdp2::TestFSDP2", "fsdp_native": "fsdp-cuda-native::TestNative"}
    groups = {"meshes": [f"packages/fsdp-fsdp2/tests/{test}" for test in MESHES]}
    for strategy, home in packages.items():
        package, suite = home.split("::")
        groups[strategy] = [f"packages/{package}/tests/test_conformance.py::{suite}::{clause}" for clause in CLAUSES]
    adapters = "packages/fsdp-fsdp2/tests/test_adapters.py::TestAdaptersOverFSDP2"
    groups["fsdp2"] += [f"{adapters}::{clause}" for clause in ADAPTERS]
    return groups


def rank_variables() -> dict[str, str]:
    """The environment variables that tell the suite's ranks which devices they have."""
    cards = torch.cuda.device_count() if HAS_CARD else 0
    shared = "1" if cards < RANKS else "0"
    return {"FSDP_TESTS_ACCELERATOR": ACCELERATOR, "FSDP_TESTS_RANKS_ARE_NODES": shared, "OMP_NUM_THREADS": "1"}


def start_session(group: str, tests: list[str], at_most: int, out: Path) -> subprocess.Popen[bytes]:
    """Start a pytest session over a group of tests, which records each as it ends.

    Args:
        group: The group's name.
        tests: Node ids, in order.
        at_most: How many of them run.
        out: The folder of the run.
    """
    variables = {
        FILE: str(out.resolve() / RECORDS),
        GROUP: group,
        TESTS: json.dumps(tests),
        AT_MOST: str(at_most),
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    files = dict.fromkeys(test.split("::")[0] for test in tests)
    command = [sys.executable, "-m", "pytest", "-p", "clause_records", "-p", "no:cacheprovider", "--tb=short", "-q"]
    return subprocess.Popen([*command, "--timeout=100", *files], cwd=ROOT, env={**os.environ, **variables})


def end_session(session: subprocess.Popen[bytes]) -> None:
    """End a session and the ranks that it has started."""
    children = psutil.Process(session.pid).children(recursive=True)
    for process in [psutil.Process(session.pid), *children]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    session.wait()


def recorded_tests(group: str, out: Path) -> list[dict[str, Any]]:
    """The records of the tests of a group that have ended."""
    return [line for line in read_records(out / RECORDS) if str(line.get("check")).startswith(f"{group}: ")]


def run_groups(groups: dict[str, list[str]], at_most: int, out: Path, records: Records, deadline: float) -> None:
    """Run groups of tests side by side until all have ended or the time is up.

    Args:
        groups: The tests by group.
        at_most: How many of each group run.
        out: The folder of the run.
        records: Where it is said which session did not end, or did not run all.
        deadline: When they must have ended, on the clock of :func:`time.monotonic`.
    """
    sessions = {group: start_session(group, tests, at_most, out) for group, tests in groups.items()}
    for group, session in sessions.items():
        chosen = min(at_most, len(groups[group]))
        try:
            session.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            end_session(session)
            ended = len(recorded_tests(group, out))
            records.no_time(f"{group}: the session ends", f"the time was up; {ended} of {chosen} tests had ended")
            continue
        with records.check(f"{group}: the session ends") as details:
            details |= {"status": session.returncode, "tests": len(recorded_tests(group, out))}
            assert details["tests"] >= chosen, f"{details['tests']} of its {chosen} tests are recorded"
            # 1: a test has failed, which is recorded by itself
            assert details["status"] in (0, 1), f"pytest ended with status {details['status']} and ran nothing"


def exchanging_backends(strategy: str) -> dict[str, Any]:
    """Train a step with shards in host memory, clip, save in the background; which backends exchanged what.

    Args:
        strategy: The strategy's name.

    Returns:
        The names of the collectives by what they were called for, such as ``nccl:_reduce_scatter_base``.
    """
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile

    fabric = new_fabric(strategy, 2, {"cpu_offload": True, "async_save": True})
    net = oracle.new_net()
    model, optimizer = fabric.setup(net, oracle.momentum(net))
    (x, y), *_ = oracle.global_batches(1)
    collectives = {}
    with profile(activities=[ProfilerActivity.CPU]) as step:
        fabric.backward(torch.nn.functional.mse_loss(model(fabric.to_device(x)), fabric.to_device(y)))
    with profile(activities=[ProfilerActivity.CPU]) as clip:
        fabric.clip_gradients(model, optimizer, max_norm=0.1)
    for purpose, profiled in (("step", step), ("clip", clip)):
        names = {event.key for event in profiled.key_averages()}
        collectives[purpose] = sorted(name for name in names if name.startswith(("nccl:", "gloo:")))
    optimizer.step()
    side = fabric.strategy.runtime.side_channel()  # type: ignore[attr-defined]
    collectives["side channel"] = [dist.get_backend(side.process_group)]
    collectives["main group"] = [dist.get_backend_config()]
    collectives["shards"] = sorted({parameter.device.type for parameter in net.parameters()})
    side.stop()
    return collectives


def check_backends(records: Records) -> None:
    """Check that NCCL moves what is on the card, and gloo what is in host memory, and that neither does the other's."""
    for strategy in STRATEGIES:
        with records.check(f"{strategy}: NCCL for the card, gloo for the host") as details:
            with RankPool() as pool:
                first, *_ = pool.run(2, exchanging_backends, strategy)
            details |= first
            device_backend = "nccl" if HAS_CARD else "gloo"
            assert first["shards"] == ["cpu"], "with cpu_offload=True, shards are in host memory"
            assert any(name.startswith(f"{device_backend}:") for name in first["step"]), "no collective in the step"
            assert any(name.startswith("gloo:") for name in first["clip"]), "the norm of offloaded gradients is gloo's"
            assert not any(name.startswith("nccl:") for name in first["clip"]), "offloaded gradients went to the card"
            assert first["side channel"] == ["gloo"], "saves in the background talk over gloo"


def main() -> None:
    """Run the part."""
    words, records = arguments("several_ranks", __doc__)
    deadline = words.deadline
    os.environ.update(rank_variables())
    records.outcome("devices", "passed", cards=torch.cuda.device_count(), **rank_variables())
    groups = test_groups()
    at_most = REHEARSED if words.tiny else max(map(len, groups.values()))
    run_groups(groups, at_most, words.out, records, deadline - words.seconds / 6)
    if time.monotonic() < deadline:
        check_backends(records)
    else:
        records.no_time("NCCL for the card, gloo for the host")


if __name__ == "__main__":
    main()
