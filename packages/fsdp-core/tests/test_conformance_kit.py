"""The conformance kit itself: what runs, what can't be left out, what is refused, and what the report says."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from textwrap import dedent
from typing import Any, ClassVar, get_args

import pytest

from conftest import Site
from fsdp_core.plugins.capabilities import Capability
from fsdp_core.plugins.strategy_info import FrontEnd
from fsdp_core.sharding.precision_strings import PRECISIONS
from fsdp_core.testing.refusals import assert_says
from fsdp_core.testing.suite import PresetSuite, StrategySuite
from fsdp_core.testing.suite.base_class import Clauses
from fsdp_core.testing.suite.interface.capabilities import ASKED
from fsdp_core.testing.suite.interface.contract import misfits
from fsdp_core.testing.suite.numerics.precision import DTYPES

TINY = 'name="tiny", summary="s", trainer="tiny:T", accelerators=("cpu",), capabilities=("clip_by_norm",)'
SUITE = """
    import pytest
    from fsdp_core import Capability
    from fsdp_core.testing.suite.base_class import Clauses, requires, undeclared


    class Suite(Clauses):
        def test_passes(self): ...

        def test_is_wrong(self):
            raise AssertionError("1 is not 2")

        @pytest.mark.parametrize("n", [1, 2])
        def test_of_two(self, n):
            assert n == 1

        @requires(Capability.CLIP_BY_NORM, "level")
        def test_clips(self): ...

        @requires(Capability.CPU_OFFLOAD)
        def test_offloads(self):
            raise AssertionError("must not run")

        @pytest.mark.parametrize("depth", [1, pytest.param(2, marks=requires("depth"))])
        def test_options(self, depth):
            assert depth == 1

        @undeclared(Capability.CLIP_BY_NORM)
        def test_refuses_to_clip(self):
            raise AssertionError("must not run")

        @undeclared(Capability.CPU_OFFLOAD)
        def test_refuses_to_offload(self): ...

        def test_deselected(self): ...

        @pytest.mark.skipif(True, reason="the suite says so")
        def test_not_on_this_platform(self): ...
