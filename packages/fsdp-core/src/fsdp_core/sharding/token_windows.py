"""What :func:`fsdp_core.token_mean` knows of a run: its ranks, and of which counts the gradients that wait are."""

from __future__ import annotations

import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from fsdp_core.errors import ShardingError
from fsdp_core.gradients.clipping import scale_gradients
from fsdp_core.runtime import ProcessGroupRuntime
from fsdp_core.torch_private.autograd import call_around_backward, graph_nodes

__all__ = [
    "CountedMean",
    "LoopWindow",
    "TokenWindow",
    "current_window",
    "follow_passes",
    "note_mean",
    "use_window",
]

#: The nodes of a graph in which a loss is a linear function of the means that it is made of.
_LINEAR = frozenset(
    f"{name}Backward{number}"
    for name in ("Add", "Sub", "Neg", "Mul", "Div", "Sum", "Mean", "Stack", "Select", "Clone", "Alias", "ToCopy")
    for number in range(2)
) | {f"{name}Backward{number}" for name in ("View", "Squeeze", "Unsqueeze", "Expand", "Cat") for number in range(3)}

#: Nodes whose second input may not depend on parameters, either, if they are to be linear.
_PRODUCTS = ("MulBackward", "DivBackward")


#: All windows, which the end of an optimizer's step looks through. Some ranks are threads of one process.
_windows: WeakSet[TokenWindow] = WeakSet()
_lock = threading.Lock()


class CountedMean:
    """A mean that :func:`fsdp_core.token_mean` has returned.

    Args:
        window: Where it was computed.
        given_count: What its caller has given as the count: by it, two losses are known to be over the same tokens.
        count: The number of tokens, or the sum of their weights, on all ranks.
        is_empty: Whether there are none, as a tensor.
        accumulated: As the argument of ``token_mean``.

    Attributes:
        reference: The count that the gradients which wait for the step are relative to; ``None``: this one's.
    """

    def __init__(
        self, window: TokenWindow, given_count: object, count: Tensor, is_empty: Tensor, accumulated: bool | None
    ) -> None:
        self.given_count = given_count
        self.count = count
        self.accumulated = accumulated
        self.reference: Tensor | None = None
        # ranks average gradients, and a Trainer divides losses by the number of micro-batches
        self._factor = window.ranks * (window.divisor or 1)
        self._nonzero_count = count.masked_fill(is_empty, 1)

    def share(self) -> Tensor:
        """How much the gradient of this rank's sum is of the gradient of the mean."""
        return self._factor / (self._nonzero_count if self.reference is None else self.reference)

    def is_over_same_tokens(self, other: CountedMean) -> bool:
        """Whether another mean is known to be over the same tokens."""
        if isinstance(self.given_count, Tensor) or isinstance(other.given_count, Tensor):
            return self.given_count is other.given_count
        return bool(self.given_count == other.given_count)


@dataclass
class _Waiting:
    """What is known of gradients that wait for a step.

    Attributes:
        reference: The count to which they are relative: they are the sum of the losses' gradients, divided by it.
        total: The count of all their tokens.
        accumulated: Whether these are of micro-batches of one step; ``None`` if that was not said.
        fault: Why gradients of these passes can't be corrected by one factor; empty if they can.
        is_relative_to_total: Whether they need no correction.
    """

    reference: Tensor
    total: Tensor
    accumulated: bool | None
    fault: str
    is_relative_to_total: bool


