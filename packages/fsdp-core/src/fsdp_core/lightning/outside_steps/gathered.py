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
from fsdp_core.lightning.outside_steps.exporting import written_of
from fsdp_core.lightning.outside_steps.redirection import is_inside_forward, normal_tensors
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
    owner_and_prefix = sharded_around(written_of(module))
    if owner_and_prefix is None:
        yield
        if modifier_rank is not None and dist.is_initialized():
            for parameter in written_of(module).parameters():
                dist.broadcast(parameter.data, modifier_rank)
        return
    sharded, prefix = owner_and_prefix
    _check_at_rest(sharded.root)
    sharded.reshard()
    first = sharded.aliases()
    tensors = _whole_parameters(sharded, prefix, first)
    before = {name: _digest(tensor) for name, tensor in tensors.items()}
    values: dict[str, Tensor] = {}
    buffers: dict[str, Tensor] = {}
    raised: BaseException | None = None
    with sharded.unmanaged(), ExitStack() as cleanup:
        user = sharded.module
        part = next(inner for raw, inner in user.named_modules() if clean_name(raw) == prefix.removesuffix("."))
        cleanup.enter_context(not_managed(part))
        replacements = _put_in_place(part, prefix, tensors, first)
        cleanup.callback(_take_back, replacements, {inner: dict(inner._modules) for inner in part.modules()})
        _refuse_others(user, part, cleanup)
        gathered_by_now = {sharded.root, user, *part.modules()}
        gathered_modules.update(gathered_by_now)
        cleanup.callback(gathered_modules.difference_update, gathered_by_now)
        cleanup.enter_context(_plain_buffers(part))
        buffers = {prefix + clean_name(name): buffer for name, buffer in part.named_buffers()}
        before |= {name: _digest(buffer) for name, buffer in buffers.items()}
        problems: list[str] = []
        try:
            yield
            problems = _problems(replacements, part)
        except Exception as error:  # reported to the other ranks, which wait for this one
            raised = error
            problems = [f"{type(error).__name__} was raised: {error}"]
        values = {replacement.name: replacement.full.detach() for replacement in replacements}
    changed = _agree_on_changes(sharded.runtime, values, buffers, before, problems, raised, modifier_rank)
    if changed:
        with normal_tensors():
            sharded.load_model_state(changed, strict=False)


def _check_at_rest(root: nn.Module) -> None:
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


@normal_tensors()
def _whole_parameters(sharded: Sharded, prefix: str, first: Mapping[str, str]) -> dict[str, Tensor]:
    """The parameters of a part of a root, each once, on this rank's device."""
    state = sharded.model_state()
    names = dict.fromkeys(first.get(name, name) for name in sharded.plan.parameters if name.startswith(prefix))
    wholes = gather_each({name: state[name] for name in names}, sharded.runtime)
    # a copy, for parameters that are not sharded are the module's own
    return {name: full.to(sharded.runtime.device, copy=True) for name, full in wholes}


@contextmanager
def _plain_buffers(part: nn.Module) -> Iterator[None]:
    """Show buffers of which tensor-parallel ranks hold copies as what this rank holds, as the parameters are."""
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
    """Where a full parameter replaces what a module held.

    Attributes:
        owner: The module.
        attribute: The parameter's name there.
        name: Its FQN in the root, the first one if it is tied.
        sharded: The parameter that was there.
        full: The full parameter that replaces it.
    """

    owner: nn.Module
    attribute: str
    name: str
    sharded: nn.Parameter
    full: nn.Parameter


def _put_in_place(
    part: nn.Module, prefix: str, tensors: Mapping[str, Tensor], first: Mapping[str, str]
) -> list[_Replacement]:
    full_parameters: dict[str, nn.Parameter] = {}
    replacements: list[_Replacement] = []
    for raw, owner in part.named_modules():
        for attribute, parameter in owner._parameters.items():
            name = prefix + clean_name(f"{raw}.{attribute}" if raw else attribute)
            name = first.get(name, name)
            if parameter is None or name not in tensors:
                continue
            if name not in full_parameters:
                full_parameters[name] = nn.Parameter(tensors[name], requires_grad=parameter.requires_grad)
            replacements.append(_Replacement(owner, attribute, name, parameter, full_parameters[name]))
    for replacement in replacements:
        replacement.owner._parameters[replacement.attribute] = replacement.full
    return replacements


def _take_back(replacements: list[_Replacement], children: Mapping[nn.Module, Mapping[str, nn.Module | None]]) -> None:
    for replacement in replacements:
        replacement.owner._parameters[replacement.attribute] = replacement.sharded
    for module, previous in children.items():
        if dict(module._modules) != previous:
            module._modules.clear()
            module._modules.update(previous)


def _refuse_others(user: nn.Module, part: nn.Module, cleanup: ExitStack) -> None:
    """Make the rest of the module, which has no values meanwhile, raise when it is called."""
    inside = set(part.modules())

    def refuse(module: nn.Module, args: Any) -> NoReturn:
        raise ShardingError(
            f"{type(module).__name__} was called within fsdp_core.gathered() of a part of the model that it is "
            "not in.\nPass gathered() the module that contains both."
        )

    for module in user.modules():
        if module not in inside and any(p is not None for p in module._parameters.values()):
            cleanup.callback(module.register_forward_pre_hook(refuse).remove)


def _problems(replacements: list[_Replacement], part: nn.Module) -> list[str]:
    """Changes to full parameters that can't be written back to shards."""
    problems = []
    inside = set(part.modules())
    for replacement in replacements:
        current = replacement.owner._parameters.get(replacement.attribute)
        if (
            replacement.owner not in inside
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
    before: Mapping[str, str],
    problems: list[str],
    raised: BaseException | None,
    modifier_rank: int | None,
) -> dict[str, Tensor]:
    """The parameters that all ranks take over, by name; buffers are copied right away. All ranks must call it."""
    after = {name: _digest(tensor) for name, tensor in {**values, **buffers}.items()}
    changed = {name: digest for name, digest in after.items() if digest != before[name]}
    everyones: list[tuple[dict[str, str], list[str]]] = runtime.gather_objects((changed, problems))
    if raised is not None:
        raise raised
    for rank, (_, reported) in enumerate(everyones):
        if reported:
            raise ShardingError(
                f"within gathered(), on rank {rank}, {reported[0]}.\nNothing was changed in the shards."
            )
    final_digests = {} if modifier_rank is None else everyones[modifier_rank][0]
    for rank, (digests, _) in enumerate(everyones):
        for name, digest in digests.items():
            if name in values and digest != final_digests.get(name):  # each rank has buffers of its own
                instead = (
                    "no rank was to change" if modifier_rank is None else f"rank {modifier_rank} did not change so"
                )
                raise ShardingError(
                    f"within gathered(), rank {rank} changed {name!r}, which {instead}. Nothing was changed in the "
                    f"shards.\nWrite gathered(module, modifier_rank={rank}), and change it on that rank."
                )
    agreed: dict[str, Tensor] = {}
    for name in final_digests:
        agreed_value = values[name] if name in values else buffers[name]
        agreed[name] = runtime.broadcast_object(
            agreed_value.cpu() if runtime.rank == modifier_rank else None, modifier_rank or 0
        )
    for name in buffers.keys() & agreed.keys():
        with torch.no_grad():
            buffers[name].copy_(agreed.pop(name))
    return agreed


def _digest(tensor: Tensor) -> str:
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return xxhash.xxh3_128_hexdigest(data.numpy().data)
