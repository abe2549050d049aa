"""Which submodules are FSDP units, and which recompute their activations.

Policies are the same for every backend: a set of classes, a callable, or ``"auto"``.
"""

from __future__ import annotations

import functools
import inspect
import logging
import pkgutil
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, cast

from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp_core.errors import ShardingError
from fsdp_core.initialization.wrap import marked
from fsdp_core.sharding.plan import ShardingPlan
from fsdp_core.sharding.units.recomputed_buffers import recompute_with_buffers
from fsdp_core.state.fqn import unwrap_compiled

__all__ = [
    "ActivationCheckpointingPolicy",
    "WrapPolicy",
    "checkpoint_activations",
    "describe_policy",
    "repeated_blocks",
    "select_recomputed",
    "select_units",
]

#: Classes, a predicate on modules, one of torch's FSDP policies (called with module, recurse, nonwrapped_numel), or
#: ``"auto"`` for :func:`repeated_blocks`.
WrapPolicy = Collection[type[nn.Module]] | Callable[..., bool] | Literal["auto"]
#: Classes, a predicate on modules, or ``"every_2"`` for every second repeated block, and so on; or the import path of
#: one of the former. Options are annotated as ``str | ActivationCheckpointingPolicy``, with strings first: otherwise
#: LightningCLI would take strings for functions, and fail to save them.
ActivationCheckpointingPolicy = Collection[type[nn.Module]] | Callable[[nn.Module], bool] | str

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)

log = logging.getLogger(__name__)


def repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """Find the blocks that a model repeats: members of one ``ModuleList`` or ``Sequential`` that share a class.

    Only the outermost ones count. In a ``Sequential``, which may also chain single layers, blocks must have submodules.

    Example:
        >>> blocks = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        >>> model = nn.ModuleDict({"blocks": blocks, "head": nn.Linear(2, 1)})
        >>> repeated_blocks(model) == list(blocks)
        True
    """
    # a root that is itself a Sequential is included
    parent = nn.ModuleList([module]) if isinstance(module, nn.ModuleList | nn.Sequential) else module
    return list(dict.fromkeys(_find_blocks(parent)))


def _find_blocks(parent: nn.Module) -> Iterator[nn.Module]:
    for child in parent.children():
        if not isinstance(child, nn.ModuleList | nn.Sequential):
            yield from _find_blocks(child)
            continue
        members = [unwrap_compiled(m) for m in child]
        count = Counter(type(m) for m in members)
        for member in members:
            is_layer = isinstance(child, nn.Sequential) and not any(True for _ in member.children())
            if count[type(member)] > 1 and not is_layer and not isinstance(member, _CONTAINERS):
                yield member
            else:
                yield from _find_blocks(member)


def select_units(module: nn.Module, policy: WrapPolicy | None) -> list[nn.Module]:
    """Choose the submodules of ``module`` that become FSDP units, innermost first, without the root.

    Modules marked by :func:`fsdp_core.wrap` are units too, and the only ones under ``"auto"`` and ``None``.

    A policy that matches only the root makes the whole module one unit, as with ``None``.

    A submodule that shares a parameter with a module outside it belongs to the enclosing unit, so that tied parameters
    stay in one unit. A submodule without parameters is left out.

    Args:
        module: The root.
        policy: See :data:`WrapPolicy`; ``None`` for the root alone.

    Raises:
        ShardingError: The policy is invalid, matches nothing, or matches a container that is never called.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
        >>> len(select_units(model, {nn.Linear})), len(select_units(model, "auto"))
        (2, 0)
    """
    marked_modules = marked(module)
    if policy is None:
        chosen = marked_modules
    elif isinstance(policy, str):
        if policy != "auto":
            raise ShardingError(f"auto_wrap_policy={policy!r} is no policy.\n{_HOW_TO['auto_wrap_policy']}")
        chosen = marked_modules or repeated_blocks(module)
    else:
        chosen = [*_matching_submodules(module, policy), *marked_modules]
        if not chosen and not _matches_root(module, policy):
            policy_text, class_names = _describe_distinctly(module, policy)
            raise ShardingError(
                f"auto_wrap_policy={policy_text} matches no submodule of {type(module).__name__}, "
                "so nothing but the whole model would be a unit.\n"
                f"Its submodules are of: {class_names}.\n{_HOW_TO['auto_wrap_policy']}"
            )
    _refuse_containers(chosen, policy, "auto_wrap_policy")
    chosen_set = set(chosen)
    depth_first = [m for m in _post_order(module) if m in chosen_set]
    names = _names(module)
    parameter_names = _parameter_names(module)
    with_parameters = (unit for unit in depth_first if any(True for _ in unit.parameters()))
    return [unit for unit in with_parameters if not _shares_outside(unit, names[unit], parameter_names)]


