"""Lightning's command line."""

from typing import Any

from train import QUIET, Model, report  # type: ignore[import-not-found]  # beside it


def main() -> None:
    """Run the command that the command line names, then validate."""
    from lightning.pytorch.cli import LightningCLI

    defaults: dict[str, Any] = {"accelerator": "cpu", "devices": 2, "max_epochs": 1, **QUIET}
    cli = LightningCLI(Model, seed_everything_default=1, save_config_callback=None, trainer_defaults=defaults)
    (metrics,) = cli.trainer.validate(cli.model, verbose=False)
    report("cli", cli.trainer.strategy, cli.trainer.optimizers[0], metrics["val_loss"])


if __name__ == "__main__":
    main()
