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
_QUIET = click.option("--quiet", "-q", is_flag=True, help="Show no progress, and print nothing but errors.")
_VERIFY = click.option(
    "--verify/--no-verify", default=True, help="Compare the files with their checksums before anything is written."
)
_MAX_LINES = 10
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def _parse_size(ctx: click.Context, param: click.Parameter, value: str) -> int:
    """The number of bytes that a text such as ``5GB`` or ``512MiB`` stands for."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?", value.strip().upper())
    size = int(float(match[1]) * _UNITS[match[2]]) if match and match[2] in _UNITS else 0
    if size < 1:
        raise click.BadParameter(f"{value!r} is no size; write one as 5GB or 512MiB", ctx, param)
    return size


@click.command("consolidate")
@click.argument("path")
@click.argument("out")
@click.option("--to", "target", type=click.Choice(["safetensors", "lightning", "huggingface"]), required=True,
              help="Write one safetensors file, a Lightning .ckpt file, or a Hugging Face folder.")  # fmt: skip
@click.option("--key", metavar="PATH",
              help="Write the model at this path of the state; needed if the checkpoint holds several.")  # fmt: skip
@click.option("--optimizer-key", "optimizer_keys", multiple=True, metavar="PATH",
              help="Only to a Lightning file, of what Fabric has saved: write the optimizer at this path of the state; "
                   "needed if the checkpoint holds several. Repeat it for each optimizer.")  # fmt: skip
@click.option("--strip-prefix", metavar="PREFIX", default="",
              help="Write only the tensors whose names begin with PREFIX, such as 'model.', and remove it from the "
                   "names.")  # fmt: skip
@click.option("--dtype", metavar="DTYPE",
              help="Convert the model's floating-point tensors to DTYPE, such as bfloat16.")  # fmt: skip
@click.option("--copy-tied", is_flag=True,
              help="Write a tied parameter under each of its names, instead of under the first alone.")  # fmt: skip
@click.option("--max-shard-size", callback=_parse_size, metavar="SIZE", default="5GB", show_default=True,
              help="Only to a Hugging Face folder: divide the tensors among files of at most SIZE.")  # fmt: skip
@click.option("--config", type=click.Path(exists=True), metavar="FILE|FOLDER",
              help="Only to a Hugging Face folder: copy this config.json into it; or, from the folder of the model "
                   "that training began with, the configuration and the tokenizer, and write the tensors under the "
                   "names that transformers stores.")  # fmt: skip
@click.option("--with-base", "base", metavar="BASE",
              help="Read what the checkpoint was saved without (save_frozen=False) from this folder or file, and "
                   "compare it with the digests that were saved.")  # fmt: skip
@click.option("--trained-only", is_flag=True,
              help="Write what such a checkpoint holds, and nothing of its base.")  # fmt: skip
@_OVERWRITE
@_VERIFY
@_QUIET
@click.pass_context
def consolidate_checkpoint(ctx: click.Context, /, path: str, out: str, target: str, overwrite: bool, verify: bool,
                           quiet: bool, dtype: str | None, **options: Any) -> None:  # fmt: skip
    """Write the checkpoint PATH to OUT in a format that other libraries read.

    A safetensors file and a Hugging Face folder get the weights of one model. A Lightning file gets all that a Trainer
    has saved, the optimizers' state included; of a checkpoint of Fabric, one model, its optimizers and the plain data.
    A few MiB are in memory at once.
    """
    _refuse_foreign_options(ctx, target)
    common_arguments: dict[str, Any] = {"dtype": dtype, "overwrite": overwrite, "verify": verify}
    common_arguments["base"] = options["base"]
    weight_arguments = {name: options[name] for name in ("key", "strip_prefix", "copy_tied", "trained_only")}
    with progress("Writing", quiet=quiet) as on_progress:
        common_arguments["on_progress"] = on_progress
        if target == "lightning":
            from fsdp_core.lightning.checkpoints.full.consolidation import consolidate_lightning

            keys = {name: options[name] for name in ("key", "optimizer_keys")}
            written = consolidate_lightning(path, out, **common_arguments, **keys)
        elif target == "safetensors":
            from fsdp_core.checkpoint import consolidate_safetensors

            written = consolidate_safetensors(path, out, **common_arguments, **weight_arguments)
        elif options["config"] is not None and os.path.isdir(options["config"]):
            options |= {"dtype": dtype, "overwrite": overwrite, "verify": verify}
            _write_pretrained_folder(ctx, path, out, options, quiet=quiet)
            return
        else:
            from fsdp_core.checkpoint import consolidate_huggingface

            folder_arguments = {name: options[name] for name in ("max_shard_size", "config")}
            written = consolidate_huggingface(path, out, **common_arguments, **weight_arguments, **folder_arguments)
    if not quiet:
        _print_written(out, written)


def _write_pretrained_folder(ctx: click.Context, path: str, out: str, options: dict[str, Any], *, quiet: bool) -> None:
    """Write a Hugging Face folder under the names that transformers stores, which imports transformers."""
    from fsdp_core.huggingface import consolidate_pretrained

    if options["copy_tied"]:
        raise click.UsageError("--copy-tied goes with --config FILE: transformers stores a tied parameter once.", ctx)
    if options["trained_only"]:
        raise click.UsageError("--trained-only goes with --config FILE: transformers stores whole models.", ctx)
    names = ("config", "base", "key", "strip_prefix", "dtype", "max_shard_size", "overwrite", "verify")
    saved = consolidate_pretrained(path, out, **{name: options[name] for name in names})
    if not quiet:
        click.echo(f"Wrote {saved.tensors} tensors, {format_size(saved.nbytes)}, to {clean(out)}.")


#: By option, the values of ``--to`` that it goes with. Other options go with all.
_TARGETS_OF_OPTION = {
    "optimizer_keys": ("lightning",),
    "strip_prefix": ("safetensors", "huggingface"),
    "copy_tied": ("safetensors", "huggingface"),
    "trained_only": ("safetensors", "huggingface"),
    "max_shard_size": ("huggingface",),
    "config": ("huggingface",),
}


def _refuse_foreign_options(ctx: click.Context, target: str) -> None:
    for name, targets in _TARGETS_OF_OPTION.items():
        is_typed = ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
        if is_typed and target not in targets:
            option = next(parameter.opts[0] for parameter in ctx.command.params if parameter.name == name)
            raise click.UsageError(f"{option} goes with --to {' or '.join(targets)}, not with --to {target}.", ctx)


def _print_written(out: str, written: Consolidated) -> None:
    target_text = f"{len(written.files)} files in {clean(out)}" if len(written.files) > 1 else clean(out)
    click.echo(f"Wrote {written.tensors} tensors, {format_size(written.nbytes)}, to {target_text}.")
    _print_list("Tied, and so written once:", [f"{alias} = {name}" for alias, name in written.aliases.items()])
    _print_list("Left out:", [f"{name}: {reason}" for name, reason in written.left_out.items()])


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
@click.option("--copy", is_flag=True, help="Copy all files, also those on the disk of OUT, instead of linking them.")
@_OVERWRITE
@_VERIFY
@_QUIET
def gather_checkpoint(
    places: tuple[str, ...], out: str, copy: bool, overwrite: bool, verify: bool, quiet: bool
) -> None:
    """Join the places DIR... of a scattered save to the checkpoint OUT.

    A save with scattered_save=True writes to a folder on each host, its place; rank 0's has the manifest. Give all
    places, in any order; an error names the rank, the host and the folder of each file that is missing. Files on the
    disk of OUT are hard-linked.
    """
    from fsdp_core.checkpoint import gather

    with progress("Gathering", quiet=quiet) as on_progress:
        gathered = gather(places, out, overwrite=overwrite, copy=copy, verify=verify, on_progress=on_progress)
    if quiet:
        return
    manifest = gathered.manifest
    size = sum(entry.size for entry in manifest.files.values())
    click.echo(
        f"Gathered {len(manifest.files)} files, {format_size(size)}, of save {manifest.save_id} to {clean(out)}: "
        f"{gathered.linked} linked, {gathered.copied} copied."
    )
    _print_list(
        "In several places, and read from one:",
        [f"{name}: {', '.join(directories)}" for name, directories in gathered.duplicates.items()],
    )
    _print_list(
        "Passed over for a good one elsewhere:", [f"{path} {fault}" for path, fault in gathered.damaged.items()]
    )


@click.command("reshard")
@click.argument("path")
@click.argument("out")
@click.option("--files", type=click.IntRange(min=1), metavar="N", required=True,
              help="Divide the model's tensors among N files, and those of the optimizers among N others.")  # fmt: skip
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