class TokenWindow(ABC):
    """Brings gradients to the mean over all tokens that a step takes.

    The gradient of a pass is that of the mean over its own tokens, exactly, so that one pass for each step leaves
    nothing to do. If the gradients of earlier passes wait, those of a further one are made relative to the same count;
    after it, as soon as they are reduced, all are multiplied by that count over the new total. So whoever looks at
    gradients after a backward pass sees those of the mean over all tokens until then.
    """

    def __init__(self) -> None:
        self._waiting: MutableMapping[Any, _Waiting] = WeakKeyDictionary()
        #: A count that is not zero, for windows that begin without a token.
        self._last_count: Tensor | None = None
        #: Whether gradients were restored that are not where a look would find them.
        self._are_restored = False
        self._is_used = False
        with _lock:
            _windows.add(self)

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device of this rank."""

    @property
    @abstractmethod
    def ranks(self) -> int:
        """Over how many ranks gradients are averaged."""

    @property
    @abstractmethod
    def divisor(self) -> int | None:
        """By what each loss is divided before its backward pass; ``None`` where steps are by hand."""

    def note_use(self) -> None:
        """Record that a mean was computed that may be trained."""
        self._is_used = True

    def take_use(self) -> bool:
        """Whether one was since this was last asked."""
        is_used, self._is_used = self._is_used, False
        return is_used

    @property
    def leaves_unreduced(self) -> bool:
        """Whether the backward pass that has just ended has left gradients elsewhere, unreduced."""
        return False

    @abstractmethod
    def sum_over_ranks(self, tensor: Tensor) -> Tensor:
        """Add up a tensor over the ranks that see other data. It may be changed."""

    @abstractmethod
    def owners(self, outputs: Sequence[Any], *, complete: bool) -> Iterable[Hashable]:
        """Whose gradients wait together for a step: the optimizers.

        Args:
            outputs: What the backward pass begins with.
            complete: Whether all their gradients are to be corrected after the pass.
        """

    @abstractmethod
    def gradients(self, owner: Any) -> Iterable[Tensor]:
        """The gradients of an owner on this rank."""

    def has_gradients(self, owner: Any) -> bool:
        """Whether an owner has gradients that wait."""
        return next(iter(self.gradients(owner)), None) is not None

    def has_other_gradients(self, owner: Any) -> bool:
        """Whether an owner that is not known to wait has gradients."""
        return self.has_gradients(owner)

    def forget(self, owner: Any) -> None:
        """Forget gradients that a step has taken, or that were discarded."""
        self._waiting.pop(owner, None)

    def note_step(self, owner: Any) -> None:
        """Forget gradients that a step has taken.

        Passes that were not declared as micro-batches are forgotten with the step of any optimizer: where several step
        in turn, a pass of one of them may add zeros to the gradients of the others.
        """
        if owner in self._waiting and not self._waiting[owner].accumulated:
            for other in [other for other, waiting in self._waiting.items() if not waiting.accumulated]:
                self.forget(other)
        self.forget(owner)

    def before_backward(self, outputs: Sequence[Any], new_means: Sequence[CountedMean]) -> None:
        """Choose to what the gradients of a backward pass are relative.

        Args:
            outputs: What the pass begins with.
            new_means: What ``token_mean`` has returned since the last pass.

        Raises:
            ShardingError: Gradients wait, and no factor can bring those of both passes to the mean over all tokens.
        """
        is_by_hand = self.divisor is None
        if self.divisor == 1 or not (new_means or self._waiting):
            return
        means, is_linear = list(new_means), True
        if not is_by_hand or self._waiting or any(mean.accumulated for mean in new_means):
            means, is_linear = _survey(outputs)
        accumulated = None
        if means:
            accumulated = means[0].accumulated if is_by_hand else True
        if is_by_hand and any(mean.accumulated is not accumulated for mean in means):
            raise ShardingError(
                "the losses of a backward pass are in part token_mean(..., accumulated=True).\n"
                "Write the same for all losses of one backward pass."
            )
        owners = list(self.owners(outputs, complete=bool(accumulated)))
        if accumulated and not owners:
            raise ShardingError(
                "token_mean(..., accumulated=True) where no optimizer is set up: which gradients wait is not known.\n"
                "Write model, optimizer = fabric.setup(model, optimizer)."
            )
        if not self._are_restored:
            for owner in [owner for owner in owners if owner in self._waiting]:
                if not self.has_gradients(owner):
                    self.forget(owner)
        self._are_restored = False
        continued = [self._waiting[owner] for owner in owners if owner in self._waiting]
        if not means:
            if any(waiting.accumulated for waiting in continued):
                raise _window_refusal("one of them is of a loss without token_mean()")
            return
        if any(waiting.accumulated for waiting in continued) and len(continued) < len(owners):
            raise _steps_refusal()
        fault = _fault_of(means, is_linear)
        if accumulated:
            self._check_accumulated(continued, fault, owners)
            for mean in means:
                mean.reference = continued[0].reference if continued else None
        else:
            _check_single(continued, accumulated)
        self._record(means[0], accumulated, fault, owners)

    def _check_accumulated(self, continued: Sequence[_Waiting], fault: str, owners: Sequence[Any]) -> None:
        """Refuse gradients that can't be brought to one mean with those that wait."""
        has_others = [owner not in self._waiting and self.has_other_gradients(owner) for owner in owners]
        if any(has_others) and not all(has_others):
            raise _steps_refusal()
        if any(has_others):
            raise _window_refusal("one of them is of a loss without token_mean(), or gradients of an earlier step wait")
        if not all(waiting.accumulated for waiting in continued):
            raise _window_refusal("one of them was not declared as one of several")
        faults = [fault, *(waiting.fault for waiting in continued)]
        if continued and any(faults):
            raise _window_refusal(next(filter(None, faults)))

    def _record(self, mean: CountedMean, accumulated: bool | None, fault: str, owners: Sequence[Any]) -> None:
        """Add a pass to what is known of gradients that wait."""
        reference = mean.reference
        if reference is None:
            fallback = torch.ones_like(mean.count) if self._last_count is None else self._last_count
            reference = self._last_count = mean.count.where(mean.count > 0, fallback)
        totals: dict[int, Tensor] = {}  # optimizers that wait for the same step go on with the same tensors
        for owner in owners:
            waiting = self._waiting.get(owner)
            if waiting is None:
                self._waiting[owner] = _Waiting(reference, mean.count, accumulated, fault, is_relative_to_total=True)
                continue
            waiting.total = totals.setdefault(id(waiting.total), waiting.total + mean.count)
            waiting.accumulated, waiting.is_relative_to_total = accumulated, False

    def after_backward(self) -> None:
        """Bring gradients to the mean over all their tokens, if the pass has reduced them."""
        if self.leaves_unreduced:
            return
        references: dict[int, Tensor] = {}
        for owner, waiting in list(self._waiting.items()):
            if waiting.accumulated and not waiting.is_relative_to_total:
                is_empty = waiting.total == 0
                scale_gradients(self.gradients(owner), (waiting.reference / waiting.total).masked_fill(is_empty, 1))
                new_reference = waiting.total.where(~is_empty, waiting.reference)
                waiting.reference = references.setdefault(id(waiting.total), new_reference)
                waiting.is_relative_to_total = True

    def state(self, owners: Sequence[Any]) -> list[dict[str, float] | None]:
        """What to save with gradients that wait, for each of their owners. It waits for the device."""
        return [_as_numbers(self._waiting.get(owner)) for owner in owners]

    def common_state(self) -> dict[str, float] | None:
        """What to save with gradients of a loop's own; ``None`` where no mean over tokens is accumulated.

        Raises:
            ShardingError: Optimizers wait with gradients of different passes.
        """
        states = [state for state in self.state(list(self._waiting)) if state is not None]
        if any(state != states[0] for state in states):
            raise ShardingError(
                "optimizers have accumulated gradients of token_mean() over different passes, of which a checkpoint "
                "holds none.\nSave when the optimizers have stepped."
            )
        return states[0] if states else None

    def load_state(self, owners: Sequence[Any], state: Sequence[Mapping[str, float] | None]) -> None:
        """Go on with gradients that were restored, as :meth:`state` says."""
        tensors: dict[float, Tensor] = {}

        def new_tensor(number: float) -> Tensor:
            return tensors.setdefault(number, torch.tensor(number, dtype=torch.float32, device=self.device))

        for owner, saved in zip(owners, state, strict=False):
            if saved is not None:
                reference, total = new_tensor(saved["reference"]), new_tensor(saved["count"])
                self._waiting[owner] = _Waiting(reference, total, True, "", bool(saved["is_relative_to_total"]))
                self._are_restored = True


