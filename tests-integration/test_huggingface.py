"""Folders of transformers and PEFT, written from shards and read into them, beside those that the libraries write."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader

import fsdp_core
from fsdp_core.errors import CheckpointExistsError, CheckpointMismatchError, FSDPError, UnsupportedCapabilityError
from fsdp_core.huggingface import load_pretrained, save_adapter, save_pretrained
from fsdp_core.testing import RankPool
from fsdp_core.testing.measuring.memory import is_measurable, peak_of
from fsdp_core.testing.refusals import assert_says, refusal
from fsdp_core.testing.state import full_state
from fsdp_core.testing.training import new_fabric, new_trainer
from real_models import new_model, plan_of, see_transformers

LIMIT = 300.0  # seconds, for a machine that does much else
SMALL_FILES = 12000  # bytes, so that there are several files


def differences(state: dict[str, Tensor], want: dict[str, Tensor], prefix: str = "") -> list[str]:
    return [name for name, value in want.items() if not torch.equal(state[f"{prefix}{name}"], value)]


def counted_reads() -> int:
    """The bytes that this process has asked the kernel for so far, from Linux."""
    lines = Path("/proc/self/io").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("rchar:"))


def write_and_read(tmp: str, strategy: str, options: dict[str, Any], world_size: int, names: list[str]) -> Any:
    """What this rank finds of each model: writes its folder, and reads the one that transformers has written."""
    see_transformers()
    found = {}
    for name in names:
        plan = {"tp_plan": plan_of(name)} if "tensor_parallel_size" in options else {}
        fabric = new_fabric(strategy, world_size, {**options, **plan})
        want: Any = new_model(name)
        theirs, ours = f"{tmp}/{name}/theirs", f"{tmp}/{name}/ours"
        if fabric.is_global_zero:
            want.save_pretrained(theirs, max_shard_size=SMALL_FILES)
        with fabric.init_module(empty_init=True):
            model = new_model(name)
        model = fabric.setup(model)
        saved = save_pretrained(model, ours, max_shard_size=SMALL_FILES)
        with fabric.init_module(empty_init=True):
            other = new_model(name, seed=6)  # other values than in the folder
        other = fabric.setup(other)
        before = counted_reads()
        loaded = load_pretrained(other, theirs)
        counted = counted_reads() - before
        state = full_state(fabric.strategy, fabric.strategy.roots[-1])  # type: ignore[attr-defined]
        found[name] = saved, loaded, counted, differences(state, want.state_dict())
    return found


def read_by_theirs(tmp: str, names: list[str]) -> dict[str, list[str]]:
    """The names that plain ``from_pretrained`` reads otherwise from our folder."""
    see_transformers()
    found = {}
    for name in names:
        want = new_model(name)
        given: Any = type(want)
        read, told = given.from_pretrained(f"{tmp}/{name}/ours", output_loading_info=True)
        surplus = [*told["missing_keys"], *told["unexpected_keys"]]
        found[name] = [*differences(read.state_dict(), want.state_dict()), *surplus]
    return found


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("strategy", "options", "world_size", "names"),
    [
        ("fsdp2", {}, 2, ["gpt2", "vit", "t5"]),
        ("fsdp2", {"tensor_parallel_size": 2}, 4, ["llama", "mixtral"]),
        ("fsdp2", {"data_parallel_replicate_size": 2, "data_parallel_size": 1}, 2, ["llama"]),
        ("fsdp_native", {}, 2, ["gpt2", "mixtral"]),
    ],
    ids=["fsdp2", "tensor", "replicas", "fsdp_native"],
)
def test_folders_are_those_of_transformers(
    transformers_ranks: RankPool,
    tmp_path: Path,
    strategy: str,
    options: dict[str, Any],
    world_size: int,
    names: list[str],
) -> None:
    given = str(tmp_path), strategy, options, world_size, names
    got = transformers_ranks.run(world_size, write_and_read, *given, timeout=LIMIT)
    assert transformers_ranks.run(1, read_by_theirs, str(tmp_path), names)[0] == {name: [] for name in names}
    for name in names:
        ours, theirs = contents(tmp_path / name / "ours"), contents(tmp_path / name / "theirs")
        if name != "mixtral":  # transformers never divides the experts of one layer between files
            assert ours == theirs
        assert ours["config.json"] == theirs["config.json"]
        assert [of_rank[name][3] for of_rank in got] == [[]] * world_size
        saved, loaded = [of_rank[name][0] for of_rank in got], [of_rank[name][1] for of_rank in got]
        assert sum(one.bytes_written for one in saved) == saved[0].nbytes
        assert {(one.missing, one.unexpected) for one in loaded} == {((), ())}
        size = sum(len(data) for file, data in theirs.items() if "config" not in file)
        read = sum(one.bytes_read for one in loaded)
        assert read <= 1.02 * size
        assert max(one.bytes_read for one in loaded) <= max(of_rank[name][2] for of_rank in got), "what Linux counts"


def stream_and_compare(tmp: str, strategy: str, options: dict[str, Any], world_size: int, names: list[str]) -> Any:
    """What differs on this rank between streams of each model and what transformers stores, by model."""
    see_transformers()
    different = {}
    for name in names:
        plan = {"tp_plan": plan_of(name)} if "tensor_parallel_size" in options else {}
        fabric = new_fabric(strategy, world_size, {**options, **plan})
        original: Any = new_model(name)
        folder = Path(tmp) / name
        if fabric.is_global_zero:
            original.save_pretrained(folder)
        model = fabric.setup(new_model(name))
        fabric.barrier()
        stored = load_file(folder / "model.safetensors")
        streams = [dict(fsdp_core.stream_weights(model, names="hf", budget=budget)) for budget in ("1GiB", 30_000)]
        halves = dict(fsdp_core.stream_weights(model, names="hf", dtype="bfloat16"))
        different[name] = [
            list(stored.keys() ^ streamed.keys()) or differences(streamed, stored) for streamed in streams
        ]
        different[name].append(differences(halves, {key: value.bfloat16() for key, value in stored.items()}))
        different[name].append([] if list(streams[0]) == list(streams[1]) else ["their order"])
    return different


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("strategy", "options", "world_size", "names"),
    [
        ("fsdp2", {"tensor_parallel_size": 2}, 4, ["llama", "mixtral"]),
        ("fsdp2", {"data_parallel_replicate_size": 2, "data_parallel_size": 2}, 4, ["gpt2"]),
        ("fsdp_native", {}, 2, ["gpt2", "mixtral"]),
    ],
    ids=["tensor", "replicas", "fsdp_native"],
)
def test_streams_are_what_transformers_stores(
    transformers_ranks: RankPool,
    tmp_path: Path,
    strategy: str,
    options: dict[str, Any],
    world_size: int,
    names: list[str],
) -> None:
    arguments = str(tmp_path), strategy, options, world_size, names
    for different in transformers_ranks.run(world_size, stream_and_compare, *arguments, timeout=LIMIT):
        assert different == {name: [[]] * 4 for name in names}


class Lit(LightningModule):
    """Builds a model from its configuration alone, and trains."""

    def __init__(self, name: str = "llama", seed: int = 6) -> None:
        super().__init__()
        self.name, self.seed = name, seed

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            assert self.trainer is not None
            with self.trainer.init_module(empty_init=True):
                self.model: Any = new_model(self.name, self.seed)

    def training_step(self, words: Tensor, index: int) -> Tensor:
        loss: Tensor = self.model(input_ids=words, labels=words).loss
        if not hasattr(self, "first"):
            self.first = loss.item()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


WORDS = torch.arange(12).reshape(2, 6) % 7 + 1


def trained_with_callbacks(tmp: str) -> Any:
    """Folders that a Trainer has written and read, and refusals."""
    see_transformers()
    from fsdp_core.lightning import LoadPretrained, SavePretrained

    want: Any = new_model("llama")
    first = want(input_ids=WORDS, labels=WORDS).loss.item()
    if int(os.environ["LOCAL_RANK"]) == 0:
        want.save_pretrained(f"{tmp}/theirs")
    torch.distributed.barrier() if torch.distributed.is_initialized() else None
    module = Lit()
    load = LoadPretrained(f"{tmp}/theirs")
    save = SavePretrained(f"{tmp}/steps", every_n_train_steps=1, keep=2, dtype="bfloat16")
    trainer = new_trainer(tmp, "fsdp2", 2, callbacks=[load, save], max_steps=3)
    trainer.fit(module, DataLoader([WORDS] * 6, batch_size=None))
    state = {name: value.bfloat16() for name, value in full_state(trainer.strategy).items()}
    told = {
        "exists": refusal(CheckpointExistsError, lambda: save_pretrained(module, f"{tmp}/theirs")),
        "bucket": refusal(UnsupportedCapabilityError, lambda: save_pretrained(module, "memory://bucket/llama")),
        "adapter": refusal(UnsupportedCapabilityError, lambda: save_adapter(module, f"{tmp}/adapter")),
        "none": refusal(FSDPError, lambda: load_pretrained(module, f"{tmp}/nothing")),
        "dtype": refusal(CheckpointMismatchError, lambda: load_pretrained(module, save.written[-1])),
    }
    cast = load_pretrained(module.model, save.written[-1], cast=True)
    left = sorted(os.listdir(f"{tmp}/steps"))
    return state, abs(module.first - first), left, told, (cast.missing, cast.unexpected)


def read_last(tmp: str) -> dict[str, Tensor]:
    see_transformers()
    from transformers import AutoModelForCausalLM

    state: dict[str, Tensor] = AutoModelForCausalLM.from_pretrained(f"{tmp}/steps/step-00000003").state_dict()
    return state


def test_callbacks(transformers_ranks: RankPool, tmp_path: Path) -> None:
    for state, difference, left, told, cast in transformers_ranks.run(2, trained_with_callbacks, str(tmp_path)):
        assert difference == pytest.approx(0, abs=1e-5), "the first loss is that of the folder"
        assert left == ["step-00000002", "step-00000003"]
        assert_says(told["exists"], "already exists", "overwrite=True")
        assert_says(told["bucket"], "object store", "fsdp checkpoint consolidate")
        assert_says(told["adapter"], "PEFT has put none into it", "save_pretrained()")
        assert_says(told["none"], "there is no folder", "snapshot_download")
        assert_says(told["dtype"], "bfloat16 in it, and float32 here", "cast=True")
        assert cast == ((), ())
        read = transformers_ranks.run(1, read_last, str(tmp_path))[0]
        assert differences(state, read, "model.") == []
    assert not list(tmp_path.rglob("*partial*"))


def adapters(tmp: str, strategy: str) -> Any:
    """A base model that is read into shards under its adapters, and the adapters alone."""
    see_transformers()
    fabric = new_fabric(strategy, 2)
    base: Any = new_model("llama")
    plain: Any = new_model("llama lora")
    if fabric.is_global_zero:
        base.save_pretrained(f"{tmp}/base")
        plain.save_pretrained(f"{tmp}/theirs")
    model = fabric.setup(new_model("llama lora", seed=6))
    loaded = load_pretrained(model, f"{tmp}/base")
    state = full_state(fabric.strategy)
    inner = {name.replace(".base_layer", "").removeprefix("base_model.model."): v for name, v in state.items()}
    given = {name: v for name, v in new_model("llama lora", seed=6).state_dict().items() if "lora" in name}
    changed = differences(state, given)
    same = fabric.setup(new_model("llama lora"))
    saved = save_adapter(same, f"{tmp}/ours")
    refused = refusal(UnsupportedCapabilityError, lambda: save_pretrained(same, f"{tmp}/whole"))
    refused += prompts_refused(fabric, f"{tmp}/prompts")
    save_head_too(fabric, tmp)
    return differences(inner, base.state_dict()), changed, loaded, saved.tensors, refused


def prompts_refused(fabric: Any, folder: str) -> str:
    """What PEFT computes by a call of the prompt encoder; within gathered(), as the message says, PEFT saves it."""
    import peft

    prompts: Any = peft.get_peft_model(
        new_model("llama"), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    )
    held: Any = fabric.setup(prompts)
    said = refusal(UnsupportedCapabilityError, lambda: save_adapter(held, folder))
    with fsdp_core.gathered(held):
        if fabric.is_global_zero:
            prompts.save_pretrained(folder)
    return said


def save_head_too(fabric: Any, tmp: str) -> None:
    """A module that is trained whole beside the adapters, and saved with them."""
    import peft

    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    with torch.random.fork_rng():
        torch.manual_seed(4)
        model: Any = peft.get_peft_model(new_model("llama"), config)
    if fabric.is_global_zero:
        model.save_pretrained(f"{tmp}/their head")
    save_adapter(fabric.setup(model), f"{tmp}/our head")


def reread(tmp: str) -> list[str]:
    see_transformers()
    from peft import PeftModel

    fresh = PeftModel.from_pretrained(new_model("llama"), f"{tmp}/ours")  # type: ignore[arg-type]
    return differences(fresh.state_dict(), new_model("llama lora").state_dict())


def unordered(config: bytes) -> dict[str, Any]:
    """A configuration of PEFT's. Its sets, such as that of target modules, are written in an order of no meaning."""
    read: dict[str, Any] = json.loads(config)
    return {name: sorted(value) if isinstance(value, list) else value for name, value in read.items()}


