"""Numbered optimizer state gets the right names, or is refused with what to type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from damaged_folders import import_refused
from fsdp_core.checkpoint import load
from fsdp_core.checkpoint.importing import import_checkpoint
from fsdp_core.errors import CheckpointMismatchError


class Net(nn.Module):
    """Parameters of the same shapes, buffers between them, one tied, one frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.norm(self.second(self.first(self.embed(x)))))
        return y


def trained(optimizer: torch.optim.Optimizer, net: nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        net(torch.randint(6, (5,), generator=generator)).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def saved(path: Path, net: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    """A file as the Trainer writes it, after some steps."""
    for optimizer in optimizers:
        trained(optimizer, net)
    state = {"state_dict": net.state_dict(), "optimizer_states": [o.state_dict() for o in optimizers]}
    torch.save({"pytorch-lightning_version": "2.6.0", "epoch": 1, "loops": {}, **state}, path)


def assert_state_is_right(folder: Path, net: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    """Every parameter's state is under its own name."""
    names = {parameter: name for name, parameter in net.named_parameters()}
    for optimizer, got in zip(optimizers, load(folder)["optimizer"], strict=True):
        assert set(got["state"]) == {names[parameter] for parameter in optimizer.state}
        for parameter, values in optimizer.state.items():
            for key, value in values.items():
                assert torch.equal(got["state"][names[parameter]][key].full(), value), (names[parameter], key)
        groups = [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
        assert [group["params"] for group in got["param_groups"]] == groups


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adafactor, torch.optim.RMSprop])
def test_all_parameters_in_their_order(tmp_path: Path, kind: Any) -> None:
    net = Net()
    optimizer = kind(net.parameters())
    saved(tmp_path / "old.ckpt", net, optimizer)
    imported = import_checkpoint(tmp_path / "old.ckpt", tmp_path / "new")
    assert_state_is_right(tmp_path / "new", net, optimizer)
    (note,) = imported.notes
    assert note.startswith("Optimizer 0 numbers its 7 parameters: they were assumed to be in the model's order")


def test_names_in_the_file(tmp_path: Path) -> None:
    net = Net()
    named = [(name, parameter) for name, parameter in reversed(list(net.named_parameters()))]
    optimizer = torch.optim.AdamW([{"params": named[:2], "lr": 0.1}, {"params": named[2:]}])
    saved(tmp_path / "old.ckpt", net, optimizer)
    imported = import_checkpoint(tmp_path / "old.ckpt", tmp_path / "new")
    assert_state_is_right(tmp_path / "new", net, optimizer)
    assert imported.notes == []


def test_frozen_parameters_that_shapes_tell_apart(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Embedding(6, 5), nn.Linear(5, 4), nn.Linear(4, 2))
    net[1].requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad])
    saved(tmp_path / "old.ckpt", net, optimizer)
    import_checkpoint(tmp_path / "old.ckpt", tmp_path / "new")
    assert_state_is_right(tmp_path / "new", net, optimizer)


def groups_by_decay(net: nn.Module) -> list[dict[str, Any]]:
    split = [[p for p in net.parameters() if (p.ndim > 1) == matrices] for matrices in (True, False)]
    return [{"params": split[0]}, {"params": split[1], "weight_decay": 0.0}]


UNCERTAIN = {
    "groups": (lambda net: [torch.optim.AdamW(groups_by_decay(net))], "has 2 param groups of numbered parameters"),
    "part": (
        lambda net: [torch.optim.AdamW(net.second.parameters())],
        "numbered parameters, the model has 7, and more",
    ),
    "unlike": (lambda net: [torch.optim.AdamW(reversed(list(net.parameters())))], "shapes don't match the model's"),
    "several": (
        lambda net: [torch.optim.AdamW(net.first.parameters()), torch.optim.SGD(net.second.parameters(), 0.1)],
        "optimizer 0 has 2 numbered parameters, the model has 7",
    ),
}


@pytest.mark.parametrize("which", UNCERTAIN)
def test_what_is_not_certain_is_refused(tmp_path: Path, which: str) -> None:
    make, says = UNCERTAIN[which]
    net = Net()
    optimizers = make(net)
    saved(tmp_path / "old.ckpt", net, *optimizers)
    with pytest.raises(CheckpointMismatchError, match=f"(?s){says}.*--parameter-order order.txt.*--weights-only"):
        import_checkpoint(tmp_path / "old.ckpt", tmp_path / "new")
    assert not (tmp_path / "new").exists()
    names = {parameter: name for name, parameter in net.named_parameters()}
    order = [names[p] for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    import_checkpoint(tmp_path / "old.ckpt", tmp_path / "new", parameter_order=order)
    assert_state_is_right(tmp_path / "new", net, *optimizers)
    import_checkpoint(tmp_path / "old.ckpt", tmp_path / "weights", weights_only=True)
    assert "optimizer" not in load(tmp_path / "weights")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda order: order[:-1], "has 7 parameters, and --parameter-order gives 6"),
        (lambda order: [*order, "x"], "gives 8 names, and the optimizers have 7"),
        (lambda order: ["x", *order[1:]], "names 'x', which the model does not have"),
        (lambda order: [order[0], *order[2:], order[1]], "where optimizer 0 holds state of another shape"),
        (lambda order: [order[0], *order[:-1]], "gives 6 different names"),
    ],
    ids=["short", "long", "unknown", "moved", "twice"],
)
def test_an_order_that_is_not_the_optimizers(tmp_path: Path, change: Any, says: str) -> None:
    net = Net()
    saved(tmp_path / "old.ckpt", net, torch.optim.AdamW(net.parameters()))
    order = change([name for name, _ in net.named_parameters()])
    import_refused(tmp_path / "old.ckpt", says, CheckpointMismatchError, parameter_order=order)


def test_an_optimizer_of_one_of_several_models(tmp_path: Path) -> None:
    nets = nn.Linear(3, 2), nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(nets[1].parameters())
    state = {"a": nets[0].state_dict(), "b": nets[1].state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, tmp_path / "old.pt")
    import_refused(tmp_path / "old.pt", r"(?s)there are 2 models: a, b.*--drop KEY", CheckpointMismatchError)
    import_checkpoint(tmp_path / "old.pt", tmp_path / "new", drop=["a"])
    assert load(tmp_path / "new")["optimizer"]["param_groups"][0]["params"] == ["weight", "bias"]
