"""Names the rank that was lost or that hangs, and ends the others: without it, each waits until its time is over."""

from fsdp_core.watch.watcher import explain, explain_uncaught, watch

__all__ = ["explain", "explain_uncaught", "watch"]
