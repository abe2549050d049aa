"""Part 4: checkpoints that move between the card and ranks on the CPU, and exact resume on the card.

What one rank saves on the card, two ranks load on the CPU, and back: weights and moments stay equal bit for bit.
"""

from __future__ import annotations

import gc
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from card import ACCELERATOR, HAS_CARD, arguments
from lightning.fabric import Fabric
from records import Records
from torch import Tensor
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

import fsdp_core
from fsdp_core.testing import RankPool, oracle
from fsdp_core.testing.oracle import FP32_TOLERANCE, HALF_TOLERANCE
from fsdp_core.testing.state import full_optimizer_state, full_state
from fsdp_core.testing.training import QUIET, Lit
from fsdp_core.torch_private.dtensors import note_meshes

STRATEGIES = ("fsdp2", "fsdp_native")
#: Ranks on the CPU that load what one rank has saved.
CPU_RANKS = 2
#: Steps before the checkpoint, so that moments and their step counts are not those of a first step.
STEPS = 3
#: Precisions, and options of the strategy.
WAYS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("32-true", {}),
    ("bf16-mixed", {}),
    ("32-true", {"state_dict_type": "full"}),
)


class State(NamedTuple):
    """What a checkpoint holds, whole and in host memory.

    Attributes:
        model: Weights and buffers by name.
        optimizer: The moments of each parameter, by its name.
    """

    model: dict[str, Any]
    optimizer: dict[str, dict[str, Any]]


class Training:
    """A net and AdamW under Fabric.

    Args:
        strategy: The strategy's name.
        precision: Lightning's precision string.
        accelerator: Lightning's name of the accelerator.
        ranks: The number of ranks.
        options: The strategy's options.
    """

    def __init__(
        self, strategy: str, precision: Any, accelerator: str, ranks: int, options: Mapping[str, Any] | None = None
    ) -> None:
        chosen = fsdp_core.resolve(strategy, "fabric")(**(options or {}))
        self.fabric = Fabric(accelerator=accelerator, devices=ranks, strategy=chosen, precision=precision)
        self.fabric.launch()
        net = oracle.new_net()
        self.model, self.optimizer = self.fabric.setup(net, oracle.adamw_groups(net))
        self.objects = {"model": self.model, "optimizer": self.optimizer}

    def take_step(self, number: int) -> float:
        """Train on one batch, whole on every rank, and return the loss."""
        x, y = self.fabric.to_device(oracle.global_batches(number + 1)[number])
        loss = mse_loss(self.model(x), y)
        self.fabric.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def state(self) -> State:
        """The whole state, copied. All ranks must call it."""
        strategy = self.fabric.strategy
        return State(full_state(strategy), full_optimizer_state(strategy, self.optimizer))

    def close(self) -> None:
        """Let the strategy release what it has."""
        self.fabric.strategy.teardown()


class Moved(NamedTuple):
    """What ranks have loaded, saved again, and made of it with one more step.

    Attributes:
        loaded: The state after loading.
        loss: The loss of the next step.
        stepped: The state after that step.
    """

    loaded: State
    loss: float
    stepped: State


def load_and_step(
    strategy: str,
    precision: str,
    accelerator: str,
    ranks: int,
    options: dict[str, Any],
    source: str,
    target: str | None,
) -> Moved:
    """Load a checkpoint into a net that has other weights, save it again, and take a step.

    Args:
        strategy: The strategy's name.
        precision: Lightning's precision string.
        accelerator: Lightning's name of the accelerator.
        ranks: The number of ranks.
        options: The strategy's options.
        source: The checkpoint that is loaded.
        target: Where it is saved again, if at all.
    """
    if accelerator == "cpu":
        assert not torch.cuda.is_available(), "a rank on the CPU sees the card"
    training = Training(strategy, precision, accelerator, ranks, options)
    training.take_step(STEPS + 1)  # so that nothing is equal before it is loaded
    training.fabric.load(source, training.objects)
    loaded = training.state()
    if target is not None:
        training.fabric.save(target, training.objects)
    moved = Moved(loaded, training.take_step(STEPS), training.state())
    training.close()
    return moved


@contextmanager
def hidden_cards() -> Iterator[None]:
    """A context in which processes that are started don't see the card.

    This process has asked the driver before, and sees what it saw then.
    """
    if HAS_CARD:
        torch.cuda.init()
        torch.cuda.device_count()  # is noted from now on, whatever the variable says
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        yield
    finally:
        if before is None:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = before


