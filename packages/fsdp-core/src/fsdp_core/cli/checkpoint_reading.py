"""``fsdp checkpoint list``, ``inspect``, ``verify`` and ``diff``; none of them imports torch, unless tensors differ."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Any, TypeAlias

import click

from fsdp_core.cli.output import clean, format_age, format_count, format_size, print_json, print_table, progress

if TYPE_CHECKING:
    from fsdp_core.checkpoint.storage.stored_files import StoredFiles
    from fsdp_core.checkpoint.tools.comparing import Differences, TensorDifference

__all__ = ["diff_checkpoints", "inspect_checkpoint", "list_checkpoints", "verify_checkpoint"]

_AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs to read.")
_QUIET = click.option("--quiet", "-q", is_flag=True, help="Show no progress, and print no more than errors.")
_MAX_SHOWN = 20
_LONGEST = 60  # characters of a value or of a callback's key
_DEEPEST = 64  # parts of a name that are looked at

#: By a part of a name, and whether that is the last part of a tensor's name: the tensor's facts if so, else a tree.
_Tree: TypeAlias = dict[tuple[str, bool], Any]


@click.command("list")
@click.argument("directory")
@_AS_JSON
def list_checkpoints(directory: str, as_json: bool) -> None:
    """Show the checkpoints in DIRECTORY and the remains of interrupted saves, with state, step, size and age.

    A checkpoint is whole if all files of its manifest exist with the right sizes; verify compares their bytes. Exit
    status: 0, whatever is found.
    """
    from fsdp_core.checkpoint.tools.listing import find_checkpoints

    checkpoints = find_checkpoints(directory)
    if as_json:
        print_json(
            [
                {
                    "path": checkpoint.path,
                    "state": checkpoint.state,
                    "step": checkpoint.step,
                    "bytes": checkpoint.nbytes,
                    "time": None
                    if checkpoint.time is None
                    else checkpoint.time.astimezone(UTC).isoformat(timespec="seconds"),
                    "remark": checkpoint.remark,
                }
                for checkpoint in checkpoints
            ]
        )
        return
    if not checkpoints:
        click.echo(f"no checkpoint of this format in {clean(directory)}")
        return
    rows = [
        (
            clean(checkpoint.path.replace("\\", "/").rpartition("/")[2]),
            checkpoint.state,
            "" if checkpoint.step is None else str(checkpoint.step),
            format_size(checkpoint.nbytes),
            "" if checkpoint.time is None else format_age((datetime.now(UTC) - checkpoint.time).total_seconds()),
            clean(checkpoint.remark),
        )
        for checkpoint in checkpoints
    ]
    print_table(("Name", "State", "Step", "Size", "Age", ""), rows, width=10_000, right=(2, 3, 4))


@click.command("inspect")
@click.argument("path")
@click.option("--tensors", "every", is_flag=True, help="List every tensor, not only groups of the model's.")
@_AS_JSON
def inspect_checkpoint(path: str, every: bool, as_json: bool) -> None:
    """Show the contents of the checkpoint PATH: who saved it, its tensors, its plain data. No tensor is read."""
    from fsdp_core.checkpoint import describe

    facts = describe(path)
    if as_json:
        print_json(facts)
        return
    click.echo(click.style(clean(facts["path"]), bold=True))
    ranks = f"{facts['world_size']} rank{'s' if facts['world_size'] > 1 else ''}"
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    _print_fields(
        [
            ("Saved by", f"{facts['strategy']} on {ranks}, {_format_time(facts['created'])}"),
            ("Versions", versions or "not noted"),
            ("Size", f"{format_size(facts['bytes'])} in {len(facts['files'])} files"),
            ("Format", f"version {facts['format_version']}"),
            *[("Scattered", _format_place(place)) for place in facts["places"][:_MAX_SHOWN]],
            *([] if facts["base"] is None else [("Base", _format_base(facts["base"]))]),
        ]
    )
    if facts["parts"]:
        click.echo()
        rows = [
            (
                clean(part["path"] or "elsewhere"),
                part["kind"],
                str(part["tensors"]),
                format_count(part["elements"]),
                format_size(part["bytes"]),
                ", ".join(part["dtypes"]),
            )
            for part in facts["parts"]
        ]
        print_table(("Part", "Kind", "Tensors", "Elements", "Size", "Dtypes"), rows, right=(2, 3, 4))
    _print_tensors(facts, every=every)
    if every and facts["base"] is not None:
        click.echo()
        left_out = facts["base"]["tensors"]
        digests = [(clean(key), *_format_tensor_facts(tensor), tensor["digest"]) for key, tensor in left_out.items()]
        print_table(("Left out", "Shape", "Dtype", "Size", "Digest"), digests, width=10_000, right=(3,))
    if facts["aliases"]:
        click.echo(f"\n{click.style('Tied names', bold=True)}")
        for alias, key in facts["aliases"].items():
            click.echo(f"  {clean(alias)} = {clean(key)}")
    if facts["plain"]:
        click.echo(f"\n{click.style('Plain data', bold=True)}")
        _print_fields([(clean(entry["path"]), _format_entry(entry)) for entry in facts["plain"]], indent="  ")


def _format_base(base: Mapping[str, Any]) -> str:
    """What a checkpoint leaves out, and where that is."""
    tensors = base["tensors"]
    source = base["source"]
    name = "which it does not name" if source is None else f"{source['type']} {source['name']}"
    size = format_size(sum(tensor["bytes"] for tensor in tensors.values()))
    return clean(f"{name}; {len(tensors)} tensors, {size}, are left out, since they were not trained")


def _format_place(place: Mapping[str, Any]) -> str:
    return clean(f"rank {place['ranks']} on {place['host']}, to {place['path']}")


def _print_fields(fields: Sequence[tuple[str, str]], indent: str = "") -> None:
    print_table((), [(indent + name, text) for name, text in fields])


def _format_time(created: str) -> str:
    try:
        return f"{datetime.fromisoformat(created):%Y-%m-%d %H:%M:%S %Z}"
    except ValueError:
        return created


def _print_tensors(facts: Mapping[str, Any], *, every: bool) -> None:
    tensors = facts["tensors"]
    rows: list[tuple[str, ...]]
    if every:
        title: tuple[str, ...] = ("Tensor", "Shape", "Dtype", "Size", "Chunks")
        rows = [(clean(key), *_format_tensor_facts(tensor), str(tensor["chunks"])) for key, tensor in tensors.items()]
    else:
        title = ("Tensors of the model", "Shape", "Dtype", "Size", "")
        models = tuple(f"{part['path']}/" for part in facts["parts"] if part["kind"] == "model")
        facts_of = {
            clean(key): _format_tensor_facts(tensor) for key, tensor in tensors.items() if key.startswith(models)
        }
        rows = [(*group, f"× {count}" if count > 1 else "") for group, count in group_blocks(facts_of)]
    if rows:
        click.echo()
        print_table(title, rows, width=10_000, right=(3,))


def group_blocks(tensors: Mapping[str, tuple[str, ...]]) -> list[tuple[tuple[str, ...], int]]:
    """Tensors with those of repeated blocks together: numbers in names whose blocks hold the same names and facts.

    Args:
        tensors: Facts by name.

    Returns:
        Rows, each of a name with facts, and the number of tensors that it stands for. In a name, ``*`` stands for the
        numbers of all blocks at that place.

    Example:
        >>> names = ["net.0.weight", "net.1.scale", "net.2.weight", "net.3.weight", "b.7.w", "b.8.w"]
        >>> [(name, count) for (name,), count in group_blocks(dict.fromkeys(names, ()))]
        [('net.0,2-3.weight', 3), ('net.1.scale', 1), ('b.*.w', 2)]
    """
    tree: _Tree = {}
    for name, facts in tensors.items():
        node = tree
        begin = 0
        for end in islice((position for position, sign in enumerate(name, 1) if sign in "./"), _DEEPEST):
            node = node.setdefault((name[begin:end], False), {})
            begin = end
        node[name[begin:], True] = facts
    return _rows_of(tree)


def _rows_of(node: _Tree) -> list[tuple[tuple[str, ...], int]]:
    """The rows of a part of the tree. Numbers that have the same rows below them are merged."""
    groups: dict[Any, list[str]] = {}
    numbers = 0
    for (part, is_tensor), below in node.items():
        rows = [(("", *below), 1)] if is_tensor else _rows_of(below)
        is_number = re.fullmatch(r"[0-9]{1,9}[./]?", part) is not None
        numbers += is_number
        groups.setdefault((None if is_number else part, is_tensor, tuple(rows)), []).append(part)
    merged_rows: list[tuple[tuple[str, ...], int]] = []
    for (*_, rows), parts in groups.items():
        prefix = _merge_numbers(parts, all_of_them=len(parts) == numbers)
        merged_rows += [((f"{prefix}{name}", *facts), count * len(parts)) for (name, *facts), count in rows]
    return merged_rows


def _merge_numbers(parts: list[str], *, all_of_them: bool) -> str:
    """One name for numbered parts that are alike.

    Example:
        >>> _merge_numbers(["0.", "1.", "3."], all_of_them=False), _merge_numbers(["0", "1"], all_of_them=True)
        ('0-1,3.', '*')
    """
    if len(parts) == 1:
        return parts[0]
    end = parts[0][-1] if parts[0][-1] in "./" else ""
    if all_of_them:
        return f"*{end}"
    runs: list[list[int]] = []
    for number in sorted(int(part.rstrip("./")) for part in parts):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in runs) + end


def _format_tensor_facts(tensor: Mapping[str, Any]) -> tuple[str, str, str]:
    return _format_shape(tensor["shape"]), tensor["dtype"], format_size(tensor["bytes"])


def _format_shape(shape: Iterable[int]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _format_entry(entry: Mapping[str, Any]) -> str:
    if "tensor" in entry:
        return "a tensor"
    if "value" in entry:
        return clean(entry["value"])
    names = [clean(name) for name in entry["names"]]
    if not names:
        return "empty"
    if all(name.isdigit() for name in names):
        return f"{entry['entries']} entr{'ies' if entry['entries'] > 1 else 'y'}"
    more = f" and {entry['entries'] - _MAX_SHOWN} more" if entry["entries"] > _MAX_SHOWN else ""
    return ", ".join(names[:_MAX_SHOWN]) + more


@click.command("verify")
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@click.option("--with-base", "base", metavar="BASE",
              help="Also look for what the checkpoint was saved without (save_frozen=False) in this folder or "
                   "file.")  # fmt: skip
@_QUIET
@_AS_JSON
def verify_checkpoint(paths: tuple[str, ...], base: str | None, quiet: bool, as_json: bool) -> None:
    """Compare every byte of the checkpoint PATH with the checksums of its manifest.

    Also check that the pieces of each tensor cover every element exactly once, and are in the files where the manifest
    says. Every fault is reported. Several paths are the places of one scattered save.
    """
    from fsdp_core.checkpoint.storage.joined_folder import open_places
    from fsdp_core.checkpoint.storage.part_recognition import describe_rest
    from fsdp_core.checkpoint.storage.rereading import read_again
    from fsdp_core.checkpoint.storage.tensor_bytes import open_files
    from fsdp_core.checkpoint.tools.conversion import counter
    from fsdp_core.checkpoint.verifying import files_in_other_places, find_damage

    def read() -> tuple[StoredFiles, dict[str, str]]:
        files = open_files(paths)
        total = sum(entry.size for entry in files.manifest.files.values())
        with progress("Verifying", quiet=quiet) as on_progress:
            on_bytes = counter(total, on_progress)
            return files, find_damage(files, files.manifest.files, on_bytes=lambda name, count: on_bytes(count))

    files, faults = read_again([open_places(paths)], read, is_intact=lambda read_result: not read_result[1])
    entries = files.manifest.files
    total = sum(entry.size for entry in entries.values())
    missing_elsewhere = files_in_other_places(files.manifest, faults)
    if as_json:
        facts = {"path": str(files.folder), "files": len(entries), "bytes": total, "faults": faults}
        facts["left_out"] = len(files.manifest.left_out)
        print_json({**facts, "elsewhere": missing_elsewhere})
    elif faults:
        if missing_elsewhere:
            for line in describe_rest(files.folder, files.manifest, missing_elsewhere).split("\n"):
                click.echo(clean(line), err=True)
        if len(missing_elsewhere) < len(faults):
            click.echo(f"{clean(files.folder)} is damaged:", err=True)
            for name, fault in faults.items():
                if name not in missing_elsewhere:
                    click.echo(f"  {clean(name)} {clean(fault)}", err=True)
            click.echo("Restore these files, or use an earlier checkpoint.", err=True)
    elif not quiet:
        count = len(files.manifest.tensors)
        verb = "is" if len(paths) == 1 else "together are"
        click.echo(
            f"{clean(files.folder)} {verb} whole: {count} tensors, {format_size(total)} in {len(entries)} files."
        )
    if base is not None and not faults:
        from fsdp_core.checkpoint.left_out.named_base import find_all

        find_all(base, files.manifest.left_out)
    if files.manifest.left_out and not (faults or quiet or as_json):
        left_out_count = len(files.manifest.left_out)
        where = "name it with --with-base to compare them" if base is None else f"{clean(base)}, which has them"
        click.echo(f"{left_out_count} tensors are left out, and in its base: {where}.")
    if faults:
        raise SystemExit(1)


@click.command("diff")
@click.argument("a")
@click.argument("b")
@click.option("--rtol", type=click.FloatRange(min=0), default=0.0, help="Relative tolerance; 0 when not given.")
@click.option("--atol", type=click.FloatRange(min=0), default=0.0, help="Absolute tolerance; 0 when not given.")
@_QUIET
@_AS_JSON
def diff_checkpoints(a: str, b: str, rtol: float, atol: float, quiet: bool, as_json: bool) -> None:
    """Show what differs between the checkpoints A and B: tensors, tied names, plain data.

    Strategies and world sizes may differ. Values differ if they are further apart than ATOL + RTOL × |b|; a NaN equals
    a NaN. Exit status: 0 where the content is the same, whoever saved it; 1 where it differs.
    """
    from fsdp_core.checkpoint import compare

    with progress("Comparing", quiet=quiet) as on_progress:
        differences = compare(a, b, rtol=rtol, atol=atol, on_progress=on_progress)
    if as_json:
        print_json(_to_json(differences))
    elif not quiet:
        _print_differences(differences)
    if differences:
        raise SystemExit(1)


def _as_json_number(value: Any) -> Any:
    """A number as JSON has it: without complex numbers, infinity and NaN."""
    if isinstance(value, complex):
        return [_as_json_number(value.real), _as_json_number(value.imag)]
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)


def _to_json(differences: Differences) -> dict[str, Any]:
    return {
        "same": not differences,
        "compared": differences.compared,
        "facts": {name: {"a": a, "b": b} for name, (a, b) in differences.facts.items()},
        "only_a": list(differences.only_a),
        "only_b": list(differences.only_b),
        "tied": {name: {"a": list(a), "b": list(b)} for name, (a, b) in differences.tied.items()},
        "tensors": {
            difference.key: {
                "shape": {"a": list(difference.shapes[0]), "b": list(difference.shapes[1])},
                "dtype": {"a": difference.dtypes[0], "b": difference.dtypes[1]},
                "differing": difference.count,
                "first": None if difference.first is None else list(difference.first),
                "values": None
                if difference.values is None
                else dict(zip("ab", map(_as_json_number, difference.values), strict=True)),
                "max_abs": _as_json_number(difference.max_abs),
            }
            for difference in differences.tensors
        },
        "plain": {path: {"a": a, "b": b} for path, (a, b) in differences.plain.items()},
    }


def _print_differences(differences: Differences) -> None:
    def section(title: str, lines: Sequence[str]) -> None:
        if lines:
            click.echo(click.style(f"{title} ({len(lines)})", bold=True))
            for line in lines[:_MAX_SHOWN]:
                click.echo(f"  {line}")
            if len(lines) > _MAX_SHOWN:
                click.echo(f"  … and {len(lines) - _MAX_SHOWN} more (--json has all)")
            click.echo()

    facts = [_format_fact(name, *both) for name, both in differences.facts.items()]
    section("Facts of the save that differ, not counted", facts)
    section("Tensors only in A", [_format_path(key) for key in differences.only_a])
    section("Tensors only in B", [_format_path(key) for key in differences.only_b])
    section(
        "Tied names that differ",
        [
            f"{_format_path(name)}: {', '.join(map(_format_path, a)) or 'alone'} in A, "
            f"{', '.join(map(_format_path, b)) or 'alone'} in B"
            for name, (a, b) in differences.tied.items()
        ],
    )
    section("Tensors that differ", [_format_tensor(difference) for difference in differences.tensors])
    section(
        "Plain data that differs",
        [f"{_format_path(path)}: {_format_change(a, b)}" for path, (a, b) in differences.plain.items()],
    )
    same = f"The content is the same: {differences.compared} tensors, and the plain data."
    click.echo("The content differs." if differences else same)


def _format_fact(name: str, a: Any, b: Any) -> str:
    if isinstance(a, Mapping):
        names = [key for key in {**a, **b} if a.get(key) != b.get(key)]
        return clean(f"{name}: " + ", ".join(f"{key} {a.get(key, 'none')} → {b.get(key, 'none')}" for key in names))
    return f"{_format_path(name) if '/' in name else clean(name.replace('_', ' '))}: {_format_change(a, b)}"


def _format_tensor(difference: TensorDifference) -> str:
    descriptions = []
    if difference.shapes[0] != difference.shapes[1]:
        descriptions.append(f"shape {_format_shape(difference.shapes[0])} → {_format_shape(difference.shapes[1])}")
    if difference.dtypes[0] != difference.dtypes[1]:
        descriptions.append(f"{difference.dtypes[0]} → {difference.dtypes[1]}")
    if difference.count:
        total = math.prod(difference.shapes[0])
        index = _format_shape(difference.first or ())
        a, b = difference.values or (None, None)
        values = f"first at {index}: {_format_number(a)} → {_format_number(b)}, by {difference.max_abs:.3g} at most"
        descriptions.append(f"{difference.count} of {total} values, {values}")
    elif difference.count == 0:
        descriptions.append("the values are the same")
    elif not descriptions:
        descriptions.append("the digests differ: one of them leaves it out")
    return f"{_format_path(difference.key)}\n      {'; '.join(descriptions)}"


def _format_number(number: Any) -> str:
    return f"{number:.9g}" if isinstance(number, (float, complex)) else str(number)


def _format_path(path: str) -> str:
    """A path to read: slashes in a step as they are, in quotes, and a callback's long arguments cut."""
    from fsdp_core.checkpoint.format.state_paths import split_path

    return clean("/".join(map(_format_step, split_path(path))))


def _format_step(step: str) -> str:
    if len(step) > _LONGEST and re.match(r"[\w.]+\{", step):  # the key of a callback
        step = f"{step[: _LONGEST - 1]}…"
    return f"'{step}'" if "/" in step else step


def _format_change(a: Any, b: Any) -> str:
    """Two values; of long ones, the part where they begin to differ."""
    texts = str(a), str(b)
    start = 0
    if max(map(len, texts)) > _LONGEST:
        common = sum(1 for _ in takewhile(lambda signs: signs[0] == signs[1], zip(*texts, strict=False)))
        start = max(0, common - _LONGEST // 2)
    return " → ".join(clean(_cut(text, start)) for text in texts)


def _cut(text: str, start: int) -> str:
    end = start + _LONGEST
    return f"{'…' if start else ''}{text[start:end]}{'…' if len(text) > end else ''}"
