"""Starts its ranks itself, with torch. Takes a strategy's name."""

import os
import socket
import sys

from torch import multiprocessing


def work(rank: int, port: int, strategy: str) -> None:
    """The life of a rank."""
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE="2", NODE_RANK="0", LOCAL_RANK=str(rank)
    )
    from train import main  # type: ignore[import-not-found]  # beside it

    main(["trainer", "fabric", f"--strategy={strategy}"])


if __name__ == "__main__":
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free_port = probe.getsockname()[1]
    multiprocessing.spawn(work, (free_port, sys.argv[1]), nprocs=2)  # type: ignore[attr-defined, no-untyped-call]
