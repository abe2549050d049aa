"""``fsdp new-backend``: what it writes can be installed, is listed, and has tests that say what to write."""

from __future__ import annotations

import ast
import inspect
import os
import re
import shutil
import sys
import tomllib
from pathlib import Path
from typing import TypeGuard

import pytest
from packaging.requirements import Requirement

from conftest import Site
from fsdp_core.plugins.lightning_names import LIGHTNINGS_OWN
from fsdp_core.sharding import backend, sharded
from fsdp_core.testing.refusals import assert_says

PAGE = Path(__file__).parents[3] / "docs/writing-a-backend.md"

MODULES = (
    "__init__.py",
    "backend.py",
    "constructor.py",
    "fabric.py",
    "options.py",
    "plugin.py",
    "py.typed",
    "trainer.py",
)
FILES = [
    "README.md",
    "pyproject.toml",
    *(f"src/fsdp_my_shards/{name}" for name in MODULES),
    "tests/test_conformance.py",
]

NEXT = "NotImplementedError: next: write MyShardsBackend.shard_module in src/fsdp_my_shards/backend.py"


def install(site: Site, folder: Path) -> None:
    """Install a written package, as its own pyproject says."""
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    ((name, module),) = project["entry-points"]["fsdp.strategies"].items()
    (package,) = (folder / "src").iterdir()
    shutil.copytree(package, site.path / package.name)
    site.distribution(project["name"], version=project["version"], plugins=f"{name} = {module}")


@pytest.fixture
def written(site: Site) -> Path:
    """The package that the command writes for ``my_shards``."""
    site.fsdp("new-backend", "my_shards")
    return site.path / "fsdp-my-shards"


def test_it_takes_less_than_half_a_second(site: Site) -> None:
    def seconds(*command: str) -> float:
        """Of the processor, which other processes on the machine don't count towards."""
        began = os.times()
        site.run(sys.executable, *command)
        ended = os.times()
        return ended.children_user + ended.children_system - began.children_user - began.children_system

    words = ("-c", "from fsdp_core.cli import main; main()", "new-backend", "my_shards", "--path")
    assert min(seconds(*words, f"there-{n}") - seconds("-c", "pass") for n in range(5)) < 0.5


def test_it_writes_a_package(site: Site) -> None:
    done = site.fsdp("new-backend", "my_shards", "--path", "there/it-is")
    folder = site.path / "there" / "it-is"
    assert sorted(str(p.relative_to(folder).as_posix()) for p in folder.rglob("*") if p.is_file()) == FILES
    assert done.stderr == "heavy: []\n"
    assert done.stdout.splitlines()[0] == str(Path("there/it-is/pyproject.toml"))
    assert "cd there/it-is\n" in done.stdout
    assert "src/fsdp_my_shards/backend.py" in done.stdout.splitlines()[-1]


def test_nothing_of_the_template_is_left(written: Path) -> None:
    for file in written.rglob("*"):
        if file.is_file():
            text = file.read_text(encoding="utf-8")
            assert not re.search(r"\$[\w{]", text), file
            assert all(len(line) <= 120 for line in text.splitlines()), file


