"""Message links: frames of bytes, in order, bounded by credits."""

from __future__ import annotations

import abc
import asyncio
from collections import deque
from typing import TYPE_CHECKING

from pipelined.errors import BusyError, FrameTooLarge, TransportError, WouldBlock
from pipelined.transport.lane_end import LaneEnd
from pipelined.transport.taps import Outgoing

if TYPE_CHECKING:
    from pipelined.messages import Peer
    from pipelined.transport.base import Lane
    from pipelined.transport.taps import Tap

__all__ = ["MessageLane"]


class MessageLane(LaneEnd, abc.ABC):
    """A `MessageLink`. The transport implements `transmit` and `consumed`, and calls `arrive` and `grant`."""

    kind = "messages"

    def __init__(self, me: Peer, peer: Peer, lane: Lane, epoch: int, window: int, max_bytes: int) -> None:
        super().__init__(me, peer, lane, epoch, window)
        self.max_bytes = max_bytes
        self._frames: deque[bytes] = deque()
        self._reader: asyncio.Future[None] | None = None

    @abc.abstractmethod
    def transmit(self, frame: bytes) -> None:
        """Send a frame for which there is a credit. Must not suspend; failures end in `lose`."""

    @abc.abstractmethod
    def consumed(self) -> None:
        """A frame was received by the owner: tell the peer that it has a credit more."""

    def send_nowait(self, frame: bytes) -> None:
        """See `MessageLink`."""
        self._check_length(frame)
        self._spend()
        self._out(frame)

    async def send(self, frame: bytes) -> None:
        """See `MessageLink`."""
        usual = self._credits > 0 and self._over is None and self._writer is None and not self._taps
        if usual and len(frame) <= self.max_bytes:  # short, since it is part of the round trip of all control
            self._credits -= 1
            self.transmit(frame)
            return
        self._check_length(frame)
        if self._writer is not None:
            raise BusyError(f"another task already sends on {self!r}")
        if self._over or self._blocked():
            await self._wait_credit()
        self._spend()
        self._out(frame)

    def receive_nowait(self) -> bytes:
        """See `MessageLink`."""
        if self._frames:
            frame = self._frames.popleft()
            if self._over is None:
                self.consumed()
            return frame
        if self._over:
            raise self._over.with_traceback(None)
        self._receiving()
        raise WouldBlock(f"nothing has arrived on {self!r}")

    async def receive(self) -> bytes:
        """See `MessageLink`."""
        if self._reader is not None:
            raise BusyError(f"another task already receives on {self!r}")
        while not self._frames and not self._over:
            if self._taps:
                self._receiving()
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        return self.receive_nowait()

    def arrive(self, frame: bytes) -> None:
        """For transports: a frame came in."""
        if self._taps:
            self._taps[-1].incoming(frame)
        else:
            self._accept(frame)

    def _accept(self, frame: bytes) -> None:
        if self._over is None:
            self._frames.append(frame)
            self._wake_reader()

    # ---- taps ----

    def _blocked(self) -> bool:
        return super()._blocked() or not all(tap.ready() for tap in self._taps)

    def wanted(self) -> int:
        """See `LaneEnd`."""
        return 0 if self._frames else 1

    def set_taps(self, taps: tuple[Tap, ...]) -> None:
        """See `LaneEnd`."""
        self.insert_taps(taps, self._wire, self._accept)

    def _out(self, frame: bytes) -> None:
        if self._taps:
            # A copy, since taps may keep it: the frame may be a bytearray.
            self._taps[0].outgoing(Outgoing(bytes(frame)))
        else:
            self.transmit(frame)

    def _wire(self, item: Outgoing) -> None:
        if self.alive:
            assert isinstance(item.body, bytes)
            self.transmit(item.body)
        item.sent()

    def _receiving(self) -> None:
        for tap in self._taps:
            tap.receiving()

    def _check_length(self, frame: bytes) -> None:
        if len(frame) > self.max_bytes:
            raise FrameTooLarge(f"{len(frame)} bytes on {self!r}; the limit is {self.max_bytes}")

    def _wake_reader(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _drained(self) -> None:
        self._wake_reader()

    def _stop_receiving(self, error: TransportError) -> None:
        self._frames.clear()
        self._wake_reader()
