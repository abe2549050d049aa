"""What torch does otherwise on CUDA than on a CPU, as far as memory shows it. Each rule names its source.

They are of torch 2.13; those of cuBLAS and NCCL were read in copies of torch's and NCCL's sources whose release is not
known. **No card has confirmed them.** Not known are the workspaces of convolutions, and what libraries choose by the
card: cuDNN and cuBLASLt allocate as much as an algorithm wants.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.optim import optimizer as torch_optimizer
from torch.optim import swa_utils

from fsdp_core.rehearsal.caching_allocator import reserved_bytes
from fsdp_core.rehearsal.memory import StepRecord
from fsdp_core.rehearsal.modules_on_fakes import replaced
from fsdp_core.torch_private.fake_tensors import FakeTensor, foreach_utils, tree_map_only

__all__ = ["as_on_cuda", "beside_tensors"]

_KIB, _MIB = 1 << 10, 1 << 20


@contextmanager
def as_on_cuda() -> Iterator[None]:
    """A context in which fake tensors on the CPU are computed with as CUDA would."""
    with ExitStack() as contexts:
        for rule in (foreach_optimizers, masks_of_dropout, attention_without_scores, autocast_lists):
            contexts.enter_context(rule())
        yield


@contextmanager
def foreach_optimizers() -> Iterator[None]:
    """Optimizers and clipping compute with lists of tensors: each intermediate result is there for all parameters.

    ``torch/optim/optimizer.py``, ``_default_to_fused_or_foreach``: if all parameters are on a device of
    ``_get_foreach_kernels_supported_devices()``, which CUDA is, and a CPU is not.
    """

    def with_cpu(devices: Callable[[], list[str]]) -> Callable[[], list[str]]:
        return lambda: [*devices(), "cpu"]

    def with_fakes(types: list[type]) -> list[type]:
        return [*types, FakeTensor]  # a fake parameter's type is none of torch's Parameter

    with ExitStack() as contexts:
        for owner in (foreach_utils, torch_optimizer, swa_utils):
            contexts.enter_context(replaced(owner, "_get_foreach_kernels_supported_devices", with_cpu))
        for owner in (foreach_utils, torch_optimizer):
            contexts.enter_context(replaced(owner, "_foreach_supported_types", with_fakes))
        yield


@contextmanager
def masks_of_dropout() -> Iterator[None]:
    """Dropout keeps a mask of one byte an element, and not what it multiplies with.

    ``aten/src/ATen/native/Dropout.cpp``: ``is_fused_kernel_acceptable`` is true on CUDA for probabilities between 0 and
    1, and leads to ``native_dropout``.
    """

    class Functions:
        def __init__(self, functions: Any) -> None:
            self._functions = functions

        def __getattr__(self, name: str) -> Any:
            return getattr(self._functions, name)

        def dropout(self, tensor: Tensor, probability: float, is_training: bool) -> Tensor:
            if is_training and 0 < probability < 1 and tensor.numel():
                return torch.native_dropout(tensor, probability, True)[0]
            result: Tensor = self._functions.dropout(tensor, probability, is_training)
            return result

    with replaced(functional, "_VF", Functions):
        yield


@contextmanager
def attention_without_scores() -> Iterator[None]:
    """Attention with dropout keeps no scores: a CPU has such kernels for attention without dropout alone.

    ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp``: flash and memory-efficient attention take dropout; of a
    CPU (``sdp_utils_cpp.cpp``), ``check_for_dropout`` refuses it, and scores of all pairs are computed.
    """

    def without_dropout(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(attend)
        def attend_(
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attn_mask: Tensor | None = None,
            dropout_p: float = 0.0,
            *args: Any,
            **kwargs: Any,
        ) -> Tensor:
            return attend(query, key, value, attn_mask, 0.0, *args, **kwargs)

        return attend_

    with replaced(functional, "scaled_dot_product_attention", without_dropout):
        yield


#: ``AT_FORALL_FP32``: what autocast computes in float32 on CUDA, with inputs that are cast.
IN_FLOAT32 = (
    *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh"),
    *("tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm", "native_layer_norm"),
    *("rms_norm", "group_norm", "frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim", "cosine_similarity"),
    *("poisson_nll_loss", "cosine_embedding_loss", "nll_loss", "nll_loss2d", "hinge_embedding_loss", "kl_div"),
    *("l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss", "margin_ranking_loss", "multilabel_margin_loss"),
    *("soft_margin_loss", "triplet_margin_loss", "multi_margin_loss", "binary_cross_entropy_with_logits", "dist"),
    *("pdist", "cdist", "renorm", "logsumexp", "upsample_nearest1d", "_upsample_nearest_exact1d", "upsample_nearest2d"),
    *("_upsample_nearest_exact2d", "upsample_nearest3d", "_upsample_nearest_exact3d", "upsample_linear1d"),
    *("upsample_bilinear2d", "_upsample_bilinear2d_aa", "upsample_trilinear3d", "upsample_bicubic2d"),
    "_upsample_bicubic2d_aa",
)

#: ``AT_FORALL_FP32_SET_OPT_DTYPE``: what returns float32 there, of inputs as they are.
TO_FLOAT32 = (
    *("prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "linalg_vector_norm"),
    *("linalg_matrix_norm", "linalg_matrix_norm.str_ord", "sum", "sum.dim_IntList"),
)


@contextmanager
def autocast_lists() -> Iterator[None]:
    """Under autocast, norms, softmax and losses are in float32: a CPU has most of them in the lower precision.

    ``aten/src/ATen/autocast_mode.h``. What a CPU has on its lists beside, stays.
    """
    library = torch.library.Library("aten", "IMPL", "AutocastCPU")  # while it is referred to
    for names, kernel_of in ((IN_FLOAT32, _with_float32), (TO_FLOAT32, _returning_float32)):
        for name in names:
            packet, _, overload = name.partition(".")
            library.impl(name, kernel_of(getattr(getattr(torch.ops.aten, packet), overload or "default")))
    try:
        yield
    finally:
        del library


_LOWER = (torch.bfloat16, torch.float16)


def _with_float32(operator: Any) -> Callable[..., Any]:
    def cast(tensor: Tensor) -> Tensor:
        return tensor.float() if tensor.dtype in _LOWER else tensor

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            args, kwargs = tree_map_only(Tensor, cast, (args, kwargs))
            return operator(*args, **kwargs)

    return kernel


def _returning_float32(operator: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            if args[0].dtype in _LOWER and kwargs.get("dtype") is None and not isinstance(args[-1], torch.dtype):
                args = args[:-1] if args[-1] is None and operator.overloadpacket in _DTYPE_IS_LAST else args
                kwargs = {**kwargs, "dtype": torch.float32}
            return operator(*args, **kwargs)

    return kernel


#: Operators that take the dtype as a positional argument too.
_DTYPE_IS_LAST = (torch.ops.aten.softmax, torch.ops.aten.log_softmax)


# -- beside tensors ----------------------------------------------------------------------------------------------------


def beside_tensors(step: StepRecord) -> dict[str, int]:
    """What a card needs beside the tensors at the peak, in bytes, by what it is.

    Args:
        step: The step that was rehearsed.
    """
    group_sizes = {collective.ranks for collective in step.collectives if collective.ranks > 1}
    return {
        "allocator": reserved_bytes(step, "cpu") - step.peak("cpu").nbytes,
        "cuBLAS": cublas_workspaces(),
        "CUDA context": CONTEXT,
        "NCCL": len(group_sizes) * nccl_buffers(),
    }


def cublas_workspaces() -> int:
    """Of the thread of the forward pass, and of that of the backward pass, which has a handle of its own.

    ``aten/src/ATen/cuda/CublasHandlePool.cpp``, ``parseChosenWorkspaceSize``: 32 MiB on Hopper, and 8.1 MiB on cards
    before it. It is the larger one here.
    """
    return 2 * 32 * _MIB


#: Of the driver's own: no source says it. Cards of the last years show between 300 and 600 MiB.
CONTEXT = 512 * _MIB


def nccl_buffers() -> int:
    """Of a communicator, whose ring has 16 channels: NCCL chooses as many on NVLink, fewer elsewhere.

    ``src/init.cc``, ``computeBuffSizes``: of each channel, 4 MiB for the protocol Simple, 512 KiB for LL (8 × 512 × 8
    × 16), and 4,800 KiB for LL128 (120 × 640 × 8 × 8).
    """
    return 16 * (4 * _MIB + 512 * _KIB + 4800 * _KIB)
