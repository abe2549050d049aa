"""Models of transformers on parts of sequences: their positions, masks and shifted labels, from the whole sequence."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fsdp_core import ShardingError, UnsupportedCapabilityError, gather_sequence, sequence_positions, shift_labels
from fsdp_fsdp2.context_parallel.first_pass import unsplit_length_error

if TYPE_CHECKING:
    from fsdp_fsdp2.context_parallel.attention_and_losses import ContextParallel

__all__ = ["check_transformers", "follow_transformers"]

#: Arguments that would mean the whole sequence to the caller, and a part to the model.
_REFUSED_ARGUMENTS = ("past_key_values", "num_items_in_batch", "logits_to_keep")

#: The losses of transformers that compare each position's logits with that position's label.
_BY_POSITION = ("ForMaskedLM", "ForTokenClassification")


def _models(root: nn.Module) -> Iterator[nn.Module]:
    """The models of transformers in a module, without those inside them."""
    library = sys.modules.get("transformers")
    pretrained = getattr(library, "PreTrainedModel", ()) if library is not None else ()
    inside: set[nn.Module] = set()
    for module in root.modules():
        if isinstance(module, pretrained) and module not in inside:
            inside.update(module.modules())
            yield module


def check_transformers(root: nn.Module) -> None:
    """Refuse models of transformers whose attention is not, or not only, that of ``scaled_dot_product_attention``.

    Raises:
        UnsupportedCapabilityError: There is such a model.
    """
    for model in _models(root):
        config: Any = model.config
        implementation = getattr(config, "_attn_implementation", None)
        layer_types = set(getattr(config, "layer_types", None) or ())
        other_types = layer_types - {"full_attention"}
        refusal = None
        remedy = "Leave context_parallel_size out"
        if implementation != "sdpa":
            refusal = f"its attention is {implementation!r}, and must be 'sdpa'"
            remedy = "Build it with attn_implementation='sdpa'"
        elif getattr(config, "is_encoder_decoder", False):
            refusal = "it is an encoder with a decoder"
        elif other_types or (getattr(config, "sliding_window", None) and not layer_types):
            attention = ", ".join(sorted(other_types)) or f"sliding_window={config.sliding_window}"
            refusal = f"its layers have another attention than to all positions ({attention})"
        elif _is_causal(model) is None:
            refusal = "its layers don't say, or not all alike, whether they are causal"
        if refusal is not None:
            raise UnsupportedCapabilityError(
                f"{_name(model)} can't be trained with context parallelism: {refusal}.\n{remedy}."
            )


def _is_causal(model: nn.Module) -> bool | None:
    """Whether a model's layers are causal; ``None`` if they don't say so, or differ."""
    causal_flags = {bool(module.is_causal) for module in model.modules() if hasattr(module, "is_causal")}
    return causal_flags.pop() if len(causal_flags) == 1 else None


def follow_transformers(root: nn.Module, active: Callable[[], ContextParallel | None]) -> None:
    """Let models of transformers get arguments for the whole sequence in each forward pass.

    Args:
        root: The module that contains them.
        active: The context of the running forward pass; ``None`` without one.
    """

    def complete_call(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        context = active()
        if context is None:
            return None
        named = _arguments_by_name(model, args, kwargs)
        _complete_arguments(model, named, context)
        context.models_with_positions += 1
        return (), named

    def count_end(model: nn.Module, args: Any, output: Any) -> None:
        context = active()
        if context is not None and context.models_with_positions:
            context.models_with_positions -= 1

    for model in _models(root):
        model.register_forward_pre_hook(complete_call, with_kwargs=True)
        model.register_forward_hook(count_end, always_call=True)


def _arguments_by_name(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name."""
    bound = inspect.signature(model.forward).bind_partial(*args, **kwargs)
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        if bound.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            named.update(value)
        else:
            named[name] = value
    return named


