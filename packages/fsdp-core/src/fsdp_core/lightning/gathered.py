"""Whole parameters in a sharded module for a while, as one process has them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn

from fsdp_core.backend import Backend
from fsdp_core.errors import ShardingError
from fsdp_core.fqn import clean_name
from fsdp_core.gathering import gathered_modules, whole
from fsdp_core.lightning.exporting import written_of
from fsdp_core.lightning.redirection import is_inside_forward, normal_tensors
from fsdp_core.runtime import Runtime

__all__ = ["gathered"]


@contextmanager
def gathered(module: nn.Module, modifier_rank: int | None = None) -> Iterator[None]:
    """A context in which a sharded module, or a part of one, has whole parameters, and any one rank can call it.

    All ranks must enter and leave it. Inside, each holds all of the module, in the dtype of its shards, and calls of it
    reach no other rank: one may call it alone, read its parameters, or save its ``state_dict()``. A module that is not
    sharded stays what it is, so that the same lines run under any strategy.

    Args:
        module: A LightningModule, what ``fabric.setup`` has returned, or a module inside one of them.
        modifier_rank: The rank whose parameters all ranks have afterwards, if values are changed inside. ``None`` if
            none are.

    Raises:
        ShardingError: Inside a step, or in another of these contexts. On leaving it: values were changed and there is
            no ``modifier_rank``, or a rank changed them otherwise than that one; a parameter was replaced, frozen or
            unfrozen, or has got a gradient. The shards are then what they were before.

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
    found = Backend.root_around(written_of(module))
    if found is None:
        yield
        if modifier_rank is not None and dist.is_initialized():
            for parameter in written_of(module).parameters():
                dist.broadcast(parameter.data, modifier_rank)
        return
    root, prefix = found
    _check_at_rest(root)
    backend = Backend.owner_of(root)
    assert backend is not None
    backend.reshard(root)
    first = backend.aliases(root)
    tensors = _whole_parameters(backend, root, prefix, first)
    before = {name: _digest(tensor) for name, tensor in tensors.items()}
    with backend.unmanaged(root), ExitStack() as cleanup:
        user = backend.written_module(root)
        part = next(inner for raw, inner in user.named_modules() if clean_name(raw) == prefix.removesuffix("."))
        places = _put_in_place(part, prefix, tensors, first)
        cleanup.callback(_take_back, places)
        _refuse_others(user, part, cleanup)
        known = {root, user, *part.modules()}
        gathered_modules.update(known)
        cleanup.callback(gathered_modules.difference_update, known)
        yield
        values, problems = _found_inside(places)
    changed = _agree_on_changes(backend.runtime, values, before, problems, modifier_rank)
    if changed:
        with normal_tensors():
            backend.load_model_state(root, changed, strict=False)


def _check_at_rest(root: nn.Module) -> None:
    if is_inside_forward(root):
        raise ShardingError(
            "gathered() was called inside a step, whose forward pass holds parameters gathered.\n"
            "Call it in a hook before or after it, such as on_train_batch_end() or on_validation_epoch_end()."
        )
    if root in gathered_modules:
        raise ShardingError(
            "gathered() was called in another of these contexts, of the same model.\n"
            "Leave that one before, or give it the module around both."
        )


@normal_tensors()
def _whole_parameters(backend: Backend, root: nn.Module, prefix: str, first: Mapping[str, str]) -> dict[str, Tensor]:
    """The parameters of a part of a root, each once, on this rank's device."""
    tensors: dict[str, Tensor] = {}
    state = backend.model_state(root)
    for name in backend.remembered_names(root):
        original = first.get(name, name)
        if name.startswith(prefix) and original not in tensors:
            gathered = whole(state[original], backend.runtime)
            tensors[original] = gathered.to(backend.runtime.device, copy=True)  # what is kept whole has its own memory
    return tensors