def _as_numbers(waiting: _Waiting | None) -> dict[str, float] | None:
    if waiting is None or not waiting.accumulated:
        return None
    return {
        "count": float(waiting.total),
        "reference": float(waiting.reference),
        "is_relative_to_total": waiting.is_relative_to_total,
    }


def _check_single(continued: Sequence[_Waiting], accumulated: bool | None) -> None:
    """Refuse a second backward pass if nothing says what the step is to take of both."""
    for waiting in continued:
        if waiting.accumulated:
            raise _window_refusal("one of them was not declared as one of several")
        if accumulated is None and waiting.accumulated is None:
            raise ShardingError(
                "a second backward pass of a loss of token_mean() before the optimizer's step, and nothing says "
                "whether both are of micro-batches of one step, whose mean is over the tokens of both, or two losses, "
                "whose gradients are added.\n"
                "Write token_mean(loss, count, accumulated=True) for micro-batches, and divide by nothing; "
                "accumulated=False for two losses; or optimizer.zero_grad() before this pass, if its gradients are to "
                "replace the others."
            )


def _fault_of(means: Sequence[CountedMean], is_linear: bool) -> str:
    """Why the gradients of a pass can't be brought to the mean over the tokens of several; empty if they can."""
    if not is_linear:
        return "the loss of one of them is more than token_mean() times numbers"
    if not all(mean.is_over_same_tokens(means[0]) for mean in means):
        return "the loss of one of them has two token_mean() whose counts are not the same object"
    return ""


