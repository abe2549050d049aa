"""Forks ranks from a process that has imported torch and Lightning already, which saves each rank seconds.

This process is :mod:`multiprocessing`'s fork server. It has no threads, no process group and no state of the tests'
own process; it imports :mod:`fsdp_core.testing.launching.preloaded`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

__all__ = [
    "PATIENCE",
    "StartMethod",
    "allow_children",
    "end_process",
    "kill_process",
    "lead_session",
    "prepare",
    "read_stacks",
    "scaled_limit",
    "start_process",
    "start_script",
]

#: How a rank's process is started; as in :mod:`multiprocessing`.
StartMethod = Literal["forkserver", "spawn"]

#: The variable in which the fork server finds :data:`preloads`.
PRELOADS = "FSDP_TESTS_PRELOAD"

#: Set by the pytest plugin: whether the session will run the tests that it collects.
tests_will_run = False

#: Further modules that the fork server imports. Importing them must not start threads or open devices. Set by the
#: pytest plugin, from ``fsdp_preload`` in pytest's configuration.
preloads: list[str] = []

#: The exit code that multiprocessing reports for a forked process if the fork server, which alone knows it, has died.
_UNKNOWN_EXIT_CODE = 255

#: The signal that asks a process for its stacks. No library here uses it; macOS and Windows lack it.
_STACKS_SIGNAL: signal.Signals | None = getattr(signal, "SIGRTMAX", None)

#: Seconds until a process begins to write its stacks, and between two pieces of them.
_FIRST_PIECE_SECONDS, _NEXT_PIECE_SECONDS = 2.0, 0.5

_PRELOADED = "fsdp_core.testing.launching.preloaded"

#: Environment variables of the fork server. Threads of a numerical library would not survive a fork.
_SERVER_VARIABLES = {"OMP_NUM_THREADS": "1"}


_SERVER_DIED = (
    "The process that ranks are forked from died before it was ready: while it imported torch and Lightning, while it "
    "imported the script that this is called from, or because it was killed. Its stderr says which.\n"
    "To test the imports alone, type: python -m fsdp_core.testing.launching.preloaded\n"
    'In a script, call RankPool under `if __name__ == "__main__":`, in a file; then start it again.'
)

#: The environment variable with a factor for all time limits of the suite, for slow devices and simulators.
PATIENCE = "FSDP_PATIENCE"


def scaled_limit(seconds: float) -> float:
    """Multiply a time limit, which is for a machine of two cores, by the factor in :data:`PATIENCE`."""
    return seconds * float(os.environ.get(PATIENCE, "1"))


def prepare() -> None:
    """Start the fork server's imports, if the platform has one, so that later calls need not wait for them."""
    if _can_fork():
        _ensure_running()


def start_process(
    work: Callable[..., None], *arguments: Any, method: StartMethod, environment: Mapping[str, str]
) -> tuple[BaseProcess, Connection]:
    """Start a process that ends with this one.

    Args:
        work: A function that the process can import by module and name; called with its end of a pipe, then with the
            arguments.
        *arguments: Picklable arguments.
        method: ``"forkserver"`` takes milliseconds. The process is spawned instead where forking is not available: not
            on Linux, or if importing torch starts threads, which a forked process would lack.
        environment: Its environment variables, in addition to those of this process.

    Returns:
        The process, and this process's end of the pipe.
    """
    if method == "forkserver" and not (_can_fork() and _forks_without_threads()):
        method = "spawn"
    if method == "forkserver":
        _ensure_running()
    return _start_daemon(method, work, arguments, {**os.environ, **environment})


def allow_children() -> None:
    """Let this process, a daemon that ends with the tests, have children, such as the workers of a DataLoader."""
    multiprocessing.current_process().daemon = False


