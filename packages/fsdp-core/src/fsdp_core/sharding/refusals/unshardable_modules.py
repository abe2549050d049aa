"""Refuses modules that no backend can shard."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FlatParameter
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from fsdp_core.devices import has_addresses
from fsdp_core.errors import ShardingError
from fsdp_core.initialization.sharded_init import is_part
from fsdp_core.torch_private.tensors import hooks_on, is_fake

__all__ = ["check_shardable", "refuse_cycles"]


def refuse_cycles(module: nn.Module) -> None:
    """Refuse a module that contains itself, directly or in other modules: walks over all of its names never end.

    Args:
        module: The root.

    Raises:
        ShardingError: A submodule is registered in a module that it contains.

    Example:
        >>> child, parent = nn.Linear(2, 1), nn.Sequential()
        >>> parent.child, child.parent = child, parent
        >>> refuse_cycles(parent)
        Traceback (most recent call last):
            ...
        fsdp_core.errors.ShardingError: 'child.parent' of Sequential is the Sequential that it is in, ...
    """
    enclosing: list[nn.Module] = []
    finished: set[nn.Module] = set()

    def visit(parent: nn.Module, path: str) -> None:
        enclosing.append(parent)
        for name, child in parent.named_children():
            fqn = f"{path}.{name}".removeprefix(".")
            if any(child is ancestor for ancestor in enclosing):
                raise ShardingError(
                    f"{fqn!r} of {type(module).__name__} is the {type(child).__name__} that it is in, so that "
                    "module.train(), module.to() and the names of parameters have no end.\n"
                    "Keep such a reference where torch does not look for modules: self.parent = weakref.ref(parent), "
                    "or self.parent = [parent]."
                )
            if child not in finished:
                visit(child, fqn)
        finished.add(enclosing.pop())

    visit(module, "")


def check_shardable(module: nn.Module, sharded_of: Callable[[nn.Module], Any]) -> None:
    """Refuse a module that no backend can shard.

    Args:
        module: The root, before it is sharded.
        sharded_of: Returns ``None`` for a module that is not sharded.

    Raises:
        ShardingError: The module has no parameters, or names only some of them; a submodule is sharded already, is
            compiled by torch.jit, writes to parameters in its forward pass, or has sparse gradients; or a parameter has
            a gradient hook, shares its memory with another tensor, is not initialised, is quantised or packed, or is of
            an unsupported tensor class.

    Example:
        >>> check_shardable(nn.Linear(2, 1), lambda module: None)
        >>> check_shardable(nn.ReLU(), lambda module: None)
        Traceback (most recent call last):
            ...
        fsdp_core.errors.ShardingError: ReLU has no parameters, so there is nothing to shard.
        Build its layers in __init__ or configure_model, or use strategy='ddp'.
    """
    name = type(module).__name__
    if not any(True for _ in module.parameters()):
        raise ShardingError(
            f"{name} has no parameters, so there is nothing to shard.\n"
            "Build its layers in __init__ or configure_model, or use strategy='ddp'."
        )
    named = {id(parameter) for _, parameter in module.named_parameters()}
    for fqn, submodule in module.named_modules():
        if isinstance(submodule, torch.jit.ScriptModule) and any(True for _ in submodule.parameters()):
            raise ShardingError(
                f"{fqn or 'the root'!r} of {name} is a {type(submodule).__name__}, whose compiled code holds its "
                "parameters: sharding can't replace them there.\n"
                "Train the module as it was before torch.jit.script() or trace(), and compile what was trained."
            )
        hidden = [attribute for attribute, p in submodule._parameters.items() if p is not None and id(p) not in named]
        if hidden:
            raise ShardingError(
                f"{f'{fqn}.{hidden[0]}'.removeprefix('.')!r} is not among the named_parameters() of {name}, which "
                "overrides that method, so nothing would shard, train or save it as the others.\n"
                "Let named_parameters() return all, and leave out of the optimizer, or freeze, what is not trained."
            )
        if submodule is not module and sharded_of(submodule) is not None:
            raise ShardingError(
                f"{fqn!r} inside {name} was set up and sharded before, by itself.\n"
                "Set up the whole model, and not its parts."
            )
        if isinstance(submodule, nn.Embedding | nn.EmbeddingBag) and submodule.max_norm is not None:
            raise ShardingError(
                f"{fqn!r} is an {type(submodule).__name__} with max_norm={submodule.max_norm:g}, so that its forward() "
                "writes to its weight: a gathered copy, which is freed.\n"
                "Leave max_norm out, and scale what it returns, as with torch.renorm(output, 2, -1, "
                f"{submodule.max_norm:g}); or use strategy='ddp'."
            )
        if isinstance(submodule, nn.Embedding | nn.EmbeddingBag) and submodule.sparse:
            raise ShardingError(
                f"{fqn!r} is an {type(submodule).__name__} with sparse=True, whose gradient lists rows: it can't be "
                "reduced over shards.\n"
                "Leave sparse out, with AdamW in place of SparseAdam; or use strategy='ddp'."
            )
    for fqn, tensor in (*module.named_parameters(), *module.named_buffers()):
        if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
            raise ShardingError(
                f"{fqn!r} belongs to a lazy module that has not seen an input yet, so its shape is not known.\n"
                "Call the model with an example first, at the end of __init__ or configure_model; or give the layer "
                "its input size, as in nn.Linear(64, 10) for nn.LazyLinear(10)."
            )
        if tensor.is_quantized or not (type(tensor) in _PLAIN or is_part(tensor) or is_fake(tensor)):
            _refuse_class(fqn, tensor)
    for fqn, parameter in module.named_parameters():
        attribute = _packing_attribute(parameter)
        if attribute is not None:
            raise ShardingError(
                f"{fqn!r}, in {parameter.dtype}, has an attribute {attribute!r}, as packed weights have one that says "
                f"how to read their bytes: the shards that replace it would not have it.\n{_INSTEAD_OF_PACKED}"
            )
        if hooks_on(parameter):
            raise ShardingError(
                f"parameter {fqn!r} has a gradient hook, which would never run: sharding replaces the parameter.\n"
                "Register it after the set-up with register_post_accumulate_grad_hook, on the sharded gradient: in "
                "on_fit_start(), or under Fabric after fabric.setup()."
            )
    _refuse_shared_memory(module)


def _refuse_shared_memory(module: nn.Module) -> None:
    """Refuse a parameter whose memory another tensor of the model has too: sharding would part them.

    Raises:
        ShardingError: There is one. The other tensor is a parameter, a buffer, or a plain attribute of a module.
    """
    parameters = dict(module.named_parameters())
    other_tensors = {
        id(tensor): (fqn, tensor) for fqn, tensor in (*_attribute_tensors(module), *module.named_buffers())
    }
    tensors: list[tuple[str, Tensor, bool]] = [(fqn, parameter, True) for fqn, parameter in parameters.items()]
    tensors += [(fqn, tensor, False) for fqn, tensor in other_tensors.values()]
    memory_ranges = sorted(
        (str(tensor.device), tensor.data_ptr(), tensor.data_ptr() + _extent(tensor), is_parameter, fqn)
        for fqn, tensor, is_parameter in tensors
        if type(tensor) in (nn.Parameter, nn.Buffer, Tensor)
        and has_addresses(tensor)
        and tensor.layout == torch.strided
        and tensor.data_ptr()
    )
    # The ranges are in the order of their beginnings: one overlaps an earlier one if it begins before the furthest end
    # of those. There is a furthest end for parameters, and one for other tensors, which may overlap each other.
    furthest_end: dict[bool, tuple[str, int, str]] = {}  # by whether it is a parameter's: device, end and name
    for device, begin, end, is_parameter, fqn in memory_ranges:
        for is_of_parameter, (other_device, other_end, other) in furthest_end.items():
            if other_device == device and begin < other_end and (is_of_parameter or is_parameter):
                raise ShardingError(
                    f"{other!r} and {fqn!r} share memory, and are different tensors: training shards would change one "
                    "and not the other.\n"
                    "Use one parameter in both places (b.weight = a.weight, without .data), as a tied parameter; or "
                    "keep a copy (.detach().clone())."
                )
        if is_parameter not in furthest_end or furthest_end[is_parameter][:2] < (device, end):
            furthest_end[is_parameter] = (device, end, fqn)


def _extent(tensor: Tensor) -> int:
    """How many bytes lie between the first element and the end of the last one."""
    if not tensor.numel():
        return 0
    last_index = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last_index + 1) * tensor.element_size()


def _attribute_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors that are plain attributes of modules, or lie in lists and dictionaries that are."""

    def find_in(name: str, value: Any, depth: int) -> Iterator[tuple[str, Tensor]]:
        if type(value) is Tensor:
            yield name, value
        elif depth and isinstance(value, dict):
            for key, item in value.items():
                yield from find_in(f"{name}[{key!r}]", item, depth - 1)
        elif depth and isinstance(value, list | tuple):
            for index, item in enumerate(value):
                yield from find_in(f"{name}[{index}]", item, depth - 1)

    for fqn, submodule in module.named_modules():
        for name, value in vars(submodule).items():
            is_computed = f"{name}_orig" in submodule._parameters  # by spectral_norm
            if name not in _MODULE_ATTRIBUTES and not is_computed:
                yield from find_in(f"{fqn}.{name}".removeprefix("."), value, 2)


