"""Reads a folder that ``save_pretrained`` has written into shards: each rank reads what it holds."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fsdp_core.checkpoint.collective import run_on_all, run_on_first
from fsdp_core.checkpoint.left_out.base_values import base_values_of
from fsdp_core.checkpoint.left_out.named_base import source_of_name
from fsdp_core.checkpoint.left_out.observing import Observed
from fsdp_core.checkpoint.storage.local_or_remote_folder import StrPath
from fsdp_core.errors import CheckpointMismatchError
from fsdp_core.huggingface.adapted_names import base_names
from fsdp_core.huggingface.held_model import HeldModel, find_model
from fsdp_core.huggingface.replicas import SharedBoxes, find_shared_boxes
from fsdp_core.huggingface.stored_folder import RangeReader, StoredTensor, list_folder
from fsdp_core.huggingface.stored_names import hub_renamings, is_expected_surplus, names_to_store, stored_views
from fsdp_core.huggingface.views import View, full_view, group_by_source
from fsdp_core.state.chunks import Chunk, ChunkedTensor
from fsdp_core.state.coverage import Box, find_fault
from fsdp_core.state.dtypes import dtype_name
from fsdp_core.state.saved_tensor import SavedTensor

__all__ = ["LoadedFolder", "load_pretrained"]

_MOST_SHOWN = 10
_COMPARED_BYTES = 16 * 2**20

#: What the names of scales end with that belong to weights in 8 bits, after the name of the weight.
_SCALES = ("_scale_inv", "_scale")


@dataclass(frozen=True, kw_only=True)
class LoadedFolder:
    """What was loaded.

    Attributes:
        missing: Names of the model's state that the folder lacks, and that were left as they were.
        unexpected: Names in the folder that the model has no place for.
        tensors: The number of tensors of the model that were filled.
        bytes_read: The number of bytes that this rank has read.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    tensors: int
    bytes_read: int


def load_pretrained(module: nn.Module, folder: StrPath, *, strict: bool = True, cast: bool = False) -> LoadedFolder:
    """Fill a model's shards from a folder that ``save_pretrained`` of transformers wrote. All ranks must call it.

    Each rank reads the byte ranges of its own shards, straight into their memory. What several ranks hold, such as
    replicas, is read by one of them, and sent to the others; so all ranks together read the model once. The model may
    have been built without memory (``init_module(empty_init=True)``, ``from_config``), so no rank ever holds all of it.

    Names are those of transformers: also older ones, those of a model without its head or with one
    (``base_model_prefix``), those of a model that is stored otherwise than it runs (each expert of Mixtral by itself),
    and those of the base of a model into which PEFT has put adapters, which are left as they are.

    Args:
        module: The model, as in :func:`save_pretrained`.
        folder: A local path that all ranks see, or an fsspec URL, with ``model.safetensors``, or with several files
            and ``model.safetensors.index.json``.
        strict: Whether names that only one side has raise an error. Otherwise they are skipped, and returned.
        cast: Whether to convert a dtype that differs to the model's. Otherwise it raises an error.

    Returns:
        What was loaded.

    Raises:
        CheckpointFormatError: It is no such folder, or it is damaged.
        CheckpointMismatchError: Names, shapes or dtypes differ. Nothing was loaded.
        ShardingError: It was called inside a step, or another rank did not call it.

    Example:
        Under Fabric, for a model that no rank ever holds whole::

            with fabric.init_module(empty_init=True):
                model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("my-llama"))
            model = fabric.setup(model)
            load_pretrained(model, "my-llama")
    """
    model_shards = find_model(module, "load_pretrained()")
    runtime = model_shards.runtime
    action = f"loading {os.fspath(folder)}"
    state = model_shards.state()
    first_names = model_shards.first_names()
    readers: list[RangeReader] = []

    def plan_on_first() -> _Plan | None:
        readers.append(RangeReader(folder))  # on every rank, since a host may lack the package for the file system
        with model_shards.unsharded_view() as model:  # a collective, so every rank enters it
            if runtime.rank:
                return None
            new_plan = _make_plan(model, state, first_names, list_folder(readers[0]))
        _check_duplicates(new_plan.duplicates, readers[0], type(model).__name__)
        return new_plan

    try:
        loading_plan = run_on_first(runtime, action, plan_on_first)
        assert loading_plan is not None  # rank 0 returns a plan
        (reader,) = readers
        run_on_all(runtime, action, lambda: loading_plan.check(str(reader.folder), strict=strict, cast=cast))
        bytes_read = _fill(model_shards, state, loading_plan, reader, action)
        if model_shards.sharded is not None:  # the module begins with these values
            loaded = {f"{model_shards.prefix}{name}": Observed(part=state[name]) for name in loading_plan.parts}
            base_values_of(model_shards.sharded.root).adopt(loaded, source_of_name(folder))
    finally:
        for reader in readers:
            reader.close()
    return LoadedFolder(
        missing=loading_plan.missing,
        unexpected=loading_plan.unexpected,
        tensors=len(loading_plan.parts),
        bytes_read=bytes_read,
    )


