"""Runs a function on ranks: processes forked from one that has imported torch and the device, and used neither."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["fsdp_fake_device", "torch.distributed.fsdp", "torch.distributed.checkpoint"])
SECONDS = 120


def run_ranks(function: Callable[..., Any], *arguments: Any, size: int = 2, seconds: float = SECONDS) -> list[Any]:
    """What ``function(rank, size, *arguments)`` returns on each rank, with a process group and its device set."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes, pipes = [], []
    for rank in range(size):
        pipe, end = SERVER.Pipe(duplex=False)
        process = SERVER.Process(target=_run_rank, args=(end, function, rank, size, port, arguments), daemon=True)
        process.start()
        end.close()
        processes.append(process)
        pipes.append(pipe)
    try:
        results = [_receive(pipe, seconds) for pipe in pipes]
    finally:
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
    failures = [f"rank {rank}:\n{error}" for rank, (error, _) in enumerate(results) if error]
    assert not failures, "\n".join(failures)
    return [result for _, result in results]


def _receive(pipe: Connection, seconds: float) -> tuple[str | None, Any]:
    if not pipe.poll(seconds):
        return f"no result in {seconds} s", None
    try:
        return pipe.recv()
    except EOFError:
        return "it ended without a result", None


def _run_rank(pipe: Connection, function: Any, rank: int, size: int, port: int, arguments: tuple[Any, ...]) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(size))
    try:
        torch.accelerator.set_device_index(rank)
        dist.init_process_group("cpu:gloo,fake:fakeccl", rank=rank, world_size=size)
        result = function(rank, size, *arguments)
        dist.destroy_process_group()
        pipe.send((None, result))
    except BaseException:
        pipe.send((traceback.format_exc(), None))
