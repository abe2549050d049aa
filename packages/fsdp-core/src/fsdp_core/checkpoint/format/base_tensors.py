"""The base of a checkpoint that leaves tensors out: where it is, and what identifies each of its tensors. No torch."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fsdp_core.checkpoint.format.json_text import integer, json_list, string
from fsdp_core.state.boxes import is_shape
from fsdp_core.state.dtype_names import ITEM_BYTES

__all__ = ["Base", "BaseSource", "BaseTensor"]

_TYPES = ("folder", "file", "hub")
_MOST_CHARACTERS = 4096


@dataclass(frozen=True, kw_only=True)
class BaseSource:
    """Where the base of a checkpoint comes from, as far as the save knew. It is for people: no reader opens it.

    Attributes:
        type: ``"folder"``, ``"file"``, or ``"hub"`` for a repository of Hugging Face's hub.
        name: Its path, or its id on the hub.
    """

    type: str
    name: str

    def __post_init__(self) -> None:
        if self.type not in _TYPES or not self.name or len(self.name) > _MOST_CHARACTERS:
            raise ValueError(f"no base is a {self.type!r} named {self.name[:80]!r}")

    def __str__(self) -> str:
        return f"{self.name} of the hub" if self.type == "hub" else self.name


@dataclass(frozen=True, kw_only=True)
class BaseTensor:
    """A tensor that a checkpoint leaves out.

    Attributes:
        shape: Its shape.
        dtype_name: The name of its dtype, such as ``"float32"``.
        digest: The digest of its values: ``sum64:`` and 16 hexadecimal digits.
    """

    shape: tuple[int, ...]
    dtype_name: str
    digest: str

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype_name]

    def __post_init__(self) -> None:
        if self.dtype_name not in ITEM_BYTES:
            raise ValueError(f"{self.dtype_name!r} is not a dtype of this format")
        if not is_shape(self.shape):
            raise ValueError(f"no tensor has the shape {list(self.shape)}")
        if re.fullmatch("sum64:[0-9a-f]{16}", self.digest) is None:
            raise ValueError(f"{self.digest!r} is no digest")


@dataclass(frozen=True, kw_only=True)
class Base:
    """The tensors that a checkpoint leaves out, and where they come from.

    Attributes:
        source: Where they come from; ``None`` if that is not known.
        tensors: The tensors by key, as in the manifest's ``tensors``.
    """

    source: BaseSource | None
    tensors: Mapping[str, BaseTensor] = field(repr=False)

    def __post_init__(self) -> None:
        if not self.tensors:
            raise ValueError("a base without tensors is left out")

    def to_json(self) -> dict[str, Any]:
        """Return what the manifest holds."""
        source = None if self.source is None else {"type": self.source.type, "name": self.source.name}
        tensors = {
            key: {"shape": tensor.shape, "dtype": tensor.dtype_name, "digest": tensor.digest}
            for key, tensor in self.tensors.items()
        }
        return {"source": source, "tensors": tensors}

    @classmethod
    def from_json(cls, content: Any) -> Base:
        """Read what :meth:`to_json` returns.

        Raises:
            ValueError: It is none.
            KeyError: A field is missing.
            TypeError: A field has another type.
            AttributeError: A field has another type.
        """
        source = content["source"]
        tensors = {}
        for key, entry in content["tensors"].items():
            try:
                shape = tuple(integer(size) for size in json_list(entry["shape"]))
                tensors[key] = BaseTensor(
                    shape=shape, dtype_name=string(entry["dtype"]), digest=string(entry["digest"])
                )
            except ValueError as error:
                raise ValueError(f"base tensor {key!r}: {error}") from error
        return cls(
            source=None if source is None else BaseSource(type=string(source["type"]), name=string(source["name"])),
            tensors=tensors,
        )
