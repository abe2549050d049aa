"""Steps as papers publish them, on two ranks: losses and weights are those of unsharded modules, or they are refused.

The unsharded modules are one in each of two processes. After each backward pass their gradients are averaged.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import Tensor, nn

from fsdp_core import full_state_dict
from fsdp_core.testing import RankPool
from fsdp_core.testing.refusals import assert_says
from fsdp_core.testing.training import QUIET, new_fabric, new_trainer

STRATEGIES = ("fsdp2", "fsdp_native")
TOLERANCE = 1e-5

#: The losses of a rank, and what rank 0 has gathered; or what was raised.
Outcome = tuple[list[float], dict[str, Tensor]] | str

_WHOLE = "auto_wrap_policy=None"
_ASSIGNED = {"a gradient was assigned to a parameter": STRATEGIES}

_PIECES = {"full_tensor()": ("fsdp2",), "this rank's piece": ("fsdp_native",)}

#: By recipe, what the message of its refusal says, and under which strategies it is refused.
REFUSED: dict[str, dict[str, tuple[str, ...]]] = {
    "recipes awp_kaggle": {"mixed torch.Tensor and DTensor": ("fsdp2",), "self.clip_gradients": ("fsdp_native",)},
    "recipes awp_proxy": {_WHOLE: ("fsdp2",), "full_state_dict": ("fsdp_native",)},
    "recipes condensation": {_WHOLE: STRATEGIES},
    "recipes cosine_aux_params": {_WHOLE: STRATEGIES},
    "recipes darts": {_WHOLE: STRATEGIES},
    "recipes dqn": {"target_parameter.copy_(parameter)": ("fsdp_native",)},
    "recipes ewc": {_WHOLE: STRATEGIES},
    "recipes func_grad": {_WHOLE: STRATEGIES},
    "recipes func_laplacian": {_WHOLE: STRATEGIES},
    "recipes gradnorm_published": {"a gradient was assigned": ("fsdp2",), "optimizer.zero_grad()": ("fsdp_native",)},
    "recipes hook_optimizers_early": {"in on_fit_start()": STRATEGIES},
    "recipes imaml_sets_grad": _ASSIGNED,
    "recipes l1_reg": {"DTensor": ("fsdp2",), "weight_decay": ("fsdp_native",)},
    "recipes maml_auto": {_WHOLE: STRATEGIES},
    "recipes mezo": {"parameter.data.copy_(values)": ("fsdp2",)},
    "recipes moco": {"parameter.data.copy_(values)": STRATEGIES},
    "recipes norm_at_start": _PIECES,
    "recipes norm_before_backward": _PIECES,
    "recipes norm_before_zero_grad": _PIECES,
    "recipes pcgrad_backward": {"unevenly sharded": ("fsdp2",), "this rank's piece": ("fsdp_native",)},
    "recipes pcgrad_grad": {_WHOLE: STRATEGIES},
    "recipes pinn_lbfgs": {"strategy='fsdp2'": ("fsdp_native",)},
    "recipes pinn_lbfgs_auto": {"strategy='fsdp2'": ("fsdp_native",)},
    "recipes tent": {"under Fabric": ("fsdp_native",)},
    "recipes tent_manual": {"under Fabric": ("fsdp_native",)},
    "recipes untied": {"tied to net.inp.weight": STRATEGIES},
    "recipes vqvae_parameters": {"parameter.data.copy_(values)": STRATEGIES},
    "recipes_of_transformers merged_adapters": {"fsdp_core.gathered(module)": ("fsdp_native",)},
    "recipe_loops pcgrad": {"this rank's piece": ("fsdp_native",)},
}


def told_of(name: str, strategy: str) -> list[str]:
    return [told for told, strategies in REFUSED.get(name, {}).items() if strategy in strategies]


class Unsharded:
    """Stands for Fabric where nothing is sharded."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []

    def parameters(self) -> Iterator[nn.Parameter]:
        for module in self.modules:
            yield from module.parameters()

    def setup(self, module: nn.Module, *optimizers: Any) -> Any:
        self.modules.append(module)
        return (module, *optimizers)

    def setup_module(self, module: nn.Module) -> nn.Module:
        self.modules.append(module)
        return module

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        loss.backward(**kwargs)

    def clip_gradients(self, module: nn.Module, optimizer: Any, max_norm: float) -> None:
        torch.nn.utils.clip_grad_norm_(module.parameters(), max_norm)

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> Any:
        return contextlib.nullcontext()


