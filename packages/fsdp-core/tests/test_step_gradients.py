"""What may be computed of a rank's piece of a gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fsdp_core.errors import UnsupportedCapabilityError
from fsdp_core.gradients.step_gradients import guard


def _piece() -> Tensor:
    gradient = torch.tensor([1.0, -2.0, 3.0])
    guard([gradient])
    return gradient


@pytest.mark.parametrize(
    "look",
    [
        Tensor.norm,
        Tensor.sum,
        Tensor.numpy,
        Tensor.tolist,
        np.asarray,
        lambda g: torch.equal(g, g),
        lambda g: torch.allclose(g, g),
        lambda g: functional.normalize(g, dim=0),
        lambda g: functional.softmax(g, dim=0),
        lambda g: torch.softmax(g, 0),
        lambda g: g.cumsum(0),
        lambda g: g.sort(),
        lambda g: (2 * g).detach().cpu().numpy(),
    ],
)
def test_what_looks_at_more_than_single_elements_is_refused(look: Callable[[Tensor], Any]) -> None:
    with pytest.raises(UnsupportedCapabilityError, match="piece of it alone"):
        look(_piece())


@pytest.mark.parametrize("change", [lambda g: g * 0.5, lambda g: g.clamp(-1, 1), lambda g: g.abs(), torch.isnan])
def test_what_is_elementwise_is_computed(change: Callable[[Tensor], Tensor]) -> None:
    want = change(torch.tensor([1.0, -2.0, 3.0]))
    assert change(_piece()).as_subclass(Tensor).tolist() == want.tolist()