#: What torch keeps in a module's attributes.
_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))


#: The accepted tensor classes; backends themselves report DTensors and flat parameters that they don't support.
_PLAIN = (nn.Parameter, nn.Buffer, Tensor, DTensor, FlatParameter)


def _refuse_class(fqn: str, tensor: Tensor) -> None:
    description = "quantised" if tensor.is_quantized else f"of the class {type(tensor).__name__}"
    raise ShardingError(
        f"{fqn!r} is {description}, which sharding would cut, or send to other ranks, as if it were a plain tensor.\n"
        f"{_INSTEAD_OF_PACKED}"
    )


def _packing_attribute(parameter: nn.Parameter) -> str | None:
    """An attribute without which a parameter's bytes can't be read, such as the ``quant_state`` of bitsandbytes.

    Of floating-point parameters, attributes are hints to optimizers and the like, unless packed bytes are stored as if
    they were floats.
    """
    names = [name for name in vars(parameter) if not name.startswith("_")]
    if "quant_state" in names:
        return "quant_state"
    is_number = parameter.dtype in _NUMBERS
    return None if is_number or not names else names[0]


#: What parameters compute in. All else is stored: integers, and floats of 8 bits or fewer.
_NUMBERS = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128)

_INSTEAD_OF_PACKED = (
    "Shard the model as it was before it was quantised or converted, in bf16 where it is large "
    "(precision='bf16-true'), and convert what was trained, from fsdp_core.full_state_dict(module) or a "
    "checkpoint; or train on one device (devices=1, strategy='auto'), where nothing is sharded."
)