def start_script(
    path: Path,
    *arguments: str,
    folder: Path,
    output: Path,
    environment: Mapping[str, str],
    ranks: int = 1,
    prelude: Callable[[], None] | None = None,
) -> BaseProcess:
    """Run a script in a process that is forked as ranks are; not for tests of how Python starts and exits.

    Functions that the script registers with :mod:`atexit` are not called, and environment variables that torch or
    Lightning read on import have no effect.

    Args:
        path: The script. Its folder comes first in ``sys.path``, and it runs as ``__main__``.
        *arguments: The rest of ``sys.argv``.
        folder: The working directory.
        output: The file that stdout and stderr go to.
        environment: All of its environment variables. The folders in ``PYTHONPATH`` come next in ``sys.path``.
        ranks: The number of processes: the script's own, which is the first rank or a launcher's agent, and those that
            the script will start. The latter are forked before it runs, and wait until it calls, as Lightning's
            launcher and torchrun's agent do,
            ``subprocess.Popen([sys.executable, "-u", "script.py", ...], env=..., cwd=..., start_new_session=...)``.
            Processes that it starts in another way, or beyond this number, start as usual.
        prelude: A function that the process can import by module and name. It is called before further processes are
            forked, so that they have the modules that it imports.

    Returns:
        The process. It ends with this one, and its exit status is that of the script. It leads a session of its own,
        so that ``os.killpg(process.pid, SIGKILL)`` also ends the processes that it has started.
    """
    method: StartMethod = "spawn"
    forked_ranks = 0
    if _can_fork() and _forks_without_threads():
        method = "forkserver"
        forked_ranks = ranks - 1
        _ensure_running()
    script_arguments = (str(path), arguments, str(folder), str(output), forked_ranks, prelude)
    process, connection = _start_daemon(method, _run_script, script_arguments, dict(environment))
    connection.close()
    return process


def _run_script(
    connection: Connection,
    path: str,
    arguments: tuple[str, ...],
    folder: str,
    output: str,
    forked_ranks: int,
    prelude: Callable[[], None] | None,
) -> None:
    connection.close()
    allow_children()
    os.setsid()
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)
    sys.path[:0] = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if prelude is not None:
        prelude()
    os.chdir(folder)
    sys.argv[:] = [path, *arguments]
    if forked_ranks:
        _fork_ranks(forked_ranks)
    script = sys.argv[0]  # in a forked rank, the one that it was started with
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    runpy.run_path(script, run_name="__main__")


