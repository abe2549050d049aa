"""The positions of data loaders in their epochs, in checkpoints."""
