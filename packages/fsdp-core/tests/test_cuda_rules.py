"""What CUDA does otherwise than a CPU, by rules that were read in torch's source."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fsdp_core.rehearsal import cuda_rules
from fsdp_core.rehearsal.caching_allocator import CachingAllocator, reserved_bytes
from fsdp_core.rehearsal.cuda_rules import (
    IN_FLOAT32,
    TO_FLOAT32,
    attention_without_scores,
    autocast_lists,
    beside_tensors,
    foreach_optimizers,
    masks_of_dropout,
)
from fsdp_core.rehearsal.fit import quietly
from fsdp_core.rehearsal.memory import MemoryMode
from fsdp_core.rehearsal.planning import Outcome

MIB = 1 << 20


def largest_at_once(rule: Callable[[], AbstractContextManager[None]], run: Callable[[], Any]) -> int:
    """The most bytes that a computation adds, on fakes."""
    with FakeTensorMode(allow_non_fake_inputs=True), rule(), MemoryMode() as memory:
        memory.begin_step()
        kept = run()
        peak = memory.step.peak("cpu").nbytes
    del kept
    return peak


def test_optimizers_keep_lists_of_temporaries() -> None:
    def step() -> Any:
        module = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))
        optimizer = torch.optim.AdamW(module.parameters())
        for parameter in module.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        return optimizer

    of_all = 8 * 64 * 64 * 4
    on_cpu, on_cuda = (largest_at_once(rule, step) for rule in (nullcontext, foreach_optimizers))
    assert on_cpu < 4.5 * of_all  # parameters, gradients, two moments, and the temporaries of one parameter
    assert on_cuda >= 5 * of_all


def test_a_mask_of_dropout_has_a_byte_an_element() -> None:
    def run() -> Any:
        return nn.functional.dropout(torch.zeros(1000, requires_grad=True), 0.5)

    assert largest_at_once(nullcontext, run) == 12_000  # input, noise, result
    assert largest_at_once(masks_of_dropout, run) == 9_000
    assert largest_at_once(masks_of_dropout, lambda: nn.functional.dropout(torch.zeros(1000), 0.5, False)) == 4_000


def test_attention_with_dropout_keeps_no_scores() -> None:
    def run() -> Any:
        query = torch.zeros(1, 2, 256, 8, requires_grad=True)
        return nn.functional.scaled_dot_product_attention(query, query, query, dropout_p=0.1, is_causal=True)

    scores = 2 * 256 * 256 * 4
    assert largest_at_once(nullcontext, run) > scores
    assert largest_at_once(attention_without_scores, run) < scores / 4


AUTOCAST: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "norm": nn.LayerNorm(8),
    "softmax": lambda x: x.softmax(-1),
    "softmax of a dtype": lambda x: torch.softmax(x, -1, torch.float32),
    "sum": lambda x: x.sum(),
    "sum of a dim": lambda x: x.sum(1, keepdim=True),
    "power": lambda x: x**2,
    "loss": lambda x: nn.functional.cross_entropy(x, torch.zeros(4, dtype=torch.long)),
}


@pytest.mark.parametrize("name", AUTOCAST)
def test_autocast_computes_in_float32_what_cuda_has_on_its_lists(name: str) -> None:
    with quietly(), autocast_lists(), torch.autocast("cpu", torch.bfloat16):
        x = torch.ones(4, 8, dtype=torch.bfloat16, requires_grad=True)
        result = AUTOCAST[name](x)
        assert result.dtype is torch.float32
        assert nn.functional.linear(x, torch.ones(8, 8)).dtype is torch.bfloat16
        result.sum().backward()
        assert x.grad is not None
        assert x.grad.dtype is torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        assert nn.LayerNorm(8)(x).dtype is torch.bfloat16  # as before


@pytest.mark.skipif(torch.__version__ < "2.13", reason="lists of torch 2.13")
@pytest.mark.parametrize(
    ("macro", "names"), [("AT_FORALL_FP32(_)", IN_FLOAT32), ("AT_FORALL_FP32_SET_OPT_DTYPE(_)", TO_FLOAT32)]
)
def test_autocast_lists_are_those_of_torch(macro: str, names: tuple[str, ...]) -> None:
    header = Path(torch.__file__).parent / "include/ATen/autocast_mode.h"
    lines = header.read_text().partition(f"#define {macro}")[2].partition("\n\n")[0]
    assert tuple(name.replace(", ", ".") for name in re.findall(r"_\(([\w, ]+)\)", lines)) == names


def test_the_allocator_rounds_and_keeps_segments() -> None:
    allocator = CachingAllocator()
    for key in range(4096):
        allocator.allocate(key, 500)  # 512 each, of one segment
    assert allocator.reserved == 2 * MIB
    allocator.allocate("one more", 1)
    assert allocator.reserved == 4 * MIB
    allocator.allocate("large", 3 * MIB)
    assert allocator.reserved == 24 * MIB
    allocator.allocate("rest of it", 17 * MIB)  # it is large enough for a segment of its own, and fits the rest
    assert allocator.reserved == 24 * MIB
    allocator.allocate("own", 11 * MIB + 1)
    assert allocator.reserved == 36 * MIB
    for key in range(1, 3):
        allocator.free(key)
    allocator.allocate("joined", 1024)
    assert allocator.reserved == 36 * MIB
    allocator.free("own")
    allocator.allocate("smaller", 11 * MIB)
    assert allocator.reserved == 36 * MIB


def test_what_a_card_needs_beside_tensors_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    with MemoryMode() as memory:
        weight = torch.ones(MIB)
        memory.take([weight], "parameters")
        memory.begin_step()
        weight.untyped_storage().resize_(0)
        weight.untyped_storage().resize_(8 * MIB)
    assert reserved_bytes(memory.step, "cpu") == 20 * MIB
    assert beside_tensors(memory.step) == {
        "allocator": 12 * MIB,
        "cuBLAS": 64 * MIB,
        "CUDA context": cuda_rules.CONTEXT,
        "NCCL": 0,
    }
    outcome = Outcome(code="", strategy="", ranks=1, peak_bytes=8, beside_tensors={"allocator": 2})
    assert outcome.needed_bytes == 10
    assert outcome.fits(10)
    assert not outcome.fits(9)
