"""What hosts must agree on before a run begins: packages, a folder for checkpoints, and how many ranks there are."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import Any

import pytest
from lightning.fabric.plugins.environments import LightningEnvironment, SLURMEnvironment, TorchElasticEnvironment

from checkpoint_ranks import ThreadRuntime, on_threads
from fsdp_core.checkpoint.shared_folder import check_shared
from fsdp_core.errors import CheckpointError, ShardingError
from fsdp_core.lightning.checkpoints.shared_disk import check_all_resume
from fsdp_core.lightning.launchers.launch_checks import check_launched, facts_of_visibility
from fsdp_core.sharding.agreement import same_packages
from fsdp_core.sharding.agreement.same_model import check_same
from fsdp_core.sharding.agreement.same_packages import check_same_packages, versions_of
from fsdp_core.testing.loopback.backend import LoopbackBackend
from fsdp_core.testing.refusals import refusal


def test_versions_that_differ_are_named_with_their_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(runtime: ThreadRuntime) -> Any:
        check_same_packages(runtime, {"torch": "2.13.0", "fsdp_core": "0.1.0"})
        newer = {"torch": "2.13.0" if runtime.rank < 2 else "2.12.1", "fsdp_core": "0.1.0"}
        own = {**newer, "fsdp_fsdp2": "0.2.0"} if runtime.rank == 1 else newer
        return refusal(ShardingError, lambda: check_same_packages(runtime, own))

    monkeypatch.setattr(same_packages.socket, "gethostname", lambda: "host-a")
    (told,) = set(on_threads(4, work))
    assert "torch: 2.13.0 on host-a (rank 0, 1); 2.12.1 on host-a (rank 2, 3)" in told
    assert "fsdp_fsdp2: not installed on host-a (rank 0, 2, 3); 0.2.0 on host-a (rank 1)" in told
    assert told.endswith("Install the same on every host, such as: pip install torch==2.13.0")


def test_versions_of_what_is_in_use() -> None:
    found = versions_of(LoopbackBackend, TorchElasticEnvironment)
    assert {"torch", "fsdp_core", "lightning"} <= found.keys()
    assert not {"abc", "builtins"} & found.keys()


def test_a_shared_folder_is_looked_at_once_and_left_empty(tmp_path: Path) -> None:
    class Counting(ThreadRuntime):
        calls = 0

        def gather_objects(self, obj: Any) -> list[Any]:
            self.calls += 1
            return super().gather_objects(obj)

    def work(runtime: Counting) -> list[int]:
        calls = []
        for _ in range(2):
            before = runtime.calls
            check_shared(tmp_path / "new/folder", runtime)
            calls.append(runtime.calls - before)
        return calls

    assert on_threads(3, work, Counting) == [[4, 2]] * 3  # the second time, rank 0 says that it knows the place
    assert list((tmp_path / "new/folder").iterdir()) == []


@pytest.mark.skipif(os.name == "nt", reason="no such permissions")
def test_a_folder_that_cant_be_written_to_is_told_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    def work(runtime: ThreadRuntime) -> str:
        return refusal(CheckpointError, lambda: check_shared(tmp_path / "file/folder", runtime))

    (told,) = set(on_threads(2, work))
    assert "A file exists where a folder must be" in told
    assert stat.S_ISREG((tmp_path / "file").stat().st_mode)


def test_a_checkpoint_that_only_one_host_finds() -> None:
    def work(runtime: ThreadRuntime) -> str:
        check_all_resume(None, runtime)
        check_all_resume(f"/data/{runtime.rank}", runtime)  # rank 0's is taken
        with pytest.raises(CheckpointError) as told:
            check_all_resume(None if runtime.rank == 1 else "/data/last.ckpt", runtime)
        return str(told.value)

    (told,) = set(on_threads(3, work))
    assert re.match(r"rank 0 on \S+ has found /data/last.ckpt to go on from, and rank 1 on \S+ finds no", told)


def test_ranks_of_a_host_compare_which_devices_they_see(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES", raising=False)
    assert facts_of_visibility("cpu") == {}
    assert facts_of_visibility("npu") == {"environment variable ASCEND_RT_VISIBLE_DEVICES": "not set"}

    facts = []
    for visible in ("0,1", "1,0"):
        monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", visible)
        facts.append(facts_of_visibility("npu"))
    messages = on_threads(
        2, lambda runtime: refusal(ShardingError, lambda: check_same(runtime, "Net", facts[runtime.rank]))
    )
    for message in messages:
        assert "its environment variable ASCEND_RT_VISIBLE_DEVICES is 1,0, and rank 0's is 0,1." in message


def torchrun(ranks: int, on_each: int, hosts: int | None = None) -> tuple[Any, dict[str, Any]]:
    """Rank 0's environment under torchrun, which older versions don't tell the number of hosts."""
    told = {} if hosts is None else {"GROUP_WORLD_SIZE": hosts}
    numbers = {"RANK": 0, "LOCAL_RANK": 0, "GROUP_RANK": 0, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": on_each}
    return TorchElasticEnvironment, numbers | told


def slurm(ranks: int, on_each: int, hosts: int | None = None) -> tuple[Any, dict[str, Any]]:
    told = {} if hosts is None else {"SLURM_NNODES": hosts}
    numbers = {"SLURM_PROCID": 0, "SLURM_LOCALID": 0, "SLURM_NODEID": 0}
    return SLURMEnvironment, numbers | {"SLURM_NTASKS": ranks, "SLURM_NTASKS_PER_NODE": on_each} | told


@pytest.mark.parametrize(
    ("started", "devices", "hosts", "told"),
    [
        (torchrun(4, 2), 2, 2, None),
        (
            torchrun(4, 2, 2),
            2,
            1,
            "devices=2 and num_nodes=1 ask for 2 ranks, 2 on each host, and torchrun has started 4 ranks, 2 on each "
            "of 2 hosts.\nWrite devices=2, num_nodes=2 (in a script for any number: "
            'devices=int(os.environ["LOCAL_WORLD_SIZE"]), num_nodes=int(os.environ["GROUP_WORLD_SIZE"])); or',
        ),
        (
            torchrun(2, 2, 1),
            2,
            2,
            "ask for 4 ranks, 2 on each host, and torchrun has started 2 ranks, 2 on each of 1 host.\n"
            "Write devices=2, num_nodes=1 ",
        ),
        (torchrun(2, 1, 2), 2, 1, "Write devices=1, num_nodes=2 "),  # the product is right
        (slurm(8, 4, 2), 4, 1, "SLURM has started 8 ranks, 4 on each of 2 hosts.\nWrite devices=4, num_nodes=2 "),
        (slurm(8, 4), 4, 2, None),
        ((LightningEnvironment, {"LOCAL_RANK": 1, "WORLD_SIZE": 4}), 2, 1, None),
    ],
)
def test_numbers_that_the_launcher_contradicts(
    monkeypatch: pytest.MonkeyPatch, started: tuple[Any, dict[str, Any]], devices: int, hosts: int, told: str | None
) -> None:
    environment, variables = started
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "SLURM_NNODES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    if told is None:
        check_launched(environment(), devices, hosts)
    else:
        error = refusal(ShardingError, lambda: check_launched(environment(), devices, hosts))
        assert told in error
