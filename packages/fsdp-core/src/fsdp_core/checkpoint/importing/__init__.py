"""Checkpoints of other libraries, turned into this format: each is recognised and read without running any of it."""

from fsdp_core.checkpoint.importing.importer import import_checkpoint

__all__ = ["import_checkpoint"]
