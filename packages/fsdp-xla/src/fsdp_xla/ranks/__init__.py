"""Ranks that are XLA devices: launching them, and their communication on the host."""
