"""The names of a model's own parameters where PEFT has put adapters into it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import nn

__all__ = ["BaseNames", "base_names"]


@dataclass(frozen=True, kw_only=True)
class BaseNames:
    """A model without its adapters.

    Attributes:
        model: The model that is inside of PEFT's.
        places: The names in the whole model, by each name in the model without adapters. There are several where PEFT
            trains a copy (``modules_to_save``).
        name_of: The name in the model without adapters, by name in the whole.
    """

    model: nn.Module = field(repr=False)
    places: Mapping[str, tuple[str, ...]]
    name_of: Mapping[str, str]


def base_names(model: nn.Module, names: Iterable[str]) -> BaseNames:
    """The names of a model without the adapters that PEFT has put into it; all names if there are none.

    Args:
        model: The model, as written.
        names: The names of its state.
    """
    if not hasattr(model, "peft_config"):
        places = {name: (name,) for name in names}
        return BaseNames(model=model, places=places, name_of={name: name for name in places})
    get_base = getattr(model, "get_base_model", None)
    base = get_base() if callable(get_base) else model
    start = next((f"{name}." for name, module in model.named_modules() if module is base and name), "")
    # A layer with adapters holds the original as base_layer; a module that is trained as a whole, as original_module.
    named = dict(base.named_modules())
    layers = {name for name, module in named.items() if isinstance(getattr(module, "base_layer", None), nn.Module)}
    copies = {name for name, module in named.items() if isinstance(getattr(module, "original_module", None), nn.Module)}
    full_names: dict[str, list[str]] = {}
    for full_name in names:
        if not full_name.startswith(start):
            continue
        name = _without_adapters(full_name.removeprefix(start), layers, copies)
        if name is not None:
            full_names.setdefault(name, []).append(full_name)
    return BaseNames(
        model=base,
        places={name: tuple(places) for name, places in full_names.items()},
        name_of={full_name: name for name, places in full_names.items() for full_name in places},
    )


def _without_adapters(name: str, layers: set[str], copies: set[str]) -> str | None:
    """The name in the model without adapters; ``None`` for a parameter of an adapter."""
    kept_parts: list[str] = []
    parts = name.split(".")
    index = 0
    while index < len(parts):
        prefix = ".".join(parts[:index])
        if prefix in layers:
            if parts[index] != "base_layer":
                return None
        elif prefix in copies and parts[index] == "original_module":
            pass
        elif prefix in copies and parts[index] == "modules_to_save":
            index += 1  # the adapter's name
        else:
            kept_parts.append(parts[index])
        index += 1
    return ".".join(kept_parts)
