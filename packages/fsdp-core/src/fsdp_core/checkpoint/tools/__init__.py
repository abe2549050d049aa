"""Offline tools for checkpoints: description, listing, comparison, conversion."""
