"""How a module is sharded: the contract of backends, and what each of them needs for it."""

from fsdp_core.device_names import ANY_ACCELERATOR
from fsdp_core.devices import can_pin_memory
from fsdp_core.gradients.backward import EndOfBackward
from fsdp_core.gradients.clipping import clip_grads_by_norm, clip_grads_by_value, is_sharded_dtensor, local_tensor
from fsdp_core.gradients.gathered_values import GatheredValue, WrittenValues, forget_writes
from fsdp_core.gradients.piece_places import PiecePlace, place_piece
from fsdp_core.gradients.replicated import ReplicatedParameters, stays_whole
from fsdp_core.gradients.step_gradients import (
    StepGradients,
    count_data_writes,
    count_piece_writes,
    guard_parameters,
    show_gradient_elsewhere,
    unguard_parameters,
)
from fsdp_core.gradients.step_writes import ComparedShards, GatheredShard, StepWrites
from fsdp_core.initialization.materialize import materialize, note_initialisers, place
from fsdp_core.initialization.sharded_init import KeptPart, detach_part, is_part, kept_as_built
from fsdp_core.initialization.wrap import marked, options_of, wrap
from fsdp_core.mesh import DATA_AXES, GRADIENT_AXES, MESH_AXES, Mesh, MeshAxis
from fsdp_core.sharding.backend import Backend
from fsdp_core.sharding.flattened_parameters import (
    FlatMember,
    ParameterOrders,
    Tie,
    by_user_names,
    parameter_orders,
    put_in_place,
    stand_ins_in_place,
    unwrapped,
)
from fsdp_core.sharding.options import ShardingOptions, option
from fsdp_core.sharding.plan import ParameterPlan, ShardingPlan, UnitModules, modules_by_unit, plan_module
from fsdp_core.sharding.precision_strings import ShardPrecision
from fsdp_core.sharding.sequence import SequenceSplit, current_split, use_split
from fsdp_core.sharding.sharded import Sharded, StateTensor, copy_refusal, sharded_around, sharded_of
from fsdp_core.sharding.units.activations import SavedOps, check_saved_ops, offload_activations, recompute_all_but
from fsdp_core.sharding.units.outside_attributes import OutsideAttributes
from fsdp_core.sharding.units.step_inputs import StepInputs
from fsdp_core.sharding.units.unit_calls import RefusedTransforms, UnitCalls
from fsdp_core.sharding.units.wrap_policy import (
    ActivationCheckpointingPolicy,
    WrapPolicy,
    checkpoint_activations,
    describe_policy,
    repeated_blocks,
    select_recomputed,
    select_units,
)
from fsdp_core.torch_private.autograd import in_backward, is_accumulated, is_recomputing, outside_transforms
from fsdp_core.torch_private.dynamo import outside_of_compilation
from fsdp_core.torch_private.modules import cast_inputs, is_flattened
from fsdp_core.torch_private.tensors import times_written, without_torch_function

__all__ = [
    "ANY_ACCELERATOR",
    "DATA_AXES",
    "GRADIENT_AXES",
    "MESH_AXES",
    "ActivationCheckpointingPolicy",
    "Backend",
    "ComparedShards",
    "EndOfBackward",
    "FlatMember",
    "GatheredShard",
    "GatheredValue",
    "KeptPart",
    "Mesh",
    "MeshAxis",
    "OutsideAttributes",
    "ParameterOrders",
    "ParameterPlan",
    "PiecePlace",
    "RefusedTransforms",
    "ReplicatedParameters",
    "SavedOps",
    "SequenceSplit",
    "ShardPrecision",
    "Sharded",
    "ShardingOptions",
    "ShardingPlan",
    "StateTensor",
    "StepGradients",
    "StepInputs",
    "StepWrites",
    "Tie",
    "UnitCalls",
    "UnitModules",
    "WrapPolicy",
    "WrittenValues",
    "by_user_names",
    "can_pin_memory",
    "cast_inputs",
    "check_saved_ops",
    "checkpoint_activations",
    "clip_grads_by_norm",
    "clip_grads_by_value",
    "copy_refusal",
    "count_data_writes",
    "count_piece_writes",
    "current_split",
    "describe_policy",
    "detach_part",
    "forget_writes",
    "guard_parameters",
    "in_backward",
    "is_accumulated",
    "is_flattened",
    "is_part",
    "is_recomputing",
    "is_sharded_dtensor",
    "kept_as_built",
    "local_tensor",
    "marked",
    "materialize",
    "modules_by_unit",
    "note_initialisers",
    "offload_activations",
    "option",
    "options_of",
    "outside_of_compilation",
    "outside_transforms",
    "parameter_orders",
    "place",
    "place_piece",
    "plan_module",
    "put_in_place",
    "recompute_all_but",
    "repeated_blocks",
    "select_recomputed",
    "select_units",
    "sharded_around",
    "sharded_of",
    "show_gradient_elsewhere",
    "stand_ins_in_place",
    "stays_whole",
    "times_written",
    "unguard_parameters",
    "unwrapped",
    "use_split",
    "without_torch_function",
    "wrap",
]