class _ForkedRank:
    """A script's handle of a forked rank: the part of ``Popen`` that launchers use."""

    def __init__(self, pid: int, pipe: Connection) -> None:
        self.pid, self.pipe = pid, pipe
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._wait(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int | None:
        deadline = time.monotonic() + (timeout or 0.0)
        while self._wait(0 if timeout is None else os.WNOHANG) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a forked rank", timeout or 0.0)
            time.sleep(0.01)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def _wait(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


def _fork_ranks(number: int) -> None:
    """Fork processes that wait until the script starts them, and make ``subprocess.Popen`` return them.

    Returns in this process at once, and in a forked process when the script starts it. A process that is never started
    ends with this one.
    """
    unstarted_ranks: list[_ForkedRank] = []
    for _ in range(number):
        rank_pipe, pipe = multiprocessing.Pipe()
        pid = os.fork()
        if pid == 0:  # this is the forked process
            for parent_pipe in (pipe, *(rank.pipe for rank in unstarted_ranks)):
                parent_pipe.close()
            _wait_to_be_started(rank_pipe)
            return
        rank_pipe.close()
        unstarted_ranks.append(_ForkedRank(pid, pipe))

    def start(cls: Any, args: Any = (), *positional: Any, **options: Any) -> Any:
        script_argv = _script_argv(args)
        set_options = {name for name, value in options.items() if value is not None}
        has_other_options = positional or set_options - {"env", "cwd", "start_new_session"}
        if not unstarted_ranks or script_argv is None or has_other_options:
            return object.__new__(cls)
        rank = unstarted_ranks.pop(0)
        environment = dict(options.get("env") or os.environ)
        folder = options.get("cwd") or os.getcwd()
        rank.pipe.send((script_argv, environment, folder, options.get("start_new_session", False)))
        with contextlib.suppress(EOFError, ConnectionError):
            rank.pipe.recv()  # sent when its session exists, which callers may end as soon as this returns
        return rank

    subprocess.Popen.__new__ = start  # type: ignore[method-assign]


def _script_argv(command: Any) -> list[str] | None:
    """Return the ``sys.argv`` of a Python script that a command runs; ``None`` if it runs anything else."""
    if not isinstance(command, (list, tuple)) or not command or command[0] != sys.executable:
        return None
    arguments = list(map(str, command[1:]))
    if arguments[:1] == ["-u"]:
        arguments.pop(0)
    return arguments if arguments and arguments[0].endswith(".py") else None


def _wait_to_be_started(pipe: Connection) -> None:
    try:
        argv, environment, folder, starts_session = pipe.recv()
    except EOFError:
        os._exit(0)
    if starts_session:
        os.setsid()
    pipe.send(None)
    pipe.close()
    sys.argv[:] = argv
    os.chdir(folder)
    _prepare_process(environment)


def lead_session(connection: Connection) -> None:
    """Let :func:`kill_process` also end what this process will start, and let :func:`read_stacks` read its stacks.

    Args:
        connection: This process's end of the pipe.
    """
    if hasattr(os, "setsid"):
        os.setsid()
    if _STACKS_SIGNAL is not None:
        faulthandler.register(_STACKS_SIGNAL, file=connection.fileno())


def read_stacks(process: BaseProcess, connection: Connection) -> str:
    """Read the stacks of a process that does not answer, even if one of its threads holds Python's lock.

    Nothing else can be read from the pipe afterwards.

    Args:
        process: The process, which has called :func:`lead_session`.
        connection: The other end of its pipe.

    Returns:
        A traceback of each thread; nothing where the platform has no such signal.
    """
    if _STACKS_SIGNAL is None or process.pid is None:
        return ""
    stacks = b""
    limit = _FIRST_PIECE_SECONDS
    with contextlib.suppress(OSError):  # the process has just ended
        os.kill(process.pid, _STACKS_SIGNAL)
        while connection.poll(limit) and (piece := os.read(connection.fileno(), 1 << 16)):
            stacks += piece
            limit = _NEXT_PIECE_SECONDS
    return stacks.decode(errors="replace")


def kill_process(process: BaseProcess) -> None:
    """End a process at once, and what it has started if it has called :func:`lead_session`.

    Args:
        process: The process.
    """
    if hasattr(os, "killpg") and process.pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()


def end_process(process: BaseProcess, connection: Connection, patience: float = 2.0) -> int | None:
    """End a process: send it ``None``, and kill it if it does not exit.

    Args:
        process: The process that :func:`start_process` returned.
        connection: The pipe that it returned.
        patience: The seconds after which it is killed.

    Returns:
        Its exit status.
    """
    with contextlib.suppress(OSError):
        connection.send(None)
    process.join(timeout=patience)
    if process.is_alive():
        kill_process(process)
        process.join()
    elif process.exitcode == _UNKNOWN_EXIT_CODE and process.pid is not None:  # it may still run
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    connection.close()
    return process.exitcode


def _start_daemon(
    method: StartMethod, work: Callable[..., None], arguments: tuple[Any, ...], environment: dict[str, str]
) -> tuple[BaseProcess, Connection]:
    context: Any = multiprocessing.get_context(method)
    connection, child_connection = context.Pipe()
    process = context.Process(target=_run_work, args=(work, child_connection, arguments, environment))
    process.daemon = True
    with _extra_variables(environment) if method == "spawn" else contextlib.nullcontext():
        try:
            process.start()
        except (EOFError, ConnectionError):
            if method == "spawn":
                raise
            raise RuntimeError(_SERVER_DIED) from None
    child_connection.close()
    return process, connection


def _run_work(
    work: Callable[..., None], connection: Connection, arguments: tuple[Any, ...], environment: dict[str, str]
) -> None:
    _prepare_process(environment)
    faulthandler.enable()  # a rank that crashes in a library's code says where
    work(connection, *arguments)


def _prepare_process(environment: Mapping[str, str]) -> None:
    """Set the environment, the random numbers and the scheduling of a process that has just started."""
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    os.environ.update(environment)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()  # Python's own generator seeds itself after a fork
    _schedule_as_batch()
    _end_with_parent()


def _schedule_as_batch() -> None:
    """Schedule this process, and all that it starts, such that a waking thread does not preempt another one.

    gloo's thread wakes up at each message, and polls for it while another thread of the rank is still sending. With
    fewer cores than threads, it often preempts that very thread. In a small fit on two ranks, on two busy cores, this
    took four tenths of the CPU seconds; on idle cores it is less.
    """
    if sys.platform == "linux":
        with contextlib.suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _end_with_parent() -> None:
    """End this process as soon as its parent has ended, even by a signal that can't be handled.

    The end of the pipe would also show that the parent is gone, but a rank reads its pipe only between two calls.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_exit_after, args=(parent,), name="ends with its parent", daemon=True).start()


def _exit_after(parent: BaseProcess) -> None:
    parent.join()
    if hasattr(os, "killpg") and os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)  # and what it has started
    os._exit(1)


def _can_fork() -> bool:
    # Only on Linux, since system libraries of macOS have threads; and on the CPU, since a device may not survive a
    # fork.
    is_on_cpu = os.environ.get("FSDP_TESTS_ACCELERATOR", "cpu") == "cpu"
    return sys.platform == "linux" and (is_on_cpu or os.environ.get("FSDP_TESTS_FORK") == "1")


_server_threads: list[str] | None = None


def _forks_without_threads() -> bool:
    """Whether the fork server has no threads. It is asked once, and a warning says if it has some."""
    global _server_threads
    if _server_threads is None:
        _ensure_running()
        process, connection = _start_daemon("forkserver", _send_threads, (), dict(os.environ))
        try:
            _server_threads, failures = connection.recv()
        except EOFError:
            raise RuntimeError(_SERVER_DIED) from None
        end_process(process, connection)
        for name, reason in failures.items():
            warnings.warn(f"fsdp_preload names {name!r}, which can't be imported: {reason}", stacklevel=2)
        if _server_threads:
            modules = ", ".join(["torch", "Lightning", *preloads])
            warnings.warn(
                f"Importing {modules} starts threads ({', '.join(_server_threads)}), which a forked process would "
                "lack. So each rank of the tests is spawned, which takes seconds.\n"
                "Remove the modules that start them from fsdp_preload. "
                'To avoid this warning, write start_method = "spawn" in a subclass of RankPool, and name it as '
                "rank_pool in the suite's class.",
                stacklevel=2,
            )
    return not _server_threads


def _send_threads(connection: Connection) -> None:
    from fsdp_core.testing.launching.preloaded import FAILURES, THREADS

    connection.send((THREADS, FAILURES))


def _ensure_running() -> None:
    """Start the fork server, or another one instead of one that has died."""
    from multiprocessing import forkserver

    multiprocessing.get_context("forkserver").set_forkserver_preload([_PRELOADED])
    # checked on Python 3.11 to 3.14
    server: Any = getattr(forkserver, "_forkserver", None)
    old_pid = getattr(server, "_forkserver_pid", None)
    with _extra_variables({**_SERVER_VARIABLES, PRELOADS: " ".join(preloads)}):
        forkserver.ensure_running()
    if old_pid is not None and server._forkserver_pid != old_pid:
        warnings.warn(
            f"The process that ranks are forked from ({old_pid}) has died, and another one ({server._forkserver_pid}) "
            "was started. The cause is not known here; the kernel's log shows if memory was short.",
            stacklevel=2,
        )


@contextlib.contextmanager
def _extra_variables(environment: Mapping[str, str]) -> Iterator[None]:
    """A context with additional environment variables."""
    variables_before = dict(os.environ)
    os.environ.update(environment)
    try:
        yield
    finally:
        for name in set(os.environ) - set(variables_before):
            del os.environ[name]
        os.environ.update(variables_before)
