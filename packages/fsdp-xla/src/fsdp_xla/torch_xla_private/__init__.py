"""Everything that uses names of torch_xla that are private or not typed, each with its reason."""
