"""A listening Unix socket that only processes of the same user get through.

Its name is in the kernel's abstract namespace, so that nothing is left in any folder, however the process ends. Such
names have no permissions: but nobody can guess it, the kernel tells the user of whoever connects, and a hello follows.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipelined.clock import Clock

__all__ = ["Listener", "reach"]

_PAUSE_S = 0.1
_BACKLOG = 256


def _same_user(sock: socket.socket) -> bool:
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    return bool(uid == os.geteuid())


def reach(address: str) -> socket.socket | None:
    """Connect to a listener of the same user; None if there is none of that address, or it is busy. Never blocks."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        sock.connect(_name(address))
        if _same_user(sock):
            return sock
    except OSError:
        pass
    sock.close()
    return None


def _name(address: str) -> str:
    """An address that starts with `@` is an abstract name, as tools write it."""
    return address.replace("@", "\0", 1) if address.startswith("@") else address


class Listener:
    """Listens from construction to `close`. `address` is what `reach` takes."""

    def __init__(self, clock: Clock, on_connection: Callable[[socket.socket], None]) -> None:
        self._clock = clock
        self._on_connection = on_connection
        self._loop = asyncio.get_running_loop()
        self.address = f"@pipelined-{secrets.token_hex(16)}"
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._sock.bind(_name(self.address))
        self._sock.listen(_BACKLOG)
        self._pause: asyncio.TimerHandle | None = None
        self._listen()

    def _listen(self) -> None:
        self._pause = None
        self._loop.add_reader(self._sock.fileno(), self._accept)

    def _accept(self) -> None:
        try:
            sock, _ = self._sock.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError:  # out of descriptors: the connection stays there, and would wake us again at once
            self._loop.remove_reader(self._sock.fileno())
            self._pause = self._clock.call_at(self._clock.now() + _PAUSE_S, self._listen)
            return
        if _same_user(sock):
            self._on_connection(sock)
        else:
            sock.close()

    def close(self) -> None:
        """Listen no more."""
        if self._pause is not None:
            self._pause.cancel()
        else:
            self._loop.remove_reader(self._sock.fileno())
        self._sock.close()
