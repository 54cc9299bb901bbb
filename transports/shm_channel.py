"""Length-prefixed frames and file descriptors over a Unix stream socket, driven by the loop.

Frames queued in one iteration of the loop leave in one system call; one read takes in all that is there. Knows nothing
of what the frames mean.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import socket
import struct
from collections import deque
from typing import TYPE_CHECKING

from pipelined.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Channel"]

_HEAD = struct.Struct("<IBB")  # body length, kind, lane
_HEAD_BYTES = _HEAD.size
_pack_head, _unpack_head = _HEAD.pack, _HEAD.unpack_from
_BUFFER_BYTES = 128 << 10
_WRITE_BYTES = 256 << 10
_JOIN_BYTES = 32 << 10
_MOST_FDS = 16
_ANCILLARY_BYTES = socket.CMSG_SPACE(_MOST_FDS * 4)
_READS_A_TURN = 16


class Channel:
    """Both directions of one socket.

    Attributes:
        limit_bytes: Longest body that is accepted; may be raised once the peer is known.
        before_write: Called before each write, to queue what may go along.
        on_frame, on_end: As given; may be replaced once the peer is known.
    """

    def __init__(
        self,
        sock: socket.socket,
        limit_bytes: int,
        on_frame: Callable[[int, int, memoryview], None],
        on_end: Callable[[str], None],
    ) -> None:
        """Takes over `sock`.

        Args:
            sock: Connected.
            limit_bytes: See the attribute.
            on_frame: Called with kind, lane and body, which is valid only during the call. A `ProtocolError` that it
                raises ends the channel.
            on_end: Called once with the reason when the other side is gone; not after `close`.
        """
        self.limit_bytes = limit_bytes
        self.before_write: Callable[[], None] | None = None
        self.on_frame = on_frame
        self.on_end = on_end
        self._sock = sock
        self._sock.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._in = bytearray(_BUFFER_BYTES)
        self._in_view = memoryview(self._in)
        self._have = 0
        self._long: bytearray | None = None
        self._long_have = 0
        self._fds: deque[int] = deque()
        self._out: list[bytes] = []  # of the batch that grows
        self._out_fd = -1
        self._batches: deque[tuple[int, deque[memoryview]]] = deque()
        self._scheduled = False
        self._blocked = False
        self._deaf = False  # the peer reads no more
        self._drained: asyncio.Future[None] | None = None
        self._loop.add_reader(self._sock.fileno(), self._readable)

    @property
    def closed(self) -> bool:
        """Whether it is over."""
        return self._closed

    # ---- sending ----

    def queue(self, kind: int, lane: int, body: bytes = b"") -> None:
        """Send a frame soon; without effect once the channel is over."""
        if self._closed or self._deaf:
            return
        out = self._out
        out.append(_pack_head(len(body), kind, lane))
        out.append(body)
        if not self._scheduled and not self._blocked:
            self._scheduled = True
            self._loop.call_soon(self._write)

    def send_now(self, kind: int, lane: int, body: bytes) -> None:
        """Like `queue`, but it leaves before this returns where nothing else waits to leave: a peer is waiting."""
        lone = not (self._scheduled or self._blocked or self._out or self._batches)
        if self._closed or self._deaf:
            return
        if not lone:
            self.queue(kind, lane, body)
            return
        self._out += (_pack_head(len(body), kind, lane), body)
        self._scheduled = True
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
        if not self._scheduled and not self._blocked and not self._closed:
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
        if self.before_write is not None and not (self._blocked or self._closed or self._deaf):
            self.before_write()  # what it queues goes along
        self._scheduled = False
        if self._closed or self._deaf:
            return
        if not self._batches and self._out_fd < 0 and self._write_small():
            return
        self._seal_batch()
        try:
            while self._batches:
                fd, parts = self._batches[0]
                if not self._send_some(fd, parts):
                    continue
                self._batches.popleft()
        except (BlockingIOError, InterruptedError):
            if not self._blocked:
                self._blocked = True
                self._loop.add_writer(self._sock.fileno(), self._write)
            return
        except OSError:
            self._turn_deaf()
            return
        self._unblock()

    def _write_small(self) -> bool:
        """The usual case in one call; False if there is something left to do."""
        if not self._out:
            return True
        if sum(map(len, self._out)) > _WRITE_BYTES:
            return False
        frame = b"".join(self._out)
        self._out.clear()
        try:
            sent = self._sock.send(frame)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:
            self._turn_deaf()
            return True
        if sent < len(frame):
            self._batches.append((-1, deque([memoryview(frame)[sent:]])))
            return False
        if self._blocked or self._drained is not None:
            self._unblock()
        return True

    def _send_some(self, fd: int, parts: deque[memoryview]) -> bool:
        """One system call; whether the batch is through."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))] if fd >= 0 else []
        first = parts[0][:_WRITE_BYTES]
        sent = self._sock.sendmsg([first], rights)
        if fd >= 0:
            os.close(fd)
            self._batches[0] = (-1, parts)
        if sent < len(parts[0]):
            parts[0] = parts[0][sent:]
        else:
            parts.popleft()
        return not parts

    def _unblock(self) -> None:
        if self._blocked:
            self._blocked = False
            self._loop.remove_writer(self._sock.fileno())
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
        if not self._fds:
            raise ProtocolError("a frame announced a descriptor, and none came with it")
        return self._fds.popleft()

    def _readable(self) -> None:
        # Until there is nothing more: when a peer dies with data unread, uvloop says so once and never again, and a
        # read stops short wherever descriptors came along.
        for _ in range(_READS_A_TURN):
            if self._closed or not self._read():
                return
        self._loop.call_soon(self._readable)

    def _read(self) -> bool:
        """One read; whether there may be more."""
        if self._long is None:
            target = self._in_view[self._have :] if self._have else self._in_view
        else:
            target = memoryview(self._long)[self._long_have :]
        try:
            count, ancillary, _, _ = self._sock.recvmsg_into([target], _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            self._over(str(error))
            return False
        if ancillary:
            self._keep_fds(ancillary)
        if count == 0:
            self._over("end of file on its socket")
            return False
        try:
            if self._long is None:
                self._have += count
                self._parse()
            else:
                self._long_have += count
                self._parse_long()
        except ProtocolError as error:
            self._over(f"it broke the protocol: {error}")
        if count == len(target) or ancillary or self._closed:
            return not self._closed
        # A short read without descriptors took all there was; but an error is told only once.
        return bool(self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))

    def _parse(self) -> None:
        at, have, view = 0, self._have, self._in_view
        while have - at >= _HEAD_BYTES:
            length, kind, lane = _unpack_head(view, at)
            if length > self.limit_bytes:
                raise ProtocolError(f"a frame of {length} bytes; the limit is {self.limit_bytes}")
            end = at + _HEAD_BYTES + length
            if end > have:
                if _HEAD_BYTES + length > _BUFFER_BYTES:
                    self._long = bytearray(_HEAD_BYTES + length)
                    self._long_have = have - at
                    self._long[: self._long_have] = view[at:have]
                    at = have
                break
            self.on_frame(kind, lane, view[at + _HEAD_BYTES : end])
            if self._closed:
                return
            at = end
        if at and at < have:
            self._in[: have - at] = bytes(view[at:have])
        self._have = have - at

    def _parse_long(self) -> None:
        frame = self._long
        assert frame is not None
        if self._long_have < len(frame):
            return
        self._long = None
        _, kind, lane = _unpack_head(frame)
        self.on_frame(kind, lane, memoryview(frame)[_HEAD_BYTES:])

    def _keep_fds(self, ancillary: list[tuple[int, int, bytes]]) -> None:
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
                self._fds.extend(fds)

    # ---- the end ----

    def _over(self, why: str) -> None:
        if not self._closed:
            self.close()
            self.on_end(why)

    def close(self) -> None:
        """Close the socket at once; what is queued is dropped. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._sock.fileno())
        self._drop_out()
        self._unblock()
        while self._fds:
            with contextlib.suppress(OSError):
                os.close(self._fds.popleft())
        self._sock.close()
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)
