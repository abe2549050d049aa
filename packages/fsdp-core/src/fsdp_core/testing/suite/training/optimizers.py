"""Optimizers built before or after sharding: they train the shards, or are refused."""

from __future__ import annotations

import copy
import inspect
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn
from torch.nn.functional import mse_loss

from fsdp_core.errors import OptimizerMismatchError
from fsdp_core.testing import Ranks, oracle
from fsdp_core.testing.loop import Loop
from fsdp_core.testing.oracle import FP32_TOLERANCE, WIDE, Trained
from fsdp_core.testing.refusals import assert_says, refusal, result_or_refusal, was_refused
from fsdp_core.testing.state import assert_sharded, count_local_elements, full_state, sharded_by, trained_by
from fsdp_core.testing.suite.base_class import Clauses, on_ranks
from fsdp_core.testing.suite.numerics.parity import assert_state_close
from fsdp_core.testing.training import Lit, fit_module, loader, means, new_fabric, new_trainer, whole_batches

__all__ = ["OptimizersSuite", "assert_all_trained", "built_after_evaluation", "built_before_sharding"]


class GroupsInInit(Lit):
    """Builds its param groups before sharding."""

    def __init__(self) -> None:
        super().__init__()
        self.groups = oracle.adamw_groups(self).param_groups

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.groups, lr=0.01, eps=1e-3)


class OptimizerInInit(Lit):
    """Builds its optimizer before sharding."""

    def __init__(self) -> None:
        super().__init__()
        self.optimizer = oracle.adamw_groups(self)

    def configure_optimizers(self) -> Any:
        return self.optimizer


class BuiltFromTrainerModel(Lit):
    """Builds its optimizer over ``self.trainer.model``."""

    def configure_optimizers(self) -> Any:
        assert self.trainer.model is not None
        return oracle.adamw_groups(self.trainer.model)


class ForeignParameter(Lit):
    """Its optimizer holds a parameter of no module."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.parameters(), nn.Parameter(torch.zeros(5))], lr=0.1)


class BuiltFromCopy(Lit):
    """Its optimizer holds the parameters of a copy of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = [copy.deepcopy(self.net)]  # a module in a list is not a submodule

    def configure_optimizers(self) -> Any:
        return oracle.sgd(self.copies[0])


class BuiltFromReplaced(Lit):
    """Its optimizer holds parameters that ``configure_model()`` has replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.replaced_parameters = list(self.parameters())

    def configure_model(self) -> None:
        self.net = oracle.new_net()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.replaced_parameters, lr=0.1)


class WithAdagrad(Lit):
    """Its optimizer creates its state in the constructor."""

    def configure_optimizers(self) -> Any:
        return any_optimizer("Adagrad", self)


#: Every torch optimizer except LBFGS, which computes the loss several times per step.
TORCH_OPTIMIZERS = sorted(
    name
    for name, value in vars(torch.optim).items()
    if inspect.isclass(value) and issubclass(value, torch.optim.Optimizer) and name not in ("Optimizer", "LBFGS")
)


#: Optimizers of torch that compute each element by itself.
ELEMENTWISE = {"Adadelta", "Adagrad", "Adam", "Adamax", "AdamW", "NAdam", "RAdam", "RMSprop", "SGD"}


def any_optimizer(name: str, module: nn.Module) -> torch.optim.Optimizer:
    """A torch optimizer over the parameters that it supports, with a large eps if it has one, like the oracle's."""
    optimizer_class = getattr(torch.optim, name)
    eps = inspect.signature(optimizer_class).parameters.get("eps")
    settings = {"eps": 1e-3} if eps is not None and isinstance(eps.default, float) else {}
    parameters = [p for p in module.parameters() if p.requires_grad and (name != "Muon" or p.ndim == 2)]
    optimizer: torch.optim.Optimizer = optimizer_class(parameters, lr=0.01, **settings)
    return optimizer


def _train_with_each_optimizer(strategy: str, tmp: str) -> dict[str, Trained | str]:
    """The outcome of two steps of each optimizer, or the error."""

    def train(name: str) -> Trained:
        loop = Loop(strategy, partial(any_optimizer, name))
        return loop.train(loop.batches(2))

    outcomes = {name: result_or_refusal(OptimizerMismatchError, partial(train, name)) for name in TORCH_OPTIMIZERS}
    outcomes["Adagrad, Trainer"] = _fit_epochs(strategy, tmp, WithAdagrad, 1)
    return outcomes


def _fit_epochs(strategy: str, tmp: str, module_class: type[Lit], epochs: int) -> Trained:
    """Fit two steps per epoch, with one ``fit`` per epoch; the state has the net's names."""
    module = module_class()
    for _ in range(epochs):
        losses, state = fit_module(strategy, tmp, module, 2)
    return losses, {name.removeprefix("net."): tensor for name, tensor in state.items()}


