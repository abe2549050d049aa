"""LightningCLI with the configurations of docs/lightning-cli.md: parsed, made into strategies, and trained with.

Those for XLA are trained with in test_xla.py.
"""

from __future__ import annotations

import json
import re
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI
from torch.distributed.fsdp import BackwardPrefetch, MixedPrecision, MixedPrecisionPolicy, ShardingStrategy

import fsdp_core
from forked_scripts import run_forked

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "docs/examples/cli.py"
PAGE = (ROOT / "docs/lightning-cli.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"```yaml\n# (\S+\.yaml)\n(.*?)```", PAGE, flags=re.DOTALL))


def test_the_page_has_a_file_for_each_strategy() -> None:
    named = [
        "fsdp2",
        "fsdp2_dtypes",
        "fsdp2_computation",
        "fsdp_native",
        "hybrid",
        "ddp_fully_sharded",
        "xla_fsdp",
        "xla_fsdp_spmd",
        "moved",
    ]
    assert list(FILES) == [f"{name}.yaml" for name in named]
    assert SCRIPT.read_text(encoding="utf-8") in PAGE
    assert 'pip install "jsonargparse[signatures]"' in PAGE  # without which Lightning's command line is not there


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The page's script, whose classes are those of ``__main__`` as where it is run."""
    spec = spec_from_file_location("cli", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "cli", module)
    monkeypatch.setattr(sys.modules["__main__"], "Block", module.Block, raising=False)
    return module


def made(script: Any, folder: Path, name: str) -> Any:
    """The strategy that a file of the page makes."""
    path = folder / name
    path.write_text(FILES[name], encoding="utf-8")
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False}
    command = LightningCLI(
        script.Net, args=["--config", str(path)], run=False, save_config_callback=None, trainer_defaults=quiet
    )
    assert isinstance(command.trainer, pl.Trainer)
    asked = yaml.safe_load(FILES[name])["trainer"]["strategy"]
    assert type(command.trainer.strategy).__name__ == asked["class_path"].split(".")[-1]
    return command.trainer.strategy


def test_options_arrive(script: Any, tmp_path: Path) -> None:
    fsdp2 = made(script, tmp_path, "fsdp2.yaml")
    assert (fsdp2.options.auto_wrap_policy, fsdp2.options.reshard_after_forward) == ([script.Block], True)
    assert fsdp2.options.activation_checkpointing_policy == [script.Block]
    assert (fsdp2.timeout.total_seconds(), fsdp2.async_saves is not None) == (600, True)
    assert fsdp2.shard_precision.name == "bf16-mixed"
    bf16, fp32 = torch.bfloat16, torch.float32
    dtypes = made(script, tmp_path, "fsdp2_dtypes.yaml").options.mp_policy
    assert dtypes == MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=fp32)
    computing = made(script, tmp_path, "fsdp2_computation.yaml").options
    assert computing.activation_checkpointing_policy == "every_2"
    assert torch.ops.aten.addmm.default in computing.saved_ops
    assert (computing.activation_offload, computing.compile) == (True, {"backend": "aot_eager"})
    assert (computing.forward_prefetch_depth, computing.backward_prefetch_depth) == (1, 2)
    assert computing.reshard_after_forward == [script.Block]
    native = made(script, tmp_path, "fsdp_native.yaml").options
    assert native.strategy is ShardingStrategy.SHARD_GRAD_OP
    assert native.prefetch is BackwardPrefetch.BACKWARD_POST
    assert native.checkpointing_policy == {script.Block}
    assert native.mixed_precision == MixedPrecision(param_dtype=bf16, reduce_dtype=fp32, cast_forward_inputs=True)
    hybrid = made(script, tmp_path, "hybrid.yaml").options
    assert (hybrid.strategy, hybrid.device_mesh) == (ShardingStrategy.HYBRID_SHARD, (1, 2))
    fairscales = made(script, tmp_path, "ddp_fully_sharded.yaml").backend.options
    assert (fairscales.strategy, fairscales.offloads) == (ShardingStrategy.SHARD_GRAD_OP, True)
    assert fairscales.mixed_precision == native.mixed_precision
    assert fairscales.auto_wrap_policy.keywords == {"min_num_params": 500}
    assert made(script, tmp_path, "moved.yaml").state_dict_type == "full"


def test_a_printed_configuration_is_read_again(script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also ``"every_2"``, in whose place a function may stand; and a function by its path."""
    (tmp_path / "asked.yaml").write_text(FILES["fsdp2_computation.yaml"], encoding="utf-8")
    for policy in ("every_2", "json.loads"):
        words = [
            *("--config", str(tmp_path / "asked.yaml"), "--print_config"),
            f"--trainer.strategy.init_args.activation_checkpointing_policy={policy}",
        ]
        with pytest.raises(SystemExit):
            LightningCLI(script.Net, args=words, run=False)
        printed = capsys.readouterr().out
        assert yaml.safe_load(printed)["trainer"]["strategy"]["init_args"]["activation_checkpointing_policy"] == policy
        (tmp_path / "printed.yaml").write_text(printed, encoding="utf-8")
        read = LightningCLI(script.Net, args=["--config", str(tmp_path / "printed.yaml")], run=False)
        assert read.trainer.strategy.options.activation_checkpointing_policy == policy


def test_files_train_on_two_ranks_and_a_saved_one_goes_on(tmp_path: Path) -> None:
    for name in ("fsdp2.yaml", "fsdp_native.yaml"):
        (tmp_path / name).write_text(FILES[name], encoding="utf-8")
    runs = tmp_path / "lightning_logs"
    logs = ("--trainer.logger=lightning.pytorch.loggers.CSVLogger", f"--trainer.logger.save_dir={tmp_path}")

    def fit(*words: str) -> Path:
        run_forked(SCRIPT, "fit", *words, folder=tmp_path)
        (checkpoint,) = max(runs.iterdir()).glob("checkpoints/*")
        return checkpoint

    first = fit("--config", str(tmp_path / "fsdp2.yaml"), *logs)
    assert json.loads((first / "manifest.json").read_text(encoding="utf-8"))["world_size"] == 2
    asked = yaml.safe_load(FILES["fsdp2.yaml"])["trainer"]["strategy"]["init_args"]
    saved = str(runs / "version_0/config.yaml")
    written = yaml.safe_load(Path(saved).read_text(encoding="utf-8"))["trainer"]["strategy"]["init_args"]
    assert {option: written[option] for option in asked} == asked
    more = ("--ckpt_path", str(first), "--trainer.max_epochs=3")
    full = fit("--config", saved, *more, "--trainer.strategy.state_dict_type=full")
    assert torch.load(full, weights_only=True)["epoch"] == 2
    native = fit("--config", str(tmp_path / "fsdp_native.yaml"), *logs, *more)
    assert fsdp_core.load_state_dict(native).keys() == torch.load(full, weights_only=True)["state_dict"].keys()
