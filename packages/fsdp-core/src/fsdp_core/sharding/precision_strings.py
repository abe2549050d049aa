"""What a Lightning precision string means for shards, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fsdp_core.errors import UnsupportedCapabilityError

__all__ = ["PRECISIONS", "ShardPrecision"]


@dataclass(frozen=True, kw_only=True)
class ShardPrecision:
    """The dtypes of sharded training.

    Attributes:
        name: Lightning's precision string, such as ``"bf16-mixed"``.
        storage: The dtype of the shards, and so of sharded gradients and optimizer state.
        compute: The dtype of unsharded parameters; ``None`` for ``storage``.
        reduce: The dtype in which gradients are reduced; ``None`` for ``compute``.
        scaled: Whether the loss is scaled, as fp16 gradients need.
        autocast: Whether :class:`torch.autocast` chooses between ``compute`` and fp32 for each operation.

    Example:
        >>> mixed = ShardPrecision.named("bf16-mixed")
        >>> mixed.storage, mixed.compute, mixed.reduce, mixed.scaled
        (torch.float32, torch.bfloat16, torch.float32, False)
        >>> ShardPrecision.named("16-true").storage
        torch.float16
    """

    name: str = "32-true"
    storage: torch.dtype = torch.float32
    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    scaled: bool = False
    autocast: bool = False

    @classmethod
    def named(cls, name: str) -> ShardPrecision:
        """Look up what a Lightning precision string means.

        Args:
            name: One of :data:`PRECISIONS`.

        Raises:
            UnsupportedCapabilityError: Sharded strategies don't support this string.
        """
        try:
            return PRECISIONS[str(name)]
        except KeyError:
            raise UnsupportedCapabilityError(
                f"precision={name!r} can't be used with a sharded strategy.\n"
                f"Write one of: {', '.join(repr(p) for p in PRECISIONS)}."
            ) from None

    def check_device(self, device: torch.device, *, bf16_supported: bool) -> None:
        """Refuse a dtype that the device can't compute in.

        Args:
            device: Where the model runs.
            bf16_supported: Whether that device computes in bf16 itself, without emulation.

        Raises:
            UnsupportedCapabilityError: It can't.
        """
        if self.input_dtype is torch.bfloat16 and not bf16_supported:
            raise UnsupportedCapabilityError(
                f"precision={self.name!r} can't be used on {device}: it doesn't compute in bfloat16.\n"
                f"Write precision='{'16-mixed' if self.autocast else '16-true'}', or precision='32-true'."
            )

    @property
    def input_dtype(self) -> torch.dtype:
        """The dtype that floating-point inputs of the model are converted to."""
        return self.compute or self.storage


PRECISIONS: dict[str, ShardPrecision] = {
    "32-true": ShardPrecision(),
    "bf16-true": ShardPrecision(name="bf16-true", storage=torch.bfloat16),
    "16-true": ShardPrecision(name="16-true", storage=torch.float16),
    "bf16-mixed": ShardPrecision(name="bf16-mixed", compute=torch.bfloat16, reduce=torch.float32, autocast=True),
    "16-mixed": ShardPrecision(
        name="16-mixed", compute=torch.float16, reduce=torch.float32, scaled=True, autocast=True
    ),
}
