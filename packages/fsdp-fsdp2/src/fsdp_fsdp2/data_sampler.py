"""The option ``data_sampler``: a function that replaces a loader, to decide what each data-parallel rank sees."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from fsdp_core import ShardingError, UnsupportedCapabilityError

__all__ = ["DataSampler", "apply_data_sampler", "check_data_sampler"]

#: Given a loader, returns the loader to use instead.
DataSampler = Callable[[Any], Any]


def check_data_sampler(data_sampler: object) -> DataSampler | None:
    """Refuse what can't be called with a loader.

    Raises:
        UnsupportedCapabilityError: It can't be called. For an object of NeMo's, the message names its method.
    """
    if data_sampler is None or callable(data_sampler):
        return data_sampler
    is_of_nemo = callable(getattr(data_sampler, "transform_dataloader", None))
    accepted = "data_sampler.transform_dataloader" if is_of_nemo else "a function that takes a loader and returns one"
    raise UnsupportedCapabilityError(
        f"data_sampler={data_sampler!r} can't be called with a loader.\n"
        f"Write data_sampler={accepted}; or leave it out, and give the sampler to your DataLoader."
    )


def apply_data_sampler(data_sampler: DataSampler | None, loader: Any) -> Any:
    """The loader that a data sampler returns for a loader; the loader itself without one.

    Raises:
        ShardingError: It returned nothing that can be iterated.
    """
    if data_sampler is None:
        return loader
    sampled = data_sampler(loader)
    if not isinstance(sampled, Iterable):
        raise ShardingError(
            f"data_sampler returned {sampled!r} for a {type(loader).__name__}, which is no loader.\n"
            "Return the loader to use: the one that it was given, or another."
        )
    return sampled
