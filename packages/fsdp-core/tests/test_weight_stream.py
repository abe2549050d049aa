"""Full weights in buckets, over ranks that are threads, and streams of modules that are not sharded.

That backends stream what they hold is the conformance suite's to show.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from checkpoint_ranks import ThreadRuntime, on_threads
from fsdp_core import SentWeights, errors, stream_weights
from fsdp_core.state.boxes import boxes
from fsdp_core.state.buckets import BucketedTensor, exchange, fill_from, plan_buckets, run_bytes_within
from fsdp_core.state.chunks import Chunk, ChunkedTensor
from fsdp_core.testing.refusals import assert_says, refusal


class GatheringRuntime(ThreadRuntime):
    """Ranks that are threads, and gather tensors."""

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        return torch.stack(self.gather_objects(tensor))


def full_tensors() -> dict[str, Tensor]:
    """Tensors of several shapes and dtypes, the same on every call."""
    generator = torch.Generator().manual_seed(7)
    return {
        "large": torch.rand(61, 7, generator=generator),
        "scalar": torch.rand((), generator=generator),
        "half": torch.rand(5, 3, 2, generator=generator).half(),
        "flags": torch.rand(9, generator=generator) > 0.5,
        "empty": torch.zeros(0, 4),
        "double": torch.rand(31, generator=generator, dtype=torch.float64),
    }


def part_of(full: Tensor, rank: int, world_size: int, replicas: int) -> ChunkedTensor:
    """A rank's run of elements of a tensor, as boxes; ranks of each replica divide it unevenly."""
    per_replica = world_size // replicas
    share = -(-full.numel() // per_replica) + 1
    start = min(full.numel(), (rank % per_replica) * share)
    length = min(share, full.numel() - start)
    chunks = []
    for offsets, lengths, _ in boxes(tuple(full.shape), start, length):
        box = tuple(slice(begin, begin + n) for begin, n in zip(offsets, lengths, strict=True))
        chunks.append(Chunk(offsets=offsets, data=full[box].clone()))
    return ChunkedTensor(shape=tuple(full.shape), dtype=full.dtype, chunks=tuple(chunks), replica=rank // per_replica)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("max_run_bytes", [16, 128, 10**6])
def test_buckets_of_any_size_hold_the_same_values(max_run_bytes: int, replicas: int) -> None:
    def gather(runtime: GatheringRuntime) -> Any:
        own = {name: part_of(full, runtime.rank, 4, replicas) for name, full in full_tensors().items()}
        all_boxes = runtime.gather_objects(
            {
                name: (part.replica, [(c.offsets, tuple(c.data.shape)) for c in part.chunks])
                for name, part in own.items()
            }
        )
        tensors = {
            name: BucketedTensor(part.shape, part.dtype, [of_rank[name] for of_rank in all_boxes])
            for name, part in own.items()
        }
        buckets = plan_buckets(tensors, 4, max_run_bytes)
        assert max(bucket.run_bytes for bucket in buckets) <= max_run_bytes
        result = {name: torch.empty(part.shape, dtype=part.dtype) for name, part in own.items()}
        completed = []
        for number, bucket in enumerate(buckets):
            gathered, flag = exchange(bucket, tensors, own, runtime, number == runtime.rank == 0)
            assert flag == (number == 0), "each rank receives the bit of any"
            for name, pieces in bucket.pieces.items():
                fill_from(gathered, pieces, result[name])
                completed += [name] if name in bucket.completed else []
        return result, completed, len(buckets), sum(bucket.run_bytes for bucket in buckets)

    nbytes = sum(full.nbytes for full in full_tensors().values())
    for outcome in on_threads(4, gather, GatheringRuntime):
        assert not isinstance(outcome, BaseException), outcome
        result, completed, number, sent_bytes = outcome
        assert completed == list(full_tensors())
        for name, full in full_tensors().items():
            assert torch.equal(result[name], full), name
        assert (number == 1) == (max_run_bytes == 10**6)
        if number == 1:
            assert 4 * sent_bytes < 1.5 * nbytes, "replicas send no tensor twice"


def test_budgets_cover_what_is_sent_and_received() -> None:
    assert run_bytes_within(9 * 2**20, 4, torch.device("cpu")) == 2**20
    assert run_bytes_within(9 * 2**30, 4, torch.device("cuda")) == 2**30
    assert run_bytes_within(1, 4, torch.device("cpu")) == 4096


def tied_model() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    return model


def test_a_module_that_is_not_sharded_yields_copies_of_its_own() -> None:
    model = tied_model()
    for module in (model, DistributedDataParallel.__new__(DistributedDataParallel)):
        if module is not model:
            nn.Module.__init__(module)
            module.module = model  # as Lightning's DDP wraps it, without a process group
        streamed = list(stream_weights(module, budget=1))
        assert {name for name, _ in streamed} == set(model.state_dict())
        assert [name for name, _ in streamed][:2] == ["0.weight", "2.weight"], "names of a tied parameter follow"
        for name, tensor in streamed:
            assert torch.equal(tensor, model.state_dict()[name])
            assert not tensor.requires_grad
            assert tensor.data_ptr() != model.state_dict()[name].data_ptr()
    halves = dict(stream_weights(model, dtype="bfloat16"))
    assert halves["0.weight"].dtype is torch.bfloat16
    assert halves["1.num_batches_tracked"].dtype is torch.int64


def test_only_what_has_changed_is_sent_again() -> None:
    model, sent = tied_model(), SentWeights()
    model[2].bias.requires_grad_(False)

    def names() -> list[str]:
        return [name for name, _ in stream_weights(model, changed_since=sent)]

    assert len(names()) == len(model.state_dict())
    assert names() == []
    model[0].weight.data.neg_()  # torch counts no write to .data
    assert names() == ["0.weight", "2.weight"]
    model[2].bias.data.add_(1.0)
    stream = stream_weights(model, changed_since=sent)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert names() == ["2.bias"], "what was not iterated to the end counts as not sent"


def test_a_budget_smaller_than_a_tensor_is_noted_once(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(64, 33, bias=False)
    with caplog.at_level(logging.INFO, "fsdp_core"):
        for _ in range(2):
            assert torch.equal(dict(stream_weights(model, budget="5kB"))["weight"], model.weight)
    assert len([record for record in caplog.records if "smaller than 'weight' of 8448 bytes" in record.message]) == 1


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"budget": "many"}, ValueError, ("budget='many'", "Write such as 80GiB")),
        ({"budget": 0}, ValueError, ("budget=0 is no size", "'1GiB'")),
        ({"budget": "0GiB"}, ValueError, ("budget='0GiB' is no size", "'1GiB'")),
        ({"budget": 1.5}, ValueError, ("budget=1.5 is no size", "'1GiB'")),
        ({"budget": True}, ValueError, ("budget=True is no size", "'1GiB'")),
        ({"names": "vllm"}, ValueError, ("names='vllm' is not supported", "names='hf'")),
        ({"names": "hf"}, errors.UnsupportedCapabilityError, ("no model of transformers", "Leave names out")),
        ({"dtype": "int8"}, errors.CheckpointValueError, ("dtype='int8'", "'bfloat16'")),
        ({"changed_since": 3}, TypeError, ("changed_since=3", "fsdp_core.SentWeights()")),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], error: type[Exception], words: tuple[str, ...]) -> None:
    assert_says(refusal(error, lambda: stream_weights(tied_model(), **arguments)), *words)


def test_what_was_sent_of_another_model_or_in_another_dtype() -> None:
    sent = SentWeights()
    list(stream_weights(nn.Linear(3, 3), changed_since=sent))
    same_shapes = nn.Linear(3, 3)
    assert len(list(stream_weights(same_shapes, changed_since=sent))) == 2, "other values are sent"
    message = refusal(errors.CheckpointMismatchError, lambda: stream_weights(nn.Linear(3, 4), changed_since=sent))
    assert_says(message, "streams of another model: 'weight'", "an empty fsdp_core.SentWeights()")
    message = refusal(
        errors.CheckpointMismatchError, lambda: stream_weights(same_shapes, dtype="float16", changed_since=sent)
    )
    assert_says(message, "dtype=None, and this one has names=None, dtype=torch.float16")


def test_a_module_without_values() -> None:
    message = refusal(errors.ShardingError, lambda: stream_weights(nn.Linear(3, 3, device="meta")))
    assert_says(message, "'weight' has no values yet", "fabric.setup()")
    message = refusal(errors.ShardingError, lambda: stream_weights(nn.LazyLinear(3)))
    assert_says(message, "'weight' has no values yet")
