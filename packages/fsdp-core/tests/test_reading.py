"""What loading a checkpoint asks of the ranks, under both front ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.fabric import Fabric

from fsdp_core import checkpoint
from fsdp_core.testing import RankPool, oracle
from fsdp_core.testing.loopback.fabric import LoopbackFabricStrategy
from fsdp_core.testing.loopback.trainer import LoopbackTrainerStrategy
from fsdp_core.testing.training import Lit, loader
from quiet_trainer import quiet_trainer

CPU: dict[str, Any] = {"accelerator": "cpu", "devices": 1}


def under_trainer(path: str) -> None:
    for epochs, resumed in ((1, None), (2, path)):
        trainer = quiet_trainer(strategy=LoopbackTrainerStrategy(), max_epochs=epochs, enable_checkpointing=False)
        trainer.fit(Lit("sgd"), loader(1, 1), ckpt_path=resumed)
        trainer.save_checkpoint(path)


def under_fabric(path: str) -> None:
    fabric = Fabric(strategy=LoopbackFabricStrategy(), **CPU)
    fabric.launch()
    net = oracle.new_net()
    model, optimizer = fabric.setup(net, oracle.sgd(net))
    fabric.save(path, {"model": model, "optimizer": optimizer})
    fabric.load(path, {"model": model, "optimizer": optimizer})


def looked_for(front_end: str, path: str) -> list[str]:
    """The paths of which it was asked whether a folder lies there."""
    asked: list[str] = []
    is_folder = checkpoint.is_folder

    def noted(where: Any) -> bool:
        asked.append(str(where))
        return is_folder(where)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "is_folder", noted)
        {"trainer": under_trainer, "fabric": under_fabric}[front_end](path)
    return asked


@pytest.mark.parametrize("front_end", ["trainer", "fabric"])
def test_a_load_looks_once_for_what_lies_there(tmp_path: Path, front_end: str) -> None:
    """All ranks must come to each look."""
    path = str(tmp_path / "run.ckpt")
    with RankPool() as ranks:
        assert ranks.run(1, looked_for, front_end, path, timeout=100) == [[path]]