class _NamedTensor(NamedTuple):
    """A tensor of the folder under its name there."""

    name: str
    tensor: StoredTensor


class _Duplicate(NamedTuple):
    """Two tensors of the folder that fill the same box of the model."""

    first: _NamedTensor
    other: _NamedTensor


@dataclass(kw_only=True)
class _Matches:
    """Which tensors of the folder are parts of which tensors of the model, and why others are not.

    Attributes:
        sources_of: By name in the model, the tensors of the folder that are parts of it, as which views.
        unexpected: Names that the model lacks.
        shape_mismatches: For each tensor of another shape, its name and both shapes, as text.
        without_scales: Names of quantised tensors whose scales the model has no tensor for.
        duplicates: Tensors that fill a box for which there is another one.
    """

    sources_of: dict[str, list[tuple[StoredTensor, View]]] = field(default_factory=dict)
    unexpected: list[str] = field(default_factory=list)
    shape_mismatches: list[str] = field(default_factory=list)
    without_scales: list[str] = field(default_factory=list)
    duplicates: list[_Duplicate] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """What to read into which tensor of the model; rank 0 makes it.

    Attributes:
        parts: By name in the model, the tensors of the folder that fill it.
        missing: Names that the folder lacks.
        unexpected: Names that the model lacks.
        shape_mismatches: For each tensor of another shape, its name and both shapes, as text.
        dtype_mismatches: For each tensor of another dtype, its name and both dtypes, as text.
        without_scales: Names of quantised tensors in the folder whose scales the model has no tensor for.
        duplicates: Tensors of the folder that fill a box of the model for which there is another one.
    """

    parts: Mapping[str, Sequence[tuple[StoredTensor, View]]] = field(repr=False)
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    shape_mismatches: tuple[str, ...]
    dtype_mismatches: tuple[str, ...]
    without_scales: tuple[str, ...]
    duplicates: Sequence[_Duplicate] = field(repr=False)

    def check(self, folder: str, *, strict: bool, cast: bool) -> None:
        groups = [("have another shape", self.shape_mismatches)]
        groups += [
            ("are quantised, and the model has no place for their scales; dequantise them first", self.without_scales)
        ]
        groups += [] if cast else [("have another dtype; pass cast=True to convert them", self.dtype_mismatches)]
        if strict:
            groups += [("are missing in it", self.missing), ("are only in it", self.unexpected)]
        lines = []
        for title, names in groups:
            if names:
                lines.append(f"  {len(names)} {title}:")
                lines += [f"    {name}" for name in names[:_MOST_SHOWN]]
                lines += [f"    … and {len(names) - _MOST_SHOWN} more"] if len(names) > _MOST_SHOWN else []
        if lines:
            more = "\nTo skip names that one side lacks, pass strict=False." if strict else ""
            raise CheckpointMismatchError(
                "\n".join([f"{folder} does not fit, so nothing was loaded from it:", *lines])
                + more
                + "\nOr build the model from the folder's own config.json."
            )


