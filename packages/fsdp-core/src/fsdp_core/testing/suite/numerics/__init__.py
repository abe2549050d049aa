"""Losses, gradients and weights equal those of one unsharded process."""
