"""What each rank holds: its shard of rank 0's values, before and after every stage."""

from __future__ import annotations

import gc
import logging
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from fsdp_core.errors import ShardingError
from fsdp_core.lightning.outside_steps.sharded_modules import size_in_words
from fsdp_core.plugins.capabilities import Capability
from fsdp_core.plugins.strategy_info import FrontEnd
from fsdp_core.sharding.backend import Backend
from fsdp_core.testing import Ranks, oracle
from fsdp_core.testing.launching.rank_context import rank_context
from fsdp_core.testing.loop import Loop
from fsdp_core.testing.oracle import FEATURES, FP32_TOLERANCE, WIDE, Block, Trained
from fsdp_core.testing.refusals import assert_says, refusal
from fsdp_core.testing.state import assert_sharded, count_local_elements, full_state, sharded_by, trained_by
from fsdp_core.testing.suite.base_class import Clauses, on_ranks, precisions, requires, with_options
from fsdp_core.testing.suite.numerics.parity import assert_same
from fsdp_core.testing.training import Lit, accelerator, loader, means, new_fabric, new_trainer, whole_batches

__all__ = ["ShardsSuite", "Shared"]


def _elements_under_trainer(strategy: str, tmp: str, world_size: int) -> int:
    """The number of elements that this rank's optimizer trains."""
    run = new_trainer(tmp, strategy, world_size)
    run.fit(Lit("adamw_groups", width=WIDE), loader(1, world_size))
    return count_local_elements(trained_by(run.optimizers[0]))


def _elements_under_fabric(strategy: str, world_size: int) -> int:
    loop = Loop(strategy, oracle.adamw_groups, oracle.new_net(width=WIDE), ranks=world_size)
    return count_local_elements(trained_by(loop.optimizer))


def _elements_after_evaluation(strategy: str, tmp: str, options: dict[str, Any]) -> int:
    run = new_trainer(tmp, strategy, 2, options)
    run.validate(Lit("sgd", width=WIDE), loader(1, 2), verbose=False)
    return count_local_elements(sharded_by(run.strategy).root.parameters())


def _largest_tensor(strategy: str) -> int:
    fabric = new_fabric(strategy, 2)
    net = nn.Sequential(nn.Linear(512, 512))
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    largest: list[int] = []
    while len(largest) < 10:  # repeated, since gloo's thread may keep a broadcast tensor for a moment
        gc.collect()
        largest.append(max(rank_context().local_bytes(t) for t in gc.get_objects() if isinstance(t, Tensor)))
        time.sleep(0.05)
    del model, optimizer
    return min(largest)


def _different_seeds(strategy: str) -> list[float]:
    fabric = new_fabric(strategy)
    with oracle.seeded(1 + 10 * fabric.global_rank):
        net = oracle.Net()
    model = fabric.setup(net)
    return [mse_loss(model(x), y).item() for x, y in whole_batches(fabric, 1)]


class Positioned(nn.Module):
    """A persistent and a non-persistent buffer."""

    saved: Tensor
    unsaved: Tensor

    def __init__(self, value: float) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, FEATURES)
        self.register_buffer("saved", torch.full((FEATURES,), value))
        self.register_buffer("unsaved", torch.full((FEATURES,), value), persistent=False)

    def forward(self, x: Tensor) -> Any:
        return self.layer(x * self.saved) + self.unsaved


def _buffers(strategy: str) -> tuple[float, float]:
    fabric = new_fabric(strategy)
    net = Positioned(1.0 + fabric.global_rank)
    fabric.setup(net)
    return net.saved.sum().item(), net.unsaved.sum().item()


class Shared(nn.Module):
    """Two blocks with a weight tied to each other's, and one with a weight tied to the root's."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(FEATURES, WIDE)
        blocks = [Block(width=WIDE) for _ in range(4)]
        blocks[1].down.weight = blocks[0].down.weight
        blocks[2].up.weight = self.inp.weight
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.inp(x)[:, :FEATURES]
        for block in self.blocks:
            x = block(x)
        return x


def _train_shared(strategy: str) -> tuple[Trained, int]:
    """The outcome of three steps, and the number of elements that this rank's optimizer trains."""
    with oracle.seeded(1):
        net = Shared()
    loop = Loop(strategy, oracle.momentum, net)
    return loop.train(loop.whole_batches(3)), count_local_elements(trained_by(loop.optimizer))


