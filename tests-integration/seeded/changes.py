"""Backends that are wrong: the example backends, copied with changes; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["DECLARED", "EXAMPLES", "LOSSES", "STATE", "Change", "Fault", "in_both", "method", "write_packages"]

#: The example backends by the name of their strategy: folder, package.
EXAMPLES = {"zero1": ("example-backend", "fsdp_example"), "zero2": ("example-zero2", "fsdp_zero2")}

#: What many clauses say of losses and weights that are not plain torch's.
LOSSES, STATE = "losses == pytest.approx", "torch.testing.assert_close(state[name]"

_HERE = Path(__file__).parent.parent


@dataclass(frozen=True)
class Change:
    """One edit of a source file.

    Attributes:
        file: The module's name, such as ``"sharded"``.
        before: What is there, once in the file.
        after: What is there instead.
        strategy: The one example to change; by default each, for their lines are the same.
    """

    file: str
    before: str
    after: str
    strategy: str | None = None


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A backend that is wrong.

    Attributes:
        is_wrong: What it does, in a sentence.
        changes: What makes an example do so.
        clause: The clause that finds it, as pytest shows its name.
        says: A part of what that clause says.
    """

    is_wrong: str
    changes: tuple[Change, ...]
    clause: str
    says: str


#: Core's autocast is all that mixed precision takes where parameters stay whole.
DECLARED = Change(
    "plugin",
    "                    Capability.META_INIT,\n",
    "                    Capability.META_INIT,\n                    Capability.MIXED_PRECISION,\n",
)


def in_both(file: str, before: str, after: str) -> tuple[Change, ...]:
    """One edit, which fits both examples."""
    return (Change(file, before, after),)


def method(lines: str) -> Change:
    """A method that the examples lack, before ``no_sync``."""
    return Change("sharded", "    def no_sync(self)", f"{lines}\n    def no_sync(self)")


def write_packages(folder: Path, faults: Mapping[tuple[str, str], tuple[Change, ...]]) -> None:
    """Write changed examples into a folder, as packages that are installed where it is searched.

    Args:
        folder: An empty folder.
        faults: The changes, by the strategy of the example and the name of the fault. What is written is the strategy
            ``<strategy>_<fault>``.

    Raises:
        ValueError: A change does not fit the example any more.
    """
    for (strategy, fault), changes in faults.items():
        _write_package(folder / f"{strategy}_{fault}", strategy, changes)
    info = folder / "seeded-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: seeded\nVersion: 1.0\n")
    points = "".join(f"{strategy}_{fault} = {strategy}_{fault}.plugin\n" for strategy, fault in faults)
    (info / "entry_points.txt").write_text(f"[fsdp.strategies]\n{points}")


def _write_package(folder: Path, strategy: str, changes: tuple[Change, ...]) -> None:
    of_example, package = EXAMPLES[strategy]
    folder.mkdir()
    for file in sorted((_HERE / of_example / "src" / package).glob("*.py")):
        text = file.read_text(encoding="utf-8")
        for change in changes:
            if change.file == file.stem and change.strategy in (None, strategy):
                if text.count(change.before) != 1:
                    raise ValueError(f"{file.name} of {strategy} has this not once any more:\n{change.before}")
                text = text.replace(change.before, change.after)
        text = text.replace(package, folder.name).replace(f'"{strategy}"', f'"{folder.name}"')
        (folder / file.name).write_text(text, encoding="utf-8")
