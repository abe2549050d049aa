"""Modules that the user shards, in a function or in ``configure_model``, and their values."""
