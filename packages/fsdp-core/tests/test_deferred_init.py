"""Models built without memory have the values that they are built with, in whatever order their parts get memory."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_core.errors import ShardingError
from fsdp_core.initialization.deferred_init import continue_deferred, deferred_init, values_of
from fsdp_core.initialization.materialize import materialize

CPU = torch.device("cpu")


class Research(nn.Module):
    """Does what constructors were seen to do."""

    noise: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 4)
        self.place = nn.Parameter(torch.zeros(1, 5, 6))
        self.first = nn.Parameter(torch.randn(1, 1, 6) * 0.3)
        rates = [x.item() for x in torch.linspace(0, 0.3, 3)]
        assert rates == torch.linspace(0, 0.3, 3).tolist()
        assert rates[2] > 0.2
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(6, 2, 8, dropout=rate) for rate in rates)
        self.norm = nn.BatchNorm1d(6)
        self.depth = nn.Parameter(1e-5 * torch.ones(6))
        self.lstm = nn.LSTM(6, 6)
        self.conv = nn.Conv2d(3, 4, 3)
        nn.init.orthogonal_(self.head.weight)
        nn.init.dirac_(self.conv.weight)
        nn.init.trunc_normal_(self.place, std=1.0)  # draws again what is out of bounds
        self.register_buffer("mask", torch.full((4, 4), float("-inf")).triu(1), persistent=False)
        self.register_buffer("numbers", torch.arange(5)[None])
        self.table = torch.arange(4).float().cos()
        self.register_buffer("noise", torch.randn(4, generator=torch.Generator().manual_seed(3)))
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.seeded = nn.Linear(2, 2)
            torch.manual_seed(1)
            self.again = nn.Linear(2, 2)
        self.embedding = nn.Embedding(7, 6, padding_idx=2)
        self.tied = nn.Linear(6, 7, bias=False)
        self.tied.weight = self.embedding.weight
        self.apply(self._init_weights)
        with torch.no_grad():
            self.norm.weight[2:4] = torch.randn(2)
            self.norm.bias.copy_(torch.tensor([1.0, 2, 3, 4, 5, 6]))
        self.conv.weight.data = self.conv.weight.data * 0.5
        self.last = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.5, a=-0.6, b=0.6)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm):
            nn.init.constant_(module.weight, 0.5)


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "vocab_size": 99}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=3, pad_token_id=0))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    ends: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=3, n_head=4, vocab_size=99, n_positions=16, **ends))


def state(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}


def fill(module: nn.Module, parts: int = 5) -> None:
    """Give a module memory a part at a time, the last ones first."""
    modules = list(module.modules())
    for first in reversed(range(parts)):
        materialize(modules[first::parts], CPU)


def assert_same(one: nn.Module, other: nn.Module) -> None:
    values, wanted = state(one), state(other)
    assert values.keys() == wanted.keys()
    for name, want in wanted.items():
        assert (values[name].dtype, values[name].stride()) == (want.dtype, want.stride()), name
        assert torch.equal(values[name], want), name


@pytest.mark.usefixtures("transformers")
@pytest.mark.parametrize("build", [Research, llama, gpt2])
def test_values_are_those_of_a_model_built_with_memory(build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    want, drawn = build(), torch.rand(3)
    torch.manual_seed(0)
    with deferred_init():
        got = build()
    assert sum(p.numel() for p in got.parameters() if not p.is_meta) == 0
    fill(got)
    assert_same(got, want)
    assert torch.equal(torch.rand(3), drawn), "the generator is not where building has left it"
    if isinstance(got, Research) and isinstance(want, Research):
        assert torch.equal(got.table, want.table)
        assert got.tied.weight is got.embedding.weight or torch.equal(got.tied.weight, got.embedding.weight)
        x = torch.ones(2, 1, 6)
        assert torch.equal(got.lstm(x)[0], want.lstm(x)[0])


def test_models_built_one_after_the_other_and_cast() -> None:
    def build() -> tuple[nn.Module, nn.Module]:
        return nn.Linear(5, 4), nn.Linear(5, 4)

    torch.manual_seed(0)
    want = [one.to(torch.bfloat16) for one in build()]
    torch.manual_seed(0)
    with deferred_init():
        first = nn.Linear(5, 4)
    with deferred_init():
        second = nn.Linear(5, 4)
    for one in (first, second):
        with continue_deferred(one):
            one.to(torch.bfloat16)
    for got, wanted in zip((second, first), want[::-1], strict=True):
        fill(got)
        assert_same(got, wanted)


def test_a_seed_that_is_set_before_memory_is_given_decides() -> None:
    with deferred_init():
        got = nn.Linear(5, 4)
    torch.manual_seed(7)
    fill(got)
    torch.manual_seed(7)
    assert_same(got, nn.Linear(5, 4))


def test_change_without_effect_is_refused() -> None:
    """And one that was given to a module, to be done when it gets memory, is done."""
    with deferred_init():
        changed, given = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))
    changed.apply(lambda one: nn.init.ones_(one.weight) if isinstance(one, nn.Linear) else None)
    with pytest.raises(ShardingError, match=r"'weight' of Linear was changed after it was built"):
        fill(changed)
    layer: Any = given[0]
    layer.reset_parameters = lambda: [nn.init.ones_(one) for one in layer.parameters()]
    fill(given)
    assert layer.weight.tolist() == [[1.0, 1.0]] * 2


def test_reset_parameters_fills_what_the_constructor_left() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain, self.unit = nn.Parameter(torch.empty(3)), nn.Parameter(torch.ones(3))

    class Resets(Late):
        def reset_parameters(self) -> None:
            nn.init.constant_(self.gain, 2.0)

    with deferred_init():
        late, resets = Late(), Resets()
    fill(resets)
    assert (resets.gain.tolist(), resets.unit.tolist()) == ([2.0] * 3, [1.0] * 3)
    with pytest.raises(ShardingError, match=r"Late was built on the meta device, but has no reset_parameters"):
        fill(late)


def test_values_that_are_read_while_deferred() -> None:
    with deferred_init():
        data = torch.tensor([3.0, 1.0])
        with pytest.raises(ShardingError, match=r"Write torch\.empty"):
            data.normal_()
        chosen = torch.arange(6)[torch.arange(6) % 2 == 0]  # how many is not known without values
        total = torch.arange(6).float() + chosen.sum()
    assert chosen.tolist() == [0, 2, 4]
    (value,) = values_of([total], CPU)
    assert value.tolist() == [6.0, 7, 8, 9, 10, 11]


def test_notes_are_freed_with_the_model() -> None:
    from fsdp_core.initialization import deferred_init as noted

    def count() -> int:
        gc.collect()
        return sum(type(one) is noted._Build for one in gc.get_objects())

    before = count()
    with deferred_init():
        model = nn.Sequential(nn.LSTM(3, 3), nn.Linear(3, 3))
    assert count() == before + 1
    fill(model)
    assert count() == before


def test_a_buffer_without_elements_leaves_the_values_of_its_layer() -> None:
    def build() -> nn.Module:
        layer = nn.Linear(3, 3)
        layer.register_buffer("none", torch.empty(0))
        nn.init.constant_(layer.bias, 0.5)
        return layer

    torch.manual_seed(0)
    want = state(build())
    with deferred_init():
        layer = build()
    torch.manual_seed(0)
    materialize(layer.modules(), CPU)
    assert all(torch.equal(tensor, want[name]) for name, tensor in state(layer).items())


def test_values_of_unknown_origin_are_refused() -> None:
    with deferred_init():
        layer = nn.Linear(3, 3)
        layer.load_state_dict({"weight": torch.empty(3, 3), "bias": torch.empty(3)})
    with pytest.raises(ShardingError, match="has no values: it was made of what could not be noted"):
        materialize(layer.modules(), CPU)
