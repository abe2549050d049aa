"""Notes for errors that torch raises because parameters are sharded, or gathered for a step: what to write instead."""

from __future__ import annotations

import math
import re
import traceback
from collections.abc import Collection
from pathlib import Path
from types import CodeType

import torch
import torch.distributed.tensor
from torch.autograd.function import BackwardCFunction
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from fsdp_core.lightning.outside_steps.redirection import call_inside_forward
from fsdp_core.sharding.sharded import Sharded
from fsdp_core.torch_private.tensors import tree_flatten

__all__ = ["explain_shards", "explain_uncaught_error"]

#: The folder of torch's code for DTensors.
_DTENSOR_FOLDER = Path(torch.distributed.tensor.__file__).parent

# -- errors that are recognised by the message alone -------------------------------------------------------------------

_RESIZE_NOTE = (
    "fsdp-core: a parameter gets another shape after sharding, as resize_token_embeddings() of transformers gives it: "
    "the optimizer and the other ranks hold parts of the old one.\n"
    "Do it before sharding: where the model is made, in __init__ or configure_model; under Fabric, before "
    "fabric.setup()."
)
#: Notes for errors that torch raises in a step because of its own limits, by a part of the error's message.
_NOTES_BY_MESSAGE = {
    "Cannot writeback when the parameter shape changes": _RESIZE_NOTE,
    "setStorage: sizes": (
        "fsdp-core: this may be FSDP1's limit for bf16-mixed and 16-mixed without sharding: with NO_SHARD, and on one "
        "rank with every strategy, it frees what a second graph still needs.\n"
        "On several ranks write sharding_strategy='SHARD_GRAD_OP'; on one, precision='bf16-true'."
    ),
    "resize storage that is not resizable": (
        "fsdp-core: this may be about a gathered parameter of which parameter.detach().numpy() was taken, also by "
        "np.asarray(): torch never frees the memory of an array, and a unit frees its parameters.\n"
        "Write parameter.detach().clone().numpy()."
    ),
    "only change requires_grad flags of leaf variables": (
        "fsdp-core: this may be about a parameter that is frozen or unfrozen in a step while it is gathered, as a part "
        "of one tensor: one of no unit, or of a unit that is gathered ahead.\n"
        "Freeze it before the step; or let it belong to a unit, by auto_wrap_policy, that is not gathered ahead."
    ),
    "backward once on any region computed under selective": (
        "fsdp-core: activation_checkpointing_saves keeps results for one backward pass, and this is another one "
        "through the same call, as retain_graph=True and create_graph=True need it.\n"
        "Leave activation_checkpointing_saves out: then any number of backward passes compute all results again."
    ),
    "in-place operations that require placement changes": (
        "fsdp-core: this may be about a value that is not reduced over the ranks yet, as the norm of a shard, to which "
        "code writes in place, as timm's dispatch_clip_grad(mode='agc') does.\n"
        "Write norm.full_tensor() before, on all ranks; or clip with gradient_clip_val, or fabric.clip_gradients()."
    ),
    **dict.fromkeys(
        ("SyncBatchNorm expected input tensor to be on", "aten::batch_norm_stats"),
        "fsdp-core: SyncBatchNorm, which sync_batchnorm=True of the Trainer puts in the place of batch norms, computes "
        "by torch.batch_norm_stats and others, which torch has for GPUs, and packages for other devices may lack.\n"
        "Leave sync_batchnorm out: each rank then normalises by its own batch; or write GroupNorm or LayerNorm.",
    ),
    "no longer exists (was garbage collected)": (
        "fsdp-core: when a module is sharded, other parameters take the place of those that it was built with; what "
        "was made of these before, as torch_ema's ExponentialMovingAverage, has lost them.\n"
        "Make it in on_fit_start(), under Fabric after fabric.setup(), where it takes shards."
    ),
    "`tasks_params` should contain no tensor in common": (
        "fsdp-core: parameters of a unit, and all that belong to no unit, are views of one tensor in a step, which is "
        "what torchjd finds in the graph of each loss.\n"
        "Use Lightning's strategy='ddp' for it; or weigh the losses by torch.autograd.grad(loss, features), and call "
        "backward() once for their sum."
    ),
}
#: The error of a library that has set an attribute on a parameter, and looks for it on the gathered one.
_OBJECT_ERROR = re.compile(r"'(_Shown|Gathered)(Tensor|Parameter|DTensor)' object has no attribute")
_OBJECT_NOTE = (
    "fsdp-core: in a step a module holds gathered parameters, which are not the objects at which a library has "
    "left something, as opacus and BackPACK leave gradients of examples.\n"
    "Use Lightning's strategy='ddp' for it; what is computed of activations and of losses works."
)

