"""A stranger's package: built as a wheel, installed next to the wheels of core and fsdp-fsdp2, and used by its name.

The environment is a new one, with the wheels' own files and metadata. Torch, Lightning and pytest are those of the
environment that runs these tests, for installing them anew takes minutes: it links to everything there but to what is
called fsdp.

``example-backend/`` runs the whole conformance suite in its own tests, which takes minutes: ``nox -s example``. Here a
few clauses of each kind run, as the package's authors run them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from fsdp_core.testing.launching.processes import fresh_environment

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "tests-integration" / "example-backend"
BUILT = (ROOT / "packages" / "fsdp-core", ROOT / "packages" / "fsdp-fsdp2", EXAMPLE)

CLAUSES = (
    "test_it_is_listed_and_can_run_here",
    "test_the_options_are_the_constructors_arguments",
    "test_listing_imports_neither_torch_nor_lightning",
    "test_trainer_equals_plain and 2-adamw_groups",
    "test_fabric_equals_plain and 3-adamw_groups",
    "test_evaluation_leaves_nothing_unsharded",
    "test_torchs_functions_on_gradients_in_hooks and each-by and hand",
    "test_param_groups_that_never_come",
    "test_state_is_divided_among_the_ranks and 3 and zero1",
    "test_the_class_is_taken_with_its_options and zero1",
)

TRAIN = """
import lightning as L
from lightning.pytorch.demos.boring_classes import BoringModel

if __name__ == "__main__":
    trainer = L.Trainer(strategy="zero1", accelerator="cpu", devices=2, max_epochs=1, limit_train_batches=4,
                        limit_val_batches=1, logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer.fit(BoringModel())
    trainer.save_checkpoint("trained.ckpt")
"""

# In each order: saves after three steps under the first strategy; then loads and saves under the others in turn.
INTERCHANGE = """
import sys
import lightning as L
import torch
from torch import nn

def set_up(strategy):
    fabric = L.Fabric(strategy=strategy, accelerator="cpu", devices=2)
    fabric.launch()
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5), nn.Linear(5, 3))
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=0.1))
    return fabric, model, optimizer

