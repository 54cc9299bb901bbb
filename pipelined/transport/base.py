"""The contract that every transport keeps: frames and buffers between peers, never Python objects.

A transport is chosen by URI and opened once a rank and epoch. It gives links: a message link or a tensor link for each
(peer, lane). The rules R1 to R15 are those of docs/transports.md, each a check in `pipelined.testing`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from pipelined.clock import Clock, MonotonicClock

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    import torch

    from pipelined.errors import PeerLost
    from pipelined.messages import Peer, TensorHeader
    from pipelined.transport.endpoint import BaseEndpoint
    from pipelined.transport.lane_end import LaneEnd
    from pipelined.transport.rendezvous import Rendezvous
    from pipelined.transport.taps import Tap
    from pipelined.transport.transfer import Transfer

__all__ = [
    "Capabilities",
    "Endpoint",
    "EndpointSpec",
    "Event",
    "Lane",
    "MessageLink",
    "Received",
    "TensorLink",
    "Transport",
]


class Lane(enum.IntEnum):
    """What travels where. No lane can hold up another."""

    SCHEDULE = 0
    HIDDEN = 1
    RESULTS = 2
    KV = 3
    HEALTH = 4


@dataclass(frozen=True)
class Capabilities:
    """What a transport can do; checks that need more are skipped, by name.

    Attributes:
        messages: Offers message links.
        tensors: Offers tensor links.
        processes: Peers may live in different processes of one host.
        hosts: Peers may live on different hosts.
        leases: `lease` gives memory that is sent without a copy.
        buffered: A frame may leave before the peer asks for it. Else sending waits for a receive, and each of the two
            sides must be served by a task of its own.
        window: Most tensors in flight on a lane unless the spec says otherwise.
        peer_lost_bound_s: A dead peer is reported within this time.
    """

    messages: bool
    tensors: bool
    processes: bool = False
    hosts: bool = False
    leases: bool = False
    buffered: bool = True
    window: int = 64
    peer_lost_bound_s: float = 1.0


@dataclass(frozen=True)
class EndpointSpec:
    """What an endpoint is opened with.

    Attributes:
        me: Who this endpoint is.
        world: Every peer of the epoch, this one included; the hello must agree on it.
        rendezvous: Where peers find each other.
        connect: Peers to connect to while opening; `open` returns once all of these links have said hello.
        epoch: Incarnation of the links.
        clock: Source of every time the transport reads.
        window: Most tensors (and messages) in flight on each lane.
        max_message_bytes: A longer message is refused on both sides, before it is allocated.
        open_timeout_s: Peers that have not said hello by then are named in a `HandshakeError`.
        secret: Shared secret that the hello must carry.
        dtype: Of what stages hand on, which the hello must agree on; "" where none is agreed.
        options: Query part of the URI.
        taps: Of wrappers, the outermost first: each makes the tap of a new lane end.
    """

    me: Peer
    world: tuple[Peer, ...]
    rendezvous: Rendezvous
    connect: tuple[Peer, ...]
    epoch: int = 0
    clock: Clock = field(default_factory=MonotonicClock)
    window: int = 64
    max_message_bytes: int = 64 << 20
    open_timeout_s: float = 30.0
    secret: str = ""
    dtype: str = ""
    options: Mapping[str, str] = field(default_factory=dict)
    taps: tuple[Callable[[BaseEndpoint, LaneEnd], Tap], ...] = ()


@runtime_checkable
class Event(Protocol):
    """A point on a device's stream. Both methods may be called from the owner's loop only."""

    def done(self) -> bool:
        """Whether everything launched before the event has completed."""
        ...

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call back on the owner's loop once done; at once if it is."""
        ...


class Received(Protocol):
    """A tensor that arrived: a view of the transport's memory until `release()`."""

    @property
    def header(self) -> TensorHeader:
        """What it is."""
        ...

    @property
    def tensor(self) -> torch.Tensor:
        """The data, of the header's shape and dtype. Invalid after `release()`."""
        ...

    def release(self) -> None:
        """Give the memory back, which gives the sender its credit. Idempotent."""
        ...


