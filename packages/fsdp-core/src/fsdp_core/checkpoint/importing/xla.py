"""Reads the shards of torch_xla's FSDP: one file per rank, whose ``shard_metadata`` describes the flat ranges."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fsdp_core.checkpoint.importing.files import SourceFile
from fsdp_core.checkpoint.importing.optimizer_states import ParameterOrder, is_optimizer, name_parameters
from fsdp_core.checkpoint.importing.tensors import CastTensor, FlatRange, Piece, TensorInPieces
from fsdp_core.checkpoint.importing.torch_file import TorchFile
from fsdp_core.errors import CheckpointFormatError, CheckpointMismatchError
from fsdp_core.state.chunks import TensorSource
from fsdp_core.state.fqn import clean_name

__all__ = ["METADATA", "read_xla"]

METADATA = "shard_metadata"

_MOST_SHOWN = 20
_SHARD_PREFIX = "_fsdp_shard"
_FLAT_PARAMETER = "_fsdp_wrapped_module.flat_param_"


def read_xla(
    archives: Sequence[TorchFile],
    order: ParameterOrder,
    *,
    drop: Iterable[str] = (),
    weights_only: bool = False,
) -> dict[str, Any]:
    """Combine the ranks' shards.

    Args:
        archives: The ranks' files, in any order.
        order: Maps the numbers in an optimizer's state to names.
        drop: Paths to leave out.
        weights_only: Whether to leave out everything except the model.

    Returns:
        The saved state under the same keys, with sources of full tensors instead of shards. Everything that is not
        sharded is rank 0's.

    Raises:
        CheckpointFormatError: A rank is missing or duplicated, or the metadata does not match the shards.
        CheckpointMismatchError: It is ambiguous which parameters an optimizer's state belongs to.
    """
    ranks = _order_by_rank([_Rank.read(archive, drop) for archive in archives])
    first_content = ranks[0].content
    models = [key for key, value in first_content.items() if _is_sharded_model(value)]
    if not models:
        raise CheckpointFormatError(f"{ranks[0].file} has {METADATA!r}, but no state dict of sharded parameters.")
    layout = _Layout(ranks[0], len(ranks))
    state: dict[str, Any] = {}
    for key, value in first_content.items():
        if key in models:
            state[key] = layout.join_model([_content_of(rank, key) for rank in ranks])
        elif weights_only or key == METADATA:
            continue
        elif is_optimizer(value):
            if len(models) > 1:
                raise CheckpointMismatchError(
                    f"{key!r} belongs to one of several models ({', '.join(models)}), and the files do not say which. "
                    "Import the weights alone with `--weights-only`."
                )
            model_states = [_content_of(rank, models[0]) for rank in ranks]
            optimizer_states = [_content_of(rank, key) for rank in ranks]
            state[key] = layout.join_optimizer(key, model_states, optimizer_states, order)
        else:
            state[key] = value
    return state


@dataclass(frozen=True, kw_only=True)
class _Rank:
    """The content of a rank's file, and what its ``shard_metadata`` says."""

    file: SourceFile
    content: Mapping[str, Any]
    metadata: Mapping[str, Any]

    @classmethod
    def read(cls, archive: TorchFile, drop: Iterable[str]) -> _Rank:
        reader = archive.reader(drop)
        content = reader.read(archive.content)
        reader.raise_if_refused(archive.file)
        reader.refuse_unfound_drops(archive.file, content)
        metadata = content[METADATA]
        if not isinstance(metadata, Mapping) or not all(
            type(metadata.get(key)) is value_type
            for key, value_type in {"rank": int, "world_size": int, "shard_info": dict, "flatten_info": dict}.items()
        ):
            raise CheckpointFormatError(f"{archive.file} has a {METADATA!r} that torch_xla does not write.")
        return cls(file=archive.file, content=content, metadata=metadata)


