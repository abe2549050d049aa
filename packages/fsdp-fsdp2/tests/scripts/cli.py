"""Lightning's command line."""

from lightning.pytorch.cli import LightningCLI
from train import QUIET, Model, held_by, report

if __name__ == "__main__":
    cli = LightningCLI(
        Model,
        seed_everything_default=1,
        save_config_callback=None,
        trainer_defaults={"accelerator": "cpu", "devices": 2, "max_epochs": 1, **QUIET},
    )
    (metrics,) = cli.trainer.validate(cli.model, verbose=False)
    report("cli", cli.trainer.strategy, held_by(cli.model), metrics["val_loss"])
