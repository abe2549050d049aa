"""Layers that are sharded as they are built: a rank keeps its part of each, and no model is ever there as a whole."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor, nn

from fsdp_core.errors import ShardingError
from fsdp_core.runtime import Runtime

__all__ = ["BuiltInParts"]


class _Kept(NamedTuple):
    parameter: nn.Parameter
    part: Tensor
    digest: str
    stand_in: int
    version: int


class BuiltInParts:
    """This rank's parts of parameters whose layers were marked while they were built.

    What is left of such a parameter has its shape, takes no memory, and reads as NaN.
    """

    def __init__(self) -> None:
        self._kept: dict[int, _Kept] = {}

    def take(self, module: nn.Module, runtime: Runtime) -> None:
        """Keep a part of each of a layer's parameters. No rank waits for another here.

        Args:
            module: The layer, built with values in host memory; what was built elsewhere is left alone.
            runtime: The ranks.
        """
        for parameter in module.parameters():
            if runtime.world_size == 1 or id(parameter) in self._kept or not _is_plain(parameter):
                continue
            flat = parameter.detach().reshape(-1)
            length = -(-flat.numel() // runtime.world_size)
            part = flat[length * runtime.rank :][:length].clone()
            values: Any = flat.view(torch.uint8).numpy()
            digest = xxhash.xxh3_64_hexdigest(values)
            stand_in = torch.full((), torch.nan, dtype=parameter.dtype).expand(parameter.shape)
            parameter.data = stand_in
            self._kept[id(parameter)] = _Kept(parameter, part, digest, stand_in.data_ptr(), parameter._version)

    def whole(self, parameter: nn.Parameter, runtime: Runtime) -> Tensor | None:
        """A parameter's values, put together from all ranks' parts; ``None`` if it was not taken. All ranks call it.

        Raises:
            ShardingError: It was changed after its layer was marked, or ranks have built it with different values.
        """
        kept = self._kept.pop(id(parameter), None)
        if kept is None:
            return None
        shape = tuple(parameter.shape)
        changed = parameter._version != kept.version or parameter.data_ptr() != kept.stand_in
        told = runtime.gather_objects((kept.part, kept.digest, changed))
        if any(of_rank[2] for of_rank in told):
            raise ShardingError(
                f"a parameter of shape {shape} was changed after wrap(), under which ranks keep their parts of a layer "
                "as soon as it is built.\n"
                "Give the layer its values first: build it, initialise it, and wrap() it last."
            )
        if len({of_rank[1] for of_rank in told}) > 1:
            raise ShardingError(
                f"ranks have built a parameter of shape {shape} with different values, and each has kept its part.\n"
                "Write seed_everything(...) before trainer.fit() or fabric.launch(), or build it with empty_init=True."
            )
        return torch.cat([of_rank[0] for of_rank in told]).view(shape)


def _is_plain(parameter: nn.Parameter) -> bool:
    return parameter.device.type == "cpu" and parameter.is_floating_point() and parameter.numel() > 0