def _steps_refusal() -> ShardingError:
    return ShardingError(
        "optimizers step after different backward passes of token_mean(..., accumulated=True): to whose gradients a "
        "pass has added is not known, since libraries add zeros to those that a loss does not depend on.\n"
        "Step all optimizers after the same passes; or finish one optimizer's passes and step, and write "
        "optimizer.zero_grad() of the other before its first pass."
    )


def _window_refusal(fault: str) -> ShardingError:
    return ShardingError(
        f"a step takes several backward passes with token_mean(), and {fault}. How many tokens it has is known when "
        "its last micro-batch comes, and one factor can then correct only gradients that are all of one count.\n"
        "Give each loss as token_mean() with the same count object, added up: "
        "n = (labels != -100).sum(); token_mean(losses, n) + token_mean(other * n, n). Or step after each backward "
        "pass, with accumulate_grad_batches=1: there all losses can be added as they are."
    )


def _survey(outputs: Sequence[Any]) -> tuple[list[CountedMean], bool]:
    """The means that a loss is made of, and whether it is made of nothing else, and linear in them."""
    means: list[CountedMean] = []
    is_linear = True
    for node in graph_nodes(outputs, is_end=lambda node: hasattr(node, "counted_mean")):
        mean = getattr(node, "counted_mean", None)
        if mean is not None:
            means.append(mean)
            continue
        name = node.name()
        inputs = [next_node for next_node, _ in node.next_functions if next_node is not None]
        is_linear &= name in _LINEAR and bool(inputs) and not (len(inputs) > 1 and name.startswith(_PRODUCTS))
    return means, is_linear


class LoopWindow(TokenWindow):
    """A loop without a strategy of ours: one process, or ranks whose gradients torch or another library averages.

    It knows no optimizers: the gradients that wait are those of the leaves that a loss depends on, together.
    """

    def __init__(self) -> None:
        super().__init__()
        self._leaves: list[ref[Tensor]] = []

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def ranks(self) -> int:
        return dist.get_world_size() if dist.is_initialized() else 1

    @property
    def divisor(self) -> int | None:
        return None

    def sum_over_ranks(self, tensor: Tensor) -> Tensor:
        return ProcessGroupRuntime().all_reduce(tensor, "sum")

    def owners(self, outputs: Sequence[Any], *, complete: bool) -> Iterable[Hashable]:
        leaves = (ref(node.variable) for node in graph_nodes(outputs) if hasattr(node, "variable"))
        self._leaves = list(leaves) if complete else list(islice(leaves, 1))
        return [self]

    def gradients(self, owner: Any) -> Iterator[Tensor]:
        leaves = (reference() for reference in self._leaves)
        return (leaf.grad for leaf in leaves if leaf is not None and leaf.grad is not None)

    def forget(self, owner: Any) -> None:
        super().forget(self)


@dataclass
class _Thread(threading.local):
    """What belongs to a rank: some are threads of one process."""

    window: ref[TokenWindow] | None = None
    alone: TokenWindow | None = None
    new_means: list[CountedMean] = field(default_factory=list)


_thread = _Thread()
_is_installed = False


def use_window(window: TokenWindow | None) -> None:
    """Set in which run this rank is; ``None`` after it."""
    _thread.window = None if window is None else ref(window)


def current_window() -> TokenWindow:
    """The run that this rank is in."""
    window = None if _thread.window is None else _thread.window()
    if window is None:
        # Lightning's own strategies say nothing; what knows of their steps is imported with Lightning, or not at all
        elsewhere: Any = sys.modules.get("fsdp_core.lightning.registration.token_means_elsewhere")
        window = None if elsewhere is None else elsewhere.window_of_running_step()
    if window is not None:
        return window
    if _thread.alone is None:
        _thread.alone = LoopWindow()
    return _thread.alone


def note_mean(mean: CountedMean) -> None:
    """Record that a mean was computed of which a backward pass may begin."""
    _thread.new_means.append(mean)
    follow_passes()


def follow_passes() -> None:
    """Let windows know of backward passes and steps from now on. Idempotent."""
    global _is_installed
    with _lock:
        if not _is_installed:
            call_around_backward(_before_backward, _after_backward)
            register_optimizer_step_post_hook(_after_step)
            _is_installed = True


def _before_backward(outputs: Sequence[Any]) -> None:
    new_means, _thread.new_means = _thread.new_means, []
    current_window().before_backward(outputs, new_means)


def _after_backward() -> None:
    current_window().after_backward()


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    with _lock:
        windows = list(_windows)
    for window in windows:
        window.note_step(optimizer)
