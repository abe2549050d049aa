"""Context parallelism: attention over the whole sequence, of which a rank has a part, and losses over all its tokens.

``torch.nn.functional.scaled_dot_product_attention`` is replaced by a function that, in a forward pass of a
context-parallel module, gathers keys and values over the context-parallel ranks first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any, NamedTuple
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.attention.bias import CausalBias, causal_lower_right

from fsdp_core import ShardingError, UnsupportedCapabilityError, gather_sequence
from fsdp_core.sharding import SequenceSplit, current_split, outside_of_compilation, sharded_of, use_split
from fsdp_core.state import gathered_modules
from fsdp_fsdp2.context_parallel.first_pass import FirstPass, unsplit_length_error
from fsdp_fsdp2.context_parallel.transformers_models import check_transformers, follow_transformers
from fsdp_fsdp2.torch_private.forward_passes import recomputes

__all__ = ["ContextParallel", "check_splittable", "checked_dims"]

#: The parameters of torch's losses after their input and target, in order; not all have the last.
_OPTIONS = ("weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")

#: The original functions of torch that are replaced, by name.
_torch_functions: dict[str, Any] = {}

#: The module whose forward pass is running, and the last one with gradients, which a backward pass may recompute.
_active: ContextParallel | None = None
_latest: ref[ContextParallel] | None = None


class _RunningPass(NamedTuple):
    """A forward pass of a root.

    Attributes:
        outer_active: What :data:`_active` was before the pass, and is again after it.
        outer_split: The split of batches before the pass.
        outer_fast_path: Whether torch's fast path of attention was on before the pass.
        first_pass: The checks of the pass, if it is the first one in this mode.
    """

    outer_active: ContextParallel | None
    outer_split: SequenceSplit | None
    outer_fast_path: bool
    first_pass: FirstPass | None


class ContextParallel:
    """One context-parallel module and its forward passes, in which torch's functions see the whole sequence.

    Args:
        root: The module, sharded.

    Attributes:
        split: How its batches are split.
        is_calling_torch: Whether one of the functions here is calling the original one.
        models_with_positions: The number of running forward passes of models that were given the positions of tokens.
    """

    split: SequenceSplit

    def __init__(self, root: nn.Module) -> None:
        self.root = ref(root)
        self.is_calling_torch = False
        self.models_with_positions = 0
        self._has_attended = False
        self._running: list[_RunningPass] = []
        self._checked_modes: set[bool] = set()  # root.training of the first passes that were checked
        #: Whether leave() was called for the pass that ends now: if not, an exception has ended the pass.
        self._has_left = False
        _replace_functions()
        root.register_forward_pre_hook(_enter)  # after the hook of fully_shard, and before those for transformers
        follow_transformers(root, lambda: _active)
        root.register_forward_hook(_leave_after_error, prepend=True, always_call=True)
        root.register_forward_hook(_leave, prepend=True)

    def enter(self, root: nn.Module, split: SequenceSplit) -> None:
        """Begin a forward pass of the root."""
        global _active, _latest
        self.split = split
        outer_split = current_split()
        use_split(split)  # also outside of the Trainer's stages, which set it too
        is_first = root.training not in self._checked_modes and bool(split.lengths) and not self._running
        first_pass = FirstPass(self, root) if is_first else None
        outer_fast_path = torch.backends.mha.get_fastpath_enabled()
        self._running.append(_RunningPass(_active, outer_split, outer_fast_path, first_pass))
        torch.backends.mha.set_fastpath_enabled(False)  # the fast path does not call scaled_dot_product_attention
        _active = self
        if torch.is_grad_enabled():
            _latest = ref(self)
        if first_pass is not None:
            first_pass.begin()

    def leave(self, root: nn.Module, *, failed: bool) -> None:
        """End a forward pass of the root, if one is running.

        Raises:
            ShardingError: No forward pass of the root has called attention.
        """
        global _active
        self._has_left = not failed
        if not self._running:
            return
        ended = self._running.pop()
        _active = ended.outer_active
        if ended.first_pass is not None:
            ended.first_pass.end()
        torch.backends.mha.set_fastpath_enabled(ended.outer_fast_path)
        if ended.outer_split is None and not torch.is_grad_enabled():
            use_split(None)  # otherwise a loss and a backward pass, which may recompute, still need it
        if not self._running:
            self.is_calling_torch, self.models_with_positions = False, 0
        if failed:
            return
        if ended.first_pass is not None:
            self._checked_modes.add(root.training)
        if not self._has_attended and self.split.lengths:
            raise ShardingError(
                f"context parallel on a model without SDPA: {type(root).__name__} has not called "
                "torch.nn.functional.scaled_dot_product_attention in its first forward pass, so each rank has computed "
                "on its part of the sequence alone.\n"
                "Let attention layers call it (attn_implementation='sdpa' for transformers), or leave "
                "context_parallel_size out."
            )

    def leave_after_error(self, root: nn.Module) -> None:
        """End a forward pass if an exception has ended it. Called after every one."""
        if self._has_left:
            self._has_left = False
        else:
            self.leave(root, failed=True)

    @outside_of_compilation
    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Attention of this rank's queries to the keys of all ranks; the arguments are those of torch's function.

        Each rank gathers keys and values over the context-parallel ranks and computes its own rows. With ``is_causal``
        it leaves out the keys after its part.

        Args:
            query: Shape ``(..., length, size)``, with the length of a part.
            key: Shape ``(..., length, size)``.
            value: Shape ``(..., length, size)``.
            attn_mask: Its last dimension has the keys of the whole sequence, or is 1. The one before it has the queries
                of this rank or of the whole sequence, or is 1.
            dropout_p: As in torch; each rank draws for itself.
            is_causal: Whether positions see none after them in the whole sequence.
            scale: As in torch.
            enable_gqa: As in torch.

        Raises:
            ShardingError: The lengths are not those of parts, or the mask does not cover the keys.
        """
        split = self.split
        queries, keys = query.shape[-2], key.shape[-2]
        if any(isinstance(tensor, DTensor) for tensor in (query, key, value)):
            raise ShardingError(
                "attention was called with DTensors, which context parallelism can't gather.\n"
                "Let the layers before it return local tensors: ColwiseParallel(use_local_output=True), the default."
            )
        for length in (queries, keys):
            if length not in split.lengths:
                raise unsplit_length_error(length, split.lengths)
        if is_causal and (attn_mask is not None or queries != keys):
            raise ShardingError(
                f"is_causal=True with {'an attn_mask' if attn_mask is not None else f'{queries} queries, {keys} keys'} "
                "has no meaning for a part of a sequence.\nGive one of them, and as many queries as keys."
            )
        first_query = split.rank * queries
        self._has_attended = True
        if key.shape == value.shape and key.dtype == value.dtype:
            key, value = gather_sequence(torch.stack((key, value)), -2).unbind()
        else:
            key, value = gather_sequence(key, -2), gather_sequence(value, -2)
        if is_causal:
            end = first_query + queries
            key, value = key[..., :end, :], value[..., :end, :]
            if first_query > 0:  # torch's is_causal would let the first query here see the first key alone
                attn_mask, is_causal = causal_lower_right(queries, end), False
        elif attn_mask is not None:
            attn_mask = _own_rows(attn_mask, split, queries, keys)
        options = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        with self.draw_own_numbers(query.device) if dropout_p > 0 else self.call_torch():
            return _attend_by_torch(query, key, value, attn_mask, **options)

    @contextmanager
    def call_torch(self) -> Iterator[None]:
        """A context in which a function of torch's is called by one of those here, and is not checked."""
        self.is_calling_torch = True
        try:
            yield
        finally:
            self.is_calling_torch = False

    @contextmanager
    def draw_own_numbers(self, device: torch.device) -> Iterator[None]:
        """As :meth:`call_torch`, and each context-parallel rank draws random numbers of its own in the context.

        Outside of the context the ranks draw the same numbers, such as one noise level for each sample. In it the
        generator is seeded with such a number and the rank. So a recomputation, which restores the generator, draws the
        same again.
        """
        seed = int(torch.randint(2**48, (1,)))
        with (
            self.call_torch(),
            torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type),
        ):
            torch.manual_seed(seed * self.split.size + self.split.rank)
            yield


