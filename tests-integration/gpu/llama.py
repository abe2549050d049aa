"""Llamas of transformers, randomly initialised on the device, and who trains them: by name, Lightning's own, by hand.

All contenders of a comparison compute the same: the same units, dtypes, kernels and optimizer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from contenders import FSDPStrategyOnCPU, Step, _AfterStep
from device import ACCELERATOR, own_device
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy

import fsdp_core
from fsdp_core.testing.training import QUIET

__all__ = [
    "EIGHT_B",
    "ONE_B",
    "TINY",
    "LlamaModule",
    "LlamaSize",
    "contenders",
    "decoder_layers",
    "flops_per_token",
    "new_llama",
    "train_by_trainer",
]


@dataclass(frozen=True, kw_only=True)
class LlamaSize:
    """How large a Llama and its batches are.

    Attributes:
        hidden: The width of the residual stream.
        layers: Decoder layers.
        intermediate: The inner width of the MLPs.
        heads: Heads of queries.
        key_heads: Heads of keys and values.
        vocabulary: Distinct tokens; input and output embeddings are not tied.
        sequence: Tokens per sequence.
        sequences: Sequences per step.
    """

    hidden: int
    layers: int
    intermediate: int
    heads: int
    key_heads: int
    vocabulary: int
    sequence: int
    sequences: int = 1

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.sequence * self.sequences


#: 1.10 billion parameters: fp32 weights, gradients and AdamW's moments take 17.6 GB, so that three contenders and one
#: step's activations (10 GB), logits (2 GB) and gathered units (2 GB) fit a card of 80 GB, without activation
#: checkpointing. Compiled, a sequence keeps half of that, so that two contenders have room for four sequences.
ONE_B = LlamaSize(hidden=2048, layers=16, intermediate=8192, heads=32, key_heads=8, vocabulary=32_000, sequence=4096)
#: Llama 3 8B.
EIGHT_B = LlamaSize(
    hidden=4096, layers=32, intermediate=14_336, heads=32, key_heads=8, vocabulary=128_256, sequence=4096
)
#: For a rehearsal on a CPU.
TINY = LlamaSize(hidden=64, layers=2, intermediate=128, heads=4, key_heads=2, vocabulary=128, sequence=32)


def new_llama(size: LlamaSize, dtype: torch.dtype = torch.float32, device: torch.device | None = None) -> nn.Module:
    """Build a causal language model with the same random weights on each call, on the device itself.

    Args:
        size: How large it is.
        dtype: The dtype of its parameters.
        device: Where it is built; this rank's device when ``None``.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        intermediate_size=size.intermediate,
        num_attention_heads=size.heads,
        num_key_value_heads=size.key_heads,
        vocab_size=size.vocabulary,
        max_position_embeddings=size.sequence,
        attn_implementation="sdpa",
        tie_word_embeddings=False,
        use_cache=False,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.random.fork_rng(devices=[own_device()] if ACCELERATOR == "cuda" else []), device or own_device():
            torch.manual_seed(0)
            model: nn.Module = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    return model.train()


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The decoder layers of a Llama, which are units of FSDP."""
    return [module for module in model.modules() if type(module).__name__ == "LlamaDecoderLayer"]


def units_of(strategy: str, model: nn.Module) -> list[nn.Module]:
    """The units besides the root that ``auto_wrap_policy="auto"`` chooses in a Llama.

    Under ``fsdp2`` the embedding is among them, since the model's own plan asks for that.
    """
    own = [model.get_input_embeddings()] if strategy == "fsdp2" else []  # type: ignore[operator]
    return [*own, *decoder_layers(model)]


def flops_per_token(model: nn.Module, size: LlamaSize) -> dict[str, float]:
    """Floating-point operations of training one token, forward and backward, without what is recomputed.

    Args:
        model: The model, before it is sharded.
        size: How large it is.

    Returns:
        ``torchtitan's``, which peers publish: 6 × parameters without the input embedding, and attention as if every
        token looked at every other. ``causal``, which is computed: attention to the tokens before alone, half of it.
    """
    embedding = size.vocabulary * size.hidden
    matrices = 6 * (sum(parameter.numel() for parameter in model.parameters()) - embedding)
    attention = 12 * size.layers * size.hidden * size.sequence
    return {"torchtitan's": matrices + attention, "causal": matrices + attention / 2}


def batches(size: LlamaSize) -> Iterator[Tensor]:
    """Random tokens of shape (sequences, sequence), int64, on the device: the same for every contender and step.

    Nothing could be learned from new random tokens at each step, and losses would agree whoever does not train.
    """
    dice = torch.Generator(own_device()).manual_seed(1)
    shape = (size.sequences, size.sequence)
    return repeat(torch.randint(size.vocabulary, shape, generator=dice, device=own_device()))


def new_optimizer(parameters: Any) -> torch.optim.AdamW:
    """AdamW, fused, with the large ``eps`` under which rounding is not amplified."""
    return torch.optim.AdamW(parameters, lr=1e-4, eps=1e-3, fused=True)


class LlamaModule(pl.LightningModule):
    """A Llama as Lightning wants it.

    Args:
        model: The language model.
        shard: Called on it in ``configure_model``, for strategies that leave the sharding to the user.
    """

    def __init__(self, model: nn.Module, shard: Callable[[nn.Module], object] | None = None) -> None:
        super().__init__()
        self.model, self._shard, self._is_sharded = model, shard, False

    def configure_model(self) -> None:
        if self._shard is not None and not self._is_sharded:
            self._shard(self.model)
            self._is_sharded = True

    def training_step(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=tokens, labels=tokens).loss
        return loss

    def configure_optimizers(self) -> Any:
        return new_optimizer([parameter for parameter in self.parameters() if parameter.requires_grad])


def compile_units(strategy: str, compiler: str | None, model: nn.Module) -> nn.Module:
    """Compile the forward of each unit, as ``compile=True`` does: hooks of FSDP stay outside.

    Args:
        strategy: The strategy whose units they are.
        compiler: The backend of ``torch.compile``; ``None`` to compile nothing.
        model: The model, not sharded yet.
    """
    for unit in units_of(strategy, model) if compiler else ():
        unit.forward = torch.compile(unit.forward, backend=compiler)  # type: ignore[method-assign]
    return model


def shard_fsdp2(model: nn.Module) -> nn.Module:
    """FSDP2 by hand: each unit, then what remains, in the dtypes of ``precision="bf16-mixed"``."""
    mesh = init_device_mesh(ACCELERATOR, (torch.distributed.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for unit in (*units_of("fsdp2", model), model):
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    return model


FSDP1_DTYPES = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=True)


def layer_policy(model: nn.Module) -> ModuleWrapPolicy:
    """FSDP1's units: the class of the decoder layers."""
    return ModuleWrapPolicy({type(decoder_layers(model)[0])})


