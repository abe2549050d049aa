"""Lightning's ``grad_norm`` over sharded modules: without this, it would see one rank's shards only.

Checked on Lightning 2.6.6: ``lightning.pytorch.utilities`` imports the function from its ``grads`` before a strategy
exists, and Lightning itself does not call it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

from fsdp_core.errors import ShardingError
from fsdp_core.lightning.patching import mark_wrapper, replace_function

__all__ = ["install_grad_norm"]


def install_grad_norm() -> None:
    """Wrap the function in the modules of Lightning that are imported by now. Idempotent; never undone."""
    for package in ("lightning.pytorch", "pytorch_lightning"):
        for submodule in ("utilities.grads", "utilities"):
            replace_function(sys.modules.get(f"{package}.{submodule}"), "grad_norm", _wrap_grad_norm)


@cache
def _wrap_grad_norm(grad_norm: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(grad_norm)
    def grad_norm_over_ranks(module: Any, norm_type: float | int | str, group_separator: str = "/") -> Any:
        owner_and_prefix = _sharded_around(module)
        if owner_and_prefix is None or not float(norm_type) > 0:
            return grad_norm(module, norm_type, group_separator)
        sharded, prefix = owner_and_prefix
        return _compute_grad_norms(module, sharded, prefix, float(norm_type), group_separator)

    return mark_wrapper(grad_norm_over_ranks, grad_norm, _wrap_grad_norm)


def _sharded_around(module: Any) -> tuple[Any, str] | None:
    if "fsdp_core.lightning.strategy" not in sys.modules:
        return None  # nothing is sharded if it was not imported
    from fsdp_core.sharding.sharded import sharded_around

    return sharded_around(module)


def _compute_grad_norms(module: Any, sharded: Any, prefix: str, order: float, separator: str) -> dict[str, Any]:
    """The norms of the gradients of a root's part with that prefix, under the keys of Lightning's ``grad_norm``."""
    import torch

    from fsdp_core.lightning.outside_steps.redirection import is_inside_forward
    from fsdp_core.sharding.grad_norms import norms_of_gradients

    if is_inside_forward(sharded.root):
        raise ShardingError(
            f"grad_norm({type(module).__name__}) was called inside a step, where parameters are gathered and their "
            "gradients are with the shards.\n"
            "Call it in on_before_optimizer_step() with automatic optimization; with manual optimization, "
            "self.trainer.strategy.sharded.clip_norm(parameters, float('inf')) returns the norm of what an optimizer "
            "holds."
        )
    sharded.runtime.rendezvous("grad_norm, which needs the gradients of all ranks,")
    norms = norms_of_gradients(sharded, order)
    norms_by_key: dict[str, Any] = {
        f"grad_{order}_norm{separator}{name.removeprefix(prefix)}": value
        for name, value in norms.items()
        if name.startswith(prefix)
    }
    if norms_by_key:
        norms_by_key[f"grad_{order}_norm_total"] = torch.stack(list(norms_by_key.values())).norm(order)
    return norms_by_key