def _own_rows(mask: Tensor, split: SequenceSplit, queries: int, keys: int) -> Tensor:
    """The rows of a mask for this rank's queries.

    Args:
        mask: The mask.
        split: How sequences are split.
        queries: The number of this rank's queries.
        keys: The number of this rank's keys.
    """
    all_queries, all_keys = split.size * queries, split.size * keys
    if isinstance(mask, CausalBias):
        raise ShardingError(
            "a CausalBias as attn_mask has the length of a part, and counts from its beginning.\nWrite is_causal=True."
        )
    if mask.shape[-1] not in (1, all_keys):
        raise ShardingError(
            f"attn_mask of shape {tuple(mask.shape)} has {mask.shape[-1]} keys, and attention sees the {all_keys} of "
            f"the whole sequence, of which this rank holds {keys}: the mask says nothing about the others.\n"
            "Build it from fsdp_core.gather_sequence(padding), of shape (batch, whole length), and "
            "fsdp_core.sequence_positions(length) for the rows; or split a whole mask of the batch by its rows, with "
            "context_parallel_dims={'mask': 2}."
        )
    if mask.ndim > 1 and mask.shape[-2] == all_queries:
        return mask.narrow(-2, split.rank * queries, queries)
    if mask.ndim > 1 and mask.shape[-2] not in (1, queries):
        raise ShardingError(
            f"attn_mask of shape {tuple(mask.shape)} has {mask.shape[-2]} rows, for {queries} queries of this rank and "
            f"{all_queries} of the whole sequence.\nGive as many rows as either has, or 1."
        )
    return mask