def _order_by_rank(ranks: Sequence[_Rank]) -> list[_Rank]:
    rank_by_number: dict[int, _Rank] = {}
    world_size = ranks[0].metadata["world_size"]
    for rank in ranks:
        number = rank.metadata["rank"]
        if rank.metadata["world_size"] != world_size or number in rank_by_number or not 0 <= number < world_size:
            conflicting = rank_by_number.get(number, ranks[0])
            raise CheckpointFormatError(
                f"{rank.file} (rank {number} of {rank.metadata['world_size']}) and {conflicting.file} (rank "
                f"{conflicting.metadata['rank']} of {world_size}) don't belong to one checkpoint.\nMove the shards of "
                "each checkpoint to a folder of their own."
            )
        rank_by_number[number] = rank
    missing_count = world_size - len(rank_by_number)
    if missing_count > 0:
        # Not over range(world_size), which the file says and which may be any number.
        missing_numbers = (str(number) for number in itertools.count() if number not in rank_by_number)
        listed = ", ".join(itertools.islice(missing_numbers, min(_MOST_SHOWN, missing_count)))
        raise CheckpointFormatError(
            f"{ranks[0].file.folder} lacks the shards of rank {listed} of {world_size}.\n"
            "Put the files of all hosts into one folder, and import that."
        )
    return [rank_by_number[number] for number in range(world_size)]


def _is_sharded_model(value: Any) -> bool:
    return isinstance(value, Mapping) and any(
        isinstance(key, str) and _split_shard_name(key) is not None for key in value
    )


def _split_shard_name(name: str) -> tuple[str, str] | None:
    """Split a shard's name into its wrapper's name and the name in the wrapper; ``None`` if it is no shard's name."""
    parts = name.split(".")
    shard_index = next((index for index, part in enumerate(parts) if part.startswith(_SHARD_PREFIX)), None)
    return None if shard_index is None else (".".join(parts[:shard_index]), ".".join(parts[shard_index:]))


def _content_of(rank: _Rank, key: str) -> Any:
    if key not in rank.content:
        raise CheckpointFormatError(f"{rank.file} lacks {key!r}, which rank 0 has: it belongs to another checkpoint.")
    return rank.content[key]


@dataclass(frozen=True, kw_only=True)
class _Parameter:
    """A user's parameter in a shard of torch_xla: its name, its shape, and its offset in the flat parameter."""

    name: str
    shape: tuple[int, ...]
    start: int


