"""Checkpoints without what was not trained: what is left out of them, and where a load takes it from."""