def _attend_by_torch(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any) -> Tensor:
    original = _torch_functions["scaled_dot_product_attention"]
    if not isinstance(mask, CausalBias):
        return original(query, key, value, mask, **options)  # type: ignore[no-any-return]
    replacement = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = original  # a CausalBias refuses any function but the one found here
    try:
        return original(query, key, value, mask, **options)  # type: ignore[no-any-return]
    finally:
        F.scaled_dot_product_attention = replacement


def _active_or_recomputed() -> ContextParallel | None:
    """The module whose forward pass is running, or is being recomputed."""
    if _active is not None or _latest is None or not recomputes():
        return _active
    latest = _latest()
    # unless a strategy without context parallelism has run since, and one of its modules is recomputed
    return latest if latest is not None and latest.split is current_split() else None


def _replace_functions() -> None:
    """Replace the functions of :mod:`torch.nn.functional`, once. They act in context-parallel modules only."""
    if _torch_functions:
        return
    replacements: dict[str, Callable[..., Any]] = {
        "scaled_dot_product_attention": _attention,
        "multi_head_attention_forward": _multi_head_attention,
        "dropout": _dropout,
        "cross_entropy": _cross_entropy,
        "nll_loss": _nll_loss,
    }
    for name, replacement in replacements.items():
        _torch_functions[name] = original = getattr(F, name)
        setattr(F, name, wraps(original)(replacement))


def _attention(*args: Any, **kwargs: Any) -> Any:
    context = _active_or_recomputed()
    if context is not None:
        return context.attend(*args, **kwargs)
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    named = dict(zip(names, args, strict=False)) | kwargs
    mask = named.pop("attn_mask", None)
    split = current_split()
    if split is None and not isinstance(mask, CausalBias):
        return _torch_functions["scaled_dot_product_attention"](*args, **kwargs)
    query, key, value = (named.pop(name) for name in ("query", "key", "value"))
    if split is not None and not gathered_modules:  # calls within gathered() are of whole sequences
        _check_sees_whole_sequence(query, key, split)
    return _attend_by_torch(query, key, value, mask, **named)


def _check_sees_whole_sequence(query: Tensor, key: Tensor, split: SequenceSplit) -> None:
    """Refuse attention over a part of a sequence by a model that the strategy has not set up, such as a teacher.

    Raises:
        ShardingError: Its lengths are those of parts.
    """
    if query.shape[-2] in split.lengths and key.shape[-2] in split.lengths:
        raise ShardingError(
            f"attention was called over {key.shape[-2]} positions, as many as this rank's part of a sequence has, by a "
            "model that is not context parallel: it would see that part alone.\n"
            "Hold the model in the LightningModule and call it in its steps, or set it up with fabric.setup(model); or "
            "give it whole sequences, gathered with fsdp_core.gather_sequence(part)."
        )


