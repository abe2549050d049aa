"""`parts/SAVE-rank-00003.json`: what one rank of a scattered save has written to a place without a manifest.

A loader reads the manifest alone. The record is for people and tools that find such a place. It says to which
checkpoint the files belong, and where its manifest is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from fsdp_core.checkpoint.format.file_names import split_off_rank
from fsdp_core.checkpoint.format.json_text import integer, string
from fsdp_core.checkpoint.format.manifest import FileEntry, check_name, content_checksum, parse_object

__all__ = ["MAX_RECORD_BYTES", "PartRecord"]

FORMAT = "fsdp-checkpoint-part"
FORMAT_VERSION = 1
MAX_RECORD_BYTES = 2**20
_MAX_NAME_LENGTH = 4096


@dataclass(frozen=True, kw_only=True)
class PartRecord:
    """What one rank has written.

    Attributes:
        save_id: The save's id, which rank 0 has drawn.
        rank: The rank.
        world_size: The number of ranks.
        host: The name of its host.
        path: The folder there, as an absolute path or an fsspec URL.
        manifest_host: The host of rank 0.
        manifest_path: The folder there, to which rank 0 writes the manifest.
        files: The rank's files, by name.

    Example:
        >>> entry = FileEntry(size=8, checksum="xxh3:" + "0" * 16)
        >>> files = {"model/0123456789ab-rank-00003.safetensors": entry}
        >>> record = PartRecord(save_id="0123456789ab", rank=3, world_size=4, host="b", path="/x", manifest_host="a",
        ...                     manifest_path="/x", files=files)
        >>> PartRecord.from_json(record.to_json()) == record
        True
    """

    save_id: str
    rank: int
    world_size: int
    host: str
    path: str
    manifest_host: str
    manifest_path: str
    files: Mapping[str, FileEntry] = field(repr=False)

    def __post_init__(self) -> None:
        if not re.fullmatch("[0-9a-f]{12}", self.save_id):
            raise ValueError(f"no save has the id {self.save_id!r}")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"there is no rank {self.rank} of {self.world_size}")
        if max(map(len, (self.host, self.path, self.manifest_host, self.manifest_path))) > _MAX_NAME_LENGTH:
            raise ValueError(f"it has a name of more than {_MAX_NAME_LENGTH} characters")
        for name in self.files:
            check_name(name)
            pattern_and_rank = split_off_rank(name)
            is_of_rank = pattern_and_rank is not None and pattern_and_rank[1] == self.rank
            if not is_of_rank or f"/{self.save_id}-rank-" not in name:
                raise ValueError(f"{name!r} is no file of rank {self.rank} of save {self.save_id}")

    def to_json(self) -> str:
        """Return the record as readable text."""
        content = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "save_id": self.save_id,
            "rank": self.rank,
            "world_size": self.world_size,
            "host": self.host,
            "path": self.path,
            "manifest": {"host": self.manifest_host, "path": self.manifest_path},
            "files": {name: {"size": file.size, "checksum": file.checksum} for name, file in self.files.items()},
        }
        return json.dumps({**content, "checksum": content_checksum(content)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: bytes | str) -> PartRecord:
        """Parse and check the output of :meth:`to_json`.

        Raises:
            ValueError: It is not a record that this version can read.
        """
        content = parse_object(text if isinstance(text, bytes) else text.encode())
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ValueError(f'it has no "format": "{FORMAT}"')
        if content.get("format_version") != FORMAT_VERSION:
            raise ValueError(f"it has format version {content.get('format_version')!r}: pip install -U fsdp-core")
        recorded = content.pop("checksum", None)
        try:
            if recorded != content_checksum(content):
                raise ValueError("its content does not have the checksum that it records: it was changed")
            return cls(
                save_id=string(content["save_id"]),
                rank=integer(content["rank"]),
                world_size=integer(content["world_size"]),
                host=string(content["host"]),
                path=string(content["path"]),
                manifest_host=string(content["manifest"]["host"]),
                manifest_path=string(content["manifest"]["path"]),
                files={
                    name: FileEntry(size=integer(entry["size"]), checksum=string(entry["checksum"]))
                    for name, entry in content["files"].items()
                },
            )
        except KeyError as error:
            raise ValueError(f"it lacks {error}") from error
        except (TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"a value in it is of the wrong type: {error}") from error
