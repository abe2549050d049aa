"""``strategy="xla_fsdp"`` for Fabric."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, ClassVar, Literal

import torch
from lightning.fabric.accelerators import Accelerator
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.plugins.precision import Precision

from fsdp_core.lightning.fabric import ShardedFabricStrategy
from fsdp_core.lightning.options import refuse_unknown_options
from fsdp_core.wrapping import ActivationCheckpointingPolicy, WrapPolicy
from fsdp_xla.backend import XLABackend
from fsdp_xla.launchers import FabricXLALauncher
from fsdp_xla.options import ALWAYS, INSTEAD, PASSED_ON, check_sequential_save, not_passed_on
from fsdp_xla.ranks import XLADeviceRanks, XLARanks
from fsdp_xla.runtime import XLARuntime
from fsdp_xla.torch_xla_private import sync

__all__ = ["XLAFSDPStrategy"]


class XLAFSDPStrategy(XLADeviceRanks, ShardedFabricStrategy):
    """Shards modules with torch_xla's ``XlaFullyShardedDataParallel`` under Fabric, one rank per XLA device.

    ``Fabric(strategy="xla_fsdp")`` is this class with its defaults. With several devices the training goes into a
    function, ``fabric.launch(train)``, which every rank calls.

    Args:
        accelerator: As in Lightning.
        parallel_devices: As in Lightning.
        checkpoint_io: As in Lightning; for ``state_dict_type="full"`` only.
        precision: A Lightning precision plugin; ``Fabric(precision="bf16-mixed")`` is the usual way.
        auto_wrap_policy: Which submodules are gathered and freed together: a set of classes, a function
            ``module -> bool``, one of torch_xla's or torch's policies, ``"auto"`` for the blocks repeated in
            ``ModuleList`` s, or ``None`` for the root alone.
        activation_checkpointing_policy: Which submodules recompute their activations in the backward pass: a set of
            classes or a function ``module -> bool``.
        state_dict_type: ``"sharded"`` for checkpoint folders that every rank writes its part of, ``"full"`` for one
            file gathered on rank 0.
        sequential_save: Whether ranks of a host save one after another, so that no more than a part of one rank's state
            is in host memory at a time.
        timeout: How long a rank waits for the others; half an hour when ``None``.
        async_save: Whether a save returns when the state is copied to host memory, and the checkpoint is written behind
            training.
        **kwargs: Options of ``XlaFullyShardedDataParallel``; see :data:`fsdp_xla.options.PASSED_ON`.

    Raises:
        UnsupportedCapabilityError: An option is unknown, or can't be used.
    """

    backend: XLABackend
    runtime: XLARuntime
    launcher_class: ClassVar[Any] = FabricXLALauncher

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision: Precision | None = None,
        auto_wrap_policy: WrapPolicy | None = "auto",
        activation_checkpointing_policy: ActivationCheckpointingPolicy | None = None,
        state_dict_type: Literal["sharded", "full"] = "sharded",
        sequential_save: bool = False,
        *,
        timeout: timedelta | None = None,
        async_save: bool = False,
        **kwargs: Any,
    ) -> None:
        refuse_unknown_options("xla_fsdp", XLAFSDPStrategy, not_passed_on(kwargs), INSTEAD, PASSED_ON, ALWAYS)
        kwargs = {name: value for name, value in kwargs.items() if name in PASSED_ON}
        check_sequential_save(sequential_save, async_save)
        self.sequential_save = sequential_save
        super().__init__(
            XLABackend(
                auto_wrap_policy=auto_wrap_policy,
                activation_checkpointing_policy=activation_checkpointing_policy,
                sequential_save=sequential_save,
                **kwargs,
            ),
            strategy_name="xla_fsdp",
            runtime=XLARuntime(),
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=XLARanks(),
            checkpoint_io=checkpoint_io,
            precision=precision,
            state_dict_type=state_dict_type,
            timeout=timeout,
            async_save=async_save,
        )

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        with self.backend.first_steps.of(optimizer):
            output = super().optimizer_step(optimizer, **kwargs)
        sync()
        return output