class _Layout:
    """Which parameters the shards hold, by the metadata of rank 0."""

    def __init__(self, rank: _Rank, world_size: int) -> None:
        self.file = rank.file
        self.world_size = world_size
        self.shards = rank.metadata["shard_info"]
        self.flattened = rank.metadata["flatten_info"]
        self.buffers = {clean_name(str(name)): info for name, info in rank.metadata.get("buffer_info", {}).items()}

    def join_model(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return a model's state, with sources of full tensors, from its state on each rank."""
        state: dict[str, Any] = {}
        for name, value in states[0].items():
            if _split_shard_name(name) is None:
                state[clean_name(name)] = self._restore_dtype(clean_name(name), value)
            else:
                state.update(self._join_shards(name, [self._shard_of(rank_state, name) for rank_state in states]))
        return state

    def join_optimizer(
        self,
        key: str,
        models: Sequence[Mapping[str, Any]],
        states: Sequence[Mapping[str, Any]],
        order: ParameterOrder,
    ) -> Any:
        """Return an optimizer's state by parameter name, with sources of full tensors.

        Args:
            key: The optimizer's key in the files.
            models: By rank, the state of the model that it updates.
            states: By rank, its own state.
            order: Maps numbers to names.
        """
        shards = {name: tuple(value.shape) for name, value in models[0].items() if _split_shard_name(name) is not None}
        shapes = {clean_name(name): shape for name, shape in shards.items()}
        named_groups = name_parameters(f"the optimizer {key!r}", states[0], shapes, order)["param_groups"]
        shard_names = {clean_name(name): name for name in shards}
        numbers = [number for group in states[0]["param_groups"] for number in group["params"]]
        parameter_names = [name for group in named_groups for name in group["params"]]
        state: dict[str, dict[str, Any]] = {}
        for number, name in zip(numbers, parameter_names, strict=True):
            parameters = self._find_parameters(shard_names[name])
            for state_key, value in states[0].get("state", {}).get(number, {}).items():
                if isinstance(value, TensorSource) and tuple(value.shape) == shards[shard_names[name]]:
                    parts = [self._shard_of(part.get("state", {}).get(number, {}), state_key) for part in states]
                    values = self._join_shards(shard_names[name], parts)
                else:
                    values = {parameter.name: value for parameter in parameters}
                for parameter_name, parameter_value in values.items():
                    state.setdefault(parameter_name, {})[state_key] = parameter_value
        groups = [
            {**group, "params": [p.name for name in group["params"] for p in self._find_parameters(shard_names[name])]}
            for group in named_groups
        ]
        return {"state": state, "param_groups": groups}

    def _shard_of(self, part: Any, name: str) -> TensorSource:
        value = part.get(name) if isinstance(part, Mapping) else None
        if not isinstance(value, TensorSource):
            raise CheckpointFormatError(f"the shard {name!r} is not on all ranks of {self.file.folder}")
        return value

    def _restore_dtype(self, name: str, value: Any) -> Any:
        """Return a buffer in the dtype that the user gave it, which torch_xla records when it saves another."""
        dtype = self.buffers.get(name, {}).get("_orig_dtype")
        if isinstance(value, TensorSource) and isinstance(dtype, torch.dtype) and dtype != value.dtype:
            return CastTensor(source=value, dtype=dtype)
        return value

    def _find_parameters(self, name: str) -> list[_Parameter]:
        """Return the user's parameters in the shard of a name: several if it is of a flat parameter."""
        split = _split_shard_name(name)
        assert split is not None
        prefix, suffix = split
        try:
            info = self.shards[prefix][suffix]
            full_name = f"{prefix}.{info['_orig_name']}" if prefix else str(info["_orig_name"])
            if _FLAT_PARAMETER not in full_name:
                return [_Parameter(name=clean_name(full_name), shape=tuple(info["_orig_size"]), start=0)]
            names, shapes, numels = self.flattened[full_name]
            wrapper_name = full_name.rpartition(".")[0]
            start = 0
            parameters = []
            for inner_name, shape, numel in zip(names, shapes, numels, strict=True):
                if math.prod(shape) != numel:
                    raise ValueError(f"{inner_name!r} does not have {numel} elements")
                user_name = clean_name(f"{wrapper_name}.{inner_name}")
                parameters.append(_Parameter(name=user_name, shape=tuple(shape), start=start))
                start += numel
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise CheckpointFormatError(
                f"the {METADATA!r} of {self.file} does not describe {name!r} ({type(error).__name__}: {error})"
            ) from error
        return parameters

    def _join_shards(self, name: str, shards: Sequence[TensorSource]) -> dict[str, Any]:
        """The user's parameters that the shards of all ranks form, by name."""
        shape = tuple(shards[0].shape)
        dtype = shards[0].dtype
        if any(tuple(shard.shape) != shape or shard.dtype != dtype for shard in shards):
            raise CheckpointFormatError(f"the ranks' shards of {name!r} have different shapes: {self.file.folder}")
        parameters = self._find_parameters(name)
        if len(shape) == 1:
            return {
                p.name: FlatRange(shape=p.shape, dtype=dtype, start=p.start, pieces=tuple(shards)) for p in parameters
            }
        (parameter,) = parameters
        if len(shape) != len(parameter.shape) or shape[1:] != parameter.shape[1:]:
            raise CheckpointFormatError(f"the shards of {name!r} have shape {shape}, the parameter {parameter.shape}")
        pieces = []
        for rank, shard in enumerate(shards):  # sharded by rows, and padded on the last ranks
            begin = rank * shape[0]
            rows = min(shape[0], parameter.shape[0] - begin)
            if rows > 0:
                offsets = (begin, *(0 for _ in shape[1:]))
                pieces.append(Piece(offsets=offsets, lengths=(rows, *shape[1:]), source=shard))
        tensor = TensorInPieces(name=parameter.name, shape=parameter.shape, dtype=dtype, pieces=tuple(pieces))
        return {parameter.name: tensor}
