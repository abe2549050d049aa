"""Full tensors of a sharded module, for code that reads weights as in one process."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from fsdp_core.errors import MissingKeyError, ShardingError
from fsdp_core.lightning.outside_steps.redirection import is_inside_forward, outside_inference_mode
from fsdp_core.sharding.sharded import Sharded, sharded_around
from fsdp_core.state.full_tensor import check_not_gathered
from fsdp_core.torch_private.dtensors import refuse_unreduced_values

__all__ = ["allow_unreduced_reads", "full_state_dict", "gather_state", "refuse_unreduced_reads", "users_module_in"]


@outside_inference_mode()
def full_state_dict(module: nn.Module) -> dict[str, Any]:
    """Gather the ``state_dict()`` of a sharded module, or of a part of one. All ranks must call it.

    It is gathered tensor by tensor, so ranks other than 0 need memory for the largest tensor only. A module that is not
    sharded returns its own state dict, so the same line runs under any strategy.

    Args:
        module: A LightningModule, what ``fabric.setup`` returned, or a module inside one of them.

    Returns:
        On rank 0, full tensors in host memory, by the FQNs that ``module.state_dict()`` had before sharding, without
        the prefixes of ``torch.compile``; the names of a tied parameter share one tensor. On other ranks, an empty
        dictionary.

    Raises:
        ShardingError: It was called inside a step, whose forward pass needs the gathered parameters; or another rank
            did not call it.

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
    owner_and_prefix = sharded_around(users_module_in(module))
    if owner_and_prefix is None:
        if dist.is_initialized() and dist.get_rank():
            return _NoWeights()
        state = users_module_in(module).state_dict()
        return {name: value.detach().cpu() if isinstance(value, Tensor) else value for name, value in state.items()}
    sharded, prefix = owner_and_prefix
    check_not_gathered(sharded.root, "full_state_dict()")
    if is_inside_forward(sharded.root):
        raise ShardingError(
            "full_state_dict() was called inside a step, whose forward pass needs the gathered parameters.\n"
            "Call it in a hook before or after it, such as on_train_batch_end() or on_train_end()."
        )
    return gather_state(sharded, prefix)


def gather_state(sharded: Sharded, prefix: str = "") -> dict[str, Any]:
    """Gather the state of a sharded root, or of a part of one, on rank 0's CPU. All ranks must call it.

    Args:
        sharded: The root.
        prefix: The prefix of the part's FQNs, which is removed from them.

    Returns:
        As :func:`full_state_dict`.

    Raises:
        ShardingError: Another rank did not call it.
    """
    sharded.runtime.rendezvous("a gathering of full weights, of which all ranks hold parts,")
    first_names = sharded.aliases()
    gathered: dict[str, Any] = {}  # on every rank, since all must gather the same
    for name, value in sharded.model_state().items():
        if name.startswith(prefix):
            first_name = first_names.get(name, name)
            if first_name not in gathered:
                full_value = sharded.backend.full_tensor(value)
                # Cloned, since full_tensor() returns a replicated tensor itself.
                gathered[first_name] = full_value.clone() if isinstance(full_value, Tensor) else full_value
            gathered[name] = gathered[first_name]
    if sharded.runtime.rank:
        return _NoWeights()
    # without the first names of tied parameters that are outside of the part
    return {name.removeprefix(prefix): value for name, value in gathered.items() if name.startswith(prefix)}


class _NoWeights(dict[str, Any]):
    """An empty dictionary for ranks other than 0. Reading a name raises an error that says where the weights are.

    Names may be removed and set, because hooks do so on every rank although it matters on rank 0 only.
    """

    def __missing__(self, name: str) -> Any:
        raise MissingKeyError(
            f"{name!r} was read from full weights on a rank that has none: rank 0 holds them, and other ranks an empty "
            "dictionary.\nWrite `if trainer.is_global_zero:` (under Fabric `if fabric.is_global_zero:`) before it."
        )

    def __setitem__(self, name: str, value: Any) -> None:
        if value is not None:  # None is what pop() returned here, when a hook renames weights
            super().__setitem__(name, value)

    def __delitem__(self, name: str) -> None:
        self.pop(name)

    def pop(self, name: str, default: Any = None) -> Any:
        return super().pop(name, default)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


def refuse_unreduced_reads() -> None:
    """Make it an error, from now on, to read a value that was computed from this rank's shards alone."""
    refuse_unreduced_values(_unreduced_value_error)


def allow_unreduced_reads() -> None:
    """End :func:`refuse_unreduced_reads`."""
    refuse_unreduced_values(None)


def _unreduced_value_error() -> ShardingError:
    return ShardingError(
        "a value was read from a DTensor that this rank computed from its shards alone, such as a norm or a sum.\n"
        "Write float(value.full_tensor()), on all ranks; or compute it from full tensors, which "
        'fsdp_core.full_state_dict(self), called on all ranks, returns on rank 0, and state_dict_type="full" puts into '
        'checkpoint["state_dict"] there.'
    )


def users_module_in(module: nn.Module) -> nn.Module:
    """The user's module inside the one that Fabric returned; other modules are returned as they are."""
    users_module = getattr(module, "_original_module", None)
    return users_module if isinstance(users_module, nn.Module) else module
