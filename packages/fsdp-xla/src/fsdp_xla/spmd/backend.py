"""Sharding with torch_xla's SPMD: tensors are marked, and XLA's partitioner does the rest. Knows no Lightning."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from fsdp_core import Backend, CheckpointMismatchError, UnsupportedCapabilityError
from fsdp_core.sharding import (
    ActivationCheckpointingPolicy,
    ShardPrecision,
    WrapPolicy,
    checkpoint_activations,
    describe_policy,
    materialize,
    options_of,
    select_units,
)
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
from fsdp_xla.optimizer_init import FirstSteps
from fsdp_xla.recomputation import recompute
from fsdp_xla.spmd.boundaries import Boundaries
from fsdp_xla.spmd.partitioning import PartitionSpec, batch_spec, parameter_spec, planned_dims, replicated_spec
from fsdp_xla.spmd.runtime import FSDP_AXIS, XLASPMDRuntime
from fsdp_xla.spmd.shards import HostShards, held_by_devices, layout_on_devices
from fsdp_xla.torch_xla_private.sharded_tensors import is_marked, local_boxes, mark, mark_as, sharding_of

__all__ = ["XLASPMDBackend"]


class XLASPMDBackend(Backend):
    """Shards parameters over the devices of this host, in place: each is marked along one of its dimensions.

    There is one rank, which sees whole tensors; where they are is XLA's business. Parameters that don't divide evenly
    are padded, and those without dimensions are on every device.

    Args:
        auto_wrap_policy: Which submodules are units of their own: a set of classes, a callable, ``"auto"`` for the
            blocks repeated in the model's ``ModuleList`` s, or ``None``. Between units, activations are sharded along
            the batch, and gradients are done with.
        activation_checkpointing_policy: Which submodules recompute their activations in the backward pass.
        tensor_plan: By pattern of parameter names, the dimension to cut along the mesh axis ``"model"``, which the
            runtime's ``tensor_parallel_size`` says the size of.
    """

    accelerators: ClassVar[tuple[str, ...]] = ("xla",)

    # by root, and not by backend, for a root outlives the strategy that sharded it
    _boundaries: ClassVar[weakref.WeakKeyDictionary[nn.Module, Boundaries]] = weakref.WeakKeyDictionary()

    def __init__(
        self,
        *,
        auto_wrap_policy: WrapPolicy | None = "auto",
        activation_checkpointing_policy: ActivationCheckpointingPolicy | None = None,
        tensor_plan: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__()
        self.auto_wrap_policy = auto_wrap_policy
        self.activation_checkpointing_policy = activation_checkpointing_policy
        self.tensor_plan = dict(tensor_plan or {})
        self.first_steps = FirstSteps(_zeros_like)
        self._followed: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    @property
    def spmd(self) -> XLASPMDRuntime:
        """The runtime, which has the mesh."""
        assert isinstance(self.runtime, XLASPMDRuntime), "XLASPMDBackend runs on an XLASPMDRuntime"
        return self.runtime

    def terms(self) -> dict[str, Any]:
        return {
            **super().terms(),
            "mesh": dict(self.spmd.mesh.shape()),
            "auto_wrap_policy": describe_policy(self.auto_wrap_policy),
            "activation_checkpointing_policy": describe_policy(self.activation_checkpointing_policy),
            "tensor_plan": self.tensor_plan,
        }

    def effective_precision(self, precision: ShardPrecision) -> ShardPrecision:
        if torch.float16 in (precision.storage, precision.compute):
            raise UnsupportedCapabilityError(
                f"precision={precision.name!r} can't be used with 'xla_fsdp_spmd': XLA devices compute in bfloat16, "
                "and in float16 neither natively nor with a scaler.\n"
                "Write precision='bf16-mixed', 'bf16-true' or '32-true'."
            )
        return precision

    # -- sharding --------------------------------------------------------------------------------------------------

    def units(self, module: nn.Module) -> list[nn.Module]:
        return select_units(module, self.auto_wrap_policy)

    def shard(self, module: nn.Module) -> nn.Module:
        if self.is_sharded(module):
            return module
        self._check(module)
        planned = planned_dims(module, self.tensor_plan)
        units = self.units(module)
        checkpoint_activations(module, self.activation_checkpointing_policy, recompute)
        self.remember(module)
        names = {id(parameter): name for name, parameter in named_parameters(module)}
        dims = {key: planned.get(name) for key, name in names.items()}
        placed: dict[int, nn.Parameter] = {}
        written: list[nn.Parameter] = []  # a freed parameter's id could be given to another
        done: set[nn.Module] = set()
        for unit in (*units, module):
            own = [one for one in unit.modules() if one not in done]
            done.update(own)
            if any(t.is_meta for one in own for t in (*one.parameters(False), *one.buffers(False))):
                dims.update(_materialize(own, dims))
            for one in own:
                self._place(one, dims, placed, written)
        module.to(self.runtime.device)  # what else follows a module's device, such as metrics
        self._boundaries[module] = Boundaries(module, units, self.spmd.mesh)
        self.spmd.settle()
        self.mark_sharded(module)
        return module

    def _check(self, module: nn.Module) -> None:
        self.check_shardable(module)
        if self.tensor_plan and self.spmd.tensor_parallel_size == 1:
            raise UnsupportedCapabilityError(
                "tensor_plan says how to cut weights along the mesh axis 'model', and there is none.\n"
                "Write tensor_parallel_size=2 (or more) too, or leave tensor_plan out."
            )
        for name, submodule in module.named_modules():
            if options_of(submodule):
                raise UnsupportedCapabilityError(
                    f"wrap({name}, {', '.join(f'{k}=...' for k in options_of(submodule))}) has options, which "
                    "'xla_fsdp_spmd' takes for the whole model.\nGive them to the strategy and write wrap(module)."
                )

    def _place(
        self,
        module: nn.Module,
        dims: Mapping[int, int | None],
        placed: dict[int, nn.Parameter],
        written: list[nn.Parameter],
    ) -> None:
        """Put what a module owns directly on the devices, in shards. Tied parameters stay tied."""
        shards = self.spmd.mesh.shape()[FSDP_AXIS]
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            if id(parameter) not in placed:
                spec = parameter_spec(tuple(parameter.shape), shards, dims.get(id(parameter)))
                on_devices = nn.Parameter(self._marked(parameter.detach(), spec), parameter.requires_grad)
                on_devices.__dict__.update(parameter.__dict__)  # what users note on parameters
                placed[id(parameter)] = on_devices
                written.append(parameter)
                # an optimizer that waits to be re-pointed still holds it: keep its shape, and not its memory
                parameter.data = parameter.data.new_empty(()).expand(parameter.shape)
            setattr(module, name, placed[id(parameter)])
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                setattr(module, name, self._marked(buffer, replicated_spec(buffer.ndim)))

    def _marked(self, tensor: Tensor, spec: PartitionSpec) -> Tensor:
        """The tensor on the devices, which each get their shard of it alone."""
        moved = tensor.to(self.runtime.device)
        if not is_marked(moved):
            mark_as(moved, self.spmd.mesh, spec)
        return moved

    def bytes_held(self, module: nn.Module) -> int:
        return sum(prod(local_boxes(p)[0][2]) * p.element_size() for p in self.layout(module))

    def shard_batch(self, tensor: Tensor) -> Tensor:
        """Shard a tensor of a batch along its first dimension, which XLA pads if need be. One on the CPU stays."""
        if tensor.device.type != "xla":
            return tensor
        return self._marked(tensor, batch_spec(tensor.ndim) if tensor.ndim and 0 not in tensor.shape else ())

    def repoint(self, optimizers: Iterable[torch.optim.Optimizer], modules: Sequence[nn.Module]) -> None:
        optimizers = list(optimizers)
        super().repoint(optimizers, modules)
        for optimizer in optimizers:
            if optimizer not in self._followed:
                self._followed.add(optimizer)
                optimizer.register_step_post_hook(self._lay_out_state)
                for group in optimizer.param_groups:
                    for parameter in group["params"]:
                        # in a step it may be what recomputation has put a barrier before, of which XLA knows no layout
                        _layouts[parameter] = layout_on_devices(parameter)

    def _lay_out_state(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Shard state that a step has made as its parameter, rather than as the partitioner would find best."""
        for parameter, state in optimizer.state.items():
            for value in state.values():
                if isinstance(value, Tensor) and value.device.type == "xla" and not is_marked(value):
                    self._mark_state(value, parameter)

    def _mark_state(self, value: Tensor, parameter: Tensor) -> None:
        if value.shape == parameter.shape:
            mark(value, sharding_of(parameter))
        else:
            mark_as(value, self.spmd.mesh, replicated_spec(value.ndim))

    # -- steps -----------------------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self, module: nn.Module) -> Iterator[None]:
        """Gradients accumulate where they are. Each micro-batch is a program of its own, the same for all of them."""
        yield
        self.reshard(module)

    def reshard(self, module: nn.Module) -> None:
        """Run what was recorded up to here, as one program. Nothing else in a step does."""
        if module in self._boundaries:
            self._boundaries[module].clear()
        self.spmd.run_pending()

    def resume_forward(self, module: nn.Module) -> None:
        self.reshard(module)

    def reset(self, module: nn.Module) -> None:
        self._boundaries[module].clear()

    def clip_norm(
        self,
        parameters: Iterable[Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> Tensor:
        if error_if_nonfinite:
            # the norm will be looked at, which must not be a program that computes the gradients once for itself
            self.spmd.run_pending()
        return super().clip_norm(parameters, max_norm, norm_type, error_if_nonfinite)

    # -- state -----------------------------------------------------------------------------------------------------

    def model_state(self, module: nn.Module) -> dict[str, Any]:
        """The module's state by name, copied to the host: by the shards that the devices hold, or extra state."""
        self.spmd.settle()
        return {name: _on_host(value) for name, value in super().model_state(module).items()}

    def load_model_state(
        self, module: nn.Module, state: Mapping[str, Any], strict: bool = True, *, check_only: bool = False
    ) -> None:
        self.spmd.settle()
        held = {clean_name(n): t for of in (module.named_parameters, module.named_buffers) for n, t in of(**_EVERY)}
        live = super().model_state(module)
        targets: dict[str, Any] = {}
        shards: dict[str, HostShards] = {}
        for name, value in live.items():
            if not isinstance(value, Tensor):
                continue
            if name in held and name in state and is_marked(held[name]):
                shards[name] = HostShards(held[name])
                targets[name] = shards[name].chunks
            else:
                targets[name] = torch.empty(value.shape, dtype=value.dtype)  # empty_like() of XLA's has no memory
        tensors: dict[str, Any] = {name: value for name, value in state.items() if isinstance(value, _TENSORS)}
        fill_all(targets, tensors, strict=strict, cast=not strict, check_only=check_only)
        if check_only:
            return
        for name, of_name in shards.items():
            held[name].data = of_name.tensor()
        raw_names = {clean_name(name): name for name in type(module).state_dict(module)}
        rest = {
            raw_names[name]: targets.get(name, _whole(value))
            for name, value in state.items()
            if name in live and name not in shards
        }
        if rest:
            type(module).load_state_dict(module, rest, strict=False)

    def optimizer_state(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        self.spmd.settle()
        described = optimizer_state(optimizer, self.layout(module), self.runtime)
        return {
            "state": {
                name: {key: _on_host(value) for key, value in values.items()}
                for name, values in described["state"].items()
            },
            "param_groups": [
                {key: value.cpu() if isinstance(value, Tensor) else value for key, value in group.items()}
                for group in described["param_groups"]
            ],
        }

    def load_optimizer_state(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        state: Mapping[str, Any],
        *,
        check_only: bool = False,
    ) -> None:
        self.spmd.settle()
        load_optimizer_state(optimizer, self.layout(module), state, check_only=check_only, restore=self._restored_state)

    def _restored_state(
        self, parameter: nn.Parameter, parts: Sequence[Part], group: Mapping[str, Any], key: str, values: Sequence[Any]
    ) -> Any:
        """A value of an optimizer's state where a step would have put it, so that the next one is no other program."""
        value = values[0]
        if not isinstance(value, SavedTensor | Tensor):
            return value
        shape = tuple(value.shape)
        is_count = key == "step" and not shape
        if shape == tuple(parameter.shape) and not is_count:
            shards = HostShards(parameter, value.dtype)
            fill(shards.chunks, value)
            return shards.tensor()
        whole = torch.empty(shape, dtype=value.dtype)
        fill(whole, value)
        if is_count and not (group.get("capturable") or group.get("fused")):
            return whole
        return self._marked(whole, replicated_spec(whole.ndim))

    def accumulated_gradients(self, module: nn.Module) -> HeldGradients:
        self.spmd.settle()
        return HeldGradients(
            reduced={name: held_by_devices(p.grad) for name, p in named_parameters(module) if p.grad is not None}
        )

    def restore_gradients(
        self, module: nn.Module, own: Mapping[str, Callable[[], Tensor]], reduced: Mapping[str, Tensor | SavedTensor]
    ) -> None:
        self.spmd.settle()
        parameters = dict(named_parameters(module))
        unknown = [name for name in (*own, *reduced) if name not in parameters]
        if unknown:
            raise CheckpointMismatchError(
                f"the checkpoint holds an accumulated gradient of {unknown[0]!r}, which is no parameter of "
                f"{type(module).__name__}.\nLoad it into the model that it was saved from, or load the weights alone."
            )
        for name, parameter in parameters.items():
            parameter.grad = None
            if name in own or name in reduced:
                total = HostShards(parameter)
                if name in reduced:
                    fill(total.chunks, reduced[name], cast=True)
                if name in own:
                    _add(total.chunks, own[name]())
                parameter.grad = total.tensor()

    def full_tensor(self, value: Any) -> Any:
        if isinstance(value, ChunkedTensor):
            whole = torch.empty(value.shape, dtype=value.dtype)
            for chunk in value.chunks:
                box = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.data.shape, strict=True))
                whole[box] = cast(Tensor, chunk.data)
            return whole
        return super().full_tensor(value)


#: What each device holds of parameters that optimizers hold.
_layouts = WeakTensorKeyDictionary()

_TENSORS = (Tensor, ChunkedTensor, SavedTensor)
_EVERY: dict[str, Any] = {"remove_duplicate": False}


def _materialize(modules: Sequence[nn.Module], dims: Mapping[int, int | None]) -> dict[int, int | None]:
    """Fill what was built on the meta device, and tell the planned dimensions of the parameters that this makes."""
    places = [(one, name, dims.get(id(p))) for one in modules for name, p in one.named_parameters(recurse=False)]
    materialize(modules, torch.device("cpu"))
    return {id(one._parameters[name]): dim for one, name, dim in places}


def _zeros_like(parameter: Tensor) -> Tensor | None:
    layout = _layouts.get(parameter)
    return None if layout is None else HostShards(layout).tensor()


def _add(chunks: ChunkedTensor, whole: Tensor) -> None:
    for chunk in chunks.chunks:
        box = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.data.shape, strict=True))
        cast(Tensor, chunk.data).add_(whole[box])


def _on_host(value: Any) -> Any:
    return held_by_devices(value) if isinstance(value, Tensor) and value.device.type == "xla" else value


def _whole(value: Any) -> Any:
    return value.full() if isinstance(value, SavedTensor) else value
