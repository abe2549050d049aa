"""Refuses, in Lightning's own strategies, modules that one of our strategies sharded earlier in the process.

Checked on Lightning 2.6.6: a Trainer passes a module to its strategy through ``connect``, Fabric through
``module_to_device`` and ``setup_module``. They are wrapped because a module outlives its Trainer, and DDP over shards
ends in an error of torch that names neither.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import cache, wraps
from types import ModuleType
from typing import Any

from fsdp_core.errors import ShardingError
from fsdp_core.lightning.patching import mark_wrapper, replace_function

__all__ = ["install_refusal"]


def install_refusal(strategies: ModuleType) -> None:
    """Wrap the strategies of one of Lightning's modules, such as ``lightning.pytorch.strategies``. Idempotent."""
    for strategy in filter(inspect.isclass, vars(strategies).copy().values()):
        for name in ("connect", "module_to_device", "setup_module"):
            if strategy.__module__.startswith(("lightning", "pytorch_lightning")):
                replace_function(strategy, name, _wrap_taking_method)


@cache
def _wrap_taking_method(take_module: Callable[..., Any]) -> Callable[..., Any]:
    """Let a strategy's method that takes a module refuse one that we have sharded."""

    @wraps(take_module)
    def take_or_refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        our_module = sys.modules.get("fsdp_core.lightning.strategy")  # nothing is sharded if it was not imported
        if our_module is None or isinstance(self, our_module.ShardedStrategy):
            return take_module(self, *args, **kwargs)
        module: Any = inspect.signature(take_module).bind(self, *args, **kwargs).args[1]
        for sharded in map(our_module.sharded_of, module.modules()):
            if sharded is not None:
                from fsdp_core.lightning.private import forget_module

                forget_module(self)  # or the strategy's teardown would move shards, and raise an error of torch's
                raise ShardingError(
                    f"{sharded.plan.class_name} was sharded by {sharded.strategy_name!r} before, in this process: each "
                    "rank holds parts of its parameters, which "
                    f"Lightning's {type(self).__name__} would take for full parameters.\n"
                    f"Go on with strategy={sharded.strategy_name!r}; or save a checkpoint, build the module again, and "
                    "load the checkpoint into that, with ckpt_path=, load_from_checkpoint() or Fabric.load()."
                )
        return take_module(self, *args, **kwargs)

    return mark_wrapper(take_or_refuse, take_module, _wrap_taking_method)