"""


@pytest.fixture
def tiny(site: Site) -> Site:
    """A site with a strategy that nothing runs, and a suite of clauses for it."""
    site.provide("tiny-plugin", f'{TINY}, options=(Option(name="level"),)')
    (site.path / "suite_of_tests.py").write_text(dedent(SUITE))
    return site


def pytest_on(site: Site, source: str, *arguments: str, name: str = "test_tiny.py", light: bool = False) -> Any:
    """Run pytest on a file of tests; ``light`` for one that has imported nothing."""
    (site.path / name).write_text("from suite_of_tests import *\n\n" + dedent(source))
    quiet = ("-q", "-p", "no:cacheprovider", "-rA")
    words = ("-m", "pytest", *quiet, *arguments, name)
    if light:
        return site.run(sys.executable, *words, check=False, PYTHONDONTWRITEBYTECODE="1")
    return site.fork(*words, check=False, PYTHONDONTWRITEBYTECODE="1")


def clauses() -> Iterator[tuple[str, list[Any]]]:
    """Every clause of the whole suite, with the marks of it and of its sets of parameters."""
    for name in StrategySuite.clauses():
        marks = list(getattr(getattr(StrategySuite, name), "pytestmark", ()))
        for mark in [mark for mark in marks if mark.name == "parametrize"]:
            marks += [one for value in mark.args[1] for one in getattr(value, "marks", ())]
        yield name, [getattr(one, "mark", one) for one in marks]


@pytest.mark.parametrize("capability", Capability)
def test_every_capability_is_shown_to_work_and_to_be_refused(capability: Capability) -> None:
    marks = [mark for _, found in clauses() for mark in found]
    assert [mark for mark in marks if mark.name == "fsdp_requires" and capability in mark.args]
    assert [mark for mark in marks if mark.name == "fsdp_undeclared" and capability in mark.args]
    front_ends = set(get_args(FrontEnd)) - ({"fabric"} if capability is Capability.MANUAL_OPTIMIZATION else set())
    assert ASKED[capability].keys() == front_ends


def test_no_helper_or_clause_hides_another() -> None:
    for suite in (StrategySuite, PresetSuite):
        defined = [name for base in suite.__mro__ for name in vars(base).get("_defined", {})]
        assert len(defined) == len(set(defined))
        assert suite.changed() == []


class Suite(Clauses):
    """Something to inherit."""

    limit: ClassVar[int] = 1

    def test_it(self) -> None: ...

    def helped(self) -> None: ...


def test_settings_and_further_tests_are_a_packages_own() -> None:
    mine = type("TestMine", (Suite,), {"strategy": "mine", "limit": 2, "test_more": lambda self: None})
    assert mine.clauses() == ["test_it"]  # type: ignore[attr-defined]
    assert mine.changed() == []  # type: ignore[attr-defined]
    mine.test_it = lambda self: None  # type: ignore[attr-defined]
    assert mine.changed() == ["Suite.test_it"]  # type: ignore[attr-defined]


class OtherSuite(Clauses):
    """Has the same clause."""

    def test_it(self) -> None: ...


@pytest.mark.parametrize(
    ("name", "value"), [("test_it", None), ("test_it", lambda self: None), ("helped", None), ("changed", None)]
)
def test_clauses_and_what_they_call_cannot_be_overridden(name: str, value: Any) -> None:
    owner = "Clauses" if name == "changed" else r"Suite\.\nGive it another"
    with pytest.raises(TypeError, match=rf"TestMine\.{name} would hide the suite's own, in {owner}"):
        type("TestMine", (Suite,), {"strategy": "mine", name: value})


def test_two_suites_cannot_have_a_clause_of_one_name() -> None:
    with pytest.raises(TypeError, match=r"Suite\.test_it would hide the suite's own, in OtherSuite"):
        type("TestBoth", (Suite, OtherSuite), {"strategy": "mine"})


def test_what_runs_and_what_the_report_says_of_it(tiny: Site) -> None:
    """The same, whether or not pytest-xdist runs it."""
    source = """
        class TestTiny(Suite):
            strategy = "tiny"
            expected_failures = {"test_of_two[2]": "it can't count further"}

            def test_own(self): ...
    """
    want = {
        "test_passes": ("passed", ""),
        "test_is_wrong": ("failed", "AssertionError: 1 is not 2"),
        "test_of_two[1]": ("passed", ""),
        "test_of_two[2]": ("failed as expected", "it can't count further"),
        "test_clips": ("passed", ""),
        "test_offloads": ("does not apply", "'tiny' does not declare cpu_offload"),
        "test_options[1]": ("passed", ""),
        "test_options[2]": ("does not apply", "'tiny' has no option depth"),
        "test_refuses_to_offload": ("passed", ""),
        "test_deselected": ("not run", ""),
        "test_not_on_this_platform": ("skipped", "the suite says so"),
    }
    for distribution in ((), ("-n", "1")):  # several workers would all report the same classes
        names = ("--fsdp-report=found/r.json", "--fsdp-report=found/r.html")
        done = pytest_on(tiny, source, "--deselect=test_tiny.py::TestTiny::test_deselected", *names, *distribution)
        assert done.returncode == 1, done.stdout + done.stderr
        found = json.loads((tiny.path / "found" / "r.json").read_text())
        (suite,) = found["suites"]
        rows = {row["clause"]: row for row in suite["clauses"]}
        assert {name: (row["outcome"], row["reason"].split("\n")[0]) for name, row in rows.items()} == want
        assert (suite["strategy"], suite["package"], suite["verdict"]) == ("tiny", "tiny-plugin 1.0", "failed")
        assert suite["totals"]["does not apply"] == 2
        results = {one["name"]: (one["declared"], one["result"]) for one in suite["capabilities"]}
        assert results.keys() == set(Capability)
        assert (results["clip_by_norm"], results["cpu_offload"]) == ((True, "works"), (False, "refused"))
        assert results["meta_init"] == (False, "not shown")
        assert found["versions"]["fsdp-core"]
        assert found["versions"]["torch"]
        html = (tiny.path / "found" / "r.html").read_text()
        for text in (
            "<code>tiny</code>",
            "tiny-plugin 1.0",
            "test_of_two[2]",
            "it can&#x27;t count further",
            "refused",
        ):
            assert text in html
        assert "<script" not in html
        assert "http" not in html.replace("http-equiv", "")


def test_an_interrupted_run_reports_what_it_has_run(tiny: Site) -> None:
    """With pytest-xdist too, whose workers then send nothing at their end."""
    source = """
        import os, signal, time

        class TestTiny(Suite):
            strategy = "tiny"
            expected_failures = {"test_is_wrong": "so it is", "test_of_two[2]": "it can't count further"}

        def test_that_takes_long():
            time.sleep(1)  # until what has run is reported
            os.kill(INTERRUPTED(), signal.SIGINT)
            time.sleep(60)
    """
    # shells let what they start beside them ignore the signal
    interruptible = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    (tiny.path / "conftest.py").write_text(interruptible)
    for distribution, interrupted in (((), "os.getpid"), (("-n", "1"), "os.getppid")):
        own = source.replace("INTERRUPTED", interrupted)
        done = pytest_on(tiny, own, "--fsdp-report=found/r.json", *distribution)
        assert done.returncode == pytest.ExitCode.INTERRUPTED, done.stdout + done.stderr
        (suite,) = json.loads((tiny.path / "found" / "r.json").read_text())["suites"]
        assert suite["verdict"] == "incomplete"
        assert (suite["totals"]["passed"], suite["totals"]["failed as expected"]) == (6, 2)
        results = {one["name"]: one["result"] for one in suite["capabilities"]}
        assert results["clip_by_norm"] == "works, as far as run"
        (tiny.path / "found" / "r.json").unlink()


def test_an_expected_failure_that_passes_fails(tiny: Site) -> None:
    source = """
        class TestTiny(Suite):
            strategy = "tiny"
            expected_failures = {"test_passes": "mended since", "test_of_two": "one of them passes"}
    """
    said = pytest_on(tiny, source).stdout
    assert_says(said, "[XPASS(strict)] mended since", "FAILED test_tiny.py::TestTiny::test_of_two[1]")
    assert "XFAIL test_tiny.py::TestTiny::test_of_two[2]" in said


def test_clauses_that_something_else_leaves_out_fail(tiny: Site) -> None:
    (tiny.path / "conftest.py").write_text(
        dedent("""
        import pytest

        pytest_plugins = ["fsdp_core.testing.pytest_plugin"]  # not needed, and harmless

        @pytest.fixture(autouse=True)
        def leaves_out(request):
            if request.node.name == "test_passes":
                pytest.skip("not today")

        def pytest_collection_modifyitems(items):
            for item in items:
                if item.name == "test_clips":
                    item.add_marker(pytest.mark.skip(reason="by a mark"))
                if item.name == "test_is_wrong":
                    item.add_marker(pytest.mark.xfail(reason="excused"))
    """)
    )
    source = """
        class TestTiny(Suite):
            strategy = "tiny"

            @pytest.mark.skip(reason="a test of one's own is one's own")
            def test_own(self): ...

        def test_light():
            pytest.skip("none of the suite's")
    """
    said = pytest_on(tiny, source).stdout
    for clause, reason in {"passes": "not today", "clips": "by a mark", "is_wrong": "excused"}.items():
        assert f" test_tiny.py::TestTiny::test_{clause} - test_{clause} is a clause" in said
        assert f"test_{clause} is a clause of the conformance suite, and was left out: {reason}" in said
        assert f"python -m pytest test_tiny.py::TestTiny::test_{clause}\n" in said, "how to repeat it alone"
    for reason in ("the suite says so", "a test of one's own is one's own", "none of the suite's"):
        assert any(line.startswith("SKIPPED") and line.endswith(reason) for line in said.splitlines())


#: What a class does, and what is said of it when it is collected.
REFUSED = {
    "expects what is no clause": (
        'expected_failures = {"test_pases": "why"}',
        ["TestTiny expects 'test_pases' to fail", "Did you mean 'test_passes'?", "--collect-only"],
    ),
    "expects without a reason": ('expected_failures = {"test_passes": " "}', ["does not say why"]),
    "expects what does not apply": ('expected_failures = {"test_offloads": "why"}', ["no clause that runs for 'tiny'"]),
    "names no strategy": ("del strategy", ["names no strategy", 'strategy = "yours"']),
    "names another strategy": ('strategy = "tinny"', ["no strategy named 'tinny'. Did you mean 'tiny'?"]),
}

#: What is done to a class of clauses afterwards.
TAMPERED = {
    "replaced": "Suite.test_passes = None",
    "removed": "del Suite.test_passes",
    "marked": "pytest.mark.skip(Suite.test_passes)",
    "hidden": "TestTiny.test_passes = lambda self: None",
}


def test_classes_that_are_refused(tiny: Site) -> None:
    files = {}
    for i, (line, words) in enumerate(REFUSED.values()):
        files[f"test_refused_{i}.py"] = (f'class TestTiny(Suite):\n    strategy = "tiny"\n    {line}\n', words)
    for i, line in enumerate(TAMPERED.values()):
        source = f'class TestTiny(Suite):\n    strategy = "tiny"\n\n{line}\n'
        files[f"test_tampered_{i}.py"] = (source, ["test_passes was replaced or marked", "expected_failures"])
    for name, (source, _) in files.items():
        suite = (tiny.path / "suite_of_tests.py").read_text()
        (tiny.path / name).write_text(f"{suite}\n\n{source}")
    run = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--continue-on-collection-errors")
    said = tiny.fork(*run, *files, check=False).stdout
    for name, (_, words) in files.items():
        assert_says(said.split(f"ERROR collecting {name}")[1].split("ERROR collecting")[0], *words)


def test_the_plugin_is_light_and_says_what_a_report_may_be_called(tiny: Site) -> None:
    (tiny.path / "suite_of_tests.py").write_text("")
    source = """
        import sys

        def test_light():
            assert "fsdp_core.testing.pytest_plugin" in sys.modules
            assert not {"torch", "lightning", "numpy", "psutil"} & set(sys.modules)
    """
    assert pytest_on(tiny, source, light=True).returncode == 0
    done = pytest_on(tiny, source, "--fsdp-report=found.txt", light=True)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "--fsdp-report=found.txt has an unknown suffix" in done.stderr


class Promised:
    """A contract."""

    def clip(self, parameters: Any, norm: float = 2.0, *, strict: bool = False) -> None: ...

    @property
    def rank(self) -> int:
        return 0


class Extended(Promised):
    """Keeps it."""

    def clip(self, parameters: Any, norm: float = 2.0, *, strict: bool = False, more: int = 1) -> None: ...


class Forwarding(Promised):
    """Keeps it."""

    def clip(self, *args: Any, **kwargs: Any) -> None: ...


class OtherDefault(Promised):
    """Does something else when nothing is given."""

    def clip(self, parameters: Any, norm: float = 1.0, *, strict: bool = False) -> None: ...


class NeedsMore(Promised):
    """Can't be called as promised."""

    def clip(self, parameters: Any, norm: float = 2.0, *, strict: bool = False, more: int) -> None: ...  # type: ignore[override]


