"""A parameter split into equal ranges of elements, one for each rank."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import pad

from fsdp_core import Runtime
from fsdp_core.state import FlatRange, Part, clean_name

__all__ = ["FlatShard", "places_of"]

#: What a tensor's ``grad`` is, whatever a subclass shows.
_GRAD: Any = Tensor.grad

#: A module that holds a parameter directly, and the name that it holds it by.
Place = tuple[nn.Module, str]


class FlatShard:
    """This rank's shard of one parameter: flattened, padded to a multiple of the world size, and split.

    Args:
        names: The parameter's name and, if it is tied, its further ones.
        parameter: The whole parameter, which keeps its shape and gives its memory up.
        places: All that hold it.
        runtime: The ranks.

    Attributes:
        held: This rank's range, padding included: the parameter that an optimizer holds.
        gathered: The whole parameter, while it is gathered.
        was_trained: Whether ``held`` required a gradient when that was looked at last.
        own: This rank's own whole gradient, not reduced yet.
    """

    def __init__(self, names: list[str], parameter: nn.Parameter, places: list[Place], runtime: Runtime) -> None:
        self.names, self.places, self.shape = names, places, tuple(parameter.shape)
        self.numel, self.length = parameter.numel(), ceil(parameter.numel() / runtime.world_size)
        self.start = min(runtime.rank * self.length, self.numel)
        self.runtime = runtime
        self.held = nn.Parameter(self.run_of(parameter.detach()).clone(), requires_grad=parameter.requires_grad)
        self.gathered: nn.Parameter | None = None
        self.was_trained = self.held.requires_grad
        self.own: Tensor | None = None
        # an optimizer that waits to be re-pointed still holds it
        parameter.data = parameter.data.new_empty(()).expand(self.shape)
        self.put(self.held)

    @property
    def part(self) -> Part:
        """Which elements of the parameter ``held`` begins with; what follows them is padding."""
        length = min(self.length, self.numel - self.start)
        return Part(name=self.names[0], shape=self.shape, range=FlatRange(offset=0, start=self.start, length=length))

    def padded(self, whole: Tensor) -> Tensor:
        """A whole tensor of the parameter's shape as ``length`` elements for each rank, one rank after the other."""
        return pad(whole.reshape(-1), (0, self.length * self.runtime.world_size - self.numel))

    def run_of(self, whole: Tensor) -> Tensor:
        """This rank's run of a whole tensor."""
        return self.padded(whole).view(self.runtime.world_size, self.length)[self.runtime.rank]

    def gathered_run(self) -> Tensor | None:
        """This rank's run of what is gathered; ``None`` while nothing is."""
        return None if self.gathered is None else self.run_of(self.gathered.detach())

    def whole(self) -> Tensor:
        """The whole parameter, from all ranks."""
        return self.runtime.all_gather(self.held.detach()).reshape(-1)[: self.numel].view(self.shape)

    def reduced(self, gradient: Tensor) -> Tensor:
        """This rank's run of the mean of the ranks' gradients."""
        return self.runtime.reduce_scatter(self.padded(gradient).view(self.runtime.world_size, self.length))

    def take_gradient(self, gathered: Tensor) -> None:
        """Keep a whole parameter's gradient, for which the parameter itself may not live long enough."""
        grad = _GRAD.__get__(gathered)
        _GRAD.__set__(gathered, None)  # and not what it may show instead, in a step by hand
        if grad is not None:  # it was frozen since the forward pass
            self.own = grad if self.own is None else self.own + grad

    def put(self, parameter: nn.Parameter) -> None:
        """Let all places hold ``parameter``."""
        for module, name in self.places:
            module._parameters[name] = parameter


def places_of(root: nn.Module) -> Iterator[tuple[nn.Parameter, list[str], list[Place]]]:
    """Each parameter of ``root`` once, with all its names and all that hold it."""
    found: dict[nn.Parameter, tuple[list[str], list[Place]]] = {}
    for prefix, module in root.named_modules(remove_duplicate=False):
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                names, places = found.setdefault(parameter, ([], []))
                names.append(clean_name(f"{prefix}.{attribute}" if prefix else attribute))
                places.append((module, attribute))
    for parameter, (names, places) in found.items():
        yield parameter, names, places
