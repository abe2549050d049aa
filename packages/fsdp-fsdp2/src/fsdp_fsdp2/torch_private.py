"""The private names of torch that this package uses, each with its reason. Checked on torch 2.9.0 and 2.13.0."""

from __future__ import annotations

from torch.distributed.fsdp import FSDPModule

__all__ = ["finish_backward"]


def finish_backward(root: FSDPModule) -> None:
    """Do what ``fully_shard`` does at the end of a backward pass: reduce what is left to reduce, and reshard.

    It registers this as a callback when a gradient reaches the output of a unit that it has run forward. A backward
    pass inside the root's forward pass that touches the root's own parameters alone reaches no such output, so their
    gradients would never arrive at the shards. Doing it twice does nothing the second time.
    """
    root._get_fsdp_state()._root_post_backward_final_callback()
