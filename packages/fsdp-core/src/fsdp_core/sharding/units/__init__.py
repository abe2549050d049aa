"""Units of a module: which submodules they are, what they keep of activations, what they exchange with callers."""
