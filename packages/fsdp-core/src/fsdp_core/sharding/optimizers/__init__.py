"""Optimizers over shards: rebound to them, tried before training, stepped by owners where they need whole parameters."""
