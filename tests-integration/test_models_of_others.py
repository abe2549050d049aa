"""Models of transformers, made from a configuration without memory; and weights that torchao has quantised."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fsdp_core.errors import ShardingError
from fsdp_core.testing import RankPool
from fsdp_core.testing.oracle import FP32_TOLERANCE
from fsdp_core.testing.refusals import assert_says, refusal
from fsdp_core.testing.state import full_state
from fsdp_core.testing.training import new_fabric, new_trainer

WORDS = torch.arange(12).reshape(2, 6)


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "vocab_size": 99}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=3, pad_token_id=0))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    ends: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=3, n_head=4, vocab_size=99, n_positions=16, **ends))


MODELS: dict[str, Callable[[], nn.Module]] = {"llama": llama, "gpt2": gpt2}


def see_others(variable: str) -> None:
    """Let this rank import what is in a folder. Not the test's own process: what it starts later would find it too."""
    path = os.environ.get(variable, "")
    if path not in sys.path:
        sys.path.append(path)


class Lit(LightningModule):
    """Makes a model where Lightning asks for it."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            with self.trainer.init_module(empty_init=True):
                torch.manual_seed(5)
                self.model = MODELS[self.name]()

    def validation_step(self, words: Tensor, index: int) -> None:
        self.loss = self.model(words, labels=words, use_cache=False).loss.item()


def on_ranks(tmp: str) -> dict[tuple[str, str], tuple[list[str], list[str], float]]:
    """What differs under Fabric and under the Trainer, and by how much the loss, by strategy and model."""
    see_others("FSDP_TESTS_TRANSFORMERS")  # without the torchvision that timm brings
    found = {}
    for name, build in MODELS.items():
        torch.manual_seed(5)
        net = build().eval()
        want, loss = net.state_dict(), net(WORDS, labels=WORDS, use_cache=False).loss.item()
        for strategy in ("fsdp2", "fsdp_native"):
            fabric = new_fabric(strategy, 2)
            torch.manual_seed(5)
            with fabric.init_module(empty_init=True):
                model = build()
            assert all(parameter.is_meta for parameter in model.parameters())
            fabric.setup(model)
            module, trainer = Lit(name), new_trainer(tmp, strategy, 2)
            with warnings.catch_warnings(record=True) as shown:
                warnings.simplefilter("always")
                trainer.validate(module, DataLoader([WORDS], batch_size=None), verbose=False)
            assert not any("init_module" in str(one.message) for one in shown), "Lightning advises what is done"
            by_fabric = full_state(fabric.strategy)
            by_trainer = full_state(trainer.strategy)
            found[strategy, name] = (
                [key for key, value in want.items() if not torch.equal(by_fabric[key], value)],
                [key for key, value in want.items() if not torch.equal(by_trainer[f"model.{key}"], value)],
                abs(module.loss - loss),
            )
    return found


def quantised(strategy: str) -> str:
    """What is said of a model whose frozen weights torchao has quantised."""
    see_others("FSDP_TESTS_APART")
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    net = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    net[0].requires_grad_(False)
    quantize_(net, Int8WeightOnlyConfig(), filter_fn=lambda _, name: name == "0")
    return refusal(ShardingError, lambda: new_fabric(strategy, 2).setup(net))


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    with RankPool() as pool:
        yield pool


def test_models_made_without_memory_have_the_same_weights(ranks: RankPool, tmp_path: Path) -> None:
    for found in ranks.run(2, on_ranks, str(tmp_path)):
        assert len(found) == 4
        for case, (by_fabric, by_trainer, difference) in found.items():
            assert (by_fabric, by_trainer) == ([], []), case
            assert difference == pytest.approx(0, abs=FP32_TOLERANCE), case


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp_native"])
def test_quantised_weights_are_refused(ranks: RankPool, strategy: str) -> None:
    for told in ranks.run(2, quantised, strategy):
        assert_says(told, "'0.weight' is of the class Int8Tensor", "precision='bf16-true'", "devices=1")
