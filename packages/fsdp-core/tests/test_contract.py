"""What plugins rely on is as it was recorded; a change says what it means for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import contract_record
import fsdp_core
from contract_record import COMMAND, FILE, Change, compare, members, record, takes_as_before
from fsdp_core import checkpoint, lightning, plugins, sharding, state, testing
from fsdp_core.testing import suite

RECORD: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
DATACLASS = "@dataclass(frozen=True, kw_only=True) class ()"


def test_the_contract_is_as_recorded() -> None:
    changes = compare(RECORD["members"], members())
    if any(change.kind == "break" for change in changes):
        means = "That breaks plugins: raise the first number of CONTRACT_VERSION and fsdp-core's series, or undo it."
    else:
        means = "These are additions: raise the second number of CONTRACT_VERSION."
    assert not changes, "\n".join([*map(str, changes), means, f"See docs/contract.md. To record it, type: {COMMAND}"])


def test_the_version_is_the_recorded_one() -> None:
    assert ".".join(map(str, fsdp_core.CONTRACT_VERSION)) == RECORD["contract"], f"type: {COMMAND}"


def test_the_record_holds_what_plugins_need_one_line_each() -> None:
    recorded = RECORD["members"]
    for name in (
        "fsdp_core.StrategyInfo",
        "fsdp_core.plugins.StrategyInfo.presets",
        "fsdp_core.plugins.Option.default",
        "fsdp_core.plugins.Capability.CLIP_BY_NORM",
        "fsdp_core.plugins.fsdp_strategies",
        "fsdp_core.sharding.Backend.shard",
        "fsdp_core.Runtime.all_reduce",
        "fsdp_core.ProcessGroupRuntime.__init__",
        "fsdp_core.sharding.ShardPrecision.storage",
        "fsdp_core.UnsupportedCapabilityError",
        "fsdp_core.lightning.ShardedTrainerStrategy.__init__",
        "fsdp_core.lightning.ShardedFabricStrategy.__init__",
        "fsdp_core.testing.suite.StrategySuite",
        "fsdp_core.testing.suite.Clauses.expected_failures",
    ):
        assert name in recorded
    for module in (fsdp_core, plugins, state, sharding, checkpoint, lightning, testing, suite):
        assert {f"{module.__name__}.{name}" for name in module.__all__} <= recorded.keys()
    assert recorded["fsdp_core.sharding.Backend.units"] == "(self, module: nn.Module) -> Sequence[nn.Module]"
    assert recorded["fsdp_core.sharding.Sharded.no_sync"] == "@abstractmethod (self) -> AbstractContextManager[None]"
    assert len(FILE.read_text(encoding="utf-8").splitlines()) == len(recorded) + 6


@pytest.mark.parametrize(
    ("member", "was", "now", "kind"),
    [
        ("fsdp_core.state.clean_name", "(name: str) -> str", None, "break"),
        ("fsdp_core.state.new", None, "(name: str) -> str", "addition"),
        ("fsdp_core.state.clean_name", "(name: str) -> str", "(name: str, deep: bool=False) -> str", "addition"),
        ("fsdp_core.state.clean_name", "(name: str) -> str", "(name: str, *, deep: bool=False) -> str", "addition"),
        ("fsdp_core.state.clean_name", "(name: str) -> str", "(name: str, deep: bool) -> str", "break"),
        ("fsdp_core.state.clean_name", "(name: str) -> str", "(deep: bool=False, name: str='') -> str", "break"),
        ("fsdp_core.state.clean_name", "(name: str) -> str", "(module: str) -> str", "break"),
        ("fsdp_core.state.clean_name", "(name: str) -> str", "(name: str) -> str | None", "break"),
        ("fsdp_core.state.clean_name", "(name: str='a') -> str", "(name: str='b') -> str", "break"),
        ("fsdp_core.sharding.Backend.new", None, "(self) -> None", "addition"),
        ("fsdp_core.sharding.Backend.new", None, "@abstractmethod (self) -> None", "break"),
        ("fsdp_core.sharding.Backend.reset", "(self) -> None", "(self, hard: bool=False) -> None", "break"),
        ("fsdp_core.plugins.StrategyInfo.new", None, ": str = ''", "addition"),
        ("fsdp_core.plugins.StrategyInfo.new", None, ": str", "break"),
        ("fsdp_core.plugins.StrategyInfo.name", ": str", ": int", "break"),
        ("fsdp_core.plugins.Capability.NEW", None, "= 'new'", "addition"),
        ("fsdp_core.FSDPError", "class (Exception)", "class (ValueError)", "break"),
    ],
)
def test_what_a_change_means_for_plugins(member: str, was: str | None, now: str | None, kind: str) -> None:
    owners = {"fsdp_core.sharding.Backend": "class (ABC)", "fsdp_core.plugins.StrategyInfo": DATACLASS}
    before, after = ({**owners, **({member: text} if text else {})} for text in (was, now))
    (change,) = compare(before, after)
    assert (change.kind, change.member) == (kind, member)


def test_an_unchanged_signature_takes_what_it_took() -> None:
    assert takes_as_before("(a, *args: int, b=1, **rest) -> None", "(a, *args: int, b=1, c=2, **rest) -> None")
    assert not takes_as_before("(a, *args: int)", "(a)")


def test_what_is_recorded_must_be_versioned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, now = tmp_path / "contract.json", dict(RECORD["members"])
    monkeypatch.setattr(contract_record, "CONTRACT_VERSION", (1, 0))
    monkeypatch.setattr(contract_record, "_series", lambda: "0.1")
    monkeypatch.setattr(contract_record, "members", lambda: now)
    assert record(path).endswith(f"{len(now)} members recorded, {len(now)} changes.")

    now["fsdp_core.state.new"] = "() -> None"
    with pytest.raises(SystemExit, match=r"is an addition: set CONTRACT_VERSION to \(1, 1\) in .*/contract\.py"):
        record(path)
    monkeypatch.setattr(contract_record, "CONTRACT_VERSION", (1, 1))
    assert "addition: fsdp_core.state.new is new: () -> None" in record(path)

    del now["fsdp_core.state.new"]
    with pytest.raises(SystemExit, match=r"(?s)break: fsdp_core\.state\.new is gone.*is a break: .* to \(2, 0\)"):
        record(path)
    monkeypatch.setattr(contract_record, "CONTRACT_VERSION", (2, 0))
    with pytest.raises(SystemExit, match=r"^A new contract needs a new series of fsdp-core: raise 0\.1 in"):
        record(path)
    monkeypatch.setattr(contract_record, "_series", lambda: "0.2")
    assert record(path).endswith(f"{len(now)} members recorded, 1 changes.")
    assert json.loads(path.read_text())["contract"] == "2.0"

    now["fsdp_core.state.another"] = "() -> None"
    assert "1 changes" in record(path, unreleased=True)


def test_a_change_reads_as_what_it_is() -> None:
    change = Change(kind="break", member="fsdp_core.x", what="is gone; it was: () -> None")
    assert str(change) == "break: fsdp_core.x is gone; it was: () -> None"
