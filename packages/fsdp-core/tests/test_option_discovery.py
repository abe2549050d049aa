"""Options as fields: read from the source, and what follows from them in a strategy."""

from __future__ import annotations

import inspect
import py_compile
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
from torch import nn

from fsdp_core.errors import StrategyInfoError, UnsupportedCapabilityError
from fsdp_core.lightning import ShardedTrainerStrategy
from fsdp_core.plugins.discovery import discover
from fsdp_core.plugins.option_discovery import options_in
from fsdp_core.plugins.strategy_info import Option
from fsdp_core.sharding import ShardingOptions, option
from fsdp_core.testing.loopback.backend import LoopbackBackend
from fsdp_core.testing.loopback.trainer import LoopbackTrainerStrategy
from fsdp_core.testing.refusals import refusal

SOURCE = '''
raise ImportError("nobody may import this")


@dataclass(frozen=True, kw_only=True)
class Theirs(ShardingOptions):
    """Its own."""

    shared: ClassVar[int] = 0
    size: Size | None = 2
    """How large it is, ``None`` or a
    :class:`~torch.Size`."""
    kind: Kind = option(Kind.BEST, part_of="units")
    """Which."""


class Further(Theirs):
    alone: bool = False
    """Whether it is."""


class Silent:
    size: int = 2


class Without:
    """Nothing of its own."""
'''


@pytest.fixture(params=["file", "zip"])
def package(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"unimported_{request.param}"
    if request.param == "zip":
        with zipfile.ZipFile(tmp_path / "it.zip", "w") as archive:
            archive.writestr(f"{name}/__init__.py", "")
            archive.writestr(f"{name}/classes.py", SOURCE)
        monkeypatch.syspath_prepend(str(tmp_path / "it.zip"))
    else:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
        (tmp_path / name / "classes.py").write_text(SOURCE, encoding="utf-8")
        monkeypatch.syspath_prepend(str(tmp_path))
    return f"{name}.classes"


COMMON = options_in()


def test_a_strategy_may_have_no_options_of_its_own(package: str) -> None:
    assert options_in(f"{package}:Without") == COMMON


def test_each_option_is_read_once_and_nothing_is_imported(package: str) -> None:
    assert options_in(f"{package}:Theirs", f"{package}:Further", f"{package}:Theirs", left_out=["timeout"]) == (
        Option(name="size", default=2, help="How large it is, None or a Size."),
        Option(name="kind", default="Kind.BEST", help="Which."),
        Option(name="alone", default=False, help="Whether it is."),
        *(option for option in COMMON if option.name != "timeout"),
    )
    assert package not in sys.modules


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Silent", ["Silent does not explain its option 'size'", "Add a string below the field"]),
        ("Absent", ["Absent' is not a class", "'module:Class'"]),
    ],
)
def test_what_can_not_be_read_is_told(package: str, name: str, words: list[str]) -> None:
    told = refusal(StrategyInfoError, lambda: options_in(f"{package}:{name}"))
    assert all(word in told for word in words)


