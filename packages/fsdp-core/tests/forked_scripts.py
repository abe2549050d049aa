"""Forks scripts from a process that has imported torch, and what else Lightning imports, but not Lightning.

So Lightning, fsdp-core and plugins are imported by each script anew, in the order that it asks for, in a tenth of the
time. A script ends as by itself: what it has registered with :mod:`atexit` is called, and threads are waited for.

The second half of this file is that process. It was started without torch's entry points; a script's process has
torch look at the variable that turns them off, and load them, as ``import torch`` does at its end.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from select import select
from types import ModuleType
from typing import Any

#: What takes long of what Lightning imports. It is imported again by scripts, if a release of it no longer does.
IMPORTED = (
    *("torch", "torch._dynamo", "torch.onnx", "torch._inductor.compile_fx", "torch.distributed.fsdp"),
    *("torch.distributed.checkpoint", "torch.distributed.tensor.parallel", "torchmetrics", "jsonargparse", "fsspec"),
)
OURS = ("fsdp_", "lightning.", "lightning_fabric", "pytorch_lightning", "pluggy")


class ForkedScripts:
    """Runs scripts, one after the other. The process that they are forked from is started by the first of them."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[str] | None = None

    def run(
        self, words: Sequence[str], *, folder: Path, environment: Mapping[str, str], warn: Sequence[str], timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """Run Python with a command line.

        Args:
            words: A script and its arguments, or ``-m``, a module and its arguments.
            folder: The working directory, where the output is written too.
            environment: All of its environment variables.
            warn: What follows each ``-W``.
            timeout: Seconds.
        """
        if self._server is None:
            self._server = _started()
        server, output = self._server, [folder / f".forked-{stream}.txt" for stream in ("stdout", "stderr")]
        assert server.stdin is not None
        assert server.stdout is not None
        job = {"words": list(words), "folder": str(folder), "environment": dict(environment), "warn": list(warn)}
        server.stdin.write(json.dumps({**job, "output": [str(file) for file in output]}) + "\n")
        server.stdin.flush()
        if not select([server.stdout], [], [], timeout)[0]:
            self._kill()
            raise subprocess.TimeoutExpired(list(words), timeout)
        status = server.stdout.readline()
        assert status, "the process has died that scripts are forked from"
        out, err = [file.read_text(encoding="utf-8") for file in output]
        for file in output:
            file.unlink()
        return subprocess.CompletedProcess(list(words), int(status), out, err)

    def close(self) -> None:
        if self._server is not None:
            self._server.communicate(timeout=30)
            self._server = None

    def _kill(self) -> None:
        if self._server is not None:
            os.killpg(self._server.pid, signal.SIGKILL)
            self._server.communicate(timeout=30)
            self._server = None


def _started() -> subprocess.Popen[str]:
    without = ("PYTHONPATH", "TORCH_DEVICE_BACKEND_AUTOLOAD")
    inherited = {key: value for key, value in os.environ.items() if key not in without}
    told = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PYTHONIOENCODING": "utf-8", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, __file__],
        env={**inherited, **told},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


# -- the process that scripts are forked from --------------------------------------------------------------------------


def import_what_takes_long() -> None:
    for name in IMPORTED:
        importlib.import_module(name)
    ours = [name for name in sys.modules if name.startswith(OURS)]
    assert not ours, ours  # or scripts would not import them anew
    assert len(os.listdir("/proc/self/task")) == 1  # a forked process would lack the others
    gc.collect()
    gc.freeze()


def next_job() -> dict[str, Any] | None:
    """Fork for each line of stdin, and tell how that process has ended; in that process, what it is to do."""
    for line in iter(sys.stdin.readline, ""):
        child = os.fork()
        if child == 0:
            job: dict[str, Any] = json.loads(line)
            return job
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    return None


def become(job: dict[str, Any]) -> None:
    """Have the streams, variables, folder and path that Python would have with this command line."""
    for stream, file in ((0, os.devnull), (1, job["output"][0]), (2, job["output"][1])):
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(descriptor, stream)
        os.close(descriptor)
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    os.environ.clear()
    os.environ.update(job["environment"])
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    os.chdir(job["folder"])
    own = job["folder"] if job["words"][0] == "-m" else os.path.dirname(job["words"][0])
    sys.path[:1] = [own, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    importlib.invalidate_caches()
    for option in job["warn"]:
        sys.warnoptions.append(option)
        warnings._setoption(option)  # type: ignore[attr-defined]
    import torch

    if torch._is_device_backend_autoload_enabled():
        torch._import_device_backends()


if __name__ == "__main__":
    import_what_takes_long()
    if (_job := next_job()) is not None:
        become(_job)
        if _job["words"][0] == "-m":
            sys.argv[:] = _job["words"][1:]
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv[:] = _job["words"]
            sys.modules["__main__"] = _main = ModuleType("__main__")  # runpy's would be gone before Python ends
            _main.__file__ = sys.argv[0]
            exec(compile(Path(sys.argv[0]).read_bytes(), sys.argv[0], "exec"), _main.__dict__)
