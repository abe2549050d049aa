"""What may be computed of a rank's piece of a gradient."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fsdp_core.errors import ShardingError, UnsupportedCapabilityError
from fsdp_core.gradients.gathered_values import RESHAPED_IN_PLACE, GatheredValue
from fsdp_core.gradients.piece_places import PiecePlace, place_piece
from fsdp_core.gradients.step_gradients import ParameterPiece, Piece, guard, guard_parameters


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
        lambda g: g.cumprod_(0),
        lambda g: torch.flipud(g),
        lambda g: functional.layer_norm(g, (3,)),
        lambda g: torch.special.softmax(g, 0),
        lambda g: g.max(0, keepdim=True),
        lambda g: g.as_subclass(Tensor).clone().copy_(g).sum(),
        lambda g: torch.add(g, 1.0, out=torch.empty(3)).sum(),
        lambda g: g[g > -5],
        lambda g: g.T,
        Tensor.unbind,
        lambda g: (2 * g).detach().cpu().numpy(),
    ],
)
def test_what_looks_at_more_than_single_elements_is_refused(look: Callable[[Tensor], Any]) -> None:
    with pytest.raises(UnsupportedCapabilityError, match="piece of it alone"):
        look(_piece())


@pytest.mark.parametrize(
    "change",
    [
        lambda g: g * 0.5,
        lambda g: g.clamp(-1, 1),
        lambda g: g.abs(),
        lambda g: 1 - g,
        lambda g: torch.max(g, torch.zeros(3)),
        lambda g: torch.where(g > 0, g, 0.0),
        lambda g: torch._foreach_add([g], 2.0)[0],
        lambda g: torch.zeros(3).lerp_(g, 0.5),
        lambda g: functional.gelu(g),
        torch.isnan,
    ],
)
def test_what_is_elementwise_is_computed(change: Callable[[Tensor], Tensor]) -> None:
    want = change(torch.tensor([1.0, -2.0, 3.0]))
    assert change(_piece()).as_subclass(Tensor).tolist() == want.tolist()


@pytest.mark.parametrize("of", [Piece, ParameterPiece])
def test_pieces_are_copied_and_saved(of: type[Piece]) -> None:
    piece = torch.tensor([1.0, -2.0, 3.0])
    guard([piece], of)
    copied = copy.deepcopy({"a": piece, "b": piece})
    assert copied["a"] is copied["b"]
    with pytest.raises(UnsupportedCapabilityError, match="piece of it alone"):
        copied["a"].norm()
    file = io.BytesIO()
    torch.save({"a": piece, "b": piece * 2}, file)
    file.seek(0)
    saved = torch.load(file)
    assert [type(tensor) for tensor in saved.values()] == [Tensor, Tensor]
    assert saved["b"].tolist() == [2.0, -4.0, 6.0]


@pytest.mark.parametrize("name", sorted(RESHAPED_IN_PLACE))
@pytest.mark.parametrize("of", [nn.Parameter, torch.Tensor])
def test_methods_that_reshape_a_gathered_parameter_in_place_are_refused(name: str, of: type[torch.Tensor]) -> None:
    weight, value = of(torch.ones(2, 3)), GatheredValue("weight")
    value.follow(weight)
    with pytest.raises(ShardingError, match=rf"{name}\(\) of 'weight' while it is gathered .*\n.*parameter.t\(\)"):
        getattr(weight, name)()
    assert weight.shape == (2, 3)


@pytest.mark.parametrize("name", ["t_", "squeeze_"])
def test_such_methods_of_pieces_are_refused(name: str) -> None:
    piece = nn.Parameter(torch.ones(3), requires_grad=False)
    guard_parameters([piece])
    with pytest.raises(UnsupportedCapabilityError, match=f"{name} of a parameter would see this rank's piece"):
        getattr(piece, name)()


def _placed(name: str, layout: int) -> nn.Parameter:
    piece = nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
    place_piece(piece, PiecePlace(name, layout))
    piece.grad = torch.ones(3)
    guard_parameters([piece])
    guard([piece.grad])
    return piece


@torch.no_grad()
def test_pieces_that_hold_other_elements_are_not_computed_together() -> None:
    a, b, alike = _placed("a", 1), _placed("b", 2), _placed("alike", 1)
    for mix in (
        lambda: a.add_(b),
        lambda: a.clone() * (2 * b),
        lambda: torch.lerp(input=a, end=b, weight=0.5),
        lambda: a.sub_(b.grad),
        lambda: torch._foreach_add_([a.data, b.data], [a.grad, a.grad]),
    ):
        with pytest.raises(UnsupportedCapabilityError, match=r"of '[ab]' and '[ab]' would .* different elements"):
            mix()
    assert a.as_subclass(Tensor).tolist() == [1.0, -2.0, 3.0]
    a.add_(a.grad).mul_(torch.tensor([2.0])).add_(alike.grad).add_(torch.ones(3)).copy_(a.to(b))
    torch._foreach_add_([a.data, b.data], [alike.grad, b.grad])
    assert a.as_subclass(Tensor).tolist() == [7.0, 1.0, 11.0]
    a.grad = None
    forgotten = torch.ones(3)
    guard([forgotten])  # of which nothing is known
    assert (b * forgotten).as_subclass(Tensor).tolist() == [2.0, -1.0, 4.0]


def test_pieces_on_two_devices_are_refused_in_words() -> None:
    """As with ``cpu_offload``, where shards are on the device while what they belong to is gathered."""
    parameter = nn.Parameter(torch.ones(2))
    place_piece(parameter, PiecePlace("head.weight", "layout"))
    gradient = torch.ones(2, device="meta")
    guard_parameters([parameter])
    guard([gradient])
    with torch.no_grad(), pytest.raises(UnsupportedCapabilityError) as refusal:
        parameter.lerp_(gradient, 0.1)
    assert "lerp_ of 'head.weight' would compute with tensors on cpu and meta" in str(refusal.value)
    assert "parameter.grad.to(parameter.device)" in str(refusal.value)
    assert isinstance(refusal.value.__cause__, RuntimeError)