def _complete_arguments(model: nn.Module, named: dict[str, Any], context: ContextParallel) -> None:
    """Add to the arguments of a call those that depend on the whole sequence, or replace them."""
    inputs = named.get("input_ids")
    inputs = named.get("inputs_embeds") if inputs is None else inputs
    if not isinstance(inputs, Tensor) or inputs.ndim < 2:
        raise ShardingError(
            f"{_name(model)} was called without input_ids and inputs_embeds, whose positions are not known.\n"
            "Pass one of them, or leave context_parallel_size out."
        )
    batch, length = inputs.shape[:2]
    if length not in context.split.lengths:
        raise unsplit_length_error(length, context.split.lengths)
    refused = [name for name in _REFUSED_ARGUMENTS if _is_given(named.get(name))]
    if refused:
        raise ShardingError(
            f"{refused[0]} can't be passed to {_name(model)} with context parallelism, where it would mean "
            "this rank's part of the sequence.\n"
            "Leave it out. A loss is the mean over the labels of all context-parallel ranks; compute another one by "
            "hand."
        )
    causal = bool(_is_causal(model))
    positions = named.get("position_ids")
    uses_cache = named.get("use_cache")
    uses_cache = getattr(model.config, "use_cache", False) if uses_cache is None else uses_cache
    mask = named.get("attention_mask")
    if mask is None or mask.ndim == 2:
        document = None
        if mask is None and causal and positions is not None and positions.ndim == 2:
            document = _number_documents(gather_sequence(positions))
            if document is not None and uses_cache:
                raise ShardingError(
                    "position_ids are those of packed sequences, which transformers keeps apart only without a cache.\n"
                    "Pass use_cache=False, or set model.config.use_cache = False; or pass an attention_mask."
                )
        padding = None if mask is None else gather_sequence(mask).bool()
        named["attention_mask"] = _make_mask(document, padding, causal, length, context)
    parameters = inspect.signature(model.forward).parameters
    if positions is None and "position_ids" in parameters:
        named["position_ids"] = sequence_positions(length, inputs.device).expand(batch, -1)
    elif positions is None:
        raise ShardingError(
            f"{_name(model)} takes no position_ids, and would count each rank's positions from 0.\n"
            "Leave context_parallel_size out."
        )
    if "use_cache" in parameters:
        named["use_cache"] = False  # it would hold keys of this rank alone
    if named.get("labels") is not None:
        _shift_labels(model, named, parameters)


def _name(model: nn.Module) -> str:
    """The name of a model's class, before it was sharded."""
    return type(model).__name__.removeprefix("FSDP")


def _is_given(value: object) -> bool:
    return isinstance(value, Tensor) or bool(value)


def _number_documents(positions: Tensor) -> Tensor | None:
    """The index of the packed sequence that each position belongs to; ``None`` if each row is one sequence.

    As transformers decides: a new one begins where positions don't follow each other.
    """
    first = positions[:, :1] - 1
    document = (torch.diff(positions, prepend=first, dim=-1) != 1).cumsum(-1)
    return document if bool(document[:, -1].any()) else None


def _make_mask(
    document: Tensor | None, padding: Tensor | None, causal: bool, length: int, context: ContextParallel
) -> Tensor | None:
    """Which keys of the whole sequence each position of this rank sees; ``None`` if layers decide that by themselves.

    Returns:
        Shape ``(batch, 1, length, whole length)``; transformers passes a mask of four dimensions on to attention.
    """
    if document is None and (padding is None or bool(padding.all())):
        return None
    full = document if document is not None else padding
    assert full is not None
    keys = torch.ones_like(full[0], dtype=torch.int64).cumsum(0) - 1  # as arange(), which FirstPass refuses
    rows = keys.narrow(0, context.split.rank * length, length)
    sees = (rows[:, None] >= keys) if causal else torch.ones(length, len(keys), dtype=torch.bool, device=keys.device)
    sees = sees.expand(len(full), -1, -1)
    if document is not None:
        sees = sees & (document[:, rows, None] == document[:, None, :])
    if padding is not None:
        sees = sees & padding[:, None, :]
    return sees[:, None]


def _shift_labels(model: nn.Module, named: dict[str, Any], parameters: Any) -> None:
    """Shift the labels of a causal language model by one position, across the boundaries between ranks' parts."""
    loss = getattr(model, "loss_type", None)
    if loss is None and _name(model).endswith("LMHeadModel"):
        loss = "ForCausalLM"  # the default of transformers, for a class whose name does not say it
    if loss in _BY_POSITION:
        return
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    if loss != "ForCausalLM" or not (takes_any or "shift_labels" in parameters):
        raise ShardingError(
            f"{_name(model)} computes a loss ({loss}) from labels= that is not known to be right on a part of "
            "a sequence.\n"
            "Leave labels out, and compute the loss from its logits and fsdp_core.shift_labels(labels)."
        )
    if named.get("shift_labels") is None:
        named["shift_labels"] = shift_labels(named["labels"])
