"""Names the rank that was lost or that hangs, and ends the others: without it, each waits until its time is over."""

from fsdp_core.watch.watcher import explain, watch

__all__ = ["explain", "watch"]
