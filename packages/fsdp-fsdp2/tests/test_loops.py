"""What users' loops do besides a forward pass, a backward pass and a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.distributed.fsdp import FSDPModule

from fsdp_core.testing import RankPool
from fsdp_core.testing.suite.exceptions import ExceptionsSuite
from fsdp_core.testing.suite.loops import LoopsSuite


class TestLoops(LoopsSuite):
    strategy = "fsdp2"

    @pytest.mark.parametrize("reshard", [None, True, False, 1, 2])
    def test_reshard_after_forward_leaves_the_root_gathered(
        self, ranks: RankPool, tmp_path: Path, reshard: Any
    ) -> None:
        self.assert_root_stays_gathered(ranks, tmp_path, {"reshard_after_forward": reshard})


class TestExceptions(ExceptionsSuite):
    strategy = "fsdp2"
    refused_with = None if hasattr(FSDPModule, "reset_iter_state") else "or upgrade to torch"  # before torch 2.13
