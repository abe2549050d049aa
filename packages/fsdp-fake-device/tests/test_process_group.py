"""Collectives, on ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import fsdp_fake_device
from fake_ranks import run_ranks

SUM, AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG


def run_collectives(rank: int, size: int, delay: int) -> dict[str, Any]:
    fsdp_fake_device.set_delay(delay)
    device = torch.device("fake", rank)
    mine = torch.arange(4.0, device=device) + 10 * rank
    results: dict[str, Any] = {}

    def reduce(tensor: torch.Tensor, op: Any = SUM) -> list[Any]:
        copy = tensor.clone()
        dist.all_reduce(copy, op=op)
        return copy.tolist()

    results["sum"] = reduce(mine)
    results["average"] = reduce(mine, AVG)
    results["maximum"] = reduce(mine, dist.ReduceOp.MAX)
    results["premultiplied"] = reduce(mine, dist._make_nccl_premul_sum(0.5))
    results["bf16"] = reduce(mine.bfloat16(), AVG)
    results["integers"] = reduce(mine.int(), AVG)
    results["booleans"] = reduce(mine > 10)
    results["complex"] = reduce(mine * 1j)
    gathered = torch.empty(4 * size, device=device)
    gathered[4 * rank : 4 * rank + 4] = mine
    dist.all_gather_into_tensor(gathered, gathered[4 * rank : 4 * rank + 4])
    results["gathered in place"] = gathered.tolist()
    parts = [torch.empty(4, device=device, dtype=torch.bool) for _ in range(size)]
    dist.all_gather(parts, mine > 10)
    results["gathered"] = [part.tolist() for part in parts]
    uneven = [torch.empty(1 + number, device=device) for number in range(size)]
    dist.all_gather(uneven, mine[: rank + 1].clone())
    results["gathered unevenly"] = [part.tolist() for part in uneven]
    scattered = torch.empty(2, device=device)
    dist.reduce_scatter_tensor(scattered, mine, op=AVG)
    results["reduced and scattered"] = scattered.tolist()
    dist.reduce_scatter(scattered, [mine[:2].clone(), mine[2:].clone()])
    results["list reduced and scattered"] = scattered.tolist()
    copy = mine.clone()
    dist.broadcast(copy, 1)
    results["broadcast"] = copy.tolist()
    copy = mine.clone()
    dist.reduce(copy, 0, op=AVG)
    results["reduced"] = copy.tolist()
    exchanged = torch.empty(size, device=device)
    dist.all_to_all_single(exchanged, torch.arange(size, device=device) + 10.0 * rank)
    results["exchanged"] = exchanged.tolist()
    exchanged = torch.empty(3 if rank == 0 else 1, device=device)
    splits = [[2, 0], [1, 1]]
    dist.all_to_all_single(exchanged, mine[:2].clone(), [splits[r][rank] for r in range(size)], splits[rank])
    results["exchanged unevenly"] = exchanged.tolist()
    lists = [torch.empty(1, device=device) for _ in range(size)]
    dist.all_to_all(lists, [torch.full((1,), rank * 10.0 + number, device=device) for number in range(size)])
    results["lists exchanged"] = [part.item() for part in lists]
    outs = [torch.empty(4, device=device) for _ in range(size)] if rank == 0 else None
    dist.gather(mine, outs)
    results["gathered by one"] = outs and [part.tolist() for part in outs]
    copy = torch.empty(4, device=device)
    dist.scatter(copy, [mine, mine + 1] if rank == 0 else None)
    results["scattered"] = copy.tolist()
    copy = torch.empty(4, device=device)
    transfers = [dist.P2POp(dist.isend, mine, 1 - rank), dist.P2POp(dist.irecv, copy, 1 - rank)]
    for work in dist.batch_isend_irecv(transfers):
        work.wait()
    results["transferred in a batch"] = copy.tolist()
    if rank == 0:
        dist.send(mine, 1)
    else:
        dist.recv(copy, 0)
    results["transferred"] = copy.tolist()
    copy, other = mine.clone(), mine.clone()
    with dist.distributed_c10d._coalescing_manager(device=device, async_ops=True) as manager:
        dist.all_reduce(copy)
        dist.all_reduce(other)
    manager.wait()
    results["coalesced"] = [copy.tolist(), other.tolist()]
    copy = mine.clone()
    future = dist.all_reduce(copy, async_op=True).get_future().then(lambda done: done.value()[0] / 2)
    results["future"] = future.wait().tolist()
    dist.barrier()
    dist.barrier(device_ids=[rank])
    objects = [None] * size
    dist.all_gather_object(objects, rank)
    results["objects"] = objects
    group = dist.new_group([0, 1], backend="fakeccl")
    copy = mine.clone()
    dist.all_reduce(copy, group=group)
    results["of another group"] = copy.tolist()
    dist.destroy_process_group(group)
    return results


@pytest.mark.parametrize("delay", [0, 2_000])
def test_collectives(delay):
    total = [10.0, 12.0, 14.0, 16.0]
    first, second = [0.0, 1.0, 2.0, 3.0], [10.0, 11.0, 12.0, 13.0]
    of_ranks = run_ranks(run_collectives, delay)
    for rank, results in enumerate(of_ranks):
        peers = second if rank == 0 else first
        assert results == {
            "sum": total,
            "average": [x / 2 for x in total],
            "maximum": second,
            "premultiplied": [x / 2 for x in total],
            "bf16": [x / 2 for x in total],
            "integers": [int(x) // 2 for x in total],
            "booleans": [False, True, True, True],
            "complex": [x * 1j for x in total],
            "gathered in place": first + second,
            "gathered": [[False] * 4, [False, True, True, True]],
            "gathered unevenly": [[0.0], [10.0, 11.0]],
            "reduced and scattered": [5.0, 6.0] if rank == 0 else [7.0, 8.0],
            "list reduced and scattered": total[:2] if rank == 0 else total[2:],
            "broadcast": second,
            "reduced": [x / 2 for x in total] if rank == 0 else second,
            "exchanged": [0.0, 10.0] if rank == 0 else [1.0, 11.0],
            "exchanged unevenly": [0.0, 1.0, 10.0] if rank == 0 else [11.0],
            "lists exchanged": [0.0, 10.0] if rank == 0 else [1.0, 11.0],
            "gathered by one": [first, second] if rank == 0 else None,
            "scattered": first if rank == 0 else [x + 1 for x in first],
            "transferred in a batch": peers,
            "transferred": first if rank == 1 else second,
            "coalesced": [total, total],
            "future": [x / 2 for x in total],
            "objects": [0, 1],
            "of another group": total,
        }


def wait_for_collectives(rank: int, size: int) -> dict[str, Any]:
    device = torch.device("fake", rank)
    x = torch.ones(4, device=device)
    torch.fake.synchronize()
    group = dist.new_group(backend="fakeccl")
    fsdp_fake_device.set_delay(5_000)
    fsdp_fake_device.reset_counters()
    work = dist.all_reduce(x, group=group, async_op=True)
    work.wait()
    counters = fsdp_fake_device.counters()
    result = {"syncs": dict(counters.host_syncs), "done": work.is_completed()}
    dist.barrier(group)
    counters = fsdp_fake_device.counters()
    return {**result, "after": dict(counters.host_syncs), "collectives": counters.collectives, "x": x.tolist()}


def test_wait_is_of_the_stream_and_a_barrier_of_the_host():
    first, _ = run_ranks(wait_for_collectives)
    assert first["syncs"] == {}
    assert not first["done"]
    assert first["collectives"] == 2
    assert first["after"] == {"barrier": 1}
    assert first["x"] == [2.0] * 4


def fail_collectives(rank: int, size: int) -> dict[str, str]:
    import datetime

    messages = {}
    group = dist.new_group(backend="fakeccl", timeout=datetime.timedelta(seconds=1))
    on_cpu, x = torch.ones(4), torch.ones(4, device=torch.device("fake", rank))

    def message_of(call: Any) -> str:
        try:
            call()
        except RuntimeError as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    messages["cpu"] = message_of(lambda: dist.all_reduce(on_cpu, group=group))
    messages["strided"] = message_of(lambda: dist.all_reduce(torch.ones(4, 4, device=x.device).t()[:2], group=group))
    if rank == 0:
        work = dist.all_reduce(x, group=group, async_op=True)  # the other rank does not come
        messages["waited"] = message_of(work.wait)
        messages["late"] = message_of(torch.fake.synchronize)
        messages["once"] = message_of(torch.fake.synchronize)
    dist.barrier(dist.new_group(backend="gloo"))
    return messages


def test_failures_are_raised():
    first, second = run_ranks(fail_collectives)
    for messages in (first, second):
        assert "No backend type associated with device type cpu" in messages["cpu"]
        assert "Tensors must be contiguous" in messages["strided"]
    assert first["waited"] == "nothing"  # it waits on the device
    assert first["late"].startswith("DistBackendError: fakeccl: ALLREDUCE failed: ")
    assert first["once"] == "nothing"


def choose_backends(rank: int, size: int) -> tuple[str, str, str]:
    return (
        dist.get_default_backend_for_device("fake"),
        dist.get_backend_config(),
        dist.get_backend(dist.new_group(backend="fakeccl")),
    )


def test_backend_of_the_device():
    assert run_ranks(choose_backends)[0] == ("fakeccl", "cpu:gloo,fake:fakeccl", "fakeccl")


def draw_dtensors(rank: int, size: int) -> list[list[float]]:
    from torch.distributed.tensor import Replicate, Shard, randn

    mesh = dist.init_device_mesh("fake", (size,))
    drawn = []
    for placement in (Shard(0), Shard(0), Replicate()):
        torch.manual_seed(7)
        drawn.append(randn(2 * size, device_mesh=mesh, placements=[placement]).full_tensor().tolist())
    return drawn


def test_dtensors_draw_by_seed_and_offset():
    first, second = run_ranks(draw_dtensors)
    assert first == second
    sharded, again, replicated = first
    assert sharded == again
    assert sharded[:2] != sharded[2:]
    assert len(set(replicated)) == 4
