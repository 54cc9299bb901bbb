"""What an end of a lane of either kind has: a name, credits, one waiter, and the way it ended."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar

from pipelined.errors import BusyError, ClosedError, EndOfLane, PeerLost, TransportError, WouldBlock

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from pipelined.messages import Peer
    from pipelined.transport.base import Lane
    from pipelined.transport.taps import Tap

__all__ = ["LaneEnd"]


class LaneEnd:
    """State common to message and tensor lanes. Everything runs on the owner's loop.

    An end is open, then over for one of three reasons: closed here, ended by the peer (what arrived may still be
    received), or lost. Closing here has two steps, so that what was posted can leave first.
    """

    kind: ClassVar = "link"

    def __init__(self, me: Peer, peer: Peer, lane: Lane, epoch: int, window: int) -> None:
        self.me = me
        self.peer = peer
        self.lane = lane
        self.epoch = epoch
        self.window = window
        self._credits = window
        self._over: TransportError | None = None  # why nothing can be posted any more
        self._ended = False  # the peer ended cleanly: what arrived may still be received
        self._flushing = False  # closed here, but what was posted before still leaves
        self._writer: asyncio.Future[None] | None = None
        self._flusher: asyncio.Future[None] | None = None
        self._taps: tuple[Tap, ...] = ()
        self._on_top = 0  # frames under way that the owner knows nothing of

    def __repr__(self) -> str:
        state = type(self._over).__name__ if self._over else "open"
        return f"<{self.kind} {self.me}->{self.peer} {self.lane.name} {state}>"

    def credits(self) -> int:
        """How many may be posted now."""
        return 0 if self._over else self._credits

    def grant(self, count: int = 1) -> None:
        """For transports: the peer has consumed or released that many."""
        own = min(count, self._on_top)
        self._on_top -= own
        self._credits = min(self.window, self._credits + count - own)
        self.wake_writer()
        if own:  # there is room again for what taps send
            for tap in self._taps:
                tap.receiving()

    def narrow(self, window: int) -> None:
        """For taps, before the first frame: the owner gets that much of the window; the rest is for `put_on_top`."""
        self.window = self._credits = window

    def put_on_top(self) -> bool:
        """For taps: count a frame of their own, if there is room for it. Its credit, once back, is not the owner's."""
        room = self._on_top < self.window
        self._on_top += room
        return room

    @property
    def alive(self) -> bool:
        """For transports: whether what was posted may still leave."""
        return self._over is None or self._flushing

    def set_taps(self, taps: tuple[Tap, ...]) -> None:
        """For endpoints: wrappers that see each frame, the outermost first."""
        raise NotImplementedError

    def insert_taps(self, taps: tuple[Tap, ...], wire: Callable[[Any], None], accept: Callable[[Any], None]) -> None:
        """For lanes: put `taps`, the outermost first, between the lane (`accept`) and what transmits (`wire`)."""
        self._taps = taps
        for outer, inner in pairwise(taps):
            outer.pass_on, inner.pass_up = inner.outgoing, outer.incoming
        if taps:
            taps[0].pass_up, taps[-1].pass_on = accept, wire

    def flushed(self) -> bool:
        """Whether everything posted has been transmitted."""
        return all(tap.idle() for tap in self._taps)

    async def wait_flushed(self) -> None:
        """For endpoints: wait until `flushed()`, or until nothing can leave any more. One waiter."""
        while not self.flushed() and self.alive:
            self._flusher = asyncio.get_running_loop().create_future()
            try:
                await self._flusher
            finally:
                self._flusher = None

    def wake_flusher(self) -> None:
        """For lanes and taps: everything posted has been transmitted."""
        if self._flusher is not None and not self._flusher.done():
            self._flusher.set_result(None)

    # ---- ends, for transports ----

    def begin_close(self) -> None:
        """This side is closing: own waits fail, nothing more can be posted, what was posted still leaves."""
        if self._over is None:
            self._flushing = True
        if not isinstance(self._over, ClosedError):
            self._over = self._closed_error()
            self._ended = False
            self._stop_receiving(self._over)
            self.wake_writer()

    def close_local(self) -> None:
        """This side closed: whatever is still pending fails."""
        self._flushing = self._ended = False
        self._over = self._over if isinstance(self._over, ClosedError) else self._closed_error()
        self._drop(self._over)
        for tap in self._taps:
            tap.closed()

    def end(self) -> None:
        """The peer closed cleanly and all it sent has been handed to `arrive`."""
        if self._over is None:
            self._over, self._ended = EndOfLane(f"{self.peer} closed {self.lane.name}"), True
            self._stop_sending(self._over)
            self._drained()
            self.wake_writer()
        elif self._flushing:
            self._flushing = False
            self._stop_sending(EndOfLane(f"{self.peer} closed {self.lane.name}"))
            self.wake_flusher()

    def lose(self, why: str) -> None:
        """The peer is gone. Means nothing after a clean end, and little after closing here."""
        error = PeerLost(f"{self.me} lost {self.peer} ({self.lane.name}): {why}")
        if self._over is None:
            self._over = error
            self._drop(error)
        elif self._flushing:
            self._flushing = False
            self._stop_sending(error)
            self.wake_flusher()

    def _closed_error(self) -> ClosedError:
        return ClosedError(f"{self.me} closed its end of {self.lane.name} with {self.peer}")

    def _drop(self, error: TransportError) -> None:
        self._stop_sending(error)
        self._stop_receiving(error)
        self.wake_writer()

    def _stop_sending(self, error: TransportError) -> None:
        """Sends that have not left fail with `error`."""

    def _stop_receiving(self, error: TransportError) -> None:
        """Receives fail with `error`, what arrived is released."""

    def _drained(self) -> None:
        """After a clean end: what waits for more gets EndOfLane once nothing is left."""

    # ---- credits ----

    async def _wait_credit(self) -> None:
        while self._over is None and self._blocked():
            if self._writer is not None:
                raise BusyError(f"another task already waits for a credit on {self!r}")
            self._writer = asyncio.get_running_loop().create_future()
            try:
                await self._writer
            finally:
                self._writer = None
        if self._over:
            raise self._over.with_traceback(None)

    def _blocked(self) -> bool:
        return self._credits <= 0

    def wanted(self) -> int:
        """For taps: how many frames the owner waits for, or has posted receives for, that have not arrived."""
        return 0

    def wake_writer(self) -> None:
        """For taps: `ready()` may have become true."""
        if self._writer is not None and not self._writer.done():
            self._writer.set_result(None)

    def _spend(self) -> None:
        if self._over:
            raise self._over.with_traceback(None)
        if self._credits <= 0:
            raise WouldBlock(f"{self.window} already in flight on {self!r}; await ready()")
        self._credits -= 1
