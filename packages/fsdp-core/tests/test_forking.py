"""Ranks' processes: forked from one that has imported what takes long, and replaced when they are lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from conftest import Site
from fsdp_core.testing import RankError, RankPool
from fsdp_core.testing.launching.calls import Answer, answer_of
from fsdp_core.testing.launching.forking import StartMethod, end_process, prepare, start_process, start_script
from fsdp_core.testing.launching.one_process_ranks import OneProcessRanks
from fsdp_core.testing.launching.process_ranks import RankKind
from fsdp_core.testing.refusals import refusal

FORKS = sys.platform == "linux"
METHODS: list[StartMethod] = ["forkserver", "spawn"]


class Spawned(RankPool):
    start_method: ClassVar[StartMethod] = "spawn"


class OneProcess(OneProcessRanks):
    kind: ClassVar[RankKind] = "one controller"
    caller: ClassVar[str] = "test_forking:call_once"
    start_method: ClassVar[StartMethod] = "forkserver"

    def environment(self, world_size: int) -> dict[str, str]:
        return {}


def call_once(world_size: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> list[Answer]:
    return [answer_of(lambda: function(*arguments))] * world_size


@pytest.fixture
def pool() -> Iterator[RankPool]:
    with RankPool() as pool:
        yield pool


def look(connection: Any) -> None:
    preloaded = "fsdp_core.testing.launching.preloaded" in sys.modules
    connection.send((os.getppid(), preloaded, os.environ.get("TOLD"), os.environ.get("LATER"), os.getcwd()))


@pytest.mark.parametrize("method", METHODS)
def test_a_process_has_todays_variables_and_folder(
    method: StartMethod, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also a forked one, whose parent was started before."""
    prepare()
    monkeypatch.setenv("LATER", "2")
    monkeypatch.chdir(tmp_path)
    process, connection = start_process(look, method=method, environment={"TOLD": "1"})
    parent, preloaded, *told = connection.recv()
    assert told == ["1", "2", str(tmp_path)]
    assert end_process(process, connection, patience=100.0) == 0  # a busy machine may take its time
    forked = method == "forkserver" and FORKS
    assert preloaded == forked
    assert (parent != os.getpid()) == forked
    assert "TOLD" not in os.environ


def pids() -> int:
    return os.getpid()


def draws() -> tuple[float, float]:
    import random

    import numpy

    return random.random(), float(numpy.random.rand())


def test_no_two_processes_draw_the_same(pool: RankPool) -> None:
    drawn = [value for pair in pool.run(3, draws) for value in pair]
    assert len(set(drawn)) == len(drawn)


def fail_on_one() -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    if dist.get_rank() == dist.get_world_size() - 1:
        raise ValueError("on one rank alone")
    dist.barrier()


@pytest.mark.parametrize(("kind", "ranks", "more", "again"), [(RankPool, 2, 1, 3), (Spawned, 1, 0, 1)])
def test_ranks_that_have_failed_take_no_further_call(kind: type[RankPool], ranks: int, more: int, again: int) -> None:
    """One that waited for another is somewhere in the middle of it."""
    with kind() as pool:
        before = pool.run(ranks + more, pids)
        assert pool.run(ranks, pids) == before[:ranks]  # of one spawned rank, for each takes seconds
        with pytest.raises(RankError, match="on one rank alone"):
            pool.run(ranks, fail_on_one, timeout=30)
        if FORKS:
            for pid in before:
                wait_until_ended(pid)
        assert not set(pool.run(again, pids)) & set(before)