class Method(Promised):
    """Is called where it was read."""

    def rank(self) -> int:  # type: ignore[override]
        return 0


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (Extended, []),
        (Forwarding, []),
        (OtherDefault, ["'norm' is 1.0 by default, not 2.0"]),
        (NeedsMore, ["'more' has no default"]),
        (Method, ["Method.rank is function, not property"]),
    ],
)
def test_signatures_that_calls_fit(made: type, words: list[str]) -> None:
    told = "\n".join(misfits(made, Promised))
    assert bool(told) == bool(words)
    assert_says(told, *words)


IMPLEMENTATION = """
    from dataclasses import dataclass
    from fsdp_core.lightning.fabric_strategy import ShardedFabricStrategy
    from fsdp_core.lightning.strategy import ShardedStrategy
    from fsdp_core.lightning.trainer_strategy import ShardedTrainerStrategy
    from fsdp_core.sharding import ShardingOptions
    from fsdp_core.testing.loopback.backend import LoopbackBackend

    @dataclass(frozen=True, kw_only=True)
    class TinyOptions(ShardingOptions):
        cpu_offload: bool = False
        level: int = 1

    class Tiny(ShardedStrategy):
        strategy_name, options_class, backend_class = "tiny", TinyOptions, LoopbackBackend

    class ForTrainer(Tiny, ShardedTrainerStrategy):
        def __init__(self, cpu_offload=False, level=1, state_dict_type="sharded"):
            super().__init__(cpu_offload=cpu_offload, level=level, state_dict_type=state_dict_type)
            self.level = level

    class ForFabric(Tiny, ShardedFabricStrategy): ...
"""


