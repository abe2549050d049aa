"""A rehearsal: memory of operations, values that are known or assumed, scripts whose fit is caught, and the command."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from textwrap import dedent
from types import ModuleType
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities import grad_norm
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import _functional_collectives as functional_collectives
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.data import DataLoader

from fsdp_core.cli import fsdp, scripts
from fsdp_core.cli.rehearse import rehearse
from fsdp_core.errors import ShardingError
from fsdp_core.rehearsal.auto_strategy import AutoStrategy
from fsdp_core.rehearsal.candidates import Candidate, candidate_of, candidates_for
from fsdp_core.rehearsal.collectives import Collective, total_sent
from fsdp_core.rehearsal.fit import RehearsedRun, rehearse_fit
from fsdp_core.rehearsal.imagined_ranks import imagined_world
from fsdp_core.rehearsal.known_values import KnownValues
from fsdp_core.rehearsal.memory import MemoryMode
from fsdp_core.rehearsal.modules_on_fakes import fakes_allowed
from fsdp_core.rehearsal.picture import curve_of
from fsdp_core.rehearsal.planning import Outcome, ranked, rehearse_candidate
from fsdp_core.rehearsal.script import CaughtFit, run_script
from fsdp_core.rehearsal.traffic import UnitCalls, UnitTraffic, compare_traffic, expected_collectives
from fsdp_core.sizes import parse_size
from fsdp_core.testing.refusals import assert_says

# -- memory ------------------------------------------------------------------------------------------------------------


def test_memory_of_operations() -> None:
    with MemoryMode() as memory:
        memory.take([weight := torch.ones(4)], "parameters")
        memory.begin_step()
        memory.phase = "forward"
        activation = weight * 2
        view = activation[:2]
        memory.phase, memory.module = "backward", "blocks.1"
        gradient = torch.zeros(4)
        del activation
        assert memory.step.changes[-1].delta > 0  # the view still holds the storage
        del view
        memory.take([gradient], "gradients")
        gradient.untyped_storage().resize_(0)
    peak = memory.step.peak("cpu")
    assert (peak.nbytes, peak.phase, peak.module) == (48, "backward", "blocks.1")
    assert peak.by_content == {"parameters": 16, "activations": 16, "gathered parameters": 16}  # as it was resized
    *_, (_, _, _, left) = memory.step.curve("cpu")
    assert {content: nbytes for content, nbytes in left.items() if nbytes} == {"parameters": 16}


def test_a_view_does_not_refill_a_storage_that_was_freed() -> None:
    with FakeTensorMode(), MemoryMode() as memory:
        weight = torch.empty(4)
        weight.view_as(weight)  # so that the fake mode knows the operation, and lays out the next view by itself
        memory.begin_step()
        weight.untyped_storage().resize_(0)
        weight.view_as(weight)
        assert weight.untyped_storage().nbytes() == 0
    assert [change.delta for change in memory.step.changes] == [-16]


@pytest.mark.parametrize(
    ("name", "sent"),
    [("all-gather", 75), ("reduce-scatter", 75), ("all-reduce", 150), ("broadcast", 100), ("all-to-all", 75)],
)
def test_bytes_that_a_rank_sends(name: Any, sent: int) -> None:
    one = Collective(name, nbytes=100, ranks=4, device="cpu")
    assert total_sent([one, one]) == {name: (2, 2 * sent)}
    assert Collective(name, nbytes=100, ranks=1, device="cpu").sent == 0


# -- the formula -------------------------------------------------------------------------------------------------------


def test_collectives_are_noticed_with_their_bytes() -> None:
    shard, full = torch.ones(4), torch.ones(16)
    with imagined_world(1, 4), MemoryMode(reduces_in_a_copy=True) as memory:
        memory.begin_step()
        dist.all_gather_into_tensor(full, shard)
        dist.all_gather(list(full.chunk(4)), shard)
        dist.reduce_scatter_tensor(shard, full)
        dist.all_reduce(full)
        dist.broadcast(full, 0)
        dist.all_to_all_single(full, full)
        dist.scatter(shard, None, 0)
        dist.gather(shard, None, 0)
        dist.send(shard, 2)
        dist.recv(shard, 0)
        functional_collectives.all_gather_tensor(shard, 0, dist.group.WORLD).sum()
        dist.barrier()
    names = [collective.name for collective in memory.step.collectives]
    nbytes = [collective.nbytes for collective in memory.step.collectives]
    by_name = (
        "all-gather",
        "all-gather",
        "reduce-scatter",
        "all-reduce",
        "broadcast",
        "all-to-all",
        "scatter",
        "gather",
    )
    assert names == [*by_name, "send", "receive", "all-gather"]
    assert nbytes == [64] * 6 + [16] * 4 + [64]
    assert {collective.ranks for collective in memory.step.collectives} == {4}
    assert sum(change.delta for change in memory.step.changes if change.delta > 0) >= 3 * 64  # two met, and a copy
    assert {change.allocation.content for change in memory.step.changes} >= {"communication"}


def test_a_recomputed_unit_allocates_activations() -> None:
    with MemoryMode() as memory:
        memory.phase = "backward"
        memory.begin_step()
        memory.recomputing = True
        kept = torch.ones(4)
        memory.recomputing = False
        memory.end_step()
        later = torch.ones(4)
    assert memory.step.peak("cpu").by_content == {"activations": 16}
    del kept, later


def test_a_difference_from_the_formula_is_told_with_the_unit() -> None:
    unit = UnitTraffic(
        name="block", numel=10, gathered_numel=12, gathered_nbytes=48, reduced_nbytes=24, ranks=4, ranks_in_backward=4
    )
    root = UnitTraffic(name="", numel=3, gathered_numel=4, gathered_nbytes=16, reduced_nbytes=0, ranks=4)
    expected = expected_collectives([unit, root], {"block": UnitCalls(forwards=2, with_gradients=2)}, 2, 1)
    assert expected == {
        ("all-gather", 48, 4): {"block": 4},
        ("reduce-scatter", 24, 4): {"block": 1},
        ("all-gather", 16, 4): {"the root": 2},
    }
    counted = [
        *[Collective("all-gather", nbytes=48, ranks=4, device="cpu")] * 3,
        *[Collective("all-gather", nbytes=16, ranks=4, device="cpu")] * 2,
        Collective("reduce-scatter", nbytes=24, ranks=4, device="cpu"),
        Collective("reduce-scatter", nbytes=99, ranks=4, device="cpu"),
        Collective("all-reduce", nbytes=4, ranks=4, device="cpu"),
        Collective("all-gather", nbytes=4, ranks=1, device="cpu"),
    ]
    differences, beside = compare_traffic(expected, counted)
    assert [(d.name, d.units, d.expected, d.counted) for d in differences] == [
        ("all-gather", ("block",), 4, 3),
        ("reduce-scatter", (), 0, 1),
    ]
    assert [collective.name for collective in beside] == ["all-reduce"]


def test_units_that_stay_gathered_between_batches_and_replicas() -> None:
    unit = UnitTraffic(
        name="",
        numel=4,
        gathered_numel=4,
        gathered_nbytes=16,
        reduced_nbytes=16,
        ranks=2,
        replicas=3,
        keeps_between_batches=True,
        is_flat=True,
    )
    assert expected_collectives([unit], {}, 4, 1) == {
        ("all-gather", 16, 2): {"the root": 1},
        ("reduce-scatter", 16, 2): {"the root": 1},
        ("all-reduce", 8, 3): {"the root": 1},
    }


# -- values ------------------------------------------------------------------------------------------------------------

KNOWN = torch.tensor([3, 0, 5, 5])

#: By name: what is asked of a tensor of integers that is known, and of one of floats, which is not; the answer to each.
QUESTIONS: dict[str, tuple[Callable[[Tensor], Any], Any, Any]] = {
    "item": (lambda x: x.max().item(), 5, 1.0),
    "condition": (lambda x: bool((x > 4).any()), True, False),
    "finite": (lambda x: bool(torch.isfinite(x).all()), True, True),
    "not finite": (lambda x: bool(torch.logical_or(x.isnan(), x.isinf()).any()), False, False),
    "infinite": (lambda x: bool(x.isposinf().any()), False, False),
    "comparison": (lambda x: bool(x.sum() > 12), True, True),
    "nonzero": (lambda x: len(x.nonzero()), 3, 4),
    "mask": (lambda x: tuple(x[x > 3].shape), (2,), (4,)),
    "mask of a dimension": (lambda x: tuple(torch.zeros(4, 7)[x > 3].shape), (2, 7), (4, 7)),
    "masked_select": (lambda x: len(x.masked_select(x > 3)), 2, 4),
    "unique": (lambda x: len(x.unique()), 3, 4),
    "equal": (lambda x: torch.equal(x, x + 0), True, True),
    "list": (lambda x: x.tolist(), [3, 0, 5, 5], [1.0] * 4),
    "array": (lambda x: x.detach().numpy().sum(), 13, 0.0),
    "written": (lambda x: x.clone().fill_(2).sum().item(), 8, 1.0),
    "counts": (
        lambda x: len(x.bincount(minlength=4) if x.dtype == torch.int64 else x.long().bincount(minlength=4)),
        6,
        4,
    ),
    "repetitions": (lambda x: len(torch.arange(4).repeat_interleave(x.long())), 13, 4),
}


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("name", QUESTIONS)
def test_integers_are_computed_and_floats_assumed(name: str, is_known: bool) -> None:
    ask, known, assumed = QUESTIONS[name]
    values = KnownValues()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    real = KNOWN if is_known else KNOWN.float()
    with mode, values:
        fake = mode.from_tensor(real)
        values.know(fake, real)
        assert ask(fake) == (known if is_known else assumed)
    is_assumed = any(assumption.location.startswith(__file__) for assumption in values.assumptions)
    assert is_assumed is (not is_known)


def test_what_is_written_to_a_known_tensor_is_not_written_to_the_users() -> None:
    values, mode = KnownValues(), FakeTensorMode(allow_non_fake_inputs=True)
    real = KNOWN.clone()
    with mode, values:
        fake = mode.from_tensor(real)
        values.know(fake, real)
        fake.fill_(7)
        assert fake.max().item() == 7
        assert torch.tensor([4]).item() == 4
    assert real.max() == 5


def test_products_of_groups_of_rows_have_their_shapes() -> None:
    with FakeTensorMode(), KnownValues():
        rows, ends = torch.ones(12, 8), torch.tensor([3, 12], dtype=torch.int32)
        assert torch.nn.functional.grouped_mm(rows, torch.ones(2, 8, 16), offs=ends).shape == (12, 16)
        assert torch.nn.functional.grouped_mm(rows.t(), torch.ones(12, 16), offs=ends).shape == (2, 8, 16)
        assert torch.nn.functional.grouped_mm(torch.ones(2, 12, 8), torch.ones(2, 8, 16)).shape == (2, 12, 16)


def test_an_integer_that_floats_were_written_to_is_not_known_any_more() -> None:
    values = KnownValues()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, values:
        fake = mode.from_tensor(KNOWN)
        values.know(fake, KNOWN)
        fake.copy_(torch.rand(4))
        assert fake.max().item() == 1
        values.know(fake, KNOWN)
        torch.floor_divide(torch.randint(9, (4,)), 2, out=fake)
        assert fake.max().item() == 1
    assert values.assumptions


@pytest.mark.parametrize(("is_known", "rows"), [(True, 8), (False, 15)])
def test_sequences_are_packed_by_their_lengths(is_known: bool, rows: int) -> None:
    values = KnownValues()
    lengths = torch.tensor([5, 1, 2])
    recurrent = torch.nn.LSTM(4, 6, batch_first=True)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, fakes_allowed(values), values:
        fake_lengths = mode.from_tensor(lengths)
        if is_known:
            values.know(fake_lengths, lengths)
        packed = pack_padded_sequence(torch.rand(3, 5, 4), fake_lengths, batch_first=True, enforce_sorted=False)
        assert packed.data.shape == (rows, 4)
        output, unpacked_lengths = pad_packed_sequence(recurrent(packed)[0], batch_first=True)
        assert output.shape == (3, 5, 6)
        assert not is_known or unpacked_lengths.tolist() == [5, 1, 2]
        classes, targets = output.log_softmax(2).transpose(0, 1), torch.ones(3, 2, dtype=torch.long)
        loss = torch.nn.functional.ctc_loss(classes, targets, unpacked_lengths, torch.tensor([2, 1, 2]))
        loss.backward()
    assert bool(values.assumptions) is not is_known


def test_a_library_that_asks_for_fakes_is_told_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    library = ModuleType("transformers.utils.import_utils")
    vars(library)["is_fake_tensor"] = lambda tensor: True
    monkeypatch.setitem(sys.modules, library.__name__, library)
    with fakes_allowed(KnownValues()):
        assert not library.is_fake_tensor(None)
    assert library.is_fake_tensor(None)


def test_gradients_are_in_the_buckets_of_ddp_after_its_first_step() -> None:
    layers = [torch.nn.Linear(512, 512, bias=False) for _ in range(4)]  # of a MiB each
    with imagined_world(0, 2), fakes_allowed(KnownValues()), FakeTensorMode(allow_non_fake_inputs=True):
        module = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=2)
        with MemoryMode() as memory:
            memory.begin_step()
            module(torch.ones(1, 512)).sum().backward()
    sizes = [collective.nbytes >> 20 for collective in memory.step.collectives if collective.name == "all-reduce"]
    assert sizes == [1, 2, 1]  # the first bucket is small, and others have what their size allows


def test_imagined_ranks_give_the_objects_of_this_one() -> None:
    with fakes_allowed(KnownValues()):
        objects: list[Any] = [None, None]
        dist.all_gather_object(objects, {"loss": 1})
        assert objects == [{"loss": 1}] * 2
        dist.gather_object("here", objects)
        assert objects == ["here"] * 2
        dist.broadcast_object_list(objects)
        dist.scatter_object_list(objects, ["first", "second"])
        assert objects == ["first", "here"]


def test_a_random_number_is_taken_to_be_between_its_bounds() -> None:
    with FakeTensorMode(), KnownValues():
        assert torch.rand(1).item() == 0.5
        assert torch.empty(1).uniform_().item() == 0.5
        assert torch.empty(1).uniform_(2.0, 4.0).item() == 3.0
        assert torch.randint(3, (1,)).item() == 0
        assert torch.randint(2, 5, (1,)).item() == 2
        assert torch.randn(1).item() == 1


def test_a_loop_that_runs_until_a_value_is_small_ends() -> None:
    values = KnownValues()
    with FakeTensorMode(), values:
        error = torch.rand(1)
        times = 0
        while error > 0.1 and times < 20:
            times += 1
    assert 0 < times < 10


# -- scripts -----------------------------------------------------------------------------------------------------------

SCRIPT = """
import sys
import lightning as L, torch
from torch import nn
from torch.utils.data import DataLoader