# -- errors about graphs and views -------------------------------------------------------------------------------------

#: Torch's errors when a graph needs a tensor that was written to or freed after the graph had recorded it.
_GRAPH_ERRORS = re.compile("modified by an inplace operation|modified inplace|setStorage")
_FREED_GRAPH_NOTE = (
    "fsdp-core: a graph that create_graph=True has recorded holds parameters, which were freed since: at the "
    "end of the next backward pass, or by a step or another write to them.\n"
    "Add what was computed with it to the loss of that backward pass: one backward() for both."
)
#: In torch's error about a saved tensor that was written to: the tensor's shape, and the number of writes.
_VERSION_ERROR = re.compile(r"modified by an inplace operation: \[\S+ \[([\d, ]*)\]\].* is at version (\d+);")
_FOREACH_NOTE = (
    "fsdp-core: this may be about parameters that are gathered for a step: they may be views of one tensor, to "
    "which torch's foreach functions can't write.\n"
    "Write to one after the other, average.lerp_(parameter, 0.1); or to shards, in on_train_batch_end()."
)
#: Torch's errors when a unit's input, which fully_shard has made a view, is written to in place.
_VIEW_ERRORS = re.compile(
    "RegisterPostBackwardFunction.* inplace|inplace.* created inside a custom Function", re.DOTALL
)
_VIEW_NOTE = (
    "fsdp-core: what a unit is called with reaches its forward() as a view that fully_shard has made, and torch "
    "allows no in-place operation on that, nor on what the unit returns of it.\n"
    "Write x = x.relu() instead of x.relu_(), inplace=False, or x = x.clone() before."
)
#: Torch's errors when a function's backward pass differentiates with respect to a unit's parameters.
_FUNCTION_ERRORS = re.compile("mixed torch.Tensor and DTensor|setStorage|not have been used in the graph")
_FUNCTION_NOTE = (
    "fsdp-core: this was raised in the backward() of a torch.autograd.Function, as that of torchdiffeq's "
    "odeint_adjoint and of reversible blocks, and may be about parameters of a unit, which are shards there.\n"
    "Let the modules that it runs belong to no unit: name other classes in auto_wrap_policy={MyBlock}, or "
    "write auto_wrap_policy=None, for one unit; and let it keep parameters by ctx.save_for_backward()."
)

# -- errors about shards in place of parameters ------------------------------------------------------------------------

