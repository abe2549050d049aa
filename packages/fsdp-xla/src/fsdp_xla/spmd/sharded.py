"""A module whose tensors XLA's partitioner shards: its steps and its state. Independent of Lightning."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from fsdp_core import CheckpointMismatchError, Sharded
from fsdp_core.state import (
    ChunkedTensor,
    HeldGradients,
    Part,
    SavedTensor,
    clean_name,
    fill,
    fill_all,
    load_optimizer_state,
    named_parameters,
    optimizer_state,
)
from fsdp_xla.spmd.boundaries import Boundaries
from fsdp_xla.spmd.partitioning import replicated_spec
from fsdp_xla.spmd.shards import HostShards, copy_shards
from fsdp_xla.torch_xla_private.sharded_tensors import is_marked, local_boxes

if TYPE_CHECKING:
    from fsdp_xla.spmd.backend import XLASPMDBackend

__all__ = ["XLASPMDSharded"]


class XLASPMDSharded(Sharded):
    """A module whose parameters are marked, each along one of its dimensions.

    Args:
        root: The user's module.
        boundaries: Its hooks.
    """

    backend: XLASPMDBackend

    def __init__(self, root: nn.Module, boundaries: Boundaries) -> None:
        super().__init__(root)
        self._boundaries = boundaries

    def bytes_held(self) -> int:
        first_boxes = ((p, local_boxes(p)[0]) for p in self.layout())  # of the first device: no other has more
        return sum(prod(lengths) * p.element_size() for p, (*_, lengths) in first_boxes)

    # -- steps -----------------------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients accumulate in place. Each micro-batch is a separate run of the same program."""
        yield
        self.reshard()

    def reshard(self) -> None:
        """Run what has been recorded so far, as one program. Nothing else in a step does."""
        self._boundaries.clear()
        self.backend.spmd.run_pending()

    def resume_forward(self) -> None:
        self.reshard()

    def reset(self) -> None:
        self._boundaries.clear()

    def clip_norm(
        self,
        parameters: Iterable[Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> Tensor:
        if error_if_nonfinite:
            # Otherwise reading the norm would be a program of its own that computes the gradients once more.
            self.backend.spmd.run_pending()
        norm = super().clip_norm(parameters, max_norm, norm_type, error_if_nonfinite)
        if error_if_nonfinite:
            # torch_xla 2.9 confuses tensors if one is read while in-place multiplications of the others are pending.
            self.backend.spmd.run_pending()
        return norm

    # -- state -----------------------------------------------------------------------------------------------------

    def model_state(self) -> dict[str, Any]:
        """The module's state by name, copied to the host in the devices' shards, and its extra state."""
        self.backend.spmd.settle()
        return {name: _on_host(value) for name, value in super().model_state().items()}

    def load_model_state(self, state: Mapping[str, Any], strict: bool = True, *, check_only: bool = False) -> None:
        self.backend.spmd.settle()
        root = self.root
        named_tensors = (*root.named_parameters(**_WITH_TIES), *root.named_buffers(**_WITH_TIES))
        module_tensors = {clean_name(name): tensor for name, tensor in named_tensors}
        live_state = super().model_state()
        resizing_names = self.resized_as_they_load(live_state, state)  # loaded below by the modules themselves
        targets: dict[str, Any] = {}
        shards: dict[str, HostShards] = {}
        for name, value in live_state.items():
            if not isinstance(value, Tensor) or name in resizing_names:
                continue
            if name in module_tensors and name in state and is_marked(module_tensors[name]):
                shards[name] = HostShards(module_tensors[name])
                targets[name] = shards[name].chunks
            else:
                # On the host: empty_like() would be on the device.
                targets[name] = torch.empty(value.shape, dtype=value.dtype)
        tensors: dict[str, Any] = {name: value for name, value in state.items() if isinstance(value, _TENSOR_TYPES)}
        tensors = {name: value for name, value in tensors.items() if name not in resizing_names}
        fill_all(targets, tensors, strict=strict, cast=not strict, check_only=check_only)
        if check_only:
            return
        for name, host_shards in shards.items():
            module_tensors[name].data = host_shards.tensor()
        own_names = {clean_name(name): name for name in type(root).state_dict(root)}  # not an instance's override
        remaining_state = {
            own_names[name]: targets[name] if name in targets else _read_full(value)
            for name, value in state.items()
            if name in live_state and name not in shards
        }
        if remaining_state:
            self.let_modules_load(root, remaining_state, resizing_names)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        self.backend.spmd.settle()
        named_state = optimizer_state(optimizer, self.layout(), self.runtime)
        return {
            "state": {
                name: {key: _on_host(value) for key, value in values.items()}
                for name, values in named_state["state"].items()
            },
            "param_groups": [
                {key: value.cpu() if isinstance(value, Tensor) else value for key, value in group.items()}
                for group in named_state["param_groups"]
            ],
        }

    def load_optimizer_state(
        self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any], *, check_only: bool = False
    ) -> None:
        self.backend.spmd.settle()
        load_optimizer_state(optimizer, self.layout(), state, check_only=check_only, restore=self._restored_state)

    def _restored_state(
        self, parameter: nn.Parameter, parts: Sequence[Part], group: Mapping[str, Any], key: str, values: Sequence[Any]
    ) -> Any:
        """Lay out a value of an optimizer's state as a step does, so that the next step is the same program."""
        value = values[0]
        if not isinstance(value, SavedTensor | Tensor):
            return value
        shape = tuple(value.shape)
        is_count = key == "step" and not shape
        if shape == tuple(parameter.shape) and not is_count:
            shards = HostShards(parameter, value.dtype)
            fill(shards.chunks, value)
            return shards.tensor()
        full = torch.empty(shape, dtype=value.dtype)
        fill(full, value)
        if is_count and not (group.get("capturable") or group.get("fused")):
            return full
        return self.backend.move_and_mark(full, replicated_spec(full.ndim))

    def accumulated_gradients(self) -> HeldGradients:
        self.backend.spmd.settle()
        return HeldGradients(
            reduced={name: copy_shards(p.grad) for name, p in named_parameters(self.root) if p.grad is not None}
        )

    def restore_gradients(
        self, own: Mapping[str, Callable[[], Tensor]], reduced: Mapping[str, Tensor | SavedTensor]
    ) -> None:
        self.backend.spmd.settle()
        parameters = dict(named_parameters(self.root))
        unknown = [name for name in (*own, *reduced) if name not in parameters]
        if unknown:
            raise CheckpointMismatchError(
                f"the checkpoint holds an accumulated gradient of {unknown[0]!r}, which is not a parameter of "
                f"{type(self.root).__name__}.\nLoad it into the model that it was saved from, or load the weights "
                "alone."
            )
        for name, parameter in parameters.items():
            parameter.grad = None
            if name in own or name in reduced:
                host_gradient = HostShards(parameter)
                if name in reduced:
                    fill(host_gradient.chunks, reduced[name], cast=True)
                if name in own:
                    _add(host_gradient.chunks, own[name]())
                parameter.grad = host_gradient.tensor()


_TENSOR_TYPES = (Tensor, ChunkedTensor, SavedTensor)
_WITH_TIES: dict[str, Any] = {"remove_duplicate": False}


def _add(chunks: ChunkedTensor, full: Tensor) -> None:
    for chunk in chunks.chunks:
        box = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.data.shape, strict=True))
        cast(Tensor, chunk.data).add_(full[box])


def _on_host(value: Any) -> Any:
    return copy_shards(value) if isinstance(value, Tensor) and value.device.type == "xla" else value


def _read_full(value: Any) -> Any:
    return value.full() if isinstance(value, SavedTensor) else value
