"""Registers the strategy names with Lightning."""