def _refuse_other_precision(strategy: str, tmp: str, precision: Any) -> str:
    module = Lit("sgd")
    new_trainer(tmp, strategy, 2).validate(module, loader(1, 2), verbose=False)
    other = new_trainer(tmp, strategy, 2, precision=precision)
    return refusal(ShardingError, lambda: other.validate(module, loader(1, 2), verbose=False))


def _built_on_meta(strategy: str, tmp: str, precision: Any) -> tuple[list[float], torch.dtype]:
    run = new_trainer(tmp, strategy, 2, precision=precision)
    with run.init_module(), torch.device("meta"):
        module = Lit("sgd")
    assert all(p.is_meta for p in module.parameters())
    module.net.scale = torch.ones(FEATURES)
    for block in module.net.blocks:
        block.reset_parameters = lambda block=block: nn.init.constant_(block.gain, 0.5)
    run.fit(module, loader(2, 2))
    return means(module.losses), module.net.blocks[0].up.weight.dtype


class Initialising(nn.Module):
    """Initialises its layers itself, as models of transformers and timm do, and computes a non-persistent buffer."""

    angles: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(FEATURES, FEATURES)
        self.place = nn.Parameter(0.02 * torch.randn(FEATURES))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(FEATURES, 7), nn.Linear(7, FEATURES)) for _ in range(2))
        self.depth = nn.Parameter(1e-2 * torch.ones(FEATURES))
        self.register_buffer("angles", 1 / 10 ** (torch.arange(FEATURES).float() / FEATURES), persistent=False)
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.3, a=-0.4, b=0.4)
            nn.init.normal_(module.bias, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.place * self.angles
        for block in self.blocks:
            x = x + self.depth * block(x)
        output: Tensor = self.head(x)
        return output


class LitInitialising(Lit):
    """Builds the model in ``configure_model()``, on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        del self.net

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            with self.trainer.init_module(empty_init=True), oracle.seeded(3):
                self.net = Initialising()
            assert self.net.head.weight.is_meta


def _initialising(strategy: str, tmp: str) -> tuple[dict[str, Any], dict[str, Any], list[float]]:
    """The weights under Fabric and under the Trainer, and the loss under the Trainer."""
    fabric = new_fabric(strategy, 2)
    with fabric.init_module(empty_init=True), oracle.seeded(3):
        net = Initialising()
    assert net.head.weight.is_meta
    fabric.setup(net)
    module = LitInitialising()
    run = new_trainer(tmp, strategy, 2)
    run.validate(module, loader(1, 2), verbose=False)
    return full_state(fabric.strategy), full_state(run.strategy), means(module.validation_losses)


class OddNames(nn.Module):
    """Has names that contain the prefixes of wrappers, or begin like them."""

    def __init__(self) -> None:
        super().__init__()
        self.a_orig_mod = nn.Linear(FEATURES, FEATURES, bias=False)
        self.aweight = nn.Parameter(torch.zeros(3))
        self.block = Block()

    def forward(self, x: Tensor) -> Any:
        return self.block(self.a_orig_mod(x)) + self.aweight.sum()


def _odd_names(strategy: str) -> list[str]:
    fabric = new_fabric(strategy)
    fabric.setup(OddNames())
    return sorted(full_state(fabric.strategy))


class Convolutions(nn.Module):
    """Parameters whose memory layout is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        with oracle.seeded(1):
            self.conv = nn.Conv2d(3, 5, 3, padding=1)
            self.odd = nn.Parameter(torch.randn(5, 4).T)

    def forward(self, x: Tensor) -> Any:
        return self.conv(x).mean((2, 3)) @ self.odd.T


def _train_convolutions(strategy: str | None) -> Trained:
    net: Any = Convolutions()
    if strategy is not None:
        net.to(memory_format=torch.channels_last)
    loop = Loop(strategy, oracle.sgd, net)
    x = torch.full((2, 3, 4, 4), 0.2)
    losses = []
    for _ in range(3):
        loss = loop.model(x if loop.fabric is None else loop.fabric.to_device(x)).square().mean()  # bounded below
        losses.append(loss.item())
        loop.backward(loss)
        loop.step()
    return losses, loop.state()


class Wide(pl.LightningModule):
    """Weights that two ranks can shard evenly, without padding."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(512, 512, bias=False) for _ in range(2))
        self.out = nn.Linear(512, 256, bias=False)

    def training_step(self, batch: Any) -> None:
        """Never called."""

    def configure_optimizers(self) -> Any:
        return oracle.sgd(self)


def _logger(front_end: FrontEnd) -> logging.Logger:
    return logging.getLogger("lightning.pytorch" if front_end == "trainer" else "lightning.fabric")


@contextmanager
def _announcements(front_end: FrontEnd) -> Iterator[list[str]]:
    """Collect what this rank, a process or a thread, logs about sharded modules through a front end's logger."""
    lines: list[str] = []
    thread = threading.get_ident()

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.thread == thread and " is sharded over " in record.getMessage():
                lines.append(record.getMessage())

    handler = Collector()
    _logger(front_end).addHandler(handler)
    try:
        yield lines
    finally:
        _logger(front_end).removeHandler(handler)


class Announced(NamedTuple):
    """What a rank logged when a module was sharded, with and without a raised log level, and what it holds."""

    rank: int
    lines: list[str]
    silenced_lines: list[str]
    units: int
    elements: int


def _announce(strategy: str, tmp: str, front_end: FrontEnd) -> Announced:
    net = Wide()
    logger = _logger(front_end)
    fabric = new_fabric(strategy, 2) if front_end == "fabric" else None
    run = new_trainer(tmp, strategy, 2, max_epochs=0)

    def set_up(module: Wide) -> Any:
        if fabric is not None:
            fabric.setup_module(module)
            return fabric.strategy
        run.fit(module, loader(1, 2))
        return run.strategy

    with _announcements(front_end) as lines:
        used_strategy = set_up(net)
        units = len(used_strategy.backend.units(Wide()))
        elements = count_local_elements(sharded_by(used_strategy).layout())
        if fabric is None:
            set_up(net)  # already sharded: nothing is logged again
    level = logger.level
    used_strategy.barrier()  # ranks that are threads share the log level
    logger.setLevel(logging.ERROR)
    with _announcements(front_end) as silenced_lines:
        set_up(Wide())
        used_strategy.barrier()
    logger.setLevel(level)
    return Announced(rank_context().rank, lines, silenced_lines, units, elements)


def _drawn_after_setup(strategy: str) -> tuple[list[float], list[float]]:
    """Return what a rank with a seed of its own draws after the set-up of a model, and without a set-up."""
    fabric = new_fabric(strategy)
    net = oracle.new_net()

    def draw() -> list[float]:
        return [*torch.rand(3).tolist(), random.random()]

    def seed() -> None:
        torch.manual_seed(100 + fabric.global_rank)
        random.seed(100 + fabric.global_rank)

    seed()
    want = draw()
    seed()
    fabric.setup(net, oracle.adamw_groups(net))
    return draw(), want


class Planned(NamedTuple):
    """A rank's plan for a module on the meta device and for one with values, and what the rank then holds."""

    on_meta: dict[str, str]
    with_values: dict[str, str]
    was_changed: bool
    local_nbytes: int | None
    bytes_held: int


def _make_plan(strategy: str, options: dict[str, Any]) -> Planned:
    fabric = new_fabric(strategy, 3, options)
    backend: Backend = cast(Any, fabric.strategy).backend
    with torch.device("meta"):
        on_meta = backend.plan(Shared())
    net = Shared()

    def contents() -> tuple[dict[int, str], dict[str, set[str]]]:
        names = {id(tensor): name for name, tensor in (*net.named_parameters(), *net.named_buffers())}
        return names, {name: set(vars(module)) for name, module in net.named_modules()}

    contents_before_plan = contents()
    plan = backend.plan(net)
    was_changed = contents() != contents_before_plan
    fabric.setup_module(net)
    sharded = sharded_by(fabric.strategy)
    return Planned(on_meta.describe(), plan.describe(), was_changed, plan.local_nbytes, sharded.bytes_held())


class ShardsSuite(Clauses):
    """Each rank holds its shard of the user's parameters, under the user's names."""

    @pytest.mark.parametrize("world_size", [2, 3])
    def test_optimizers_hold_a_share(self, ranks: Ranks, tmp_path: Path, world_size: int) -> None:
        """Each rank's optimizer must hold only its shard of the parameters."""
        total = sum(p.numel() for p in trained_by(oracle.adamw_groups(oracle.new_net(width=WIDE))))
        assert_sharded(ranks.run(world_size, _elements_under_trainer, self.strategy, str(tmp_path), world_size), total)
        assert_sharded(ranks.run(world_size, _elements_under_fabric, self.strategy, world_size), total)

    @pytest.mark.parametrize("options", [{}, with_options({"auto_wrap_policy": None})], ids=["as it is", "root alone"])
    def test_evaluation_leaves_nothing_unsharded(self, ranks: Ranks, tmp_path: Path, options: dict[str, Any]) -> None:
        """After validation, parameters must be resharded, also where the root is the only unit."""
        total = sum(p.numel() for p in oracle.new_net(width=WIDE).parameters())
        assert_sharded(ranks.run(2, _elements_after_evaluation, self.strategy, str(tmp_path), options), total)

    def test_setup_leaves_no_whole_weight(self, ranks: Ranks) -> None:
        """After setup, no rank may hold a whole weight, not even in an optimizer built before sharding."""
        for largest in ranks.run(2, _largest_tensor, self.strategy):
            message = f"a tensor of {largest:,} bytes is left; the largest whole weight has {4 * 512 * 512:,}"
            assert largest < 0.6 * 4 * 512 * 512, message

    @pytest.mark.parametrize("options", [{}, with_options({"auto_wrap_policy": None})], ids=["as it is", "root alone"])
    def test_plan_is_what_is_sharded(self, ranks: Ranks, options: dict[str, Any]) -> None:
        """A plan must change nothing, be the same on every rank and the meta device, and count what a rank holds."""
        plans = ranks.run(3, _make_plan, self.strategy, options)
        for plan in plans:
            assert not plan.was_changed, "to plan has changed the module"
            assert plan.on_meta == plan.with_values == plans[0].on_meta
            message = f"{plan.local_nbytes} bytes were planned, and {plan.bytes_held} are held"
            assert plan.local_nbytes in (None, plan.bytes_held), message

    @pytest.mark.parametrize("front_end", ["trainer", "fabric"])
    def test_one_line_says_what_was_sharded(self, ranks: Ranks, tmp_path: Path, front_end: FrontEnd) -> None:
        """Sharding must log one correct line, on rank 0 only, that Lightning's log level can silence."""
        outcomes = ranks.run(2, _announce, self.strategy, str(tmp_path), front_end)
        first = outcomes[0]
        (line,) = first.lines
        for outcome in outcomes:  # a controller reports the same for each of its devices
            assert (outcome.lines, outcome.silenced_lines) == ([line] if outcome.rank == 0 else [], [])
        in_units = f"{first.units} units and the root" if first.units else "the root alone"
        size = size_in_words(4 * sum(p.numel() for p in Wide().parameters()))
        assert line.startswith(f"{self.own_name(front_end)}: Wide is sharded over 2 "), line
        share = size_in_words(4 * first.elements)
        assert_says(line, f", in {in_units}; the first holds {share} of {size} of parameters.")

    def test_rank_zeros_values_win(self, ranks: Ranks) -> None:
        """Every rank must get rank 0's weights."""
        net = oracle.new_net()
        want = [mse_loss(net(x), y).item() for x, y in oracle.global_batches(1)]
        for losses in ranks.run(2, _different_seeds, self.strategy):
            assert losses == pytest.approx(want, abs=FP32_TOLERANCE)

    def test_rank_zeros_buffers_win(self, ranks: Ranks) -> None:
        """Every rank must get rank 0's buffers, also those that are not saved."""
        for saved, unsaved in ranks.run(2, _buffers, self.strategy):
            assert (saved, unsaved) == (FEATURES, FEATURES)

    @on_ranks("processes")  # threads share their generators
    def test_setup_leaves_random_numbers_alone(self, ranks: Ranks) -> None:
        """Ranks that are seeded differently must draw different numbers, as for dropout, after set-up as before."""
        for drawn, want in ranks.run(2, _drawn_after_setup, self.strategy):
            assert drawn == want, "the set-up has changed what this rank draws next"

    def test_tied_parameters_are_trained_as_one(self, ranks: Ranks) -> None:
        """Tied parameters must be trained as one, within a unit and across units."""
        torch.manual_seed(1)
        net = Shared()
        total = sum(p.numel() for p in net.parameters())
        want, _ = oracle.train_plain(3, oracle.momentum, net=net)
        got = ranks.run(2, _train_shared, self.strategy)
        for (losses, _), _ in got:
            assert losses == pytest.approx(want, abs=FP32_TOLERANCE)
        assert_sharded([elements for _, elements in got], total)

    @precisions("bf16-mixed", "bf16-true")
    def test_a_sharded_module_keeps_its_precision(self, ranks: Ranks, tmp_path: Path, precision: str) -> None:
        """A sharded module must refuse another precision, with an error that names both."""
        for message in ranks.run(2, _refuse_other_precision, self.strategy, str(tmp_path), precision):
            assert_says(message, "32-true", precision, "build the module again")

    @requires(Capability.META_INIT)
    @precisions("32-true", "bf16-true")
    def test_meta_init(self, ranks: Ranks, tmp_path: Path, precision: str) -> None:
        """A model on the meta device must be initialised in the precision's dtype, the same on every rank."""
        outcomes = ranks.run(2, _built_on_meta, self.strategy, str(tmp_path), precision)
        (losses, dtype), (losses_of_other_rank, _) = outcomes
        assert losses == losses_of_other_rank
        assert all(torch.isfinite(torch.tensor(losses)))
        assert dtype is {"32-true": torch.float32, "bf16-true": torch.bfloat16}[precision]

    @requires(Capability.META_INIT)
    def test_a_model_built_empty_is_initialised_as_without(self, ranks: Ranks, tmp_path: Path) -> None:
        """A model built with ``empty_init`` must get the values that it gets without, bit for bit."""
        with torch.device(accelerator()), oracle.seeded(3):  # an accelerator draws other random numbers than the CPU
            net = Initialising()
        want = net.cpu().state_dict()
        ((x, y),) = oracle.global_batches(1)
        loss = mse_loss(net(x), y).item()
        for by_fabric, by_trainer, losses in ranks.run(2, _initialising, self.strategy, str(tmp_path)):
            assert by_fabric.keys() == want.keys()
            for name, value in want.items():
                assert torch.equal(by_fabric[name].cpu(), value), name
                assert torch.equal(by_trainer[f"net.{name}"].cpu(), value), name
            assert losses == pytest.approx([loss], abs=FP32_TOLERANCE)

    def test_odd_names(self, ranks: Ranks) -> None:
        """The state must have the user's parameter names, even if these resemble the names of wrappers."""
        assert ranks.run(2, _odd_names, self.strategy) == [sorted(OddNames().state_dict())] * 2

    def test_memory_formats(self, ranks: Ranks) -> None:
        """Parameters with a ``channels_last`` or transposed layout must be trained as in plain torch."""
        assert_same(ranks.run(2, _train_convolutions, self.strategy), _train_convolutions(None))
