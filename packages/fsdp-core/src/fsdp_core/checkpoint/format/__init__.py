"""The file formats of a checkpoint."""