@dataclass(frozen=True)
class _Place:
    """Where a whole parameter is shown.

    Attributes:
        owner: The module.
        attribute: The parameter's name there.
        name: The user's name for it in the root, the first one where it is tied.
        held: What was there.
        shown: What is there in its place.
    """

    owner: nn.Module
    attribute: str
    name: str
    held: nn.Parameter
    shown: nn.Parameter


def _put_in_place(
    part: nn.Module, prefix: str, tensors: Mapping[str, Tensor], first: Mapping[str, str]
) -> list[_Place]:
    made: dict[str, nn.Parameter] = {}
    places = []
    for raw, owner in part.named_modules():
        for attribute, held in owner._parameters.items():
            name = prefix + clean_name(f"{raw}.{attribute}" if raw else attribute)
            name = first.get(name, name)
            if held is None or name not in tensors:
                continue
            if name not in made:
                made[name] = nn.Parameter(tensors[name], requires_grad=held.requires_grad)
            places.append(_Place(owner, attribute, name, held, made[name]))
    for place in places:
        place.owner._parameters[place.attribute] = place.shown
    return places


def _take_back(places: list[_Place]) -> None:
    for place in places:
        place.owner._parameters[place.attribute] = place.held


def _refuse_others(user: nn.Module, part: nn.Module, cleanup: ExitStack) -> None:
    """Let the rest of the module, which has no values meanwhile, raise where it is called."""
    inside = set(part.modules())

    def refuse(module: nn.Module, args: Any) -> NoReturn:
        raise ShardingError(
            f"{type(module).__name__} was called within fsdp_core.gathered(), which was given a part of the model "
            "that it is not in.\nGive gathered() the module around both."
        )

    for module in user.modules():
        if module not in inside and any(p is not None for p in module._parameters.values()):
            cleanup.callback(module.register_forward_pre_hook(refuse).remove)


def _found_inside(places: list[_Place]) -> tuple[dict[str, Tensor], list[str]]:
    """What the user has left of whole parameters: their values, and what can't be taken over."""
    values, problems = {}, []
    for place in places:
        now = place.owner._parameters.get(place.attribute)
        if now is not place.shown or now.shape != place.held.shape or now.dtype != place.held.dtype:
            problems.append(f"{place.name!r} was replaced by something else")
        elif now.grad is not None:
            problems.append(
                f"{place.name!r} has got a gradient, which ends with the context: take torch.autograd.grad(), or set "
                "it to None"
            )
        elif now.requires_grad != place.held.requires_grad:
            problems.append(f"{place.name!r} was {'unfrozen' if now.requires_grad else 'frozen'}: do that outside")
        values[place.name] = place.shown.detach()
    return values, problems


def _agree_on_changes(
    runtime: Runtime,
    values: Mapping[str, Tensor],
    before: Mapping[str, str],
    problems: list[str],
    modifier_rank: int | None,
) -> dict[str, Tensor]:
    """What all ranks take over, by name. All ranks must call it."""
    after = {name: _digest(tensor) for name, tensor in values.items()}
    everyones: list[tuple[dict[str, str], list[str]]] = runtime.gather_objects((after, problems))
    for rank, (_, found) in enumerate(everyones):
        if found:
            raise ShardingError(f"within gathered(), on rank {rank}, {found[0]}.\nNothing was changed in the shards.")
    wanted = before if modifier_rank is None else everyones[modifier_rank][0]
    for rank, (digests, _) in enumerate(everyones):
        for name, digest in digests.items():
            if digest not in (before[name], wanted[name]):
                told = "no rank was to change" if modifier_rank is None else f"rank {modifier_rank} did not change so"
                raise ShardingError(
                    f"within gathered(), rank {rank} changed {name!r}, which {told}. Nothing was changed in the "
                    f"shards.\nWrite gathered(module, modifier_rank={rank}), and change it on that rank."
                )
    return {
        name: runtime.broadcast_object(
            values[name].cpu() if runtime.rank == modifier_rank else None, modifier_rank or 0
        )
        for name in before
        if wanted[name] != before[name]
    }


def _digest(tensor: Tensor) -> str:
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return xxhash.xxh3_128_hexdigest(data.numpy().data)
