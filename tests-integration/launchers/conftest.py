"""What several files of these tests use."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts import Host, two_hosts


@pytest.fixture
def free_port() -> Iterator[int]:
    """A port that nothing listens on, and that nobody else is given meanwhile."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[Host, Host]]:
    """Two hosts, with nothing running on them."""
    with two_hosts(tmp_path) as pair:
        yield pair
