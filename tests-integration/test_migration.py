"""The migration page is true: its scripts run as they stand, and train what the old ones trained."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from lightning.fabric.strategies import XLAFSDPStrategy
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from forked_scripts import run_forked
from fsdp_core.checkpoint import verify
from fsdp_core.cli import fsdp
from fsdp_cuda_native import DDPFullyShardedNativeStrategy, DDPFullyShardedStrategy
from test_documentation import ROOT

PAGE = (ROOT / "docs/migration.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", PAGE, flags=re.MULTILINE | re.DOTALL))


def blocks(text: str, language: str = "python") -> list[str]:
    found = re.findall(rf"^( *)```{language}\n(.*?)```", text, flags=re.MULTILINE | re.DOTALL)
    return ["".join(line.removeprefix(indent) for line in block.splitlines(True)) for indent, block in found]


(PARTS,) = [block for block in blocks(PAGE) if block.startswith("# parts.py")]
WITH_SCRIPTS = {name: text for name, text in SECTIONS.items() if "from parts import" in text}
OLD = {name: blocks(text)[0] for name, text in WITH_SCRIPTS.items()}
NEW = {name: blocks(text)[1] for name, text in WITH_SCRIPTS.items()}
CHECKPOINTS = SECTIONS["Checkpoints of the old runs"]

DDP = "From DDP"
FSDP = "From Lightning 2.x: `fsdp`"
MODEL_PARALLEL = "From Lightning 2.x: `ModelParallelStrategy`"
FSDP2_INSTEAD = blocks(SECTIONS[FSDP])[2]

# What Lightning's own strategy needs to run without a GPU: no refusal, and a device that torch's FSDP accepts.
ON_CPU = """
import torch
from lightning.pytorch import strategies
from torch.distributed.fsdp import FullyShardedDataParallel

class FSDPStrategy(strategies.FSDPStrategy):
    pass

def on_cpu(self, *args, init=FullyShardedDataParallel.__init__, **kwargs):
    init(self, *args, **{**kwargs, "device_id": torch.device("cpu")})

strategies.FSDPStrategy, FullyShardedDataParallel.__init__ = FSDPStrategy, on_cpu
"""

Ran = Callable[[str], tuple[list[float], Path]]


def run(script: str, folder: Path, status: int = 0) -> str:
    """Run a script to its end; what it wrote. How a user starts one is test_documentation.py's to show."""
    path = folder / "script.py"
    path.write_text(script, encoding="utf-8")
    return run_forked(path, folder=folder, status=status)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Runs a script beside ``parts.py``, each once: the losses that it printed, and the folder that it ran in."""
    known: dict[str, tuple[list[float], Path]] = {}

    def run_once(script: str) -> tuple[list[float], Path]:
        if script not in known:
            folder = tmp_path_factory.mktemp("script")
            (folder / "parts.py").write_text(PARTS, encoding="utf-8")
            told = run(script, folder)
            known[script] = [float(loss) for loss in re.findall(r"^loss (\S+)$", told, re.MULTILINE)], folder
        return known[script]

    return run_once


def with_changes(script: str, *changes: tuple[str, str]) -> str:
    """A script with words replaced, which must be there."""
    for old, new in changes:
        assert old in script, f"the page no longer says {old!r}"
        script = script.replace(old, new)
    return script


def resumed(script: str, checkpoint: Path) -> str:
    return with_changes(script, ("(trainer.world_size))\n", f"(trainer.world_size), ckpt_path={str(checkpoint)!r})\n"))


def shortened(script: str, epochs: int = 2) -> str:
    return with_changes(script, ("max_epochs=6", f"max_epochs={epochs}"))


def begun(script: str) -> str:
    return shortened(script, 1)


def old_fsdp() -> str:
    """The page's script for Lightning's own FSDP, on CPUs."""
    return ON_CPU + with_changes(OLD[FSDP], ('accelerator="cuda"', 'accelerator="cpu"'))


def with_fsdp2(script: str) -> str:
    """What the page says to write for FSDP2 instead of FSDP1's strategy."""
    instead, strategy = FSDP2_INSTEAD.rstrip().split("\n\n")
    script = with_changes(script, ("from fsdp_cuda_native import DDPFullyShardedNativeStrategy", instead))
    return re.sub(r"strategy = DDPFully.*?\n    \)", strategy, script, flags=re.DOTALL)