@pytest.mark.drawn
@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp_native"])
def test_adapters(transformers_ranks: RankPool, tmp_path: Path, strategy: str) -> None:
    for base, changed, loaded, tensors, refused in transformers_ranks.run(2, adapters, str(tmp_path), strategy):
        assert (base, changed, loaded.missing, loaded.unexpected) == ([], [], (), ())
        assert tensors == 8
        assert_says(refused, "PEFT has put adapters", "save_adapter()")
        assert_says(refused, "a PromptTuningConfig", "with fsdp_core.gathered(self.model)")
    ours, theirs = contents(tmp_path / "our head"), contents(tmp_path / "their head")
    assert ours["adapter_model.safetensors"] == theirs["adapter_model.safetensors"]
    assert (tmp_path / "prompts" / "adapter_model.safetensors").exists()
    ours, theirs = contents(tmp_path / "ours"), contents(tmp_path / "theirs")
    assert ours["adapter_model.safetensors"] == theirs["adapter_model.safetensors"]
    assert unordered(ours["adapter_config.json"]) == unordered(theirs["adapter_config.json"])
    assert transformers_ranks.run(1, reread, str(tmp_path)) == [[]]


def checkpointed(tmp: str) -> None:
    see_transformers()
    fabric = new_fabric("fsdp2", 2)
    want: Any = new_model("mixtral")
    if fabric.is_global_zero:
        want.save_pretrained(f"{tmp}/theirs")
    fabric.save(f"{tmp}/run.ckpt", {"net": fabric.setup(want)})


