"""Options that are read from the source of a constructor, and signatures that name what a constructor passes on."""

from __future__ import annotations

import inspect
import py_compile
import sys
import zipfile
from pathlib import Path

import pytest

from fsdp_core.errors import StrategyInfoError
from fsdp_core.plugins.option_discovery import COMMON_OPTIONS, options_in
from fsdp_core.plugins.strategy_info import Option
from fsdp_core.testing.loopback.trainer import LoopbackTrainerStrategy
from fsdp_core.testing.refusals import refusal

SOURCE = '''
raise ImportError("nobody may import this")


class Trainer:
    """Trains.

    Args:
        size: How large it is, ``None`` or a
            :class:`~torch.Size`.
        timeout: As in Lightning.
        precision: As in Lightning; there is another one elsewhere.
        kind: Which.
        **others: What else.

    Raises:
        ValueError: Never.
    """

    def __init__(self, size=2, timeout=None, *, precision, kind=Kind.BEST, **others): ...


class Fabric(Trainer):
    """Of one process.

    Args:
        alone: Whether it is.
    """

    def __init__(self, alone=False): ...


class Silent:
    def __init__(self, *, size=2): ...


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


def test_each_option_is_read_once_and_nothing_is_imported(package: str) -> None:
    common = {option.name: option for option in COMMON_OPTIONS}
    assert options_in(f"{package}:Trainer", f"{package}:Fabric", f"{package}:Trainer") == (
        Option(name="size", default=2, help="How large it is, None or a Size."),
        common["timeout"],
        common["precision"],
        Option(name="kind", default="Kind.BEST", help="Which."),
        Option(name="alone", default=False, help="Whether it is."),
    )
    assert package not in sys.modules


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Silent", ["Silent does not explain its option 'size'", "Add it to Args"]),
        ("Without", ["Without' has no constructor of its own", "write the options out"]),
        ("Absent", ["Absent' is not a class", "'module:Class'"]),
    ],
)
def test_what_can_not_be_read_is_told(package: str, name: str, words: list[str]) -> None:
    told = refusal(StrategyInfoError, lambda: options_in(f"{package}:{name}"))
    assert all(word in told for word in words)


def test_a_package_without_source_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sourceless").mkdir()
    file = tmp_path / "sourceless" / "classes.py"
    text = SOURCE.replace('raise ImportError("nobody may import this")', "class Kind:\n    BEST = (1, 2)\n")
    file.write_text(text, encoding="utf-8")
    py_compile.compile(str(file), cfile=str(file.with_suffix(".pyc")))
    file.unlink()
    (tmp_path / "sourceless" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    found = {option.name: option for option in options_in("sourceless.classes:Trainer")}
    assert found["size"] == Option(name="size", default=2, help="How large it is, None or a Size.")
    assert found["kind"] == Option(name="kind", default="(1, 2)", help="Which.")


@pytest.mark.parametrize(
    ("written", "default"),
    [("-1", -1), ("(1, 2)", "(1, 2)"), ("{[]: 1}", "{[]: 1}"), ("lambda x: x", "lambda x: x"), ("f'{1}'", "f'{1}'")],
)
def test_defaults_of_all_kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str, default: object) -> None:
    text = f'''
if True:
    class Odd:
        """Odd.

        Args:
            one (int): Which.
        """

        @overload
        def __init__(self, *, other): ...
        def __init__(self, *, one={written}): ...
'''
    (tmp_path / "odd_defaults.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert options_in("odd_defaults:Odd") == (Option(name="one", default=default, help="Which."),)  # type: ignore[arg-type]


class Required(LoopbackTrainerStrategy):
    def __init__(self, size: int, **others: object) -> None:
        super().__init__(**others)  # type: ignore[arg-type]


class RequiredLater(Required):
    def __init__(self, extra: int = 1, *args: int, **others: object) -> None:
        super().__init__(*args, **others)


def test_a_signature_that_can_not_be_composed_is_the_constructors() -> None:
    assert list(inspect.signature(RequiredLater).parameters) == ["extra", "args", "others"]


class Sized(LoopbackTrainerStrategy):
    """Passes on what it does not name.

    Args:
        size: How large it is.
    """

    def __init__(self, *common: object, size: int = 2, **others: object) -> None:
        self.size = size
        super().__init__(*common, **others)  # type: ignore[arg-type]


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


def test_help_names_what_is_passed_on() -> None:
    told = inspect.getdoc(SizedToo) or ""
    assert told.startswith("Takes the same.\n\nArgs:\n    accelerator: As in Lightning.")
    assert "\n    size: How large it is.\n" in told
    assert "strategy_name" not in told
