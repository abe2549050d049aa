"""Compiles the C++ of the device, once for each torch and Python."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import sys
from pathlib import Path
from types import ModuleType

import torch

SOURCES = Path(__file__).parent / "csrc"
NAME = "fsdp_fake_device_C"
COMPLETE = "complete"  # the file that says that the folder's module is whole
FLAGS = ("-O1", "-std=c++20", "-fvisibility=hidden", "-w")


def load_extension() -> ModuleType:
    """The compiled module, which is made if it is not there."""
    directory = choose_directory()
    if not (directory / COMPLETE).exists():
        return _compile(directory)
    spec = importlib.util.spec_from_file_location(NAME, directory / f"{NAME}.so")
    if spec is None or spec.loader is None:
        raise ImportError(f"{directory} has no module of Python. Remove it, and import fsdp_fake_device again")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def choose_directory() -> Path:
    """The folder of the build for this torch, this Python and these sources."""
    parts = [torch.__version__, sys.version, *FLAGS]
    digest = hashlib.sha256("\0".join(parts).encode())
    for file in sorted(SOURCES.glob("*.[ch]*")):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    python = f"{sys.implementation.cache_tag}-torch-{torch.__version__}"
    return _choose_root() / f"{python}-{digest.hexdigest()[:16]}"


def _choose_root() -> Path:
    if named := os.environ.get("FSDP_FAKE_DEVICE_BUILD"):
        return Path(named).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fsdp-fake-device"


def _compile(directory: Path) -> ModuleType:
    # Where pip has installed ninja, though the environment may not be an activated one.
    os.environ["PATH"] = os.pathsep.join((os.environ.get("PATH", ""), str(Path(sys.executable).parent)))
    missing = [tool for tool in (os.environ.get("CXX", "c++"), "ninja") if shutil.which(tool) is None]
    if missing:
        raise ImportError(
            f"fsdp_fake_device compiles its device when it is first imported, and {' and '.join(missing)} is not on "
            "the path. Install a C++ compiler (`apt-get install g++`, or set CXX) and ninja (`pip install ninja`)"
        )
    from torch.utils import cpp_extension  # which is imported slowly

    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "of-processes").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of several processes, the others wait for the first
        (directory / "lock").unlink(missing_ok=True)  # of torch; it waits for ever for a process that was killed
        try:
            module: ModuleType = cpp_extension.load(
                NAME,
                [str(SOURCES / "device.cpp")],
                build_directory=str(directory),
                extra_cflags=list(FLAGS),
            )
        except RuntimeError as error:
            raise ImportError(
                f"fsdp_fake_device could not compile its device for torch {torch.__version__}: {error}"
            ) from error
        (directory / COMPLETE).touch()
        for file in directory.glob("*.o"):
            file.unlink()
    return module