class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
    def training_step(self, batch, batch_idx):
        loss = self.net(batch).square().mean()
        if torch.isnan(loss):
            raise ValueError("diverged")
        return loss
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters())
        steps = self.trainer.estimated_stepping_batches
        return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=int(steps))]

if __name__ == "__main__":
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    loader = DataLoader(torch.ones(32, 8), batch_size=int(sys.argv[1]))
    trainer = L.Trainer(max_epochs=3, strategy="ddp", devices=2, callbacks=[L.Callback()], **quiet)
    trainer.fit(Net(), loader)
    print("the script has ended")
"""


def written(folder: Path, source: str) -> str:
    path = folder / "train.py"
    path.write_text(dedent(source))
    return str(path)


def test_a_script_runs_up_to_its_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fits: list[Any] = []
    assert run_script(written(tmp_path, SCRIPT), ["4"], fits.append) is None
    (fit,) = fits
    assert type(fit.module).__name__ == "Net"
    assert fit.batch.shape == (4, 8)
    assert fit.batches == 8
    assert fit.left_out == ["Callback"]
    assert fit.location.endswith("train.py:25")
    assert fit.trainer_arguments == {"max_epochs": 3}
    assert "the script has ended" not in capsys.readouterr().out  # it may save there what was not trained


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("print(1)", ["ended before it has called Trainer.fit()", "Give the arguments"]),
        ("import sys; sys.exit(2)", ["ended with status 2"]),
        ("raise KeyError('data')", ["raised KeyError: 'data'", "train.py:1"]),
        ("import lightning as L\nL.Fabric()", ["ended before it has called Trainer.fit(), or setup() of a Fabric"]),
        (SCRIPT.replace("torch.ones(32, 8)", "torch.ones(0, 8)"), ["the train loader is empty"]),
        (
            SCRIPT.replace("DataLoader(torch.ones(32, 8), batch_size=int(sys.argv[1]))", "Slow()").replace(
                "class Net", "import time\nclass Slow:\n    def __iter__(self):\n        time.sleep(5)\n\nclass Net"
            ),
            ["has given no batch in 0.2 s", "--patience"],
        ),
    ],
)
def test_scripts_without_a_fit_to_rehearse(tmp_path: Path, source: str, words: list[str]) -> None:
    with pytest.raises(ShardingError) as raised:
        run_script(written(tmp_path, source), ["4"], lambda fit: None, patience=0.2)
    assert_says(str(raised.value), *words)


def test_a_script_that_is_not_there() -> None:
    with pytest.raises(ShardingError, match=r"there is no script 'trian\.py'"):
        run_script("trian.py", [], lambda fit: None)


def test_a_fit_is_caught_with_the_script_around_it(tmp_path: Path) -> None:
    path = written(
        tmp_path, SCRIPT.replace('    print("the script has ended")', "    trainer.callback_metrics['loss']")
    )
    fits: list[tuple[Any, list[str]]] = []
    failure = run_script(path, ["4"], lambda fit: fits.append((fit, sys.argv)), fits=2)
    assert failure == f"raised KeyError: 'loss' ({path}:26)"
    ((fit, arguments),) = fits
    assert arguments == [path, "4"]  # a step may read them
    assert not fit.callbacks


@pytest.mark.parametrize(
    ("loaders", "batches"),
    [
        ('{"a": loader, "b": loader}', 4),
        ("[loader, loader]", 4),
        ('CombinedLoader({"a": loader}, "min_size")', 4),
        ("({'x': x} for x in loader)", None),
    ],
)
def test_loaders_are_combined_as_in_a_fit(tmp_path: Path, loaders: str, batches: int | None) -> None:
    path = written(
        tmp_path,
        f"""import lightning as L, torch
