"""What a save of a large model costs each rank and rank 0, without its tensors, disks and network.

Makes the index that each rank would send of a Llama 3 of 70 billion parameters with AdamW's two moments, sharded
over many ranks, packs it with the code that saves do, and merges all of them and makes the manifest as rank 0 does.
Then once more, as a second save with the same plan.

    python tests-integration/benchmarks/index_bytes.py --ranks 16384 --sharding fsdp2
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import pickle
import re
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from fsdp_core.checkpoint.format.file_names import files_of
from fsdp_core.checkpoint.format.manifest import FileEntry, Manifest
from fsdp_core.checkpoint.format.patterns import PatternedChunks
from fsdp_core.checkpoint.indexes import (
    FirstRankSummary,
    Index,
    LastSave,
    Message,
    TensorSpec,
    pack_message,
    table_digest,
)
from fsdp_core.checkpoint.merging import merge_messages
from fsdp_core.state.boxes import boxes
from fsdp_core.state.coverage import Box

LAYERS, WIDTH, KEYS, HIDDEN, VOCABULARY = 80, 8192, 1024, 28672, 128256
TENSOR_PARALLEL = 8


def units() -> Iterator[dict[str, tuple[int, ...]]]:
    """The parameters of a Llama 3 70B, by FSDP unit."""
    for layer in range(LAYERS):
        of_layer = {
            "self_attn.q_proj.weight": (WIDTH, WIDTH),
            "self_attn.k_proj.weight": (KEYS, WIDTH),
            "self_attn.v_proj.weight": (KEYS, WIDTH),
            "self_attn.o_proj.weight": (WIDTH, WIDTH),
            "mlp.gate_proj.weight": (HIDDEN, WIDTH),
            "mlp.up_proj.weight": (HIDDEN, WIDTH),
            "mlp.down_proj.weight": (WIDTH, HIDDEN),
            "input_layernorm.weight": (WIDTH,),
            "post_attention_layernorm.weight": (WIDTH,),
        }
        yield {f"model.layers.{layer}.{name}": shape for name, shape in of_layer.items()}
    yield {
        "model.embed_tokens.weight": (VOCABULARY, WIDTH),
        "model.norm.weight": (WIDTH,),
        "lm_head.weight": (VOCABULARY, WIDTH),
    }


def _cut(size: int, ranks: int, rank: int) -> tuple[int, int]:
    """As torch.chunk cuts: equal pieces, then a smaller one, then none."""
    piece = -(-size // ranks)
    begin = min(rank * piece, size)
    return begin, min(piece, size - begin)


def rows(unit: dict[str, tuple[int, ...]], ranks: int, rank: int) -> Iterator[tuple[Box, ...]]:
    """Each tensor's rows are divided over the ranks, as fully_shard does."""
    for shape in unit.values():
        begin, length = _cut(shape[0], ranks, rank)
        rest = shape[1:]
        yield (((begin, *(0 for _ in rest)), (length, *rest)),) if length else ()


def flat(unit: dict[str, tuple[int, ...]], ranks: int, rank: int) -> Iterator[tuple[Box, ...]]:
    """A unit's elements are one row, divided over the ranks, as FSDP1 and XLA do."""
    total = sum(math.prod(shape) for shape in unit.values())
    begin, length = _cut(total, ranks, rank)
    at = 0
    for shape in unit.values():
        count = math.prod(shape)
        first, last = max(begin, at), min(begin + length, at + count)
        yield tuple(box[:2] for box in boxes(shape, first - at, last - first)) if first < last else ()
        at += count