def checkpoint_activations(
    module: nn.Module,
    policy: ActivationCheckpointingPolicy | ShardingPlan | None,
    recompute: Callable[..., Any] | None = None,
) -> int:
    """Make the matching submodules recompute their activations in the backward pass, in place.

    The RNG state is preserved, so that dropout is the same in the recomputation; buffers are written to once, and the
    recomputation sees what they were. Names and classes of modules don't change. Idempotent.

    Args:
        module: The root.
        policy: See :data:`ActivationCheckpointingPolicy`; ``None`` for none. Or the module's plan, which holds what the
            policy chose: a function may choose otherwise when it is called again.
        recompute: Calls its first argument with the others, and again in the backward pass; ``None`` for torch's own.

    Returns:
        The number of submodules that recompute.

    Raises:
        ShardingError: The policy is invalid, or matches nothing.
    """
    if isinstance(policy, ShardingPlan):
        chosen = [module.get_submodule(name) for name in policy.recomputed]
    else:
        chosen = select_recomputed(module, policy)
    recompute = recompute or functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=True)
    for submodule in chosen:
        if "_fsdp_core_checkpointed" not in submodule.__dict__:
            submodule.__dict__["_fsdp_core_checkpointed"] = True
            submodule.forward = recompute_with_buffers(submodule, recompute)
    return len(chosen)


def select_recomputed(module: nn.Module, policy: ActivationCheckpointingPolicy | None) -> list[nn.Module]:
    """Choose the submodules of ``module`` that recompute their activations.

    Args:
        module: The root.
        policy: See :data:`ActivationCheckpointingPolicy`; ``None`` for none.

    Raises:
        ShardingError: The policy is invalid, or matches nothing.
    """
    if policy is None:
        return []
    if isinstance(policy, str) and "." in policy:
        policy = _import_policy(policy)
    if isinstance(policy, str):
        chosen = _every_nth(module, policy)
    else:
        chosen = list(_matching_submodules(module, policy, option="activation_checkpointing_policy"))
    if not chosen:
        policy_text, class_names = _describe_distinctly(module, policy)
        raise ShardingError(
            f"activation_checkpointing_policy={policy_text} matches no submodule of {type(module).__name__}.\n"
            f"Its submodules are of: {class_names}.\n{_HOW_TO['activation_checkpointing_policy']}"
        )
    _refuse_containers(chosen, policy, "activation_checkpointing_policy")
    return chosen


_HOW_TO = {
    "auto_wrap_policy": "Write auto_wrap_policy={MyBlock} with the class of the repeated block, a function "
    "module -> bool, 'auto', or None for the root alone.",
    "activation_checkpointing_policy": "Write activation_checkpointing_policy={MyBlock} with the class of the repeated "
    "block, a function module -> bool, 'every_2' for every second repeated block, or None.",
}


def _import_policy(path: str) -> ActivationCheckpointingPolicy:
    """The policy at an import path, as configuration files write it."""
    try:
        policy: ActivationCheckpointingPolicy = pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise ShardingError(
            f"activation_checkpointing_policy={path!r} can't be imported: {error}.\n"
            f"{_HOW_TO['activation_checkpointing_policy']}"
        ) from error
    return policy


def _every_nth(module: nn.Module, policy: str) -> list[nn.Module]:
    """The blocks that ``"every_n"`` chooses: of n in a row the last, so that the first ones keep their activations."""
    match = re.fullmatch(r"every_([1-9][0-9]*)", policy)
    if match is None:
        raise ShardingError(
            f"activation_checkpointing_policy={policy!r} is no policy.\n{_HOW_TO['activation_checkpointing_policy']}"
        )
    n = int(match[1])
    blocks = marked(module) or repeated_blocks(module)
    if len(blocks) < n:
        raise ShardingError(
            f"activation_checkpointing_policy={policy!r} chooses one of {n} repeated blocks, and "
            f"{type(module).__name__} has {len(blocks)}.\n{_HOW_TO['activation_checkpointing_policy']}"
        )
    return blocks[n - 1 :: n]


def describe_policy(policy: object) -> str:
    """Describe a policy; policies that are written the same have the same description.

    Example:
        >>> describe_policy({nn.Linear, nn.LayerNorm}), describe_policy("auto")
        ('{LayerNorm, Linear}', "'auto'")
    """
    if isinstance(policy, Collection) and not isinstance(policy, str):
        return "{" + ", ".join(sorted(getattr(c, "__name__", repr(c)) for c in policy)) + "}"
    return getattr(policy, "__qualname__", repr(policy))


def _refuse_containers(chosen: list[nn.Module], policy: object, option: str) -> None:
    for unit in chosen:
        if isinstance(unit, nn.ModuleList | nn.ModuleDict) and type(unit).forward is nn.Module.forward:
            raise ShardingError(
                f"{option}={describe_policy(policy)} matches a {type(unit).__name__}, which is never called itself.\n"
                "Name the class of its members instead."
            )


def _matching_submodules(
    module: nn.Module, policy: Collection[type[nn.Module]] | Callable[..., bool] | str, option: str = "auto_wrap_policy"
) -> Iterator[nn.Module]:
    predicate = _predicate(policy, option)
    if _is_torch_policy(predicate):
        yield from _torch_policy_matches(module, predicate)
        return
    for submodule in module.modules():
        if submodule is not module and predicate(submodule):
            yield submodule