def converted(tmp: str, config: str) -> tuple[int, str]:
    """What the command says of a checkpoint and the folder of a configuration."""
    see_transformers()
    from click.testing import CliRunner

    from fsdp_core.cli import fsdp

    words = ["checkpoint", "consolidate", f"{tmp}/run.ckpt", f"{tmp}/{config}-ours", "--to", "huggingface"]
    done = CliRunner().invoke(fsdp, [*words, "--config", f"{tmp}/{config}"])
    return done.exit_code, done.output + str(done.exception or "")


def test_a_checkpoint_becomes_the_folder_of_transformers(transformers_ranks: RankPool, tmp_path: Path) -> None:
    transformers_ranks.run(2, checkpointed, str(tmp_path))
    (tmp_path / "theirs/tokenizer.json").write_text("{}", encoding="utf-8")
    assert transformers_ranks.run(1, converted, str(tmp_path), "theirs")[0][0] == 0
    assert contents(tmp_path / "theirs-ours") == contents(tmp_path / "theirs")
    other = json.loads((tmp_path / "theirs/config.json").read_text(encoding="utf-8")) | {"num_hidden_layers": 3}
    (tmp_path / "other").mkdir()
    (tmp_path / "other/config.json").write_text(json.dumps(other), encoding="utf-8")
    status, told = transformers_ranks.run(1, converted, str(tmp_path), "other")[0]
    assert status == 1
    assert_says(told, "is not the MixtralForCausalLM of the configuration", "model.layers.2", "--strip-prefix")


