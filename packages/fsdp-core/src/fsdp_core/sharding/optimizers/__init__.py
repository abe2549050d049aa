"""Optimizers over shards: rebound to them, tried before training, run on owners where they need whole parameters."""