def _matches_root(root: nn.Module, policy: Collection[type[nn.Module]] | Callable[..., bool]) -> bool:
    predicate = _predicate(policy, "auto_wrap_policy")
    if not _is_torch_policy(predicate):
        return bool(predicate(root))
    size = sum(p.numel() for p in root.parameters())
    return bool(predicate(module=root, recurse=False, nonwrapped_numel=size))


def _predicate(policy: Collection[type[nn.Module]] | Callable[..., bool] | str, option: str) -> Callable[..., bool]:
    """The predicate on modules that a policy stands for."""
    if isinstance(policy, str):
        raise ShardingError(f"{option}={policy!r} is no policy.\n{_HOW_TO[option]}")
    if isinstance(policy, Collection):
        classes = tuple(policy)
        wrong = [c for c in classes if not (isinstance(c, type) and issubclass(c, nn.Module))]
        if wrong:
            raise ShardingError(f"{option} holds {wrong[0]!r}, which is no class of modules.\n{_HOW_TO[option]}")
        return lambda m: isinstance(m, classes)
    if isinstance(policy, type) and issubclass(policy, nn.Module):
        raise ShardingError(f"{option}={policy.__name__} is a class.\nWrite a set of classes: {{{policy.__name__}}}.")
    if not callable(policy):
        raise ShardingError(f"{option}={policy!r} is no policy.\n{_HOW_TO[option]}")
    return cast("Callable[..., bool]", policy)


def _is_torch_policy(policy: Callable[..., Any]) -> bool:
    """Whether ``policy`` takes (module, recurse, nonwrapped_numel), as those of torch.distributed.fsdp.wrap do."""
    return "recurse" in inspect.signature(policy).parameters


def _torch_policy_matches(root: nn.Module, policy: Callable[..., bool]) -> list[nn.Module]:
    """Apply one of torch's policies as FSDP1 does: children first, then the parent with what they left over."""
    matched: list[nn.Module] = []

    def visit(module: nn.Module) -> int:
        """Return how many elements below ``module`` are in units."""
        size = sum(p.numel() for p in module.parameters())
        if not policy(module=module, recurse=True, nonwrapped_numel=size):
            return 0
        wrapped = sum(visit(child) for child in module.children())
        if module is not root and policy(module=module, recurse=False, nonwrapped_numel=size - wrapped):
            matched.append(module)
            return size
        return wrapped

    visit(root)
    return matched


def _post_order(module: nn.Module) -> Iterator[nn.Module]:
    visited: set[nn.Module] = set()

    def visit(parent: nn.Module) -> Iterator[nn.Module]:
        for child in parent.children():
            if child not in visited:
                visited.add(child)
                yield from visit(child)
                yield child

    yield from visit(module)


def _names(root: nn.Module) -> dict[nn.Module, list[str]]:
    """All names of each submodule: one that is registered in several modules has several."""
    names: dict[nn.Module, list[str]] = {}
    for name, module in root.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    return names


def _parameter_names(root: nn.Module) -> dict[int, list[str]]:
    """All names of each parameter, by its id."""
    parameter_names: dict[int, list[str]] = {}
    for name, parameter in root.named_parameters(remove_duplicate=False):
        parameter_names.setdefault(id(parameter), []).append(name)
    return parameter_names


def _shares_outside(unit: nn.Module, names: Sequence[str], parameter_names: Mapping[int, Sequence[str]]) -> bool:
    """Whether a parameter of ``unit`` is also one of a module outside it, or in a module that is also outside it."""
    inside = tuple(f"{name}." for name in names)
    for parameter in unit.parameters():
        for name in parameter_names[id(parameter)]:
            if not name.startswith(inside):
                log.info("%s shares the parameter %r, so it is no unit of its own", type(unit).__name__, name)
                return True
    return False


def _describe_distinctly(module: nn.Module, policy: object) -> tuple[str, str]:
    """A policy, and the classes of a module's submodules, such that two classes of one name are told apart."""
    present = dict.fromkeys(type(submodule) for submodule in module.modules() if submodule is not module)
    policy_classes = list(policy) if isinstance(policy, Collection) and not isinstance(policy, str) else []
    every_class = dict.fromkeys([*present, *(cls for cls in policy_classes if isinstance(cls, type))])
    names = Counter(cls.__name__ for cls in every_class)
    full_names = Counter(map(_full_name, every_class))

    def name(cls: type) -> str:
        if names[cls.__name__] == 1:
            return cls.__name__
        # a notebook's cell that has run again defines another class of the same full name
        is_outdated = full_names[_full_name(cls)] > 1 and cls in present
        remark = " (as it was before it was defined again: build the model anew)" if is_outdated else ""
        return _full_name(cls) + remark

    text = "{" + ", ".join(sorted(map(name, policy_classes))) + "}" if policy_classes else describe_policy(policy)
    return text, ", ".join(list(map(name, present))[:20]) or "none, it has no submodules"


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
