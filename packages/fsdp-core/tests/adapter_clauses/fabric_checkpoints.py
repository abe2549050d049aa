"""What the checkpoints of Fabric hold, and which of it is read."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import mse_loss

from fsdp_core.checkpoint import SavedTensor
from fsdp_core.testing import Ranks, oracle
from fsdp_core.testing.refusals import assert_says
from fsdp_core.testing.state import full_optimizer_state, full_state
from fsdp_core.testing.suite.base_class import Clauses, on_ranks
from fsdp_core.testing.training import Lit, loader, new_fabric, new_trainer, whole_batches

__all__ = ["FabricFilesSuite"]


def _apart(strategy: str, tmp: str) -> tuple[list[str], list[str]]:
    """What a save to a path of each rank's own leaves in the folder, and the warnings of it and of its load."""
    fabric = new_fabric(strategy)
    model = fabric.setup(oracle.new_net())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fabric.save(f"{tmp}/of rank {fabric.global_rank}", {"model": model})
        fabric.load(f"{tmp}/of rank {fabric.global_rank}", {"model": model})
        fabric.barrier()
    return sorted(os.listdir(tmp)), [str(one.message) for one in caught]


def _filtered(strategy: str, tmp: str) -> tuple[list[str], list[str]]:
    fabric = new_fabric(strategy)
    net = oracle.new_net()
    names = [n for n in net.state_dict() if "norm" in n]
    model = fabric.setup(net)
    fabric.save(f"{tmp}/some", {"model": model}, filter={"model": lambda name, _: "norm" in name})
    everything = fabric.load(f"{tmp}/some")
    fabric.load(f"{tmp}/some", {"model": model}, strict=False)
    return sorted(everything["model"]), sorted(names)


def _trainer_to_fabric(strategy: str, tmp: str) -> None:
    run = new_trainer(tmp, strategy, 2)
    run.fit(Lit("sgd"), loader(1, 2))
    run.save_checkpoint(f"{tmp}/trained")
    want = full_state(run.strategy)
    fabric = new_fabric(strategy)
    other = Lit("sgd")
    torch.nn.init.zeros_(other.net.frozen.weight)
    torch.nn.init.zeros_(other.net.scale)
    model = fabric.setup(other)
    fabric.load(f"{tmp}/trained", {"model": model})
    got = full_state(fabric.strategy)
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in want.items())


def _partly(strategy: str, tmp: str) -> None:
    fabric = new_fabric(strategy)
    net = oracle.new_net()
    model, optimizer = fabric.setup(net, oracle.adamw_groups(net))
    x, y = whole_batches(fabric, 1)[0]
    fabric.backward(mse_loss(model(x), y))
    optimizer.step()
    fabric.save(f"{tmp}/all", {"model": model, "optimizer": optimizer})
    used: Any = fabric.strategy
    want = full_optimizer_state(used, optimizer)
    rest = fabric.load(f"{tmp}/all", {"model": model})
    assert list(rest) == ["optimizer"]
    for name, entries in want.items():
        for key, tensor in entries.items():
            left = rest["optimizer"]["state"][name][key]
            assert isinstance(left, SavedTensor)
            assert torch.equal(left.full(), tensor)


class FabricFilesSuite(Clauses):
    """Which files are written and read where arguments of Fabric say so."""

    @on_ranks("processes", "threads")  # one controller has one path
    def test_ranks_that_name_different_paths(self, ranks: Ranks, tmp_path: Path) -> None:
        """A checkpoint for which ranks name different paths must be whole at rank 0's, and warnings must say so."""
        got = ranks.run(2, _apart, self.strategy, str(tmp_path))
        told = "\n".join(message for _, caught in got for message in caught)
        assert [names for names, _ in got] == [["of rank 0"]] * len(got)
        if len(got) > 1:
            assert_says(told, "rank 1 was told to save to", "of rank 1", "Give all ranks the same path")
            assert_says(told, "rank 1 was told to load")

    def test_fabric_filter(self, ranks: Ranks, tmp_path: Path) -> None:
        """``fabric.save(filter=...)`` must save the matching weights only."""
        for saved, expected in ranks.run(2, _filtered, self.strategy, str(tmp_path)):
            assert saved == expected

    def test_fabric_leaves_an_optimizer_that_nobody_asked_for_in_its_files(self, ranks: Ranks, tmp_path: Path) -> None:
        """``fabric.load`` without the optimizer must return its state as ``SavedTensor``, without reading it."""
        ranks.run(2, _partly, self.strategy, str(tmp_path))

    def test_fabric_reads_the_trainers_folder(self, ranks: Ranks, tmp_path: Path) -> None:
        """``fabric.load`` must restore the weights of the Trainer's sharded checkpoint bit for bit."""
        ranks.run(2, _trainer_to_fabric, self.strategy, str(tmp_path))
