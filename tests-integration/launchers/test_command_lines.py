"""Starting without a launcher, and with one that contradicts the script."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from example import SCRIPT, assert_as_one_process, said

from fsdp_core.errors import ShardingError
from fsdp_core.testing.launching.processes import start


def test_a_module_of_a_package(tmp_path: Path) -> None:
    """``python -m package.module``, whose ranks Lightning starts in the same way."""
    package = tmp_path / "training"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "run.py").write_text("from many_machines import main\n\nmain()\n", encoding="utf-8")
    words = ("fsdp2", "--steps=2", "--folder", str(tmp_path / "runs"))
    finds = os.pathsep.join([str(tmp_path), str(SCRIPT.parent)])
    ended = start(tmp_path, "-m", "training.run", *words, PYTHONPATH=finds, LOCAL_WORLD_SIZE="2")
    assert ended.status == 0, ended.output
    lines = said(ended.output, "trainer")
    assert len(lines) == 2 * 2 * 2
    assert_as_one_process(lines, range(2))


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp_native"])
@pytest.mark.parametrize("front_end", [L.Trainer, L.Fabric])
def test_hosts_that_the_launcher_contradicts(monkeypatch: pytest.MonkeyPatch, strategy: str, front_end: Any) -> None:
    """Torchrun has started four ranks on two hosts: said where the object is made, before a rank waits."""
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**ranks, "GROUP_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "run"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ShardingError, match=r"Write devices=2, num_nodes=2 \(in a script for any number"):
        front_end(strategy=strategy, accelerator="cpu", devices=2, num_nodes=1)
    front_end(strategy=strategy, accelerator="cpu", devices=2, num_nodes=2)


def test_the_manifests_are_what_they_should_be() -> None:
    """The two Kubernetes files of the docs are YAML, and set what the tests of torchrun set."""
    yaml = pytest.importorskip("yaml", reason="it comes with Lightning")
    service, job = yaml.safe_load_all((SCRIPT.parent / "pods.yaml").read_text(encoding="utf-8"))
    (container,) = job["spec"]["template"]["spec"]["containers"]
    given = {one["name"]: one["value"] for one in container["env"]}
    assert {"PET_NNODES", "PET_NPROC_PER_NODE", "PET_RDZV_BACKEND", "PET_RDZV_ENDPOINT", "PET_RDZV_ID"} <= given.keys()
    assert given["PET_NNODES"] == str(job["spec"]["completions"]) == str(job["spec"]["parallelism"])
    assert given["PET_RDZV_ENDPOINT"].startswith(f"{job['metadata']['name']}-0.{service['metadata']['name']}:")
    assert service["spec"]["selector"]["job-name"] == job["metadata"]["name"]
    assert all(isinstance(value, str) for value in given.values()), "variables are text"
    assert container["command"][:2] == ["torchrun", SCRIPT.name]
    (train,) = yaml.safe_load_all((SCRIPT.parent / "trainjob.yaml").read_text(encoding="utf-8"))
    assert (train["apiVersion"], train["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert train["spec"]["trainer"]["command"][:2] == ["torchrun", SCRIPT.name]
