"""Training loops under Trainer and Fabric: optimizers, exceptions, launchers, cleanup."""