def ended(pid: int) -> bool:
    try:
        threads = os.listdir(f"/proc/{pid}/task")  # the first is a zombie while others are still ending
        return len(threads) <= 1 and "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2]
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_until_ended(pid: int) -> None:
    deadline = time.monotonic() + 20
    while not ended(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.skipif(not FORKS, reason="reads /proc")
def test_a_rank_that_dies_between_two_calls_is_named_and_replaced(pool: RankPool) -> None:
    before = pool.run(2, pids)
    os.kill(before[1], signal.SIGKILL)
    wait_until_ended(before[1])
    with pytest.warns(UserWarning, match=rf"died between two calls \(process {before[1]} with exit code -9\)"):
        after = pool.run(2, pids)
    assert not set(after) & set(before)


def parent() -> int:
    return os.getppid()


@pytest.mark.skipif(not FORKS, reason="processes are forked on Linux")
def test_a_fork_server_that_dies_is_named_and_replaced_and_so_are_its_ranks(pool: RankPool) -> None:
    """Nobody would tell any more how they end."""
    (before,) = set(pool.run(2, parent))
    os.kill(before, signal.SIGKILL)
    wait_until_ended(before)
    with pytest.warns(UserWarning, match=rf"forked from \({before}\) has died, and another one \(\d+\) was started"):
        assert len(pool.run(3, pids)) == 3
    assert before not in pool.run(3, parent)


THREADED = "import threading, time; threading.Thread(target=time.sleep, args=(600,), daemon=True).start()"


@pytest.fixture
def light_site(site: Site) -> Site:
    """A site whose torch and Lightning are empty: where ranks are forked from, to import them takes seconds."""
    site.distribution("stand-ins", modules={"torch": "", "lightning": ""})
    return site


@pytest.mark.skipif(not FORKS, reason="processes are forked on Linux")
@pytest.mark.parametrize("threads", [True, False])
def test_a_library_with_threads_has_ranks_spawned_and_one_that_cannot_be_preloaded_is_named(
    light_site: Site, threads: bool
) -> None:
    light_site.distribution("threaded", modules={"threaded_library": THREADED if threads else ""})
    light_site.distribution("raising", modules={"raising_library": "raise ValueError('no device')"})
    light_site.distribution("function", modules={"of_ranks": "import os\ndef told(pipe): pipe.send(os.getppid())\n"})
    light_site.python(f"""
        import os, warnings
        from fsdp_core.testing.launching import forking
        import of_ranks

        if __name__ == "__main__":
            forking.preloads += ["threaded_library", "raising_library", "missing_library"]
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                process, connection = forking.start_process(of_ranks.told, method="forkserver", environment={{}})
                assert (connection.recv() == os.getpid()) == {threads}
                forking.end_process(process, connection)
            first, second, *rest = (str(one.message) for one in told)
            assert "'raising_library', which can't be imported: ValueError: no device" in first, first
            assert "'missing_library', which can't be imported: ModuleNotFoundError" in second, second
            assert len(rest) == {threads}, rest
            for message in rest:
                imported = ", ".join(["torch", "Lightning", *forking.preloads])
                assert f"Importing {{imported}} starts threads (python" in message, message
                assert 'start_method = "spawn"' in message and "rank_pool" in message, message
    """)


def test_a_script_without_a_guard_is_told(light_site: Site) -> None:
    script = "import os\nfrom fsdp_core.testing import RankPool\nRankPool().run(1, os.getpid)\n"
    (light_site.path / "unguarded.py").write_text(script)
    told = light_site.run(sys.executable, "unguarded.py", check=False)
    assert told.returncode != 0
    assert 'if __name__ == "__main__":' in told.stderr


class Interruption(Exception):
    """Raised by a signal's handler, as pytest-timeout's is."""


def interrupt(*_: object) -> None:
    raise Interruption


def answer_late(seconds: float, answer: str) -> str:
    time.sleep(seconds)
    return answer


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="there are no timers")
@pytest.mark.parametrize("kind", [RankPool, OneProcess])
def test_no_answer_is_taken_for_that_to_another_call(kind: Any) -> None:
    """Where a call was left by an exception, such as that of a time limit."""
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with kind() as pool:
            assert set(pool.run(2, answer_late, 0.0, "first")) == {"first"}
            signal.setitimer(signal.ITIMER_REAL, 0.5)
            with pytest.raises(Interruption):
                pool.run(2, answer_late, 2.0, "old")
            assert set(pool.run(2, answer_late, 0.0, "new")) == {"new"}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def fork_and_wait(file: str) -> None:
    """As a rank whose loader's worker hangs before it runs any Python."""
    if not (pid := os.fork()):
        time.sleep(600)
    Path(file).write_text(str(pid))
    time.sleep(600)


@pytest.mark.skipif(not FORKS, reason="reads /proc")
@pytest.mark.parametrize("kind", [RankPool, OneProcess])
def test_ranks_that_do_not_answer_say_where_they_are_and_leave_no_process(kind: Any, tmp_path: Path) -> None:
    with kind() as pool, pytest.raises(RankError, match=r"^no answer within 2 s\n") as raised:
        pool.run(1, fork_and_wait, str(tmp_path / "pid"), timeout=2)
    assert f'test_forking.py", line {fork_and_wait.__code__.co_firstlineno + 5} in fork_and_wait\n' in str(raised.value)
    wait_until_ended(int((tmp_path / "pid").read_text()))