def failing(tmp: str) -> list[str]:
    """What a rank whose disk is full, and a damaged folder, make all ranks say; nothing is left of it."""
    see_transformers()
    from unittest import mock

    fabric = new_fabric("fsdp2", 2)
    model = fabric.setup(new_model("llama"))
    full = OSError(28, "No space left on device")
    with mock.patch("os.pwrite", side_effect=full if fabric.global_rank == 1 else os.pwrite):
        told = [refusal(FSDPError, lambda: save_pretrained(model, f"{tmp}/full"))]
    save_pretrained(model, f"{tmp}/whole", max_shard_size=SMALL_FILES)
    fabric.barrier()
    if fabric.is_global_zero:
        victim = sorted(Path(tmp, "whole").glob("model-*.safetensors"))[1]
        victim.unlink()
    fabric.barrier()
    told.append(refusal(FSDPError, lambda: load_pretrained(model, f"{tmp}/whole")))
    return told


def test_failures_of_one_rank_are_told_on_all(transformers_ranks: RankPool, tmp_path: Path) -> None:
    for full, damaged in transformers_ranks.run(2, failing, str(tmp_path)):
        assert_says(full, "No space left on device", "on rank 1 of 2")
        assert_says(damaged, "model-00002-of", "is missing")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["whole"]


