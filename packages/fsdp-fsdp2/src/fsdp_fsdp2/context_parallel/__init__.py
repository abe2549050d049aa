"""Context parallelism: a forward pass on a part of a sequence, with attention and losses over the whole of it."""