def _multi_head_attention(*args: Any, need_weights: bool = True, **kwargs: Any) -> Any:
    if need_weights and _active is not None:
        raise ShardingError(
            "nn.MultiheadAttention was called with need_weights=True, its default, for which it computes attention "
            "without scaled_dot_product_attention, over this rank's part of the sequence alone.\n"
            "Call it with need_weights=False."
        )
    return _torch_functions["multi_head_attention_forward"](*args, need_weights=need_weights, **kwargs)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    context = _active_or_recomputed() if training and p > 0 else None
    if context is None or context.is_calling_torch:  # under FirstPass, torch's dropout calls F.dropout again, this one
        return _torch_functions["dropout"](input, p, training, inplace)
    with context.draw_own_numbers(input.device):
        return _torch_functions["dropout"](input, p, training, inplace)


def _cross_entropy(input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Any:
    return _mean_over_ranks("cross_entropy", input, target, args, kwargs)


def _nll_loss(input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Any:
    return _mean_over_ranks("nll_loss", input, target, args, kwargs)


def _mean_over_ranks(name: str, input: Tensor, target: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A loss of labels. A mean over those of a part becomes this rank's share of the mean over the sequence."""
    split, loss = current_split(), _torch_functions[name]
    options = dict(zip(_OPTIONS, args, strict=False)) | kwargs
    is_old_style = options.get("size_average") is not None or options.get("reduce") is not None
    is_mean = options.get("reduction", "mean") == "mean" and not is_old_style
    if split is None or not is_mean or target.is_floating_point():
        return loss(input, target, *args, **kwargs)
    if target.numel() not in split.targets:
        if target.numel() in split.targets.values():
            raise ShardingError(
                f"{name} was given {target.numel()} labels, one fewer for each sequence than this rank's part of the "
                "batch has: a shift by one position within the part loses the label that the next rank holds.\n"
                "Write labels = fsdp_core.shift_labels(labels) with the labels of the batch, and compare them with all "
                "logits; or shift labels in the dataset. Models of transformers do it if they are given labels=."
            )
        return loss(input, target, *args, **kwargs)
    is_counted = target != options.get("ignore_index", -100)
    weight = options.get("weight")
    count = is_counted.sum() if weight is None else weight[target[is_counted]].sum()
    return split.weight(loss(input, target, **{**options, "reduction": "sum"}), count)


def _enter(root: nn.Module, args: Any) -> None:
    sharded: Any = sharded_of(root)  # a copy of a root has none
    context = getattr(sharded, "context", None)
    if context is not None and sharded.backend.sequence is not None and root not in gathered_modules:
        context.enter(root, sharded.backend.sequence)


def _leave(root: nn.Module, args: Any, output: Any) -> None:
    context = getattr(sharded_of(root), "context", None)
    if context is not None:
        context.leave(root, failed=False)


def _leave_after_error(root: nn.Module, args: Any, output: Any) -> None:
    context = getattr(sharded_of(root), "context", None)
    if context is not None:
        context.leave_after_error(root)


def check_splittable(root: nn.Module) -> None:
    """Refuse a module whose layers are known to mix the positions of a sequence without attention.

    Raises:
        ShardingError: There is such a layer.
        UnsupportedCapabilityError: It is a model of transformers that can't be split.
    """
    for name, module in root.named_modules():
        mixes = isinstance(module, nn.RNNBase) or (isinstance(module, nn.Conv1d) and module.kernel_size[0] > 1)
        if mixes:
            raise ShardingError(
                f"{name or 'the root'} is a {type(module).__name__}, which computes from neighbouring positions, some "
                "of which other ranks hold.\n"
                "Leave context_parallel_size out: it is for models in which only attention combines positions."
            )
    check_transformers(root)


def checked_dims(dims: object) -> Mapping[str, int] | None:
    """Return ``context_parallel_dims`` if it is valid.

    Raises:
        UnsupportedCapabilityError: It is neither a mapping from names to dimensions nor ``None``.
    """
    if dims is None:
        return None
    if (
        not isinstance(dims, Mapping)
        or not dims
        or not all(type(name) is str and type(dim) is int for name, dim in dims.items())
    ):
        raise UnsupportedCapabilityError(
            f"context_parallel_dims={dims!r} does not say which entries of a batch to split.\n"
            "Write a dict from their names to their sequence dimensions, such as {'input_ids': 1, 'labels': 1}."
        )
    return dims
