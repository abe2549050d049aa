"""Ranks that are XLA devices: how they are started, meet, and what they leave."""
