"""Whether an optimizer computes over shards what one process computes: tried on small tensors before training."""
