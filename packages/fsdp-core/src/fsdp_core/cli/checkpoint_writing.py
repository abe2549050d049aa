"""``fsdp checkpoint consolidate``, ``gather``, ``reshard``; torch is imported for a Lightning file, or new dtypes."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from fsdp_core.cli.output import clean, format_size, progress

if TYPE_CHECKING:
    from fsdp_core.checkpoint.tools.consolidation import Consolidated

__all__ = ["consolidate_checkpoint", "gather_checkpoint", "reshard_checkpoint"]

_OVERWRITE = click.option("--overwrite", is_flag=True, help="Replace what is at OUT, once the new one is complete.")
_QUIET = click.option("--quiet", "-q", is_flag=True, help="Show no progress, and print no more than errors.")
_VERIFY = click.option(
    "--verify/--no-verify", default=True, help="Compare what is read with its checksums first; done by default."
)
_MAX_LINES = 10
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def _size(ctx: click.Context, param: click.Parameter, value: str) -> int:
    """A number of bytes, such as ``5GB`` or ``512MiB``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?", value.strip().upper())
    size = int(float(match[1]) * _UNITS[match[2]]) if match and match[2] in _UNITS else 0
    if size < 1:
        raise click.BadParameter(f"{value!r} is no size; write one as 5GB or 512MiB", ctx, param)
    return size


@click.command("consolidate")
@click.argument("path")
@click.argument("out")
@click.option("--to", "target", type=click.Choice(["safetensors", "lightning", "huggingface"]), required=True,
              help="What to write: one safetensors file; a Lightning .ckpt; a Hugging Face folder.")  # fmt: skip
@click.option("--key", metavar="PATH", help="Which model, by its path in the state, where there are several.")
@click.option("--optimizer-key", "optimizer_keys", multiple=True, metavar="PATH",
              help="Lightning: which optimizer of Fabric's, where there are several; once for each.")  # fmt: skip
@click.option("--strip-prefix", metavar="PREFIX", default="",
              help="Take the tensors whose names begin so, and leave that off, such as 'model.'.")  # fmt: skip
@click.option("--dtype", metavar="DTYPE", help="Convert the model's floating-point tensors, such as to bfloat16.")
@click.option("--copy-tied", is_flag=True, help="Write a tied parameter under each of its names, not once.")
@click.option("--max-shard-size", callback=_size, metavar="SIZE", default="5GB", show_default=True,
              help="Hugging Face: how large a file may be.")  # fmt: skip
@click.option("--config", type=click.Path(exists=True), metavar="FILE|FOLDER",
              help="Hugging Face: a config.json to copy into the folder; or the folder of the model that training "
                   "began with: its tokenizer is copied too, and names are as transformers stores them.")  # fmt: skip
@_OVERWRITE
@_VERIFY
@_QUIET
@click.pass_context
def consolidate_checkpoint(ctx: click.Context, /, path: str, out: str, target: str, overwrite: bool, verify: bool,
                           quiet: bool, dtype: str | None, **options: Any) -> None:  # fmt: skip
    """Write the checkpoint PATH to OUT as others read it.

    To a safetensors file or a Hugging Face folder go the weights of a model; to a Lightning file goes all that a
    Trainer has saved, the optimizers' state too, or of what Fabric has saved one model, its optimizers and the rest.
    A few MiB of it are in memory at once.
    """
    _refuse_foreign_options(ctx, target)
    common: dict[str, Any] = {"dtype": dtype, "overwrite": overwrite, "verify": verify}
    weights = {name: options[name] for name in ("key", "strip_prefix", "copy_tied")}
    with progress("Writing", quiet=quiet) as on_progress:
        common["on_progress"] = on_progress
        if target == "lightning":
            from fsdp_core.lightning.checkpoints.full.consolidation import consolidate_lightning

            chosen = {name: options[name] for name in ("key", "optimizer_keys")}
            done = consolidate_lightning(path, out, **common, **chosen)
        elif target == "safetensors":
            from fsdp_core.checkpoint import consolidate_safetensors

            done = consolidate_safetensors(path, out, **common, **weights)
        elif options["config"] is not None and os.path.isdir(options["config"]):
            _write_pretrained_folder(
                ctx, out, {**options, "dtype": dtype, "overwrite": overwrite, "verify": verify}, path, quiet
            )
            return
        else:
            from fsdp_core.checkpoint import consolidate_huggingface

            folder = {name: options[name] for name in ("max_shard_size", "config")}
            done = consolidate_huggingface(path, out, **common, **weights, **folder)
    if not quiet:
        _print_done(out, done)


