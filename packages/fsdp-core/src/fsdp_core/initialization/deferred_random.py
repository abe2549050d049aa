"""The random numbers that building a model on the meta device would have drawn, and their order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fsdp_core.devices import random_state, set_random_state

__all__ = ["Draw", "Draws"]


@dataclass(slots=True, eq=False)
class Draw:
    """Random numbers that one operation draws.

    Attributes:
        generator: The generator; ``None`` for the device's.
        follows: The draw that left the device's generator in the state in which this one was recorded, or ``None``.
        seeded: If there is no such draw, the state of the CPU's generator when this one was recorded, and its seed.
        state_before: The state before the draw, by device type.
        state_after: The state after the draw, by device type.
    """

    generator: torch.Generator | None = None
    follows: Draw | None = None
    seeded: tuple[Tensor, int] | None = None  # the state, and the seed
    state_before: dict[str, Tensor] = field(default_factory=dict)
    state_after: dict[str, Tensor] = field(default_factory=dict)

    @contextmanager
    def drawing_first(self, device: torch.device) -> Iterator[None]:
        """A context in which the numbers are drawn for the first time, which advances the generator."""
        device_type = device.type
        if self.generator is None:
            if self.follows is not None:
                set_random_state(device, self.follows.state_after[device_type])
            elif self.seeded is not None:
                _seed(device, *self.seeded)
        self.state_before[device_type] = self._state(device)
        yield
        self.state_after[device_type] = self._state(device)

    @contextmanager
    def drawing_again(self, device: torch.device) -> Iterator[None]:
        """A context in which the same numbers are drawn again; the generator's state is restored afterwards."""
        current_state = self._state(device)
        self._set(device, self.state_before[device.type])
        try:
            yield
        finally:
            self._set(device, current_state)

    def _state(self, device: torch.device) -> Tensor:
        return random_state(device) if self.generator is None else self.generator.get_state()

    def _set(self, device: torch.device, state: Tensor) -> None:
        if self.generator is None:
            set_random_state(device, state)
        else:
            self.generator.set_state(state)


class Draws:
    """The draws of one build, in order.

    Recording a draw draws only one number. So the state of the CPU's generator identifies the last draw, or shows that
    the generator was seeded.
    """

    def __init__(self) -> None:
        self._origin = Draw()  # stands for what was drawn before the first one
        self._start: Tensor | None = None  # the CPU generator's state before the first draw
        self._end: Tensor | None = None  # and after the last one
        self._last = self._origin
        self._draw_of_state: dict[int, Draw] = {}  # the draw that left the CPU generator in a state, by its hash

    def is_continued(self) -> bool:
        """Whether the generator is unchanged since the last draw was recorded."""
        return self._end is not None and torch.equal(self._end, torch.get_rng_state())

    def record(self, generator: torch.Generator | None) -> Draw:
        """Record that random numbers are drawn."""
        draw = Draw(generator)
        if generator is not None:
            return draw
        current_state = torch.get_rng_state()
        if self._start is None:
            self._start = current_state
            self._draw_of_state[_key(current_state)] = self._origin
        draw.follows = self._draw_of_state.get(_key(current_state))
        if draw.follows is None:
            draw.seeded = current_state, torch.initial_seed()
        torch.rand(1)
        self._end = torch.get_rng_state()
        self._last = draw
        self._draw_of_state[_key(self._end)] = draw
        return draw

    @contextmanager
    def drawing_in_order(self, device: torch.device) -> Iterator[None]:
        """A context in which recorded draws are made for the first time: those since the last such context.

        They start from the generator's state at the first recorded draw; if the generator was used or seeded since,
        from its current state.
        """
        device_type = device.type
        if device_type not in self._origin.state_after:
            untouched = device_type == "cpu" and self._start is not None and self.is_continued()
            state = self._start if untouched and self._start is not None else random_state(device)
            self._origin.state_after[device_type] = state
        yield
        if device_type in self._last.state_after:
            set_random_state(device, self._last.state_after[device_type])


def _key(state: Tensor) -> int:
    return hash(state.numpy().tobytes())


def _seed(device: torch.device, state: Tensor, seed: int) -> None:
    if device.type == "cpu":
        set_random_state(device, state)
    else:
        torch.get_device_module(device).manual_seed(seed)