#: Torch's errors when a shard is used as if it were the parameter: a DTensor, or a rank's piece as a plain tensor.
_SHARD_ERRORS = re.compile(
    "mixed torch.Tensor and DTensor|Contracting dimension sizes|must be a matrix|must be 2-D|size mismatch"
    "|same shape as normalized_shape|must match the size of tensor|inconsistent tensor size"
    "|doesn't match the broadcast shape"
    "|out of bounds for dimension with size 0|setStorage"
    "|does not have a sharding strategy registered|Cannot flatten unevenly sharded"
)
_MIXED = "mixed torch.Tensor and DTensor"
#: Torch's error when a tensor is written to a DTensor, or a DTensor to a tensor.
_MIXED_WRITE_ERROR = re.compile(r"aten\.\w*[a-z]_\.\w+ got mixed torch.Tensor and DTensor")
_LOSS_NOTE = (
    "fsdp-core: the loss was computed with a parameter, or a value of one, outside of the unit that it belongs "
    "to: there it is a DTensor, a shard.\n"
    "A penalty over all parameters belongs into the optimizer (weight_decay); one on the parameters of a unit "
    "is right in the unit's own forward(), and one on what belongs to no unit in training_step(), under Fabric "
    "in a method that model.mark_forward_method() names."
)
_WRITE_IN_STEP_NOTE = (
    "fsdp-core: a tensor and a DTensor were mixed in a write: in a step a parameter of no unit is gathered, "
    "and its gradient is a shard, as of self.parameters() in p.add_(p.grad).\n"
    "Write to what the optimizer holds, for p in optimizer.param_groups[0]['params'], which are shards too; or "
    "to self.parameters() between steps, as in on_train_batch_end() or on_validation_start()."
)
_WRITE_NOTE = (
    "fsdp-core: a tensor was written to with a DTensor: a parameter without dimensions is no DTensor, and a "
    "norm or a sum over parameters or gradients is one.\n"
    "Write norm = norm.full_tensor(), on all ranks, and compute with that."
)
_AVERAGED_WEIGHTS_NOTE = (
    "fsdp-core: torch.func.functional_call() was given shards (DTensors) as weights, as averages of shards are, and "
    "the module's input is a whole tensor.\n"
    "Keep the average in a module of its own, a copy.deepcopy() made in __init__, and call that. Or, with "
    "auto_wrap_policy=None, pass {name: value.full_tensor() for name, value in average.items()}, on all ranks."
)
_UNIT_NOTE = (
    "fsdp-core: this may be about a layer or a parameter inside a unit, such as self.blocks[0].norm, that is "
    "used from outside of the unit: there it is a shard.\n"
    "Call the unit and use it in the unit's own forward(); or let it belong to no unit: name other classes in "
    "auto_wrap_policy={MyBlock}, or write auto_wrap_policy=None, for one unit."
)
_PENALTY_NOTE = (
    "fsdp-core: outside of a step, and of the model's calls, parameters are shards (DTensors), and this may be "
    "about a penalty on them.\n"
    "A penalty over all parameters belongs into the optimizer (weight_decay); one on the parameters of a unit "
    "is right in the unit's own forward(), and one on what belongs to no unit in a method that "
    "model.mark_forward_method() names. For values, write on all ranks: with fsdp_core.gathered(module):"
)
_SHARD_NOTE = (
    "fsdp-core: outside of a step, parameters are shards, and this may be about one.\n"
    "Call the model, or a part of it that is not a layer inside a unit, which gathers what it needs; or write, on "
    "all ranks,\n    with fsdp_core.gathered(module):\nin which it has full parameters."
)


def explain_uncaught_error(exception: BaseException) -> None:
    """Add a note as :func:`explain_shards` does to an error that nothing has caught, unless it has one."""
    if not any(note.startswith("fsdp-core:") for note in getattr(exception, "__notes__", ())):
        explain_shards(exception)


def explain_shards(exception: BaseException, sharded: Collection[Sharded] = (), *, is_inside: bool = False) -> None:
    """Add a note to an error of torch that says what to write if the error is about a shard.

    Args:
        exception: The error.
        sharded: The roots that the error may be about.
        is_inside: Whether it was raised in a root's forward pass, also one without :func:`call_inside_forward`.

    Example:
        >>> error = RuntimeError("'weight' must be 2-D")
        >>> explain_shards(error)
        >>> error.__notes__[0].splitlines()[0]
        'fsdp-core: outside of a step, parameters are shards, and this may be about one.'
    """
    note = _find_note(exception, sharded, is_inside=is_inside)
    if note is not None:
        exception.add_note(note)


