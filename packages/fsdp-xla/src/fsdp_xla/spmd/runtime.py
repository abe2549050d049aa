"""One process that drives all XLA devices of a host: world size 1, and the mesh over which tensors are sharded."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch import Tensor

from fsdp_core import ReduceOp, Runtime, StrategyUnavailableError, UnsupportedCapabilityError
from fsdp_xla.cpu_ranks import uses_cpu_devices
from fsdp_xla.seeding import follow_manual_seed, follow_seed_from_before
from fsdp_xla.spmd.layer_norms import cut_layer_norms
from fsdp_xla.torch_xla_private.devices import check_autograd, runtime_is_started, settle, sync
from fsdp_xla.torch_xla_private.sharded_tensors import used_without_spmd

__all__ = ["FSDP_AXIS", "MODEL_AXIS", "XLASPMDRuntime"]

#: The mesh axis over which parameters and batches are sharded.
FSDP_AXIS = "fsdp"
#: The mesh axis over which a tensor plan shards weights.
MODEL_AXIS = "model"


class XLASPMDRuntime(Runtime):
    """A world of one rank, whose device represents all devices of the host.

    Args:
        tensor_parallel_size: The number of devices that share one part of the batch; the mesh is 2-D unless it is 1.
    """

    device = torch.device("xla", 0)

    def __init__(self, tensor_parallel_size: int = 1) -> None:
        if type(tensor_parallel_size) is not int or tensor_parallel_size < 1:
            raise UnsupportedCapabilityError(
                f"tensor_parallel_size={tensor_parallel_size!r} is not a number of devices.\nWrite 1, or more."
            )
        self.tensor_parallel_size = tensor_parallel_size
        self._expected_devices: int | None = None
        self._device_mesh: Any = None

    def expect(self, devices: int, hosts: int = 1) -> None:
        """Record the requested number of devices, which :meth:`start` compares with the actual number."""
        if hosts != 1:
            raise UnsupportedCapabilityError(
                f"num_nodes={hosts} can't be used with 'xla_fsdp_spmd', which drives the devices of one host.\n"
                "Write num_nodes=1, or strategy='xla_fsdp'."
            )
        self._expected_devices = devices

    @property
    def device_mesh(self) -> Any:
        """The mesh of all devices: the axis ``"fsdp"``, and ``"model"`` if tensors are parallel too."""
        assert self._device_mesh is not None, "XLASPMDRuntime.start() comes before its mesh"
        return self._device_mesh

    def start(
        self,
        *,
        rank: int = 0,
        local_rank: int = 0,
        world_size: int = 1,
        device: torch.device | None = None,
        address: str = "",
        port: int = 0,
        timeout: timedelta | None = None,
    ) -> None:
        """Turn SPMD on, for the rest of the process, and build the mesh. The arguments are ignored.

        Raises:
            StrategyUnavailableError: XLA was used without SPMD before, or has another number of devices than requested.
            UnsupportedCapabilityError: ``tensor_parallel_size`` does not divide the number of devices.
        """
        if used_without_spmd():
            raise StrategyUnavailableError(
                "'xla_fsdp_spmd' can't start: XLA has tensors in this process already, on single devices.\n"
                "Build the model and the data on the CPU, or write torch_xla.runtime.use_spmd() before the first "
                "tensor on an XLA device."
            )
        if uses_cpu_devices() and self._expected_devices is not None and not runtime_is_started():
            os.environ.setdefault("CPU_NUM_DEVICES", str(self._expected_devices))
        if not xr.is_spmd():
            xr.use_spmd()
        count = xr.global_runtime_device_count()
        if xr.process_count() > 1:
            raise UnsupportedCapabilityError(
                f"'xla_fsdp_spmd' drives the devices of one host, and XLA runs in {xr.process_count()} processes.\n"
                "Use strategy='xla_fsdp' on several hosts."
            )
        if self._expected_devices not in (None, count):
            cpu_hint = (
                f"set CPU_NUM_DEVICES={self._expected_devices} before Python starts, or " if uses_cpu_devices() else ""
            )
            raise StrategyUnavailableError(
                f"devices={self._expected_devices} was requested, and XLA has {count}, all of which SPMD drives.\n"
                f"To continue, {cpu_hint}write devices={count}."
            )
        size = self.tensor_parallel_size
        if count % size:
            raise UnsupportedCapabilityError(
                f"tensor_parallel_size={size} does not divide the {count} devices into groups.\n"
                f"Write a number that divides {count}."
            )
        if self._device_mesh is None:
            shape, axes = ((count,), (FSDP_AXIS,)) if size == 1 else ((count // size, size), (FSDP_AXIS, MODEL_AXIS))
            self._device_mesh = xs.Mesh(np.arange(count), shape, axes)
        xs.set_global_mesh(self._device_mesh)
        check_autograd(
            self.device,
            "xla_fsdp_spmd",
            "Write `torch_xla.runtime.use_spmd(); torch_xla.sync()` at the top of the script.",
        )
        follow_seed_from_before(self.set_device_random_state)
        cut_layer_norms()
        follow_manual_seed(self.set_device_random_state)

    def described(self) -> str:
        count = int(np.prod(list(self.device_mesh.shape().values())))
        return f"{count} device{'s' if count > 1 else ''} of one process (XLA)"

    def stop(self) -> None:
        """Nothing to do: SPMD lasts as long as the process."""

    def all_reduce(self, tensor: Tensor, op: ReduceOp | str = "mean", group: Any | None = None) -> Tensor:
        return tensor

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        return tensor.unsqueeze(0)

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        return obj

    def gather_objects(self, obj: Any) -> list[Any]:
        return [obj]

    def barrier(self) -> None:
        """Nothing to do: there is one rank."""

    def side_channel(self) -> Runtime:
        return self  # one rank has no communication that another thread could disturb

    def run_pending(self) -> None:
        """Run what XLA has recorded, as one program."""
        sync()

    def settle(self) -> None:
        """Run what is pending and wait for completion: only then can shards be read or replaced."""
        settle()

    def device_random_state(self) -> int:
        return int(xm.get_rng_state())

    def set_device_random_state(self, state: Any) -> None:
        xm.set_rng_state(int(state))
