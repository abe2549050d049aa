"""Whole values of a sharded module, for what reads weights as one process has them."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from fsdp_core.backend import Backend
from fsdp_core.errors import ShardingError
from fsdp_core.gathering import check_not_gathered, whole
from fsdp_core.lightning.redirection import is_inside_forward, normal_tensors

__all__ = ["full_state_dict", "written_of"]


@normal_tensors()
def full_state_dict(module: nn.Module) -> dict[str, Any]:
    """Gather ``state_dict()`` of a module that a strategy has sharded, or of a part of one. All ranks must call it.

    It is gathered tensor by tensor, so that ranks other than 0 need memory for the largest one alone. A module that is
    not sharded gives what it has, so that the same line runs under any strategy.

    Args:
        module: A LightningModule, what ``fabric.setup`` has returned, or a module inside one of them.

    Returns:
        On rank 0 whole tensors in host memory, by the names of ``module.state_dict()`` before it was sharded, without
        what ``torch.compile`` puts into them; tied parameters under each of theirs and one tensor. Elsewhere an empty
        dictionary.

    Raises:
        ShardingError: It was called inside a step, whose forward pass needs what is gathered as it is.

    Example:
        In a LightningModule, after training::

            def on_train_end(self):
                weights = fsdp_core.full_state_dict(self.model)  # on every rank
                if self.trainer.is_global_zero:
                    self.model.save_pretrained("my-llama", state_dict=weights)

        Where nothing is sharded:

        >>> full_state_dict(nn.Linear(2, 1)).keys()
        dict_keys(['weight', 'bias'])
    """
    found = Backend.root_around(written_of(module))
    if found is None:
        if dist.is_initialized() and dist.get_rank():
            return {}
        state = written_of(module).state_dict()
        return {name: value.detach().cpu() if isinstance(value, Tensor) else value for name, value in state.items()}
    root, prefix = found
    check_not_gathered(root, "full_state_dict()")
    if is_inside_forward(root):
        raise ShardingError(
            "full_state_dict() was called inside a step, whose forward pass holds parameters gathered.\n"
            "Call it in a hook before or after it, such as on_train_batch_end() or on_train_end()."
        )
    backend = Backend.owner_of(root)
    assert backend is not None
    first = backend.aliases(root)
    gathered: dict[str, Any] = {}  # of every rank, for all must gather the same
    for name, value in backend.model_state(root).items():
        if name.startswith(prefix):
            original = first.get(name, name)
            if original not in gathered:
                full = whole(value, backend.runtime)
                if backend.runtime.rank:
                    full = None
                gathered[original] = full.cpu().clone() if isinstance(full, Tensor) else full
            gathered[name] = gathered[original]
    if backend.runtime.rank:
        return {}
    return {name.removeprefix(prefix): value for name, value in gathered.items() if name.startswith(prefix)}


def written_of(module: nn.Module) -> nn.Module:
    """The user's module that one stands for which Fabric has returned."""
    original = getattr(module, "_original_module", None)
    return original if isinstance(original, nn.Module) else module
