"""Names of kinds of devices, and of what goes with them, as plain data; imports nothing.

The only module of core besides :mod:`fsdp_core.devices` that knows kinds of devices by name.
"""

from __future__ import annotations

__all__ = [
    "ANY_ACCELERATOR",
    "GROUP_EXAMPLE",
    "KINDS_OF_LIGHTNING",
    "LIGHTNINGS_OWN",
    "PACKAGES",
    "REHEARSED",
    "VISIBILITY",
]

#: Stands in a list of accelerators for whatever ``torch.accelerator.current_accelerator()`` returns.
ANY_ACCELERATOR = "any"

#: torch's kind of device of each of Lightning's own accelerators, by all of Lightning's names for them.
KINDS_OF_LIGHTNING = {"cpu": "cpu", "cuda": "cuda", "gpu": "cuda", "mps": "mps", "tpu": "xla"}

#: Kinds for which Lightning has an accelerator of its own that needs no other package.
LIGHTNINGS_OWN = frozenset({"cpu", "cuda", "mps"})

#: The kinds of devices that a fit is rehearsed as: the CPU, and one whose rules of memory torch's sources tell.
REHEARSED = ("cpu", "cuda")

#: A process group with a backend for each kind of device, as users write it.
GROUP_EXAMPLE = "cpu:gloo,cuda:nccl"

#: Kinds whose memory a rehearsal knows: the first as it is measured, the others by rules.
REHEARSED = ("cpu", "cuda")

#: What to install for kinds of devices that no torch has by itself, or not each build of it.
PACKAGES = {
    "npu": "torch_npu (pip install torch-npu) and Ascend's CANN, whose libraries it loads",
    "tpu": "torch_tpu (pip install torch-tpu)",
    "xpu": "torch's build for XPUs (https://pytorch.org says how)",
    "hpu": "habana_frameworks.torch, which the software of Intel Gaudi has",
    "musa": "torch_musa",
    "mlu": "torch_mlu",
    "rbln": "torch_rbln (pip install torch-rbln) and Rebellions' rebel-compiler, whose library it loads",
}

#: The variable that says which devices of a kind a process sees; others are hidden from torch. Read by the vendor's
#: library: CUDA, CANN, Level Zero, libtpu, Gaudi's software, MUSA, Cambricon's Neuware, RBLN's runtime.
VISIBILITY = {
    "cuda": "CUDA_VISIBLE_DEVICES",
    "npu": "ASCEND_RT_VISIBLE_DEVICES",
    "xpu": "ZE_AFFINITY_MASK",
    "tpu": "TPU_VISIBLE_CHIPS",
    "hpu": "HABANA_VISIBLE_MODULES",
    "musa": "MUSA_VISIBLE_DEVICES",
    "mlu": "MLU_VISIBLE_DEVICES",
    "rbln": "RBLN_DEVICES",
}