@contextlib.contextmanager
def averaged_gradients(of: Any) -> Iterator[None]:
    """Average the gradients of all processes after each backward pass, and before each step of an optimizer."""

    def average(*_: Any) -> None:
        parameters = list(of.parameters())
        counts = torch.tensor([float(parameter.grad is not None) for parameter in parameters])
        dist.all_reduce(counts)
        for parameter, count in zip(parameters, counts.tolist(), strict=True):
            if count:
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach().clone()
                dist.all_reduce(gradient)
                parameter.grad = gradient / dist.get_world_size()

    def backward(*args: Any, **kwargs: Any) -> None:
        own(*args, **kwargs)
        average()

    own, torch.autograd.backward = torch.autograd.backward, backward
    hook = import_module("torch.optim.optimizer").register_optimizer_step_pre_hook(average)
    try:
        yield
    finally:
        torch.autograd.backward = own
        hook.remove()


def fitted(
    tmp: str, strategy: str | None, recipe: Any, options: dict[str, Any]
) -> tuple[list[float], dict[str, Tensor]]:
    batches, rank = import_module("recipes").batches, int(os.environ["RANK"])
    settings: dict[str, Any] = {"use_distributed_sampler": False, **recipe.trainer_args}
    if recipe.validates:
        settings.update(val_check_interval=2, limit_val_batches=2, num_sanity_val_steps=0)
    loaders = [batches(rank), *([batches(rank)] if recipe.validates else [])]
    if strategy is not None:
        world_size = int(os.environ["WORLD_SIZE"])
        new_trainer(tmp, strategy, world_size, {**recipe.options, **options}, **settings).fit(recipe, *loaders)
        return recipe.kept, full_state_dict(recipe)
    alone: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "plugins": [LightningEnvironment()]}
    with averaged_gradients(recipe):
        Trainer(**alone, **QUIET, **settings).fit(recipe, *loaders)
    return recipe.kept, recipe.state_dict()


