"""Forks the processes of ranks from one that has imported torch and Lightning, which takes each seconds.

That one is :mod:`multiprocessing`'s fork server. It has no threads, no process group and nothing of the tests' own
process; what it has imported is :mod:`fsdp_core.testing.preloaded`.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

__all__ = ["StartMethod", "end_process", "prepare", "start_process", "start_script"]

#: How a rank's process comes to be; as in :mod:`multiprocessing`.
StartMethod = Literal["forkserver", "spawn"]

#: The variable in which the fork server finds :data:`preloads`.
PRELOADS = "FSDP_TESTS_PRELOAD"

#: Set by the pytest plugin: what imports the suite is about to run it.
tests_will_run = False

#: Further modules that the fork server imports: of libraries that start no threads and open no devices by that. Set by
#: the pytest plugin, from ``fsdp_preload`` in pytest's configuration.
preloads: list[str] = []

#: What multiprocessing says of a forked process when the fork server has died, which alone knows how its children end.
_UNKNOWN = 255

_PRELOADED = "fsdp_core.testing.preloaded"

#: What the fork server is told before it imports anything. Threads of a numerical library would not outlive a fork.
_OF_SERVER = {"OMP_NUM_THREADS": "1"}


_DIED = (
    "A process that ranks are to be forked from died before it was ready: as it imported torch and Lightning, as it "
    "imported the script that this is called from, or because it was killed. What it wrote to stderr says which.\n"
    "To see the first, type: python -m fsdp_core.testing.preloaded\n"
    'In a script, call RankPool under `if __name__ == "__main__":`, in a file; then start it again.'
)


def prepare() -> None:
    """Let the fork server begin to import, where there is one, so that it need not be waited for later."""
    if _can_fork():
        _ensure_running()


def start_process(
    work: Callable[..., None], *arguments: Any, method: StartMethod, environment: Mapping[str, str]
) -> tuple[BaseProcess, Connection]:
    """Start a process that ends with this one.

    Args:
        work: What it does: called with its end of a pipe, then with the arguments. Importable by module and name.
        *arguments: Picklable.
        method: ``"forkserver"`` takes milliseconds. Where it can't be had (not on Linux; something has threads as soon
            as torch is imported, which no fork would have), the process is spawned.
        environment: Its environment variables, besides those of this process.

    Returns:
        The process, and this process's end of the pipe.
    """
    if method == "forkserver" and not (_can_fork() and _forks_without_threads()):
        method = "spawn"
    if method == "forkserver":
        _ensure_running()
    return _start(method, work, arguments, {**os.environ, **environment})


def start_script(
    path: Path, *arguments: str, folder: Path, output: Path, environment: Mapping[str, str], ranks: int = 1
) -> BaseProcess:
    """Run a script in a process forked as ranks are; for what is not about how Python starts and ends.

    Nothing that it registers with :mod:`atexit` is called, and variables that torch or Lightning read when they are
    imported were read before.

    Args:
        path: The script. Its folder comes first in ``sys.path``, and it runs as ``__main__``.
        *arguments: The rest of ``sys.argv``.
        folder: The working directory.
        output: The file that stdout and stderr go to.
        environment: All of its environment variables. What ``PYTHONPATH`` names comes next in ``sys.path``.
        ranks: Of how many ranks it is the first. The others are forked before it runs, and begin when it starts them as
            Lightning's launcher does: by ``subprocess.Popen([sys.executable, script, ...], env=..., cwd=...)``. What it
            starts in another way, or beyond that number, is started as ever.

    Returns:
        The process. It is ended with this one, and its exit status is that of the script. It leads a session of its
        own, so that ``os.killpg(process.pid, SIGKILL)`` ends what it has started, too.
    """
    method: StartMethod = "forkserver" if _can_fork() and _forks_without_threads() else "spawn"
    if method == "forkserver":
        _ensure_running()
    process, connection = _start(
        method,
        _run_script,
        (str(path), arguments, str(folder), str(output), ranks if method == "forkserver" else 1),
        dict(environment),
    )
    connection.close()
    return process


def _run_script(
    connection: Connection, path: str, arguments: tuple[str, ...], folder: str, output: str, ranks: int
) -> None:
    connection.close()
    os.setsid()
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)
    os.chdir(folder)
    sys.argv[:] = [path, *arguments]
    found = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[:0] = [os.path.dirname(path), *found]
    if ranks > 1:
        _fork_ranks(ranks - 1)
    runpy.run_path(path, run_name="__main__")


class _ForkedRank:
    """What a script has of a rank that it starts: as much of a ``Popen`` as launchers use."""

    def __init__(self, pid: int, pipe: Connection) -> None:
        self.pid, self.pipe = pid, pipe
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._wait(os.WNOHANG)

    def wait(self) -> int | None:
        return self._wait(0)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def _wait(self, how: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, how)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


def _fork_ranks(number: int) -> None:
    """Fork processes that wait until the script starts them, and let ``subprocess.Popen`` give those to it.

    Returns in this process at once, and in a forked one when it is started. One that never is ends with this one.
    """
    waiting: list[_ForkedRank] = []
    for _ in range(number):
        receiver, sender = multiprocessing.Pipe(duplex=False)
        pid = os.fork()
        if not pid:
            for pipe in (sender, *(other.pipe for other in waiting)):
                pipe.close()
            _wait_to_be_started(receiver)
            return
        receiver.close()
        waiting.append(_ForkedRank(pid, sender))
    command = [sys.executable, os.path.abspath(sys.argv[0])]

    class Popen(subprocess.Popen):  # type: ignore[type-arg]
        def __new__(cls, args: Any, *others: Any, **options: Any) -> Any:
            if not waiting or list(args[:2]) != command or others or options.keys() - {"env", "cwd"}:
                return super().__new__(cls)
            rank = waiting.pop(0)
            rank.pipe.send((list(args[1:]), dict(options.get("env") or os.environ), options.get("cwd") or os.getcwd()))
            return rank

    subprocess.Popen = Popen  # type: ignore[misc]


def _wait_to_be_started(receiver: Connection) -> None:
    try:
        argv, environment, folder = receiver.recv()
    except EOFError:
        os._exit(0)
    receiver.close()
    sys.argv[:] = argv
    os.chdir(folder)
    _begin(environment)


def end_process(process: BaseProcess, connection: Connection) -> int | None:
    """End a process: it is told to by ``None``, and killed if it does not listen.

    Args:
        process: What :func:`start_process` has given.
        connection: Likewise.

    Returns:
        Its exit status.
    """
    with contextlib.suppress(OSError):
        connection.send(None)
    process.join(timeout=2.0)
    if process.is_alive():
        process.kill()
        process.join()
    elif process.exitcode == _UNKNOWN and process.pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    connection.close()
    return process.exitcode


def _start(
    method: StartMethod, work: Callable[..., None], arguments: tuple[Any, ...], environment: dict[str, str]
) -> tuple[BaseProcess, Connection]:
    context: Any = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(work, theirs, arguments, environment))
    process.daemon = True
    with _variables(environment) if method == "spawn" else contextlib.nullcontext():
        try:
            process.start()
        except (EOFError, ConnectionError):
            if method == "spawn":
                raise
            raise RuntimeError(_DIED) from None
    theirs.close()
    return process, ours


def _work(
    work: Callable[..., None], connection: Connection, arguments: tuple[Any, ...], environment: dict[str, str]
) -> None:
    _begin(environment)
    work(connection, *arguments)


def _begin(environment: Mapping[str, str]) -> None:
    """What a forked process does first."""
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    os.environ.update(environment)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()  # random does so by itself after a fork
    _end_with_parent()


def _end_with_parent() -> None:
    """Let this process be ended as soon as the one that asked for it is gone, also by a signal that nobody can answer.

    The end of its pipe says so too, but a rank reads that between two calls, and not while it waits for a peer.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_exit_after, args=(parent,), name="ends with its parent", daemon=True).start()


