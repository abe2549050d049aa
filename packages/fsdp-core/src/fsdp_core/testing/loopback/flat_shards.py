"""A parameter split into equal ranges of elements, one for each rank."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import pad

from fsdp_core import Runtime
from fsdp_core.state import FlatRange, Part, clean_name

__all__ = ["FlatShard", "parameters_with_owners"]

#: The descriptor of a tensor's ``grad``, also where a subclass of Tensor shows something else.
_GRAD: Any = Tensor.grad

#: A module that holds a parameter directly, and the name that it holds it by.
Owner = tuple[nn.Module, str]


class FlatShard:
    """This rank's shard of one parameter: flattened, padded to a multiple of the world size, and split.

    Args:
        names: All names of the parameter; a tied parameter has several.
        parameter: The full parameter. It keeps its shape, and its memory is freed.
        owners: The modules that hold it, each with its attribute.
        runtime: The ranks.

    Attributes:
        local: This rank's range with its padding: the parameter that an optimizer trains.
        gathered: The full parameter while it is gathered; ``None`` otherwise.
        was_trained: Whether ``local`` required a gradient when :class:`LoopbackSharded` last compared it.
        gradient: The full gradient of this rank's backward passes, before it is reduced.
    """

    def __init__(self, names: list[str], parameter: nn.Parameter, owners: list[Owner], runtime: Runtime) -> None:
        self.names = names
        self.owners = owners
        self.shape = tuple(parameter.shape)
        self.numel = parameter.numel()
        self.length = ceil(parameter.numel() / runtime.world_size)
        self.start = min(runtime.rank * self.length, self.numel)
        self.runtime = runtime
        self.local = nn.Parameter(self.local_range(parameter.detach()).clone(), requires_grad=parameter.requires_grad)
        self.gathered: nn.Parameter | None = None
        self.was_trained = self.local.requires_grad
        self.gradient: Tensor | None = None
        # An optimizer still holds it until it is re-pointed, so only its memory is freed.
        parameter.data = parameter.data.new_empty(()).expand(self.shape)
        self.give_to_owners(self.local)

    @property
    def part(self) -> Part:
        """The elements of the parameter at the beginning of ``local``; the rest of it is padding."""
        length = min(self.length, self.numel - self.start)
        return Part(name=self.names[0], shape=self.shape, range=FlatRange(offset=0, start=self.start, length=length))

    def padded(self, full: Tensor) -> Tensor:
        """Flatten a tensor of the parameter's shape, and pad it to ``length`` elements for each rank."""
        return pad(full.reshape(-1), (0, self.length * self.runtime.world_size - self.numel))

    def local_range(self, full: Tensor) -> Tensor:
        """This rank's range of a tensor of the parameter's shape."""
        return self.padded(full).view(self.runtime.world_size, self.length)[self.runtime.rank]

    def gathered_range(self) -> Tensor | None:
        """This rank's range of the gathered parameter; ``None`` while it is not gathered."""
        return None if self.gathered is None else self.local_range(self.gathered.detach())

    def all_gather(self) -> Tensor:
        """The full parameter, from all ranks. All ranks must call it."""
        return self.runtime.all_gather(self.local.detach()).reshape(-1)[: self.numel].view(self.shape)

    def reduce_scatter(self, gradient: Tensor) -> Tensor:
        """This rank's range of the mean of the ranks' gradients. All ranks must call it."""
        return self.runtime.reduce_scatter(self.padded(gradient).view(self.runtime.world_size, self.length))

    def copy_requires_grad(self) -> None:
        """Let the gathered parameter, if there is one, require a gradient as ``local`` does."""
        if self.gathered is not None:
            self.was_trained = self.local.requires_grad
            self.gathered.requires_grad_(self.was_trained)

    def take_gradient(self, gathered: Tensor) -> None:
        """Add the gathered parameter's gradient to ``gradient``: the parameter may be freed before the reduction."""
        # By the descriptor: in a manual step, the attribute may show a shard's gradient.
        grad = _GRAD.__get__(gathered)
        _GRAD.__set__(gathered, None)
        if grad is not None:  # None if the parameter was frozen after the forward pass
            self.gradient = grad if self.gradient is None else self.gradient + grad

    def give_to_owners(self, parameter: nn.Parameter) -> None:
        """Make ``parameter`` the owners' attribute."""
        for module, name in self.owners:
            module._parameters[name] = parameter


def parameters_with_owners(root: nn.Module) -> Iterator[tuple[nn.Parameter, list[str], list[Owner]]]:
    """Each parameter of ``root`` once, with all its names and its owners."""
    by_parameter: dict[nn.Parameter, tuple[list[str], list[Owner]]] = {}
    for prefix, module in root.named_modules(remove_duplicate=False):
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                names, owners = by_parameter.setdefault(parameter, ([], []))
                names.append(clean_name(f"{prefix}.{attribute}" if prefix else attribute))
                owners.append((module, attribute))
    for parameter, (names, owners) in by_parameter.items():
        yield parameter, names, owners
