"""Which of torch's functions look at each element of a tensor by itself, so that they are right on a rank's piece."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from fsdp_core.devices import CONVERSIONS

__all__ = ["is_elementwise", "writes_to_first"]


@cache
def is_elementwise(name: str) -> bool:
    """Whether a function of this name computes each element of what it is given, or no element at all.

    Args:
        name: As torch shows it to ``__torch_function__``, such as ``"lerp_"``, ``"__rsub__"`` or ``"_foreach_add_"``.

    Returns:
        Whether torch tags a form of it as pointwise, or it is listed here; ``False`` for a name that neither knows.

    Example:
        >>> is_elementwise("lerp_"), is_elementwise("__rsub__"), is_elementwise("_foreach_add_")
        (True, True, True)
        >>> is_elementwise("layer_norm"), is_elementwise("cumsum_"), is_elementwise("_foreach_norm")
        (False, False, False)
    """
    if name.startswith("_foreach_"):
        name = name.removeprefix("_foreach_")
    elif name.startswith("_fused_"):  # steps of optimizers
        return True
    if name in _KNOWN:
        return True
    if name.startswith("__"):  # an operator, or its in-place or reflected form: __add__, __iadd__, __radd__
        base = name.strip("_")
        return base in _OPERATORS or (base[:1] in ("i", "r") and base[1:] in _OPERATORS)
    base = name.removesuffix("_")  # the function of which this is the in-place form
    without_namespace = base.removeprefix("special_")  # torch.special.erf has another name than torch.erf
    return any(variant in _KNOWN or _is_pointwise(variant) for variant in (base, without_namespace))


def writes_to_first(name: str) -> bool:
    """Whether a function of this name writes to the first tensor that it is given."""
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name[3:].strip("_") in _OPERATORS)
    return name.endswith("_")


def _is_pointwise(name: str) -> bool:
    packet: Any = getattr(torch.ops.aten, name, None)
    if packet is None or name in _NOT_ALWAYS_ELEMENTWISE:
        return False
    overloads = [getattr(packet, overload) for overload in packet.overloads()]
    return any(torch.Tag.pointwise in overload.tags for overload in overloads)


#: What torch tags as pointwise, though some of its forms reduce.
_NOT_ALWAYS_ELEMENTWISE = frozenset({"max", "min", "equal"})

_OPERATORS = frozenset(
    {"add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "invert", "lshift"}
    | {"rshift", "neg", "pos", "abs", "eq", "ne", "lt", "le", "gt", "ge"}
)

#: What torch does not tag, since it is made of other operations, fills, converts, or only asks.
_KNOWN = frozenset(
    # other names, and what is made of pointwise operations
    {"absolute", "arccos", "arccosh", "arcsin", "arcsinh", "arctan", "arctan2", "arctanh", "conj", "divide", "fix"}
    | {"floor_divide", "greater", "greater_equal", "isclose", "isreal", "less", "less_equal", "log_sigmoid"}
    | {"logsigmoid", "multiply", "negative", "not_equal", "real", "imag", "complex", "polar", "rsub", "softsign"}
    | {"subtract", "tanhshrink", "true_divide", "erf", "erfc", "erfinv", "exp2", "expit", "expm1", "gammainc", "where"}
    | {"gammaincc", "gammaln", "log1p", "multigammaln", "ndtr", "psi", "round", "dropout", "alpha_dropout", "relu"}
    | {"native_dropout", "fake_quantize_per_tensor_affine", "quantize_per_tensor", "dequantize", "int_repr", "ldexp"}
    | {"apply_", "map_", "map2_", "_amp_foreach_non_finite_check_and_unscale_", "nan_to_num", "masked_fill"}
    # fills
    | {"copy", "fill", "zero", "zero_", "normal_", "uniform_", "random_", "bernoulli", "bernoulli_", "cauchy_"}
    | {"exponential_", "geometric_", "log_normal_", "poisson", "empty_like", "ones_like", "zeros_like", "full_like"}
    | {"rand_like", "randn_like", "randint_like", "new_empty", "new_full", "new_ones", "new_tensor", "new_zeros"}
    # conversions, also to the shape that it has
    | CONVERSIONS
    | {"to", "type", "type_as", "float", "double", "half", "bfloat16", "long", "int", "short", "char", "byte", "bool"}
    | {"chalf", "cfloat", "cdouble", "contiguous", "clone", "detach", "detach_", "alias_copy"}
    | {"detach_copy", "pin_memory", "share_memory_", "record_stream", "resolve_conj", "resolve_neg", "view", "view_as"}
    | {"reshape", "reshape_as", "flatten", "ravel", "expand", "expand_as", "broadcast_to", "broadcast_tensors"}
    | {"view_copy", "atleast_1d", "__deepcopy__", "__reduce_ex__", "__setstate__"}
    # autograd
    | {"requires_grad_", "retain_grad", "register_hook", "register_post_accumulate_grad_hook", "backward", "grad"}
    # what asks for a tensor's properties, and not for its elements
    | {"size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "element_size", "get_device"}
    | {"data_ptr", "const_data_ptr", "untyped_storage", "storage", "_typed_storage", "storage_type", "dense_dim"}
    | {"sparse_dim", "dim_order", "result_type", "can_cast", "_is_view", "is_coalesced", "is_complex", "is_conj"}
    | {"is_contiguous", "is_distributed", "is_floating_point", "is_inference", "is_neg", "is_pinned", "is_same_size"}
    | {"is_set_to", "is_shared", "is_signed", "is_tensor", "__len__", "__hash__", "__repr__", "__str__", "__format__"}
    | {"__dlpack_device__", "_has_compatible_shallow_copy_type"}
    | {"__get__", "__set__", "__delete__", "__getitem__", "__setitem__", "_clear_non_serializable_cached_data"}
)
