"""The position of the dataloader in a checkpoint: which samples a resumed run sees, on any world size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from adapter_clauses.loader_runs import (
    FULL,
    TWO_EPOCHS,
    Run,
    Seen,
    assert_sees,
    divided_by_hand,
    fabric_epochs,
    fabric_leaves_out,
    fabric_refused,
    fit,
    in_turns,
    order_of,
    refused,
    steps_after,
)
from fsdp_core.testing import Ranks
from fsdp_core.testing.refusals import assert_says
from fsdp_core.testing.suite.base_class import Clauses, each_ranks, on_ranks, shares_of

__all__ = ["LoaderPositionsSuite"]


class LoaderPositionsSuite(Clauses):
    """A resumed run sees the remaining samples once each."""

    def _fit_of(self, ranks: Ranks, tmp_path: Path, world_size: int, run: Run) -> list[Seen]:
        return each_ranks(ranks, ranks.run(world_size, fit, self.strategy, str(tmp_path), world_size, run))

    @pytest.mark.parametrize(
        ("saved_on", "loaded_on", "run", "following"),
        [
            pytest.param(2, 2, Run(), {}, id="same"),
            pytest.param(2, 3, Run(), {}, id="more"),
            pytest.param(3, 2, Run(size=25, batch=3), {}, id="fewer, uneven"),
            pytest.param(4, 1, Run(size=23), {"batch": 3}, id="one, other batches"),
            pytest.param(1, 4, Run(size=21, batch=3), {}, id="from one, uneven"),
            pytest.param(2, 2, Run(workers=2), {"workers": 0, "seed": 5}, id="other workers, another seed"),
            pytest.param(2, 1, Run(data="stateful, persistent", workers=2), {}, id="persistent workers"),
            pytest.param(3, 2, Run(data="plain", size=26, workers=2), {}, id="plain, workers"),
            pytest.param(2, 3, Run(), {"asks_steps": True}, id="loaders made early"),
            pytest.param(2, 3, Run(options=FULL), {}, id="full"),
        ],
    )
    def test_what_is_left_of_an_epoch_is_divided(
        self, ranks: Ranks, tmp_path: Path, saved_on: int, loaded_on: int, run: Run, following: Mapping[str, Any]
    ) -> None:
        """A resumed run must see the epoch's remaining samples once each, in order, on any world size."""
        path = str(tmp_path / "saved")
        saving = replace(run, save=("batch end", 1, 1), path=path, trainer=TWO_EPOCHS)
        first = self._fit_of(ranks, tmp_path, saved_on, saving)
        assert_sees(first, 1, run.size)
        resumed = self._fit_of(ranks, tmp_path, loaded_on, replace(run, resume=path, **following))
        assert {step.epoch for step in resumed[0].steps} == {1, 2}
        assert_sees(resumed, 1, run.size, begins=2 * shares_of(ranks, saved_on) * run.batch)
        assert_sees(resumed, 2, run.size)

    @on_ranks("processes", "threads")  # data are divided between them
    def test_divided_again(self, ranks: Ranks, tmp_path: Path) -> None:
        """A run that was resumed within an epoch must be resumable again, on another world size."""
        run, one, two = Run(size=40), str(tmp_path / "one"), str(tmp_path / "two")
        self._fit_of(ranks, tmp_path, 2, replace(run, save=("batch end", 1, 1), path=one, trainer=TWO_EPOCHS))
        # 8 of 40 samples are seen; to 3 ranks with batches of 3, that is less than one of 5 batches
        third: Any = {"resume": one, "save": ("batch end", 1, 2), "path": two, "trainer": TWO_EPOCHS}
        again = replace(run, batch=3, workers=2, **third)
        assert_sees(self._fit_of(ranks, tmp_path, 3, again), 1, 40, begins=8)
        last = self._fit_of(ranks, tmp_path, 1, replace(run, resume=two))
        assert_sees(last, 1, 40, begins=8 + 2 * 3 * 3)
        assert_sees(last, 2, 40)

    @on_ranks("processes", "threads")  # data are divided between them
    @pytest.mark.parametrize(
        ("data", "save", "trainer"),
        [
            ("stateful", ("validation end", 1, 2), {"val_check_interval": 3}),
            ("stateful", ("batch end", 1, 5), {}),
            ("stateful", ("validation end", 1, 5), {}),
            ("stateful", ("epoch end", 0, 5), {}),
            ("stateful", ("epoch end", 0, 5), {"max_steps": 18}),
            ("stateful", ("epoch start", 1, 5), {}),
            ("stream", ("validation end", 1, 2), {"val_check_interval": 3}),
            ("stream", ("batch end", 1, 5), {}),
            ("stream", ("epoch end", 0, 5), {}),
        ],
        ids=lambda value: None if isinstance(value, str) else " ".join(map(str, value)),
    )
    def test_every_moment(
        self, ranks: Ranks, tmp_path: Path, data: str, save: tuple[str, int, int], trainer: Mapping[str, Any]
    ) -> None:
        """On the same world size, a resumed run must see what the first one saw, whenever the checkpoint was saved."""
        path = str(tmp_path / "saved")
        run = Run(data=data, trainer=trainer)
        first = self._fit_of(ranks, tmp_path, 2, replace(run, save=save, path=path))
        resumed = self._fit_of(ranks, tmp_path, 2, replace(run, resume=path))
        assert [rank.steps for rank in resumed] == [steps_after(rank, save) for rank in first]
        if save[2] == 5:  # the epoch is over, so another world size can start the next one, with any data
            others = self._fit_of(ranks, tmp_path, 3, replace(run, resume=path))
            assert {step.epoch for step in others[0].steps} == {step.epoch for step in resumed[0].steps}
            if data == "stateful":
                assert_sees(others, 2, run.size)

    @on_ranks("processes", "threads")  # data are divided between them
    def test_saved_after_a_fit_that_stopped_amid_an_epoch(self, ranks: Ranks, tmp_path: Path) -> None:
        """A checkpoint saved after ``max_steps`` ended a fit must hold the position within the epoch."""
        path = str(tmp_path / "saved")
        self._fit_of(ranks, tmp_path, 2, Run(data="plain", path=path, trainer={"max_steps": 8}))
        resumed = self._fit_of(ranks, tmp_path, 3, Run(data="plain", resume=path))
        assert_sees(resumed, 1, 24, begins=2 * 2 * 2)
        assert_sees(resumed, 2, 24)

    @on_ranks("processes", "threads")  # data are divided between them
    def test_batch_of_a_step_that_failed_comes_again(self, ranks: Ranks, tmp_path: Path) -> None:
        """A checkpoint saved in ``on_exception`` must make the resumed run repeat the batch of the failed step."""
        path = str(tmp_path / "saved")
        self._fit_of(ranks, tmp_path, 2, Run(fails=(1, 3), path=path))
        resumed = self._fit_of(ranks, tmp_path, 3, Run(resume=path))
        assert_sees(resumed, 1, 24, begins=3 * 2 * 2)
        assert_sees(resumed, 2, 24)

    @on_ranks("processes", "threads")  # data are divided between them
    def test_lightning_validates_at_its_count_of_batches(self, ranks: Ranks, tmp_path: Path) -> None:
        """On another world size, ``val_check_interval`` must count the batches of an epoch on that world size.

        The same loader object serves training and validation, of which the former's position alone counts.
        """
        path = str(tmp_path / "saved")
        run = Run(size=48, validates_on_it=True, trainer={"val_check_interval": 4})
        saving = replace(run, save=("batch end", 1, 4), path=path, trainer={**TWO_EPOCHS, "val_check_interval": 4})
        self._fit_of(ranks, tmp_path, 2, saving)
        # 20 of 48 samples are seen: 3 ranks have 5 of 8 batches left
        resumed = self._fit_of(ranks, tmp_path, 3, replace(run, resume=path))
        assert_sees(resumed, 1, 48, begins=20)
        assert list(dict.fromkeys(resumed[0].validated)) == [(1, 3), (1, 7), (2, 3), (2, 7)]

    @on_ranks("processes", "threads")  # data are divided between them
    @pytest.mark.parametrize("loaded_on", [2, 3])
    def test_limited_epochs_and_smaller_batches_left_out(self, ranks: Ranks, tmp_path: Path, loaded_on: int) -> None:
        """``limit_train_batches`` and ``drop_last`` must apply to the resumed epoch."""
        path, limit = str(tmp_path / "saved"), {"limit_train_batches": 6}
        run = Run(size=50, drop_last=True, trainer=limit)
        saving = replace(run, save=("batch end", 1, 2), path=path, trainer={**TWO_EPOCHS, **limit})
        self._fit_of(ranks, tmp_path, 2, saving)
        resumed = self._fit_of(ranks, tmp_path, loaded_on, replace(run, resume=path))
        left = {2: 3, 3: 4}[loaded_on]  # 12 samples are seen: as many as 3 batches of 2 ranks or 2 of 3
        seen = in_turns([[step.samples for step in rank.steps if step.epoch == 1] for rank in resumed])
        assert seen == order_of(1, 50)[12 : 12 + left * 2 * loaded_on]
        assert [step.batch for step in resumed[0].steps if step.epoch == 1] == list(range(6 - left, 6))
        whole = in_turns([[step.samples for step in rank.steps if step.epoch == 2] for rank in resumed])
        assert whole == order_of(2, 50)[: 6 * 2 * loaded_on]

    @on_ranks("processes", "threads")  # data are divided between them
    @pytest.mark.parametrize("loaded_on", [2, 3])
    def test_each_of_two_loaders_has_its_own(self, ranks: Ranks, tmp_path: Path, loaded_on: int) -> None:
        """Each of two dataloaders must resume at its own position, also one that has started again."""
        path, run = str(tmp_path / "saved"), Run(data="two")
        self._fit_of(ranks, tmp_path, 2, replace(run, save=("batch end", 1, 3), path=path, trainer=TWO_EPOCHS))
        resumed = self._fit_of(ranks, tmp_path, loaded_on, replace(run, resume=path))
        assert_sees(resumed, 1, 24, begins=16)
        short = in_turns([[step.short for step in rank.steps if step.epoch == 1] for rank in resumed])
        order = order_of(1, 12)
        assert short == {2: order[4:12], 3: order[4:12] + order[:1]}[loaded_on]

    @on_ranks("processes", "threads")  # data are divided between them
    @pytest.mark.parametrize(
        "run",
        [Run(data="stream"), Run(data="stream", workers=2), Run(data="counting"), Run(data="own sampler")],
        ids=["stream", "stream with workers", "counting", "own sampler"],
    )
    def test_state_of_each_rank(self, ranks: Ranks, tmp_path: Path, run: Run) -> None:
        """A loader with a state per rank must resume exactly on as many ranks, and be refused on others."""
        path, save = str(tmp_path / "saved"), ("batch end", 1, 1)
        first = self._fit_of(ranks, tmp_path, 2, replace(run, save=save, path=path))
        resumed = self._fit_of(ranks, tmp_path, 2, replace(run, resume=path))
        assert [rank.steps for rank in resumed] == [steps_after(rank, save) for rank in first]
        assert resumed[0].steps[0].samples != resumed[1].steps[0].samples
        other = (3, refused, self.strategy, str(tmp_path), 3, replace(run, resume=path))
        for message in ranks.run(*other):
            assert_says(message, "over 3 ranks", "StatefulDataLoader over", "on 2", "Resume on 2", "end of an epoch")

    @on_ranks("processes", "threads")  # data are divided between them
    def test_another_dataset(self, ranks: Ranks, tmp_path: Path) -> None:
        """Within an epoch, a dataset of another size must be refused; at the end of an epoch it must work."""
        path = str(tmp_path / "saved")
        self._fit_of(ranks, tmp_path, 2, Run(save=("batch end", 1, 1), path=path, trainer=TWO_EPOCHS))
        run = Run(size=30, resume=path)
        for message in ranks.run(2, refused, self.strategy, str(tmp_path), 2, run):
            assert_says(message, "24 samples", "now has 30", "same dataset", "end of an epoch")
        self._fit_of(ranks, tmp_path, 2, Run(save=("epoch end", 0, 5), path=path, trainer=TWO_EPOCHS))
        assert_sees(self._fit_of(ranks, tmp_path, 2, run), 1, 30)

    def test_samples_divided_by_hand(self, ranks: Ranks, tmp_path: Path) -> None:
        """A loader without a position must train the rest of the epoch from its first samples, with a warning."""
        results = ranks.run(2, divided_by_hand, self.strategy, str(tmp_path))
        assert [batches for batches, _ in each_ranks(ranks, results)] == [3] * len(each_ranks(ranks, results))
        texts = [text for _, warnings in results for text in warnings]
        assert any("does not hold the position of the data loader" in text for text in texts)

    @pytest.mark.parametrize(
        ("data", "words"),
        [
            ("counted", "Counted, the sampler of StatefulDataLoader over Numbered, has no state"),
            ("counted batches", "Counted, the sampler of StatefulDataLoader over Numbered, has no state"),
            ("one of two", "does not hold the position of the data loader (Unstateful)"),
        ],
    )
    def test_what_a_loader_can_not_restore_is_told(self, ranks: Ranks, tmp_path: Path, data: str, words: str) -> None:
        """If an epoch can't go on with the samples that were left, the user must be warned, and told what to write."""
        path = str(tmp_path / "saved")
        run = Run(data=data, trainer={**TWO_EPOCHS, "use_distributed_sampler": data == "one of two"})
        self._fit_of(ranks, tmp_path, 2, replace(run, save=("batch end", 1, 1), path=path))
        resumed = self._fit_of(ranks, tmp_path, 2, replace(run, resume=path))
        texts = [text for rank in resumed for text in rank.warnings if words in text]
        assert texts, resumed[0].warnings
        assert "state_dict() and load_state_dict()" in texts[0]

    @on_ranks("processes", "threads")  # data are divided between them
    def test_checkpoint_of_a_plain_trainer(self, ranks: Ranks, tmp_path: Path) -> None:
        """From an unsharded Trainer, a plain loader must resume with a warning; a stateful one must be refused."""
        path = str(tmp_path / "plain.ckpt")
        fit("auto", str(tmp_path), 1, Run(data="plain", save=("batch end", 1, 1), path=path))
        resumed = self._fit_of(ranks, tmp_path, 2, Run(data="plain", resume=path))
        telling = resumed if ranks.kind == "threads" else resumed[:1]  # threads have one list of warnings
        texts = [text for rank in telling for text in rank.warnings]
        assert any("does not hold the position of the data loader" in text for text in texts)
        fit("auto", str(tmp_path), 1, Run(save=("batch end", 1, 1), path=path))
        for world_size, words in ((1, "does not tell which samples"), (2, "over 2 ranks")):
            run = (world_size, refused, self.strategy, str(tmp_path), world_size, Run(resume=path))
            assert_says(ranks.run(*run)[0], words, "end of an epoch")

    @pytest.mark.parametrize(
        ("saved_on", "loaded_on", "run"),
        [
            pytest.param(2, 2, Run(), id="same"),
            pytest.param(2, 3, Run(workers=2), id="more, workers"),
            pytest.param(3, 1, Run(size=25, options=FULL), id="one, full"),
        ],
    )
    def test_what_is_left_of_an_epoch_under_fabric(
        self, ranks: Ranks, tmp_path: Path, saved_on: int, loaded_on: int, run: Run
    ) -> None:
        """Under Fabric, a resumed run must see the epoch's remaining samples once each, in order, on any world size."""
        path, size = str(tmp_path / "saved"), run.size
        kwargs = (self.strategy, saved_on, replace(run, path=path), [0, 1], 2)
        first = each_ranks(ranks, ranks.run(saved_on, fabric_epochs, *kwargs))
        begins = 2 * shares_of(ranks, saved_on) * run.batch
        assert in_turns([rank[1] for rank in first]) == order_of(1, size)[:begins]
        run = replace(run, resume=path)
        resumed = each_ranks(ranks, ranks.run(loaded_on, fabric_epochs, self.strategy, loaded_on, run, [1, 2]))
        for epoch, begin in ((1, begins), (2, 0)):
            order, repeated = order_of(epoch, size), -(size - begin) % len(resumed)
            assert in_turns([rank[epoch - 1] for rank in resumed]) == order[begin:] + order[:repeated]

    @on_ranks("processes", "threads")  # data are divided between them
    def test_fabric_at_the_end_of_an_epoch(self, ranks: Ranks, tmp_path: Path) -> None:
        """Under Fabric, a checkpoint saved between epochs must resume on any world size, with the next epoch."""
        path = str(tmp_path / "saved")
        ranks.run(2, fabric_epochs, self.strategy, 2, Run(path=path), [0, 1])
        resumed = ranks.run(3, fabric_epochs, self.strategy, 3, Run(resume=path), [2])
        assert in_turns([rank[0] for rank in resumed]) == order_of(2, 24)
        ranks.run(2, fabric_epochs, self.strategy, 2, Run(data="stream", path=path), [0])
        fresh = ranks.run(3, fabric_epochs, self.strategy, 3, Run(data="stream"), [0])
        assert ranks.run(3, fabric_epochs, self.strategy, 3, Run(data="stream", resume=path), [0]) == fresh

    @on_ranks("processes", "threads")  # data are divided between them
    @pytest.mark.parametrize("workers", [0, 2])
    def test_fabric_state_of_each_rank(self, ranks: Ranks, tmp_path: Path, workers: int) -> None:
        """Under Fabric, a loader with a state per rank must resume on as many ranks, and be refused on others."""
        path, run = str(tmp_path / "saved"), Run(data="stream", workers=workers)
        whole = ranks.run(2, fabric_epochs, self.strategy, 2, run, [0, 1])
        ranks.run(2, fabric_epochs, self.strategy, 2, replace(run, path=path), [0, 1], 2)
        resumed = ranks.run(2, fabric_epochs, self.strategy, 2, replace(run, resume=path), [1])
        assert [rank[0] for rank in resumed] == [rank[1][2:] for rank in whole]
        for message in ranks.run(3, fabric_refused, self.strategy, 3, replace(run, resume=path)):
            assert_says(message, "over 3 ranks", "StatefulDataLoader over Stream", "Resume on 2")

    def test_fabric_needs_a_loader_that_tells(self, ranks: Ranks, tmp_path: Path) -> None:
        """Under Fabric, a loader without a state must be left out of checkpoints, with one warning."""
        plain = Run(data="plain", path=str(tmp_path / "saved"), resume=str(tmp_path / "saved"))
        said = each_ranks(ranks, ranks.run(2, fabric_leaves_out, self.strategy, 2, plain))
        (warning,) = [one for rank in said for one in rank]
        assert_says(warning, "'loader' is left out of checkpoints: under Fabric a DataLoader", "StatefulDataLoader")
        ranks.run(2, fabric_epochs, self.strategy, 2, replace(plain, data="stateful", resume=None), [0])
        for message in ranks.run(2, fabric_refused, self.strategy, 2, plain):
            assert_says(message, "a loader's position, which a DataLoader can't restore", "StatefulDataLoader")
