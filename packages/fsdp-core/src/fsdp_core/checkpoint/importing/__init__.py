"""Import of other libraries' checkpoints into this format, without running any of their code."""

from fsdp_core.checkpoint.importing.importer import import_checkpoint

__all__ = ["import_checkpoint"]
