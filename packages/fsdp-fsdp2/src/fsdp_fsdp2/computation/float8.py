"""float8 training through torchao: which linear layers compute in float8, before anything is sharded."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from fsdp_core import ShardingError, UnsupportedCapabilityError
from fsdp_fsdp2.torch_private.parameter_groups import has_hooks

__all__ = ["check_float8", "compute_in_float8", "described_filter", "described_float8"]

#: Both dimensions of a matrix must be a multiple of this for float8 units.
_MULTIPLE = 16


def check_float8(float8: object, float8_filter: object, tensor_parallel: bool) -> None:
    """Refuse options about float8 that can't be carried out. Needs no process group.

    Args:
        float8: Whether linear layers compute in float8; or torchao's ``Float8LinearConfig``.
        float8_filter: A function ``(module, name) -> bool`` that chooses the layers; ``None`` for all.
        tensor_parallel: Whether layers are divided among ranks.

    Raises:
        UnsupportedCapabilityError: torchao is missing, or a value is not known.
    """
    if float8 is False:
        if float8_filter is not None:
            raise UnsupportedCapabilityError(
                f"float8_filter={float8_filter!r} chooses layers that compute in float8, and none do.\n"
                "Add float8=True, or leave it out."
            )
        return
    if find_spec("torchao") is None:
        raise UnsupportedCapabilityError(
            f"float8={float8!r} needs torchao, which is not installed.\nType: python -m pip install torchao"
        )
    from torchao.float8 import Float8LinearConfig

    if float8 is not True and not isinstance(float8, Float8LinearConfig):
        raise UnsupportedCapabilityError(
            f"float8={float8!r} is not known to 'fsdp2'.\n"
            "Write float8=True, or a torchao.float8.Float8LinearConfig, such as "
            "Float8LinearConfig.from_recipe_name('rowwise')."
        )
    if float8_filter is not None and not callable(float8_filter):
        raise UnsupportedCapabilityError(
            f"float8_filter={float8_filter!r} is not a function.\n"
            "Write a function (module, name) -> bool, such as lambda module, name: 'head' not in name."
        )
    if getattr(float8, "enable_fsdp_float8_all_gather", False):
        raise UnsupportedCapabilityError(_ALL_GATHER_REFUSAL)
    if tensor_parallel:
        raise UnsupportedCapabilityError(
            f"float8={float8!r} together with tensor_parallel_size: each rank would scale its part of a layer by "
            "itself, unlike one process.\nLeave out one of them."
        )


_ALL_GATHER_REFUSAL = (
    "Float8LinearConfig(enable_fsdp_float8_all_gather=True) makes gathered parameters torchao's own tensors, which "
    "'fsdp2' can't compare with their shards, fill with zeros where a rank has not used them, or save.\n"
    "Leave it out: weights are then gathered in the dtype of precision=, and rounded to float8 by each layer."
)


def described_float8(float8: object) -> object:
    """The option as plain data, for comparison between ranks and strategies."""
    return float8 if isinstance(float8, bool) else repr(float8)


def described_filter(float8_filter: object) -> object:
    """The filter as plain data, for comparison between ranks and strategies."""
    return None if float8_filter is None else getattr(float8_filter, "__qualname__", repr(float8_filter))


def compute_in_float8(
    root: nn.Module, float8: Any, float8_filter: Callable[[nn.Module, str], bool] | None, device: torch.device
) -> None:
    """Replace linear layers by torchao's, which hold the same parameters in their own dtype. Idempotent.

    Two kinds of linear layers stay as they are: those of a class derived from ``nn.Linear``, whose ``forward`` would be
    lost, and those whose dimensions the hardware can't take.

    Args:
        root: The module, not sharded yet.
        float8: See :func:`check_float8`.
        float8_filter: See :func:`check_float8`; ``None`` for all layers that can be converted.
        device: Where it will compute.

    Raises:
        ShardingError: There is no such layer, or one has hooks, which its replacement would not have.
        UnsupportedCapabilityError: The device has no float8 units.
    """
    if float8 is False:
        return
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_linear import Float8Linear

    layers = {
        name: module
        for name, module in root.named_modules(remove_duplicate=False)
        if name
        and type(module) is nn.Linear
        and not any(size % _MULTIPLE for size in module.weight.shape)
        and (float8_filter is None or float8_filter(module, name))
    }
    if not layers and not any(isinstance(module, Float8Linear) for module in root.modules()):
        sizes = {
            f"{name!r} {tuple(m.weight.shape)}": None for name, m in root.named_modules() if isinstance(m, nn.Linear)
        }
        raise ShardingError(
            f"float8 is for nn.Linear layers whose dimensions are multiples of {_MULTIPLE}, and {type(root).__name__} "
            f"has none{' that float8_filter chooses' * (float8_filter is not None)}.\n"
            f"Its linear layers are: {', '.join(list(sizes)[:10]) or 'none'}. Leave float8 out, or change the sizes."
        )
    for name, module in layers.items():
        obstacle = "hooks" if has_hooks(module) else "a forward of its own" if "forward" in vars(module) else ""
        if obstacle:
            raise ShardingError(
                f"{name!r} has {obstacle}, which the layer that torchao puts in its place would not have.\n"
                "Give it to the module around it, or exclude the layer: float8_filter=lambda module, name: ..."
            )
    config = Float8LinearConfig(emulate=_must_emulate(device)) if float8 is True else float8
    layer_ids = {id(module) for module in layers.values()}
    convert_to_float8_training(root, config=config, module_filter_fn=lambda module, name: id(module) in layer_ids)
    replacements: dict[int, nn.Module] = {}
    for name, module in layers.items():
        if root.get_submodule(name) is module:  # torchao replaces a layer with several names under the first alone
            root.set_submodule(name, replacements[id(module)])
        replacement = replacements[id(module)] = root.get_submodule(name)
        assert isinstance(replacement, Float8Linear)
        replacement.training = module.training
        for key, value in module.__dict__.items():  # such as the mark of wrap(), and what the user has set
            replacement.__dict__.setdefault(key, value)


def _must_emulate(device: torch.device) -> bool:
    """Whether to emulate float8: to round operands to it, and compute in the layer's own dtype.

    Raises:
        UnsupportedCapabilityError: The device is a GPU without float8 units, for which the user must request emulation.
    """
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9) and torch.version.hip is None:
        major, minor = torch.cuda.get_device_capability(device)
        raise UnsupportedCapabilityError(
            f"float8=True needs a GPU with float8 units, of compute capability 8.9 or higher; this one has {major}."
            f"{minor}.\nLeave it out, or write float8=Float8LinearConfig(emulate=True) to see its numbers, slowly."
        )
    return device.type != "cuda"
