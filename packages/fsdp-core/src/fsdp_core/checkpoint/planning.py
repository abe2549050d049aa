"""Plans one rank's save before anything is written: plain data, small tensors, and boxes of large ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_core.checkpoint.format.file_names import Section
from fsdp_core.checkpoint.format.plain_data import Keys, TensorLeaf, encode
from fsdp_core.checkpoint.format.safetensors_file import HEADER_KEY, unsavable
from fsdp_core.checkpoint.format.state_paths import escape, find_part, split_path
from fsdp_core.errors import CheckpointValueError
from fsdp_core.state.chunks import ChunkedTensor, TensorSource, chunked
from fsdp_core.state.dtypes import SAFETENSORS_NAMES, dtype_name
from fsdp_core.state.left_out import LeftOut

__all__ = ["Plan", "plan_save"]


@dataclass(kw_only=True)
class Plan:
    """The save plan of one rank.

    Attributes:
        plain: The state's structure and plain data, in JSON types, with references in place of tensors.
        tensors: Tensors of the plain data, by the name in their reference. Rank 0 writes them.
        stored: Tensors that are saved in boxes, by key; every rank writes its own boxes.
        section_of: The folder for each tensor in ``stored``.
        aliases: Additional names of tensors in ``stored`` and ``left_out``.
        left_out: Tensors that are not saved, by key.
    """

    plain: Any = None
    tensors: dict[str, Tensor] = field(default_factory=dict)
    stored: dict[str, ChunkedTensor] = field(default_factory=dict)
    section_of: dict[str, Section] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, LeftOut] = field(default_factory=dict)


def plan_save(state: Mapping[str, Any], kinds: Mapping[str, str], aliases: Mapping[str, str], rank: int) -> Plan:
    """Decide how each leaf of a state is saved.

    Args:
        state: The nest to save.
        kinds: Which parts of it are a model's or an optimizer's state, by path.
        aliases: Additional names of tied parameters, each with the key under which the tensor is stored.
        rank: This rank.

    Returns:
        The plan.

    Raises:
        CheckpointValueError: A value in the state can't be saved, or ``kinds`` or ``aliases`` don't match the state.
    """
    roots: dict[Keys, Section] = {}
    for path in sorted(kinds, key=lambda path: path.count("/")):  # the outermost takes precedence
        if kinds[path] not in ("model", "optimizer"):
            raise CheckpointValueError(f"kinds[{path!r}] is {kinds[path]!r}; it must be 'model' or 'optimizer'")
        find_part(state, path)
        roots[tuple(path.split("/"))] = "model" if kinds[path] == "model" else "optimizer"
    planner = _Planner(Plan(aliases=dict(aliases)), roots, rank)
    with torch.no_grad():
        planner.plan.plain = encode(_with_aliases(state, aliases), planner.record_tensor)
    planner.check_aliases()
    return planner.plan


@dataclass
class _Planner:
    """Fills a plan.

    Attributes:
        plan: The plan.
        roots: The section of each model's and optimizer's state, by the keys that lead to it.
        rank: This rank.
        alias_leaves: The tensors found under additional names.
    """

    plan: Plan
    roots: dict[Keys, Section]
    rank: int
    alias_leaves: dict[str, TensorLeaf] = field(default_factory=dict)

    def record_tensor(self, keys: Keys, leaf: TensorLeaf) -> dict[str, str]:
        """Record a leaf of the state, and return its reference in the plain data."""
        names = tuple(map(escape, keys))
        path = "/".join(names)
        try:
            path.encode()
        except UnicodeEncodeError as error:
            raise CheckpointValueError("a tensor's name must be encodable in UTF-8; rename it") from error
        root = None
        for kind_root in self.roots:  # a plain loop for speed: this runs for every tensor
            if names[: len(kind_root)] == kind_root:
                root = kind_root
                break
        if root is None and isinstance(leaf, Tensor) and not isinstance(leaf, DTensor):
            return {"$tensor": self._add_small(path, leaf)}
        section: Section = "state" if root is None else self.roots[root]
        if root is not None and section == "optimizer" and names[len(root)] == "state":
            path = "/".join(root + names[len(root) + 1 :])  # the key of an optimizer's tensor omits "state"
        return {"$saved": self._add_chunks(path, leaf, section)}

    def _add_small(self, name: str, tensor: Tensor) -> str:
        _check_savable(tensor)
        while name in self.plan.tensors or name == HEADER_KEY:  # the keys 1 and "1" of one dict have the same path
            name += "~"
        self.plan.tensors[name] = tensor.detach()
        return name

    def _add_chunks(self, key: str, leaf: TensorLeaf, section: Section) -> str:
        if key == HEADER_KEY:
            raise CheckpointValueError("safetensors reserves this name; rename the tensor")
        if key in self.plan.aliases:
            self.alias_leaves[key] = leaf
            return key
        if key in self.plan.stored or key in self.plan.left_out:
            raise CheckpointValueError(f"another tensor of the state would also be stored as {key!r}; rename one")
        if isinstance(leaf, LeftOut):
            self.plan.left_out[key] = leaf
            return key
        if not isinstance(leaf, ChunkedTensor | DTensor):
            _check_savable(leaf)
        tensor = chunked(leaf, rank=self.rank)
        if tensor.dtype not in SAFETENSORS_NAMES:  # checked here too: this rank may hold no chunk of it
            raise CheckpointValueError(f"safetensors has no dtype {dtype_name(tensor.dtype)}; convert the tensor")
        for chunk in tensor.chunks:
            _check_savable(chunk.data)
            if chunk.data.dtype != tensor.dtype:
                raise CheckpointValueError(f"a chunk of it has dtype {chunk.data.dtype}, but the tensor {tensor.dtype}")
        self.plan.stored[key] = tensor
        self.plan.section_of[key] = section
        return key

    def check_aliases(self) -> None:
        """Refuse aliases of tensors that are not stored, or that can't be the same tensor."""
        for alias, key in self.plan.aliases.items():
            stored = self.plan.stored.get(key) or self.plan.left_out.get(key)
            if stored is None:
                raise CheckpointValueError(
                    f"alias {alias!r} refers to {key!r}, which is not among the tensors to save; "
                    "pass the key under which it is stored, as in {'model/lm_head.weight': 'model/wte.weight'}"
                )
            leaf = self.alias_leaves.get(alias)
            if leaf is None:
                raise CheckpointValueError(f"alias {alias!r} is not a tensor of a model's or optimizer's state")
            if (tuple(leaf.shape), leaf.dtype) != (stored.shape, stored.dtype):
                raise CheckpointValueError(
                    f"alias {alias!r} has shape {tuple(leaf.shape)} and {leaf.dtype}, but {key!r} has {stored.shape} "
                    f"and {stored.dtype}: they are not one tied parameter; leave the alias out"
                )


def _check_savable(tensor: Tensor | TensorSource) -> None:
    reason = unsavable(tensor)
    if reason is not None:
        raise CheckpointValueError(reason)


def _with_aliases(state: Mapping[str, Any], aliases: Mapping[str, str]) -> Mapping[str, Any]:
    """Return the state with an entry for each alias, so that a load returns the tensor under both names."""
    for alias, key in aliases.items():
        path, _, escaped_name = alias.rpartition("/")
        (name,) = split_path(escaped_name)
        if name not in find_part(state, path):
            state = _insert(state, split_path(path), name, find_part(state, key))
    return state


def _insert(part: Mapping[str, Any], path: list[str], name: str, leaf: Any) -> dict[str, Any]:
    """Return a copy of a nest with one more entry in the dict at a path."""
    if not path:
        return {**part, name: leaf}
    return {**part, path[0]: _insert(part[path[0]], path[1:], name, leaf)}