class TakesTwo(Exception):
    """Can't be unpickled: it is made anew from what it was given, which is too little."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(one)


def returns_what_cannot_be_unpickled() -> Exception:
    return TakesTwo("1", "2")


def test_what_cannot_be_unpickled_is_named_and_poisons_no_other_call(pool: RankPool) -> None:
    with pytest.raises(RankError, match=r"^what it returned can't be unpickled here: TypeError: .*\non rank [01] of 2"):
        pool.run(2, returns_what_cannot_be_unpickled)
    assert pool.run(2, answer_late, 0.0, "new") == ["new", "new"]


def test_arguments_may_come_from_where_a_rank_has_not_yet_looked(
    pool: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.run(1, pids)
    (tmp_path / "found_later.py").write_text("class Value: number = 3\ndef number_of(value): return value.number\n")
    monkeypatch.syspath_prepend(tmp_path)
    import found_later  # type: ignore[import-not-found]

    assert pool.run(1, found_later.number_of, found_later.Value()) == [3]


def fail_alone() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("on one rank alone")
    time.sleep(60)


def test_a_rank_that_waited_is_not_said_to_have_taken_too_long(pool: RankPool) -> None:
    raised = refusal(RankError, lambda: pool.run(2, fail_alone, timeout=50))
    assert "ended, because it waited for a rank that failed" in raised
    assert "no answer within" not in raised


def wait_for_nobody(folder: str) -> None:
    (Path(folder) / os.environ.get("RANK", "0")).write_text(str(os.getpid()))
    time.sleep(600)


#: How many processes each kind has for two ranks.
CALLED = {"RankPool": 2, "OneProcess": 1}

CALLER = """
import sys, threading
import test_forking
from fsdp_core.testing.launching import forking

def call(kind):
    with getattr(test_forking, kind)() as pool:
        pool.run(2, test_forking.wait_for_nobody, f"{sys.argv[1]}/{kind}", timeout=600)

if __name__ == "__main__":
    forking._forks_without_threads()  # asked once
    for kind in test_forking.CALLED:
        threading.Thread(target=call, args=(kind,)).start()
"""


@pytest.fixture(scope="module")
def left_by_a_killed_caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[int]]]:
    """The processes of a caller that was killed amid a call of each kind; one start is enough for both."""
    folder = tmp_path_factory.mktemp("caller")
    (folder / "caller.py").write_text(CALLER)
    files = {"RankPool": [folder / f"RankPool/{rank}" for rank in range(2)], "OneProcess": [folder / "OneProcess/0"]}
    for kind in files:
        (folder / kind).mkdir()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    caller = subprocess.Popen([sys.executable, "caller.py", str(folder)], cwd=folder, env=environment)
    deadline = time.monotonic() + 60
    while not all(file.exists() and file.read_text() for of_kind in files.values() for file in of_kind):
        assert time.monotonic() < deadline
        assert caller.poll() is None
        time.sleep(0.01)
    caller.kill()
    caller.wait()
    left = {kind: [int(file.read_text()) for file in of_kind] for kind, of_kind in files.items()}
    yield left
    for pid in (pid for pids in left.values() for pid in pids):
        if not ended(pid):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.skipif(not FORKS, reason="reads /proc")
@pytest.mark.parametrize("kind", CALLED)
def test_ranks_end_with_a_process_that_is_killed_amid_a_call(
    kind: str, left_by_a_killed_caller: dict[str, list[int]]
) -> None:
    """As a pytest that hangs is, by CI or by a shell's ``timeout``: a rank that waits for another reads no pipe."""
    for pid in left_by_a_killed_caller[kind]:
        wait_until_ended(pid)


def run_script(script: Path, *words: str, **options: Any) -> tuple[int | None, list[str]]:
    """How a script has ended, and the lines that it has written."""
    output = script.parent / "output.txt"
    options = {"folder": script.parent, "environment": dict(os.environ), **options}
    process = start_script(script, *words, output=output, **options)
    process.join(timeout=60)
    return process.exitcode, output.read_text().splitlines()


SCRIPT = """
import os, sys
import beside
print(__name__, sys.argv[1:], os.getcwd(), os.environ["TOLD"], "PATH" in os.environ, beside.HERE)
print("to stderr", file=sys.stderr)
if sys.argv[1] == "raises":
    raise ValueError("of the script")
sys.exit(3)
"""


@pytest.mark.parametrize(("how", "status"), [("exits", 3), ("raises", 1)])
def test_a_script_runs_as_by_itself(tmp_path: Path, how: str, status: int) -> None:
    (tmp_path / "beside.py").write_text("HERE = 'beside it'\n")
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "folder").mkdir()
    options: dict[str, Any] = {"folder": tmp_path / "folder", "environment": {"TOLD": "1"}}
    exit_status, (first, *rest) = run_script(tmp_path / "script.py", how, "2", **options)
    assert exit_status == status
    assert first == f"__main__ ['{how}', '2'] {tmp_path / 'folder'} 1 False beside it"
    assert "to stderr" in rest
    assert ("ValueError: of the script" in rest) == (how == "raises")


