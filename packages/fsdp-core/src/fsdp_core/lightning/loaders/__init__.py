"""Where data loaders are in their epochs, in checkpoints."""
