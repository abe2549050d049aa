"""Lightning's command line, or several of them, with ``--then`` between."""

import sys
from typing import Any

from train import QUIET, Model, report  # type: ignore[import-not-found]  # beside it


def main(number: int, args: list[str]) -> None:
    """Run the command that a command line names, then validate."""
    from lightning.pytorch.cli import LightningCLI

    defaults: dict[str, Any] = {"accelerator": "cpu", "devices": 2, "max_epochs": 1, **QUIET}
    cli = LightningCLI(
        Model, args=args, seed_everything_default=1, save_config_callback=None, trainer_defaults=defaults
    )
    (metrics,) = cli.trainer.validate(cli.model, verbose=False)
    report(f"cli {number}", cli.trainer.strategy, cli.trainer.optimizers[0], metrics["val_loss"])


if __name__ == "__main__":
    words = sys.argv[1:]
    ends = [i for i, word in enumerate(words) if word == "--then"]
    for number, (begin, end) in enumerate(zip([-1, *ends], [*ends, len(words)], strict=True)):
        main(number, words[begin + 1 : end])