def _find_note(exception: BaseException, sharded: Collection[Sharded], *, is_inside: bool) -> str | None:
    message = str(exception)
    for message_part, note in _NOTES_BY_MESSAGE.items():
        if message_part in message:
            return note
    if _OBJECT_ERROR.search(message):
        return _OBJECT_NOTE
    codes = [frame.f_code for frame, _ in traceback.walk_tb(exception.__traceback__)]  # the last one has raised it
    if any(code.co_name == "resize_token_embeddings" for code in codes):
        return _RESIZE_NOTE
    is_in_engine = any(map(_is_engine, codes))
    graph_note = _find_graph_note(message, sharded, is_in_engine=is_in_engine)
    if graph_note is not None:
        return graph_note
    if _FUNCTION_ERRORS.search(message) and any(code is BackwardCFunction.apply.__code__ for code in codes):
        return _FUNCTION_NOTE
    is_raised_by_torch = bool(codes) and (_is_engine(codes[-1]) or _is_of_dtensors(codes[-1]))
    if is_in_engine and is_raised_by_torch and _MIXED in message:
        return _LOSS_NOTE
    if _MIXED in message and _calls_with_shards(exception):
        return _AVERAGED_WEIGHTS_NOTE
    is_in_step = is_inside or any(code is call_inside_forward.__code__ for code in codes)
    # For tensors of one element, torch raises an AssertionError without a message.
    is_silent = isinstance(exception, AssertionError) and not message and bool(codes) and _is_of_dtensors(codes[-1])
    if is_in_step and (is_silent or _MIXED_WRITE_ERROR.search(message)):
        return _WRITE_IN_STEP_NOTE
    if is_silent:
        return _WRITE_NOTE
    if not _SHARD_ERRORS.search(message) or any(map(_is_engine, codes[-1:])):
        return None  # raised by autograd's engine, so its cause is in an earlier forward pass and not a shard here
    if is_in_step:
        return _UNIT_NOTE
    return _PENALTY_NOTE if _MIXED in message else _SHARD_NOTE


def _find_graph_note(message: str, sharded: Collection[Sharded], *, is_in_engine: bool) -> str | None:
    """The note for an error about a graph whose tensors were freed or written to, or about a view."""
    if _GRAPH_ERRORS.search(message) and any(root.has_freed_parameters_of_graph for root in sharded):
        return _FREED_GRAPH_NOTE
    names = _find_written_parameters(message, sharded) if is_in_engine else []
    if names:
        return (
            f"fsdp-core: {_list_names(names)} was written to between the forward pass and this backward "
            "pass, which computes with its values: by an optimizer's step, a checkpoint that was loaded, or by hand.\n"
            "Run the backward pass before that, or the forward pass again after it."
        )
    if "inplace" in message and "returns multiple views" in message:
        return _FOREACH_NOTE
    return _VIEW_NOTE if _VIEW_ERRORS.search(message) else None


def _find_written_parameters(message: str, sharded: Collection[Sharded]) -> list[str]:
    """The names of the parameters that torch's error about a saved tensor that was written to may be about."""
    match = _VERSION_ERROR.search(message)
    if match is None:
        return []
    numel = math.prod(map(int, re.findall(r"\d+", match[1])))
    times = int(match[2])
    return [name for root in sharded for name in root.written_since_gathered(numel, times)]


def _list_names(names: list[str]) -> str:
    listing = " or ".join(map(repr, names[:3]))
    return listing if len(names) <= 3 else f"{listing} or one of {len(names) - 3} more"


def _calls_with_shards(exception: BaseException) -> bool:
    """Whether an error was raised in ``torch.func.functional_call()`` with shards as weights."""
    for frame, _ in traceback.walk_tb(exception.__traceback__):
        if frame.f_code is functional_call.__code__:
            weights, _ = tree_flatten(frame.f_locals["parameter_and_buffer_dicts"])
            return any(isinstance(value, DTensor) for value in weights)
    return False


def _is_engine(code: CodeType) -> bool:
    """Whether code is that in which torch calls autograd's engine."""
    return code.co_name == "_engine_run_backward"


def _is_of_dtensors(code: CodeType) -> bool:
    return Path(code.co_filename).is_relative_to(_DTENSOR_FOLDER)
