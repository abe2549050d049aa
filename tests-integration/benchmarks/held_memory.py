"""What a sharded model's parameters, gradients and optimizer state take on this rank, at every moment of a step.

Reads private attributes of torch's FSDP1 and FSDP2 (checked on torch 2.13).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["GATHERED", "HELD", "IN_TRANSIT", "REDUCED", "HeldMemory"]

HELD = ("sharded parameters", "gathered parameters", "unreduced gradients", "sharded gradients", "optimizer state")
IN_TRANSIT = ("all-gather buffers", "reduce-scatter buffers")
SHARDED, GATHERED, UNREDUCED, REDUCED, STATE = HELD
GATHERING, REDUCING = IN_TRANSIT

OPS = torch.ops
FLATTEN_FSDP1, FLATTEN_FSDP2 = OPS.aten.cat.default, OPS.fsdp.chunk_cat.default
ALL_GATHER, REDUCE_SCATTER = OPS.c10d._allgather_base_.default, OPS.c10d._reduce_scatter_base_.default


class HeldMemory(TorchDispatchMode):
    """Adds up what is held after each of torch's operations, forward, backward and the optimizer's, while entered.

    It counts storages: each once, under the kind that it was first met as, from its first moment to its last, with the
    size that it has at each. (FSDP frees a gathered parameter by shrinking its storage to nothing.) Activations,
    temporary tensors and all else that is never met as one of these kinds do not count.

    Args:
        model: What is sharded, after at least one step.
        optimizer: Its optimizer.

    Attributes:
        moments: Bytes by kind, after each operation.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        super().__init__()
        self.moments: list[dict[str, int]] = []
        self._kinds, self._born = WeakIdKeyDictionary(), WeakIdKeyDictionary()
        for kind, tensor in (*existing(model), *states(optimizer)):
            self._meet(kind, tensor)
        self._hooks = [module.register_forward_pre_hook(self._watch_gradients) for module in model.modules()]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for hook in self._hooks:
            hook.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._born.setdefault(tensor.untyped_storage(), len(self.moments))
        if func is ALL_GATHER or func is REDUCE_SCATTER:
            written, read = args[:2]
            self._meet(GATHERING if func is ALL_GATHER else REDUCED, written)
            self._meet(GATHERING if func is ALL_GATHER else REDUCING, read)
        elif func is FLATTEN_FSDP2:
            self._meet(REDUCING, kwargs["out"])
        elif func is FLATTEN_FSDP1 and any(self._kinds.get(part.untyped_storage()) == UNREDUCED for part in args[0]):
            self._meet(REDUCING, result)
        now = dict.fromkeys((*HELD, *IN_TRANSIT), 0)
        for storage, kind in self._kinds.items():
            now[kind] += storage.nbytes()
        self.moments.append(now)
        return result

    def _meet(self, kind: str, tensor: Tensor) -> None:
        storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
        if storage not in self._kinds:
            self._kinds[storage] = kind
            for moment in self.moments[self._born.get(storage, len(self.moments)) :]:
                moment[kind] += storage.nbytes()

    def _watch_gradients(self, module: nn.Module, args: object) -> None:
        """Meet the gradients of the gathered parameters, which a module has while it computes, once complete."""
        for parameter in module.parameters(recurse=False):
            if parameter.grad_fn is None:
                hook = parameter.register_post_accumulate_grad_hook(lambda done: self._meet(UNREDUCED, done.grad))
            else:  # FSDP1: a view into the flat parameter; its gradient waits for the others to be joined with them
                hook = parameter.grad_fn.register_hook(lambda flat, _: self._meet(UNREDUCED, flat[0]))
            self._hooks.append(hook)


def existing(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters and gradients that exist between two steps."""
    for module in model.modules():
        if isinstance(module, FullyShardedDataParallel) and module._handle is not None:
            yield SHARDED, module._handle.flat_param._local_shard
            yield GATHERED, module._handle.flat_param._full_param_padded
        elif isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                for one in group.fsdp_params:
                    yield SHARDED, one._sharded_param_data
                    yield from ((GATHERED, gathered) for gathered in one.all_gather_outputs)
    for parameter in model.parameters():
        if parameter.grad is not None:
            yield REDUCED, parameter.grad


def states(optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    """The optimizer's tensors."""
    for state in optimizer.state.values():
        yield from ((STATE, tensor) for tensor in state.values() if isinstance(tensor, Tensor))
