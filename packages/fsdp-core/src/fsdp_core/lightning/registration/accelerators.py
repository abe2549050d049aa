"""Enters torch's accelerator in Lightning's registries of accelerators, and lets ``accelerator="auto"`` find it."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from difflib import get_close_matches
from functools import wraps
from importlib import import_module
from typing import Any

import torch

from fsdp_core import devices
from fsdp_core.device_names import ANY_ACCELERATOR, LIGHTNINGS_OWN, PACKAGES, VISIBILITY
from fsdp_core.errors import StrategyUnavailableError
from fsdp_core.lightning.patching import mark_wrapper, replace_function
from fsdp_core.plugins import registry
from fsdp_core.plugins.auto_info import AUTO
from fsdp_core.plugins.strategy_info import FrontEnd

__all__ = ["enter_accelerator"]

#: Lightning's modules: that with the registry of accelerators, and the one whose connector reads what users ask for.
_REGISTRIES: dict[FrontEnd, tuple[str, str]] = {
    "trainer": ("lightning.pytorch.accelerators", "AcceleratorRegistry"),
    "fabric": ("lightning.fabric.accelerators", "ACCELERATOR_REGISTRY"),
}
_CONNECTORS: dict[FrontEnd, tuple[str, str]] = {
    "trainer": ("lightning.pytorch.trainer.connectors.accelerator_connector", "_AcceleratorConnector"),
    "fabric": ("lightning.fabric.connector", "_Connector"),
}

#: What else runs on a kind of device: Lightning's accelerator "tpu" is torch_xla's.
_ALTERNATIVE = {"tpu": "with torch_xla, write a strategy that `fsdp list` shows on 'xla'; or "}


def enter_accelerator(front_end: FrontEnd) -> None:
    """Make the kind of torch's accelerator a name of Lightning's, where Lightning has none for it.

    Args:
        front_end: ``"trainer"`` or ``"fabric"``.
    """
    module, name = _CONNECTORS[front_end]
    connector = getattr(import_module(module), name)
    replace_function(connector, "_check_config_and_set_final_flags", _wrap_check)
    replace_function(connector, "_check_and_init_precision", _silences_unused_scaler)
    device_type = _device_type_new_to_lightning()
    if device_type is None:
        return
    module, name = _REGISTRIES[front_end]
    accelerators = getattr(import_module(module), name)
    # "tpu" is Lightning's name for torch_xla's devices; without torch_xla, the name is free
    is_free_tpu = device_type == "tpu" and not accelerators[device_type]["accelerator"].is_available()
    if device_type not in accelerators or is_free_tpu:
        from fsdp_core.lightning.accelerators import TorchAccelerator

        description = f"the {device_type} devices that torch.accelerator finds"
        accelerators.register(device_type, TorchAccelerator, description=description, override=True)


def _wrap_check(check: Callable[..., None]) -> Callable[..., None]:
    """Wrap a connector's method that reads what users ask for: ``"auto"`` is torch's accelerator for our strategies."""

    @wraps(check)
    def check_and_resolve(self: Any, *args: Any, strategy: Any, accelerator: Any, **kwargs: Any) -> None:
        runs_on_any = _runs_on_any_accelerator(strategy)
        if runs_on_any:
            _refuse_several(accelerator)
        if runs_on_any and isinstance(accelerator, str):
            _refuse_missing(accelerator)
        check(self, *args, strategy=strategy, accelerator=accelerator, **kwargs)
        device_type = _device_type_new_to_lightning()
        is_auto = runs_on_any and self._accelerator_flag == "auto"
        if is_auto and device_type is not None and torch.accelerator.is_available():
            self._accelerator_flag = device_type

    return mark_wrapper(check_and_resolve, check, _wrap_check)


def _silences_unused_scaler(init_precision: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a connector's method that makes the precision plugin.

    For strategies that shard, Lightning's plugin for ``"16-mixed"`` makes a scaler for torch's default device, of which
    torch warns on another. :func:`fsdp_core.lightning.precision_plugins.read_precision` drops that scaler.
    """

    @wraps(init_precision)
    def init_precision_quietly(self: Any, *args: Any, **kwargs: Any) -> Any:
        sharded = sys.modules.get("fsdp_core.lightning.strategy")
        precision = vars(self).get("_precision_flag", vars(self).get("_precision_input"))  # Trainer's, Fabric's
        if precision != "16-mixed" or sharded is None or not isinstance(self.strategy, sharded.ShardedStrategy):
            return init_precision(self, *args, **kwargs)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r"torch\.\S+\.GradScaler is enabled, but")
            return init_precision(self, *args, **kwargs)

    return mark_wrapper(init_precision_quietly, init_precision, _silences_unused_scaler)


