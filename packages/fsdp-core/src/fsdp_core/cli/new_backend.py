"""``fsdp new-backend NAME``: the skeleton of a package with a backend; imports neither torch nor Lightning."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from string import Template

import click

from fsdp_core.errors import DuplicateStrategyError, FSDPError, StrategyInfoError
from fsdp_core.plugins import registry
from fsdp_core.plugins.lightning_names import LIGHTNINGS_OWN
from fsdp_core.plugins.strategy_info import StrategyInfo

__all__ = ["new_backend"]

_SKELETON = Path(__file__).parent / "skeleton"

#: Where each file of the skeleton goes.
_FILES = {
    "pyproject.toml": "pyproject.toml",
    "README.md": "README.md",
    "package.py": "src/$module/__init__.py",
    "py.typed": "src/$module/py.typed",
    "plugin.py": "src/$module/plugin.py",
    "backend.py": "src/$module/backend.py",
    "options.py": "src/$module/options.py",
    "constructor.py": "src/$module/constructor.py",
    "trainer.py": "src/$module/trainer.py",
    "fabric.py": "src/$module/fabric.py",
    "test_conformance.py": "tests/test_conformance.py",
}


@click.command("new-backend")
@click.argument("name")
@click.option("--path", type=click.Path(path_type=Path), help="The folder to write.  [default: ./fsdp-NAME]")
def new_backend(name: str, path: Path | None) -> None:
    """Write the skeleton of a package that provides the strategy NAME.

    Its tests can be run immediately, and show what is left to write.
    """
    package = _package(name)
    _check_free(name, package)
    folder = path or Path(package)
    if folder.exists():
        raise FSDPError(f"{str(folder)!r} already exists; nothing in it was changed.\nGive another folder: --path DIR")
    words = {
        "name": name,
        "package": package,
        "module": package.replace("-", "_"),
        "title": "".join(part[:1].upper() + part[1:] for part in re.split(r"[-_.]+", name)),
        "core": _built_for(),
    }
    for source, target in _FILES.items():
        file = folder / Template(target).substitute(words)
        file.parent.mkdir(parents=True, exist_ok=True)
        text = (_SKELETON / f"{source}.txt").read_text(encoding="utf-8")
        file.write_text(Template(text).substitute(words), encoding="utf-8")
        click.echo(file)
    click.echo(
        f"\nNext:\n  cd {folder}\n  pip install --editable '.[testing]'\n  fsdp list\n  pytest -x\n\n"
        f"The first test that fails says what to write next, in src/{words['module']}/backend.py."
    )


def _package(name: str) -> str:
    """The distribution's name for a strategy name.

    Example:
        >>> _package("my_fsdp"), _package("fsdp.tpu")
        ('fsdp-my-fsdp', 'fsdp-tpu')
    """
    StrategyInfo(name=name, summary="", trainer="a:B", accelerators=("cpu",))  # raises for an invalid name
    if not name[-1].isalnum():
        raise StrategyInfoError(
            f"a package can't be named after the strategy {name!r}, which ends in {name[-1]!r}.\n"
            f"Choose a name that ends in a letter or a digit, such as {name.rstrip('_.-')!r}."
        )
    words = re.sub(r"[-_.]+", "-", name)
    return words if words.startswith("fsdp-") else f"fsdp-{words}"


def _check_free(name: str, package: str) -> None:
    owners = [str(provider) for provider in registry.claimants(name)]
    if name in registry.FIRST_PARTY:  # also "xla_fsdp", which is one of Fabric's own names too, and is fsdp-xla's
        owners = owners or [registry.FIRST_PARTY[name]]
    elif name in LIGHTNINGS_OWN:
        owners = ["Lightning itself, which keeps it"]
    if owners:
        raise DuplicateStrategyError(
            f"the strategy name {name!r} is taken by {' and '.join(owners)}.\n"
            f"Give another one, such as: fsdp new-backend my_{name}"
        )
    try:
        is_taken = (
            package == "fsdp-core" or package in registry.FIRST_PARTY.values() or distribution(package) is not None
        )
    except PackageNotFoundError:
        is_taken = False
    if is_taken:
        raise DuplicateStrategyError(
            f"the strategy {name!r} would be in a package {package!r}, which already exists.\n"
            f"Give another name, such as: fsdp new-backend my_{name}"
        )


def _built_for() -> str:
    """The requirement on fsdp-core: every release that keeps the contract of this one."""
    major, minor = (int(number) for number in distribution("fsdp-core").version.split(".")[:2])
    until = f"0.{minor + 1}" if major == 0 else str(major + 1)
    return f"fsdp-core>={major}.{minor},<{until}"
