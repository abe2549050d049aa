"""The FQN of a parameter in the user's module, without the names that wrappers add."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

__all__ = ["aliases", "clean_name", "named_parameters", "unwrap_compiled"]

#: The name parts that torch.compile, activation checkpointing, FSDP1 and torch_xla insert for their wrappers.
_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_fpw_module", "_orig_module"}


def clean_name(name: str) -> str:
    """Strip the parts of a name that wrappers insert.

    Example:
        >>> clean_name("_orig_mod.blocks.0._fsdp_wrapped_module.weight")
        'blocks.0.weight'
        >>> clean_name("my_orig_mod.weight")
        'my_orig_mod.weight'
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def named_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield each parameter once, under the first of its clean names."""
    for name, parameter in module.named_parameters():
        yield clean_name(name), parameter


def aliases(module: nn.Module) -> dict[str, str]:
    """Find the additional names of tied parameters and of shared buffers that are saved.

    Returns:
        The first name of the same tensor, by each additional name.

    Example:
        >>> embedding, head = nn.Embedding(4, 2), nn.Linear(2, 4, bias=False)
        >>> head.weight = embedding.weight
        >>> aliases(nn.ModuleDict({"embedding": embedding, "head": head}))
        {'head.weight': 'embedding.weight'}
    """
    first_names: dict[int, str] = {}
    additional_names: dict[str, str] = {}
    unsaved_buffers = {
        f"{name}.{buffer}" if name else buffer
        for name, part in module.named_modules(remove_duplicate=False)
        for buffer in part._non_persistent_buffers_set
    }
    for named_tensors in (
        module.named_parameters(remove_duplicate=False),
        module.named_buffers(remove_duplicate=False),
    ):
        for full_name, tensor in named_tensors:
            if full_name in unsaved_buffers:
                continue
            name = clean_name(full_name)
            first_name = first_names.setdefault(id(tensor), name)
            if first_name != name:
                additional_names[name] = first_name
    return additional_names


def unwrap_compiled(module: nn.Module) -> nn.Module:
    """Return the original module of a :func:`torch.compile` wrapper, or the module itself."""
    inner = getattr(module, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else module