def test_options_that_ask_for_what_is_not_declared(site: Site) -> None:
    both = 'summary="s", trainer="tiny_impl:ForTrainer", fabric="tiny_impl:ForFabric", accelerators=("cpu",)'
    options = 'options=(Option(name="cpu_offload", default=False), Option(name="level", default=1))'
    site.provide(
        "tiny-plugin",
        f'name="tiny", {both}, {options}, capabilities=("sharded_checkpoint",)',
        'name="able", summary="s", trainer="no:T", accelerators=("cpu",), capabilities=("cpu_offload",)',
        tiny_impl=IMPLEMENTATION,
    )
    site.forked("""
        from tiny_impl import ForFabric, ForTrainer, LoopbackBackend, ShardedTrainerStrategy
        from lightning.pytorch import Trainer
        import fsdp_core

        class Unlisted(ShardedTrainerStrategy):
            strategy_name, backend_class = "unlisted", LoopbackBackend

            def __init__(self, level):
                self.level = level
                super().__init__()

        assert Unlisted(level=3).level == 3  # no plugin says what it takes, so its constructor does

        class OfTheUser(ForTrainer):
            pass

        class OfTheUserToo(ForTrainer):
            def __init__(self, **options):
                super().__init__(**options)

        resolved = fsdp_core.resolve("tiny", "trainer")
        for made in (ForTrainer, ForFabric, OfTheUser, OfTheUserToo, resolved):
            told = failure(lambda: made(cpu_offload=True))
            assert told == (
                "UnsupportedCapabilityError: strategy 'tiny' can't do cpu_offload=True: it does not declare the "
                "capability 'cpu_offload'.\\nLeave it out, or use a strategy that has it: able."
            ), told
            told = failure(lambda: made(auto_wrap_policy={int}))
            assert "auto_wrap_policy={int}" in told and "no installed strategy has it" in told, told
            assert "full_checkpoint" in failure(lambda: made(state_dict_type="full"))
            assert made().state_dict_type == made(state_dict_type="sharded").state_dict_type == "sharded"
            told = failure(lambda: made(levle=3))
            assert "UnsupportedCapabilityError: strategy 'tiny' has no option 'levle'. Did you mean 'level'?" in told
        assert "cpu_offload=True" in failure(lambda: ForTrainer(True))
        assert ForTrainer(False, 2).level == ForTrainer(cpu_offload=False, level=2).level == 2
        told = failure(lambda: Trainer(strategy=ForTrainer(), precision="bf16-mixed", accelerator="cpu", logger=False))
        assert "precision='bf16-mixed'" in told and "mixed_precision" in told, told
    """)


def test_every_precision_string_has_its_clause() -> None:
    assert DTYPES.keys() == PRECISIONS.keys()
