"""Ray Train, on a cluster of two nodes of this machine: placement, losses, a worker that is killed, messages."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import ray.train
from ray.cluster_utils import Cluster
from ray.train.lightning import RayTrainReportCallback
from ray.train.torch import TorchTrainer
from undisturbed import AFTERWARDS, losses_of_one_process

from fsdp_core.checkpoint import read_manifest, verify
from fsdp_core.testing.oracle import FP32_TOLERANCE

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "docs" / "examples"
#: The steps of an epoch, and those after which the worker dies: the checkpoint is of the first epoch.
EPOCH, DIES = 4, 6
STRATEGIES = ("fsdp2", "fsdp_native")


def _ports() -> dict[str, int]:
    """Free ports for a node's agents. If Ray chose them, a node would give up on agents that start slowly."""
    names = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port", "runtime_env_agent_port")
    sockets = [socket.socket() for _ in names]
    for one in sockets:
        one.bind(("", 0))
    ports = {name: int(one.getsockname()[1]) for name, one in zip(names, sockets, strict=True)}
    for one in sockets:
        one.close()
    return ports


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Two nodes with one CPU each."""
    node = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
    # whatever Python's path is here, the workers import what the tests do
    environment = {"PYTHONPATH": os.pathsep.join([str(HERE), str(EXAMPLES)]), "OMP_NUM_THREADS": "1"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_agent_register_timeout_ms", "120000")
        patch.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "300")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")  # a process of its own, which imports torch
        patch.syspath_prepend(str(EXAMPLES))
        made = Cluster(initialize_head=True, head_node_args={**node, **_ports(), "include_dashboard": False})
        try:
            made.add_node(**node, **_ports(), node_ip_address="127.0.0.2")  # Ray tells nodes apart by their addresses
            ray.init(address=made.address, runtime_env={"env_vars": environment}, log_to_driver=False)
            yield
        finally:
            ray.shutdown()
            made.shutdown()


@pytest.fixture(scope="module")
def ended(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ray.train.Result]:
    """A run whose second worker is killed in the second epoch: what the workers wrote, and what came out.

    It takes turns with the strategies: workers take seconds to start.
    """
    import ray_workers

    folder = tmp_path_factory.mktemp("ray")
    trainer = TorchTrainer(
        ray_workers.everything,
        train_loop_config={"strategies": STRATEGIES, "folder": str(folder)},
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(
            name="run", storage_path=str(folder / "storage"), failure_config=ray.train.FailureConfig(max_failures=1)
        ),
    )
    return folder, trainer.fit()


def _told(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / "attempt-0" / f"told-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_are_where_ray_put_them(ended: tuple[Path, ray.train.Result], strategy: str) -> None:
    told = _told(ended[0])
    assert [one[strategy]["ours"] for one in told] == [one["rays"] for one in told]
    assert {one["rays"]["node_rank"] for one in told} == {0, 1}, "the workers are not on two nodes"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_fabric_trains_as_one_process(ended: tuple[Path, ray.train.Result], strategy: str) -> None:
    want = [loss for step, loss in losses_of_one_process(epochs=1).items() if step != AFTERWARDS]
    for one in _told(ended[0]):
        assert one[strategy]["fabric"] == pytest.approx(want, abs=FP32_TOLERANCE)


def test_a_killed_worker_costs_what_was_not_reported(ended: tuple[Path, ray.train.Result]) -> None:
    folder, result = ended
    want = losses_of_one_process(epochs=3)
    attempts = [range(1, DIES + 1), range(EPOCH + 1, 3 * EPOCH + 1)]
    for attempt, rank in [(0, 0), (0, 1), (1, 0), (1, 1)]:
        lines = (folder / f"attempt-{attempt}" / f"losses-{rank}.jsonl").read_text().splitlines()
        losses = {one["step"]: one["loss"] for one in map(json.loads, lines)}
        assert list(losses) == list(attempts[attempt]), f"attempt {attempt}, rank {rank}"
        for step, loss in losses.items():
            assert loss == pytest.approx(want[step], abs=FP32_TOLERANCE), f"attempt {attempt}, rank {rank}, step {step}"
    assert result.metrics["loss"] == pytest.approx(want[3 * EPOCH], abs=FP32_TOLERANCE)


def test_the_reported_checkpoint_is_whole(ended: tuple[Path, ray.train.Result]) -> None:
    checkpoint = ended[1].checkpoint
    assert checkpoint is not None
    with checkpoint.as_directory() as folder:
        path = Path(folder) / RayTrainReportCallback.CHECKPOINT_NAME
        verify(path)
        manifest = read_manifest(path)
        assert manifest.world_size == 2
        assert len(manifest.places) == 2, "the workers, whose directories differ, have saved to one of them"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_contradicts_ray_is_told(ended: tuple[Path, ray.train.Result], strategy: str) -> None:
    for one in _told(ended[0]):
        errors = one[strategy]["errors"]
        assert errors["devices"].startswith("UnsupportedCapabilityError: devices=3 contradicts Ray Train")
        assert "Write devices='auto'" in errors["devices"]
        assert "one of 2 workers, and LightningEnvironment does not know the others" in errors["environment"]
        assert "plugins=[RayLightningEnvironment()]" in errors["environment"]
        assert errors["num_nodes"].startswith("UnsupportedCapabilityError: num_nodes=3 contradicts Ray Train, whose 2")
        assert "Leave num_nodes out" in errors["num_nodes"]
        assert "RayTrainReportCallback can't be used with async_save=True of 'fsdp" in errors["in the background"]
