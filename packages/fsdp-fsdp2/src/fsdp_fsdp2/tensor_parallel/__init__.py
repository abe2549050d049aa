"""Tensor parallelism: plans of parallel styles, from the user or the model, and the loss over divided classes."""
