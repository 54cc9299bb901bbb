"""`lockstep+`: nothing is buffered. A send completes when the peer receives, and not before: `lockstep+memory://`.

A protocol that works over it does not rely on room in the transport: two peers that both send first, and each wait for
that before they receive, stand still here at once, and elsewhere on the day that a window is full.

Posting stays posting (R1): `post_send` and `send_nowait` return at once, within the window; a tensor's transfer ends, a
message leaves, when a receive is there for it. `send` waits for that receive. Works in any time.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from pipelined.messages import TensorHeader
from pipelined.transport.message_lane import MessageLane
from pipelined.transport.taps import HoldingTap, Outgoing

from .wrapped import WrappedTransport

if TYPE_CHECKING:
    from pipelined.transport import Transport
    from pipelined.transport.endpoint import BaseEndpoint
    from pipelined.transport.lane_end import LaneEnd
    from pipelined.transport.parcels import Parcel
    from pipelined.transport.taps import Tap

__all__ = ["LockstepTransport"]

_DATA, _REQUEST = b"\0", b"\1"
_REQUEST_NAME = "\0receiving"


class LockstepTransport(WrappedTransport):
    """See the module. Option `window`: as in the spec."""

    name = "lockstep"
    options = ("window",)
    adds_frames = True

    def __init__(self, inner: Transport, options: dict[str, str]) -> None:
        super().__init__(inner, options)
        self.capabilities = replace(inner.capabilities, buffered=False)

    def tap(self, endpoint: BaseEndpoint, lane: LaneEnd) -> Tap:
        """See `WrappedTransport`."""
        return _LockstepTap(endpoint, lane)


class _LockstepTap(HoldingTap):
    """The receiving end asks for each frame as somebody waits for it; the sending end keeps frames until asked."""

    def __init__(self, endpoint: BaseEndpoint, lane: LaneEnd) -> None:
        super().__init__(endpoint, lane)
        lane.narrow(lane.window // 2)
        self._unmatched: deque[Outgoing] = deque()
        self._asked_for = 0  # frames that the peer waits for and that have not left
        self._asking = 0  # frames that were asked for and have not come

    def ready(self) -> bool:
        """See `Tap`."""
        return self._asked_for > 0

    def idle(self) -> bool:
        """See `Tap`."""
        return not self._unmatched and super().idle()

    def outgoing(self, item: Outgoing) -> None:
        """See `Tap`."""
        self._unmatched.append(item)
        self._pair()

    def _pair(self) -> None:
        while self._unmatched and self._asked_for:
            self._asked_for -= 1
            item = self._unmatched.popleft()
            if isinstance(item.body, bytes):
                item = replace(item, body=_DATA + item.body)
            self.hold(item, self.clock.now())

    def receiving(self) -> None:
        """See `Tap`."""
        while self._asking < self.lane.wanted() and self.lane.put_on_top():
            self._asking += 1
            if self.is_tensors:
                header = TensorHeader(self.lane.epoch, -1, name=_REQUEST_NAME, shape=(0,))
                self.hold(Outgoing(torch.empty(0, dtype=torch.uint8), header), self.clock.now())
            else:
                self.hold(Outgoing(_REQUEST), self.clock.now())

    def incoming(self, body: bytes | Parcel) -> None:
        """See `Tap`."""
        if isinstance(body, bytes):
            if body[:1] == _DATA:
                self._arrived(body[1:])
            else:
                assert isinstance(self.lane, MessageLane)
                self.lane.consumed()
                self._asked()
        elif body.header.name == _REQUEST_NAME:
            body.release()
            self._asked()
        else:
            self._arrived(body)

    def _arrived(self, body: bytes | Parcel) -> None:
        self._asking -= 1
        self.pass_up(body)

    def _asked(self) -> None:
        self._asked_for += 1
        self._pair()
        self.lane.wake_writer()
