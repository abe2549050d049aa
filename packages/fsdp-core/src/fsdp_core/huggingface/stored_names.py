"""Under which names, and in which shapes, transformers stores a model's tensors."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterable, Mapping
from importlib import import_module
from typing import Any

from torch import Tensor, nn

from fsdp_core.errors import UnsupportedCapabilityError
from fsdp_core.huggingface.views import View, full_view, views_of
from fsdp_core.state.chunks import ChunkedTensor

__all__ = ["hub_renamings", "is_expected_surplus", "names_to_store", "stored_views"]


def stored_views(model: nn.Module, state: Mapping[str, ChunkedTensor], names: Iterable[str]) -> dict[str, View]:
    """The tensors of a folder as ``save_pretrained`` writes it, each as a part of a tensor of the model.

    Args:
        model: The model, as written.
        state: Its tensors, of which only shapes and dtypes are used.
        names: The names of the tensors to store.

    Returns:
        The views, in the order of the folder.

    Raises:
        UnsupportedCapabilityError: The model is stored in a form that can't be written from shards.
    """
    tensors_to_store = {name: state[name] for name in names}
    shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors_to_store.items()}
    revert = _find_revert_function(model)
    if revert is None:
        return {name: full_view(name, shape) for name, (shape, _) in shapes.items()}

    def convert(state: dict[str, Tensor]) -> Mapping[str, Tensor]:
        converted: Mapping[str, Tensor] = revert(model, state)
        return converted

    return views_of(shapes, convert, type(model).__name__)


def _find_revert_function(model: nn.Module) -> Any:
    """Return transformers' function that turns a model's state into that of a folder; ``None`` if they are equal."""
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return None
    try:
        return import_module("transformers.core_model_loading").revert_weight_conversion
    except ImportError:  # before version 5
        if getattr(model, "_checkpoint_conversion_mapping", None):
            raise UnsupportedCapabilityError(
                f"{type(model).__name__} is stored under other names than its own, which this project knows how to "
                f"do with transformers 5, and {transformers.__version__} is installed.\npip install 'transformers>=5'"
            ) from None
        return None


def names_to_store(model: nn.Module, names: Collection[str], tied: Mapping[str, str]) -> list[str]:
    """Return the names to store: of parameters that the model's class ties, only that to which it ties the others.

    Args:
        model: The model, as written.
        names: The names of its state.
        tied: The first name of the same parameter, by each further name.
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(tied.get(name, name), []).append(name)
    tied_patterns = [re.compile(pattern) for pattern in _tied_patterns(model)]
    ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()
    stored = set()
    for group in groups.values():
        untied_names = [name for name in group if not any(pattern.search(name) for pattern in tied_patterns)]
        # Names that the model's class does not tie are all stored, because nothing would tie them again on loading.
        stored.update(untied_names or sorted(group)[-1:])
    return [name for name in names if name in stored and name not in ignored]


def _tied_patterns(model: nn.Module) -> list[str]:
    """Return regular expressions for the names that transformers does not store if they are tied."""
    patterns: list[str] = []
    for prefix, module in model.named_modules():
        own_patterns = getattr(module, "_tied_weights_keys", None) or ()
        module_pattern = f"{re.escape(prefix)}\\." if prefix else ""
        patterns += [f"{module_pattern}{pattern}" for pattern in own_patterns]
    return patterns


def hub_renamings(model: nn.Module) -> Any:
    """Return a function from a name in a folder, perhaps an old one, to the name in the model."""
    if _find_revert_function(model) is None:
        return lambda name: name
    conversions = import_module("transformers.conversion_mapping").get_model_conversion_mapping(model)
    loading: Any = import_module("transformers.core_model_loading")
    renamings = [conversion for conversion in conversions if isinstance(conversion, loading.WeightRenaming)]
    return lambda name: loading.apply_renamings(name, renamings)


def is_expected_surplus(model: nn.Module, name: str) -> bool:
    """Whether a model declares that folders may have a name that it does not need."""
    patterns = [*(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()), r"rotary_emb\.inv_freq$"]
    return any(re.search(pattern, name) for pattern in patterns)
