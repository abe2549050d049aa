"""Resumes from any moment of a fit, and what adapters do about what a checkpoint lacks."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import fsdp_core
from fsdp_core.errors import CheckpointMismatchError
from fsdp_core.testing import Ranks, oracle
from fsdp_core.testing.refusals import assert_says, refusal
from fsdp_core.testing.state import full_optimizer_state, full_state
from fsdp_core.testing.suite.base_class import Clauses, each_ranks, on_ranks
from fsdp_core.testing.suite.checkpoints.resuming import (
    BACKEND_MOMENTS,
    MOMENTS,
    Saving,
    Scheduled,
    assert_same,
    continued,
    fit_seeded,
    noisy_batches,
)
from fsdp_core.testing.suite.checkpoints.trainer_checkpoints import assert_bit_equal
from fsdp_core.testing.training import Lit, loader, new_fabric, new_trainer, whole_batches

__all__ = ["ResumeMomentsSuite"]


#: Moments after which the next epoch begins and its order is drawn.
BETWEEN_EPOCHS = ["after the last batch", "after the last validation", "after the epoch, without validation"]


def _saved_or_not(strategy: str, tmp: str) -> list[dict[str, Any]]:
    outcomes = []
    for moment in (None, "between the micro-batches of a step", "after a validation within the epoch"):
        hook, batch, arguments = MOMENTS[moment or "after a validation within the epoch"]
        callbacks = [] if moment is None else [Saving(f"{tmp}/checkpoint", hook, batch)]
        data = noisy_batches(2, seeded=False)
        outcomes.append(fit_seeded(Scheduled(), strategy, tmp, 2, 10, data, callbacks=callbacks, **arguments)[0])
    return outcomes


def _warnings(strategy: str, tmp: str) -> list[str]:
    fabric = new_fabric(strategy)
    net = oracle.new_net()
    model, optimizer = fabric.setup(net, oracle.sgd(net))
    x, y = whole_batches(fabric, 1)[0]
    with fabric.no_backward_sync(model):
        fabric.backward(mse_loss(model(x), y))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fabric.save(f"{tmp}/fabric", {"model": model, "optimizer": optimizer})
        fabric.save(f"{tmp}/fabric", {"model": model, "gradients": fsdp_core.AccumulatedGradients(model)})
        fabric.backward(mse_loss(model(x), y))
        optimizer.step()
        fabric.save(f"{tmp}/fabric", {"model": model, "optimizer": optimizer})
    return [str(one.message) for one in told if "AccumulatedGradients(model)" in str(one.message)]


class LoadsEarly(Lit):
    """Restores its optimizer from a checkpoint before it has one."""

    def __init__(self, path: str | None) -> None:
        super().__init__("adamw_groups")
        self.path = path
        self.at_start: dict[str, Any] = {}

    def configure_model(self) -> None:
        if self.path is not None:
            strategy = self.trainer.strategy
            strategy.load_optimizer_state_dict(strategy.load_checkpoint(self.path))

    def on_train_start(self) -> None:
        if self.path is not None:
            self.at_start = full_optimizer_state(self.trainer.strategy, self.trainer.optimizers[0])


def _loaded_early(strategy: str, tmp: str, kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """An optimizer's state when a fit begins, and that which was saved."""
    path, options = str(Path(tmp, "run.ckpt")), {"state_dict_type": kind}
    run = new_trainer(tmp, strategy, 2, options)
    run.fit(LoadsEarly(None), loader(2, 2))
    saved = full_optimizer_state(run.strategy, run.optimizers[0])
    run.save_checkpoint(path)
    module = LoadsEarly(path)
    new_trainer(tmp, strategy, 2, options).fit(module, loader(2, 2))
    return {"model": {}, "optimizer": module.at_start}, {"model": {}, "optimizer": saved}


