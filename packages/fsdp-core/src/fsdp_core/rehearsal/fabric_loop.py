"""Rehearses a training loop under Fabric: from where it is set up, the script goes on with fake tensors, in a fork.

A loop is no object that could be called: it is the rest of the script. So the process is forked where the script calls
``fabric.setup()``, once for each rehearsal. The child returns from that call, to the script; and ends after the second
optimizer step, where it sends its parent what it has seen.
"""

from __future__ import annotations

import copy
import functools
import gc
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NoReturn, TypeVar

import lightning.pytorch as pl
import torch
from lightning.fabric import Fabric
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from fsdp_core.errors import ShardingError, UnsupportedCapabilityError
from fsdp_core.lightning.fabric_strategy import ShardedFabricStrategy
from fsdp_core.lightning.private import FabricModule, FabricOptimizer
from fsdp_core.rehearsal.candidates import Candidate
from fsdp_core.rehearsal.fit import Rehearsal, quietly
from fsdp_core.rehearsal.forks import how_it_ended
from fsdp_core.rehearsal.imagined_ranks import ImaginedEnvironment, ImaginedRuntime, imagined_world
from fsdp_core.rehearsal.known_values import KnownValues
from fsdp_core.rehearsal.memory import MemoryMode
from fsdp_core.rehearsal.modules_on_fakes import fakes_allowed
from fsdp_core.rehearsal.step_marks import EnoughSteps, StepMarks
from fsdp_core.state.fqn import unwrap_compiled
from fsdp_core.torch_private.fake_tensors import FakeCopyMode, FakeTensorMode, tree_map_only
from fsdp_core.torch_private.tensors import is_fake

__all__ = ["CaughtLoop", "LoopGoesOn", "LoopRehearsal", "LoopStrategy"]

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class CaughtLoop:
    """A call of ``fabric.setup()`` in a user's script.

    Attributes:
        module: The module that is set up, as it was given.
        fabric_keywords: The arguments of Fabric, as the script has given them.
        location: The file and line of the call.
    """

    module: nn.Module
    fabric_keywords: Mapping[str, Any]
    location: str

    @property
    def precision(self) -> Any:
        """The precision that the script asks for."""
        return self.fabric_keywords.get("precision")

    @property
    def script_strategy(self) -> Any:
        """The strategy that the script gives Fabric."""
        return self.fabric_keywords.get("strategy")

    @property
    def batches(self) -> None:
        """The number of batches of an epoch, which a loop does not say."""

    @property
    def left_out(self) -> list[str]:
        """What Fabric was given beside, which does not take part in a rehearsal, by class."""
        callbacks = self.fabric_keywords.get("callbacks") or []
        return [type(each).__name__ for each in (callbacks if isinstance(callbacks, list) else [callbacks])]

    def rehearse(
        self,
        candidate: Candidate,
        rank: int,
        *,
        summarize: Callable[[Rehearsal], T],
        explain: Callable[[BaseException], T],
        callbacks: Sequence[pl.Callback] = (),
    ) -> T:
        """Let the script go on in a fork, on fake tensors, until it has taken two optimizer steps.

        Args:
            candidate: The strategy.
            rank: The rank that is played.
            summarize: Makes what is returned of the rehearsal, in the fork.
            explain: Makes it of an error that the script raises there.
            callbacks: What else sees the steps.

        Raises:
            LoopGoesOn: In the fork: whoever has called ``fabric.setup()`` is to go on.
            ShardingError: The fork has ended without an answer.
        """
        receiver, sender = multiprocessing.Pipe(duplex=False)
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if not child:
            receiver.close()
            raise LoopGoesOn(LoopRehearsal(self, candidate, rank, sender, summarize, explain, callbacks))
        sender.close()
        try:
            result: T = receiver.recv()
        except (EOFError, OSError):  # before it has sent anything, or in the middle
            _, status = os.waitpid(child, 0)
            raise ShardingError(how_it_ended(os.waitstatus_to_exitcode(status))) from None
        os.waitpid(child, 0)
        return result


class LoopGoesOn(BaseException):
    """Brings a fork back to where the script has called ``fabric.setup()``.

    Attributes:
        rehearsal: What is rehearsed there.
    """

    def __init__(self, rehearsal: LoopRehearsal) -> None:
        super().__init__()
        self.rehearsal = rehearsal