def flat(state: State) -> dict[str, Any]:
    """All values of a state by path."""
    moments = {f"{name}: {key}": value for name, per in state.optimizer.items() for key, value in per.items()}
    return {**state.model, **moments}


def assert_bit_equal(state: State, wanted: State) -> None:
    """Assert that two states have the same names, dtypes, shapes and bytes."""
    values, wanted_values = flat(state), flat(wanted)
    assert wanted.optimizer, "the optimizer has no state: nothing would be compared"
    assert values.keys() == wanted_values.keys(), f"the names differ: {sorted(values.keys() ^ wanted_values.keys())}"
    different = [name for name, value in values.items() if not is_bit_equal(value, wanted_values[name])]
    assert not different, f"{len(different)} of {len(values)} values differ, such as {different[0]!r}"


def is_bit_equal(value: Any, wanted: Any) -> bool:
    """Whether two values are equal; of tensors, dtype, shape and every byte."""
    if not isinstance(value, Tensor) or not isinstance(wanted, Tensor):
        return bool(value == wanted)
    if (value.dtype, value.shape) != (wanted.dtype, wanted.shape):
        return False
    return torch.equal(*(each.contiguous().flatten().view(torch.uint8) for each in (value, wanted)))


def update_difference(moved: Moved, wanted: Moved) -> float:
    """The norm by which two steps differ, as a share of the norm of the step."""
    names = [name for name, value in wanted.loaded.model.items() if value.is_floating_point()]
    apart = [(moved.stepped.model[name] - wanted.stepped.model[name]).double().flatten() for name in names]
    step = [(wanted.stepped.model[name] - wanted.loaded.model[name]).double().flatten() for name in names]
    assert torch.cat(step).norm() > 0, "the step has changed no weight"
    return float(torch.cat(apart).norm() / torch.cat(step).norm())


def check_moves(
    strategy: str, precision: str, options: dict[str, Any], pool: RankPool, folder: Path, details: dict[str, Any]
) -> None:
    """Save on the card, load and save on CPU ranks, load on the card; then take the same step there and here.

    Args:
        strategy: The strategy's name.
        precision: Lightning's precision string.
        options: The strategy's options.
        pool: The ranks on the CPU, which don't see the card.
        folder: Where checkpoints are saved.
        details: Of the record.
    """
    here, there = str(folder / "here"), str(folder / "there")
    training = Training(strategy, precision, ACCELERATOR, 1, options)
    for number in range(STEPS):
        training.take_step(number)
    training.fabric.save(here, training.objects)
    saved = training.state()
    training.close()
    details["values"] = len(flat(saved))
    with hidden_cards():
        on_cpu = pool.run(CPU_RANKS, load_and_step, strategy, precision, "cpu", CPU_RANKS, options, here, there)
    for moved in on_cpu:
        assert_bit_equal(moved.loaded, saved)
    back = load_and_step(strategy, precision, ACCELERATOR, 1, options, there, None)
    assert_bit_equal(back.loaded, saved)
    tolerance = FP32_TOLERANCE if precision == "32-true" else HALF_TOLERANCE
    details["tolerance"] = tolerance
    details["loss of the next step"] = apart = abs(back.loss - on_cpu[0].loss) / abs(on_cpu[0].loss)
    details["update of the next step"] = update = update_difference(back, on_cpu[0])
    assert apart <= tolerance, f"the next loss is apart by {apart:.1e}, more than {tolerance:.0e}"
    assert update <= tolerance, f"the next step is apart by {update:.1e} of itself, more than {tolerance:.0e}"


