"""Lightning opens a folder of ours wherever it opens a file, and everything else as it does without us."""

from __future__ import annotations

import copy
import io
import json
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import fsspec
import lightning.fabric.strategies
import lightning.pytorch.strategies
import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.utilities import cloud_io
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.core import saving
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn

from checkpoint_ranks import ThreadRuntime, on_threads
from chunked_tensors import in_pieces, rank_rows
from cli_checkpoints import state_by_name
from conftest import Site
from damaged_folders import save_alone
from fsdp_core.checkpoint import ChunkedTensor, load_state_dict
from fsdp_core.errors import CheckpointExistsError, CheckpointFormatError, UnsupportedCapabilityError
from fsdp_core.lightning.checkpoints.patched_io import install_opening
from fsdp_core.testing.refusals import assert_says, refusal
from nests import assert_same
from quiet_trainer import quiet_trainer

VERSION = lightning.pytorch.__version__
OPENERS: list[Callable[..., Any]] = [
    lambda path, **kwargs: TorchCheckpointIO().load_checkpoint(path, **kwargs),
    cloud_io._load,
    saving.pl_load,
]


class Tied(nn.Module):
    """Two layers with one weight, and a third."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inp, self.out, self.head = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False), nn.Linear(3, 2)
        self.out.weight = self.inp.weight

    def forward(self, x: Tensor) -> Any:
        return self.head(self.out(self.inp(x)))


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    """Groups whose order is not the module's."""
    parameters = list(module.parameters())
    return torch.optim.AdamW([{"params": parameters[:0:-1], "lr": 0.1}, {"params": parameters[:1]}], lr=0.2)