def tensor_parallel(unit: dict[str, tuple[int, ...]], ranks: int, rank: int) -> Iterator[tuple[Box, ...]]:
    """Columns or rows over eight neighbours, and then rows over the others, as fully_shard does on such a mesh."""
    data, tensor = divmod(rank, TENSOR_PARALLEL)
    for name, shape in unit.items():
        if len(shape) == 1:  # on every tensor-parallel rank; the first one writes it
            begin, length = _cut(shape[0], ranks // TENSOR_PARALLEL, data)
            yield (((begin,), (length,)),) if length and not tensor else ()
            continue
        across = name.endswith(("o_proj.weight", "down_proj.weight"))
        outer, high = (0, shape[0]) if across else _cut(shape[0], TENSOR_PARALLEL, tensor)
        left, wide = _cut(shape[1], TENSOR_PARALLEL, tensor) if across else (0, shape[1])
        begin, length = _cut(high, ranks // TENSOR_PARALLEL, data)
        yield (((outer + begin, left), (length, wide)),) if length else ()


SHARDINGS = {"fsdp2": rows, "flat": flat, "fsdp2 × tensor 8": tensor_parallel}


@lru_cache(maxsize=1)
def tensors() -> list[TensorSpec]:
    """Weights in bfloat16, moments in float32."""
    shapes = {name: shape for unit in units() for name, shape in unit.items()}
    sections = [("model/", "", "bfloat16"), *(("optimizer/0/", f"/{moment}", "float32") for moment in MOMENTS)]
    return [TensorSpec(f"{a}{name}{b}", shape, dtype) for a, b, dtype in sections for name, shape in shapes.items()]


def index_of(sharding: str, ranks: int, rank: int, *, save: int = 0) -> Index:
    """The index of one rank, with a file for the weights and one for the moments."""
    first, *_, last = all_units()
    layer, rest = (list(SHARDINGS[sharding](unit, ranks, rank)) for unit in (first, last))
    index = Index(tensors=tensors(), boxes=(layer * LAYERS + rest) * (1 + len(MOMENTS)))
    for section, times in (("model", 1), ("optimizer", 2 * len(MOMENTS))):
        size = 140_000_000_000 * times // ranks + rank % 7
        checksum = hash((times, rank, save)) & (2**64 - 1)
        index.files[section] = FileEntry(size=size, checksum=f"xxh3:{checksum:016x}")  # type: ignore[index]
    return index


@lru_cache(maxsize=1)
def all_units() -> list[dict[str, tuple[int, ...]]]:
    """All of :func:`units`."""
    return list(units())


MOMENTS = ("exp_avg", "exp_avg_sq")


def manifest_of(specs: Sequence[TensorSpec], messages: Sequence[Message], last: LastSave | None, save_id: str) -> Any:
    """What rank 0 does with the messages: the merged indexes, and the manifest's bytes."""
    merged = merge_messages(specs, messages, last)
    files = dict(entry for rank, one in enumerate(messages) for entry in one.entries(save_id, rank))
    state = f"state-{save_id}.json"
    manifest = Manifest(
        save_id=save_id,
        created="2026-11-24T00:00:00+00:00",
        strategy="fsdp2",
        versions={},
        world_size=len(messages),
        kinds={"model": "model", "optimizer/0": "optimizer"},
        state_file=state,
        state_tensors=None,
        tensors=merged.stored_tensors(lambda key: files_of(key.partition("/")[0], save_id)),  # type: ignore[arg-type]
        aliases={},
        files={**files, state: FileEntry(size=2, checksum="xxh3:" + "0" * 16)},
    )
    return merged, manifest.to_json().encode()


def measure(sharding: str, ranks: int) -> dict[str, Any]:
    """Two saves on so many ranks."""
    at_first = _resident("VmRSS")
    first_rank, remembered = FirstRankSummary(table_digest(tensors()), None), dict[int, LastSave]()
    result: dict[str, Any] = {"sharding": sharding, "ranks": ranks, "tensors": len(tensors())}
    last: LastSave | None = None
    for number, name in enumerate(("first save", "second save")):
        save_id = f"{number:012x}"
        sent = []  # pickled, as between ranks
        for rank in range(ranks):
            if rank == ranks - 1:
                tracemalloc.start()
            index = index_of(sharding, ranks, rank, save=number)
            sent.append(pickle.dumps(pack_message(index, first_rank, remembered.get(rank))))
        peak_elsewhere = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        _forget_peak()
        begin = time.perf_counter()
        messages = [pickle.loads(one) for one in sent]
        merged, text = manifest_of(tensors(), messages, last, save_id)
        seconds = time.perf_counter() - begin
        result[name] = {
            "seconds": seconds,
            "most bytes of a rank": max(map(len, sent)),
            "bytes to rank 0": sum(map(len, sent)),
            "peak memory of the last rank": peak_elsewhere,
            "peak memory of rank 0": _resident("VmHWM") - at_first,
            "bytes of the manifest": len(text),
        }
        last = LastSave(save_id, messages[0].boxes_digest, merged)
        remembered = {rank: LastSave(save_id, one.boxes_digest, None) for rank, one in enumerate(messages)}
        first_rank = FirstRankSummary(first_rank.table_digest, save_id)
    begin = time.perf_counter()
    manifest = Manifest.from_json(text)
    result["seconds to read the manifest"] = time.perf_counter() - begin
    tracemalloc.start()
    manifest = Manifest.from_json(text)
    result["memory of the manifest"], result["peak memory of reading it"] = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    result["chunks"] = sum(len(tensor.chunks) for tensor in manifest.tensors.values())
    result["chunks one by one"] = sum(not isinstance(one.chunks, PatternedChunks) for one in manifest.tensors.values())
    return result


def _resident(which: str) -> int:
    """This process's resident memory in bytes, now (``VmRSS``) or at its peak (``VmHWM``); 0 where that is not told."""
    status = Path("/proc/self/status")
    found = re.search(rf"{which}:\s+(\d+) kB", status.read_text()) if status.exists() else None
    return int(found[1]) * 1024 if found else 0


def _forget_peak() -> None:
    gc.collect()
    if Path("/proc/self/clear_refs").exists():
        Path("/proc/self/clear_refs").write_text("5")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--sharding", choices=SHARDINGS, default="fsdp2")
    given = parser.parse_args()
    print(json.dumps(measure(given.sharding, given.ranks)))


if __name__ == "__main__":
    main()