def _exit_after(parent: BaseProcess) -> None:
    parent.join()
    os._exit(1)


def _can_fork() -> bool:
    # on a Mac, system libraries have threads; a device that a hardware session tests may not live through a fork
    return sys.platform == "linux" and os.environ.get("FSDP_TESTS_ACCELERATOR", "cpu") == "cpu"


_threads: list[str] | None = None


def _forks_without_threads() -> bool:
    """Whether the fork server has no threads, asked once; warns if it has."""
    global _threads
    if _threads is None:
        _ensure_running()
        process, connection = _start("forkserver", _tell_threads, (), dict(os.environ))
        try:
            _threads, failures = connection.recv()
        except EOFError:
            raise RuntimeError(_DIED) from None
        end_process(process, connection)
        for name, why in failures.items():
            warnings.warn(f"fsdp_preload names {name!r}, which can't be imported: {why}", stacklevel=2)
        if _threads:
            warnings.warn(
                f"Importing {', '.join(['torch', 'Lightning', *preloads])} starts threads ({', '.join(_threads)}), "
                "which a forked process would lack. So each rank of the tests is started anew, which takes seconds.\n"
                "Leave out of fsdp_preload what starts them. "
                'To say so in advance, write start_method = "spawn" in a subclass of RankPool, and name it as '
                "rank_pool in the suite's class.",
                stacklevel=2,
            )
    return not _threads


def _tell_threads(connection: Connection) -> None:
    from fsdp_core.testing.preloaded import FAILURES, THREADS

    connection.send((THREADS, FAILURES))


def _ensure_running() -> None:
    """Start the fork server, or another one instead of one that has died."""
    from multiprocessing import forkserver

    multiprocessing.get_context("forkserver").set_forkserver_preload([_PRELOADED])
    # checked on Python 3.11 to 3.14
    server: Any = getattr(forkserver, "_forkserver", None)
    before = getattr(server, "_forkserver_pid", None)
    with _variables({**_OF_SERVER, PRELOADS: " ".join(preloads)}):
        forkserver.ensure_running()
    if before is not None and server._forkserver_pid != before:
        warnings.warn(
            f"The process that ranks are forked from ({before}) has died, and another one ({server._forkserver_pid}) "
            "was started. What killed it is not known here; the kernel's log tells if memory was short.",
            stacklevel=2,
        )


@contextlib.contextmanager
def _variables(environment: Mapping[str, str]) -> Iterator[None]:
    """A context with other environment variables."""
    before = dict(os.environ)
    os.environ.update(environment)
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)
