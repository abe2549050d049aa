"""The environment variables that affect how a script runs, with secrets hidden."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from fsdp_core.device_names import VISIBILITY

__all__ = ["environment_variables"]

_NAMES = frozenset(
    {
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "ROLE_RANK"),
        *("MASTER_ADDR", "MASTER_PORT", "PJRT_DEVICE", "CUDA_LAUNCH_BLOCKING", *VISIBILITY.values()),
        *("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_DEVICE_ORDER", "NVIDIA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"),
        *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUBLAS_WORKSPACE_CONFIG", "LD_LIBRARY_PATH", "LD_PRELOAD"),
        *("SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"),
        *("PYTHONPATH", "PYTHONWARNINGS", "PYTHONSAFEPATH", "PL_GLOBAL_SEED"),
    }
)
_PREFIXES = ("TORCH_", "TORCHELASTIC_", "PYTORCH_", "NCCL_", "GLOO_", "UCC_", "XLA_", "TPU_", "LIBTPU_", "FSDP_", "LT_")
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH")
_IN_URL = re.compile(r"://[^/@\s]+@")


def environment_variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The relevant variables and their values, by name, in alphabetical order.

    Example:
        >>> environment_variables({"RANK": "0", "HOME": "/root", "NCCL_DEBUG": "INFO", "TORCH_API_KEY": "abc"})
        {'NCCL_DEBUG': 'INFO', 'RANK': '0', 'TORCH_API_KEY': '(hidden)'}
    """
    return {
        name: "(hidden)" if _SECRET.search(name) else _IN_URL.sub("://(hidden)@", environ[name])
        for name in sorted(environ)
        if name in _NAMES or name.startswith(_PREFIXES)
    }
