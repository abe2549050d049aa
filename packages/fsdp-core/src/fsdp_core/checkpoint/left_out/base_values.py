"""Knows which tensors of a sharded module have the values still that it was built with, and their digests."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from weakref import WeakKeyDictionary

from torch import nn

from fsdp_core.checkpoint.collective import run_on_all
from fsdp_core.checkpoint.format.base_tensors import BaseSource
from fsdp_core.checkpoint.left_out.observing import Observation, Observed, hash_all, observe
from fsdp_core.runtime import Runtime
from fsdp_core.state.chunks import ChunkedTensor
from fsdp_core.state.digests import digest_text, local_sums

__all__ = ["BaseValues", "base_values_of", "digests"]

_HALF = 2**32


def digests(parts: Sequence[ChunkedTensor], runtime: Runtime, action: str) -> list[str]:
    """Return the digests of tensors of which each rank has a part. All ranks must call it.

    Args:
        parts: This rank's parts, of the same tensors on every rank.
        runtime: The ranks.
        action: What it is for, for errors.
    """
    sums = run_on_all(runtime, action, lambda: local_sums(parts))
    # in halves, whose sums fit 64 bits
    totals = runtime.total([half for number in sums for half in (number % _HALF, number // _HALF % _HALF)])
    return [digest_text(low + high * _HALF) for low, high in zip(totals[::2], totals[1::2], strict=True)]


class BaseValues:
    """The values that a module was built with, by the names of its state.

    They are noted once, before the first step or the first load of a checkpoint. From then on a tensor is left out of
    checkpoints as long as it has these values.

    Attributes:
        source: Where the values come from, if that is known.
    """

    def __init__(self) -> None:
        self.source: BaseSource | None = None
        self._are_noted = False
        #: What each tensor was when it was looked at last, and whether these were the values of the base.
        self._latest: dict[str, Observation] = {}
        self._is_base: dict[str, bool] = {}
        self._digests: dict[str, str] = {}
        self._next_piece = (0, 0)

    def note(self, observed: Mapping[str, Observed]) -> None:
        """Take the values for those of the base, unless that was done before."""
        if not self._are_noted:
            self._are_noted = True
            self._observe(observed)
            self._is_base = dict.fromkeys(observed, True)

    def adopt(self, observed: Mapping[str, Observed], source: BaseSource) -> None:
        """Take the values of some tensors for those of the base, which they were just read from.

        Args:
            observed: The tensors.
            source: Where they come from.
        """
        self.source = source
        if self._are_noted:  # otherwise they are noted with the others
            self._observe(observed)
            for name in observed:
                self._is_base[name] = True
                self._digests.pop(name, None)

    def expect(self, name: str, digest: str) -> None:
        """Take it that a tensor has the values of the base from now on, which have a digest. The next save compares."""
        self._digests[name] = digest
        self._latest.pop(name, None)

    def digests_of_unchanged(
        self,
        names: Iterable[str],
        observed: Mapping[str, Observed],
        runtime: Runtime,
        *,
        seconds_to_walk: float = 0.0,
    ) -> dict[str, str]:
        """Return the digests of those tensors that have the values of the base. All ranks must call it.

        Args:
            names: The tensors, the same on every rank.
            observed: All tensors.
            runtime: The ranks.
            seconds_to_walk: How long this rank may read bytes that nothing points to.
        """
        candidates = list(names)
        has_moved = self._have_moved(candidates, observed)
        walked = self._walk([name for name in candidates if self._is_base.get(name)], observed, seconds_to_walk)
        has_moved = [moved or name in walked for name, moved in zip(candidates, has_moved, strict=True)]
        (ranks_with_moves,) = runtime.total([any(has_moved)])
        if ranks_with_moves:
            counts = runtime.total(list(map(int, has_moved)))
            moved_names = [name for name, count in zip(candidates, counts, strict=True) if count]
            self._look_again(moved_names, observed, runtime)
        unknown = [name for name in candidates if self._is_base[name] and name not in self._digests]
        self._digests.update(self._digests_now(unknown, observed, runtime))
        return {name: self._digests[name] for name in candidates if self._is_base[name]}

    def _observe(self, observed: Mapping[str, Observed]) -> None:
        for (name, tensor), hashes in zip(observed.items(), hash_all(list(observed.values())), strict=True):
            self._latest[name] = observe(tensor, hashes)

    def _have_moved(self, names: Sequence[str], observed: Mapping[str, Observed]) -> list[bool]:
        """Whether each tensor was written to since it was looked at last, on this rank."""
        on_accelerators = [name for name in names if name in self._latest and not observed[name].is_on_host]
        hashes = dict(zip(on_accelerators, hash_all([observed[name] for name in on_accelerators]), strict=True))
        has_moved = []
        for name in names:
            latest = self._latest.get(name)
            same = None if latest is None else latest.is_same(observed[name], hashes.get(name))
            if same is not None:
                self._latest[name] = same
            has_moved.append(same is None)
        return has_moved

    def _look_again(self, names: Sequence[str], observed: Mapping[str, Observed], runtime: Runtime) -> None:
        """Find out which of the tensors that were written to on some rank have the values of the base all the same."""
        current = self._digests_now([name for name in names if name in self._digests], observed, runtime)
        for name in names:
            self._is_base[name] = name in current and current[name] == self._digests[name]
        self._observe({name: observed[name] for name in names})

    def _digests_now(
        self, names: Sequence[str], observed: Mapping[str, Observed], runtime: Runtime
    ) -> Mapping[str, str]:
        if not names:
            return {}
        parts = [observed[name].part for name in names]
        return dict(zip(names, digests(parts, runtime, "comparing frozen parameters with the base"), strict=True))

    def _walk(self, names: Sequence[str], observed: Mapping[str, Observed], seconds: float) -> set[str]:
        """Read bytes of the tensors for some time, from where the last walk ended, and return those that differ."""
        differing: set[str] = set()
        if seconds <= 0 or not names:
            return differing
        end = time.perf_counter() + seconds
        index, piece = self._next_piece
        pieces_left = sum(self._latest[name].count_pieces() for name in names if name in self._latest)
        while pieces_left > 0:
            name = names[index % len(names)]
            latest = self._latest.get(name)
            if latest is None or piece >= latest.count_pieces():
                index, piece = index + 1, 0
                continue
            if not latest.is_piece_same(observed[name], piece):
                differing.add(name)
            piece += 1
            pieces_left -= 1
            if time.perf_counter() >= end:
                break
        self._next_piece = (index % len(names), piece)
        for name in differing:
            warnings.warn(
                f"{name!r} is frozen, and was written to in a way that torch does not count, such as through .data or "
                "numpy. It is saved from now on; checkpoints that were saved since that write leave it out, and have "
                "the value of the base for it.\nWrite to parameters themselves, under torch.no_grad().",
                stacklevel=2,
            )
        return differing


#: By the root of a sharded module; a copy of the root has none.
_values: WeakKeyDictionary[nn.Module, BaseValues] = WeakKeyDictionary()


def base_values_of(root: nn.Module) -> BaseValues:
    """Return what is known of the values that a sharded module was built with.

    Args:
        root: Its root.
    """
    if root not in _values:
        _values[root] = BaseValues()
    return _values[root]
