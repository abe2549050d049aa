"""Trains the modules of by_hand.py, for test_by_hand.py to compare."""

from __future__ import annotations

import sys
from typing import Any

import torch

import by_hand
from fsdp_core.testing.training import loader
from spmd_runs import new_trainer, whole_state


def trained(tmp: str, kind: str) -> dict[str, Any]:
    module = getattr(by_hand, kind)()
    trainer = new_trainer(tmp)
    trainer.fit(module, loader(4, 1))
    return {"losses": [loss.item() for loss in module.losses], "weights": whole_state(trainer.strategy, module)}


if __name__ == "__main__":
    out, folder = sys.argv[1:]
    torch.save({kind: trained(folder, kind) for kind in by_hand.__all__}, out)
