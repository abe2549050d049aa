"""One rank dies, hangs, fails, or does something else than the others: it is named, and all end."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from pathlib import Path

import pytest

from fsdp_core.testing.launching.forking import start_script
from fsdp_core.testing.launching.processes import fresh_environment

SCRIPT = Path(__file__).parent / "a_rank_is_gone.py"
RANKS = 3

#: How long the ranks that are left may take, with what torch needs to start them on a busy machine.
SECONDS = 120

LOST, HANGS = re.escape(f"on {socket.gethostname()} (process "), 3.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def run(
    folder: Path, how: str, who: int, front: str, hang_seconds: float, *, hosts: int = 1
) -> tuple[list[int], list[str]]:
    """The exit statuses of all ranks, and what each has written; each is a host of its own, if there are as many."""
    port = str(free_port())
    outputs = [folder / f"rank{rank}.txt" for rank in range(RANKS)]
    started = []
    for rank, output in enumerate(outputs):
        host, local = divmod(rank, RANKS // hosts)
        of_torchrun = {"LOCAL_RANK": str(local), "GROUP_RANK": str(host), "LOCAL_WORLD_SIZE": str(RANKS // hosts)}
        environment = {
            **fresh_environment(),
            **of_torchrun,
            "RANK": str(rank),
            "WORLD_SIZE": str(RANKS),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "TORCHELASTIC_RUN_ID": "run",
            "OMP_NUM_THREADS": "1",
            "HANG_SECONDS": str(hang_seconds),
        }
        words = (how, str(who), front)
        started.append(start_script(SCRIPT, *words, folder=folder, output=output, environment=environment))
    try:
        for process in started:
            process.join(timeout=SECONDS)
        told = [output.read_text() for output in outputs]
        statuses = [process.exitcode for process in started]
        assert None not in statuses, f"still running: {statuses}\n" + "\n".join(told)
        return [int(one or 0) for one in statuses], told
    finally:
        for process in started:
            if process.pid is not None and process.exitcode is None:
                os.kill(process.pid, signal.SIGKILL)
                process.join()


@pytest.mark.drawn
@pytest.mark.parametrize("front", ["trainer", "fabric"])
@pytest.mark.parametrize(("how", "who"), [("killed", 1), ("exits", 0), ("raises", 2)])
def test_a_rank_that_ends_is_named_by_the_others(how: str, who: int, front: str, tmp_path: Path) -> None:
    statuses, told = run(tmp_path, how, who, front, 1800.0)
    others = [rank for rank in range(RANKS) if rank != who]
    assert statuses[who] == {"killed": -signal.SIGKILL, "exits": 0, "raises": 1}[how]
    assert [statuses[rank] for rank in others] == [1, 1]
    # one that ends without a word is lost at the step of the rank that notices it, which may be one behind
    why = r"has ended at step 5 with ValueError: a bad batch" if how == "raises" else r"was lost at step [45]:"
    for rank in others:
        assert re.search(rf"fsdp-core: (rank {rank} ends: )?rank {who} {LOST}\d+\) {why}", told[rank]), told[rank]
        assert "ckpt_path='last'" in told[others[0]]


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("how", "who", "front", "says"),
    [
        ("waits", 2, "trainer", r"is behind at step 5: it stands at .*a_rank_is_gone\.py:\d+ in wait_for_ever"),
        ("calls-alone", 0, "fabric", r"is behind at step 5: .*a_rank_is_gone\.py:\d+ in call_alone .*barrier"),
        ("skips", 2, "fabric", r"is behind at step \d: it stands at .*a_rank_is_gone\.py:\d+ in main"),
        ("stopped", 1, "trainer", r"is behind: it does not answer"),
        ("stopped", 0, "trainer", r"does not answer"),
    ],
)
def test_a_rank_that_hangs_is_named_with_its_place(how: str, who: int, front: str, says: str, tmp_path: Path) -> None:
    statuses, told = run(tmp_path, how, who, front, HANGS)
    others = [rank for rank in range(RANKS) if rank != who]
    assert [statuses[rank] for rank in others] == [1, 1], told
    assert statuses[who] == (-signal.SIGKILL if how == "stopped" else 1)
    writes = 1 if (how, who) == ("stopped", 0) else 0
    assert re.search(rf"rank {who} {LOST}\d+\) {says}", told[writes]), told[writes]
    for rank in range(RANKS):
        if (how, rank) != ("stopped", who):
            step = r"\d" if how == "skips" else "5"
            written = rf"rank {rank} on .*, at step {step}; the last collective .*: gloo:\w+ of "
            assert re.search(written, told[rank]), told[rank]
            assert "Thread MainThread, innermost call last:" in told[rank]
            assert told[rank].count("fsdp-core: ranks have waited") <= (2 if rank == writes else 1)


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("how", "who", "front", "what", "says"),
    [
        ("waits-alone", 0, "trainer", "prepare_data()", r"is behind .*: it stands at .*in wait_for_ever"),
        ("stopped-alone", 1, "fabric", "rank_zero_first()", r"is behind: it does not answer"),
    ],
)
def test_what_one_rank_does_while_others_wait_in_lightnings_barrier_is_named_and_ended_later(
    how: str, who: int, front: str, what: str, says: str, tmp_path: Path
) -> None:
    statuses, told = run(tmp_path, how, who, front, 2.0)
    others = [rank for rank in range(RANKS) if rank != who]
    assert [statuses[rank] for rank in others] == [1, 1], told
    line, verdict = [one for one in told[0].splitlines() if one.startswith("fsdp-core: ")]
    assert re.search(rf"have waited for 2 s for {re.escape(what)}: rank {who} {LOST}", line), line
    assert re.search(rf"waited for each other for 24 s. rank {who} {LOST}\d+\) {says}", verdict), verdict
    assert f"for {what}" in verdict


def test_a_rank_that_runs_out_of_batches_is_named_at_that_batch(tmp_path: Path) -> None:
    statuses, told = run(tmp_path, "fewer", 1, "trainer", 1800.0)
    assert statuses == [1, 1, 1]
    for of_rank in told:
        assert "fsdp2: the epoch is over on rank 1 after batch 7 of epoch 0, and goes on elsewhere" in of_rank
        assert "limit_train_batches=N" in of_rank


def test_a_rank_whose_script_ends_early_is_named(tmp_path: Path) -> None:
    statuses, told = run(tmp_path, "leaves", 2, "fabric", 1800.0)
    assert statuses == [1, 1, 0]
    for rank in (0, 1):  # which may notice it before they have begun the step that the other has not taken
        why = r"fsdp-core: the script has ended on rank 2 on .*, and this rank went on at step [45]\b"
        assert re.search(why, told[rank]), told[rank]


@pytest.mark.parametrize("front", ["trainer", "fabric"])
def test_a_host_with_another_torch_is_named_before_training(front: str, tmp_path: Path) -> None:
    statuses, told = run(tmp_path, "older-torch", 1, front, 1800.0, hosts=RANKS)
    assert statuses == [1, 1, 1]
    host = re.escape(socket.gethostname())
    for of_rank in told:
        assert re.search(rf"torch: \S+ on {host} \(rank 0, 2\); 2\.12\.1 on {host} \(rank 1\)", of_rank), of_rank
        assert "Install the same on every host, such as: pip install torch==" in of_rank


def test_a_loaders_worker_that_hangs_is_told_and_ended(tmp_path: Path) -> None:
    statuses, told = run(tmp_path, "worker-waits", 1, "trainer", HANGS)
    assert statuses == [1, 1, 1]
    assert re.search(rf"rank 1 {LOST}\d+\) is behind at step \d.* for a batch of a DataLoader", told[0]), told[0]
    worker = int((tmp_path / "worker").read_text())
    while Path(f"/proc/{worker}").exists() and "Z" not in Path(f"/proc/{worker}/stat").read_text().split()[2]:
        time.sleep(0.1)  # until the time limit of the test
