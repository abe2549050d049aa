"""torchrun on two hosts: trained as one process does; lost and come back; told what is wrong before hours are lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from example import SCRIPT, assert_as_one_process, said
from hosts import TORCHRUN, Host, torchrun

from fsdp_core.checkpoint import read_manifest

STRATEGIES = ("fsdp2", "fsdp_native")


def on_both(hosts: tuple[Host, Host], folder: Path, *words: str, ranks: int, status: int = 0) -> list[str]:
    """Run the script on both hosts to its end; what each wrote."""
    command = torchrun(hosts[0], str(SCRIPT), *words, ranks=ranks)
    runs = [host.start(TORCHRUN, *command, folder=folder, ranks=ranks) for host in hosts]
    statuses = [run.ended() for run in runs]
    told = [run.told for run in runs]
    assert [bool(one) for one in statuses] == [bool(status)] * 2, "\n".join(one[-6000:] for one in told)
    assert not any(host.processes() for host in hosts)
    return told


def by_strategy(told: list[str], front_end: str) -> list[list[dict[str, Any]]]:
    """What was said under each of the strategies, which came one after the other and took as many steps."""
    of_hosts = [said(one, front_end) for one in told]
    parts = [len(lines) // len(STRATEGIES) for lines in of_hosts]
    return [
        [one for lines, part in zip(of_hosts, parts, strict=True) for one in lines[number * part : (number + 1) * part]]
        for number in range(len(STRATEGIES))
    ]


def test_two_hosts_train_as_one_process_and_go_on(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    front_ends = ("--front-ends", "trainer", "fabric", "--folder", str(tmp_path / "runs"))
    told = on_both(hosts, tmp_path, *STRATEGIES, *front_ends, "--steps=4", ranks=2)
    for front_end in ("trainer", "fabric"):
        for lines in by_strategy(told, front_end):
            assert len(lines) == 4 * 4  # ranks and steps, of one micro-batch each
            assert_as_one_process(lines, range(4))
    for strategy in STRATEGIES:
        for place in ("trainer/last.ckpt", "fabric.ckpt"):
            manifest = read_manifest(tmp_path / "runs" / strategy / place)
            assert (manifest.strategy, manifest.world_size) == (strategy, 4)
    # with one rank on each, which takes two micro-batches; started by what Kubeflow Trainer sets in its pods
    runs = []
    for number, host in enumerate(hosts):
        pod = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": str(number)}
        pod |= {"PET_MASTER_ADDR": hosts[0].name, "PET_MASTER_PORT": "29400"}
        words = (str(SCRIPT), *STRATEGIES, *front_ends, "--steps=7")
        runs.append(host.start(TORCHRUN, *words, folder=tmp_path, environment=pod))
    assert [run.ended() for run in runs] == [0, 0], "".join(run.told[-6000:] for run in runs)
    for front_end in ("trainer", "fabric"):
        for lines in by_strategy([run.told for run in runs], front_end):
            assert len(lines) == 2 * 2 * 3
            assert_as_one_process(lines, range(4, 7))
    assert not any("the global batch was" in run.told for run in runs)


def test_hosts_that_do_not_share_a_disk_are_told_at_once(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    for host in hosts:
        host.has_own_disk_at(tmp_path / "runs")
    outputs = on_both(hosts, tmp_path, "fsdp2", "--folder", str(tmp_path / "runs"), ranks=1, status=1)
    told = "".join(outputs)
    assert not said(told, "trainer"), "it has trained first"
    place = tmp_path / "runs/fsdp2/trainer"
    assert f"the hosts do not share {place}, where checkpoints are to be saved" in told
    assert "what host-a (rank 0) writes there, host-b (rank 1) can't see" in told
    assert "a file system that all hosts mount at the same path" in told
