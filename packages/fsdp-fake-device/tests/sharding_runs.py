"""Training by torch's own means of sharding, on the fake device and on the CPU; ranks run it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp_fake_device

WIDTH, WORDS = 16, 11


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, layers: int = 2):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.out = nn.Linear(WIDTH, WORDS)

    def forward(self, words):
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def gather(module: nn.Module) -> torch.Tensor:
    full = [p.full_tensor() if isinstance(p, DTensor) else p for p in module.parameters()]
    return torch.cat([p.detach().cpu().float().flatten() for p in full])


def choose_device(device_type: str, rank: int) -> torch.device:
    return torch.device(device_type, rank) if device_type == "fake" else torch.device("cpu")


def train(
    module: nn.Module, device: torch.device, data_rank: int, clip: float | None = None, passes: int = 1
) -> list[float]:
    """Three steps of SGD; the losses."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(data_rank)
    losses = []
    # Before the steps: each copy waits for the current stream.
    batches = iter([torch.randint(WORDS, (4, 6), generator=generator).to(device) for _ in range(3 * passes)])
    for _ in range(3):
        for number in range(passes):
            if passes > 1:
                module.set_requires_gradient_sync(number == passes - 1)
            words = next(batches)
            loss = nn.functional.cross_entropy(module(words).float().flatten(0, 1), words.flatten()) / passes
            loss.backward()
            losses.append(loss.detach())
        if clip:
            nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return [loss.item() for loss in losses]


#: What fully_shard is asked for, by the name of a case.
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "kept": {"reshard_after_forward": False},
    "bf16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    "bf16 reduced": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)},
    "pinned offload": {"offload_policy": CPUOffloadPolicy(pin_memory=True)},
    "pageable offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "prefetch": {"prefetch": True},
    "accumulated": {"passes": 2, "clip": 0.5},
    "hsdp": {"replicas": 2},
    "tp": {"tp": 2},
}


