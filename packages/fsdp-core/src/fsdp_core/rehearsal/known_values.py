"""The values that a rehearsal has: integers and masks of the batch are computed, all else is assumed and told.

A fake tensor has no values. Code that asks for them (``if loss > 3``, ``mask.nonzero()``, ``lengths.max().item()``)
gets the real answer where it follows from integers of the real batch, which are computed beside the fakes. Elsewhere
it gets an assumption, which the report shows with the line that has asked.
"""

from __future__ import annotations

import functools
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fsdp_core.rehearsal.users_code import is_users
from fsdp_core.torch_private.fake_tensors import (
    CTC_LOSS,
    GROUPED_MM,
    ITEM,
    PACK_PADDED,
    UNIQUE,
    FakeTensor,
    is_mutable,
    no_dispatch,
    operator_name,
    tree_leaves,
    tree_map_only,
)
from fsdp_core.torch_private.tensors import TorchDispatchMode

__all__ = ["Assumption", "KnownValues", "users_line"]

_aten = torch.ops.aten

#: Results with more elements are not computed: they are masks of attention, over which no one branches.
_MAX_NUMEL = 1 << 22

#: A question whose answer decides how long a loop runs is answered with the other answer from the fifth time on.
_SAME_ANSWERS = 4

#: Operators that return bools of which "no" is the usual answer: all numbers are finite.
_USUALLY_FALSE = frozenset({"isnan", "isinf", "isposinf", "isneginf"})

#: Operators that only look at their first argument otherwise.
_VIEWS = frozenset({"view", "reshape", "detach", "clone", "alias", "select", "squeeze", "unsqueeze", "expand", "all"})


@dataclass(frozen=True)
class Assumption:
    """What was assumed of values that a rehearsal does not have.

    Attributes:
        what: The assumption, in words.
        location: The file and line that has asked for the values.
    """

    what: str
    location: str


