"""Real, tiny distributions on disk, and fresh interpreters that find them as they find installed packages."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from forked_scripts import ForkedScripts
from fsdp_core.testing import RankPool


@dataclass(frozen=True, kw_only=True)
class Site:
    """A folder that new interpreters search before their own site-packages."""

    path: Path
    scripts: ForkedScripts

    def distribution(
        self, name: str, *, version: str = "1.0", modules: Mapping[str, str] | None = None, plugins: str = ""
    ) -> None:
        """Install a distribution.

        Args:
            name: As in ``pip install``.
            version: As in its metadata.
            modules: Source by dotted module name.
            plugins: Its entry points in the group ``fsdp.strategies``, as lines ``name = module``.
        """
        info = self.path / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        if plugins:
            (info / "entry_points.txt").write_text(f"[fsdp.strategies]\n{dedent(plugins)}\n")
        for module, source in (modules or {}).items():
            *packages, last = module.split(".")
            folder = self.path.joinpath(*packages)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{last}.py").write_text(dedent(source))

    def plugin(self, name: str, source: str, *, version: str = "1.0", **modules: str) -> None:
        """Install a distribution whose one plugin module holds ``source``, its entry point named as its module."""
        module = name.replace("-", "_")
        source = "from fsdp_core import Capability, Option, StrategyInfo, hookimpl\n" + dedent(source)
        self.distribution(
            name,
            version=version,
            modules={f"{module}_plugin": source, **modules},
            plugins=f"{module} = {module}_plugin",
        )

    def provide(self, name: str, *strategies: str, version: str = "1.0", **modules: str) -> None:
        """Install a distribution that provides strategies, each given as the arguments of a ``StrategyInfo``."""
        calls = "".join(f"        StrategyInfo({strategy}),\n" for strategy in strategies)
        source = f"@hookimpl\ndef fsdp_strategies():\n    return [\n{calls}    ]\n"
        self.plugin(name, source, version=version, **modules)

    def run(self, *command: str, check: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a command that sees these distributions; ``check`` for success."""
        done = subprocess.run(
            command,
            env=self._environment(environment),
            cwd=self.path,
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=_SECONDS,
            check=False,
        )
        assert not check or done.returncode == 0, done.stderr + done.stdout
        return done

    def fork(
        self, *words: str, check: bool = True, warn: Sequence[str] = (), **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run Python with a command line, where it has imported torch, and nothing of Lightning or of ours.

        Args:
            *words: A script, or ``-m`` and a module; and its arguments.
            check: For success.
            warn: What would follow ``-W``.
            **environment: Further variables.
        """
        if sys.platform != "linux":
            return self.run(sys.executable, *(f"-W{option}" for option in warn), *words, check=check, **environment)
        done = self.scripts.run(
            words, folder=self.path, environment=self._environment(environment), warn=warn, timeout=_SECONDS
        )
        assert not check or done.returncode == 0, done.stderr + done.stdout
        return done

    def _environment(self, further: Mapping[str, str]) -> dict[str, str]:
        inherited = {key: value for key, value in os.environ.items() if key != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
        own = {"PYTHONPATH": str(self.path), "PYTHONIOENCODING": "utf-8", "OMP_NUM_THREADS": "1"}
        return {**inherited, **own, **further}

    def python(self, code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a script in a new interpreter.

        It may use ``failure(callable)``, the error that the call raises, as text.
        """
        return self.run(sys.executable, *arguments, self._script(code), **environment)

    def forked(self, code: str, *, warn: Sequence[str] = (), **environment: str) -> subprocess.CompletedProcess[str]:
        """The same by :meth:`fork`, for a script that is not about the import of torch itself."""
        return self.fork(self._script(code), warn=warn, **environment)

    def _script(self, code: str) -> str:
        script = self.path / "script.py"
        script.write_text(_PRELUDE + dedent(code), encoding="utf-8")
        return str(script)

    def fsdp(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run the command ``fsdp``; the last line of its stderr says which heavy packages it imported."""
        code = (
            "import atexit, sys\n"
            "heavy = ['torch', 'lightning', 'numpy', 'torch_xla', 'lightning_fabric', 'pytorch_lightning']\n"
            "show = lambda: print('heavy:', [one for one in heavy if one in sys.modules], file=sys.stderr)\n"
            "atexit.register(show)\n"
            "from fsdp_core.cli import main\n"
            "main()\n"
        )
        return self.run(sys.executable, "-c", code, *arguments, check=check)


#: A module of classes that a plugin's strategies may name: Lightning's own for one device.
IMPLEMENTATION = """
    import lightning.fabric.strategies
    import lightning.pytorch.strategies

    class ForTrainer(lightning.pytorch.strategies.SingleDeviceStrategy):
        def __init__(self, *, level=1, **kwargs):
            super().__init__(**kwargs)
            self.level = level

    class ForFabric(lightning.fabric.strategies.SingleDeviceStrategy):
        pass
"""

_SECONDS = 150  # for one start

_PRELUDE = """\
def failure(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("it raised nothing")


"""


@pytest.fixture
def transformers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The library, which nox has installed out of others' way: where Lightning finds it, it takes seconds."""
    monkeypatch.setattr(sys, "path", [*sys.path, *filter(None, [os.environ.get("FSDP_TESTS_APART")])])
    return importlib.import_module("transformers")


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Ranks that are processes, for all tests of a file."""
    with RankPool() as ranks:
        yield ranks


@pytest.fixture(scope="session")
def forked_scripts() -> Iterator[ForkedScripts]:
    """Forks scripts from one process, which lives through the session."""
    scripts = ForkedScripts()
    yield scripts
    scripts.close()


@pytest.fixture
def site(tmp_path: Path, forked_scripts: ForkedScripts) -> Site:
    """A site in which none of this project's own plugins is installed, whatever the tests' environment holds."""
    site = Site(path=tmp_path, scripts=forked_scripts)
    # importlib.metadata takes the first of two distributions of one name; these have no entry points.
    for name in ("fsdp-cuda-native", "fsdp-fsdp2", "fsdp-xla"):
        site.distribution(name, version="0")
    site.distribution("class-of-nothing", modules={"a": "class B: ..."})  # for strategies that no test builds
    return site


@pytest.fixture
def replace_first_party(site: Site) -> None:
    """Make room for a test's own distributions under this project's names."""
    for info in site.path.glob("*-0.dist-info"):
        (info / "METADATA").unlink()
        info.rmdir()
