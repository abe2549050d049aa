"""Models of transformers on parts of sequences: positions, masks and shifted labels are those of whole sequences."""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_core.errors import ShardingError, UnsupportedCapabilityError
from fsdp_core.testing import RankPool, oracle
from fsdp_core.testing.refusals import assert_says, refusal
from fsdp_core.testing.state import full_state
from fsdp_core.testing.training import means, new_fabric

LENGTH = 8
SIZES: dict[str, Any] = {"vocab_size": 17, "max_position_embeddings": 16}


def see_others() -> None:
    """Let this rank import transformers. Not the test's own process: what it starts later would find it too."""
    path = os.environ.get("FSDP_TESTS_TRANSFORMERS", "")
    if path not in sys.path:
        sys.path.append(path)


def new_model(name: str, **options: Any) -> nn.Module:
    import transformers as library

    torch.manual_seed(5)
    attention = {"attn_implementation": options.pop("attn_implementation", "sdpa")}
    small = {**SIZES, **attention, **options}
    wide = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    model: nn.Module
    match name:
        case "llama":
            model = library.LlamaForCausalLM(library.LlamaConfig(**wide, num_key_value_heads=2, **small))
        case "mistral":
            model = library.MistralForCausalLM(library.MistralConfig(**wide, sliding_window=4, **small))
        case "bert":
            model = library.BertForMaskedLM(library.BertConfig(**wide, hidden_dropout_prob=0.0, **small))
        case _:
            dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
            model = library.GPT2LMHeadModel(library.GPT2Config(n_embd=16, n_layer=2, n_head=2, **dropout, **small))
    return model.train()


def new_batch(kind: str) -> dict[str, Tensor]:
    with oracle.seeded(7):
        words = torch.randint(0, 17, (2, LENGTH))
    batch = {"input_ids": words, "labels": words.clone()}
    if kind == "padded":
        batch["attention_mask"] = torch.tensor([[1] * 5 + [0] * 3, [1] * 8])
        batch["labels"][0, 5:] = -100
    if kind == "packed":
        batch["position_ids"] = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 0, 1, 2]])
    return batch


#: A model, its options, and a batch.
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("llama", {}, "whole"),
    "llama, padded": ("llama", {}, "padded"),
    "llama, packed": ("llama", {"use_cache": False}, "packed"),
    "gpt2": ("gpt2", {}, "whole"),
    "bert, padded": ("bert", {"attention_probs_dropout_prob": 0.0}, "padded"),
}


def step(model: Any, optimizer: Any, batch: Any, backward: Any) -> Tensor:
    loss: Tensor = model(**batch).loss
    backward(loss)
    optimizer.step()
    return loss.detach()


def on_ranks() -> dict[str, Any]:
    """The losses and weights of one step, and those of one process of plain torch."""
    see_others()
    found = {}
    for case, (name, options, kind) in CASES.items():
        plain = new_model(name, **options)
        loss = step(plain, torch.optim.SGD(plain.parameters(), lr=0.5), new_batch(kind), Tensor.backward)
        fabric = new_fabric("fsdp2", 2, {"context_parallel_size": 2})
        net = new_model(name, **options)
        if case == "llama":
            net.gradient_checkpointing_enable()  # type: ignore[operator]
        model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.5))
        part = fabric.strategy.split_batch(new_batch(kind))  # type: ignore[attr-defined]
        losses = means([step(model, optimizer, part, fabric.backward)])
        found[case] = losses, full_state(fabric.strategy), float(loss), plain.state_dict()
    return found


def refused() -> dict[str, str]:
    see_others()
    fabric = new_fabric("fsdp2", 2, {"context_parallel_size": 2})
    unfit = {"mistral": new_model("mistral"), "llama": new_model("llama", attn_implementation="eager")}
    found = {name: refusal(UnsupportedCapabilityError, partial(fabric.setup, model)) for name, model in unfit.items()}
    model = fabric.setup(new_model("llama"))
    split: Any = fabric.strategy.split_batch  # type: ignore[attr-defined]
    part = split(new_batch("packed"))
    found["cache"] = refusal(ShardingError, lambda: model(**part))
    part = split(new_batch("whole"))
    found["items"] = refusal(ShardingError, lambda: model(**part, num_items_in_batch=3))
    found["not split"] = refusal(ShardingError, lambda: model(**new_batch("whole")))
    return found


def test_one_step_equals_that_of_one_process(transformers_ranks: RankPool) -> None:
    for found in transformers_ranks.run(2, on_ranks):
        for losses, state, loss, weights in found.values():
            assert losses == pytest.approx([loss], abs=oracle.FP32_TOLERANCE)
            torch.testing.assert_close(state, weights, rtol=oracle.FP32_TOLERANCE, atol=oracle.FP32_TOLERANCE)


def test_what_cannot_be_split(transformers_ranks: RankPool) -> None:
    for found in transformers_ranks.run(2, refused):
        assert_says(found["mistral"], "MistralForCausalLM", "sliding", "context_parallel_size")
        assert_says(found["llama"], "LlamaForCausalLM", "'eager'", "attn_implementation='sdpa'")
        assert_says(found["cache"], "packed sequences", "use_cache=False")
        assert_says(found["items"], "num_items_in_batch", "mean over the labels")
        assert_says(found["not split"], "over 8 positions", "split_batch()")