def _make_plan(
    model: nn.Module,
    state: Mapping[str, ChunkedTensor],
    first_names: Mapping[str, str],
    stored: Mapping[str, StoredTensor],
) -> _Plan:
    """Find out which tensors of the folder fill which tensors of the model."""
    base = base_names(model, state)  # the model without adapters, whose names the folder has
    base_state = {name: state[full_names[0]] for name, full_names in base.full_names.items()}
    base_ties = {}
    for name, (full_name, *_) in base.full_names.items():
        first_name = first_names.get(full_name)
        if first_name is not None and first_name in base.name_of:
            base_ties[name] = base.name_of[first_name]
    stored_names = names_to_store(base.model, base_state, base_ties)
    views = stored_views(base.model, base_state, stored_names)
    matches = _match_tensors(base.model, base_state, base_ties, views, stored)
    parts = {}
    missing = []
    dtype_mismatches = []
    views_of_source = group_by_source(views)
    for name in base_state:
        if name in base_ties:
            continue
        sources = matches.sources_of.get(name, [])
        fault = find_fault(base_state[name].shape, [(view.offsets, view.lengths) for _, view in sources])
        if fault is not None:
            used_views = {view for _, view in sources}
            missing_names = [view_name for view_name, view in views_of_source.get(name, []) if view not in used_views]
            missing += missing_names or [name]
            continue
        dtype = base_state[name].dtype
        stored_dtypes = {tensor.entry.dtype_name for tensor, _ in sources}
        if stored_dtypes - {dtype_name(dtype)}:
            dtype_mismatches.append(f"{name}: {', '.join(sorted(stored_dtypes))} in it, and {dtype_name(dtype)} here")
        for target_name in base.full_names[name]:
            parts[target_name] = sources
    return _Plan(
        parts=parts,
        missing=tuple(missing),
        unexpected=tuple(matches.unexpected),
        shape_mismatches=tuple(matches.shape_mismatches),
        dtype_mismatches=tuple(dtype_mismatches),
        without_scales=tuple(matches.without_scales),
        duplicates=matches.duplicates,
    )


def _match_tensors(
    model: nn.Module,
    state: Mapping[str, ChunkedTensor],
    ties: Mapping[str, str],
    views: Mapping[str, View],
    stored: Mapping[str, StoredTensor],
) -> _Matches:
    """Match the tensors of a folder with those of a model.

    Args:
        model: The model without adapters.
        state: Its tensors.
        ties: The first name of each tied parameter, by each of its other names.
        views: How the model is stored: by the names in a folder, the parts of its tensors.
        stored: The tensors of the folder.
    """
    matches = _Matches()
    first_of_box: dict[tuple[str, Box], _NamedTensor] = {}
    find_target = _target_finder(model, views, state)
    for name, tensor in stored.items():
        target_name = find_target(name)
        if target_name is None:
            if not is_expected_surplus(model, name):
                matches.unexpected.append(name)
            continue
        scales = [f"{name}{ending}" for ending in _SCALES if f"{name}{ending}" in stored]
        if tensor.entry.dtype_name.startswith("float8") and any(find_target(scale) is None for scale in scales):
            matches.without_scales.append(name)
        view = views[target_name] if target_name in views else full_view(target_name, state[target_name].shape)
        if tensor.entry.shape != view.shape:
            matches.shape_mismatches.append(f"{name}: {tensor.entry.shape} in it, and {view.shape} here")
            continue
        source = ties.get(view.source, view.source)
        named_tensor = _NamedTensor(name, tensor)
        first = first_of_box.setdefault((source, (view.offsets, view.lengths)), named_tensor)
        if first.name != name:  # a folder may hold a tied parameter under each of its names
            matches.duplicates.append(_Duplicate(first, named_tensor))
            continue
        matches.sources_of.setdefault(source, []).append((tensor, view))
    return matches


