"""Uses of names of torch_xla that are private or untyped, each with its reason."""