def _device_type_new_to_lightning() -> str | None:
    """The device type of torch's accelerator, such as ``"npu"``, if Lightning has no accelerator for that type."""
    device_type = devices.accelerator_kind()
    return None if device_type in LIGHTNINGS_OWN else device_type


def _runs_on_any_accelerator(strategy: Any) -> bool:
    """Whether a strategy, given as an object or a name, is ours and runs on whatever accelerator torch finds."""
    sharded = sys.modules.get("fsdp_core.lightning.strategy")
    if sharded is not None and isinstance(strategy, sharded.ShardedStrategy):
        strategy = strategy.strategy_name
    if getattr(strategy, "strategy_name", None) == AUTO.name:
        strategy = AUTO.name
    if not isinstance(strategy, str):
        return False
    info = {**registry.strategies(), AUTO.name: AUTO}.get(strategy.lower())
    return info is not None and ANY_ACCELERATOR in info.accelerators


def _refuse_several(accelerator: Any) -> None:
    """Refuse several accelerators, which Lightning's connector misses in words of its own.

    Raises:
        StrategyUnavailableError: It is a list.
    """
    names = accelerator.split(",") if isinstance(accelerator, str) else accelerator
    if isinstance(names, list | tuple | set) and (len(names) > 1 or names is accelerator):
        raise StrategyUnavailableError(
            f"accelerator={accelerator!r}: a run is on devices of one kind.\n"
            f"Write one of them, such as accelerator={next(iter(names), 'auto')!r}, and in devices= how many."
        )


def _refuse_missing(accelerator: str) -> None:
    """Refuse a kind of device that this process's torch does not know or see, naming what is needed for it.

    Raises:
        StrategyUnavailableError: The device type is unknown, or none of its devices is seen.
    """
    if accelerator == _device_type_new_to_lightning() and not torch.accelerator.is_available():
        variable = VISIBILITY.get(accelerator)
        hidden = f", and look at {variable}, which can hide devices" if variable in os.environ else ""
        raise StrategyUnavailableError(
            f"accelerator={accelerator!r}: torch {torch.__version__} knows this kind of device, and sees none here.\n"
            f"Type `fsdp doctor --device {accelerator}`, which says what is missing{hidden}; or write "
            "accelerator='cpu'."
        )
    if accelerator in PACKAGES and accelerator != devices.accelerator_kind():
        kind = devices.accelerator_kind()
        known = "no accelerator" if kind is None else f"{kind} alone"
        raise StrategyUnavailableError(
            f"accelerator={accelerator!r}: torch {torch.__version__} knows {known} in this process.\n"
            f"Install {PACKAGES[accelerator]}, which registers this kind of device with torch when it is imported and "
            f"finds a device{_hint_of_autoload()}; or {_ALTERNATIVE.get(accelerator, '')}write accelerator='cpu'."
        )
    known_names = {"auto", "gpu", *_names_in_lightning()}
    if accelerator not in known_names:
        close = get_close_matches(accelerator.lower(), {*known_names, *PACKAGES}, n=1)
        raise StrategyUnavailableError(
            f"accelerator={accelerator!r}: neither Lightning nor torch {torch.__version__} knows such a device here."
            f"{f' Did you mean {close[0]!r}?' if close else ''}\n"
            f"Known are {', '.join(sorted(known_names))}; and with packages of theirs, {', '.join(sorted(PACKAGES))}. "
            "Write one of them; or install the package that makes torch know the device, which calls "
            f"torch.utils.rename_privateuse1_backend({accelerator!r}), and which torch imports by an entry point of "
            f"the group torch.backends{_hint_of_autoload()}. `fsdp doctor --device {accelerator}` tries it then."
        )


def _names_in_lightning() -> set[str]:
    modules = [(sys.modules.get(module), name) for module, name in _REGISTRIES.values()]
    return {accelerator for module, name in modules if module is not None for accelerator in getattr(module, name)}


def _hint_of_autoload() -> str:
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "1":
        return ""
    return ", and leave TORCH_DEVICE_BACKEND_AUTOLOAD out, without which torch imports it"
