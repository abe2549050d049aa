"""``fsdp checkpoint import SOURCE OUT``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from fsdp_core.cli.output import clean, progress

if TYPE_CHECKING:
    from fsdp_core.checkpoint.importing.layouts import Imported

__all__ = ["import_checkpoint"]


@click.command("import")
@click.argument("source")
@click.argument("out")
@click.option("--weights-only", is_flag=True, help="Leave optimizers, loops, callbacks and schedulers out.")
@click.option(
    "--drop",
    multiple=True,
    metavar="PATH",
    help="Leave a part of the source out, such as hyper_parameters/loss. May be given several times.",
)
@click.option(
    "--parameter-order",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The parameters' names in the order in which the optimizers hold them, one a line, "
    "for sources that number them.",
)
@click.option(
    "--strip-prefix",
    metavar="PREFIX",
    default="",
    help="Leave off what each name begins with, such as 'module.', which DDP puts there.",
)
@click.option(
    "--add-prefix",
    metavar="PREFIX",
    default="",
    help="Put this before each name, such as 'model.' for a LightningModule that holds the model as self.model. "
    "OUT is then a checkpoint of the Trainer.",
)
@click.option("--overwrite", is_flag=True, help="Replace a checkpoint at OUT, once the new one is complete.")
@click.option("--quiet", "-q", is_flag=True, help="Show no progress, and print no more than errors.")
def import_checkpoint(
    source: str,
    out: str,
    weights_only: bool,
    drop: tuple[str, ...],
    parameter_order: Path | None,
    strip_prefix: str,
    add_prefix: str,
    overwrite: bool,
    quiet: bool,
) -> None:
    """Turn another library's checkpoint SOURCE into one of this format at OUT.

    SOURCE may be a sharded folder of Lightning's FSDPStrategy or ModelParallelStrategy, any folder of
    torch.distributed.checkpoint (torchtitan, accelerate), a .ckpt file of the Trainer or another file of torch.save,
    a safetensors file or folder, or a folder with the shards of torch_xla's FSDP and their shard_metadata. The format
    is detected. Optimizer state is imported too. Names are kept, unless a prefix is given.

    Nothing in SOURCE is executed, and it may be larger than memory.
    """
    from fsdp_core.checkpoint.importing import import_checkpoint as run

    order = None if parameter_order is None else parameter_order.read_text(encoding="utf-8").split()
    with progress("Importing", quiet=quiet) as on_bytes:
        imported = run(
            source,
            out,
            weights_only=weights_only,
            drop=drop,
            parameter_order=order,
            strip_prefix=strip_prefix,
            add_prefix=add_prefix,
            overwrite=overwrite,
            on_bytes=on_bytes,
        )
    if not quiet:
        click.echo("\n".join(map(clean, _describe_import(imported, out))))


def _describe_import(imported: Imported, out: str) -> list[str]:
    """What was imported, and how to use it."""
    from fsdp_core.checkpoint.format.state_paths import join_path

    state, kinds = imported.state, imported.kinds
    if imported.is_trainer_state:
        optimizers = state.get("optimizer", [])
        contents = [f"the model ({len(state['model'])} tensors)", *(f"optimizer {i}" for i in range(len(optimizers)))]
        parts = [key for key in ("loops", "callbacks", "lr_schedulers") if key in state["trainer"]]
        contents += [f"the Trainer's {key}" for key in parts]
        weights = f'trainer.validate(model, ckpt_path="{out}")   or   fsdp_core.load_state_dict("{out}")'
        use = f'trainer.fit(model, ckpt_path="{out}")' if optimizers else weights
    else:
        contents = [f"{key!r}" + (f" ({kinds[join_path(key)]})" if join_path(key) in kinds else "") for key in state]
        models = [key for key, part_kind in kinds.items() if part_kind == "model"]
        keys = "" if "model" in models else f", {models[0]!r}"
        arguments = ", ".join(f'"{key}": {key}' for key in kinds)
        use = f'fabric.load("{out}", {{{arguments}}})   or   fsdp_core.load_state_dict("{out}"{keys})'
    return [f"Imported {imported.source} to {out}: {', '.join(contents)}.", *imported.notes, f"Use it by   {use}"]
