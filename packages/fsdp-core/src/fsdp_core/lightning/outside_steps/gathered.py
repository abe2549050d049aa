"""A context in which a sharded module has full parameters, as in one process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_core.errors import ShardingError
from fsdp_core.lightning.outside_steps.exporting import users_module_in
from fsdp_core.lightning.outside_steps.redirection import is_inside_forward, outside_inference_mode
from fsdp_core.runtime import Runtime
from fsdp_core.sharding.sharded import Sharded, sharded_around
from fsdp_core.state.fqn import clean_name
from fsdp_core.state.full_tensor import gather_each, gathered_modules
from fsdp_core.torch_private.modules import not_managed

__all__ = ["gathered"]


@contextmanager
def gathered(module: nn.Module, modifier_rank: int | None = None) -> Iterator[None]:
    """A context in which a sharded module, or a part of one, has full parameters, and any single rank can call it.

    All ranks must enter and leave it. Inside, each holds the full module, in the dtype of its shards, and calling it
    runs no collective: one rank may call it alone, read its parameters, or save its ``state_dict()``. A module that is
    not sharded is left as it is, so that the same code runs under any strategy.

    Args:
        module: A LightningModule, what ``fabric.setup`` returned, or a module inside one of them.
        modifier_rank: The rank whose parameters and changed buffers all ranks get on leaving. ``None`` if no parameter
            is changed inside; each rank then keeps its own buffers.

    Raises:
        ShardingError: On entering: inside a step, or inside another such context. On leaving: values were changed
            without a ``modifier_rank``, or differently than on that rank; a parameter was replaced, frozen or unfrozen,
            or got a gradient; another rank raised an exception inside. The shards are then unchanged.

    Example:
        In a LightningModule, on one rank alone::

            def on_validation_epoch_end(self):
                with fsdp_core.gathered(self.model):  # on every rank
                    if self.trainer.is_global_zero:
                        print(self.model.generate(self.prompt))

        Changing weights, the same under every strategy:

        >>> model = nn.Linear(2, 1)
        >>> with gathered(model, modifier_rank=0), torch.no_grad():
        ...     _ = model.weight.fill_(1.0)
        >>> model.weight.tolist()
        [[1.0, 1.0]]
    """
    owner_and_prefix = sharded_around(users_module_in(module))
    if owner_and_prefix is None:
        yield
        if modifier_rank is not None and dist.is_initialized():
            for parameter in users_module_in(module).parameters():
                dist.broadcast(parameter.data, modifier_rank)
        return
    sharded, prefix = owner_and_prefix
    _check_outside_step(sharded.root)
    sharded.reshard()
    first_names = sharded.aliases()
    tensors = _gather_parameters(sharded, prefix, first_names)
    digests_before = {name: _digest(tensor) for name, tensor in tensors.items()}
    values: dict[str, Tensor] = {}
    buffers: dict[str, Tensor] = {}
    own_error: BaseException | None = None
    with sharded.unmanaged(), ExitStack() as cleanup:
        user_module = sharded.module
        part = next(
            inner
            for full_name, inner in user_module.named_modules()
            if clean_name(full_name) == prefix.removesuffix(".")
        )
        cleanup.enter_context(not_managed(part))
        replacements = _replace_parameters(part, prefix, tensors, first_names)
        cleanup.callback(_restore_shards, replacements, {inner: dict(inner._modules) for inner in part.modules()})
        _refuse_other_modules(user_module, part, cleanup)
        newly_gathered = {sharded.root, user_module, *part.modules()}
        gathered_modules.update(newly_gathered)
        cleanup.callback(gathered_modules.difference_update, newly_gathered)
        cleanup.enter_context(_plain_buffers(part))
        buffers = {prefix + clean_name(name): buffer for name, buffer in part.named_buffers()}
        digests_before |= {name: _digest(buffer) for name, buffer in buffers.items()}
        problems: list[str] = []
        try:
            yield
            problems = _find_problems(replacements, part)
        except Exception as error:  # reported to the other ranks, which wait for this one
            own_error = error
            problems = [f"{type(error).__name__} was raised: {error}"]
        values = {replacement.name: replacement.full.detach() for replacement in replacements}
    changed = _agree_on_changes(
        sharded.runtime,
        values,
        buffers,
        digests_before=digests_before,
        problems=problems,
        own_error=own_error,
        modifier_rank=modifier_rank,
    )
    if changed:
        with outside_inference_mode():
            sharded.load_model_state(changed, strict=False)


def _check_outside_step(root: nn.Module) -> None:
    if is_inside_forward(root):
        raise ShardingError(
            "gathered() was called inside a step, whose forward pass needs the gathered parameters.\n"
            "Call it in a hook before or after it, such as on_train_batch_end() or on_validation_epoch_end()."
        )
    if root in gathered_modules:
        raise ShardingError(
            "gathered() was called inside another gathered() of the same model.\n"
            "Leave that one first, or pass it the module that contains both."
        )


@outside_inference_mode()
def _gather_parameters(sharded: Sharded, prefix: str, first_names: Mapping[str, str]) -> dict[str, Tensor]:
    """Gather the parameters of a part of a root, each once, on this rank's device."""
    state = sharded.model_state()
    names = dict.fromkeys(first_names.get(name, name) for name in sharded.plan.parameters if name.startswith(prefix))
    full_tensors = gather_each({name: state[name] for name in names}, sharded.runtime)
    # Copied, because for parameters that are not sharded the module's own tensors were returned.
    return {name: full.to(sharded.runtime.device, copy=True) for name, full in full_tensors}