def wrap_fsdp1(model: nn.Module) -> nn.Module:
    """FSDP1 by hand: the same units and dtypes, behind the original parameters."""
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=layer_policy(model),
        use_orig_params=True,
        device_id=own_device(),
        mixed_precision=FSDP1_DTYPES,
    )


def train_by_hand(
    shard: Callable[[nn.Module], nn.Module], strategy: str, compiler: str | None, size: LlamaSize, after_step: Step
) -> None:
    """Train in the shortest loop that torch allows, under the autocast of ``precision="bf16-mixed"``."""
    model = shard(compile_units(strategy, compiler, new_llama(size)))
    optimizer = new_optimizer(model.parameters())
    for step, tokens in enumerate(batches(size)):
        with torch.autocast(ACCELERATOR, torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if not after_step(step, loss.detach(), model, optimizer):
            return


def train_by_trainer(strategy: Any, module: LlamaModule, size: LlamaSize, after_step: Step, precision: str) -> None:
    """Train with Lightning, without what the loop by hand does not have: no bar, no logger, no checkpoints."""
    pl.Trainer(
        strategy=strategy,
        accelerator=ACCELERATOR,
        devices=torch.distributed.get_world_size(),
        precision=precision,  # type: ignore[arg-type]
        max_epochs=1,
        callbacks=[_AfterStep(after_step)],
        **QUIET,
        use_distributed_sampler=False,
    ).fit(module, batches(size))


def train_by_name(name: str, compiler: str | None, size: LlamaSize, after_step: Step) -> None:
    """Train with one of this project's strategies; ``fsdp2`` compiles units by an option, ``fsdp_native`` the user."""
    model = new_llama(size)
    has_option = name == "fsdp2"
    options = {"compile": {"backend": compiler}} if compiler and has_option else {}
    strategy = fsdp_core.resolve(name, "trainer")(**options)
    module = LlamaModule(model if has_option else compile_units(name, compiler, model))
    train_by_trainer(strategy, module, size, after_step, "bf16-mixed")


def train_by_model_parallel(compiler: str | None, size: LlamaSize, after_step: Step) -> None:
    """Train with Lightning's ModelParallelStrategy, whose user shards as the loop by hand does."""
    strategy = ModelParallelStrategy(data_parallel_size=torch.distributed.get_world_size(), tensor_parallel_size=1)
    module = LlamaModule(compile_units("fsdp2", compiler, new_llama(size)), shard_fsdp2)
    train_by_trainer(strategy, module, size, after_step, "bf16-mixed")


def train_by_lightnings_fsdp1(compiler: str | None, size: LlamaSize, after_step: Step) -> None:
    """Train with Lightning's FSDPStrategy, which gathers fp32 unless it is given the dtypes."""
    model = compile_units("fsdp_native", compiler, new_llama(size))
    strategy = FSDPStrategy if ACCELERATOR == "cuda" else FSDPStrategyOnCPU
    chosen = strategy(auto_wrap_policy=layer_policy(model), mixed_precision=FSDP1_DTYPES)
    train_by_trainer(chosen, LlamaModule(model), size, after_step, "bf16-mixed")


def contenders(strategy: str, compiler: str | None) -> dict[str, Callable[[LlamaSize, Step], None]]:
    """Who trains on the shards of a strategy, by name; the strategy itself first.

    Args:
        strategy: ``"fsdp2"`` or ``"fsdp_native"``.
        compiler: The backend of ``torch.compile`` for units; ``None`` to compile nothing.
    """
    shard = {"fsdp2": shard_fsdp2, "fsdp_native": wrap_fsdp1}[strategy]
    lightnings = {
        "fsdp2": ("ModelParallelStrategy", train_by_model_parallel),
        "fsdp_native": ("FSDPStrategy", train_by_lightnings_fsdp1),
    }[strategy]
    return {
        strategy: partial(train_by_name, strategy, compiler),
        "by hand": partial(train_by_hand, shard, strategy, compiler),
        lightnings[0]: partial(lightnings[1], compiler),
        "by hand, again": partial(train_by_hand, shard, strategy, compiler),
        "plain torch": partial(train_by_hand, lambda model: model, strategy, compiler),
    }
