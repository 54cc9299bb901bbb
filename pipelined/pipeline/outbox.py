"""What the driver says to rank 0: at once while there are credits, else in the order of saying."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from pipelined.errors import WouldBlock

if TYPE_CHECKING:
    from pipelined.messages import ToRank
    from pipelined.pipeline.receipts import DriverReceipts
    from pipelined.transport import MessageLink

__all__ = ["Outbox"]

_encode = msgspec.msgpack.Encoder().encode


class Outbox:
    """Any number of tasks may put messages in; a link has one waiter."""

    def __init__(self, receipts: DriverReceipts) -> None:
        self._receipts = receipts
        self._frames: deque[bytes] = deque()
        self._filled = asyncio.Event()
        self._empty = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Outbox {len(self._frames)} waiting>"

    def put(self, message: ToRank, link: MessageLink) -> None:
        """Send, or queue. Never suspends.

        Raises:
            TransportError: The link is gone, or the message is too large for it.
        """
        frame = _encode(message)
        if not self._frames:
            try:
                link.send_nowait(frame)
            except WouldBlock:
                pass
            else:
                self._receipts.sent += 1
                return
        self._frames.append(frame)
        self._filled.set()

    async def serve(self, link: MessageLink) -> None:
        """Send what is queued, for ever.

        Raises:
            TransportError: The link is gone.
        """
        while True:
            await self._filled.wait()
            while self._frames:
                await link.send(self._frames[0])
                self._frames.popleft()
                self._receipts.sent += 1
            self._filled.clear()
            self._empty.set()

    async def emptied(self) -> None:
        """Wait until nothing is queued."""
        if self._frames:
            self._empty.clear()
            await self._empty.wait()