def test_the_page_has_a_script_for_each_way() -> None:
    assert list(NEW) == [
        DDP,
        "From Lightning 1.x: `fsdp_native`",
        "From fairscale: `ddp_fully_sharded`",
        FSDP,
        MODEL_PARALLEL,
    ]


@pytest.mark.drawn
@pytest.mark.parametrize("name", NEW)
def test_new_scripts_train_as_they_stand(name: str, ran: Ran) -> None:
    losses, folder = ran(NEW[name])
    assert len(losses) == 6
    assert losses[-1] < losses[0] / 2
    verify(folder / "run.ckpt")


@pytest.mark.drawn
@pytest.mark.parametrize("name", [DDP, MODEL_PARALLEL])
def test_new_scripts_train_what_the_old_ones_do(name: str, ran: Ran) -> None:
    assert ran(NEW[name])[0][:2] == same(ran(shortened(OLD[name]))[0])


@pytest.mark.drawn
@pytest.mark.parametrize("new", [NEW[FSDP], shortened(with_fsdp2(NEW[FSDP]))], ids=["fsdp_native", "fsdp2"])
def test_new_scripts_train_what_lightnings_own_fsdp_does(new: str, ran: Ran) -> None:
    assert ran(new)[0][:2] == same(ran(shortened(old_fsdp()))[0])


def same(losses: list[float]) -> object:
    """Equal to rounding, which AdamW amplifies."""
    return pytest.approx(losses, rel=1e-4)


def going_on(name: str, checkpoint: Path, ran: Ran) -> list[float]:
    """The losses of one of our strategies, from an old checkpoint on."""
    ours = shortened(with_changes(NEW[DDP], ('"fsdp_native"', repr(name))))
    return ran(resumed(ours, checkpoint))[0]


