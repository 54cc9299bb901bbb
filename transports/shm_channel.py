"""Length-prefixed frames over a Unix stream socket, and file descriptors over a second one beside it.

The loop's own transport reads the frames, since nothing is quicker; but it would drop descriptors. So these cross a
side socket, each before the frame that announces it: where the frame is, its descriptor is already. Writing is done
here, through a second handle of the socket, so that a peer which reads no more can't keep what it said before it went
from being read. Knows nothing of what the frames mean.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import socket
import struct
from collections import deque
from typing import TYPE_CHECKING, cast

from pipelined.errors import ProtocolError

from .shm_listener import same_user

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Channel"]

_HEAD = struct.Struct("<IBB")  # body length, kind, lane
_HEAD_BYTES = _HEAD.size
_pack_head, _unpack_head = _HEAD.pack, _HEAD.unpack_from
_WRITE_BYTES = 256 << 10
_JOIN_BYTES = 32 << 10
_ANCILLARY_BYTES = socket.CMSG_SPACE(4)


class Channel(asyncio.Protocol):
    """Both directions of one link; usable once the loop has connected it.

    Attributes:
        limit_bytes: Longest body that is accepted; may be raised once the peer is known.
        before_write: Called before each write, to queue what may go along.
        on_frame, on_end: As given; may be replaced once the peer is known.
    """

    def __init__(
        self,
        limit_bytes: int,
        on_frame: Callable[[int, int, bytes], None],
        on_end: Callable[[str], None],
        side: socket.socket | None = None,
    ) -> None:
        """A protocol for the loop to connect.

        Args:
            limit_bytes: See the attribute.
            on_frame: Called with kind, lane and body. A `ProtocolError` that it raises ends the channel.
            on_end: Called once with the reason when the other side is gone; not after `close`.
            side: The side socket, connected, if it is there already. The channel closes it.
        """
        self.limit_bytes = limit_bytes
        self.before_write: Callable[[], None] | None = None
        self.on_frame = on_frame
        self.on_end = on_end
        self._side = side
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._sock: socket.socket | None = None  # of the same connection, for writing
        self._closed = False
        self._partial = b""  # less than a frame's head
        self._pieces: list[bytes] = []  # of a frame that has not come whole
        self._missing = 0
        self._out: list[bytes] = []  # of the batch that grows
        self._out_fd = -1
        self._batches: deque[tuple[int, deque[memoryview]]] = deque()
        self._scheduled = False
        self._blocked_on: socket.socket | None = None
        self._deaf = False  # the peer reads no more
        self._drained: asyncio.Future[None] | None = None

    @property
    def closed(self) -> bool:
        """Whether it is over."""
        return self._closed

    def use_side(self, side: socket.socket) -> None:
        """Set the side socket, once it is known which it is."""
        self._side = side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = cast("asyncio.Transport", transport)  # by duck: not every loop's is one by inheritance
        if self._closed:
            self._transport.abort()
            return
        self._sock = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
        self._sock.setblocking(False)
        if not same_user(self._sock):
            self._over("it is of another user")

    # ---- sending ----

    def queue(self, kind: int, lane: int, body: bytes = b"") -> None:
        """Send a frame soon; without effect once the channel is over."""
        if self._closed or self._deaf:
            return
        self._out += (_pack_head(len(body), kind, lane), body)
        self.wake()

    def send_now(self, kind: int, lane: int, body: bytes) -> None:
        """Like `queue`, but it leaves before this returns where nothing else waits to leave: a peer is waiting."""
        if self._scheduled or self._blocked_on is not None or self._out or self._batches or self._closed or self._deaf:
            self.queue(kind, lane, body)
            return
        if self.before_write is not None:
            self._scheduled = True  # what it queues goes along
            self.before_write()
            self._scheduled = False
        if self._out or len(body) > _WRITE_BYTES:
            self._out += (_pack_head(len(body), kind, lane), body)
            self._write()
            return
        frame = _pack_head(len(body), kind, lane) + body
        assert self._sock is not None
        try:
            sent = self._sock.send(frame)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:
            self._turn_deaf()
            return
        if sent < len(frame):
            self._batches.append((-1, deque([memoryview(frame)[sent:]])))
            self._write()

    def queue_with_fd(self, fd: int, kind: int, lane: int, body: bytes) -> None:
        """Send a frame that a descriptor travels with. The descriptor is closed once it has left."""
        if self._closed or self._deaf:
            os.close(fd)
            return
        self._seal_batch()
        self._out_fd = fd
        self.queue(kind, lane, body)

    def wake(self) -> None:
        """See to it that there is a write at the end of this iteration."""
        if not self._scheduled and self._blocked_on is None and not self._closed:
            self._scheduled = True
            self._loop.call_soon(self._write)

    def empty(self) -> bool:
        """Whether all that was queued is with the kernel."""
        return not self._out and not self._batches

    async def drained(self) -> None:
        """Wait until `empty()`, or until the channel is over."""
        while not self.empty() and not self._closed and not self._deaf:
            self._drained = self._loop.create_future()
            await self._drained

    def _seal_batch(self) -> None:
        if not self._out:
            return
        out, self._out = self._out, []
        fd, self._out_fd = self._out_fd, -1
        parts: deque[memoryview] = deque()
        small: list[bytes] = []
        for part in out:  # what is long is not copied once more
            if len(part) <= _JOIN_BYTES:
                small.append(part)
                continue
            if small:
                parts.append(memoryview(b"".join(small)))
                small = []
            parts.append(memoryview(part))
        if small:
            parts.append(memoryview(b"".join(small)))
        self._batches.append((fd, parts))

    def _write(self) -> None:
        if self.before_write is not None and not (self._blocked_on or self._closed or self._deaf):
            self._scheduled = True
            self.before_write()  # what it queues goes along
        self._scheduled = False
        if self._closed or self._deaf:
            return
        self._seal_batch()
        try:
            while self._batches:
                fd, parts = self._batches[0]
                if fd >= 0:
                    self._send_fd(fd, parts)
                elif self._send_some(parts):
                    self._batches.popleft()
        except (BlockingIOError, InterruptedError):
            self._wait_for(self._side if self._batches[0][0] >= 0 else self._sock)
            return
        except OSError:
            self._turn_deaf()
            return
        self._unblock()

    def _send_fd(self, fd: int, parts: deque[memoryview]) -> None:
        """It goes first."""
        if self._side is None:
            raise OSError("no side socket")
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
        self._side.sendmsg([b"\0"], rights)
        os.close(fd)
        self._batches[0] = (-1, parts)

    def _send_some(self, parts: deque[memoryview]) -> bool:
        """One system call; whether the batch is through."""
        assert self._sock is not None
        sent = self._sock.send(parts[0][:_WRITE_BYTES])
        if sent < len(parts[0]):
            parts[0] = parts[0][sent:]
        else:
            parts.popleft()
        return not parts

    def _wait_for(self, sock: socket.socket | None) -> None:
        if self._blocked_on is not sock:
            self._stop_waiting()
            assert sock is not None
            self._blocked_on = sock
            self._loop.add_writer(sock.fileno(), self._write)

    def _stop_waiting(self) -> None:
        if self._blocked_on is not None:
            self._loop.remove_writer(self._blocked_on.fileno())
            self._blocked_on = None

    def _unblock(self) -> None:
        if self._blocked_on is not None:
            self._stop_waiting()
            self.wake()
        if self._drained is not None and not self._drained.done() and self.empty():
            self._drained.set_result(None)

    def _turn_deaf(self) -> None:
        """Writing failed. What the peer sent before it went may still be there, so reading decides how it ended."""
        self._deaf = True
        self._drop_out()
        self._unblock()

    def _drop_out(self) -> None:
        for fd in [self._out_fd, *(fd for fd, _ in self._batches)]:
            if fd >= 0:
                os.close(fd)
        self._out_fd = -1
        self._out.clear()
        self._batches.clear()

    # ---- receiving ----

    def take_fd(self) -> int:
        """The next descriptor that came along.

        Raises:
            ProtocolError: There is none.
        """
        fds = array.array("i")
        if self._side is not None:
            with contextlib.suppress(BlockingIOError, InterruptedError):
                _, ancillary, _, _ = self._side.recvmsg(1, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)
                for level, kind, data in ancillary:
                    if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                        fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
        if not fds:
            raise ProtocolError("a frame announced a descriptor, and none came with it")
        for extra in fds[1:]:
            os.close(extra)
        return fds[0]

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        try:
            if not self._partial and not self._missing and len(data) >= _HEAD_BYTES:
                length, kind, lane = _unpack_head(data)
                if length == len(data) - _HEAD_BYTES and length <= self.limit_bytes:  # the usual case
                    if not self._closed:
                        self.on_frame(kind, lane, data[_HEAD_BYTES:])
                    return
            self._parse(data)
        except ProtocolError as error:
            self._over(f"it broke the protocol: {error}")

    def _parse(self, data: bytes) -> None:
        if self._missing:
            self._pieces.append(data)
            if len(data) < self._missing:
                self._missing -= len(data)
                return
            data, self._missing = b"".join(self._pieces), 0
            self._pieces.clear()
        elif self._partial:
            data, self._partial = self._partial + data, b""
        at, have = 0, len(data)
        while have - at >= _HEAD_BYTES and not self._closed:
            length, kind, lane = _unpack_head(data, at)
            if length > self.limit_bytes:
                raise ProtocolError(f"a frame of {length} bytes; the limit is {self.limit_bytes}")
            end = at + _HEAD_BYTES + length
            if end > have:
                self._pieces.append(data[at:])
                self._missing = end - have
                return
            self.on_frame(kind, lane, data[at + _HEAD_BYTES : end])
            at = end
        self._partial = data[at:]

    # ---- the end ----

    def eof_received(self) -> bool:
        """See `asyncio.Protocol`."""
        self._over("end of file on its socket")
        return False

    def connection_lost(self, error: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._over(str(error) if error is not None else "its socket was closed")

    def _over(self, why: str) -> None:
        if not self._closed:
            self.close()
            self.on_end(why)

    def close(self) -> None:
        """Close at once; what is queued is dropped. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._stop_waiting()
        self._drop_out()
        self._pieces.clear()
        self._missing, self._partial = 0, b""
        if self._sock is not None:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)  # the loop closes its handle later; the peer shall know now
            self._sock.close()
        if self._side is not None:
            self._side.close()
        if self._transport is not None:
            self._transport.abort()
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)