class Pair(nn.Module):
    """A module without a configuration."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)


def without_ranks(tmp: str) -> tuple[int, list[str]]:
    net, other = Pair(), Pair()
    saved = save_pretrained(net, f"{tmp}/pair")
    load_pretrained(other, f"{tmp}/pair")
    return saved.tensors, differences(other.state_dict(), net.state_dict())


def test_any_module_of_one_process(tmp_path: Path) -> None:
    assert without_ranks(str(tmp_path)) == (4, [])
    assert [path.name for path in (tmp_path / "pair").iterdir()] == ["model.safetensors"]


def large() -> nn.Module:
    """A Llama of 220 MB."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 8}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=8000, num_hidden_layers=3))


def measured(tmp: str, strategy: str, options: dict[str, Any], world_size: int) -> dict[str, int]:
    """What writing and reading add to this rank's memory at their peaks, and the bytes that it reads."""
    see_transformers()
    plan = {"tp_plan": plan_of("llama")} if "tensor_parallel_size" in options else {}
    fabric = new_fabric(strategy, world_size, {**options, **plan})
    warm = fabric.setup(new_model("llama"))
    save_pretrained(warm, f"{tmp}/warm")  # what is imported and allocated only once
    load_pretrained(warm, f"{tmp}/warm")
    with fabric.init_module(empty_init=True):
        model = large()
    model = fabric.setup(model)
    wrote = peak_of(lambda: save_pretrained(model, f"{tmp}/large"))
    loaded: list[Any] = []
    read = peak_of(lambda: loaded.append(load_pretrained(model, f"{tmp}/large")))
    return {"wrote": wrote, "read": read, "bytes read": loaded[0].bytes_read}


#: What writing and reading may add to the shard.
ALLOWED = 64 * 2**20


@pytest.mark.skipif(not is_measurable(), reason="the peak memory of a process can be reset on Linux alone")
@pytest.mark.parametrize("case", [("fsdp2", {}, 2)], ids=["fsdp2"])
def test_memory_and_bytes(transformers_ranks: RankPool, tmp_path: Path, case: tuple[str, dict[str, Any], int]) -> None:
    strategy, options, world_size = case
    got = transformers_ranks.run(world_size, measured, str(tmp_path), strategy, options, world_size, timeout=LIMIT)
    size = (tmp_path / "large/model.safetensors").stat().st_size
    assert size / 2 > 1.5 * ALLOWED, "a rank that had the other half, too, would be seen"
    for of_rank in got:
        assert max(of_rank["wrote"], of_rank["read"]) <= ALLOWED
    assert sum(of_rank["bytes read"] for of_rank in got) <= 1.02 * size
