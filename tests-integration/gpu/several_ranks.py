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
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
import torch
from card import ACCELERATOR, DEVICE, HAS_CARD, arguments
from choices import ADAPTERS, CLAUSES, MESHES, clause_names
from clause_records import AT_MOST, FILE, GROUP, TESTS
from records import RECORDS, Records, read_records

from fsdp_core.testing import RankPool, oracle
from fsdp_core.testing.training import new_fabric

ROOT = Path(__file__).parents[2]
RANKS = 4
STRATEGIES = ("fsdp2", "fsdp_native")

#: How many tests of each group a rehearsal on the CPU runs, one after another: `nox -s everything` runs them there.
REHEARSED = 2


def test_groups(first: str) -> dict[str, list[str]]:
    """The tests as pytest's node ids, by group.

    Args:
        first: The clause that the strategies' groups begin with.
    """
    clauses = CLAUSES[next(i for i, clause in enumerate(CLAUSES) if clause.startswith(first)) :]
    packages = {"fsdp2": "fsdp-fsdp2::TestFSDP2", "fsdp_native": "fsdp-cuda-native::TestNative"}
    groups = {"meshes": [f"packages/fsdp-fsdp2/tests/{test}" for test in MESHES]}
    for strategy, home in packages.items():
        package, suite = home.split("::")
        groups[strategy] = [f"packages/{package}/tests/test_conformance.py::{suite}::{clause}" for clause in clauses]
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


def finish_sessions(
    sessions: dict[str, subprocess.Popen[bytes]], tests: dict[str, int], out: Path, records: Records, deadline: float
) -> None:
    """Wait until all sessions have ended or the time is up.

    Args:
        sessions: The sessions by group.
        tests: How many tests each runs.
        out: The folder of the run.
        records: Where it is said which session did not end, or did not run all.
        deadline: When they must have ended, on the clock of :func:`time.monotonic`.
    """
    while time.monotonic() < deadline and any(session.poll() is None for session in sessions.values()):
        time.sleep(0.1)
    late = [group for group, session in sessions.items() if session.poll() is None]  # before one is ended
    for group in late:
        end_session(sessions[group])
    for group, session in sessions.items():
        chosen = tests[group]
        if group in late:
            ended = len(recorded_tests(group, out))
            records.no_time(f"{group}: the session ends", f"the time was up; {ended} of {chosen} tests had ended")
            continue
        with records.check(f"{group}: the session ends") as details:
            status, recorded = session.returncode, len(recorded_tests(group, out))
            details |= {"status": status, "tests": recorded}
            what = f"its process has ended with status {status} in the test that comes next"
            assert recorded >= chosen, f"{recorded} of its {chosen} tests are recorded: {what}"
            # 1: a test has failed, which is recorded by itself
            assert status in (0, 1), f"pytest ended with status {status} and ran nothing"


def where(tensors: Iterable[torch.Tensor]) -> list[str]:
    """The types of the devices that tensors are on."""
    return sorted({tensor.device.type for tensor in tensors})


def exchanging_backends(strategy: str) -> dict[str, Any]:
    """Train a step with shards in host memory, clip, save in the background; which backends exchanged what.

    Args:
        strategy: The strategy's name.

    Returns:
        The names of the collectives by what they were called for, such as ``nccl:_reduce_scatter_base``, and the types
        of the devices on which sharded parameters and those that stay whole, which are of dimension 0, have their
        values, gradients and moments.
    """
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile

    fabric = new_fabric(strategy, 2, {"cpu_offload": True, "async_save": True})
    net = oracle.new_net()
    model, optimizer = fabric.setup(net, oracle.momentum(net))
    (x, y), *_ = oracle.global_batches(1)
    found: dict[str, Any] = {}
    with profile(activities=[ProfilerActivity.CPU]) as step:
        fabric.backward(torch.nn.functional.mse_loss(model(fabric.to_device(x)), fabric.to_device(y)))
    with profile(activities=[ProfilerActivity.CPU]) as clip:
        fabric.clip_gradients(model, optimizer, max_norm=0.1)
    for purpose, profiled in (("step", step), ("clip", clip)):
        calls = {event.key: event.count for event in profiled.key_averages()}
        found[purpose] = {name: calls[name] for name in sorted(calls) if name.startswith(("nccl:", "gloo:"))}
    trained = {name: parameter for name, parameter in net.named_parameters() if parameter.requires_grad}
    kinds: dict[str, list[torch.nn.Parameter]] = {"sharded": [], "whole": []}
    for name, parameter in trained.items():
        kinds["whole" if name.endswith("gain") else "sharded"].append(parameter)
    for kind, parameters in kinds.items():
        found[f"{kind} parameters"] = where(parameters)
        found[f"gradients of {kind} parameters"] = where(p.grad for p in parameters if p.grad is not None)
    optimizer.step()
    state = optimizer.state
    for kind, parameters in kinds.items():
        moments = [value for p in parameters for value in state.get(p, {}).values()]
        found[f"moments of {kind} parameters"] = where(value for value in moments if isinstance(value, torch.Tensor))
    side = fabric.strategy.runtime.side_channel()  # type: ignore[attr-defined]
    found["side channel"] = dist.get_backend(side.process_group)
    found["main group"] = dist.get_backend_config()
    side.stop()
    return found


def check_backends(records: Records, deadline: float) -> None:
    """Check that shards are in host memory and all that is exchanged in a step on the card, and that saves use gloo.

    Units are gathered and gradients reduced by NCCL, for they are computed with on the card; so is the one number that
    each rank adds to the norm, whose squares were summed in host memory.

    Args:
        records: Where it is recorded.
        deadline: When ranks that have not answered are ended, on the clock of :func:`time.monotonic`.
    """
    backend = "nccl" if HAS_CARD else "gloo"
    with RankPool() as pool:
        for strategy in STRATEGIES:
            with records.check(f"{strategy}: NCCL for the card, gloo for the host") as details:
                found, *_ = pool.run(2, exchanging_backends, strategy, timeout=max(1.0, deadline - time.monotonic()))
                details |= found
                for what in ("sharded", "gradients of sharded", "moments of sharded"):
                    on = found[f"{what} parameters"]
                    assert on == ["cpu"], f"with cpu_offload=True, {what} parameters are on {on}"
                assert found["whole parameters"] == [DEVICE.type], "parameters that stay whole are where they compute"
                assert any(name.startswith(f"{backend}:") for name in found["step"]), "no collective in the step"
                assert list(found["clip"]) == [f"{backend}:all_reduce"], f"clipping exchanged {found['clip']}"
                assert found["side channel"] == "gloo", "saves in the background talk over gloo"


def main() -> None:
    """Run the part."""
    words, records = arguments(
        "several_ranks",
        __doc__,
        lambda parser: parser.add_argument("--from", dest="first", choices=clause_names(), default=clause_names()[0]),
    )
    deadline = words.deadline
    os.environ.update(rank_variables())
    records.outcome("devices", "passed", cards=torch.cuda.device_count(), **rank_variables())
    groups = test_groups(words.first)
    at_most = REHEARSED if words.tiny else max(map(len, groups.values()))
    sessions = {group: start_session(group, tests, at_most, words.out) for group, tests in groups.items()}
    try:
        check_backends(records, deadline)  # meanwhile: sessions begin with imports that take as long
    finally:
        numbers = {group: min(at_most, len(tests)) for group, tests in groups.items()}
        finish_sessions(sessions, numbers, words.out, records, deadline)


if __name__ == "__main__":
    main()
