"""All of timm's and pytorch_optimizer's that docs/optimizers.md names: right and resumed on one rank, or refused.

``nox -s integration -- tests-integration/slow_optimizers.py`` runs it. test_optimizers_of_others.py runs a part.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from fsdp_core import full_state_dict
from fsdp_core.errors import OptimizerMismatchError
from fsdp_core.testing import RankPool, oracle
from fsdp_core.testing.oracle import FP32_TOLERANCE
from fsdp_core.testing.training import new_fabric, whole_batches
from test_optimizers_of_others import (
    MUON_TOLERANCE,
    STRATEGIES,
    new_small,
    of_pytorch_optimizer,
    of_timm,
    ranks,
    right_without_scalars,
    see_others,
    steps,
)

__all__ = ["ranks"]

NAMED = {**of_timm(), **of_pytorch_optimizer()}

#: Whose steps are those of one process only within what a last bit of a gradient makes of them there.
SENSITIVE = {"pytorch_optimizer SOAP": 1e-3, "pytorch_optimizer Kate": 1e-2}

BEFORE, AFTER = 6, 2


#: What fails in one process where a parameter is 0-dim.
NEVER_SCALARS = "pytorch_optimizer TRAC"

#: By which parameters there are besides matrices and vectors, whether each optimizer is right under a strategy.
CASES = {
    **{(name, True): one[1] for name, one in NAMED.items() if name != NEVER_SCALARS},
    **{(name, False): (True, NAMED[name][1][1]) for name in right_without_scalars()},
    (NEVER_SCALARS, False): NAMED[NEVER_SCALARS][1],
}


def plain(name: str, has_scalar: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """In one process: what the parameters are after the first steps, and after all."""
    see_others()
    net, batches = new_small(has_scalar), oracle.global_batches(BEFORE + AFTER)
    optimizer = NAMED[name][0](list(net.parameters()))
    seen = []
    for some in (batches[:BEFORE], batches[BEFORE:]):
        steps(net, optimizer, some, lambda loss: loss.backward())
        seen.append({key: value.clone() for key, value in net.state_dict().items()})
    return seen[0], seen[1]


def sharded(name: str, has_scalar: bool, strategy: str, world_size: int, folder: str) -> dict[str, Tensor] | str:
    """On a rank: the first steps and a checkpoint on two, or the refusal; from there on one."""
    see_others()
    fabric, net = new_fabric(strategy, world_size), new_small(has_scalar)
    try:
        model, optimizer = fabric.setup(net, NAMED[name][0](list(net.parameters())))
    except OptimizerMismatchError as refused:
        return str(refused)
    batches = whole_batches(fabric, BEFORE + AFTER)
    state = {"model": model, "optimizer": optimizer}
    if world_size == 1:
        fabric.load(folder, state)
    steps(model, optimizer, batches[BEFORE:] if world_size == 1 else batches[:BEFORE], fabric.backward)
    if world_size > 1:
        fabric.save(folder, state)
    return full_state_dict(model)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("name", "has_scalar"), CASES)
def test_each_is_right_and_resumed_or_refused(
    ranks: RankPool, tmp_path: Path, name: str, has_scalar: bool, strategy: str
) -> None:
    limit, folder = 60.0, str(tmp_path / "checkpoint")
    got, _ = ranks.run(2, sharded, name, has_scalar, strategy, 2, folder, timeout=limit)
    is_right = CASES[name, has_scalar][STRATEGIES.index(strategy)]
    assert isinstance(got, str) != is_right, got
    if not is_right:
        return
    ((after_six, after_all),) = ranks.run(1, plain, name, has_scalar, timeout=limit)
    (resumed,) = ranks.run(1, sharded, name, has_scalar, strategy, 1, folder, timeout=limit)
    tolerance = MUON_TOLERANCE if "muon" in name.lower() else SENSITIVE.get(name, FP32_TOLERANCE)
    torch.testing.assert_close(got, after_six, atol=tolerance, rtol=0)
    torch.testing.assert_close(resumed, after_all, atol=tolerance, rtol=0)
