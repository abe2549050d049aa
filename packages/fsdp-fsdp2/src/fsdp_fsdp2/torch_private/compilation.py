"""Compilation that keeps a share of the activations, and recomputes the others."""

from __future__ import annotations

from typing import Any

import torch.utils
from torch._functorch import config as functorch_config

__all__ = ["BudgetedCompiler"]


class BudgetedCompiler:
    """A backend of :func:`torch.compile` that keeps a share of the activations.

    torch reads the share from a setting of the process when it compiles. Each share has a backend object of its own:
    torch uses graphs again that the same backend has compiled, for another model of the same classes.

    Args:
        share: The share, from 0 to 1.
        backend: The name of the backend that compiles.
        mode: As in :func:`torch.compile`, for inductor.
        options: As in :func:`torch.compile`, for inductor.
        dynamic: As in :func:`torch.compile`.
    """

    def __init__(self, share: float, backend: str = "inductor", *, mode: Any, options: Any, dynamic: Any) -> None:
        self._share = share
        if backend == "inductor":
            self._compile: Any = torch._TorchCompileInductorWrapper(mode, options, dynamic)
        else:
            self._compile = torch._TorchCompileWrapper(backend, mode, options, dynamic)

    def __call__(self, graph: Any, inputs: Any) -> Any:
        with functorch_config.patch(activation_memory_budget=self._share):
            return self._compile(graph, inputs)
