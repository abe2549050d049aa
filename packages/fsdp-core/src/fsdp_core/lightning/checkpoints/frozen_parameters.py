"""Leaves out of checkpoints what was not trained (``save_frozen=False``), and restores it from the module or a base."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_core.checkpoint.format.base_tensors import BaseSource
from fsdp_core.checkpoint.left_out.base_values import base_values_of
from fsdp_core.checkpoint.left_out.named_base import source_of_name
from fsdp_core.checkpoint.left_out.observing import Observed
from fsdp_core.checkpoint.left_out.restoring import left_out_in, with_own_values
from fsdp_core.devices import has_addresses
from fsdp_core.sharding.options import ShardingOptions
from fsdp_core.sharding.sharded import Sharded, StateTensor
from fsdp_core.state.chunks import chunked
from fsdp_core.state.fqn import clean_name
from fsdp_core.state.layout import Layout
from fsdp_core.state.left_out import LeftOut
from fsdp_core.torch_private.tensors import is_fake

__all__ = ["FrozenParameters"]

#: The part of the time of a save that may be spent on reading bytes to which nothing points.
_WALK = 0.01
_INSTEAD = (
    "Build the module from the base that the run began with, before it is restored; or name that base, a folder or a "
    "file, and its values are read from there: {name}(frozen_base='FOLDER')."
)


class FrozenParameters:
    """Which tensors of a strategy's modules are left out of its checkpoints.

    Args:
        options: The strategy's options.
        class_name: The name of the strategy's class, for messages.
    """

    def __init__(self, options: ShardingOptions, class_name: str) -> None:
        self._leaves_parameters, self._leaves_buffers = not options.save_frozen, not options.save_unchanged_buffers
        base = options.frozen_base
        self.base = None if base is None else os.fspath(base)
        self._class_name = class_name
        self._has_warned = False
        self._last_save_seconds = 0.0

    @property
    def are_left_out(self) -> bool:
        """Whether anything may be left out."""
        return self._leaves_parameters or self._leaves_buffers

    @contextmanager
    def timed_save(self) -> Iterator[None]:
        """A context in which a checkpoint is saved."""
        start = time.perf_counter()
        yield
        self._last_save_seconds = time.perf_counter() - start

    def note(self, sharded: Sharded) -> None:
        """Take a module's values for those of its base, unless that was done before. No rank waits for another."""
        if self.are_left_out:
            observed = _observe(sharded, sharded.model_state(), sharded.layout())
            if observed is not None:
                base_values_of(sharded.root).note(observed)

    def leave_out(
        self, sharded: Sharded, state: Mapping[str, Any], own_state: Mapping[str, Any], aliases: Mapping[str, str]
    ) -> tuple[Mapping[str, Any], BaseSource | None]:
        """Replace what has the values of the base by what stands for it. All ranks must call it.

        Args:
            sharded: The module.
            state: By name: what is about to be saved, which hooks may have changed.
            own_state: By name: what the module has. Only what the state has unchanged from it is left out.
            aliases: The first name of each tied tensor, by each of its other names in the state.

        Returns:
            The state, and where the base comes from, if that is known.
        """
        if not self.are_left_out:
            return state, None
        layout = sharded.layout()
        observed = _observe(sharded, own_state, layout)
        if observed is None:
            return state, None
        base = base_values_of(sharded.root)
        base.note(observed)
        candidates = [name for name in self._candidates(sharded, layout) if name in observed]
        names = [name for name in candidates if state.get(name) is own_state[name]]
        unchanged = base.digests_of_unchanged(
            names, observed, sharded.runtime, seconds_to_walk=_WALK * self._last_save_seconds
        )
        if not unchanged:
            self._warn_of_nothing(sharded, names)
        kept = {
            name: LeftOut(shape=observed[name].part.shape, dtype=observed[name].part.dtype, digest=digest)
            for name, digest in unchanged.items()
        }
        for alias, name in aliases.items():
            if name in kept and state.get(alias) is own_state.get(alias):
                kept[alias] = kept[name]
        return {name: kept.get(name, value) for name, value in state.items()}, self._source(sharded)

    def _candidates(self, sharded: Sharded, layout: Layout) -> list[str]:
        """The names of what is frozen now."""
        names: list[str] = []
        if self._leaves_parameters:
            for parameter, parts in layout.items():
                names += [part.name for part in parts if not parameter.requires_grad]
        if self._leaves_buffers:
            names += [clean_name(name) for name, _ in sharded.module.named_buffers()]
        return names

    def _warn_of_nothing(self, sharded: Sharded, names: list[str]) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        if names:
            reason = (
                f"all {len(names)} that are frozen, such as {names[0]!r}, have other values than before the first step"
            )
        else:
            reason = "nothing of it is frozen: call requires_grad_(False) on what is not trained"
        if sharded.runtime.rank == 0:
            warnings.warn(
                f"save_frozen=False leaves nothing out of the checkpoints of {sharded.plan.class_name}, since {reason}."
                "\nEverything is saved.",
                stacklevel=2,
            )

    def _source(self, sharded: Sharded) -> BaseSource | None:
        if self.base is not None:
            return source_of_name(self.base)
        return base_values_of(sharded.root).source or _source_of_module(sharded.module)

    def restore(
        self, sharded: Sharded, state: Mapping[str, Any], load_base: Callable[[], None] | None = None
    ) -> Mapping[str, Any]:
        """Return a model's state to load, in which what the checkpoint leaves out is there. All ranks must call it.

        Args:
            sharded: The module.
            state: What a checkpoint has of it.
            load_base: Fills the module from the base, before it is compared; ``None`` if nothing in the run does.

        Raises:
            CheckpointMismatchError: The module has another base, and none is named, or another one.
        """
        left_out = {tensor.key: tensor for tensor in left_out_in(state)}
        if load_base is not None and (left_out or self.are_left_out):
            load_base()
        self.note(sharded)
        if not left_out:
            return state
        own_state = sharded.model_state()
        restored = with_own_values(
            state,
            own_state,
            runtime=sharded.runtime,
            base=self.base,
            instead=_INSTEAD.format(name=self._class_name),
        )
        if self.are_left_out:  # otherwise nothing was noted that later writes could be compared with
            base = base_values_of(sharded.root)
            for name, saved in state.items():
                digest = getattr(saved, "digest", None)
                if digest is not None and getattr(own_state.get(name), "dtype", None) == saved.dtype:
                    base.expect(name, digest)
        return restored

    def restore_unsharded(self, state: Mapping[str, Any], own_state: Mapping[str, Any], runtime: Any) -> dict[str, Any]:
        """As :meth:`restore`, of a module that was not set up, and of which all ranks have the whole."""
        instead = _INSTEAD.format(name=self._class_name)
        return with_own_values(state, own_state, runtime=runtime, base=self.base, instead=instead)