@contextmanager
def _plain_buffers(part: nn.Module) -> Iterator[None]:
    """A context in which plain tensors replace the DTensor buffers that tensor parallelism makes."""
    dtensor_buffers = [
        (inner, name, buffer)
        for inner in part.modules()
        for name, buffer in inner._buffers.items()
        if isinstance(buffer, DTensor)
    ]
    for inner, name, buffer in dtensor_buffers:
        is_copy = all(placement.is_replicate() for placement in buffer.placements)
        inner._buffers[name] = buffer.to_local() if is_copy else buffer.full_tensor()
    try:
        yield
    finally:
        for inner, name, buffer in dtensor_buffers:
            inner._buffers[name] = buffer


@dataclass(frozen=True)
class _Replacement:
    """A full parameter that stands in a module in place of a sharded one.

    Attributes:
        owner: The module.
        attribute: The name of both parameters in that module.
        name: Their FQN in the root, the first one if they are tied.
        sharded: The sharded parameter.
        full: The full parameter.
    """

    owner: nn.Module
    attribute: str
    name: str
    sharded: nn.Parameter
    full: nn.Parameter


def _replace_parameters(
    part: nn.Module, prefix: str, tensors: Mapping[str, Tensor], first_names: Mapping[str, str]
) -> list[_Replacement]:
    full_parameters: dict[str, nn.Parameter] = {}
    replacements: list[_Replacement] = []
    for full_name, owner in part.named_modules():
        for attribute, parameter in owner._parameters.items():
            name = prefix + clean_name(f"{full_name}.{attribute}" if full_name else attribute)
            name = first_names.get(name, name)
            if parameter is None or name not in tensors:
                continue
            if name not in full_parameters:
                full_parameters[name] = nn.Parameter(tensors[name], requires_grad=parameter.requires_grad)
            replacements.append(_Replacement(owner, attribute, name, parameter, full_parameters[name]))
    for replacement in replacements:
        replacement.owner._parameters[replacement.attribute] = replacement.full
    return replacements


def _restore_shards(
    replacements: list[_Replacement], children: Mapping[nn.Module, Mapping[str, nn.Module | None]]
) -> None:
    """Put shards back in place of full parameters, and also the children that a module had before."""
    for replacement in replacements:
        replacement.owner._parameters[replacement.attribute] = replacement.sharded
    for module, previous in children.items():
        if dict(module._modules) != previous:
            module._modules.clear()
            module._modules.update(previous)


