"""Where the contenders compute: on CUDA where there is a GPU, else on the CPU, one thread per rank."""

from __future__ import annotations

import os

import torch

__all__ = ["ACCELERATOR", "PROCESS_GROUP", "RANKS", "finish", "own_device", "prepare_thread"]

ACCELERATOR = "cuda" if torch.cuda.is_available() else "cpu"
PROCESS_GROUP = {"cuda": "cpu:gloo,cuda:nccl", "cpu": "gloo"}[ACCELERATOR]
RANKS = {"cuda": torch.cuda.device_count(), "cpu": 2}[ACCELERATOR]


def own_device() -> torch.device:
    """This rank's."""
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if ACCELERATOR == "cuda" else torch.device("cpu")


def prepare_thread() -> None:
    """Choose the device, or the number of threads: both belong to the thread that chooses."""
    if ACCELERATOR == "cuda":
        torch.cuda.set_device(own_device())
    else:
        torch.set_num_threads(1)


def finish() -> None:
    """Wait until the device has done all that it was told."""
    if ACCELERATOR == "cuda":
        torch.cuda.synchronize()