def test_a_package_without_source_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sourceless").mkdir()
    file = tmp_path / "sourceless" / "classes.py"
    names = "from dataclasses import dataclass\nfrom fsdp_core.sharding import ShardingOptions, option\n"
    names += "from typing import ClassVar\nclass Kind:\n    BEST = (1, 2)\n"
    text = SOURCE.replace('raise ImportError("nobody may import this")', names)
    file.write_text(f"from __future__ import annotations\n{text}", encoding="utf-8")
    py_compile.compile(str(file), cfile=str(file.with_suffix(".pyc")))
    file.unlink()
    (tmp_path / "sourceless" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    found = {option.name: option for option in options_in("sourceless.classes:Theirs")}
    assert found["size"] == Option(name="size", default=2, help="")
    assert found["kind"] == Option(name="kind", default="(1, 2)", help="")


@pytest.mark.parametrize(
    ("written", "default"),
    [("-1", -1), ("(1, 2)", "(1, 2)"), ("{[]: 1}", "{[]: 1}"), ("lambda x: x", "lambda x: x"), ("f'{1}'", "f'{1}'")],
)
def test_defaults_of_all_kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str, default: object) -> None:
    text = f"if True:\n    class Odd:\n        one: int = {written}\n        'Which.'\n"
    (tmp_path / "odd_defaults.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert options_in("odd_defaults:Odd")[0] == Option(name="one", default=default, help="Which.")  # type: ignore[arg-type]


def test_a_strategys_options_follow_from_the_fields() -> None:
    made = Strategy(None, units=[1], state_dict_type="full")
    assert (made.options.units, made.options.state_dict_type, made.backend.options) == ([1], "full", made.options)
    assert made.options.sharding_config() == {"units": "[1]", "kept": False}
    assert (made.options.changed_options(), made.options.arguments()) == (["units"], {"units": [1], "keep": False})
    parameters = inspect.signature(Strategy).parameters
    assert list(parameters)[:6] == [*ShardedTrainerStrategy.positional, "units"]
    assert "precision" not in parameters
    assert (parameters["kept"].default, parameters["kept"].annotation) == (False, bool)
    assert list(inspect.signature(Strategy.__init__).parameters) == ["self", *parameters]
    assert "    units: Which. Are they?\n" in str(Strategy.__doc__)
    assert "    timeout: How long a collective waits for its peers, a timedelta." in str(Strategy.__doc__)


def test_types_that_are_imported_for_type_checkers_alone() -> None:
    assert inspect.signature(WithUnknownType).parameters["size"].annotation == "Unknown | None"


def test_arguments_that_are_given_twice_or_are_too_many() -> None:
    with pytest.raises(TypeError, match="given 1 options by position, and accelerator is given by keyword too"):
        Strategy(None, accelerator=None)
    with pytest.raises(TypeError, match="given 6 options by position, and only 5 can be so given"):
        Strategy(*[None] * 6)


@dataclass(frozen=True, kw_only=True)
class OwnOptions(ShardingOptions):
    units: list[int] = option((), part_of="units", describe=str)
    """Which.
    Are they?"""
    kept: bool = option(False, part_of="units", argument="keep")
    """Whether."""
    late: bool = False
    """Not part of units."""


@dataclass(frozen=True, kw_only=True)
class UnknownOptions(ShardingOptions):
    size: Unknown | None = None  # type: ignore[name-defined]  # noqa: F821


class WithUnknownType(ShardedTrainerStrategy):
    strategy_name, options_class, backend_class = "own", UnknownOptions, LoopbackBackend


class Strategy(ShardedTrainerStrategy):
    """Runs."""

    strategy_name, options_class, backend_class = "own", OwnOptions, LoopbackBackend


class Required(LoopbackTrainerStrategy):
    def __init__(self, size: int, **others: object) -> None:
        super().__init__(**others)


class RequiredLater(Required):
    def __init__(self, extra: int = 1, *args: int, **others: object) -> None:
        super().__init__(*args, **others)  # type: ignore[arg-type]


def test_a_signature_that_can_not_be_composed_is_the_constructors() -> None:
    assert list(inspect.signature(RequiredLater).parameters) == ["extra", "args", "others"]


class Sized(LoopbackTrainerStrategy):
    """Passes on what it does not name.

    Args:
        size: How large it is.
    """

    def __init__(self, *common: object, size: int = 2, **others: object) -> None:
        self.size = size
        super().__init__(*common, **others)


class SizedToo(Sized):
    """Takes the same."""


@pytest.mark.parametrize("made", [Sized, SizedToo])
def test_a_constructor_shows_what_it_passes_on(made: type[Sized]) -> None:
    named = list(inspect.signature(LoopbackTrainerStrategy).parameters)
    shown = inspect.signature(made).parameters
    assert sorted(shown) == sorted([*named, "size"])
    assert [name for name in shown if name != "size"] == named
    environment = object()
    strategy = made(None, None, environment, size=3, state_dict_type="full")
    assert (strategy.cluster_environment, strategy.size, strategy.state_dict_type) == (environment, 3, "full")


class TakesOne(LoopbackTrainerStrategy):
    """Passes on one option."""

    def __init__(self, state_dict_type: str = "full") -> None:
        super().__init__(state_dict_type=state_dict_type)


@pytest.fixture
def listed_loopback(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets the strategy's package be found, as if it were installed."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path(__file__).parent / "loopback_site")])
    discover.cache_clear()
    yield
    discover.cache_clear()


@pytest.mark.usefixtures("listed_loopback")
def test_a_subclass_is_asked_to_pass_on_what_its_strategy_takes() -> None:
    told = refusal(UnsupportedCapabilityError, lambda: TakesOne(async_save=True))  # type: ignore[call-arg]
    assert (
        "has no option 'async_save'. The strategy has it, and the constructor of TakesOne does not pass it on" in told
    )
    assert "Did you mean" not in told


def test_a_set_for_an_unknown_option_is_refused_in_words() -> None:
    """It can't be looked up in a set of accepted values."""

    class Accepting(LoopbackTrainerStrategy):
        accepted_noops: ClassVar = {"sharding_strategy": frozenset({"FULL_SHARD"})}

    Accepting(sharding_strategy="FULL_SHARD")  # type: ignore[call-arg]
    for value in ({nn.Linear}, [nn.Linear]):
        message = refusal(UnsupportedCapabilityError, lambda value=value: Accepting(sharding_strategy=value))
        assert "has no option 'sharding_strategy'" in message
    message = refusal(UnsupportedCapabilityError, lambda: Accepting({nn.Linear}))
    assert "is no Accelerator of Lightning's" in message


def test_help_names_what_is_passed_on() -> None:
    told = inspect.getdoc(SizedToo) or ""
    assert told.startswith("Takes the same.\n\nArgs:\n    accelerator: A Lightning Accelerator;")
    assert "\n    size: How large it is.\n" in told
    assert "strategy_name" not in told
