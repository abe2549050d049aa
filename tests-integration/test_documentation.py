"""The documentation is true: its scripts run as they stand, and the messages that it quotes are in the sources."""

from __future__ import annotations

import ast
import json
import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from forked_scripts import run_forked
from fsdp_core import errors, strategies
from fsdp_core.testing.launching.processes import start

ROOT = Path(__file__).parent.parent
PAGES = {name: (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/quickstart.md")}
SCRIPTS = {
    f"{name} #{number}": block
    for name, text in PAGES.items()
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL), start=1)
    if "__main__" in block
}
TROUBLESHOOTING = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
MESSAGES = [message for message in re.findall(r"^### `(.+)`$", TROUBLESHOOTING, flags=re.MULTILINE) if " " in message]


def test_the_scripts_are_found() -> None:
    assert sorted(SCRIPTS) == ["README.md #1", "docs/quickstart.md #1", "docs/quickstart.md #3"]
    assert len(MESSAGES) > 10


Ran = Callable[[str], tuple[str, Path]]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Runs a page's script, each once: what it wrote, and the folder that it ran in."""

    @cache
    def run(name: str) -> tuple[str, Path]:
        folder = tmp_path_factory.mktemp("script")
        (folder / "script.py").write_text(SCRIPTS[name], encoding="utf-8")
        return run_forked(folder / "script.py", folder=folder), folder

    return run


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_run_as_they_stand(name: str, ran: Ran) -> None:
    told, folder = ran(name)
    assert "weights_only" not in told  # which Lightning logs of each save on each rank
    assert told.count(" is sharded over 2 ranks (gloo), in ") == 1
    if name == "docs/quickstart.md #1":
        (line,) = re.findall(r"^fsdp2: .+$", PAGES["docs/quickstart.md"], flags=re.MULTILINE)
        assert line in told
    (saved,) = folder.glob("*.ckpt")
    assert (saved / "manifest.json").is_file()


def test_the_quickstart_goes_on_with_another_number_of_processes(ran: Ran, tmp_path: Path) -> None:
    script = SCRIPTS["docs/quickstart.md #1"]
    shutil.copytree(ran("docs/quickstart.md #1")[1], tmp_path, dirs_exist_ok=True)
    resume = re.findall(r"```python\n(.*?)```", PAGES["docs/quickstart.md"], flags=re.DOTALL)[1]
    definitions, main = script.split("    trainer = ")[0], resume.replace("\n", "\n    ")
    script = f"{definitions}    {main}\n    print('epochs:', trainer.current_epoch)\n"
    (tmp_path / "script.py").write_text(script, encoding="utf-8")
    assert "epochs: 8" in run_forked(tmp_path / "script.py", folder=tmp_path, ranks=1)


@pytest.mark.drawn
@pytest.mark.parametrize(
    "launcher",
    [(), ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")],
    ids=["as it is", "torchrun"],
)
def test_the_quickstart_as_users_start_it(launcher: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPTS["docs/quickstart.md #1"], encoding="utf-8")
    ended = start(tmp_path, *launcher, "script.py")
    assert ended.status == 0, ended.output
    assert ended.output.count(" is sharded over 2 ranks (gloo), in ") == 1
    assert json.loads((tmp_path / "run1.ckpt/manifest.json").read_text(encoding="utf-8"))["world_size"] == 2


@cache
def literals() -> list[str]:
    """The strings of all sources."""
    return [
        node.value
        for path in ROOT.glob("packages/*/src/**/*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]


@pytest.mark.parametrize("message", MESSAGES)
def test_quoted_messages_are_in_the_sources(message: str) -> None:
    for part in filter(None, (part.strip() for part in message.split("…"))):
        assert any(part in literal for literal in literals()), f"no message says {part!r}"


def test_every_error_is_explained() -> None:
    never_seen_by_users = {"FSDPError", "CheckpointError", "StrategyInfoError"}
    unexplained = [n for n in errors.__all__ if n not in never_seen_by_users and f"`{n}`" not in TROUBLESHOOTING]
    assert unexplained == []


def test_the_names_that_fabric_run_leaves_out() -> None:
    """Lightning decides by words in them; the others are taken."""
    from lightning.fabric.cli import _get_supported_strategies

    section = TROUBLESHOOTING.split("### `fabric run`")[1].split("\n### ")[0]
    left_out = set(strategies()) - set(_get_supported_strategies())
    assert left_out == {"fsdp2_cpu_offload", "fsdp_native_full_shard_offload"}
    assert all(f"`{name}`" in section for name in left_out)