def test_the_project_says_which_core_it_is_built_for(written: Path) -> None:
    project = tomllib.loads((written / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["name"] == "fsdp-my-shards"
    core, *_ = map(Requirement, project["dependencies"])
    assert core.name == "fsdp-core"
    contains = {"0.0.9": False, "0.1.0": True, "0.1.9": True, "0.2.0": False}
    assert {version: core.specifier.contains(version) for version in contains} == contains


def test_it_is_listed_before_anything_is_written(site: Site, written: Path) -> None:
    install(site, written)
    listed = site.fsdp("list")
    assert "my_shards  fsdp-my-shards  0.1.0    cpu           yes" in listed.stdout
    assert "Broken" not in listed.stdout
    assert "Trainer class  fsdp_my_shards.trainer:MyShardsStrategy" in site.fsdp("describe", "my_shards").stdout


def test_the_documentation_shows_what_is_listed_then(site: Site) -> None:
    site.fsdp("new-backend", "theirs")
    install(site, site.path / "fsdp-theirs")
    (shown,) = re.findall(
        r"^\$ fsdp list\n(.*?)^\$ pytest -x$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    assert site.fsdp("list").stdout == shown


def test_the_backend_says_when_to_write_what_else(written: Path) -> None:
    """Each stub is the contract's own method, as it is called, and says when it must be written."""
    text = (written / "src/fsdp_my_shards/backend.py").read_text(encoding="utf-8")
    commented = "\n".join(re.findall(r"^    # ?((?:def |    ).*)$", text, re.MULTILINE))
    stubs = {node.name: node for node in ast.parse(commented).body if is_function(node)}
    assert {"layout", "rebind_optimizers", "holds_part", "unsharded_view"} <= stubs.keys()
    contract = [ast.parse(inspect.getsource(file)) for file in (backend, sharded)]
    methods = {node.name: node for file in contract for node in ast.walk(file) if is_function(node)}
    for name, stub in stubs.items():
        assert ast.unparse(stub.args) == ast.unparse(methods[name].args)
        assert (ast.get_docstring(stub) or "").startswith("When "), name


def is_function(node: ast.AST) -> TypeGuard[ast.FunctionDef]:
    return isinstance(node, ast.FunctionDef)


#: Runs the tests until one fails, and some of them; the process that ranks are forked from serves both.
BOTH = """
import sys, pytest
if __name__ == "__main__":
    quiet = ["-q", "-p", "no:cacheprovider", sys.argv[1]]
    pytest.main([*quiet, "-x"])
    print("some of them", flush=True)
    pytest.main([*quiet, "-k", "test_listing or test_the_options or (test_fabric_equals_plain and 1-adamw_groups)"])
"""


def test_its_tests_and_what_fails_first_say_what_to_write_next(site: Site, written: Path) -> None:
    install(site, written)
    (site.path / "both.py").write_text(BOTH)
    done = site.fork(str(site.path / "both.py"), str(written / "tests" / "test_conformance.py"))
    until_one_fails, chosen = done.stdout.split("some of them")
    assert NEXT in until_one_fails
    assert "1 failed, 3 passed" in chosen, chosen
    assert NEXT in chosen


WHOLE = """
    def shard_module(self, module, plan):
        place(list(module.modules()), self.runtime)
        from fsdp_core.gradients.replicated import ReplicatedParameters
        self.replicated = ReplicatedParameters(list(module.parameters()), module, self.runtime)
        return MyShardsSharded(module)
"""


def test_written_shard_module_takes_effect(site: Site, written: Path) -> None:
    """With ``shard_module`` written, here for whole parameters, clauses on numbers pass, and those on shards don't."""
    install(site, written)
    file = site.path / "fsdp_my_shards" / "backend.py"
    begin, rest = file.read_text(encoding="utf-8").split("    def shard_module", 1)
    file.write_text(begin + WHOLE + "\n\nclass " + rest.split("\n\n\nclass ", 1)[1], encoding="utf-8")
    test_file = written / "tests" / "test_conformance.py"
    chosen = "(test_fabric_equals_plain and 2-sgd) or (test_optimizers_hold_a_share and 2)"
    done = site.fork("-m", "pytest", "-q", "-p", "no:cacheprovider", str(test_file), "-k", chosen, check=False)
    assert "1 failed, 1 passed" in done.stdout, done.stdout
    assert "the ranks hold" in done.stdout


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("My_FSDP", ["a strategy can't be called 'My_FSDP'", "lower-case letter", "'my_fsdp'"]),
        ("8bit", ["a strategy can't be called '8bit'"]),
        ("shards_", ["a package can't be named after the strategy 'shards_'", "ends in '_'", "'shards'"]),
        ("ddp", ["'ddp' is taken by Lightning itself", "fsdp new-backend my_ddp"]),
        ("fsdp", ["'fsdp' is taken by Lightning itself"]),
        ("fsdp2", ["'fsdp2' is taken by fsdp-fsdp2", "fsdp new-backend my_fsdp2"]),
        ("xla_fsdp", ["'xla_fsdp' is taken by fsdp-xla", "fsdp new-backend my_xla_fsdp"]),
        ("theirs", ["'theirs' is taken by their-plugin 3.1"]),
        ("broken_plugin", ["'broken_plugin' is taken by broken-plugin 1.0"]),
        ("core", ["a package 'fsdp-core'", "which already exists"]),
        ("present", ["a package 'fsdp-present'"]),
    ],
)
def test_names_that_are_refused(site: Site, name: str, words: list[str]) -> None:
    site.provide("their-plugin", 'name="theirs", summary="", trainer="a:B", accelerators=("cpu",)', version="3.1")
    site.plugin("broken-plugin", "import my_dep")
    site.distribution("fsdp-present")
    done = site.fsdp("new-backend", name, check=False)
    assert done.returncode == 1
    assert_says(done.stderr, *words)
    assert not list(site.path.glob(f"fsdp-{name}*"))


def test_existing_folder_is_refused(site: Site) -> None:
    (site.path / "mine").mkdir()
    done = site.fsdp("new-backend", "my_shards", "--path", "mine", check=False)
    assert done.returncode == 1
    assert "'mine' already exists; nothing in it was changed.\nGive another folder: --path DIR" in done.stderr
    assert not list((site.path / "mine").iterdir())


def test_lightnings_names_are_all_known(site: Site) -> None:
    code = """
    from lightning.fabric.strategies import STRATEGY_REGISTRY
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import StrategyRegistry
    print(*StrategyRegistry)
    print(*STRATEGY_REGISTRY)
    """
    done = site.forked(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    for front_end, names in zip(("trainer", "fabric"), done.stdout.splitlines(), strict=True):
        known = {name for name, front_ends in LIGHTNINGS_OWN.items() if front_end in front_ends}
        assert known == {*names.split(), "auto"}, front_end