class KnownValues(TorchDispatchMode):
    """Answers questions about values of fake tensors.

    Attributes:
        assumptions: The assumptions, with how often each was used.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.assumptions: Counter[Assumption] = Counter()
        self._real_of: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._usual_answers: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # of bools that are not known
        self._drawn_between: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # of random numbers: two bounds
        self._times_asked: Counter[str] = Counter()

    def know(self, fake: Tensor, real: Tensor) -> None:
        """Tell the values of a fake tensor, if they are worth computing with.

        Args:
            fake: The fake tensor.
            real: A tensor with its values.
        """
        if not real.is_floating_point() and not real.is_complex() and real.numel() <= _MAX_NUMEL:
            with no_dispatch():
                self._real_of[fake] = real.clone()  # what is written to the fake is written to it too

    def real_if_known(self, tensor: Tensor) -> Tensor:
        """A real tensor with the values of a fake one, if they are known; otherwise the tensor itself."""
        real: Tensor = self._real_of.get(tensor, tensor)
        return real

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        answer = _ANSWERS.get(func)
        if answer is not None:
            return answer(self, func, args, kwargs)
        result = func(*args, **kwargs)
        if func.namespace == "c10d" and operator_name(func) == "allgather_":
            self._gather(args)
        else:
            self._compute_beside(func, args, kwargs, result)
        return result

    # -- real values -----------------------------------------------------------------------------------------------

    def _real(self, value: Any) -> Any:
        """A value with real tensors in place of fake ones.

        Raises:
            KeyError: One of the tensors has no known values.
        """
        return tree_map_only(Tensor, self._real_tensor, value)

    def _real_tensor(self, tensor: Tensor) -> Tensor:
        real = self._real_of.get(tensor)
        if real is None and type(tensor) is Tensor:
            real = tensor  # a tensor of the script's, or what it has just made of a list
        if real is None or real.is_floating_point() or real.is_complex() or real.device.type == "meta":
            raise KeyError
        plain: Tensor = real
        return plain

    def _gather(self, args: Any) -> None:
        """Know what ranks gather, of which each has what this one has."""
        for outputs, tensor in zip(args[0], args[1], strict=False):
            try:
                real = self._real_tensor(tensor)
            except KeyError:
                continue
            for output in outputs:
                known = self._real_of.get(output)
                with no_dispatch():
                    if known is not None:
                        known.copy_(real)  # it may be a view
                    else:
                        self._real_of[output] = real.clone()

    def _compute_beside(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Compute what an operator returns, where all of its arguments are known."""
        results = [value for value in tree_leaves(result) if isinstance(value, Tensor)]
        bounds = _bounds_of_drawing(operator_name(func), args)
        for value in results:
            if bounds is not None:
                self._drawn_between[value] = bounds
            if value.dtype is torch.bool:
                self._follow_usual_answer(operator_name(func).rstrip("_"), args, value)
        is_small = all(not r.is_floating_point() and not r.is_complex() and r.numel() <= _MAX_NUMEL for r in results)
        arguments = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        try:
            if not results or not is_small or torch.Tag.nondeterministic_seeded in func.tags or _is_unfilled(func):
                raise KeyError
            real_args, real_kwargs = self._real((args, kwargs))
            with no_dispatch():
                real_result = func(*real_args, **_on_cpu(real_kwargs))
            reals = [value for value in tree_leaves(real_result) if isinstance(value, Tensor)]
            for value, real in zip(results, reals, strict=True):
                self._real_of[value] = real
        except Exception:
            if is_mutable(func):  # what was known of what it writes to, an out= too, is no longer so
                for tensor in (*arguments[:1], *results):
                    self._real_of.pop(tensor, None)

    # -- answers ---------------------------------------------------------------------------------------------------

    def assume(self, what: str) -> None:
        """Note an assumption, with the line of the user's that has asked.

        Args:
            what: The assumption, in words.
        """
        location = users_line()
        if location:
            self.assumptions[Assumption(what, location)] += 1

    def item(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The value of a tensor with one element."""
        (tensor,) = args
        if tensor in self._real_of:
            with no_dispatch():
                return self._real_of[tensor].item()
        if type(tensor) is Tensor:  # of the script's own, and not fake
            with no_dispatch():
                return tensor.item()
        constant = getattr(tensor, "constant", None)  # torch keeps the value of torch.tensor(3)
        if constant is not None:
            return constant.item()
        if tensor.dtype is torch.bool:
            return self._decide(tensor)
        low, high = self._drawn_between.get(tensor, (1, 1))
        number: complex = (low + high) / 2 if tensor.is_floating_point() else int(low)
        self.assume(f"a value is {number}")
        return complex(number) if tensor.is_complex() else number

    def _follow_usual_answer(self, operator: str, args: Any, result: Tensor) -> None:
        """Note what the elements of a bool usually are, if it follows from that numbers are finite."""
        usual = [self._usual_answers.get(value) for value in args[:2] if isinstance(value, Tensor)]
        answer: bool | None = None
        if operator in _USUALLY_FALSE:
            answer = False
        elif operator in ("eq", "ne") and len(args) > 1:
            other = args[1]
            if isinstance(other, float) and math.isinf(other):
                answer = operator == "ne"
            elif operator == "ne" or other is args[0]:
                answer = operator == "eq"
        elif operator in ("logical_not", "bitwise_not"):
            answer = usual == [False]
        elif operator == "any":
            answer = usual == [True]
        elif operator in _VIEWS:
            answer = usual[0] if usual else None
        elif None not in usual and operator in ("logical_and", "bitwise_and", "mul"):
            answer = all(usual)
        elif None not in usual and operator in ("logical_or", "bitwise_or", "add"):
            answer = any(usual)
        if answer is not None:
            self._usual_answers[result] = answer

    def _decide(self, tensor: Tensor) -> bool:
        answer = bool(self._usual_answers.get(tensor, True))
        location = users_line()
        self._times_asked[location] += 1
        if self._times_asked[location] > _SAME_ANSWERS:
            answer = bool(self._times_asked[location] % 2)
        self.assume(f"a condition is {answer}")
        return answer

    def nonzero(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        """The indices of what is not zero: of all elements, if the values are not known."""
        (tensor,) = args
        real = self._known_result(func, args, kwargs)
        if real is None:
            self.assume("all elements of a mask are set")
            return _empty(tensor, (tensor.numel(), tensor.dim()))
        return self._fake_of(tensor, real)

    def unique(self, func: Any, args: Any, kwargs: Any) -> tuple[Tensor, ...]:
        """The distinct values: as many as there are elements, if the values are not known."""
        tensor = args[0]
        reals = self._known_result(func, args, kwargs)
        if reals is not None:
            return tuple(self._fake_of(tensor, real) for real in reals)
        self.assume("no two values are equal")
        count = (tensor.numel(),)
        return _empty(tensor, count, tensor.dtype), _empty(tensor, tensor.shape), _empty(tensor, count)

    def masked_select(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        """The elements that a mask selects: all of them, if it is not known."""
        tensor, mask = args
        shape = torch.broadcast_shapes(tensor.shape, mask.shape)
        if mask in self._real_of:
            with no_dispatch():
                count = int(self._real_of[mask].expand(shape).sum())
        else:
            self.assume("all elements of a mask are set")
            count = shape.numel()
        return _empty(tensor, (count,), tensor.dtype)

    def index(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Indexing, in which masks become the indices of what they select."""
        position = 1
        indices: list[Any] = []
        for index in args[position]:
            if index is not None and index.dtype in (torch.bool, torch.uint8):
                indices += self.nonzero(_aten.nonzero.default, (index,), {}).unbind(1)
            else:
                indices.append(index)
        with_indices = [*args]
        with_indices[position] = indices
        result = func(*with_indices, **kwargs)
        self._compute_beside(func, tuple(with_indices), kwargs, result)
        return result

    def equal(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether two tensors are equal: assumed so, if the values are not known."""
        real = self._known_result(func, args, kwargs)
        if real is not None:
            return bool(real)
        self.assume("two tensors are equal")
        return True

    def repeat_interleave(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        """The indices that repeat each element: once each, if the counts are not known."""
        real = self._known_result(func, args, kwargs)
        if real is not None:
            return self._fake_of(args[0], real)
        size = kwargs.get("output_size")
        if size is None:
            self.assume("counts of repetitions are 1")
            size = args[0].numel()
        return _empty(args[0], (size,))

    def bincount(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        """How often each integer occurs: of ``minlength`` integers, if the values are not known."""
        real = self._known_result(func, args, kwargs)
        if real is not None:
            return self._fake_of(args[0], real)
        length = kwargs.get("minlength", args[2] if len(args) > 2 else 0) or 1
        self.assume(f"values are below {length}")
        return _empty(args[0], (length,))

    def grouped_mm(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        """Products of groups of rows, for which torch has no fake but in bfloat16."""
        left, right = args[:2]
        result: Tensor
        if left.dtype is torch.bfloat16:
            result = func(*args, **kwargs)
            return result
        offsets = kwargs.get("offs", args[2] if len(args) > 2 else None)
        groups = () if left.dim() + right.dim() == 5 else (left.shape[0] if left.dim() == 3 else offsets.numel(),)
        result = left.new_empty((*groups, left.shape[-2], right.shape[-1]))
        return result

    def pack_padded(self, func: Any, args: Any, kwargs: Any) -> tuple[Tensor, Tensor]:
        """A packed batch of sequences: of equal lengths, if these are not known.

        The sizes of its steps are real: torch reads them in C++.
        """
        padded, lengths, is_batch_first = args
        batch, steps = padded.shape[:2] if is_batch_first else reversed(padded.shape[:2])
        try:
            real = self._real_tensor(lengths)
        except KeyError:
            self.assume("all sequences are as long as the longest")
            real = None
        with no_dispatch():
            if real is None:
                real = torch.full((batch,), steps)
            rows, sizes = func(torch.empty(padded.shape[:2]), real, is_batch_first)
        return padded.new_empty((len(rows), *padded.shape[2:])), sizes

    def ctc_loss(self, func: Any, args: Any, kwargs: Any) -> tuple[Tensor, Tensor]:
        """The loss of connectionist temporal classification, whose memory depends on the longest target."""
        log_probs, targets, _, lengths = args[:4]
        try:
            real = self._real_tensor(lengths)
            with no_dispatch():
                longest = int(real.max())
        except KeyError:
            self.assume("targets have no padding")
            longest = targets.shape[1] if targets.dim() == 2 else -(-targets.numel() // lengths.numel())
        steps, batch = log_probs.shape[:2]
        return log_probs.new_empty((batch,)), log_probs.new_empty((batch, steps, 2 * longest + 1))

    def _known_result(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What an operator returns on the real values; ``None`` if they are not known."""
        try:
            real_args, real_kwargs = self._real((args, kwargs))
        except KeyError:
            return None
        with no_dispatch():
            return func(*real_args, **_on_cpu(real_kwargs))

    def _fake_of(self, like: Tensor, real: Tensor) -> Tensor:
        fake = _empty(like, real.shape, real.dtype)
        self.know(fake, real)
        return fake

    # -- values that leave torch -----------------------------------------------------------------------------------

    def to_numpy(self, tensor: Tensor) -> Any:
        """The values as an array: zeros, if they are not known."""
        if tensor in self._real_of:
            with no_dispatch():
                return self._real_of[tensor].numpy()
        self.assume("values are 0")
        with no_dispatch():
            return torch.zeros(tuple(tensor.shape), dtype=tensor.dtype).numpy()

    def __enter__(self) -> Any:
        self._arrays = _arrays_of_fakes(self)
        self._arrays.__enter__()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._arrays.__exit__(*error)


_Answer = Callable[[KnownValues, Any, Any, Any], Any]

_ANSWERS: dict[Any, _Answer] = {
    ITEM: KnownValues.item,
    _aten.nonzero.default: KnownValues.nonzero,
    UNIQUE: KnownValues.unique,
    _aten.masked_select.default: KnownValues.masked_select,
    _aten.index.Tensor: KnownValues.index,
    _aten.equal.default: KnownValues.equal,
    _aten.repeat_interleave.Tensor: KnownValues.repeat_interleave,
    _aten.bincount.default: KnownValues.bincount,
    GROUPED_MM: KnownValues.grouped_mm,
    PACK_PADDED: KnownValues.pack_padded,
    CTC_LOSS: KnownValues.ctc_loss,
}


@contextmanager
def _arrays_of_fakes(values: KnownValues) -> Iterator[None]:
    """A context in which fake tensors can become arrays of numpy."""

    @functools.wraps(Tensor.numpy)
    def numpy(tensor: Tensor, *, force: bool = False) -> Any:
        return values.to_numpy(tensor)

    def as_array(tensor: Tensor, dtype: Any = None, copy: bool | None = None) -> Any:
        array = values.to_numpy(tensor)
        return array if dtype is None else array.astype(dtype)

    def as_text(tensor: Tensor, form: str) -> str:
        return format(tensor.item(), form) if form and tensor.dim() == 0 else format(str(tensor), form)

    FakeTensor.numpy = numpy  # type: ignore[method-assign,assignment]
    FakeTensor.__array__ = as_array  # type: ignore[method-assign]
    FakeTensor.__format__ = as_text  # type: ignore[method-assign]
    try:
        yield
    finally:
        del FakeTensor.numpy
        del FakeTensor.__array__
        del FakeTensor.__format__


def _empty(like: Tensor, shape: Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
    """A fake tensor on the device of another one."""
    return like.new_empty(tuple(shape), dtype=dtype)


def _bounds_of_drawing(operator: str, args: Any) -> tuple[float, float] | None:
    """Between which numbers an operator draws: code takes them as indices, of which 1 may be none."""
    if operator == "rand":
        return 0.0, 1.0
    if operator == "uniform_":
        return (args[1] if len(args) > 1 else 0.0), (args[2] if len(args) > 2 else 1.0)
    if operator == "randint":
        return (0, args[0]) if isinstance(args[1], (list, tuple)) else (args[0], args[1])
    return None


def _is_unfilled(func: Any) -> bool:
    return operator_name(func).startswith(("empty", "new_empty"))


def _on_cpu(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**kwargs, "device": torch.device("cpu")} if kwargs.get("device") is not None else kwargs


#: The first names of modules that ask for values only to check what a rehearsal does not have.
_OURS = ("torch", "lightning", "fsdp_", "contextlib", "runpy", "click")


def users_line() -> str:
    """The innermost line on the stack that no library has; that of a library which asked, if there is none.

    Empty if nobody but torch, Lightning and this project is on the stack of the fit that is rehearsed.
    """
    frame: Any = sys._getframe(2)
    of_library = ""
    while frame is not None:
        file, module = frame.f_code.co_filename, str(frame.f_globals.get("__name__", ""))
        if module == _START:
            break
        name_in_library = file.partition("site-packages/")[2]
        if not module.startswith(_OURS) or module.startswith("torchmetrics"):
            if not name_in_library and is_users(file):
                return f"{file}:{frame.f_lineno}"
            of_library = of_library or (f"{name_in_library}:{frame.f_lineno}" if name_in_library else "")
        frame = frame.f_back
    return of_library


#: The module that starts the fit: what is further out on the stack has called the rehearsal.
_START = "fsdp_core.rehearsal.fit"