class LoopRehearsal:
    """The rehearsal of the rest of a script, in a fork that ends with it."""

    def __init__(
        self,
        loop: CaughtLoop,
        candidate: Candidate,
        rank: int,
        sender: Connection,
        summarize: Callable[[Rehearsal], Any],
        explain: Callable[[BaseException], Any],
        callbacks: Sequence[pl.Callback],
    ) -> None:
        self._loop, self._candidate, self._rank = loop, candidate, rank
        self._sender, self._summarize, self._explain = sender, summarize, explain
        self._memory, self._values = MemoryMode(reduces_in_a_copy=True), KnownValues()
        self._fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._contexts, self._modes = ExitStack(), ExitStack()
        self._is_on = False
        self._marks = StepMarks(self._memory, leaves_at_once=True)
        self._trainer = _LoopAsTrainer([*callbacks, self._marks])
        self._fakes: dict[int, Tensor] = {}
        self._originals: list[Tensor] = []  # so that no other tensor gets the identity of one of them
        self._stepped: set[Optimizer] = set()
        self._has_forward = False
        self._numel = 0
        self._batch_number = 0
        self._started = time.process_time()

    def begin(self, fabric: Fabric) -> None:
        """Make a Fabric what the candidate says, and whatever is computed from now on fake.

        Args:
            fabric: The one on which the script has called ``setup()``.
        """
        torch.set_num_threads(1)
        sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        candidate, contexts = self._candidate, self._contexts
        contexts.enter_context(quietly())
        if candidate.ranks > 1:
            contexts.enter_context(imagined_world(self._rank, candidate.ranks))
        contexts.enter_context(fakes_allowed(self._values))
        keywords = self._loop.fabric_keywords
        Fabric.__init__(
            fabric,
            accelerator="cpu",
            strategy=candidate.build("fabric"),
            devices=candidate.ranks,
            precision=keywords.get("precision"),
            plugins=[ImaginedEnvironment(self._rank, candidate.ranks)] if candidate.ranks > 1 else None,
            loggers=[DummyLogger()] if keywords.get("loggers") else None,
        )
        strategy: Any = fabric.strategy
        self._trainer.strategy = strategy
        if isinstance(strategy, ShardedFabricStrategy):
            strategy.runtime = ImaginedRuntime()
            strategy.hang_timeout = None
            self._trainer.strategy = LoopStrategy(strategy)
        fabric.launch()
        self._watch_fabric()

    def set_up(self, set_up: Callable[..., Any], fabric: Fabric, module: Any, *optimizers: Any, **keywords: Any) -> Any:
        """Set up a module and its optimizers, on fake tensors.

        Args:
            set_up: Fabric's own method.
            fabric: Its owner.
            module: The module; ``None`` for optimizers alone.
            *optimizers: Optimizers.
            **keywords: What else the method is given.
        """
        with self._switched(on=True):
            return self._set_up(set_up, fabric, module, *optimizers, **keywords)

    def _set_up(
        self, set_up: Callable[..., Any], fabric: Fabric, module: Any, *optimizers: Any, **keywords: Any
    ) -> Any:
        if module is not None:
            module = unwrap_compiled(module)
            self._make_fake(module)
            self._memory.take(module.parameters(), "parameters")
            self._memory.take(module.buffers(), "buffers")
            self._numel += sum(parameter.numel() for parameter in module.parameters())
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["params"] = [self._fakes.get(id(parameter), parameter) for parameter in group["params"]]
        result = set_up(fabric, *([] if module is None else [module]), *optimizers, **keywords)
        self._trainer.optimizers += optimizers
        if module is not None:
            self._trainer.module = self._trainer.module or module
            self._tell("on_train_start", module)
        return result

    def end_by(self, error: BaseException) -> NoReturn:
        """Send the parent why the script has ended without two steps, and end.

        Args:
            error: What it has raised; ``SystemExit`` for nothing.
        """
        if isinstance(error, SystemExit):
            error = ShardingError("the script has ended without two optimizer steps of its loop")
        self._switch(on=False)
        self._contexts.close()
        self._end(self._explain(error))

    def _finish(self) -> NoReturn:
        self._switch(on=False)
        self._contexts.close()
        self._marks.detach()
        gc.collect()
        rehearsal = Rehearsal(
            step=self._memory.step,
            numel=self._numel,
            assumptions=dict(self._values.assumptions),
            seconds=time.process_time() - self._started,
        )
        try:
            result = self._summarize(rehearsal)
        except Exception as error:
            result = self._explain(error)
        self._end(result)

    def _end(self, result: Any) -> NoReturn:
        self._sender.send(result)
        self._sender.close()
        os._exit(0)  # without what the script would do at its end

    # -- what the loop does --------------------------------------------------------------------------------------------

    def _watch_fabric(self) -> None:
        """See forward and backward passes, steps and batches of the loop, by methods that are replaced for good."""
        watched: list[tuple[type, str, Callable[..., Any]]] = [
            (FabricModule, "forward", self._run_forward),
            (Fabric, "backward", self._run_backward),
            (FabricOptimizer, "step", self._run_step),
            (DataLoader, "__iter__", self._draw),
            (Fabric, "setup", self.set_up),
            (Fabric, "setup_module", self.set_up),
            (Fabric, "setup_optimizers", self._set_up_optimizers),
        ]
        for owner, name, replacement in watched:
            original = vars(owner)[name]
            setattr(owner, name, functools.wraps(original)(_as_method(replacement, original)))

    def _set_up_optimizers(self, set_up: Any, fabric: Fabric, *optimizers: Any, **keywords: Any) -> Any:
        return self.set_up(set_up, fabric, None, *optimizers, **keywords)

    def _run_forward(self, forward: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        self._switch(on=True)
        if not self._has_forward:  # of several modules, the first one begins
            self._has_forward = True
            self._tell("on_train_batch_start", None, self._batch_number)
            self._batch_number += 1
        return forward(module, *args, **kwargs)

    def _run_backward(self, backward: Any, fabric: Fabric, tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        self._tell("on_before_backward", tensor)
        backward(fabric, tensor, *args, **kwargs)
        self._has_forward = False
        self._tell("on_after_backward")

    def _run_step(self, step: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        self._tell("on_before_optimizer_step", optimizer.optimizer)
        output = step(optimizer, *args, **kwargs)
        self._stepped.add(optimizer.optimizer)
        if self._stepped.issuperset(self._trainer.optimizers):  # all of a GAN's
            self._stepped.clear()
            self._trainer.global_step += 1
        try:
            self._tell("on_train_batch_end", None, None, self._batch_number)
        except EnoughSteps:
            self._finish()
        return output

    def _draw(self, iterate: Any, loader: Any) -> Iterator[Any]:
        with self._switched(on=False):
            batches = iterate(loader)
        while True:
            with self._switched(on=False):
                try:
                    batch = next(batches)
                except StopIteration:
                    return
            self._switch(on=True)
            yield tree_map_only(Tensor, self._fake_batch, batch)

    def _tell(self, hook: str, *args: Any) -> None:
        is_start = hook == "on_train_start"
        module = args[0] if is_start else self._trainer.module
        for callback in self._trainer.callbacks:
            getattr(callback, hook)(self._trainer, module, *(() if is_start else args))

    # -- modes ---------------------------------------------------------------------------------------------------------

    def _switch(self, *, on: bool) -> None:
        """Let operations be fake and seen; or real, as those by which a script makes its data set after its model."""
        if on and not self._is_on:
            for mode in (self._fake_mode, self._memory, self._values):
                self._modes.enter_context(mode)
        elif self._is_on and not on:
            self._modes.close()
        self._is_on = on

    @contextmanager
    def _switched(self, *, on: bool) -> Iterator[None]:
        was_on = self._is_on
        self._switch(on=on)
        try:
            yield
        finally:
            self._switch(on=was_on)

    # -- fake tensors --------------------------------------------------------------------------------------------------

    def _fake_batch(self, tensor: Tensor) -> Tensor:
        fake = self._fake_mode.from_tensor(tensor, static_shapes=True).clone()
        self._values.know(fake, tensor)
        self._memory.take([fake], "batch")
        return fake

    def _make_fake(self, module: nn.Module) -> None:
        """Put fake tensors in the place of a module's own: the script has more names for the module than this call."""
        for submodule in module.modules():
            for named in (submodule.named_parameters, submodule.named_buffers):
                for name, tensor in list(named(recurse=False, remove_duplicate=False)):
                    if not is_fake(tensor):
                        setattr(submodule, name, self._fake_of(tensor))

    def _fake_of(self, tensor: Tensor) -> Any:
        if id(tensor) not in self._fakes:
            with FakeCopyMode(self._fake_mode):
                fake = copy.deepcopy(tensor)
            self._values.know(fake, tensor)
            self._fakes[id(tensor)] = fake
            self._originals.append(tensor)
        return self._fakes[id(tensor)]


def _as_method(replacement: Callable[..., Any], original: Any) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return replacement(original, self, *args, **kwargs)

    return method


class LoopStrategy:
    """A Fabric strategy of this project, as what watches a Trainer asks for one."""

    def __init__(self, strategy: ShardedFabricStrategy) -> None:
        self._strategy = strategy
        self.options, self.runtime, self.backend = strategy.options, strategy.runtime, strategy.backend
        self.step_methods = strategy.steps

    @property
    def sharded_or_none(self) -> Any:
        """The module that was set up last; ``None`` if none was."""
        return self._strategy.roots[-1] if self._strategy.roots else None

    @property
    def sharded(self) -> Any:
        """The module.

        Raises:
            UnsupportedCapabilityError: There are several.
        """
        roots = self._strategy.roots
        if len(roots) > 1:
            raise UnsupportedCapabilityError(
                f"the loop sets up {len(roots)} modules, of which a rank at large n is not rehearsed.\n"
                "Rehearse one of them in a script of its own; or use fsdp plan, which takes them together."
            )
        return roots[0]


class _LoopAsTrainer:
    """A loop, as callbacks see a Trainer."""

    def __init__(self, callbacks: Sequence[pl.Callback]) -> None:
        self.callbacks = callbacks
        self.strategy: Any = None
        self.module: nn.Module | None = None
        self.optimizers: list[Any] = []
        self.global_step = 0
        self.should_stop = False