def looped(strategy: str | None, loop: Any, options: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    kept: list[float] = []

    def keep(*losses: Tensor) -> Tensor:
        kept.extend(float(loss.detach()) for loss in losses)
        return losses[0]

    def batches() -> Iterator[tuple[int, Tensor, Tensor]]:
        rank = int(os.environ["RANK"])
        for index, (x, y) in enumerate(import_module("recipes").data(rank)):
            torch.manual_seed(1000 * index + rank)
            yield index, x.clone(), y

    own = {**getattr(loop, "options", {}), **options}
    fabric: Any = Unsharded() if strategy is None else new_fabric(strategy, int(os.environ["WORLD_SIZE"]), own)
    torch.manual_seed(0)
    with averaged_gradients(fabric) if strategy is None else contextlib.nullcontext():
        made = loop(fabric, batches, keep)
    states = {}
    for index, module in enumerate(made if isinstance(made, tuple) else [made]):
        state = module.state_dict() if strategy is None else full_state_dict(module)
        states.update({f"{index}.{name}": value for name, value in state.items()})
    return kept, states


def on_rank(tmp: str, strategy: str | None, names: list[str], options: dict[str, Any]) -> dict[str, Outcome]:
    """On a rank: recipes, one after the other, with options besides their own."""
    for path in (os.path.dirname(__file__), os.environ.get("FSDP_TESTS_TRANSFORMERS", "")):
        if path and path not in sys.path:
            sys.path.append(path)
    if strategy is None:
        dist.init_process_group("gloo")
    outcomes: dict[str, Outcome] = {}
    for full_name in names:
        module, name = full_name.split()
        recipe = import_module(module).ALL[name]
        try:
            if module == "recipe_loops":
                kept, state = looped(strategy, recipe, options)
            else:
                kept, state = fitted(tmp, strategy, recipe(), options)
        except Exception as error:
            if strategy is None or not told_of(full_name, strategy):
                error.add_note(f"in {full_name}")
                raise
            outcomes[full_name] = "\n".join([str(error), *getattr(error, "__notes__", ())])
        else:
            outcomes[full_name] = kept, {key: value.detach().clone() for key, value in state.items()}
    return outcomes


def compare(outcome: Outcome, want: Outcome) -> str | None:
    """What differs, in words; ``None`` if nothing does."""
    if isinstance(outcome, str) or isinstance(want, str):
        return str(outcome)
    (losses, state), (wanted_losses, wanted_state) = outcome, want
    if losses != pytest.approx(wanted_losses, abs=TOLERANCE, rel=0) or not losses:
        return f"losses {losses}, not {wanted_losses}"
    if state and state.keys() != wanted_state.keys():
        return f"keys {sorted(state.keys() ^ wanted_state.keys())}"
    differ = {name: float((value - wanted_state[name]).abs().max()) for name, value in state.items()}
    wrong = [name for name, difference in differ.items() if not difference <= TOLERANCE]  # NaN is wrong too
    return f"{wrong[0]} by {differ[wrong[0]]}" if wrong else None


def check(
    ranks: RankPool,
    tmp: str,
    names: list[str],
    world_size: int = 2,
    options_of: dict[str, list[dict[str, Any]]] | None = None,
) -> None:
    """Run recipes unsharded, and with each list of options under each strategy, and compare."""
    run: Callable[..., Any] = ranks.run
    wanted = run(world_size, on_rank, tmp, None, names, {}, timeout=300.0)
    wrong = {}
    runs = options_of or {strategy: [{}] for strategy in STRATEGIES}
    for strategy, options in [(strategy, options) for strategy, each in runs.items() for options in each]:
        for rank, outcomes in enumerate(run(world_size, on_rank, tmp, strategy, names, options, timeout=300.0)):
            for name in names:
                said, outcome = told_of(name, strategy), outcomes[name]
                if said and isinstance(outcome, str):
                    assert_says(outcome, *said)
                elif told := compare(outcome, wanted[rank][name]):
                    wrong[f"{strategy} {options} {rank} {name}"] = told
                elif said:
                    wrong[f"{strategy} {options} {rank} {name}"] = "is right, and listed as refused"
    assert not wrong


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    with RankPool() as pool:
        yield pool


def names_of(module: str) -> list[str]:
    return [f"{module} {name}" for name in import_module(module).ALL]


NAMES = [*names_of("recipes"), *names_of("recipe_loops")]
PARTS = 6


@pytest.mark.drawn
@pytest.mark.cpu_limit(120)
@pytest.mark.parametrize("part", range(PARTS))
def test_recipes(ranks: RankPool, tmp_path: Any, part: int) -> None:
    check(ranks, str(tmp_path), NAMES[part::PARTS])


@pytest.mark.drawn
@pytest.mark.cpu_limit(120)
@pytest.mark.parametrize("first", [0, 10, 20])
def test_recipes_on_four_ranks(ranks: RankPool, tmp_path: Any, first: int) -> None:
    """Of each tenth recipe. All were run so, and only ``byol``, under FULL_SHARD, is refused there and not on two."""
    hybrid = {"sharding_strategy": "HYBRID_SHARD", "device_mesh": (2, 2)}
    check(ranks, str(tmp_path), NAMES[first::30], 4, {"fsdp_native": [{}, hybrid]})


def test_recipes_of_transformers(transformers_ranks: RankPool, tmp_path: Any) -> None:
    check(transformers_ranks, str(tmp_path), names_of("recipes_of_transformers"))