class TestOldCheckpoints:
    """An epoch with the old strategy, the next with ours: the loss of the old one going on."""

    def test_ddp(self, ran: Ran) -> None:
        checkpoint = ran(begun(OLD[DDP]))[1] / "run.ckpt"
        assert going_on("fsdp_native", checkpoint, ran) == same(ran(shortened(OLD[DDP]))[0][1:])

    @pytest.mark.drawn
    @pytest.mark.parametrize("name", ["fsdp_native", "fsdp2"])
    def test_full_file_of_model_parallel(self, name: str, ran: Ran) -> None:
        old = with_changes(OLD[MODEL_PARALLEL], ("=1)", "=1, save_distributed_checkpoint=False)"))
        checkpoint = ran(begun(old))[1] / "run.ckpt"
        assert going_on(name, checkpoint, ran) == same(ran(shortened(OLD[MODEL_PARALLEL]))[0][1:])

    @pytest.mark.drawn
    @pytest.mark.parametrize("name", ["fsdp_native", "fsdp2"])
    def test_full_file_of_fsdp(self, name: str, ran: Ran) -> None:
        # by one rank, for torch can't gather a full state dict from several on CPUs; it goes on with two
        one = with_changes(old_fsdp(), ('"sharded"', '"full"'), ("devices=2", "devices=1"))
        checkpoint = ran(begun(one))[1] / "run.ckpt"
        assert going_on(name, checkpoint, ran) == same(ran(shortened(old_fsdp()))[0][1:])

    @pytest.mark.drawn
    @pytest.mark.parametrize("name", ["fsdp_native", "fsdp2"])
    @pytest.mark.parametrize("old", [old_fsdp(), OLD[MODEL_PARALLEL]], ids=["fsdp", "model_parallel"])
    def test_imported_folder(self, name: str, old: str, ran: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
        folder = ran(begun(old))[1]
        if not (folder / "new.ckpt").exists():
            command = blocks(CHECKPOINTS, "console")[0]
            arguments = command.removeprefix("$ fsdp ").replace("old.ckpt", "run.ckpt").split()
            monkeypatch.chdir(folder)
            done = CliRunner().invoke(fsdp, arguments)
            assert done.exit_code == 0, f"{done.output}\n{done.exception!r}"
            verify(folder / "new.ckpt")
        assert going_on(name, folder / "new.ckpt", ran) == same(ran(shortened(old))[0][1:])

    @pytest.mark.parametrize("old", [old_fsdp(), OLD[MODEL_PARALLEL]], ids=["fsdp", "model_parallel"])
    def test_folders_are_refused(self, old: str, ran: Ran, tmp_path: Path) -> None:
        checkpoint = ran(begun(old))[1] / "run.ckpt"
        (tmp_path / "parts.py").write_text(PARTS, encoding="utf-8")
        told = run(resumed(NEW[DDP], checkpoint), tmp_path, status=1)
        assert f"`fsdp checkpoint import {checkpoint} NEW`" in told

    def test_names_get_the_prefix_of_the_lightningmodule(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """And the line that loads weights alone takes them from a file."""
        old, new = nn.Linear(3, 2), nn.Linear(3, 2)
        torch.save(old.state_dict(), tmp_path / "old.pt")
        torch.save({"state_dict": old.state_dict()}, tmp_path / "old.ckpt")
        (command,) = [block for block in blocks(CHECKPOINTS, "console") if "--add-prefix" in block]
        monkeypatch.chdir(tmp_path)
        done = CliRunner().invoke(fsdp, command.removeprefix("$ fsdp ").split())
        assert done.exit_code == 0, f"{done.output}\n{done.exception!r}"
        shown = CliRunner().invoke(fsdp, ["checkpoint", "inspect", "new.ckpt"]).output
        assert "model.weight" in shown
        assert "model.bias" in shown
        (line,) = [block for block in blocks(CHECKPOINTS) if "load_state_dict" in block]
        exec(line, {"self": new, "torch": torch})
        assert torch.equal(new.weight, old.weight)


def test_the_import_of_the_strategy_for_xla() -> None:
    """The other package needs another torch, so its source is read."""
    (block,) = [block for block in blocks(PAGE) if "fsdp_xla.fabric" in block]
    before, after = block.splitlines()
    exec(before, {})
    name = after.split(" import ")[1].split()[0]
    source = (ROOT / "packages/fsdp-xla/src/fsdp_xla/fabric.py").read_text(encoding="utf-8")
    assert f'__all__ = ["{name}"' in source


class TestTables:
    """No option that the old strategies take, or that ours takes in its place, is left out."""

    @pytest.mark.parametrize(
        ("name", "strategy"),
        [
            (DDP, DDPStrategy),
            ("From Lightning 1.x: `fsdp_native`", DDPFullyShardedNativeStrategy),
            ("From fairscale: `ddp_fully_sharded`", DDPFullyShardedStrategy),
            ("From Lightning 1.x: `fsdp_native`", FullyShardedDataParallel),
            (FSDP, FSDPStrategy),
            (FSDP, FullyShardedDataParallel),
            (MODEL_PARALLEL, ModelParallelStrategy),
            ("From Fabric: `XLAFSDPStrategy`", XLAFSDPStrategy),
        ],
        ids=lambda value: getattr(value, "__name__", None),
    )
    def test_every_option_is_in_the_table(self, name: str, strategy: type) -> None:
        in_table = set(re.findall(r"`(\w+)", " ".join(re.findall(r"^\|.*", SECTIONS[name], flags=re.MULTILINE))))
        variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        parameters = inspect.signature(strategy).parameters.values()
        assert {p.name for p in parameters if p.kind not in variable} - in_table <= {"module"}


WRAPPED = next(
    b for b in blocks((ROOT / "docs/strategies/fsdp_native.md").read_text(encoding="utf-8")) if "__main__" in b
)


def test_code_with_wrap_moves_unchanged(ran: Ran) -> None:
    where = 'strategy="fsdp_native", accelerator="cpu", devices=2'
    single = with_changes(WRAPPED, (where, 'strategy="auto", accelerator="cpu", devices=1'))
    losses, folder = ran(WRAPPED)
    assert losses[-1] < losses[0] / 2
    verify(folder / "wrapped.ckpt")
    assert losses == same(ran(single)[0])
    for name in ("fsdp2", "ddp", "ddp_fully_sharded"):
        assert losses == same(ran(with_changes(WRAPPED, ("fsdp_native", name)))[0]), name