def _observe(sharded: Sharded, state: Mapping[str, Any], layout: Layout) -> dict[str, Observed] | None:
    """What is observed of the tensors of a module's state, by name; ``None`` if they have no values, in a rehearsal."""
    counters: dict[str, list[Tensor]] = {}
    with torch.no_grad():
        for parameter, parts in layout.items():
            own_counters: list[Tensor] = [parameter]
            if isinstance(parameter, DTensor):
                own_counters.append(parameter.to_local())
            for part in parts:
                counters.setdefault(part.name, []).extend(own_counters)
    is_live = all(map(has_addresses, layout))
    observed: dict[str, Observed] = {}
    for name, value in state.items():
        if not isinstance(value, StateTensor):
            continue
        own_part = chunked(value, rank=sharded.runtime.rank)
        boxes = [chunk.data for chunk in own_part.chunks if isinstance(chunk.data, Tensor)]
        if any(is_fake(box) or box.is_meta for box in boxes):
            return None
        own = [value] if isinstance(value, Tensor) else []
        observed[name] = Observed(part=own_part, counters=[*own, *counters.get(name, ())], is_live=is_live)
    return observed


def _source_of_module(module: nn.Module) -> BaseSource | None:
    """Where a model of transformers says that it comes from."""
    for part in module.modules():
        name = getattr(part, "name_or_path", None)
        if isinstance(name, str) and name:
            return source_of_name(name)
    return None
