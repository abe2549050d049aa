"""Pack what a machine with a card lacks and can't download into one folder: our wheels, and those of a few others.

    python tests-integration/gpu/pack.py            # into build/gpu

The machine has torch for CUDA, Lightning, transformers, pytest and their like, but no package index: see ``LACKING``.
``run.py`` installs what it finds in the folder.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: Where the wheels go. Git ignores it.
FOLDER = ROOT / "build" / "gpu"
PACKAGES = ("fsdp-core", "fsdp-cuda-native", "fsdp-fsdp2", "fsdp-xla")
#: What the tests import besides, and that machine does not have; without what these need, which it has.
LACKING = ("torchdata", "torchao")
#: That machine's Python, on x86-64 Linux.
PYTHON = "3.12"
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
#: The most that is carried there, in bytes.
LIMIT = 40 * 2**20


def pinned_release(name: str) -> str:
    """A requirement of the release that this project is tested with.

    Args:
        name: A package that ``constraints.txt`` pins.
    """
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return next(line for line in lines if line.startswith(f"{name}=="))


def run_pip(*words: str) -> None:
    """Run pip of this interpreter."""
    subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", *words, "--quiet"], check=True)


def build_wheels(folder: Path) -> None:
    """Build the wheel of each of this project's packages into a folder, by what is here or is fetched for it."""
    options = ["--no-build-isolation"] if importlib.util.find_spec("hatchling") else []
    for package in PACKAGES:
        run_pip("wheel", "--no-deps", *options, "--wheel-dir", str(folder), str(ROOT / "packages" / package))


def download_wheels(folder: Path) -> None:
    """Download the wheels of what the machine lacks, as its interpreter takes them, into a folder."""
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    interpreter = ("--python-version", PYTHON, "--implementation", "cp", "--only-binary=:all:", "--no-deps")
    run_pip("download", *interpreter, *platforms, "--dest", str(folder), *map(pinned_release, LACKING))


def check_size(folder: Path) -> int:
    """The bytes of the wheels in a folder.

    Raises:
        SystemExit: They are more than may be carried.
    """
    sizes = {path.name: path.stat().st_size for path in sorted(folder.glob("*.whl"))}
    if sum(sizes.values()) > LIMIT:
        listed = ", ".join(f"{name} {size / 2**20:.1f} MiB" for name, size in sizes.items())
        sys.exit(f"{folder} has {sum(sizes.values()) / 2**20:.1f} MiB, and may have {LIMIT / 2**20:.0f}: {listed}")
    return sum(sizes.values())


def main() -> None:
    """Pack."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="its wheels are replaced (default: build/gpu)")
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    foreign_files = [path.name for path in folder.iterdir() if path.suffix != ".whl"]
    if foreign_files:
        parser.error(f"{folder} holds {', '.join(foreign_files)}, which are no wheels. Name a new folder.")
    with tempfile.TemporaryDirectory() as fresh:
        build_wheels(Path(fresh))
        download_wheels(Path(fresh))
        check_size(Path(fresh))
        for path in folder.iterdir():
            path.unlink()
        for path in Path(fresh).iterdir():
            shutil.move(path, folder / path.name)
    print(f"{check_size(folder) / 2**20:.1f} MiB in {folder}:")
    print("\n".join(f"  {path.name}" for path in sorted(folder.glob("*.whl"))))


if __name__ == "__main__":
    main()