from lightning.pytorch.utilities import CombinedLoader
loader = torch.utils.data.DataLoader(torch.ones(8, 3), batch_size=2)
L.Trainer(logger=False).fit(L.LightningModule(), {loaders})
""",
    )
    fits: list[CaughtFit] = []
    run_script(path, [], fits.append)
    (fit,) = fits
    tensors = list(fit.batch.values()) if isinstance(fit.batch, dict) else fit.batch
    assert [tensor.shape for tensor in tensors] == [(2, 3)] * len(tensors)
    assert fit.batches == batches


def test_large_weights_are_not_filled(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        """import lightning as L, torch
class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.large, self.small = torch.nn.Linear(2**19, 2**19), torch.nn.Linear(8, 8)
        self.scale = torch.nn.Parameter(torch.randn(2**19, 2**17) * 0.02)
        self.lookup = torch.nn.Embedding(2**19, 2**18).to(torch.bfloat16)
        self.count = int(torch.ones(2**19, dtype=torch.long).sum())
net = Net()
data = torch.ones(2**18)  # no module: it is filled
assert data.sum() == 2**18
L.Trainer(logger=False).fit(net, [torch.ones(8)])
""",
    )
    fits: list[CaughtFit] = []
    run_script(path, [], fits.append)
    module = fits[0].module
    assert module.large.weight.nbytes == 2**40  # more than any host has
    assert module.lookup.weight.dtype is torch.bfloat16
    assert module.small.weight.abs().max() > 0
    assert module.count == 2**19


def test_an_error_of_the_rehearsal_is_none_of_the_script(tmp_path: Path) -> None:
    def fail(fit: CaughtFit) -> None:
        raise ValueError("ours")

    with pytest.raises(ValueError, match="ours"):
        run_script(written(tmp_path, SCRIPT), ["4"], fail)


def test_lightning_cli_finds_the_trainers_arguments(tmp_path: Path) -> None:
    start = SCRIPT.partition('if __name__ == "__main__":')[0]
    path = written(
        tmp_path,
        f"""{start}