def shard(rank: int, size: int, device_type: str, **options: Any) -> nn.Module:
    device = choose_device(device_type, rank)
    torch.manual_seed(0)
    module = Net()
    prefetch, replicas, tp = options.pop("prefetch", False), options.pop("replicas", 1), options.pop("tp", 1)
    if replicas > 1:
        mesh = init_device_mesh(device_type, (replicas, size // replicas), mesh_dim_names=("replicate", "shard"))
    elif tp > 1:
        both = init_device_mesh(device_type, (size // tp, tp), mesh_dim_names=("dp", "tp"))
        mesh = both["dp"]
    else:
        mesh = init_device_mesh(device_type, (size,))
    if device_type == "cpu":
        options.pop("offload_policy", None)
    if "offload_policy" not in options:
        module.to(device)
    if tp > 1:
        for block in module.blocks:
            parallelize_module(block, both["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for block in module.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(module, mesh=mesh, **options)
    if prefetch:
        first, second = module.blocks
        module.set_modules_to_forward_prefetch([first, second])
        second.set_modules_to_backward_prefetch([first])
    return module


def run_case(rank: int, size: int, device_type: str, name: str) -> dict[str, Any]:
    options = dict(CASES[name])
    steps = {key: options.pop(key) for key in ("passes", "clip") if key in options}
    module = shard(rank, size, device_type, **options)
    device = choose_device(device_type, rank)
    losses = train(module, device, rank // options.get("tp", 1), **steps)
    return {"losses": losses, "weights": gather(module)}


#: For how long kernels are held back, and on which streams.
DELAYS = [(0, "all"), (20_000, "all"), (20_000, "default")]


def compare_cases(rank: int, size: int, names: list[str]) -> dict[tuple[str, tuple[int, str]], float]:
    """How far the weights of each case, with each delay, are from those of the CPU."""
    differences = {}
    for name in names:
        cpu = run_case(rank, size, "cpu", name)
        for delay in DELAYS:
            with fsdp_fake_device.with_delay(*delay):
                fake = run_case(rank, size, "fake", name)
            differences[name, delay] = (fake["weights"] - cpu["weights"]).abs().max().item()
            assert fake["losses"] == cpu["losses"], (name, delay, fake["losses"], cpu["losses"])
    return differences


def read_gathered_parameters_early(patch: pytest.MonkeyPatch) -> None:
    """What was gathered is copied out by the current stream, which does not wait for it."""
    original = _fsdp_param_group.foreach_all_gather_copy_out

    def copy_out(result: Any, *arguments: Any, **options: Any) -> None:
        original(result._replace(all_gather_event=None), *arguments, **options)

    patch.setattr(_fsdp_param_group, "foreach_all_gather_copy_out", copy_out)


def gather_before_the_step(patch: pytest.MonkeyPatch) -> None:
    """Gathering does not wait for the optimizer, which writes the shards on the current stream."""

    streams = torch.fake.Stream(), torch.fake.Stream()  # which _root_pre_forward does not know
    original = _fsdp_param_group.FSDPParamGroup.wait_for_unshard

    def wait(self: Any) -> None:
        for stream in streams:  # a busy host could run what is queued there after the optimizer all the same
            stream.synchronize()
        original(self)

    patch.setattr(_fsdp_param_group.FSDPCommContext, "get_all_gather_streams", lambda *_: streams)
    patch.setattr(_fsdp_param_group.FSDPParamGroup, "wait_for_unshard", wait)


def step_before_gradients_are_reduced(patch: pytest.MonkeyPatch) -> None:
    """The backward pass ends without a wait for the reductions."""
    original = _fsdp_param_group.FSDPParamGroup.finalize_backward

    def finalize(self: Any) -> None:
        self.comm_ctx._last_post_reduce_events = {}
        if hasattr(self.comm_ctx, "reduce_scatter_states"):  # whose events the root waits for too
            self.comm_ctx.reduce_scatter_states.clear()
        else:  # torch 2.9
            self._post_reduce_event = self.comm_ctx.reduce_scatter_state = None
        original(self)

    patch.setattr(_fsdp_param_group.FSDPParamGroup, "finalize_backward", finalize)


#: Faults in fully_shard, waits of its streams that are left out, and which streams are held back to see them.
FAULTS = {
    read_gathered_parameters_early: "all",
    gather_before_the_step: "default",
    step_before_gradients_are_reduced: "all",
}


def find_faults(rank: int, size: int) -> dict[str, bool]:
    """Whether the weights after three steps are right, with each fault and without."""
    right = run_case(rank, size, "cpu", "plain")["weights"]
    is_right = {}
    for fault, streams in {None: "all", **FAULTS}.items():
        torch.accelerator.synchronize()  # what a faulty run has left is not before this one's operations
        with pytest.MonkeyPatch.context() as patch, fsdp_fake_device.with_delay(20_000, streams):
            if fault:
                fault(patch)
            weights = run_case(rank, size, "fake", "plain")["weights"]
        is_right[fault.__name__ if fault else "none"] = torch.equal(weights, right)
    return is_right


def count_steps(rank: int, size: int, names: list[str]) -> dict[str, dict[str, Any]]:
    return {name: count_step(rank, size, name) for name in names}


def count_step(rank: int, size: int, name: str) -> dict[str, Any]:
    """What the device counts in a step of a case, after one that sets up."""
    module = shard(rank, size, "fake", **CASES[name])
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    words = torch.randint(WORDS, (4, 6), generator=torch.Generator().manual_seed(rank)).to(f"fake:{rank}")

    def step() -> None:
        nn.functional.cross_entropy(module(words).flatten(0, 1), words.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    torch.accelerator.synchronize()
    fsdp_fake_device.reset_counters()
    step()
    counters = fsdp_fake_device.counters()
    torch.accelerator.synchronize()
    return {
        "host_syncs": dict(counters.host_syncs),
        "inline": dict(counters.inline_kernels),
        "collectives": counters.collectives,
    }


def compare_wrappers(rank: int, size: int) -> dict[tuple[str, tuple[int, str]], float]:
    """FSDP1 and DDP on the device, with each delay, beside the CPU."""
    differences = {}
    for name in ("ddp", "fsdp1"):
        cpu = train_wrapped(rank, "cpu", name)
        for delay in DELAYS:
            with fsdp_fake_device.with_delay(*delay):
                weights = train_wrapped(rank, "fake", name)
            differences[name, delay] = (weights - cpu).abs().max().item()
    return differences


def train_wrapped(rank: int, device_type: str, name: str) -> torch.Tensor:
    """The weights after three steps."""
    device = choose_device(device_type, rank)
    torch.manual_seed(0)
    module: nn.Module = Net().to(device)
    if name == "ddp":
        module = nn.parallel.DistributedDataParallel(module, device_ids=[rank] if device_type == "fake" else None)
        train(module, device, rank)
        return gather(module)
    policy = lambda module, recurse, nonwrapped_numel: recurse or isinstance(module, Block)  # noqa: E731
    module = FSDP(module, device_id=device, use_orig_params=True, auto_wrap_policy=policy)
    train(module, device, rank)
    with FSDP.summon_full_params(module):
        return gather(module)


def move_checkpoint(rank: int, size: int, folder: str) -> bool:
    """Saved on the device and loaded on the CPU, and back, bit for bit."""
    import torch.distributed.checkpoint as dcp

    module = shard(rank, size, "fake")
    train(module, choose_device("fake", rank), rank)
    dcp.save({"model": module.state_dict()}, checkpoint_id=f"{folder}/fake")
    on_cpu = shard(rank, size, "cpu")
    dcp.load({"model": on_cpu.state_dict()}, checkpoint_id=f"{folder}/fake")
    dcp.save({"model": on_cpu.state_dict()}, checkpoint_id=f"{folder}/cpu")
    again = shard(rank, size, "fake")
    dcp.load({"model": again.state_dict()}, checkpoint_id=f"{folder}/cpu")
    saved = dcp.async_save(
        {"model": module.state_dict()}, checkpoint_id=f"{folder}/async", process_group=dist.new_group(backend="gloo")
    )
    saved.result()
    later = shard(rank, size, "fake")
    dcp.load({"model": later.state_dict()}, checkpoint_id=f"{folder}/async")
    weights = gather(module)
    return all(torch.equal(weights, gather(other)) for other in (on_cpu, again, later))
