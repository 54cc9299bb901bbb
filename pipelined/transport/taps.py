"""Where a wrapper stands: between the ends of a lane and the wire, on both sides of the link.

A wrapper adds a tap factory to `EndpointSpec.taps`; every lane end of the endpoint then has a tap of its own from its
first frame on. Order, windows, matching and the ways a link ends stay the lane's; a tap sees each frame on its way out
and in, and may hold it, change it, or let it vanish. Taps of several wrappers form a chain, the outermost at the lane.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from pipelined.transport.buffers import copy_sliced, raw_bytes, tensor_over

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from pipelined.clock import Clock
    from pipelined.messages import TensorHeader
    from pipelined.transport.endpoint import BaseEndpoint
    from pipelined.transport.lane_end import LaneEnd
    from pipelined.transport.parcels import Parcel

__all__ = ["HoldingTap", "Outgoing", "Tap", "nothing", "own_copy"]


def nothing() -> None:
    """For `Outgoing.sent` where nobody waits."""


@dataclass(slots=True)
class Outgoing:
    """A frame on its way out.

    Attributes:
        body: A message, or a contiguous tensor whose memory must not change before `sent` is called.
        header: Of the tensor; None for a message.
        sent: To be called once the memory may be written again and the lane may transmit its next frame.
    """

    body: bytes | torch.Tensor
    header: TensorHeader | None = None
    sent: Callable[[], None] = nothing

    @property
    def charged_bytes(self) -> int:
        """What a link model charges: the `logical_bytes` of the header if it names any, else the real size."""
        if self.header is not None and self.header.logical_bytes:
            return self.header.logical_bytes
        return self.body.nbytes if isinstance(self.body, torch.Tensor) else len(self.body)


class Tap:
    """Hands everything on. Override `outgoing`, `incoming` or `receiving`; all run on the owner's loop.

    Attributes:
        endpoint, lane: Whose it is.
        is_tensors: Whether the lane carries tensors, else messages.
    """

    def __init__(self, endpoint: BaseEndpoint, lane: LaneEnd) -> None:
        self.endpoint = endpoint
        self.lane = lane
        self.is_tensors = lane.kind == "tensors"
        self.pass_on: Callable[[Outgoing], None]
        self.pass_up: Callable[[bytes | Parcel], None]

    @property
    def clock(self) -> Clock:
        """The endpoint's."""
        return self.endpoint.spec.clock

    def outgoing(self, item: Outgoing) -> None:
        """A frame leaves: `pass_on` sends it, now or later, one at a time (`item.sent` says when the next may go)."""
        self.pass_on(item)

    def incoming(self, body: bytes | Parcel) -> None:
        """A frame came: `pass_up` gives it to the lane. What is not passed up must be released, if it is a parcel."""
        self.pass_up(body)

    def receiving(self) -> None:
        """The owner waits for a frame, or posted a receive for one."""

    def ready(self) -> bool:
        """Whether a message would leave at once; else `send` waits until it is, and `lane.wake_writer` was called."""
        return True

    def idle(self) -> bool:
        """Whether everything that was handed to `outgoing` has been passed on."""
        return True

    def closed(self) -> None:
        """The endpoint has closed: nothing passes any more."""


class HoldingTap(Tap):
    """A tap that may keep frames until they are due. Order is kept, and the lane goes on posting meanwhile."""

    def __init__(self, endpoint: BaseEndpoint, lane: LaneEnd) -> None:
        super().__init__(endpoint, lane)
        self._held: deque[tuple[float, Outgoing]] = deque()
        self._copying = 0
        self._passing = False
        self._timer: asyncio.TimerHandle | None = None

    def idle(self) -> bool:
        """See `Tap`."""
        return not self._held and not self._passing and not self._copying

    def hold(self, item: Outgoing, until_s: float) -> None:
        """Pass `item` on once the clock has reached `until_s` and all before it have left."""
        if until_s <= self.clock.now() and self.idle():
            self._pass(item)
            return
        if isinstance(item.body, torch.Tensor):
            self._copying += 1
            own_copy(item, lambda kept: self._copied(kept, item, until_s), lambda: self.lane.alive)
        else:
            self._keep(item, until_s)

    def _copied(self, kept: Outgoing, item: Outgoing, until_s: float) -> None:
        self._copying -= 1
        self._keep(kept, until_s)
        item.sent()

    def _keep(self, item: Outgoing, until_s: float) -> None:
        self._held.append((until_s, item))
        self._pump()

    def _pump(self) -> None:
        while self._held and not self._passing and self.lane.alive:
            until_s, item = self._held[0]
            if until_s > self.clock.now():
                if self._timer is None and until_s != float("inf"):
                    self._timer = self.clock.call_at(until_s, self._due)
                return
            self._held.popleft()
            self._pass(item)

    def _due(self) -> None:
        self._timer = None
        self._pump()

    def _pass(self, item: Outgoing) -> None:
        self._passing = True

        def sent() -> None:
            self._passing = False
            item.sent()
            self._pump()
            if self.lane.flushed():
                self.lane.wake_flusher()

        self.pass_on(replace(item, sent=sent))


def own_copy(item: Outgoing, then: Callable[[Outgoing], None], wanted: Callable[[], bool] | None = None) -> None:
    """Call `then` with the same frame over memory of its own, at once or, if it is large, a little later."""
    assert isinstance(item.body, torch.Tensor)
    assert item.header is not None
    header, copy = item.header, torch.empty(item.body.nbytes, dtype=torch.uint8)
    copy_sliced(copy, raw_bytes(item.body), lambda: then(Outgoing(tensor_over(copy, header), header)), wanted)