class MessageLink(Protocol):
    """Frames of bytes to and from one peer on one lane, in order, bounded by the window."""

    async def send(self, frame: bytes) -> None:
        """Hand over a frame; suspends while the window is full.

        A frame is either sent whole or, if the wait is cancelled, not at all.

        Raises:
            ClosedError, PeerLost: The link is over.
            FrameTooLarge: Longer than `max_message_bytes`.
            BusyError: Another task is waiting to send.
        """
        ...

    def send_nowait(self, frame: bytes) -> None:
        """Like `send`, but never suspends.

        Raises:
            WouldBlock: The window is full.
        """
        ...

    async def receive(self) -> bytes:
        """The next frame. Cancelling the wait loses nothing.

        Raises:
            EndOfLane: The peer closed and everything was received.
            ClosedError, PeerLost: The link is over.
            BusyError: Another task is receiving.
        """
        ...

    def receive_nowait(self) -> bytes:
        """The next frame if one is here.

        Raises:
            WouldBlock: None is here yet.
        """
        ...


class TensorLink(Protocol):
    """Tensors to and from one peer on one lane, in order."""

    def post_send(self, tensor: torch.Tensor, header: TensorHeader, *, after: Event | None = None) -> Transfer[None]:
        """Queue a tensor for sending and return at once, whatever the peer does (R1).

        The tensor's bytes are read no earlier than `after` fires; sends of a lane leave in the order of posting. The
        transfer keeps the tensor alive (R2) and is done when its memory may be written again (R3). A contiguous tensor
        from `lease` is sent without a copy. `header.shape` and `header.dtype` are filled in from the tensor.

        Raises:
            WouldBlock: The window is full (R7).
            ClosedError, EndOfLane, PeerLost: The link is over.
        """
        ...

    def post_recv(
        self, seq: tuple[int, int], into: torch.Tensor | None = None, *, after: Event | None = None
    ) -> Transfer[Received]:
        """Ask for the next tensor of the lane and return at once. `seq` is the (step, index) it must carry.

        With `into`, the data lands there (no earlier than `after`) and the result's tensor is a part of it.
        The transfer fails with `LaneMismatch` (R5: another seq; the tensor stays for a later receive), `Truncated` (R6:
        larger than `into`), `ClosedError`, `EndOfLane` or `PeerLost`.
        """
        ...

    def credits(self) -> int:
        """How many tensors may be posted now."""
        ...

    async def ready(self) -> None:
        """Wait until a credit is free.

        Raises:
            BusyError: Another task waits (R11).
            ClosedError, EndOfLane, PeerLost: The link is over.
        """
        ...

    def lease(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A writable tensor in the memory that the link sends from, or plain memory where there is none to be had.

        May be called from any thread. A lease is for one send: posting it gives the memory away, so that, unlike other
        sent buffers, it must not be written to again. One that is never sent is taken back when the tensor is garbage.
        """
        ...


class Endpoint(Protocol):
    """One peer's end of all its links, for one epoch. An async context manager; closing is `aclose`."""

    @property
    def me(self) -> Peer:
        """Who this is."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """What its transport can do."""
        ...

    def messages(self, peer: Peer, lane: Lane) -> MessageLink:
        """The message link to a connected peer; the same object each time."""
        ...

    def tensors(self, peer: Peer, lane: Lane) -> TensorLink:
        """The tensor link to a connected peer; the same object each time."""
        ...

    async def connect(self, peer: Peer) -> None:
        """Connect to one more peer. Does nothing if it is connected. Symmetric: both sides may call it, in any order.

        Raises:
            HandshakeError: No fitting hello in time.
        """
        ...

    @property
    def lost(self) -> AsyncIterator[PeerLost]:
        """Peers lost, as it is noticed; ends when the endpoint closes."""
        ...

    async def aclose(self) -> None:
        """Send what was posted, tell the peers, close (R9). Idempotent. Own waits raise `ClosedError`."""
        ...

    def abort(self) -> None:
        """Close at once; peers see `PeerLost`. Idempotent."""
        ...

    async def __aenter__(self) -> Endpoint:
        """The endpoint itself, already open."""
        ...

    async def __aexit__(self, *exc: object) -> None:
        """`aclose`, or `abort` if the body is leaving with an exception that is not a cancellation."""
        ...


class Transport(Protocol):
    """A factory of endpoints, made from a URI by the registry."""

    scheme: str
    capabilities: Capabilities

    async def open(self, spec: EndpointSpec) -> Endpoint:
        """Open this peer's end and connect to `spec.connect`.

        Raises:
            HandshakeError: A peer is absent or does not fit; names which.
        """
        ...
