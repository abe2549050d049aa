"""Launchers that start a job again when its time is over: by which signal they announce it, and how they are told to.

SLURM is one. The only module that knows how they do it.
"""

from __future__ import annotations

import os
import signal
import subprocess

from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

__all__ = ["requeue", "requeue_signal_of"]


def requeue_signal_of(environment: ClusterEnvironment | None) -> int | None:
    """The signal by which a launcher announces the end of a job that is to be queued again; ``None`` if none does.

    Args:
        environment: How Lightning knows the launcher.

    Example:
        >>> print(requeue_signal_of(None))
        None
    """
    if not isinstance(environment, SLURMEnvironment) or not environment.auto_requeue:
        return None
    return environment.requeue_signal or signal.SIGUSR1


def requeue() -> None:
    """Let SLURM queue this job again, once its checkpoint is complete. One rank calls it."""
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ.get('SLURM_ARRAY_TASK_ID')}"
    else:
        job = os.environ["SLURM_JOB_ID"]
    failure = None
    try:
        result = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, check=False)
        if result.returncode:
            failure = result.stderr.strip() or f"it ended with {result.returncode}"
    except OSError as error:
        failure = str(error)
    if failure is not None:
        rank_zero_warn(
            f"`scontrol requeue {job}` has failed: {failure}\nThe checkpoint is complete: submit the job again, with "
            "the same default_root_dir, and it goes on from there."
        )
    else:
        rank_zero_info(f"SLURM job {job} is queued again.")
