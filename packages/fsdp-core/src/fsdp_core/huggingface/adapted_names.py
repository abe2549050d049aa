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
        model: The model inside of PEFT's.
        full_names: By each name in the model without adapters, its names in PEFT's model. There are several where PEFT
            trains a copy (``modules_to_save``).
        name_of: By each of these names in PEFT's model, the name in the model without adapters.
    """

    model: nn.Module = field(repr=False)
    full_names: Mapping[str, tuple[str, ...]]
    name_of: Mapping[str, str]


def base_names(model: nn.Module, names: Iterable[str]) -> BaseNames:
    """Find the names of a model without the adapters that PEFT has put into it; all names if there are none.

    Args:
        model: The model, as written.
        names: The names of its state.
    """
    if not hasattr(model, "peft_config"):
        full_names = {name: (name,) for name in names}
        return BaseNames(model=model, full_names=full_names, name_of={name: name for name in full_names})
    get_base_model = getattr(model, "get_base_model", None)
    base = get_base_model() if callable(get_base_model) else model
    prefix_of_base = next((f"{name}." for name, module in model.named_modules() if module is base and name), "")
    # A layer with adapters holds the original as base_layer; a module that is trained as a whole, as original_module.
    base_modules = dict(base.named_modules())
    adapted_layers = {
        name for name, module in base_modules.items() if isinstance(getattr(module, "base_layer", None), nn.Module)
    }
    trained_copies = {
        name for name, module in base_modules.items() if isinstance(getattr(module, "original_module", None), nn.Module)
    }
    full_names_by_name: dict[str, list[str]] = {}
    for full_name in names:
        if not full_name.startswith(prefix_of_base):
            continue
        name = _name_without_adapters(full_name.removeprefix(prefix_of_base), adapted_layers, trained_copies)
        if name is not None:
            full_names_by_name.setdefault(name, []).append(full_name)
    return BaseNames(
        model=base,
        full_names={name: tuple(full_names) for name, full_names in full_names_by_name.items()},
        name_of={full_name: name for name, full_names in full_names_by_name.items() for full_name in full_names},
    )


def _name_without_adapters(name: str, adapted_layers: set[str], trained_copies: set[str]) -> str | None:
    """Return the name in the model without adapters; ``None`` for a parameter of an adapter.

    Args:
        name: The name in the model with adapters.
        adapted_layers: The names of layers with adapters, in that model.
        trained_copies: The names of modules of which PEFT trains copies, in that model.
    """
    kept_parts: list[str] = []
    parts = name.split(".")
    index = 0
    while index < len(parts):
        path = ".".join(parts[:index])
        if path in adapted_layers:
            if parts[index] != "base_layer":
                return None
        elif path in trained_copies and parts[index] == "original_module":
            pass
        elif path in trained_copies and parts[index] == "modules_to_save":
            index += 1  # the adapter's name
        else:
            kept_parts.append(parts[index])
        index += 1
    return ".".join(kept_parts)
