"""What the watching threads of the ranks send each other: JSON objects, one per line, over TCP connections."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterator
from typing import Any

__all__ = ["Connection", "connect", "listen"]

#: No message is longer: it holds a few places in code, in words.
_MOST_BYTES = 1 << 16

#: Seconds without a message after which the kernel probes a connection, seconds between probes, and the number of
#: probes. A host that does not answer for a minute is lost. Its kernel answers, also for a stopped or busy process.
_IDLE = 20
_BETWEEN = 10
_TRIES = 4


class Connection:
    """A connection to another rank's watching thread, which one thread reads and any may write.

    Args:
        sock: The socket.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._received = b""
        sock.settimeout(10.0)
        _keep_alive(sock)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, **message: Any) -> bool:
        """Send a message; false if the other end is gone."""
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return False
        return True

    def receive(self) -> Iterator[dict[str, Any]]:
        """The messages that have come, once the connection is readable.

        Raises:
            ConnectionError: The other end is gone, or its host does not answer.
        """
        try:
            read = self._socket.recv(_MOST_BYTES)
        except TimeoutError as error:  # of the kernel: its tries were not answered
            raise ConnectionAbortedError(str(error)) from error
        except OSError as error:
            raise ConnectionError(str(error)) from error
        if not read:
            raise ConnectionResetError("closed")
        *lines, self._received = (self._received + read).split(b"\n")
        if len(self._received) > _MOST_BYTES:
            raise ConnectionError("what came is no message")
        for line in lines:
            try:
                message = json.loads(line)
            except ValueError as error:
                raise ConnectionError("what came is no message") from error
            if isinstance(message, dict):
                yield message

    def close(self) -> None:
        self._socket.close()


def listen() -> socket.socket:
    """A socket that other hosts can connect to, on a free port."""
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=4096)
        except OSError:  # there is no IPv6 on this host
            pass
    return socket.create_server(("", 0), backlog=4096)


def connect(addresses: list[str], port: int, **hello: Any) -> Connection | None:
    """Connect to the first address at which the listening rank answers to a greeting; ``None`` if none does.

    Args:
        addresses: Names or addresses of its host.
        port: Its port.
        **hello: The greeting, which it answers with ``welcome``.
    """
    for address in addresses:
        try:
            connection = Connection(socket.create_connection((address, port), timeout=10.0))
        except OSError:
            continue
        connection.send(**hello)
        try:
            if any(message.get("kind") == "welcome" for message in connection.receive()):
                return connection
        except ConnectionError:
            pass
        connection.close()
    return None


def _keep_alive(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _BETWEEN)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _TRIES)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * (_IDLE + _BETWEEN * _TRIES))