def step(module: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    loss = module(torch.linspace(-1, 1, 12).view(4, 3)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def in_rows(tensor: Tensor) -> ChunkedTensor | Tensor:
    """As two ranks hold it, one of which has written both rows of boxes."""
    tensor = tensor.detach().clone()
    return in_pieces(tensor, 0, 1) if tensor.ndim and len(tensor) > 1 else tensor


def save_as_trainer(path: str | Path, module: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Save a folder as the Trainer's adapter does; what the file of the run would hold."""
    rest = {
        "epoch": 3,
        "global_step": 7,
        "pytorch-lightning_version": VERSION,
        "callbacks": OrderedDict(one={"best": torch.tensor(0.5), "k": (1, None)}),
        "hyper_parameters": {"width": 3},
    }
    state = {"model": {k: in_rows(v) for k, v in module.state_dict().items()}, "trainer": copy.deepcopy(rest)}
    whole: dict[str, Any] = {**rest, "state_dict": dict(module.state_dict())}
    if optimizer is not None:
        state["optimizer"] = [state_by_name(optimizer, module, in_rows)]
        whole["optimizer_states"] = [optimizer.state_dict()]
    save_alone(path, state, aliases={"model/out.weight": "model/inp.weight"})
    return copy.deepcopy(whole)


@pytest.fixture
def trained() -> tuple[Tied, torch.optim.Optimizer]:
    module = Tied()
    optimizer = optimizer_of(module)
    step(module, optimizer), step(module, optimizer)
    return module, optimizer


@pytest.fixture
def memory() -> Iterator[str]:
    yield "memory://opening/run.ckpt"
    fsspec.filesystem("memory").rm("/opening", recursive=True)


# -- a folder of ours --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("opener", OPENERS)
@pytest.mark.parametrize("place", ["path", "text", "file://", "memory://", "link"])
@pytest.mark.parametrize("weights_only", [None, True, False])
def test_a_trainers_folder_is_what_its_file_would_be(
    tmp_path: Path, memory: str, trained: Any, opener: Callable[..., Any], place: str, weights_only: bool | None
) -> None:
    local = tmp_path / "run.ckpt"
    path: Any = {"path": local, "text": str(local), "file://": f"file://{local}", "link": tmp_path / "last.ckpt"}.get(
        place, memory
    )
    want = save_as_trainer(local, *trained)
    save_as_trainer(memory, *trained)
    (tmp_path / "last.ckpt").symlink_to("run.ckpt")
    got = opener(path, weights_only=weights_only)
    assert_same(got, want, extra=["param_names"])
    assert got["state_dict"]["inp.weight"] is got["state_dict"]["out.weight"]


def test_a_folder_of_weights_alone(tmp_path: Path, trained: Any) -> None:
    want = save_as_trainer(tmp_path / "run", trained[0], None)
    got = TorchCheckpointIO().load_checkpoint(tmp_path / "run")
    assert "optimizer_states" not in got
    assert_same(got, want, extra=["param_names"])
    assert_same(load_state_dict(tmp_path / "run"), want["state_dict"])


@pytest.mark.parametrize(
    ("where", "device"),
    [
        ("cpu", "cpu"),
        ("meta", "meta"),
        (torch.device("meta"), "meta"),
        ({"cpu": "meta"}, "meta"),
        ({"cuda:0": "meta"}, "cpu"),
        (None, "cpu"),
        (lambda storage, location: None, "cpu"),
        (lambda storage, location: storage if location == "cpu" else None, "cpu"),
        (lambda storage, location: torch.UntypedStorage(storage.nbytes(), device="meta"), "meta"),
    ],
)
def test_map_location(tmp_path: Path, trained: Any, where: Any, device: str) -> None:
    want = save_as_trainer(tmp_path / "run", *trained)
    got = TorchCheckpointIO().load_checkpoint(tmp_path / "run", map_location=where)
    tensors = [*got["state_dict"].values(), got["optimizer_states"][0]["state"][0]["exp_avg"]]
    assert {tensor.device.type for tensor in tensors} == {device}
    assert got["callbacks"]["one"]["best"].device.type == device
    if device == "cpu":
        assert_same(got, want, extra=["param_names"])
    else:
        assert {k: v.shape for k, v in got["state_dict"].items()} == {k: v.shape for k, v in want["state_dict"].items()}


def test_fabrics_folder_has_the_users_keys(tmp_path: Path, trained: Any) -> None:
    module, optimizer = trained
    state = {
        "my/model": {k: in_rows(v) for k, v in module.state_dict().items()},
        "opt": state_by_name(optimizer, module, in_rows),
        "trainer": {"of": "another kind"},
        "step": 5,
    }
    save_alone(tmp_path / "run", state, {"my%2Fmodel": "model", "opt": "optimizer"})
    fabric = Fabric(accelerator="cpu", devices=1)
    fresh = Tied()
    fresh_optimizer = optimizer_of(fresh)
    into = {"my/model": fresh, "opt": fresh_optimizer, "step": 0}
    assert fabric.load(tmp_path / "run", into) == {"trainer": {"of": "another kind"}}
    assert into["step"] == 5
    assert step(fresh, fresh_optimizer) == step(module, optimizer)
    saved = load_state_dict(tmp_path / "run", key="my%2Fmodel")
    assert_same(fabric.load(tmp_path / "run")["my/model"], saved)
    assert saved.keys() == module.state_dict().keys()


def test_fabric_reads_a_raw_state(tmp_path: Path, trained: Any) -> None:
    save_alone(tmp_path / "raw", {k: in_rows(v) for k, v in trained[0].state_dict().items()})
    module = Tied()
    Fabric(accelerator="cpu", devices=1).load_raw(tmp_path / "raw", module)
    assert_same(dict(module.state_dict()), dict(trained[0].state_dict()))


def damage(folder: Path) -> str:
    gone = next(folder.rglob("model/*"))
    gone.unlink()
    return f"{gone.name} is missing"


def make_newer(folder: Path) -> str:
    manifest = folder / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format_version": 1', '"format_version": 99'))
    return "99"


@pytest.mark.parametrize("opener", OPENERS)
@pytest.mark.parametrize("spoil", [damage, make_newer])
def test_a_folder_that_can_not_be_read_is_named_by_us(tmp_path: Path, trained: Any, spoil: Any, opener: Any) -> None:
    save_as_trainer(tmp_path / "run", *trained)
    message = spoil(tmp_path / "run")
    with pytest.raises(CheckpointFormatError, match=message):
        opener(tmp_path / "run")


# -- everything else ---------------------------------------------------------------------------------------------------


def _interrupted(path: Path) -> None:
    (path / "model").mkdir(parents=True)
    (path / "model" / "0123456789ab-rank-00000.safetensors").write_bytes(b"")


def _foreign(path: Path) -> None:
    path.mkdir()
    (path / "manifest.json").write_text(json.dumps({"format": "another", "of": "fsdp-checkpoint"}))


#: What lies at a path.
OTHERS: dict[str, Callable[[Path], Any]] = {
    "a file of torch": lambda path: torch.save({"a": torch.ones(2), "b": 1}, path),
    "a file of something": lambda path: path.write_text("epoch,loss\n"),
    "nothing": lambda path: None,
    "an empty folder": Path.mkdir,
    "an interrupted save": _interrupted,
    "a folder of another program": _foreign,
}


@pytest.mark.parametrize("case", OTHERS)
@pytest.mark.parametrize("opener", OPENERS[1:])
def test_everything_else_is_as_without_us(tmp_path: Path, case: str, opener: Any) -> None:
    path = tmp_path / "run.ckpt"
    OTHERS[case](path)

    def outcome(load: Callable[..., Any]) -> Any:
        try:
            return repr(load(path, map_location="cpu", weights_only=True))
        except Exception as error:
            return type(error), str(error)

    assert outcome(opener) == outcome(opener._fsdp_core_wraps)


def test_what_is_no_path_is_as_without_us() -> None:
    stream = io.BytesIO()
    torch.save({"a": 1}, stream)
    stream.seek(0)
    assert cloud_io._load(stream, weights_only=True) == {"a": 1}
    for path in ("nosuchprotocol://bucket/run.ckpt", "\0"):
        told = []
        for load in (cloud_io._load, cloud_io._load._fsdp_core_wraps):  # type: ignore[attr-defined]
            with pytest.raises(ValueError, match=r".") as refused:
                load(path)
            told.append(str(refused.value))
        assert told[0] == told[1]


# -- a file instead of a folder -----------------------------------------------------------------------------------


@pytest.mark.parametrize("linked", [False, True])
def test_a_file_takes_the_place_of_a_folder(tmp_path: Path, trained: Any, linked: bool) -> None:
    path = tmp_path / "last.ckpt"
    save_as_trainer(tmp_path / "kept.ckpt" if linked else path, *trained)
    if linked:
        path.symlink_to("kept.ckpt")
    TorchCheckpointIO().save_checkpoint({"a": torch.ones(2)}, path)
    assert torch.load(path, weights_only=True)["a"].tolist() == [1, 1]
    assert sorted(p.name for p in tmp_path.iterdir()) == (["kept.ckpt", "last.ckpt"] if linked else ["last.ckpt"])
    if linked:
        TorchCheckpointIO().load_checkpoint(tmp_path / "kept.ckpt")


def test_a_save_that_fails_leaves_the_folder(tmp_path: Path, trained: Any) -> None:
    path = tmp_path / "last.ckpt"
    want = save_as_trainer(path, *trained)
    with pytest.raises(Exception, match="pickle"):
        TorchCheckpointIO().save_checkpoint({"a": lambda: None}, path)
    assert_same(TorchCheckpointIO().load_checkpoint(path), want, extra=["param_names"])
    assert [p.name for p in tmp_path.iterdir()] == ["last.ckpt"]


def test_a_remote_file_takes_the_place_of_a_folder_or_says_why_not(
    memory: str, trained: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_as_trainer(memory, *trained)
    fs = fsspec.filesystem("memory")
    opened = type(fs)._open

    def as_with_directories(self: Any, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        if "w" in mode and path.endswith("run.ckpt"):
            raise IsADirectoryError(path)
        return opened(self, path, mode, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(type(fs), "_open", as_with_directories)
        with pytest.raises(CheckpointExistsError, match="Remove it, or save to another path"):
            TorchCheckpointIO().save_checkpoint({"a": 1}, memory)
    assert TorchCheckpointIO().load_checkpoint(memory)["epoch"] == 3
    TorchCheckpointIO().save_checkpoint({"a": 1}, memory)  # as an object store, it holds a file beside a folder
    assert TorchCheckpointIO().load_checkpoint(memory) == {"a": 1}
    assert fs.find("/opening") == ["/opening/run.ckpt"]


# -- Lightning's own sharded strategies --------------------------------------------------------------------------------

OWN = [
    lightning.pytorch.strategies.FSDPStrategy,
    lightning.pytorch.strategies.ModelParallelStrategy,
    lightning.fabric.strategies.FSDPStrategy,
    lightning.fabric.strategies.ModelParallelStrategy,
    lightning.fabric.strategies.XLAFSDPStrategy,
]


@pytest.mark.parametrize("strategy", OWN, ids=lambda one: f"{one.__module__}.{one.__name__}")
def test_lightnings_own_sharded_strategies_say_what_to_write(tmp_path: Path, trained: Any, strategy: Any) -> None:
    path = tmp_path / "run"
    save_as_trainer(path, *trained)
    one = object.__new__(strategy)  # what it needs to be built, such as a mesh, does not matter here
    for asked in (path, str(path)):
        message = refusal(UnsupportedCapabilityError, lambda asked=asked: one.load_checkpoint(asked))  # type: ignore[misc]
        assert_says(
            message,
            f"Lightning's {strategy.__name__} can't open {path}",
            "Write a strategy that `fsdp list` shows",
            f"fsdp checkpoint consolidate {path} FILE --to lightning",
        )


# -- how it gets there -------------------------------------------------------------------------------------------------


def half(fs: Any, path: str) -> None:
    """What is left at a path of a save that wrote there and was killed."""
    for name in fs.find(path):
        if name.endswith("manifest.json"):
            fs.rm_file(name)


@pytest.mark.parametrize("where", ["a directory", "an object store"])
def test_the_last_checkpoint_is_a_whole_one(tmp_path: Path, trained: Any, where: str) -> None:
    """A half one, and a folder in which nothing is, are passed over; others' files and folders are found as ever."""
    root = str(tmp_path) if where == "a directory" else f"memory://{tmp_path.name}"
    fs, inside = fsspec.core.url_to_fs(root)
    callback = ModelCheckpoint(dirpath=root, save_last=True)
    trainer = quiet_trainer(callbacks=[callback], max_steps=7)
    callback.setup(trainer, trainer.strategy, stage="validate")  # as a fit does, before it looks for the last one

    def last() -> str | None:
        fit = TrainerFn.FITTING
        connector: Any = trainer._checkpoint_connector
        return connector._parse_ckpt_path(fit, "last", model_provided=True, model_connected=True)  # type: ignore[no-any-return]

    module, optimizer = trained
    save_as_trainer(f"{root}/last-v1.ckpt", module, optimizer)
    half(fs, f"{inside}/last-v1.ckpt")
    fs.makedirs(f"{inside}/last-v2.ckpt")
    with pytest.warns(UserWarning, match="there is no last checkpoint available"):
        assert last() is None
    save_as_trainer(f"{root}/last.ckpt", module, optimizer)
    save_as_trainer(f"{root}/last-v3.ckpt", module, optimizer)
    half(fs, f"{inside}/last-v3.ckpt")
    found = last()
    assert found == (
        f"{root}/last.ckpt" if where == "a directory" else f"memory:///{tmp_path.name}/last.ckpt/manifest.json"
    )
    assert cloud_io._load(found)["global_step"] == 7
    if where == "a directory":
        (tmp_path / "last-v4.ckpt").mkdir()
        (tmp_path / "last-v4.ckpt" / ".metadata").write_bytes(b"another library's")
        assert last() == f"{root}/last-v4.ckpt"


def test_installing_again_changes_nothing_and_takes_few_calls() -> None:
    owners = [cloud_io, sys.modules[TorchCheckpointIO.__module__], saving, *OWN]
    before = [dict(vars(owner)) for owner in owners]
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        install_opening(lightning.fabric.strategies)
        install_opening(lightning.pytorch.strategies)
    finally:
        sys.setprofile(None)
    assert calls < 200, "of Python's functions; importing one module takes hundreds"
    assert [dict(vars(owner)) for owner in owners] == before
    assert cloud_io._load._fsdp_core_wraps is saving.pl_load._fsdp_core_wraps  # type: ignore[attr-defined]
    makes_modules, saving.pl_load = saving.pl_load, cloud_io._load  # as if it were imported only now
    install_opening(lightning.pytorch.strategies)
    assert saving.pl_load is makes_modules
    assert (cloud_io._load.__name__, cloud_io._load.__module__) == ("_load", cloud_io.__name__)


def test_another_lightning_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    strategies = ModuleType("lightning.pytorch.strategies")
    strategies.FSDPStrategy = type("FSDPStrategy", (), {"load_checkpoint": 5})  # type: ignore[attr-defined]
    strategies.ModelParallelStrategy = None  # type: ignore[attr-defined]
    renamed = ModuleType("lightning.fabric.utilities.cloud_io")
    renamed._load = "a string"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lightning.fabric.utilities.cloud_io", renamed)
    monkeypatch.delitem(sys.modules, "lightning.pytorch.core.saving")
    install_opening(strategies)
    assert (renamed._load, strategies.FSDPStrategy.load_checkpoint) == ("a string", 5)


@pytest.mark.parametrize(
    ("fabric", "pytorch"), [("lightning.fabric", "lightning.pytorch"), ("lightning_fabric", "pytorch_lightning")]
)
def test_a_script_needs_no_import_of_ours(site: Site, tmp_path: Path, trained: Any, fabric: str, pytorch: str) -> None:
    save_as_trainer(tmp_path / "run.ckpt", *trained)
    site.forked(
        f"""
        import sys
        from {pytorch} import LightningModule, Trainer
        from {fabric} import Fabric
        import torch
        assert "fsdp_core.checkpoint" not in sys.modules  # nothing is imported before it is needed

        class Model(LightningModule):
            def __init__(self, width, depth=1):
                super().__init__()
                self.save_hyperparameters()
                self.inp, self.out = torch.nn.Linear(width, 3, bias=False), torch.nn.Linear(3, 3, bias=False)
                self.out.weight = self.inp.weight
                self.head = torch.nn.Linear(3, 2)

            def test_step(self, batch, batch_idx):
                self.log("sum", self.head(batch).sum(), batch_size=1)

        model = Model.load_from_checkpoint("run.ckpt", depth=2)
        assert dict(model.hparams) == {{"width": 3, "depth": 2}}
        quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
        trainer = Trainer(accelerator="cpu", devices=1, **quiet)
        data = torch.utils.data.DataLoader([torch.ones(3)], batch_size=None)
        (got,) = trainer.test(Model(3), data, ckpt_path="run.ckpt", verbose=False)
        assert got == {{"sum": model.head(torch.ones(3)).sum().item()}}
        fresh = Model(3)
        assert Fabric(accelerator="cpu", devices=1).load("run.ckpt", {{"state_dict": fresh}})["epoch"] == 3
        assert torch.equal(fresh.head.weight, model.head.weight)
        """
    )


def test_a_place_of_a_scattered_save_is_refused_and_replaced(tmp_path: Path) -> None:
    def work(runtime: ThreadRuntime) -> None:
        state = {"model": {"w": rank_rows(torch.ones(1), runtime.rank, 2)}}
        save_alone(tmp_path / f"rank{runtime.rank}.ckpt", state, runtime=runtime, scattered=True)

    assert on_threads(2, work) == [None, None]
    for rank in (0, 1):
        path = tmp_path / f"rank{rank}.ckpt"
        for opener in OPENERS:
            assert_says(refusal(CheckpointFormatError, lambda o=opener, p=path: o(p)), "scattered", "gather")  # type: ignore[misc]
        cloud_io._atomic_save({"mine": 1}, path)
        assert cloud_io._load(path, weights_only=True) == {"mine": 1}
