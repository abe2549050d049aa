"""Starts its ranks itself, with torch."""

import os
import socket

import torch.multiprocessing
import train


def work(rank: int, port: int) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE="2", NODE_RANK="0", LOCAL_RANK=str(rank)
    )
    train.main(["trainer", "fabric"])


if __name__ == "__main__":
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free_port = probe.getsockname()[1]
    torch.multiprocessing.spawn(work, (free_port,), nprocs=2)