RANKS = """
import os, subprocess, sys
preloaded, gone = "preloaded" in str(sys.modules), "GONE" in os.environ
# In one write: the ranks share a pipe, and an unbuffered print() writes each of its arguments by itself.
os.write(1, f"{os.environ['RANK']} {preloaded} {sys.argv[1:]} {os.getcwd()} {__name__} {gone}\\n".encode())
if os.environ["RANK"] == "0":
    del os.environ["GONE"]
    started = [
        subprocess.Popen([sys.executable, __file__, f"as {rank}"], env={**os.environ, "RANK": rank}, cwd=folder)
        for rank, folder in (("1", None), ("2", "/"), ("3", None))
    ]
    assert [each.wait() for each in started] == [4, 5, 6]
    assert subprocess.run([sys.executable, "-c", "exit(7)"]).returncode == 7
    sys.exit(3)
sys.exit(3 + int(os.environ["RANK"]))
"""


@pytest.mark.skipif(not FORKS, reason="processes are forked on Linux")
def test_a_scripts_ranks_are_forked_and_begin_where_it_starts_them(tmp_path: Path) -> None:
    """As many as are asked for; a further one is started by the interpreter."""
    (tmp_path / "script.py").write_text(RANKS)
    environment = {**os.environ, "RANK": "0", "GONE": "soon"}
    status, lines = run_script(tmp_path / "script.py", environment=environment, ranks=3)
    assert status == 3, lines
    assert sorted(lines) == [
        f"0 True [] {tmp_path} __main__ True",
        f"1 True ['as 1'] {tmp_path} __main__ False",
        "2 True ['as 2'] / __main__ False",
        f"3 False ['as 3'] {tmp_path} __main__ False",
    ]


WAITING = """
import os, subprocess, sys, time
from pathlib import Path
here = Path(__file__).parent
if len(sys.argv) == 2:
    (here / "forked").write_text(str(os.getpid()))
    time.sleep(600)
started = subprocess.Popen([sys.executable, __file__, "waits"])
while not (here / "forked").exists() or not (here / "forked").read_text():
    time.sleep(0.01)
assert started.poll() is None
assert str(started.pid) == (here / "forked").read_text()
started.send_signal(9)
print("ended with", started.wait(), started.poll(), started.returncode, flush=True)
children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text()
print("never started:", children, flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.mark.skipif(not FORKS, reason="reads /proc")
def test_a_scripts_rank_can_be_ended_and_one_that_never_begins_ends_with_it(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(WAITING)
    status, (first, second) = run_script(tmp_path / "script.py", ranks=3)
    assert status == -9
    assert first == "ended with -9 -9 -9"
    wait_until_ended(int(second.removeprefix("never started: ")))


AGENT = """
import os, subprocess, sys, time
from pathlib import Path
worker = Path(__file__).parent / "elsewhere/worker.py"
started = subprocess.Popen(args=(sys.executable, "-u", worker, "1"), env=dict(os.environ), start_new_session=True)
os.killpg(started.pid, 0)
try:
    started.wait(0.01)
except subprocess.TimeoutExpired:
    print("waits", flush=True)
(worker.parent / "may end").touch()
print("ended with", started.wait(60), os.environ["PRELUDE"], flush=True)
"""

WORKER = """
import os, sys, time
from pathlib import Path
import beside
while not Path(__file__).with_name("may end").exists():
    time.sleep(0.01)
print(beside.HERE, sys.argv[1:], "preloaded" in str(sys.modules), os.getsid(0) == os.getpid(), flush=True)
sys.exit(4)
"""


def prelude() -> None:
    os.environ["PRELUDE"] = "after a prelude"


@pytest.mark.skipif(not FORKS, reason="processes are forked on Linux")
def test_the_ranks_of_a_launchers_agent_are_forked_too(tmp_path: Path) -> None:
    """They run another script than the agent's, in sessions of their own."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/beside.py").write_text("HERE = 'beside it'\n")
    (tmp_path / "elsewhere/worker.py").write_text(WORKER)
    (tmp_path / "agent.py").write_text(AGENT)
    assert run_script(tmp_path / "agent.py", ranks=2, prelude=prelude)[1] == [
        "waits",
        "beside it ['1'] True True",
        "ended with 4 after a prelude",
    ]