def _refuse_other_modules(user_module: nn.Module, part: nn.Module, cleanup: ExitStack) -> None:
    """Make modules outside of the gathered part, which have no full parameters meanwhile, raise when called."""
    modules_inside = set(part.modules())

    def refuse(module: nn.Module, args: Any) -> NoReturn:
        raise ShardingError(
            f"{type(module).__name__} was called within fsdp_core.gathered() of a part of the model that it is "
            "not in.\nPass gathered() the module that contains both."
        )

    for module in user_module.modules():
        if module not in modules_inside and any(p is not None for p in module._parameters.values()):
            cleanup.callback(module.register_forward_pre_hook(refuse).remove)


def _find_problems(replacements: list[_Replacement], part: nn.Module) -> list[str]:
    """Describe the changes to full parameters that can't be written back to shards."""
    problems = []
    modules_inside = set(part.modules())
    for replacement in replacements:
        current = replacement.owner._parameters.get(replacement.attribute)
        if (
            replacement.owner not in modules_inside
            or current is not replacement.full
            or current.shape != replacement.sharded.shape
        ):
            problems.append(
                f"{replacement.name!r} was replaced by something else: do that before sharding, in __init__() or "
                "configure_model()"
            )
        elif current.dtype != replacement.sharded.dtype:
            problems.append(f"{replacement.name!r} was converted to {current.dtype}: do that before sharding")
        elif current.grad is not None:
            problems.append(
                f"{replacement.name!r} has got a gradient, which ends with the context: take torch.autograd.grad(), or "
                "set it to None"
            )
        elif current.requires_grad != replacement.sharded.requires_grad:
            problems.append(
                f"{replacement.name!r} was {'unfrozen' if current.requires_grad else 'frozen'}: do that outside"
            )
    return problems


def _agree_on_changes(
    runtime: Runtime,
    values: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    *,
    digests_before: Mapping[str, str],
    problems: list[str],
    own_error: BaseException | None,
    modifier_rank: int | None,
) -> dict[str, Tensor]:
    """Return the changed parameters by name, and copy the ``modifier_rank``'s buffers. All ranks must call it.

    Args:
        runtime: The ranks.
        values: The full parameters by name.
        buffers: The buffers by name.
        digests_before: The digests of both when the context was entered.
        problems: What this rank can't write back.
        own_error: The exception that this rank raised in the context.
        modifier_rank: The rank whose changes all ranks take; ``None`` if there must be none.
    """
    digests_after = {name: _digest(tensor) for name, tensor in {**values, **buffers}.items()}
    changed = {name: digest for name, digest in digests_after.items() if digest != digests_before[name]}
    changes_by_rank: list[tuple[dict[str, str], list[str]]] = runtime.gather_objects((changed, problems))
    if own_error is not None:
        raise own_error
    for rank, (_, problems_of_rank) in enumerate(changes_by_rank):
        if problems_of_rank:
            raise ShardingError(
                f"within gathered(), on rank {rank}, {problems_of_rank[0]}.\nNothing was changed in the shards."
            )
    final_digests = {} if modifier_rank is None else changes_by_rank[modifier_rank][0]
    for rank, (digests, _) in enumerate(changes_by_rank):
        for name, digest in digests.items():
            if name in values and digest != final_digests.get(name):  # each rank has buffers of its own
                expectation = (
                    "no rank was to change" if modifier_rank is None else f"rank {modifier_rank} did not change so"
                )
                raise ShardingError(
                    f"within gathered(), rank {rank} changed {name!r}, which {expectation}. Nothing was changed in the "
                    f"shards.\nWrite gathered(module, modifier_rank={rank}), and change it on that rank."
                )
    if modifier_rank is None:
        return {}
    agreed: dict[str, Tensor] = {}
    for name in final_digests:
        own_value = values[name] if name in values else buffers[name]
        agreed[name] = runtime.broadcast_object(
            own_value.cpu() if runtime.rank == modifier_rank else None, src=modifier_rank
        )
    for name in buffers.keys() & agreed.keys():
        with torch.no_grad():
            buffers[name].copy_(agreed.pop(name))
    return agreed


def _digest(tensor: Tensor) -> str:
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return xxhash.xxh3_128_hexdigest(data.numpy().data)
