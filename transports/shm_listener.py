"""Listening Unix sockets that only processes of the same user get through.

Their names are in the kernel's abstract namespace, so that nothing is left in any folder, however the process ends.
Such names have no permissions: but nobody can guess them, the kernel tells the user of whoever connects, and a hello
follows.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import struct
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["TOKEN_BYTES", "Listener", "reach", "reach_side", "same_user"]

TOKEN_BYTES = 16
"""Of the random number by which the two sockets of one link know each other."""

_BACKLOG = 256
_MOST_SIDES = 256


def same_user(sock: socket.socket) -> bool:
    """Whether the process at the other end is of the user of this one."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    return bool(uid == os.geteuid())


def reach(address: str) -> socket.socket | None:
    """Connect to a listener of the same user; None if there is none of that address, or it is busy. Never blocks."""
    sock = _socket()
    try:
        sock.connect(_name(address))
        if same_user(sock):
            return sock
    except OSError:
        pass
    sock.close()
    return None


def reach_side(address: str, token: bytes) -> socket.socket | None:
    """The side socket of a link to the listener of that address. Like `reach`; the token must be in the hello, too."""
    sock = reach(_side_of(address))
    if sock is not None:
        try:
            if sock.send(token) == len(token):
                return sock
        except OSError:
            pass
        sock.close()
    return None


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)


def _bound(address: str) -> socket.socket:
    sock = _socket()
    sock.bind(_name(address))
    sock.listen(_BACKLOG)
    return sock


def _side_of(address: str) -> str:
    return address + "-side"


def _name(address: str) -> str:
    """An address that starts with `@` is an abstract name, as tools write it."""
    return address.replace("@", "\0", 1) if address.startswith("@") else address


class Listener:
    """Listens until `close`. `address` is what `reach` and `reach_side` take.

    Side sockets are not waited for. Whoever dials connects its side socket and says the token on it before the hello.
    """

    def __init__(self, address: str, side: socket.socket) -> None:
        """Args: side: Listens, for the side sockets."""
        self.address = address
        self._server: asyncio.AbstractServer | None = None
        self._side = side
        self._nameless: list[socket.socket] = []  # connected, without a token so far
        self._sides: dict[bytes, socket.socket] = {}

    @classmethod
    async def start(cls, protocol: Callable[[], asyncio.BaseProtocol]) -> Self:
        """Listen. Args: protocol: Makes the protocol of each connection, whose part it is to see to `same_user`."""
        address = f"@pipelined-{secrets.token_hex(16)}"
        listener = cls(address, _bound(_side_of(address)))
        loop = asyncio.get_running_loop()
        try:
            listener._server = await loop.create_unix_server(protocol, sock=_bound(address), backlog=_BACKLOG)
        except BaseException:
            listener.close()
            raise
        return listener

    def take_side(self, token: bytes) -> socket.socket | None:
        """The side socket on which that token was said."""
        while len(self._nameless) + len(self._sides) < _MOST_SIDES:
            try:
                sock, _ = self._side.accept()
            except OSError:
                break
            sock.setblocking(False)
            self._nameless.append(sock)
        nameless, self._nameless = self._nameless, []
        for sock in nameless:
            try:
                said = sock.recv(TOKEN_BYTES) if same_user(sock) else b""
            except (BlockingIOError, InterruptedError):
                self._nameless.append(sock)
                continue
            except OSError:
                said = b""
            if len(said) == TOKEN_BYTES and said not in self._sides:
                self._sides[said] = sock
            else:
                sock.close()
        return self._sides.pop(token, None)

    def close(self) -> None:
        """Listen no more."""
        if self._server is not None:
            self._server.close()
        for sock in (self._side, *self._nameless, *self._sides.values()):
            sock.close()
        self._nameless.clear()
        self._sides.clear()