class Data(L.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(torch.ones(32, 8), batch_size=4)

from lightning.pytorch.cli import LightningCLI
LightningCLI(Net, Data)
""",
    )
    fits: list[Any] = []
    run_script(path, ["fit", "--trainer.max_epochs=3", "--trainer.logger=false"], fits.append)
    assert fits[0].trainer_arguments["max_epochs"] == 3


def test_an_optimizer_that_is_made_before_the_fit_follows_the_module() -> None:
    """LightningCLI makes one of ``--optimizer``."""
    net = Net()
    optimizer = torch.optim.Adam(net.parameters())
    net.configure_optimizers = lambda: {"optimizer": optimizer}  # type: ignore[method-assign]
    rehearsal = rehearse_fit(RehearsedRun(build=lambda: net, batch=torch.ones(4, 8), batches=10))
    assert rehearsal.step.peak("cpu").by_content["optimizer state"] >= 2 * 4 * rehearsal.numel


# -- a fit -------------------------------------------------------------------------------------------------------------


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(2)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.layers(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())

    def on_train_epoch_end(self) -> None:
        raise AssertionError("it may write files")


def fit_of(module: pl.LightningModule, *callbacks: pl.Callback, **arguments: Any) -> CaughtFit:
    given = {"callbacks": list(callbacks), **arguments}
    batch = torch.ones(4, 8)
    return CaughtFit(
        module=module,
        drawn=[batch],
        batches=9,
        datamodule=None,
        trainer_keywords=given,
        seconds_for_batch=0.0,
        location="train.py:1",
    )


class Frozen(BaseFinetuning):
    def freeze_before_training(self, module: pl.LightningModule) -> None:
        self.freeze(module.layers[0])

    def finetune_function(self, *args: Any) -> None:
        """Nothing thaws."""


class Counts(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("step", torch.tensor([2]))

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        assert int(self.step) == 2 + batch_idx
        self.step += 1
        return super().training_step(batch, batch_idx)


def test_integers_of_buffers_are_known() -> None:
    module = Counts()
    assert rehearse_candidate(fit_of(module), Candidate(strategy="auto")).error is None
    assert module.step == 2


def test_callbacks_that_change_training_take_part() -> None:
    fit = fit_of(Net(), Frozen(), pl.Callback())
    assert fit.left_out == ["Callback"]
    step = rehearse_candidate(fit, Candidate(strategy="auto"))
    assert step.error is None
    state_of_half = 2 * 4 * (8 * 8 + 8)
    assert state_of_half <= step.by_content["optimizer state"] < 1.5 * state_of_half


class TwoOptimizers(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            self.manual_backward(self.layers(batch).mean())
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(layer.parameters()) for layer in self.layers]


def test_a_batch_with_several_optimizers_is_one_step() -> None:
    outcome = rehearse_candidate(fit_of(TwoOptimizers()), Candidate(strategy="auto"))
    assert outcome.error is None
    assert outcome.by_content["optimizer state"] >= 2 * 4 * 2 * (8 * 8 + 8)
    assert outcome.by_content["parameters"] == 4 * 2 * (8 * 8 + 8)


class PrintsItsLoss(Net):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        assert f"{loss:.2f}" == "1.00"
        return loss


@torch.library.custom_op("rehearsed::double", mutates_args=())
def double(x: Tensor) -> Tensor:
    return 2 * x


class WithoutFake(Net):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return super().training_step(double(batch), batch_idx)


def test_a_loss_can_be_written_with_digits() -> None:
    assert rehearse_candidate(fit_of(PrintsItsLoss()), Candidate(strategy="auto")).error is None


def test_an_operator_without_a_fake_is_named_with_what_to_write() -> None:
    outcome = rehearse_candidate(fit_of(WithoutFake()), Candidate(strategy="auto"))
    assert_says(str(outcome.error), "rehearsed::double", "test_rehearsal.py:", "torch.library.register_fake")


class UsesItsFirstLayer(Net):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.layers[0](batch).square().mean()


@pytest.mark.parametrize(
    ("module", "arguments", "refused"),
    [
        (UsesItsFirstLayer, {}, ["DDP needs a gradient of each parameter", "none of layers.1.bias, layers.1.weight"]),
        (UsesItsFirstLayer, {"accumulate_grad_batches": 2}, ["DDP needs a gradient of each parameter"]),
        (Net, {"accumulate_grad_batches": 2}, []),
        (TwoOptimizers, {}, []),
    ],
)
def test_what_ddp_refuses_in_a_second_step_is_no_plan(
    module: type[Net], arguments: dict[str, Any], refused: list[str]
) -> None:
    outcome = rehearse_candidate(fit_of(module(), **arguments), Candidate(strategy="ddp", ranks=2))
    assert_says(str(outcome.error), *refused) if refused else None
    assert (outcome.error is None) == (not refused)


class Widens(pl.LightningDataModule):
    factor = 2

    def train_dataloader(self) -> Any:
        raise AssertionError("a batch was drawn before")

    def on_after_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Tensor:
        return batch.repeat(1, self.factor)


class UsesItsData(Net):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        assert len(self.trainer.train_dataloader.dataset) == 3
        return super().training_step(batch[:, : 4 * self.trainer.datamodule.factor], batch_idx)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self, norm_type=2))


def test_hooks_of_data_modules_and_attributes_of_loaders_are_there() -> None:
    fit = replace(fit_of(UsesItsData()), datamodule=Widens(), train_loader=DataLoader([1, 2, 3]))  # type: ignore[arg-type]
    assert rehearse_candidate(fit, Candidate(strategy="auto")).error is None


class Lazy(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers.append(torch.nn.LazyLinear(2))


def test_parameters_without_shapes_are_no_plan() -> None:
    outcome = rehearse_candidate(fit_of(Lazy()), Candidate(strategy="auto"))
    assert_says(str(outcome.error), "layers.2.weight has no shape yet", "call the module once before the fit")


def test_a_strategy_that_chooses_is_no_candidate() -> None:
    strategies = [candidate.as_written for candidate in candidates_for(2, Net(), AutoStrategy())[0]]
    assert set(strategies) == {None}
    with pytest.raises(ShardingError, match="Choose one: --strategy NAME"):
        candidate_of(AutoStrategy(), None, 2)


class LogsPictures(Net):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        for logger in self.loggers:
            logger.experiment.add_image("batch", batch, batch_idx)
        assert self.trainer.log_dir is not None  # a step may write beside the logs
        assert len(self.loggers) == 2
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


def test_a_step_may_use_the_loggers_which_log_nothing() -> None:
    loggers = [DummyLogger(), DummyLogger()]
    outcome = rehearse_candidate(
        fit_of(LogsPictures(), logger=loggers, log_every_n_steps=1), Candidate(strategy="auto")
    )
    assert outcome.error is None
    assert outcome.assumptions == []


def test_a_fit_without_a_step_is_no_plan() -> None:
    outcome = rehearse_candidate(fit_of(Net(), limit_train_batches=0), Candidate(strategy="auto"))
    assert_says(str(outcome.error), "ended without an optimizer step")


# -- the command -------------------------------------------------------------------------------------------------------


def run_plan(*words: str, status: int = 0) -> str:
    run = CliRunner().invoke(fsdp, ["plan", *words])
    assert run.exit_code == status, run.stderr
    return run.stdout


def test_plan_shows_what_a_script_needs(tmp_path: Path) -> None:
    path = written(tmp_path, SCRIPT)
    plan = json.loads(run_plan("--json", "--devices", "2", "--memory", "1GiB", path, "4"))
    (fit,) = plan["fits"]
    by_strategy = {row["strategy"]: row for row in fit["plans"]}
    numel = 8 * 64 + 64 + 64 + 1
    assert by_strategy["auto"]["parameters"] == numel
    assert by_strategy["auto"]["by_content"]["optimizer state"] >= 2 * 4 * numel
    assert by_strategy["ddp"]["calls"] == {"all-reduce": 1}
    assert all(row["fits"] for row in fit["plans"])
    assert by_strategy["ddp"]["assumptions"] == [["a condition is False", f"{path}:13", 2]]


def test_plan_of_a_card_shows_what_it_needs_beside_tensors(tmp_path: Path) -> None:
    path = written(tmp_path, SCRIPT)
    result = CliRunner().invoke(fsdp, ["plan", "--devices", "1", "--device", "cuda", "--memory", "700MB", path, "4"])
    assert result.exit_code == 0, result.output
    assert "by rules that no card has confirmed, the first needs beside its tensors: allocator 2.1 MB" in result.output
    result = CliRunner().invoke(fsdp, ["plan", "--devices", "1", "--device", "cuda", "--memory", "500MB", path, "4"])
    assert result.exit_code == 3, result.output


def test_plan_says_if_nothing_fits(tmp_path: Path) -> None:
    output = run_plan("--memory", "1kB", written(tmp_path, SCRIPT), "4", status=3)
    assert_says(output, "Nothing fits", "a smaller batch with accumulate_grad_batches", 'strategy="auto"')


def test_plan_expects_a_time(tmp_path: Path) -> None:
    output = run_plan("--json", "--time", "--devices", "2", written(tmp_path, SCRIPT), "4")
    for row in json.loads(output)["fits"][0]["plans"]:
        least, most = row["expected_seconds"]
        assert 0 < least < most


def test_plan_rehearses_how_few_rows_would_fit(tmp_path: Path) -> None:
    path = written(tmp_path, SCRIPT.replace("torch.ones(32, 8)", "torch.ones(4096, 8)"))
    whole, half = (
        json.loads(run_plan("--json", path, rows))["fits"][0]["plans"][0]["peak_bytes"] for rows in ("2048", "1024")
    )
    output = run_plan("--json", "--memory", f"{(whole + half) // 2}B", path, "2048", status=3)
    (change,) = json.loads(output)["fits"][0]["changes"]
    assert change["code"] == 'strategy="auto", batch_size / 2, accumulate_grad_batches=2'
    assert change["peak_bytes"] == pytest.approx(half, rel=0.01)
    assert change["fits"]


def test_rehearse_refuses_a_rank_that_is_none(tmp_path: Path) -> None:
    run = CliRunner().invoke(rehearse, ["--ranks", "4", "--rank", "4", written(tmp_path, SCRIPT)])
    assert run.exit_code == 2
    assert_says(run.output, "--rank 4 is none of 4 ranks")


def test_a_picture_needs_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    run = CliRunner().invoke(fsdp, ["plan", "--plot", str(tmp_path / "memory.svg"), written(tmp_path, SCRIPT), "4"])
    assert run.exit_code == 1
    assert_says(run.stderr, "a picture needs matplotlib", "pip install matplotlib")


@pytest.mark.parametrize("command", ["plan", "prove", "rehearse"])
def test_commands_that_run_scripts_need_torch(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scripts, "find_spec", lambda name: None)
    words = ["--ranks", "2"] if command == "rehearse" else []
    run = CliRunner().invoke(fsdp, [command, *words, "train.py"])
    assert run.exit_code == 1
    assert_says(run.stderr, "torch and lightning are not installed", "pip install fsdp-fsdp2")


def test_the_curve_of_a_step_has_its_peak() -> None:
    with MemoryMode() as memory:
        memory.begin_step()
        memory.phase = "forward"
        kept = torch.ones(4)
        memory.phase, memory.module = "backward", "blocks.0"
        del kept
    curve = curve_of(memory.step, "cpu")
    assert curve.by_content["activations"] == [0, 16, 0]
    assert [name for name, _ in curve.phases] == ["between", "forward", "backward"]
    assert [name for name, _ in curve.units] == ["blocks.0"]


@pytest.mark.parametrize(("text", "size"), [("80GiB", 80 * 2**30), ("1.5 kB", 1500), ("7", 7)])
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


def test_what_fits_comes_first_and_then_what_sends_least() -> None:
    facts: dict[str, Any] = {"strategy": "s", "ranks": 2}
    sends_more = Outcome(code="sends more", peak_bytes=8, sent_bytes=2, **facts)
    sends_less = Outcome(code="sends less", peak_bytes=9, sent_bytes=1, **facts)
    too_large = Outcome(code="too large", peak_bytes=12, **facts)
    largest = Outcome(code="largest", peak_bytes=20, **facts)
    failed = Outcome(code="failed", error="TypeError", **facts)
    in_order = ranked([failed, largest, sends_more, too_large, sends_less], memory=10)
    assert [outcome.code for outcome in in_order] == ["sends less", "sends more", "too large", "largest", "failed"]
