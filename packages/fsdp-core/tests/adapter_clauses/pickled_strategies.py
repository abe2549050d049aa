"""Fabric strategies that are pickled or copied, as tools do that start a run elsewhere."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from lightning.fabric import Fabric

from fsdp_core.errors import ShardingError
from fsdp_core.testing import Ranks, oracle
from fsdp_core.testing.refusals import assert_says, refusal
from fsdp_core.testing.suite.base_class import Clauses
from fsdp_core.testing.training import accelerator, fabric_fit, means, own_share, strategy_argument

__all__ = ["PickledStrategiesSuite"]


def _pickled(strategy: Any) -> Any:
    return pickle.loads(pickle.dumps(strategy))


def _train_restored(strategy: str, restore: Callable[[Any], Any]) -> tuple[list[float], str]:
    """The losses under a restored strategy, and the refusal to pickle it once it has sharded a module."""
    restored = restore(strategy_argument(strategy, "fabric", {"state_dict_type": "full"}))
    assert restored.state_dict_type == "full"
    fabric = Fabric(accelerator=accelerator(), devices=2, strategy=restored)
    connected = restore(fabric.strategy)
    assert connected.parallel_devices == fabric.strategy.parallel_devices
    assert connected.root_device == fabric.strategy.root_device
    fabric.launch()
    net = oracle.new_net()
    model, optimizer = fabric.setup(net, oracle.sgd(net))
    losses = []
    for batch in oracle.global_batches(2):
        x, y = own_share(fabric, batch)
        loss = (model(x) - y).square().mean()
        losses.append(loss.detach())
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return means(losses), refusal(ShardingError, lambda: pickle.dumps(fabric.strategy))


class PickledStrategiesSuite(Clauses):
    """A Fabric strategy can be pickled and copied, as Lightning's own, until it has sharded a module."""

    @pytest.mark.parametrize("restore", [_pickled, copy.deepcopy], ids=["pickled", "copied"])
    def test_a_restored_strategy_trains(self, ranks: Ranks, restore: Callable[[Any], Any]) -> None:
        """Losses under a pickled or copied strategy must be those under the strategy itself."""
        expected = ranks.run(2, fabric_fit, self.strategy, 2, 2)
        outcomes = ranks.run(2, _train_restored, self.strategy, restore)
        for (losses, message), (expected_losses, _) in zip(outcomes, expected, strict=True):
            assert losses == pytest.approx(expected_losses, abs=oracle.FP32_TOLERANCE)
            assert_says(message, f"strategy={self.strategy!r} can't be pickled", "before fabric.setup()")
