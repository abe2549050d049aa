"""Checks, once before sharding, that all ranks are about to shard the same model in the same way."""

from __future__ import annotations

import functools
import hashlib
import re
import socket
import sys
from collections.abc import Mapping, Set
from dataclasses import fields, is_dataclass
from datetime import timedelta
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from fsdp_core.errors import ShardingError
from fsdp_core.runtime import Runtime

__all__ = ["check_same", "describe_error", "describe_tensor", "describe_value", "facts_of_options", "facts_of_packages"]


def check_same(runtime: Runtime, class_name: str, facts: Mapping[str, str]) -> None:
    """Raise on every rank if the facts of any two ranks differ. All ranks must call it.

    If they agree, rank 0 only sends a digest.

    Args:
        runtime: The ranks.
        class_name: The module's class name, for the error.
        facts: Descriptions of the set-up by topic; equal set-ups must have equal descriptions on all ranks.

    Raises:
        ShardingError: Two ranks differ. The message names the rank and the first difference.

    Example:
        >>> from fsdp_core.runtime import ProcessGroupRuntime
        >>> check_same(ProcessGroupRuntime(), "Linear", facts_of_options({"cpu_offload": True}))
    """
    own_facts = list(facts.items())
    digest = hashlib.sha256(repr(own_facts).encode()).hexdigest()
    differs = digest != runtime.broadcast_object(digest)
    (differing_ranks,) = runtime.total([differs])
    if differing_ranks == 0:
        return
    own_difference = _difference(runtime.broadcast_object(own_facts), own_facts)
    differences_and_hosts = runtime.gather_objects((own_difference, socket.gethostname()))
    first_rank, *further_ranks = [rank for rank, (difference, _) in enumerate(differences_and_hosts) if difference]
    difference, host = differences_and_hosts[first_rank]
    _, host_of_rank_0 = differences_and_hosts[0]
    host_text = f" (on {host})" if host != host_of_rank_0 else ""
    further_text = f" Rank {', '.join(map(str, further_ranks))} differs from it too." if further_ranks else ""
    raise ShardingError(
        f"rank {first_rank}{host_text} has not set up the same {class_name} as rank 0: {difference}.{further_text}\n"
        "Build the same model on every rank, with the same options and packages. Only the values of parameters and "
        "buffers may differ, of which rank 0's are taken."
    )


def facts_of_options(options: Mapping[str, Any]) -> dict[str, str]:
    """Options, by name.

    Example:
        >>> facts_of_options({"cpu_offload": True, "auto_wrap_policy": {nn.Linear}})
        {"option 'cpu_offload'": 'True', "option 'auto_wrap_policy'": '{Linear}'}
    """
    return {f"option {name!r}": describe_value(value) for name, value in options.items()}


def facts_of_packages(module: nn.Module, *further_classes: type) -> dict[str, str]:
    """The versions of torch and of the packages that define a module's classes and other classes.

    Args:
        module: The module; the classes of all its submodules are included.
        *further_classes: Other classes.
    """
    classes = {*further_classes, *(type(submodule) for submodule in module.modules())}
    names = {"torch", "fsdp_core"} | {base.__module__.partition(".")[0] for cls in classes for base in cls.__mro__}
    versions = {name: getattr(sys.modules.get(name), "__version__", None) for name in sorted(names)}
    return {f"version of {name}": version for name, version in versions.items() if isinstance(version, str)}


def _difference(of_rank_0: list[tuple[str, str]], own: list[tuple[str, str]]) -> str:
    """The first difference between this rank and rank 0; empty if there is none."""
    facts_of_rank_0, own_facts = dict(of_rank_0), dict(own)
    for (key, value), (own_key, own_value) in zip(of_rank_0, own, strict=False):
        if own_key != key:  # from here on the parts are others, or in another order
            break
        if own_value != value:
            return f"its {key} is {own_value}, and rank 0's is {value}"
    extra = next(
        (f"it has a {key}, {value}, and rank 0 has none" for key, value in own if key not in facts_of_rank_0), ""
    )
    lacking = next(
        (f"rank 0 has a {key}, {value}, and it has none" for key, value in of_rank_0 if key not in own_facts), ""
    )
    order = "it has the same parts in another order" if of_rank_0 != own else ""
    return extra or lacking or order


def describe_tensor(tensor: Tensor) -> str:
    """Describe a tensor's shape and dtype."""
    return "not known yet" if is_lazy(tensor) else f"{tuple(tensor.shape)} in {tensor.dtype}"


_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def describe_value(value: object) -> str:
    """Describe a value such that equal values have equal descriptions on all ranks: no addresses, no set order.

    A function is described by its name, an object by that of its class, a tensor with one element by the number, and
    any other tensor by its shape and dtype.

    Example:
        >>> describe_value((0.9, torch.tensor(0.5), float("nan"), torch.zeros(2), len, nn.Identity()))
        '[0.9, 0.5 in torch.float32, nan, (2,) in torch.float32, len, a Identity]'
    """
    if isinstance(value, Tensor):
        # reading a value on XLA runs a program, and reading a DTensor's a collective, which other ranks may not run
        is_readable = value.device.type not in ("meta", "xla") and not isinstance(value, DTensor)
        if value.numel() == 1 and is_readable:
            return f"{value.item()!r} in {value.dtype}"
        return describe_tensor(value)
    if isinstance(value, str):
        if not _ADDRESS.search(value):
            return repr(value)
        # a library's text about a policy: keep the names in it, without their packages and in a fixed order
        words = re.findall(r"[\w.]+", _ADDRESS.sub("", value))
        return " ".join(sorted(word.rpartition(".")[2] for word in words))
    if isinstance(value, float):
        return float.__repr__(value)  # numpy's floats have a repr of their own
    if value is None or isinstance(value, bool | int | Enum | torch.dtype | timedelta):
        return repr(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{describe_value(key)}: {describe_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, Set):
        return "{" + ", ".join(sorted(map(describe_value, value))) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(describe_value, value)) + "]"
    if isinstance(value, functools.partial):
        return f"partial({describe_value(value.func)}, {describe_value(value.args)}, {describe_value(value.keywords)})"
    if is_dataclass(value) and not isinstance(value, type):
        arguments = ", ".join(f"{field.name}={describe_value(getattr(value, field.name))}" for field in fields(value))
        return f"{type(value).__name__}({arguments})"
    qualified_name = getattr(value, "__qualname__", None)
    return qualified_name if isinstance(qualified_name, str) else f"a {type(value).__name__}"


def describe_error(error: Exception) -> str:
    """An error's class and message, without addresses of objects in it, which differ from rank to rank."""
    return f"{type(error).__name__}: {_ADDRESS.sub('', str(error))}"