def _two_steps(fabric: Fabric, model: Any, optimizer: Any) -> Trained:
    losses = []
    for x, y in fabric.setup_dataloaders(loader(2, 2)):
        loss = mse_loss(model(x), y)
        losses.append(loss.detach())
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return means(losses), full_state(fabric.strategy)


def built_before_sharding(strategy: str, joint: bool) -> tuple[Trained, int]:
    """Set up an optimizer over unsharded parameters, together with the model or after it.

    Returns:
        Losses and weights for :func:`assert_all_trained`, and the number of elements in this rank's optimizer.
    """
    fabric = new_fabric(strategy)
    net = oracle.new_net(width=WIDE)
    optimizer: Any = oracle.adamw_groups(net)
    if joint:
        model, optimizer = fabric.setup(net, optimizer)
    else:
        model = fabric.setup_module(net)
        optimizer = fabric.setup_optimizers(optimizer)
    sharded_ids = {id(p) for p in sharded_by(fabric.strategy).layout()}
    assert all(id(p) in sharded_ids for p in trained_by(optimizer))
    elements = count_local_elements(trained_by(optimizer))
    return _two_steps(fabric, model, optimizer), elements


def built_after_evaluation(strategy: str, optimizer: str) -> Trained:
    """Build an optimizer after a forward pass without a backward pass, which may leave parameters unsharded."""
    fabric = new_fabric(strategy)
    model = fabric.setup_module(oracle.new_net())
    with torch.no_grad():
        model(whole_batches(fabric, 1)[0][0])
    return _two_steps(fabric, model, fabric.setup_optimizers(getattr(oracle, optimizer)(model)))


def assert_all_trained(got: Trained, optimizer: str = "adamw_groups", **net: Any) -> None:
    """Assert that losses equal the oracle's, and that every parameter that the oracle trains was trained."""
    losses, state = got
    want_losses, want = oracle.train_plain(2, getattr(oracle, optimizer), net=oracle.new_net(**net))
    assert losses[:2] == pytest.approx(want_losses, abs=FP32_TOLERANCE)
    if len(losses) == 2:
        assert state.keys() == want.keys()
        assert_state_close(state, want)
    start = oracle.new_net(**net).state_dict()
    moved = [name for name in want if not torch.allclose(want[name], start[name], atol=2e-4)]
    assert len(moved) > 15, f"the oracle trains {len(moved)} parameters, too few for this clause: {moved}"
    for name in moved:
        assert not torch.allclose(state[name], start[name], atol=1e-4), f"{name} was not trained"


def _refusals(strategy: str, tmp: str) -> dict[str, list[str]]:
    """The errors for optimizers over other parameters, and for one that has stepped."""

    def refused_by_trainer(module: Lit) -> str:
        message = refusal(OptimizerMismatchError, lambda: new_trainer(tmp, strategy).fit(module, loader(1, 1)))
        assert not module.losses
        return message

    fabric = new_fabric(strategy, 1)
    net = oracle.new_net()
    other = oracle.new_net()
    stepped_net = oracle.new_net()
    stepped_optimizer = oracle.momentum(stepped_net)
    stepped_net(oracle.global_batches(1)[0][0]).sum().backward()
    stepped_optimizer.step()
    weight = stepped_net.inp.weight.detach().clone()
    messages = {
        "foreign": [
            refused_by_trainer(ForeignParameter()),
            refused_by_trainer(BuiltFromCopy()),
            refused_by_trainer(BuiltFromReplaced()),
            refusal(OptimizerMismatchError, lambda: fabric.setup(net, oracle.sgd(other))),
            refusal(OptimizerMismatchError, lambda: fabric.setup_optimizers(oracle.sgd(other))),
        ],
        "stepped": [refusal(OptimizerMismatchError, lambda: fabric.setup(stepped_net, stepped_optimizer))],
    }
    used_strategy: Any = fabric.strategy
    assert torch.equal(full_state(used_strategy, used_strategy.roots[-1])["inp.weight"], weight)
    return messages


def _add_group_and_step(strategy: str) -> tuple[str, dict[str, Any]]:
    """Add a block to an optimizer that is set up, and step it without the strategy: the error, and the weights."""
    loop = Loop(strategy, lambda net: torch.optim.SGD(net.blocks[0].parameters(), lr=0.1))
    torch_optimizer = loop.optimizer.optimizer  # not Fabric's wrapper, which would rebind parameters first
    torch_optimizer.add_param_group({"params": list(loop.net.blocks[1].parameters())})
    ((x, y),) = loop.batches(1)
    loop.backward(loop.loss(x, y))
    return refusal(OptimizerMismatchError, torch_optimizer.step), loop.state()


