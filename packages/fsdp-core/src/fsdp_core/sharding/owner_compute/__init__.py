"""Optimizers that look at whole parameters: each steps on one rank, over parameters gathered there."""
