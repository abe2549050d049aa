"""Saves to a disk on which the second, larger checkpoint has no room: ``python full_disk.py FOLDER``.

The disk is a file system in memory, which only this process sees: root can make one.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import lightning as L
import torch
from torch import nn

from fsdp_core.errors import CheckpointError
from fsdp_fsdp2.fabric import FSDP2Strategy

#: The exit status where no disk can be made.
NO_DISK = 77

_NEW_MOUNTS = 0x00020000  # CLONE_NEWNS


def main() -> None:
    disk = Path(sys.argv[1])
    if ctypes.CDLL(None).unshare(_NEW_MOUNTS):
        sys.exit(NO_DISK)
    for mount in (["--make-rprivate", "/"], ["-t", "tmpfs", "-o", "size=4m", "none", str(disk)]):
        if subprocess.run(["mount", *mount], check=False).returncode:
            sys.exit(NO_DISK)
    fabric = L.Fabric(strategy=FSDP2Strategy(state_dict_type="full"), accelerator="cpu", devices=1)
    fabric.launch()
    model = fabric.setup(nn.Linear(4, 4))
    path = disk / "full.ckpt"
    fabric.save(path, {"model": model, "step": 1, "rows": torch.ones(250_000)})
    try:
        fabric.save(path, {"model": model, "step": 2, "rows": torch.ones(1_500_000)})
    except CheckpointError as error:
        print("refused:", error)
    found = fabric.load(path)
    print("step", found["step"], sorted(os.listdir(disk)))


if __name__ == "__main__":
    main()
