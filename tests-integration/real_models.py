"""Models of transformers, built from small configurations, and trained: sharded, and in one process of plain torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_core.testing.oracle import Trained
from fsdp_core.testing.state import full_state
from fsdp_core.testing.training import new_fabric

__all__ = [
    "MESHES",
    "MODELS",
    "adapted",
    "batches",
    "new_model",
    "plan_of",
    "see_transformers",
    "train_plain",
    "train_sharded",
]

EXAMPLES = Path(__file__).parent.parent / "docs/examples"
SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
VOCABULARY: dict[str, Any] = {"vocab_size": 96, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SIZES, **VOCABULARY, num_key_value_heads=2))


def qwen3() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**SIZES, **VOCABULARY, num_key_value_heads=2, head_dim=8))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=16, **VOCABULARY, **dropout))


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(**SIZES, **VOCABULARY, num_key_value_heads=2, num_local_experts=4))


def qwen3_moe() -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **VOCABULARY, **sizes, moe_intermediate_size=24))


def deepseek() -> nn.Module:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    heads: dict[str, Any] = {
        "num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
        "v_head_dim": 8,
    }  # fmt: skip
    experts: dict[str, Any] = {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 2, "topk_group": 1,
        "first_k_dense_replace": 1, "n_shared_experts": 1,
    }  # fmt: skip
    return DeepseekV3ForCausalLM(DeepseekV3Config(**SIZES, **VOCABULARY, **heads, **experts))


def gpt_oss() -> nn.Module:
    from transformers import GptOssConfig, GptOssForCausalLM

    sizes: dict[str, Any] = {
        "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"], "max_position_embeddings": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }  # fmt: skip
    return GptOssForCausalLM(GptOssConfig(**SIZES, **VOCABULARY, **sizes))


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(**SIZES, image_size=8, patch_size=4))


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes: dict[str, Any] = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 96}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0, dropout_rate=0.0))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": llama, "qwen3": qwen3, "gpt2": gpt2, "mixtral": mixtral, "vit": vit, "t5": t5, "qwen3_moe": qwen3_moe,
    "deepseek": deepseek, "gpt_oss": gpt_oss,
}  # fmt: skip

#: Options of fsdp2, and the number of ranks.
MESHES: dict[str, tuple[dict[str, Any], int]] = {
    "shard 2": ({}, 2),
    "tensor 2": ({"tensor_parallel_size": 2}, 2),
    "shard 2 x tensor 2": ({"tensor_parallel_size": 2}, 4),
    "experts 2": ({"expert_parallel_size": 2}, 2),
    "experts 2 of 4": ({"expert_parallel_size": 2}, 4),
    "experts 4": ({"expert_parallel_size": 4}, 4),
}
ADAPTED = ["model.layers.*.self_attn.q_proj", "model.layers.*.self_attn.v_proj"]


def see_transformers() -> None:
    """Let this rank import transformers and PEFT, and the examples. Not the test's own process, which starts others."""
    for path in (os.environ.get("FSDP_TESTS_TRANSFORMERS", ""), str(EXAMPLES)):
        if path not in sys.path:
            sys.path.append(path)


def new_model(name: str, seed: int = 5) -> nn.Module:
    """A model of some seed, which trains without random numbers; with adapters if its name ends in ``lora``."""
    torch.manual_seed(seed)
    kind, _, lora = name.partition(" ")
    model = MODELS[kind]().train()
    return adapted(model) if lora else model


def adapted(model: nn.Module) -> Any:
    """A model with LoRA, whose adapters have an effect from the start."""
    from peft import LoraConfig, get_peft_model

    given: Any = model
    config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian")
    return get_peft_model(given, config)


def plan_of(name: str) -> Any:
    """The plan of the documentation."""
    import tensor_parallel_plans as plans

    kind, _, lora = name.partition(" ")
    plan = getattr(plans, kind)()
    return plans.with_adapters(plan, ADAPTED) if lora else plan


def batches(name: str, steps: int = 3) -> Iterable[dict[str, Tensor]]:
    """Global batches of four samples."""
    source = torch.Generator().manual_seed(7)
    for _ in range(steps):
        if name == "vit":
            labels = torch.randint(0, 2, (4,), generator=source)
            yield {"pixel_values": torch.randn(4, 3, 8, 8, generator=source), "labels": labels}
        else:
            words = torch.randint(1, 96, (4, 8), generator=source)
            yield {"input_ids": words, "labels": words}


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW in small steps: it divides tiny gradients by themselves, and so makes their rounding errors large."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, eps=1e-5)


def train_plain(name: str) -> Trained:
    """The losses and weights of one process of plain torch."""
    model: Any = new_model(name)
    optimizer, losses = _adamw(model), []
    for batch in batches(name):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {key: value.detach() for key, value in model.state_dict().items()}


def train_sharded(name: str, mesh: str) -> tuple[Trained, Any]:
    """The same on this rank of a mesh of fsdp2; and the model that Fabric returned."""
    options, world_size = MESHES[mesh]
    plan = {"tp_plan": plan_of(name)} if "tensor_parallel_size" in options else {}
    fabric = new_fabric("fsdp2", world_size, {**options, **plan})
    net = new_model(name)
    model, optimizer = fabric.setup(net, _adamw(net))
    runtime: Any = fabric.strategy.runtime  # type: ignore[attr-defined]
    shares, share = runtime.data_parallel_world_size, runtime.data_parallel_rank
    losses = []
    for batch in batches(name):
        loss = model(**{key: value.chunk(shares)[share] for key, value in batch.items()}).loss
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(runtime.all_reduce(loss.detach().clone()).item())
    return (losses, full_state(fabric.strategy)), model
