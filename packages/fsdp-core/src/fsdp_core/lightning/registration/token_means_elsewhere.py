"""Lets :func:`fsdp_core.token_mean` know of the Trainer's run under Lightning's own strategies, such as DDP.

Checked on Lightning 2.6.6: a Trainer calls ``training_step`` through its strategy, which inherits it. It is wrapped
because nothing else tells a function that a step calls in which run it is. Nothing is imported for a step that does not
call that function.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from functools import cache, wraps
from types import ModuleType
from typing import TYPE_CHECKING, Any
from weakref import ref

from fsdp_core.lightning.patching import mark_wrapper, replace_function

if TYPE_CHECKING:
    from fsdp_core.sharding.token_windows import TokenWindow

__all__ = ["install_token_means", "window_of_running_step"]

#: Of each rank, some of which are threads, the strategy whose training step was called last.
_last_step = threading.local()


def install_token_means(strategies: ModuleType) -> None:
    """Wrap the Trainer's strategies of one of Lightning's modules, ``lightning.pytorch.strategies``. Idempotent."""
    for strategy in filter(inspect.isclass, vars(strategies).copy().values()):
        if strategy.__module__.startswith("lightning.pytorch"):
            replace_function(strategy, "training_step", _wrap_training_step)


@cache
def _wrap_training_step(training_step: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(training_step)
    def note_and_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        _last_step.strategy = ref(self)
        return training_step(self, *args, **kwargs)

    return mark_wrapper(note_and_step, training_step, _wrap_training_step)


def window_of_running_step() -> TokenWindow | None:
    """What ``token_mean`` needs of the fit that runs on this rank; ``None`` if none does under such a strategy."""
    reference = getattr(_last_step, "strategy", None)
    strategy = None if reference is None else reference()
    module = None if strategy is None else strategy.lightning_module
    if module is None or not module.trainer.training or module.trainer.strategy is not strategy:
        return None
    from fsdp_core.lightning.features.token_means import TokenMeansElsewhere

    return TokenMeansElsewhere.of(strategy)
