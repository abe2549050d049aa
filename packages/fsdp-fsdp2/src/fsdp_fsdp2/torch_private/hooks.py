"""Hooks and classes that ``fully_shard`` gives to modules, taken away for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, cast

from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed.fsdp import FSDPModule

from fsdp_core.sharding import copy_refusal, sharded_around

__all__ = ["OF_FSDP", "is_of_torch", "refuse_copies", "without_hooks"]


def refuse_copies(unit: FSDPModule) -> None:
    """Let a copy of a unit raise what to write instead. torch's own refusal says to save its state dict."""

    def refuse(module: FSDPModule, memo: dict[int, Any]) -> NoReturn:
        around = sharded_around(cast("nn.Module", module))
        strategy = "fully_shard" if around is None else around[0].strategy_name
        raise copy_refusal(_users_class(module).__name__, strategy)

    type(unit).__deepcopy__ = refuse  # type: ignore[attr-defined]


def _users_class(module: FSDPModule) -> type:
    """The class that ``fully_shard`` has put its own in front of."""
    return type(module).__bases__[1]


@contextmanager
def without_hooks(root: nn.Module) -> Iterator[None]:
    """Context in which calls, state dicts and copies of a root's modules are those of the user's modules alone.

    The order of hooks is preserved.
    """
    torch_hooks: list[tuple[Any, int, Any]] = []
    classes: list[tuple[nn.Module, type]] = []
    states: list[tuple[nn.Module, str, Any]] = []
    for module in root.modules():
        for name in _HOOKS:
            hooks = getattr(module, name)
            torch_hooks += [(hooks, key, hook) for key, hook in hooks.items() if is_of_torch(hook)]
        if isinstance(module, FSDPModule):
            classes.append((module, type(module)))
        # a copy of the module would include these, and their process groups
        states += [(module, key, module.__dict__.pop(key)) for key in (STATE_KEY, REGISTRY_KEY) if key in vars(module)]
    for hooks, key, _ in torch_hooks:
        hooks[key] = _do_nothing  # in place of the hook, so that the order stays
    for module, _ in classes:
        module.__class__ = _users_class(cast(FSDPModule, module))  # FSDP's class refuses copies
    try:
        yield
    finally:
        for module, name, state in states:
            module.__dict__[name] = state
        for module, sharded_class in classes:
            module.__class__ = sharded_class
        for hooks, key, hook in torch_hooks:
            hooks[key] = hook


_HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)

OF_FSDP = ("torch.distributed.fsdp._fully_shard",)


def is_of_torch(hook: Any, modules: tuple[str, ...] = (*OF_FSDP, "torch.distributed.tensor.")) -> bool:
    """Whether ``fully_shard`` or tensor parallelism has registered a hook."""
    function = getattr(hook, "hook", hook)  # torch wraps some
    return str(getattr(function, "__module__", "")).startswith(modules)


def _do_nothing(*args: Any) -> None:
    """Replaces a hook."""
