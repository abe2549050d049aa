"""torchrun on two hosts: trained as one process does; lost and come back; told what is wrong before hours are lost."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hosts import Host, Run, two_hosts
from torch import nn

from fsdp_core.checkpoint import load, read_manifest

pytestmark = pytest.mark.timeout(280)

SCRIPT = Path(__file__).parents[2] / "docs/examples/many_machines.py"
STRATEGIES = ("fsdp2", "fsdp_native")
TOLERANCE = 1e-5  # fp32: the order of additions differs between one process and several
GLOBAL_BATCH, ROWS = 8, 64


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[Host, Host]]:
    with two_hosts(tmp_path) as pair:
        yield pair


def torchrun(first: Host, *words: str, nnodes: str = "2", ranks: int = 2) -> list[str]:
    return [
        *("-m", "torch.distributed.run", f"--nnodes={nnodes}", f"--nproc-per-node={ranks}", "--rdzv-backend=c10d"),
        *(f"--rdzv-endpoint={first.name}:29400", "--rdzv-id=run", *words),
    ]


def on_both(hosts: tuple[Host, Host], folder: Path, *words: str, status: int = 0) -> list[str]:
    """Run the script on both hosts to its end; what each wrote."""
    runs = [host.start(*torchrun(hosts[0], str(SCRIPT), *words), folder=folder) for host in hosts]
    statuses = [run.ended() for run in runs]
    told = [run.told for run in runs]
    assert [bool(one) for one in statuses] == [bool(status)] * 2, "\n".join(one[-6000:] for one in told)
    assert not any(host.processes() for host in hosts)
    return told


def said(told: str, front_end: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in told.splitlines() if line.startswith('{"front_end"')]
    return [one for one in lines if one["front_end"] == front_end]


def by_strategy(told: list[str], front_end: str) -> list[list[dict[str, Any]]]:
    """What was said under each of the strategies, which came one after the other and took as many steps."""
    of_hosts = [said(one, front_end) for one in told]
    parts = [len(lines) // len(STRATEGIES) for lines in of_hosts]
    return [
        [one for lines, part in zip(of_hosts, parts, strict=True) for one in lines[number * part : (number + 1) * part]]
        for number in range(len(STRATEGIES))
    ]


def order_of(epoch: int) -> list[int]:
    """The rows of an epoch, as torch's DistributedSampler shuffles them."""
    return torch.randperm(ROWS, generator=torch.Generator().manual_seed(epoch)).tolist()


def of_one_process(steps: int) -> tuple[list[list[int]], list[float]]:
    """The rows and the loss of each step of one process of plain torch."""
    x = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    order = [row for epoch in range(math.ceil(steps * GLOBAL_BATCH / ROWS)) for row in order_of(epoch)]
    batches, losses = [], []
    for step in range(steps):
        batches.append(order[step * GLOBAL_BATCH : (step + 1) * GLOBAL_BATCH])
        rows = x[batches[-1]]
        loss = nn.functional.mse_loss(net(rows), rows.sum(1, keepdim=True))
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return batches, losses


def assert_as_one_process(lines: list[dict[str, Any]], steps: range) -> None:
    """The rows of each step are those of one process, and the mean of the losses is its loss."""
    batches, losses = of_one_process(steps.stop)
    for step in steps:
        own = [one for one in lines if one["step"] == step]
        assert sorted(row for one in own for row in one["rows"]) == sorted(batches[step]), f"step {step}"
        mean = sum(one["loss"] for one in own) / len(own)
        assert mean == pytest.approx(losses[step], abs=TOLERANCE), f"step {step}"