if __name__ == "__main__":
    for order in sys.argv[1:]:
        trains, *others = order.split("-")
        fabric, model, optimizer = set_up(trains)
        for _ in range(3):
            fabric.backward(model(torch.randn(4, 7) + fabric.global_rank).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        last = f"{trains}.ckpt"
        fabric.save(last, {"model": model, "optimizer": optimizer})
        for strategy in others:
            fabric, model, optimizer = set_up(strategy)
            fabric.load(last, {"model": model, "optimizer": optimizer})
            last = f"{strategy}-of-{last}"
            fabric.save(last, {"model": model, "optimizer": optimizer})
"""


@dataclass(frozen=True, kw_only=True)
class Environment:
    """A virtual environment."""

    path: Path

    def run(self, command: str, *arguments: str, folder: Path, status: int = 0) -> str:
        """Run a command of the environment, all of whose processes end within minutes; what it wrote."""
        inherited = {name: value for name, value in fresh_environment().items() if name != "PYTHONPATH"}
        process = subprocess.Popen(
            [str(self.path / "bin" / command), *arguments],
            cwd=folder,
            env={**inherited, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=250)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)  # the command and the ranks that it started
            output, _ = process.communicate()
            pytest.fail(f"{command} {arguments} still ran after 250 s:\n{output}")
        assert process.returncode == status, output
        return output


def link_everything_else(folder: Path) -> None:
    """Link to all that is installed here, but for this project's packages."""
    folder.mkdir()
    for place in (Path(entry) for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")):
        for found in sorted(place.iterdir()) if place.is_dir() else ():
            ours = found.name.lower().removeprefix("__editable__").lstrip("_.").startswith("fsdp")
            if not ours and not (folder / found.name).exists():
                (folder / found.name).symlink_to(found)


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with the three wheels."""
    folder = tmp_path_factory.mktemp("clean")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
    for source in BUILT:
        wheel = ("wheel", "--no-deps", "--wheel-dir", str(folder / "wheels"), str(source))
        subprocess.run([*pip, *wheel], check=True, timeout=200)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "env")], check=True, timeout=100)
    environment = Environment(path=folder / "env")
    python = environment.path / "bin" / "python"
    wheels = [str(path) for path in sorted((folder / "wheels").glob("*.whl"))]
    assert len(wheels) == len(BUILT)
    subprocess.run([*pip, "--python", str(python), "install", "--no-deps", *wheels], check=True, timeout=200)
    link_everything_else(folder / "others")
    told = environment.run("python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", folder=folder)
    (Path(told.strip()) / "others.pth").write_text(f"{folder / 'others'}\n")
    return environment


def test_it_is_a_days_work() -> None:
    lines = [line for file in EXAMPLE.glob("src/**/*.py") for line in file.read_text(encoding="utf-8").splitlines()]
    assert len([line for line in lines if line.strip()]) < 300


def test_it_is_listed(clean: Environment, tmp_path: Path) -> None:
    listed = json.loads(clean.run("fsdp", "list", "--json", folder=tmp_path))
    assert {row["name"]: (row["package"], row["runs_here"]) for row in listed["strategies"]} == {
        "fsdp2": ("fsdp-fsdp2", True),
        "fsdp2_cpu_offload": ("fsdp-fsdp2", True),
        "zero1": ("fsdp-example", True),
    }
    assert listed["broken"] == []


def test_the_skeleton_of_the_next_one_is_in_the_wheel(clean: Environment, tmp_path: Path) -> None:
    written = clean.run("fsdp", "new-backend", "theirs", folder=tmp_path).split("\n\n")[0].splitlines()
    assert len(written) == 11
    assert all((tmp_path / name).is_file() for name in written)


def test_a_script_that_imports_only_lightning_trains(clean: Environment, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    clean.run("python", "train.py", folder=tmp_path)
    manifest = json.loads((tmp_path / "trained.ckpt" / "manifest.json").read_text(encoding="utf-8"))
    assert (manifest["strategy"], manifest["world_size"]) == ("zero1", 2)
    verified = json.loads(clean.run("fsdp", "checkpoint", "verify", "--json", "trained.ckpt", folder=tmp_path))
    assert verified["faults"] == {}


def test_checkpoints_go_to_fsdp2_and_back(clean: Environment, tmp_path: Path) -> None:
    """Weights and optimizer state, bit for bit."""
    (tmp_path / "interchange.py").write_text(INTERCHANGE)
    clean.run("python", "interchange.py", "zero1-fsdp2-zero1", "fsdp2-zero1-fsdp2", folder=tmp_path)
    for first, second in (("zero1", "fsdp2"), ("fsdp2", "zero1")):
        saved = f"{first}.ckpt"
        for loaded in (f"{second}-of-{saved}", f"{first}-of-{second}-of-{saved}"):
            compared = json.loads(clean.run("fsdp", "checkpoint", "diff", "--json", saved, loaded, folder=tmp_path))
            assert compared["same"]
            assert compared["compared"] == 6 + 3 * 6  # AdamW keeps two moments and a step count


def test_its_conformance_tests_run_as_its_authors_run_them(clean: Environment, tmp_path: Path) -> None:
    chosen = " or ".join(f"({words})" for words in CLAUSES)
    report = f"--fsdp-report={tmp_path / 'report.json'}"
    folders = (str(EXAMPLE / "tests"), str(EXAMPLE.parent / "example-tests"))
    told = clean.run("python", "-m", "pytest", "-q", *folders, "-k", chosen, report, folder=tmp_path)
    assert "10 passed" in told, told
    assert "1 xfailed" in told, told
    assert (tmp_path / "report.json").is_file()