def _check_duplicates(duplicates: Sequence[_Duplicate], reader: RangeReader, model: str) -> None:
    """Refuse a folder with two different values for one parameter: it is not known which is right."""
    for (name, tensor), (other_name, other_tensor) in duplicates:
        if tensor.entry.dtype_name != other_tensor.entry.dtype_name or not _same_bytes(reader, tensor, other_tensor):
            raise CheckpointMismatchError(
                f"{name!r} and {other_name!r} are one parameter of this {model}, and {reader.folder} has other values "
                "for each, so nothing was loaded from it.\nBuild the model with tie_word_embeddings=False in its "
                "configuration, or untie the parameter before it is sharded; or remove the stale one from the folder."
            )


def _same_bytes(reader: RangeReader, tensor: StoredTensor, other_tensor: StoredTensor) -> bool:
    size = tensor.entry.nbytes
    for begin in range(0, size, _COMPARED_BYTES):
        length = min(_COMPARED_BYTES, size - begin)
        first, second = bytearray(length), bytearray(length)
        for stored, buffer in ((tensor, first), (other_tensor, second)):
            reader.fill(stored.file, memoryview(buffer), stored.entry.start + begin)
        if first != second:
            return False
    return True


def _target_finder(
    model: nn.Module, views: Mapping[str, View], base_state: Mapping[str, ChunkedTensor]
) -> Callable[[str], str | None]:
    """Return a function from a name in a folder to the name of a view, or of a tensor of the model."""
    rename = hub_renamings(model)
    prefix = getattr(model, "base_model_prefix", "")

    def find_target(name: str) -> str | None:
        names = [name, rename(name)]
        candidates = names
        if prefix:
            with_prefix = [f"{prefix}.{candidate}" for candidate in names]
            without_prefix = [candidate.removeprefix(f"{prefix}.") for candidate in names]
            candidates = [*names, *with_prefix, *without_prefix]
        return next((candidate for candidate in candidates if candidate in views or candidate in base_state), None)

    return find_target


@dataclass(frozen=True, kw_only=True)
class _PretrainedBoxes:
    """Reads the boxes of one tensor of the model."""

    name: str
    parts: Sequence[tuple[StoredTensor, View]] = field(repr=False)
    reader: RangeReader = field(repr=False)
    shared: Mapping[str, SharedBoxes] = field(repr=False)
    errors: list[Exception] = field(repr=False)

    def read_into(self, chunk: Chunk) -> None:
        assert isinstance(chunk.data, Tensor)
        shared = self.shared.get(self.name)
        if shared is None or shared.is_owner:
            try:
                for stored, view in self.parts:
                    self.reader.read_view(stored, view, (chunk.offsets, tuple(chunk.data.shape)), chunk.data)
            except Exception as error:  # raised later, since other ranks wait for what this one sends below
                self.errors.append(error)
        if shared is not None:
            shared.broadcast_from_owner(chunk.data)


def _fill(
    model_shards: HeldModel, state: Mapping[str, ChunkedTensor], plan: _Plan, reader: RangeReader, action: str
) -> int:
    """Read into this rank's shards, and return how many bytes that were."""
    shared = find_shared_boxes(model_shards.runtime, {name: state[name] for name in state if name in plan.parts})
    errors: list[Exception] = []
    handles = {}
    for name, parts in plan.parts.items():
        boxes = _PretrainedBoxes(name=name, parts=parts, reader=reader, shared=shared, errors=errors)
        target = state[name]
        handles[name] = SavedTensor(key=name, shape=target.shape, dtype=target.dtype, _boxes=boxes)
    with torch.no_grad():
        model_shards.load(handles)

    def raise_first() -> None:
        if errors:
            raise errors[0]

    run_on_all(model_shards.runtime, f"{action}, of which the model holds a part now", raise_first)
    return reader.bytes_read