def test_two_hosts_train_as_one_process_and_a_single_one_goes_on(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    front_ends = ("--front-ends", "trainer", "fabric", "--folder", str(tmp_path / "runs"))
    told = on_both(hosts, tmp_path, *STRATEGIES, *front_ends, "--steps=4")
    for front_end in ("trainer", "fabric"):
        for lines in by_strategy(told, front_end):
            assert len(lines) == 4 * 4  # ranks and steps, of one micro-batch each
            assert_as_one_process(lines, range(4))
    for strategy in STRATEGIES:
        for place in ("trainer/last.ckpt", "fabric.ckpt"):
            manifest = read_manifest(tmp_path / "runs" / strategy / place)
            assert (manifest.strategy, manifest.world_size) == (strategy, 4)
    # on one host, whose two ranks take two micro-batches each
    alone = hosts[1].start(
        *torchrun(hosts[1], str(SCRIPT), *STRATEGIES, *front_ends, "--steps=7", nnodes="1"), folder=tmp_path
    )
    assert alone.ended() == 0, alone.told[-8000:]
    for front_end in ("trainer", "fabric"):
        for lines in by_strategy([alone.told], front_end):
            assert len(lines) == 2 * 2 * 3
            assert_as_one_process(lines, range(4, 7))
    assert "the global batch was" not in alone.told


def test_hosts_that_do_not_share_a_disk_are_told_at_once(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    for host in hosts:
        host.has_own_disk_at(tmp_path / "runs")
    outputs = on_both(hosts, tmp_path, "fsdp2", "--folder", str(tmp_path / "runs"), status=1)
    told = "".join(outputs)
    assert not said(told, "trainer"), "it has trained first"
    place = tmp_path / "runs/fsdp2/trainer"
    assert f"the hosts do not share {place}, where checkpoints are to be saved" in told
    assert "what host-a (rank 0) writes there, host-b (rank 2) can't see" in told
    assert "a file system that all hosts mount at the same path" in told


#: torchrun waits half a minute for further hosts, and as long until it takes one for lost.
QUICKLY = "--rdzv-conf=last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"


def test_a_host_is_lost_and_comes_back(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    """Two hosts, then one, then two: in the end each row was trained on as one process does, once."""
    steady, other = hosts
    # torchrun keeps the first round's address of rank 0, which a host that comes back would wait for
    variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GATES": "2:5,1:8", "GATES_IN": str(tmp_path)}
    script = (str(Path(__file__).parent / "gated.py"), "fsdp2", "--folder", str(tmp_path / "runs"), "--steps=12")
    words = torchrun(steady, "--max-restarts=3", QUICKLY, *script, nnodes="1:2", ranks=1)

    def start(host: Host) -> Run:
        return host.start(*words, folder=tmp_path, environment=variables)

    first, second = start(steady), start(other)
    for run in (first, second):
        run.until("waits at 2:5")
    other.lose()  # at step 5, after the checkpoint of step 4
    (tmp_path / "2-5").touch()
    first.until("waits at 1:8")
    third = start(other)  # the steady host's rank gets SIGTERM at step 8, does it, saves, and both go on
    assert first.ended() == 0, first.told[-8000:]
    assert third.ended() == 0, third.told[-8000:]

    last = load(tmp_path / "runs/fsdp2/trainer/last.ckpt")
    attempts = last["trainer"]["fsdp_core"]["attempts"]
    assert [(one["ranks"], one["samples"]) for one in attempts] == [
        (2, GLOBAL_BATCH),
        (1, GLOBAL_BATCH),
        (2, GLOBAL_BATCH),
    ]
    of_first = said(first.told, "trainer")
    began_alone = next(at for at, one in enumerate(of_first) if one["step"] < of_first[max(at - 1, 0)]["step"])
    begins = [one["step"] for one in attempts]
    assert begins == [0, of_first[began_alone]["step"], 9], "the host that came back has cost a step"
    assert begins[1] == 4, "it has not gone on from the newest checkpoint"
    together = of_first[:began_alone] + said(second.told, "trainer")
    alone = [one for one in of_first[began_alone:] if one["step"] < 9]
    at_last = [one for one in of_first[began_alone:] if one["step"] >= 9] + said(third.told, "trainer")
    # what went on of each attempt is all that one process does, each row once
    assert_as_one_process(together, range(4))
    assert_as_one_process(alone, range(4, 9))
    assert_as_one_process(at_last, range(9, 12))
    assert {one["step"] for one in alone + at_last} == set(range(4, 12))


@pytest.mark.parametrize("tells", ["rendezvous", "master"], ids=["plain Kubernetes", "Kubeflow Trainer"])
def test_what_kubernetes_sets(hosts: tuple[Host, Host], tmp_path: Path, tells: str) -> None:
    """``PET_*`` variables instead of words: what the manifest of the docs sets, and what Kubeflow Trainer does."""
    runs = []
    for number, host in enumerate(hosts):
        given = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1"}
        if tells == "master":
            given |= {"PET_NODE_RANK": str(number), "PET_MASTER_ADDR": hosts[0].name, "PET_MASTER_PORT": "29400"}
        else:
            given |= {"PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": f"{hosts[0].name}:29400", "PET_RDZV_ID": "run"}
        words = ("-m", "torch.distributed.run", str(SCRIPT), "fsdp2", "--steps=2", "--folder", str(tmp_path / "runs"))
        runs.append(host.start(*words, folder=tmp_path, environment=given))
    for run in runs:
        assert run.ended() == 0, run.told[-8000:]
    lines = [one for run in runs for one in said(run.told, "trainer")]
    assert len(lines) == 2 * 2 * 2
    assert_as_one_process(lines, range(2))
