"""Gradients of sharded parameters: reduced, clipped, shown inside a step, discarded."""
