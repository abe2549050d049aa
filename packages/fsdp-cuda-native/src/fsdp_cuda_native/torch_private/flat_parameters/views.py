"""What the modules of a unit hold while it is gathered: views of the flat parameter, instead of parameters.

``FlatParamHandle._use_unsharded_views`` puts them there, as plain tensors, and ``_use_sharded_views`` puts the
parameters back. With ``use_orig_params=True``, FSDP1 keeps the views of a forward pass in ``_tensors`` until the
backward pass, which gives them new memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from fsdp_core.sharding import GatheredValue
from fsdp_cuda_native.torch_private.flat_parameters.units import handle_of

__all__ = ["ParameterView", "gathered_views", "lacks_views", "needs_gradient", "shows_parameters"]


@dataclass(frozen=True)
class ParameterView:
    """Where a module holds a view of one of its parameters while the unit is gathered.

    Attributes:
        value: What core knows of the gathered parameter: whether it was written to, and whether it is trained.
        module: The module.
        attribute: The name of the parameter in the module.
    """

    value: GatheredValue
    module: nn.Module
    attribute: str

    def find(self) -> Any:
        """What the module holds under the name: a view, the parameter, a user's tensor, or ``None``."""
        attributes = self.module.__dict__
        tensor: Any = attributes["_parameters"].get(self.attribute)
        return attributes.get(self.attribute) if tensor is None else tensor

    def is_followed(self, tensor: Any) -> bool:
        """Whether core follows a tensor as a view of this parameter."""
        return getattr(tensor, "_fsdp_value", None) is self.value


def shows_parameters(unit: FullyShardedDataParallel) -> bool:
    """Whether a unit's modules hold the optimizer's parameters, and not views of the gathered flat parameter."""
    handle = handle_of(unit)
    flat = handle.flat_param
    first = flat._param_infos[0]
    return bool(handle._use_orig_params and first.module._parameters.get(first.param_name) is flat._params[0])


def gathered_views(unit: FullyShardedDataParallel) -> Iterator[tuple[Tensor, nn.Parameter]]:
    """The views that a unit's modules hold instead of the original parameters; none where FSDP1 keeps no originals.

    Yields:
        The view, and the optimizer's parameter that it stands for.
    """
    handle = handle_of(unit)
    flat = handle.flat_param
    for index, info in enumerate(flat._param_infos):
        view = info.module._parameters.get(info.param_name)
        if handle._use_orig_params and view is not None and view is not flat._params[index]:
            yield view, flat._params[index]


def lacks_views(handle: Any) -> bool:
    """Whether FSDP1 has dropped the views that the forward pass has computed with, at the end of another pass."""
    return handle._use_orig_params and any(tensor is None for tensor in handle.flat_param._tensors)


def needs_gradient(view: Any) -> bool:
    """Whether autograd records what is computed with a view; its ``requires_grad`` is that of the user's parameter."""
    required: bool = Tensor.requires_grad.__get__(view)  # type: ignore[attr-defined]
    return required
