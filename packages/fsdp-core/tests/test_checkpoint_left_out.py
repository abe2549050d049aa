"""Checkpoints that leave out what was not trained: what is noticed, and which bases a load and the tools take."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file
from torch import Tensor, nn

import fsdp_core
from checkpoint_ranks import on_threads
from damaged_folders import save_alone
from fsdp_core.checkpoint import (
    Chunk,
    ChunkedTensor,
    compare,
    consolidate_huggingface,
    consolidate_safetensors,
    describe,
    load,
    read_manifest,
    reshard,
    verify,
)
from fsdp_core.checkpoint.left_out import base_values
from fsdp_core.checkpoint.left_out.base_values import BaseValues
from fsdp_core.checkpoint.left_out.observing import Observed
from fsdp_core.cli import fsdp
from fsdp_core.errors import CheckpointFormatError, CheckpointMismatchError, CheckpointValueError
from fsdp_core.huggingface import load_pretrained
from fsdp_core.lightning.checkpoints.full.consolidation import consolidate_lightning
from fsdp_core.lightning.checkpoints.full.opening import read_full_state
from fsdp_core.runtime import ProcessGroupRuntime, Runtime
from fsdp_core.state.chunks import chunked
from fsdp_core.state.digests import digest_of, digest_text, local_sums
from fsdp_core.state.left_out import LeftOut

#: Rows of a frozen matrix that is large enough for several pieces of the walk, and for rows that are not sampled.
ROWS, COLUMNS = 700, 1024


# --- Digests --------------------------------------------------------------------------------------------------------


def boxes_of(tensor: Tensor, boxes: list[tuple[slice, ...]]) -> ChunkedTensor:
    chunks = tuple(Chunk(offsets=tuple(s.start for s in box), data=tensor[box]) for box in boxes)
    return ChunkedTensor(shape=tuple(tensor.shape), dtype=tensor.dtype, chunks=chunks)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.uint8])
@pytest.mark.parametrize("shape", [(5, 7), (3, 4, 5), (200, 3), (2, 70_000)])
def test_digests_do_not_depend_on_the_boxes(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape) * 50).to(dtype)
    rest = [slice(0, n) for n in shape[2:]]
    rows = [(slice(0, 1), slice(0, shape[1]), *rest), (slice(1, shape[0]), slice(0, shape[1]), *rest)]
    columns = [(slice(0, shape[0]), slice(0, 2), *rest), (slice(0, shape[0]), slice(2, shape[1]), *rest)]
    for boxes in (rows, columns):
        sums = [local_sums([boxes_of(tensor, [box])])[0] for box in boxes]
        assert digest_text(sum(sums)) == digest_of(tensor)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t[1, 2].add_(1e-3),
        lambda t: t.copy_(t.flip(0)),
        lambda t: t.copy_(t.t().clone()),
        lambda t: t.copy_(t.roll(1, 1)),
        lambda t: t.neg_(),
        lambda t: t[0, 0].zero_(),
    ],
    ids=["an element", "order of rows", "transposed", "order of columns", "signs", "a zero"],
)
def test_digests_see_a_change(change: Callable[[Tensor], Any]) -> None:
    tensor = torch.randn(6, 6)
    before = digest_of(tensor)
    change(tensor)
    assert digest_of(tensor) != before


# --- What is noticed ------------------------------------------------------------------------------------------------


class Held:
    """A frozen matrix, and what is known of it."""

    def __init__(self) -> None:
        self.runtime = ProcessGroupRuntime()
        self.weight = nn.Parameter(torch.randn(ROWS, COLUMNS), requires_grad=False)
        self.base = BaseValues()
        self.base.note(self.observed())
        self.first = digest_of(self.weight)

    def observed(self) -> dict[str, Observed]:
        return {"weight": Observed(part=chunked(self.weight), counters=[self.weight])}

    def left_out(self, seconds_to_walk: float = 0.0) -> dict[str, str]:
        return self.base.digests_of_unchanged(
            ["weight"], self.observed(), self.runtime, seconds_to_walk=seconds_to_walk
        )


@pytest.fixture
def held() -> Held:
    return Held()


def test_what_is_unchanged_is_left_out(held: Held) -> None:
    assert held.left_out() == held.left_out() == {"weight": held.first}


@pytest.mark.parametrize(
    "write",
    [
        lambda w: w.add_(1),
        lambda w: w[ROWS // 3, 5].fill_(7.0),
        lambda w: w.data.mul_(1.5),
        lambda w: w.detach().numpy().__imul__(2.0),
        lambda w: setattr(w, "data", w.data + 1),
    ],
    ids=["in place", "an element", "all of .data", "numpy", "another memory"],
)
@pytest.mark.parametrize("is_saved_before", [False, True])
def test_writes_are_noticed(held: Held, write: Callable[[Tensor], Any], is_saved_before: bool) -> None:
    if is_saved_before:
        held.left_out()
    with torch.no_grad():
        write(held.weight)
    assert held.left_out() == {}
    assert held.left_out() == {}, "what was noticed in one save is forgotten in the next"


def test_what_is_written_back_is_left_out_again(held: Held) -> None:
    held.left_out()
    with torch.no_grad():
        held.weight.neg_()
        assert held.left_out() == {}
        held.weight.neg_()
    assert held.left_out() == {"weight": held.first}


def test_memory_that_moves_with_its_values_is_no_change(held: Held) -> None:
    held.weight.data = held.weight.data.clone()
    assert held.left_out() == {"weight": held.first}


def test_an_uncounted_write_to_one_element_is_found_by_the_walk(held: Held) -> None:
    held.left_out()
    held.weight.data[ROWS - 3, 77] = 1e6  # no sampled element, and not counted
    assert held.left_out() == {"weight": held.first}, "this shows nothing: the element is a sampled one"
    with pytest.warns(UserWarning, match="'weight' is frozen, and was written to"):
        found = [held.left_out(seconds_to_walk=1e-9) for _ in range(4)]  # a piece at least in each save, of three
    assert found[-1] == {}


def test_a_save_reads_no_more_than_it_may(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    held.left_out()

    def refuse(*_: Any) -> Any:
        raise AssertionError("all bytes are read in each save")

    monkeypatch.setattr(base_values, "digests", refuse)
    monkeypatch.setattr("fsdp_core.checkpoint.left_out.observing.hash_all", refuse)
    assert held.left_out() == {"weight": held.first}


def test_a_write_on_one_rank_is_noticed_on_all() -> None:
    def work(runtime: Runtime) -> list[bool]:
        weight = torch.arange(8.0)
        half = weight[runtime.rank * 4 : runtime.rank * 4 + 4].clone()

        def observed() -> dict[str, Observed]:
            chunk = Chunk(offsets=(runtime.rank * 4,), data=half)
            return {"w": Observed(part=ChunkedTensor(shape=(8,), dtype=half.dtype, chunks=(chunk,)), counters=[half])}

        base = BaseValues()
        base.note(observed())
        before = base.digests_of_unchanged(["w"], observed(), runtime)
        if runtime.rank:
            half.add_(1)
        return [before == {"w": digest_of(weight)}, base.digests_of_unchanged(["w"], observed(), runtime) == {}]

    assert on_threads(2, work) == [[True, True]] * 2


# --- A folder without its base --------------------------------------------------------------------------------------


@pytest.fixture
def base() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {"layers.0.weight": torch.randn(4, 4), "layers.1.weight": torch.randn(4, 4), "norm.bias": torch.randn(4)}


@pytest.fixture
def saved(tmp_path: Path, base: dict[str, Tensor]) -> Path:
    """A checkpoint of a LoRA over the base, as PEFT names it; one weight of the base was changed."""
    names = {name: f"net.{name.replace('.weight', '.base_layer.weight')}" for name in base}
    model: dict[str, Any] = {
        names[name]: LeftOut(shape=tuple(t.shape), dtype=t.dtype, digest=digest_of(t)) for name, t in base.items()
    }
    model |= {names["layers.1.weight"]: base["layers.1.weight"] + 1, "net.lora": torch.ones(2)}
    folder = tmp_path / "saved"
    save_alone(
        folder,
        {"model": model, "trainer": {"epoch": 1, "state_dict": None}},
        aliases={"model/net.head.weight": f"model/{names['layers.0.weight']}"},
    )
    return folder


@pytest.fixture
def whole(base: dict[str, Tensor]) -> dict[str, Tensor]:
    first = base["layers.0.weight"]
    return {
        "net.layers.0.base_layer.weight": first,
        "net.layers.1.base_layer.weight": base["layers.1.weight"] + 1,
        "net.norm.bias": base["norm.bias"],
        "net.lora": torch.ones(2),
        "net.head.weight": first,
    }


def bases(tmp_path: Path, base: dict[str, Tensor]) -> dict[str, Path]:
    """The base in every form that it may have."""
    forms = {"file": tmp_path / "base.safetensors", "torch": tmp_path / "base.pt", "folder": tmp_path / "base"}
    forms["folder"].mkdir()
    save_file(base, forms["file"])
    torch.save(base, forms["torch"])
    save_file({"extra": torch.ones(1), **base}, forms["folder"] / "model.safetensors")
    forms["checkpoint"] = tmp_path / "whole"
    save_alone(forms["checkpoint"], {"model": {f"x.{name}": tensor for name, tensor in base.items()}})
    return forms


def equal(got: dict[str, Tensor], want: dict[str, Tensor]) -> bool:
    return got.keys() == want.keys() and all(torch.equal(got[name], tensor) for name, tensor in want.items())


def test_a_base_in_any_form(tmp_path: Path, saved: Path, base: dict[str, Tensor], whole: dict[str, Tensor]) -> None:
    for path in bases(tmp_path, base).values():
        assert equal(fsdp_core.load_state_dict(saved, base=path), whole)


def test_a_base_of_another_dtype(tmp_path: Path, whole: dict[str, Tensor]) -> None:
    narrow = torch.randn(4, 4).bfloat16()
    absent = LeftOut(shape=(4, 4), dtype=torch.float32, digest=digest_of(narrow.float()))
    save_alone(tmp_path / "saved", {"model": {"w": absent}})
    save_file({"w": narrow}, tmp_path / "base.safetensors")
    got = fsdp_core.load_state_dict(tmp_path / "saved", base=tmp_path / "base.safetensors")
    assert equal(got, {"w": narrow.float()})


def test_without_a_base_it_is_refused_in_words(saved: Path) -> None:
    with pytest.raises(CheckpointMismatchError, match=r"(?s)saved without what was not trained.*--with-base"):
        fsdp_core.load_state_dict(saved)
    nest = load(saved)
    with pytest.raises(CheckpointMismatchError, match=r"'model/net.norm.bias' is in a base that it does not name"):
        nest["model"]["net.norm.bias"].full()


@pytest.mark.parametrize("fault", ["gone", "moved on", "partial", "empty", "another"])
def test_other_bases_are_refused_in_words(tmp_path: Path, saved: Path, base: dict[str, Tensor], fault: str) -> None:
    path = tmp_path / "other"
    if fault == "moved on":
        base["norm.bias"][1] += 1e-6
        save_file(base, path := path.with_suffix(".safetensors"))
    elif fault == "partial":
        path = saved
    elif fault == "empty":
        path.mkdir()
    elif fault == "another":
        save_file({"w": torch.ones(4, 4)}, path := path.with_suffix(".safetensors"))
    words = {
        "gone": "is neither a folder nor a file here",
        "moved on": r"is not the base: it has no tensor with the content of 'model/net.norm.bias'",
        "partial": r"It is a checkpoint that leaves \d tensors out itself: name its base",
        "empty": "holds nothing that can be imported",
        "another": "no tensor with the content of 'model/net.layers.0.base_layer.weight'",
    }[fault]
    with pytest.raises((CheckpointMismatchError, CheckpointFormatError), match=words):
        fsdp_core.load_state_dict(saved, base=path)


def test_tools_know_it(tmp_path: Path, saved: Path, base: dict[str, Tensor], whole: dict[str, Tensor]) -> None:
    base_file = bases(tmp_path, base)["file"]
    facts = describe(saved)
    assert facts["format_version"] == 3
    assert set(facts["base"]["tensors"]) == set(read_manifest(saved).left_out)
    assert facts["base"]["source"] is None
    verify(saved)
    reshard(saved, tmp_path / "resharded", files=3)
    assert not compare(saved, tmp_path / "resharded")
    assert equal(fsdp_core.load_state_dict(tmp_path / "resharded", base=base_file), whole)
    for write, name in ((consolidate_safetensors, "one.safetensors"), (consolidate_huggingface, "folder")):
        with pytest.raises(CheckpointMismatchError, match=r"--with-base BASE.*--trained-only"):
            write(saved, tmp_path / name)
        written = write(saved, tmp_path / name, base=base_file)
        assert written.tensors == 4
        assert set(written.aliases) == {"net.head.weight"}
        trained = write(saved, tmp_path / f"trained-{name}", trained_only=True)
        assert trained.tensors == 2
        assert set(trained.left_out) == whole.keys() - {
            "net.lora",
            "net.layers.1.base_layer.weight",
        }
        with pytest.raises(CheckpointValueError, match="can't be combined"):
            write(saved, tmp_path / "never", base=base_file, trained_only=True)
    assert fsdp_core.load_state_dict(saved, base=tmp_path / "one.safetensors").keys() == whole.keys()


def test_differences_by_digest(tmp_path: Path, saved: Path, whole: dict[str, Tensor]) -> None:
    for name, model in (("same", whole), ("other", {**whole, "net.norm.bias": whole["net.norm.bias"] + 1})):
        aliases = {"model/net.head.weight": "model/net.layers.0.base_layer.weight"}
        state = {"model": model, "trainer": {"epoch": 1, "state_dict": None}}
        save_alone(tmp_path / name, state, aliases=aliases)
    assert not compare(saved, tmp_path / "same")
    (difference,) = compare(tmp_path / "other", saved).tensors
    assert difference.key == "model/net.norm.bias"
    assert difference.count is None
    result = CliRunner().invoke(fsdp, ["checkpoint", "diff", str(saved), str(tmp_path / "other")])
    assert "the digests differ" in result.output
    assert result.exit_code == 1


def test_the_command_names_the_base(tmp_path: Path, saved: Path, base: dict[str, Tensor]) -> None:
    base_file = bases(tmp_path, base)["file"]
    run = CliRunner().invoke
    assert "2 tensors, 80 B, are left out" in run(fsdp, ["checkpoint", "inspect", str(saved)]).output
    assert "2 tensors are left out" in run(fsdp, ["checkpoint", "verify", str(saved)]).output
    good = run(fsdp, ["checkpoint", "verify", str(saved), "--with-base", str(base_file)])
    assert good.exit_code == 0
    assert "which has them" in good.output
    bad = run(fsdp, ["checkpoint", "verify", str(saved), "--with-base", str(saved)])
    assert bad.exit_code == 1
    assert "is not the base" in bad.output
    out = str(tmp_path / "out.safetensors")
    arguments = ["checkpoint", "consolidate", str(saved), out, "--to", "safetensors", "--with-base", str(base_file)]
    assert run(fsdp, arguments).exit_code == 0
    both = run(fsdp, ["checkpoint", "consolidate", str(saved), out, "--to", "lightning", "--trained-only"])
    assert both.exit_code == 2
    assert "--trained-only goes with" in both.output


# --- Plain modules --------------------------------------------------------------------------------------------------


class Adapted(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.lora = nn.Linear(3, 3)


@pytest.fixture
def of_adapted(tmp_path: Path) -> Path:
    model: dict[str, Any] = {
        name: t + 1 if "lora" in name else LeftOut(shape=tuple(t.shape), dtype=t.dtype, digest=digest_of(t))
        for name, t in Adapted().state_dict().items()
    }
    trainer = {"epoch": 1, "global_step": 1, "pytorch-lightning_version": "2.6.6", "loops": {}}
    save_alone(tmp_path / "adapted", {"model": model, "trainer": trainer})
    return tmp_path / "adapted"


def test_load_from_checkpoint_compares_the_base(of_adapted: Path) -> None:
    module = Adapted.load_from_checkpoint(of_adapted)
    assert torch.equal(module.frozen.weight, Adapted().frozen.weight)
    assert torch.equal(module.lora.weight, Adapted().lora.weight + 1)

    class Other(Adapted):
        def __init__(self) -> None:
            super().__init__()
            self.frozen.bias.data.add_(1)

    with pytest.raises(RuntimeError, match=r"this module has another base: 'model/frozen.bias' has other values"):
        Other.load_from_checkpoint(of_adapted)


def test_a_plain_state_without_base_can_be_loaded_and_nothing_else(of_adapted: Path) -> None:
    stand_in = read_full_state(of_adapted)["state_dict"]["frozen.weight"]
    assert stand_in.shape == (3, 3)
    assert stand_in.device.type == "cpu"
    assert stand_in.dtype == torch.float32
    for use in (lambda t: t + 1, lambda t: t.clone(), torch.sum, lambda t: t[0], lambda t: t.tolist()):
        with pytest.raises(CheckpointMismatchError, match="saved without what was not trained"):
            use(stand_in)


def test_lightnings_file_needs_the_base(tmp_path: Path, of_adapted: Path) -> None:
    out = tmp_path / "whole.ckpt"
    with pytest.raises(CheckpointMismatchError, match="--with-base BASE"):
        consolidate_lightning(of_adapted, out)
    torch.save(Adapted().state_dict(), tmp_path / "base.pt")
    consolidate_lightning(of_adapted, out, base=tmp_path / "base.pt")
    assert torch.equal(Adapted.load_from_checkpoint(out).frozen.weight, Adapted().frozen.weight)


def test_files_read_into_a_plain_module_need_no_strategy(tmp_path: Path) -> None:
    plain = nn.Linear(2, 2)
    save_file({name: torch.ones_like(t) for name, t in plain.state_dict().items()}, tmp_path / "model.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_pretrained(plain, tmp_path)
    assert torch.equal(plain.weight, torch.ones(2, 2))