class SaveAt(pl.Callback):
    """Saves once, after a number of steps.

    Args:
        path: Where.
        step: After how many.
    """

    def __init__(self, path: str, step: int) -> None:
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        """Save if it is the step."""
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def fit_with_dropout(
    strategy: str, seed: int, folder: Path, saving: list[pl.Callback], resumed_from: str | None = None
) -> tuple[list[float], State]:
    """Fit a net with dropout on the device.

    Args:
        strategy: The strategy's name.
        seed: Seeds the random numbers of host and device.
        folder: The folder that the Trainer may write to.
        saving: Callbacks.
        resumed_from: A checkpoint.

    Returns:
        The loss of each step, and the final state.
    """
    torch.manual_seed(seed)
    module = Lit("adamw_groups", dropout=0.2)
    torch.manual_seed(seed)  # again: the net has its own seed
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator=ACCELERATOR,
        devices=1,
        max_epochs=1,
        callbacks=saving,
        **QUIET,
        default_root_dir=str(folder),
    )
    data: Any = oracle.dataset(2 * STEPS * oracle.BATCH)
    trainer.fit(module, DataLoader(data, batch_size=oracle.BATCH), ckpt_path=resumed_from)
    state = State(full_state(trainer.strategy), full_optimizer_state(trainer.strategy, trainer.optimizers[0]))
    return [loss.item() for loss in module.losses], state


def check_resume(strategy: str, folder: Path, details: dict[str, Any]) -> None:
    """A run that resumes on the device must draw the dropout of the uninterrupted run, and equal it bit for bit."""
    path = str(folder / "resumed")
    whole, wanted = fit_with_dropout(strategy, 10, folder, [SaveAt(path, STEPS)])
    other, _ = fit_with_dropout(strategy, 90, folder, [])
    assert whole[STEPS:] != other[STEPS:], "dropout drew the same with another seed: the check is of no use"
    losses, state = fit_with_dropout(strategy, 90, folder, [], path)
    details["losses"], details["losses of the uninterrupted run"] = losses, whole[STEPS:]
    assert losses == whole[STEPS:], f"the resumed run has losses {losses}, the uninterrupted one {whole[STEPS:]}"
    assert_bit_equal(state, wanted)


def check_staging(strategy: str, folder: Path, details: dict[str, Any]) -> None:
    """What a save in the background copies from the card must go to pinned memory, and hold the state of that time."""
    training = Training(strategy, "32-true", ACCELERATOR, 1, {"async_save": True})
    training.take_step(0)
    saved = training.state()
    path = str(folder / "staged")
    training.fabric.save(path, training.objects)
    training.take_step(1)
    engine: Any = training.fabric.strategy
    engine.wait_for_saves()
    staging = engine.async_saves._staging
    details["blocks"] = [block.numel() for block in staging._blocks]
    assert staging._blocks, "nothing was copied"
    details["pinned"] = [block.is_pinned() for block in staging._blocks] if HAS_CARD else [staging._is_pinned]
    assert all(pinned is HAS_CARD for pinned in details["pinned"]), f"pinned: {details['pinned']}"
    training.fabric.load(path, training.objects)
    assert_bit_equal(training.state(), saved)
    training.close()


def forget_training() -> None:
    """Let a training that has failed not disturb the next one."""
    if dist.is_initialized():
        note_meshes()  # torch names groups anew after this, and equal names would be taken for the old groups
        dist.destroy_process_group()
    gc.collect()


def check_all(records: Records, folder: Path, deadline: float) -> None:
    """Run all checks.

    Args:
        records: Where they are recorded.
        folder: Where checkpoints are saved.
        deadline: What is not begun by then, on the clock of :func:`time.monotonic`, is left out.
    """
    checks: dict[str, Callable[[Path, dict[str, Any]], None]] = {}
    with RankPool() as pool:
        for precision, options in WAYS:
            for strategy in STRATEGIES:
                words = "/".join([strategy, precision, *(f"{key}={value}" for key, value in options.items())])
                moves = partial(check_moves, strategy, precision, options, pool)
                checks[f"{words}: card to {CPU_RANKS} CPU ranks and back"] = moves
            if (precision, options) == WAYS[0]:  # the most valuable first
                for strategy in STRATEGIES:
                    checks[f"{strategy}: exact resume on the device"] = partial(check_resume, strategy)
                    checks[f"{strategy}: staging of a save in the background"] = partial(check_staging, strategy)
        for number, (name, check) in enumerate(checks.items()):
            if time.monotonic() > deadline:
                records.no_time(name)
                continue
            with records.check(name) as details:
                at = folder / str(number)
                at.mkdir()
                check(at, details)
            if "error" in details:
                forget_training()


def main() -> None:
    """Run the part."""
    words, records = arguments("checkpoints", __doc__)
    with tempfile.TemporaryDirectory(prefix="fsdp-checkpoints-") as folder:
        check_all(records, Path(folder), words.deadline)


if __name__ == "__main__":
    main()