class OptimizersSuite(Clauses):
    """No optimizer trains parameters that are no longer the model's."""

    @pytest.mark.parametrize(
        ("module_class", "epochs"),
        [(GroupsInInit, 1), (GroupsInInit, 2), (OptimizerInInit, 1), (BuiltFromTrainerModel, 2)],
    )
    def test_parameters_from_before_sharding_are_trained(
        self, ranks: Ranks, tmp_path: Path, module_class: type[Lit], epochs: int
    ) -> None:
        """An optimizer that was built from the unsharded parameters must train the shards."""
        for got in ranks.run(2, _fit_epochs, self.strategy, str(tmp_path), module_class, epochs):
            assert_all_trained(got)
            assert len(got[0]) == 2 * epochs, f"{len(got[0])} steps were trained instead of {2 * epochs}"

    @pytest.mark.parametrize("joint", [True, False])
    def test_fabrics_optimizer_from_before_sharding_is_rebound(self, ranks: Ranks, joint: bool) -> None:
        """Fabric must rebind an optimizer built before sharding to this rank's shards."""
        got = ranks.run(2, built_before_sharding, self.strategy, joint)
        for trained, _ in got:
            assert_all_trained(trained, width=WIDE)
        total = sum(p.numel() for p in trained_by(oracle.adamw_groups(oracle.new_net(width=WIDE))))
        assert_sharded([elements for _, elements in got], total)

    def test_optimizer_built_after_evaluation_trains_the_shards(self, ranks: Ranks) -> None:
        """An optimizer built after a forward pass without a backward pass must train the shards."""
        for got in ranks.run(2, built_after_evaluation, self.strategy, "momentum"):
            assert_all_trained(got, "momentum")

    @on_ranks("processes")  # XLA would compile a program for each
    def test_every_optimizer_of_torch_is_right_or_refused(self, ranks: Ranks, tmp_path: Path) -> None:
        """Each torch optimizer must give plain torch's results, or be refused. Elementwise ones must not be refused."""
        got = ranks.run(2, _train_with_each_optimizer, self.strategy, str(tmp_path))
        for name in [*TORCH_OPTIMIZERS, "Adagrad, Trainer"]:
            optimizer = name.partition(",")[0]
            outcomes = [outcome_by_name[name] for outcome_by_name in got]
            if any(isinstance(outcome, str) for outcome in outcomes):
                assert optimizer not in ELEMENTWISE
                for outcome in outcomes:
                    assert_says(outcome, optimizer, "Use")
                continue
            want_losses, want = oracle.train_plain(2, partial(any_optimizer, optimizer))
            # Muon computes in bf16, where rounding errors decide directions that have no gradient.
            tolerance = 1e-2 if optimizer == "Muon" else FP32_TOLERANCE
            for losses, state in outcomes:
                assert losses == pytest.approx(want_losses, abs=tolerance), name
                for key, tensor in want.items():
                    torch.testing.assert_close(state[key], tensor, atol=tolerance, rtol=tolerance, msg=f"{name}: {key}")

    @on_ranks("processes")  # XLA's front end steps by itself
    def test_a_param_group_that_is_added_and_stepped_by_hand(self, ranks: Ranks) -> None:
        """A param group that was added after set-up, and stepped by torch alone, must be trained right, or refused."""
        net = oracle.new_net()
        start = {name: tensor.clone() for name, tensor in net.state_dict().items()}
        ((x, y),) = oracle.global_batches(1)
        mse_loss(net(x), y).backward()
        torch.optim.SGD([*net.blocks[0].parameters(), *net.blocks[1].parameters()], lr=0.1).step()
        for message, state in ranks.run(2, _add_group_and_step, self.strategy):
            if was_refused(message):
                assert_says(message, "SGD")
            for name, tensor in (start if was_refused(message) else net.state_dict()).items():
                weight = f"{name}, of a param group that was added after set-up and stepped by hand"
                torch.testing.assert_close(state[name], tensor, atol=FP32_TOLERANCE, rtol=FP32_TOLERANCE, msg=weight)

    def test_optimizers_over_other_parameters_are_refused(self, ranks: Ranks, tmp_path: Path) -> None:
        """Optimizers over other parameters, or with a step taken before sharding, must be refused."""
        (messages,) = ranks.run(1, _refusals, self.strategy, str(tmp_path))
        for message in messages["foreign"]:
            assert_says(message, "param group 0 of SGD", "the sharded model's, so training would leave it stale")
            assert_says(message, "model, optimizer = fabric.setup(model, optimizer)", "configure_optimizers")
        assert_says(messages["foreign"][0], "(5,)")
        for message in messages["stepped"]:
            assert_says(message, "SGD has stepped", "before the first step")