class Growing(nn.Module):
    """Has a buffer that grows in each step, as vocabularies do, and is resized as it is loaded."""

    seen: Tensor

    def __init__(self, *, resizes: bool) -> None:
        super().__init__()
        self.resizes = resizes
        self.register_buffer("seen", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = torch.cat([self.seen, x.new_ones(1)])
        return x

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        if self.resizes and f"{prefix}seen" in state_dict:
            self.seen = torch.empty_like(state_dict[f"{prefix}seen"], device=self.seen.device)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


class Grows(Lit):
    """Counts its steps in a buffer that grows."""

    def __init__(self, *, resizes: bool = True) -> None:
        super().__init__()
        self.growing = Growing(resizes=resizes)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        return super().training_step((self.growing(batch[0]), batch[1]), batch_idx)


def _grown(strategy: str, tmp: str, kind: str) -> tuple[Tensor, str]:
    """The buffer after a fit of two steps that is resumed for two, and what is said where it is not resized."""
    path, options = str(Path(tmp, "run.ckpt")), {"state_dict_type": kind}
    run = new_trainer(tmp, strategy, 2, options)
    run.fit(Grows(), loader(2, 2))
    run.save_checkpoint(path)
    module = Grows()
    new_trainer(tmp, strategy, 2, options, max_epochs=2).fit(module, loader(2, 2), ckpt_path=path)
    stiff = new_trainer(tmp, strategy, 2, options, max_epochs=2)
    told = refusal(CheckpointMismatchError, lambda: stiff.fit(Grows(resizes=False), loader(2, 2), ckpt_path=path))
    return module.growing.seen.cpu(), told


def _cast_for_a_test(strategy: str, tmp: str) -> tuple[list[str], dict[str, Tensor], dict[str, Tensor]]:
    """What is told where a checkpoint in fp32 is tested in bf16, its weights, and those that are tested."""
    path = str(Path(tmp, "run.ckpt"))
    run = new_trainer(tmp, strategy, 2)
    run.fit(Lit(), loader(2, 2))
    run.save_checkpoint(path)
    saved = full_state(run.strategy)
    run = new_trainer(tmp, strategy, 2, precision="bf16-true")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.test(Lit(), loader(2, 2), ckpt_path=path, verbose=False)
    told = [str(one.message) for one in caught if "are cast as they are loaded" in str(one.message)]
    return told, saved, full_state(run.strategy)


class ResumeMomentsSuite(Clauses):
    """The same whenever a checkpoint is saved, and whatever loaders draw: what adapters keep of Lightning's loops."""

    @pytest.mark.parametrize("moment", [moment for moment in MOMENTS if moment not in BACKEND_MOMENTS])
    def test_resume_at_any_moment(self, ranks: Ranks, tmp_path: Path, moment: str) -> None:
        """A resumed run must repeat the uninterrupted one bit for bit, whenever the checkpoint was saved."""
        for whole, resumed in ranks.run(2, continued, self.strategy, str(tmp_path), moment, {}):
            assert_same(resumed, whole)

    @on_ranks("processes", "one controller")  # threads draw from one generator, in any order
    @pytest.mark.parametrize("moment", BETWEEN_EPOCHS)
    def test_order_and_seeds_that_loaders_draw(self, ranks: Ranks, tmp_path: Path, moment: str) -> None:
        """Shuffling and worker seeds that a loader draws itself must be the same after a resume."""
        for whole, resumed in ranks.run(2, continued, self.strategy, str(tmp_path), moment, {}, True):
            assert_same(resumed, whole)

    @pytest.mark.parametrize("kind", ["sharded", "full"])
    def test_buffers_that_a_module_resizes_as_it_loads(self, ranks: Ranks, tmp_path: Path, kind: str) -> None:
        """As observers and vocabularies do. One that does not resize them must be refused."""
        for seen, told in ranks.run(2, _grown, self.strategy, str(tmp_path), kind):
            assert torch.equal(seen, torch.ones(4))
            assert_says(told, "growing.seen", "Load it into the model that it was saved from")

    def test_another_precision_is_cast_for_an_evaluation(self, ranks: Ranks, tmp_path: Path) -> None:
        """And told once; a fit, which would not go on as it was, must not be resumed so."""
        for rank, (told, saved, tested) in enumerate(ranks.run(2, _cast_for_a_test, self.strategy, str(tmp_path))):
            assert len(told) == (rank == 0 or ranks.kind == "one controller"), (
                f"rank {rank} was told {len(told)} times that weights are cast"
            )
            assert tested.keys() == saved.keys()
            for name, tensor in saved.items():
                assert torch.equal(tested[name], tensor.to(tested[name].dtype)), name
            assert torch.bfloat16 in {tensor.dtype for tensor in tested.values()}

    @pytest.mark.parametrize("kind", ["sharded", "full"])
    def test_optimizer_states_that_come_before_the_optimizers(self, ranks: Ranks, tmp_path: Path, kind: str) -> None:
        """``strategy.load_optimizer_state_dict`` may be called in ``configure_model``: it waits for the optimizers."""
        for loaded, saved in ranks.run(2, _loaded_early, self.strategy, str(tmp_path), kind):
            assert_bit_equal(loaded, saved)

    def test_saving_and_validating_change_nothing(self, ranks: Ranks, tmp_path: Path) -> None:
        """Saving a checkpoint, and validating within an epoch, must not change training."""
        for never, amid_step, amid_epoch in ranks.run(2, _saved_or_not, self.strategy, str(tmp_path)):
            assert_same(amid_step, never)  # validates only after the epoch
            assert_same(amid_epoch, never)

    @on_ranks("processes", "one controller")  # threads have one list of warnings
    def test_fabric_says_what_a_save_leaves_out(self, ranks: Ranks, tmp_path: Path) -> None:
        """``fabric.save`` must warn, on rank 0, if it leaves out accumulated gradients."""
        on_first, *on_others = each_ranks(ranks, ranks.run(2, _warnings, self.strategy, str(tmp_path)))
        assert len(on_first) == 1, f"rank 0 gave {len(on_first)} warnings instead of one: {on_first}"
        assert not any(on_others)
