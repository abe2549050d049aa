"""The device by itself: what torch asks of one, beside the CPU."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

import fsdp_fake_device

FAKE = torch.device("fake")


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))


def train(device: str, optimizer_class: type[torch.optim.Optimizer], **options) -> torch.Tensor:
    module = net().to(device)
    optimizer = optimizer_class(module.parameters(), lr=0.05, **options)
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(1)).to(device)
    for _ in range(3):
        optimizer.zero_grad()
        module(x).square().mean().backward()
        optimizer.step()
    return torch.cat([p.detach().cpu().flatten() for p in module.parameters()])


@pytest.mark.parametrize("factory", [torch.zeros, torch.ones, torch.empty, torch.rand, torch.randn])
def test_factories_make_tensors_on_a_device(factory):
    assert factory(2, 3, device="fake:1").device == torch.device("fake:1")


def test_tensors_of_values():
    assert torch.arange(5, device=FAKE).tolist() == [0, 1, 2, 3, 4]
    assert torch.tensor([1.0, 2.0], device="fake:2").tolist() == [1, 2]
    assert torch.linspace(0, 1, 3, device=FAKE).tolist() == [0, 0.5, 1]
    assert torch.eye(3, device=FAKE).trace().item() == 3


def test_views_share_memory():
    x = torch.ones(2, 3, device=FAKE)
    x.t()[0].zero_()
    assert x[:, 0].tolist() == [0, 0]
    assert x.t().contiguous().cpu().equal(x.cpu().t())


@pytest.mark.parametrize("delay", [0, 60_000])
@pytest.mark.parametrize(
    ("optimizer_class", "options"),
    [
        (torch.optim.SGD, {"momentum": 0.9, "foreach": True}),
        (torch.optim.AdamW, {"foreach": True}),
        (torch.optim.AdamW, {"foreach": False}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.Adagrad, {}),
    ],
)
def test_training_equals_that_on_the_cpu(optimizer_class, options, delay):
    with fsdp_fake_device.with_delay(delay):
        on_fake = train("fake:1", optimizer_class, **options)
    torch.testing.assert_close(on_fake, train("cpu", optimizer_class, **options))


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.complex64,
        torch.bool,
        torch.int8,
        torch.int64,
        torch.float8_e4m3fn,
    ],
)
def test_dtypes(dtype):
    x = torch.tensor([0.0, 1.0, 1.0, 0.0]).to(dtype)
    y = x.to(FAKE)
    assert y.dtype == dtype
    assert y.reshape(2, 2).t().contiguous().flatten()[0].cpu() == x[0]
    assert y.to(torch.float32).cpu().equal(x.to(torch.float32))
    if dtype.is_complex:
        assert (y * 1j).conj().cpu().equal((x * 1j).conj())


def convolve(device: torch.device) -> list[torch.Tensor]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ConvTranspose2d(3, 2, 3)).to(device)
    x = torch.randn(2, 2, 5, 5).to(device).requires_grad_()
    module(x).square().sum().backward()
    return [x.grad.cpu(), *(p.grad.cpu() for p in module.parameters())]


def attend(device: torch.device) -> list[torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(3, 1, 2, 5, 4).to(device).requires_grad_()
    nn.functional.scaled_dot_product_attention(*x, is_causal=True).square().sum().backward()
    return [x.grad.cpu()]


def embed(device: torch.device) -> list[torch.Tensor]:
    torch.manual_seed(0)
    module = nn.Embedding(10, 4).to(device)
    words = torch.tensor([1, 2, 2]).to(device)
    nn.functional.cross_entropy(module(words), words).backward()
    return [module.weight.grad.cpu()]


def index(device: torch.device) -> list[torch.Tensor]:
    x = torch.tensor([0.0, 2.0, 1.0, 3.0]).to(device)
    y = x.clone().index_put_((torch.tensor([0, 1]).to(device),), torch.tensor([5.0, 6.0]).to(device))
    y[y > 5] = 1
    return [
        t.cpu()
        for t in (x.nonzero(), x[x > 0], x.sort()[0], x.cumsum(0), x.unique(), y, x[torch.tensor([1])], x.topk(2)[0])
    ]


@pytest.mark.parametrize("delay", [0, 60_000])
@pytest.mark.parametrize("program", [convolve, attend, embed, index])
def test_operators_equal_those_on_the_cpu(program, delay):
    with fsdp_fake_device.with_delay(delay):
        on_fake = program(FAKE)
    for ours, cpus in zip(on_fake, program(torch.device("cpu")), strict=True):
        torch.testing.assert_close(ours, cpus)


def test_tensors_of_two_devices_are_refused():
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        torch.ones(2, device="fake:0") + torch.ones(2, device="fake:1")
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        torch.ones(2, device="fake:0") + torch.ones(2)


def test_wrong_shapes_are_refused_at_once(held_back):
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        torch.ones(2, 3, device=FAKE) @ torch.ones(2, 3, device=FAKE)


def test_failure_in_a_kernel_is_raised_by_the_next_wait():
    table, words = torch.ones(4, 2, device=FAKE), torch.tensor([9], device=FAKE)
    nn.functional.embedding(words, table)
    with pytest.raises(torch.AcceleratorError, match=r"aten::index_select(.|\n)*FSDP_FAKE_DEVICE_BLOCKING"):
        torch.fake.synchronize()
    torch.fake.synchronize()


def test_blocking_raises_it_where_it_is():
    table, words = torch.ones(4, 2, device=FAKE), torch.tensor([9], device=FAKE)
    fsdp_fake_device.set_blocking(True)
    with pytest.raises(torch.AcceleratorError, match="aten::index_select"):
        nn.functional.embedding(words, table)


def test_current_device():
    torch.accelerator.set_device_index(2)
    assert torch.fake.current_device() == 2
    assert torch.empty(1, device="fake").device == torch.device("fake:2")
    with torch.fake.device(1):
        assert torch.accelerator.current_device_index() == 1
    assert torch.fake.current_device() == 2
    with torch.device("fake:3"):
        assert torch.empty(1).device == torch.device("fake:3")
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.fake.set_device(9)


def test_accelerator():
    assert torch.accelerator.is_available()
    assert torch.accelerator.current_accelerator() == FAKE
    assert torch.accelerator.device_count() == torch.fake.device_count()
    assert torch.get_device_module("fake") is torch.fake


def test_autocast():
    module = net().to(FAKE)
    with torch.autocast("fake", torch.bfloat16):
        y = module(torch.ones(2, 8, device=FAKE))
        loss = nn.functional.mse_loss(y, torch.zeros_like(y))
        with pytest.raises(RuntimeError, match="unsafe to autocast"):
            nn.functional.binary_cross_entropy(torch.rand(2, device=FAKE), torch.ones(2, device=FAKE))
    loss.backward()
    assert (y.dtype, loss.dtype, module[0].weight.grad.dtype) == (torch.bfloat16, torch.float32, torch.float32)


def test_grad_scaler():
    module, scaler = net().to(FAKE), torch.amp.GradScaler("fake")
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    scaler.scale(module(torch.ones(2, 8, device=FAKE)).mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 65536


def test_save_and_load():
    file = io.BytesIO()
    torch.save({"x": torch.arange(3.0, device="fake:1")}, file)
    file.seek(0)
    x = torch.load(file, weights_only=True)["x"]
    assert x.device == torch.device("fake:1")
    assert x.tolist() == [0, 1, 2]
    file.seek(0)
    assert torch.load(file, map_location="cpu")["x"].device.type == "cpu"


def test_modules_move():
    module = net()
    moved = copy.deepcopy(module.fake(1))
    assert moved[0].weight.is_fake
    assert moved[0].weight.device == torch.device("fake:1")
    assert moved.cpu()[0].weight.equal(net()[0].weight)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_without_a_compiler(backend):
    module, x = net().to(FAKE), torch.ones(2, 8, device=FAKE)
    compiled = torch.compile(module, backend=backend)
    compiled(x).sum().backward()
    assert module[0].weight.grad is not None
    torch.testing.assert_close(compiled(x), module(x))


def test_checkpointed_activations():
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).to(FAKE)
    x = torch.ones(2, 4, device=FAKE)
    grads = []
    for use in (False, True):
        torch.manual_seed(3)
        module.zero_grad()
        y = torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False) if use else module(x)
        y.sum().backward()
        grads.append(module[0].weight.grad.cpu())
    assert grads[0].equal(grads[1])


# ---------------------------------------------------------------- random numbers


def test_seeds_are_replayed():
    torch.manual_seed(3)
    drawn = [torch.randn(3, device=FAKE).cpu(), torch.randn(3)]
    torch.manual_seed(3)
    assert torch.randn(3).equal(drawn[1])
    assert torch.randn(3, device=FAKE).cpu().equal(drawn[0])


def test_state_is_seed_and_offset():
    torch.fake.manual_seed(5)
    state = torch.fake.get_rng_state()
    assert state.view(torch.int64).tolist() == [5, 0]
    drawn = [nn.functional.dropout(torch.ones(20, device=FAKE)).cpu(), torch.randperm(20, device=FAKE).cpu()]
    assert torch.fake.get_rng_state().view(torch.int64)[1] % 4 == 0
    torch.fake.set_rng_state(state)
    assert nn.functional.dropout(torch.ones(20, device=FAKE)).cpu().equal(drawn[0])
    assert torch.randperm(20, device=FAKE).cpu().equal(drawn[1])


def test_draws_leave_the_cpus_generator_alone():
    torch.manual_seed(3)
    state = torch.get_rng_state()
    torch.randn(3, device=FAKE)
    nn.functional.dropout(torch.ones(20, device=FAKE))
    torch.multinomial(torch.ones(4, device=FAKE), 2)
    nn.functional.rrelu(torch.ones(20, device=FAKE), training=True)
    torch.fake.synchronize()
    assert torch.get_rng_state().equal(state)


def test_generator():
    a = torch.randn(4, device="fake:1", generator=torch.Generator("fake:1").manual_seed(5))
    b = torch.randn(4, device="fake:1", generator=torch.Generator("fake:1").manual_seed(5))
    assert a.cpu().equal(b.cpu())
    with pytest.raises(RuntimeError, match="Expected a 'fake' device type for generator"):
        torch.empty(4, device=FAKE).normal_(generator=torch.Generator())


def test_fork_rng():
    torch.manual_seed(1)
    with torch.random.fork_rng([0, 1], device_type="fake"):
        a = torch.rand(2, device=FAKE)
    assert a.cpu().equal(torch.rand(2, device=FAKE).cpu())


def test_views_of_one_memory_are_set_to_each_other():
    values = torch.ones(4, device="fake")
    assert values.is_set_to(values.view(4))
    assert not values.is_set_to(values.clone())
    assert not values.is_set_to(values[1:])


def test_gradients_that_nobody_asks_for_and_of_half_precision():
    inputs = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    norm = torch.nn.BatchNorm1d(4).to("fake")
    norm(inputs.to("fake")).square().sum().backward()  # of the inputs, no gradient is needed
    plain = torch.nn.BatchNorm1d(4)
    plain(inputs).square().sum().backward()
    torch.testing.assert_close(norm.weight.grad.cpu(), plain.weight.grad)
    half = inputs.half().to("fake").requires_grad_()
    torch.nn.functional.mse_loss(half, torch.zeros_like(half)).float().backward()
    assert half.grad.dtype == torch.float16
