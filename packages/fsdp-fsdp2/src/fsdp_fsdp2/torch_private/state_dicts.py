"""State dicts that are read and loaded where parameters are gathered: of shards, while what is gathered stays."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from types import MethodType
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from fsdp_fsdp2.torch_private.forward_passes import resume_states, running_states
from fsdp_fsdp2.torch_private.gathered_values import KEEP_WRITES
from fsdp_fsdp2.torch_private.parameter_groups import param_groups_in, param_groups_of
from fsdp_fsdp2.torch_private.recorded_graphs import RecordedGraphs, free_written
from fsdp_fsdp2.torch_private.unused_parameters import UnusedParameters

__all__ = ["follow_state_dicts"]

#: The attribute of a module with the gathered parameters that it has lent for a state dict, by name.
_LENT = "_fsdp_fsdp2_lent"


def follow_state_dicts(units: Sequence[FSDPModule], unused: UnusedParameters) -> None:
    """Let a step read and load state dicts of modules: ``target.load_state_dict(net.state_dict())``.

    torch's hooks free a whole unit when a state dict of one of its modules is read or loaded. A forward pass that is
    running would go on with shards, and a graph that holds the parameters with memory that was freed. Here modules
    show their shards for as long as it takes, and what they were loaded with is gathered at the end.

    Args:
        units: The units, the root last.
        unused: What shows gradients of gathered parameters.
    """
    for unit in units:
        for group in param_groups_of(unit):
            _replace_hooks(group, unused.recorded_graphs)
    root: Any = units[-1]
    root_state_ref, unused_ref = weakref.ref(root._get_fsdp_state()), weakref.ref(unused)

    def load_state_dict(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        try:
            return type(module).load_state_dict(module, *args, **kwargs)
        finally:
            root_state, live_unused = root_state_ref(), unused_ref()
            if root_state is not None and live_unused is not None:
                _gather_loaded(root_state, live_unused)

    for module in root.modules():
        module.__dict__.setdefault("load_state_dict", MethodType(load_state_dict, module))


def _replace_hooks(group: Any, recorded_graphs: RecordedGraphs) -> None:
    """Put hooks in the place of those that torch would register, or has registered, for the modules of a unit."""
    of_saves = group._module_to_pre_save_state_dict_hook_handle
    of_loads = group._module_to_pre_load_state_dict_hook_handle
    for handle in (*of_saves.values(), *of_loads.values()):
        handle.remove()
    names_by_module: dict[nn.Module, dict[str, weakref.ref[Any]]] = {}
    for parameter in group.fsdp_params:
        info = parameter._module_info
        names_by_module.setdefault(info.module, {})[info.param_name] = weakref.ref(parameter)
        for module, name in zip(info.shared_modules, info.shared_param_names, strict=True):
            names_by_module.setdefault(module, {})[name] = weakref.ref(parameter)
    for module, parameter_refs in names_by_module.items():
        references = weakref.ref(group), weakref.ref(recorded_graphs), weakref.ref(module)
        show = partial(_show_shards, *references, parameter_refs)
        # torch registers none where these dictionaries have entries
        of_saves[module] = module.register_state_dict_pre_hook(show)
        of_loads[module] = module._register_load_state_dict_pre_hook(show, with_module=True)
        module.register_state_dict_post_hook(_show_gathered)
        module.register_load_state_dict_post_hook(_show_gathered)


def _show_shards(
    group_ref: weakref.ref[Any],
    recorded_graphs_ref: weakref.ref[RecordedGraphs],
    own_module_ref: weakref.ref[nn.Module],
    parameter_refs: dict[str, weakref.ref[Any]],
    module: nn.Module,
    *_: Any,
) -> None:
    """Runs before a state dict of a module is read or loaded. A copy of the module has the hook too."""
    group, recorded_graphs = group_ref(), recorded_graphs_ref()
    if group is None or module is not own_module_ref() or group.is_sharded:
        return
    is_needed = group._training_state is TrainingState.FORWARD or bool(recorded_graphs)
    if not group.is_unsharded or not is_needed:
        group._to_sharded()
        return
    if (keep := vars(group).get(KEEP_WRITES)) is not None:
        keep()
    lent = vars(module).setdefault(_LENT, {})
    for name, parameter_ref in parameter_refs.items():
        parameter = parameter_ref()
        if parameter is not None and module._parameters.get(name) is parameter._unsharded_param:
            module._parameters[name] = parameter.sharded_param
            lent[name] = parameter.sharded_param, parameter._unsharded_param


def _show_gathered(module: nn.Module, *_: Any) -> None:
    """Runs after a state dict of a module was read or loaded."""
    for name, (shard, gathered) in vars(module).pop(_LENT, {}).items():
        if module._parameters.get(name) is shard:  # another one was assigned, which the next call refuses
            module._parameters[name] = gathered


def _gather_loaded(root_state: Any, unused: UnusedParameters) -> None:
    """Gather what was loaded again for the forward passes that are running."""
    outermost_state = root_state._state_ctx.iter_forward_root
    written = [s for s in running_states(root_state) if free_written(param_groups_in(s), unused.recorded_graphs)]
    if written:
        resume_states(written, outermost_state)
        unused.show_gradients()