def _write_pretrained_folder(ctx: click.Context, out: str, options: dict[str, Any], path: str, quiet: bool) -> None:
    """Write the folder as transformers stores the model, which needs transformers."""
    from fsdp_core.huggingface import consolidate_pretrained

    if options["copy_tied"]:
        raise click.UsageError("--copy-tied goes with --config FILE: transformers stores a tied parameter once.", ctx)
    names = ("config", "key", "strip_prefix", "dtype", "max_shard_size", "overwrite", "verify")
    saved = consolidate_pretrained(path, out, **{name: options[name] for name in names})
    if not quiet:
        click.echo(f"Wrote {saved.tensors} tensors, {format_size(saved.nbytes)}, to {clean(out)}.")


_ONLY_FOR = {
    "optimizer_keys": ("lightning",),
    "strip_prefix": ("safetensors", "huggingface"),
    "copy_tied": ("safetensors", "huggingface"),
    "max_shard_size": ("huggingface",),
    "config": ("huggingface",),
}


def _refuse_foreign_options(ctx: click.Context, target: str) -> None:
    for name, targets in _ONLY_FOR.items():
        is_typed = ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
        if is_typed and target not in targets:
            option = next(parameter.opts[0] for parameter in ctx.command.params if parameter.name == name)
            raise click.UsageError(f"{option} goes with --to {' or '.join(targets)}, not with --to {target}.", ctx)


def _print_done(out: str, done: Consolidated) -> None:
    target_text = f"{len(done.files)} files in {clean(out)}" if len(done.files) > 1 else clean(out)
    click.echo(f"Wrote {done.tensors} tensors, {format_size(done.nbytes)}, to {target_text}.")
    _print_list("Tied, and so written once:", [f"{alias} = {name}" for alias, name in done.aliases.items()])
    _print_list("Left out:", [f"{name}: {reason}" for name, reason in done.left_out.items()])


def _print_list(title: str, lines: Sequence[str]) -> None:
    if lines:
        click.echo(title)
        for line in lines[:_MAX_LINES]:
            click.echo(f"  {clean(line)}")
        if len(lines) > _MAX_LINES:
            click.echo(f"  … and {len(lines) - _MAX_LINES} more")


@click.command("gather")
@click.argument("places", nargs=-1, required=True, metavar="DIR...")
@click.argument("out")
@click.option("--copy", is_flag=True, help="Copy all files, and make no hard links.")
@_OVERWRITE
@_VERIFY
@_QUIET
def gather_checkpoint(
    places: tuple[str, ...], out: str, copy: bool, overwrite: bool, verify: bool, quiet: bool
) -> None:
    """Join the places DIR... of a scattered save to the checkpoint OUT.

    A save with scattered_save=True writes to a folder on each host, and rank 0's has the manifest. Give all of them, in
    any order; what is missing is named, with its rank, host and folder. Files on the disk of OUT are hard-linked.
    """
    from fsdp_core.checkpoint import gather

    with progress("Gathering", quiet=quiet) as on_progress:
        done = gather(places, out, overwrite=overwrite, copy=copy, verify=verify, on_progress=on_progress)
    if quiet:
        return
    size = sum(entry.size for entry in done.manifest.files.values())
    count = len(done.manifest.files)
    how = f"{done.linked} linked, {done.copied} copied"
    click.echo(f"Gathered {count} files, {format_size(size)}, of save {done.manifest.save_id} to {clean(out)}: {how}.")
    _print_list(
        "In several places, and read from one:",
        [f"{name}: {', '.join(directories)}" for name, directories in done.duplicates.items()],
    )
    _print_list("Passed over for a good one elsewhere:", [f"{path} {fault}" for path, fault in done.damaged.items()])


@click.command("reshard")
@click.argument("path")
@click.argument("out")
@click.option("--files", type=click.IntRange(min=1), metavar="N", required=True,
              help="How many files there shall be of the model, and as many of the optimizers.")  # fmt: skip
@_OVERWRITE
@_VERIFY
@_QUIET
def reshard_checkpoint(path: str, out: str, files: int, overwrite: bool, verify: bool, quiet: bool) -> None:
    """Write the checkpoint PATH to OUT in another number of files, bit for bit.

    No strategy needs this: any world size loads any number of files. It is for readers that need a certain number.
    """
    from fsdp_core.checkpoint import reshard

    with progress("Writing", quiet=quiet) as on_progress:
        manifest = reshard(path, out, files=files, overwrite=overwrite, verify=verify, on_progress=on_progress)
    if not quiet:
        size = sum(entry.size for entry in manifest.files.values())
        count = len(manifest.tensors)
        click.echo(f"Wrote {count} tensors, {format_size(size)} in {len(manifest.files)} files, to {clean(out)}.")
