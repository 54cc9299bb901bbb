"""What the socket transports share: the frame header, lanes over it, credits and the clean end. Knows no socket.

A frame is a header of fixed size, for a tensor its encoded `TensorHeader`, and a body. Credits ride on every header
that leaves; a frame of their own goes out only if nothing else did in the same turn of the loop.
"""

from __future__ import annotations

import abc
import enum
import functools
import struct
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from pipelined.errors import ConfigError, ProtocolError
from pipelined.messages import TensorHeader
from pipelined.transport import Lane
from pipelined.transport.lanes import MessageLane, OwnedParcel, TensorLane, payload_bytes, raw_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from pipelined.messages import Peer
    from pipelined.transport import EndpointSpec

    from .peering import SocketEndpoint

__all__ = ["HEADER_BYTES", "LANES", "MAX_META_BYTES", "Channel", "Frame", "Kind", "Messages", "Tensors"]

LANES = len(Lane)
_SLOTS = 2 * LANES
MAX_META_BYTES = 16 << 20
"""Longest encoded `TensorHeader`, its `meta` included."""
MAX_TENSOR_BYTES = 64 << 30
"""A header that announces more is taken for damage."""
_MAX_WINDOW = 0xFFFF
_WRAP = 0xFFFFFFFF
_HEADER = struct.Struct(f"<BBxxI{_SLOTS}H")
_COUNTS = struct.Struct(f"<{_SLOTS}I")
HEADER_BYTES = _HEADER.size


class Kind(enum.IntEnum):
    """What a frame is."""

    HELLO = 1
    WELCOME = 2
    REFUSE = 3
    MESSAGE = 4
    TENSOR = 5
    PART = 6
    CREDIT = 7
    BYE = 8
    BYE_READ = 9
    PING = 10
    SIDE = 11


class Frame(NamedTuple):
    """A header as it came in.

    Attributes:
        kind: What follows.
        slot: The lane, plus `LANES` for tensors.
        number: Position in the order of the slot; with a hello, the window.
        credits: For each slot, how many more were released.
    """

    kind: Kind
    slot: int
    number: int
    credits: tuple[int, ...]

    @classmethod
    def unpack(cls, header: bytes | memoryview) -> Frame:
        """From bytes that anybody may have sent.

        Raises:
            ProtocolError: They are no header.
        """
        if len(header) != HEADER_BYTES:
            raise ProtocolError(f"a frame header has {len(header)} bytes, not {HEADER_BYTES}")
        kind, slot, number, *credits = _HEADER.unpack(header)
        if not Kind.HELLO <= kind <= Kind.SIDE or slot >= _SLOTS:
            raise ProtocolError(f"there is no frame of kind {kind} for slot {slot}")
        return cls(Kind(kind), slot, number, tuple(credits))

    @staticmethod
    def pack(kind: Kind, slot: int = 0, number: int = 0) -> bytes:
        """A header without credits."""
        return _HEADER.pack(kind, slot, number, *([0] * _SLOTS))


class Messages(MessageLane):
    """A message lane of a channel."""

    def __init__(self, channel: Channel, lane: Lane, spec: EndpointSpec) -> None:
        super().__init__(spec.me, channel.peer, lane, spec.epoch, spec.window, spec.max_message_bytes)
        self._channel = channel

    def transmit(self, frame: bytes) -> None:
        """See `MessageLane`."""
        self._channel.put(Kind.MESSAGE, self.lane, bytes(frame))

    def consumed(self) -> None:
        """See `MessageLane`."""
        self._channel.owe(self.lane)


class Tensors(TensorLane):
    """A tensor lane of a channel."""

    def __init__(self, channel: Channel, lane: Lane, spec: EndpointSpec) -> None:
        super().__init__(spec.me, channel.peer, lane, spec.epoch, spec.window)
        self._channel = channel

    def transmit(self, header: TensorHeader, tensor: torch.Tensor, sent: Callable[[], None]) -> None:
        """See `TensorLane`."""
        data = raw_bytes(tensor).numpy().data
        self._channel.put_tensor(LANES + self.lane, msgspec.msgpack.encode(header), data, sent)


class Channel(abc.ABC):
    """All lanes with one peer. A transport implements `put`, `put_tensor` and `_shut`, and feeds what comes in.

    Attributes:
        peer: The other side.
        gone: Closed or lost: nothing leaves and nothing comes any more.
        bye_read: The peer has read our bye.
    """

    def __init__(self, endpoint: SocketEndpoint, peer: Peer) -> None:
        spec = endpoint.spec
        if not 1 <= spec.window <= _MAX_WINDOW:
            raise ConfigError(f"window={spec.window} is out of range: expected 1 to {_MAX_WINDOW}")
        self.peer = peer
        self.gone = False
        self.bye_read = False
        self._endpoint = endpoint
        self._window = spec.window
        self._max_message_bytes = spec.max_message_bytes
        self._owed = [0] * _SLOTS  # released here, the peer not told yet
        self._flush_due = False
        self._out = [0] * _SLOTS  # sent so far
        self._granted = [0] * _SLOTS  # of them released by the peer
        self._in = [0] * _SLOTS  # begun to arrive so far
        self._whole = [0] * _SLOTS  # of them here whole
        self._credited = [0] * _SLOTS  # of them released here
        self._last: list[int] | None = None  # how many the peer has sent, from its bye

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.peer} {'gone' if self.gone else 'open'}>"

    @abc.abstractmethod
    def put(self, kind: Kind, slot: int, body: bytes) -> None:
        """Send a frame, ahead of tensors that have not left yet. Never suspends; nothing if the channel is gone."""

    @abc.abstractmethod
    def put_tensor(self, slot: int, header: bytes, data: memoryview, sent: Callable[[], None]) -> None:
        """Send a tensor; calls `sent` once the memory of `data` is not read any more."""

    @abc.abstractmethod
    def _shut(self) -> None:
        """Close what carries the channel, at once."""

    def close(self) -> None:
        """Close what carries the channel, at once. Idempotent."""
        if not self.gone:
            self.gone = True
            self._shut()

    def pack(self, kind: Kind, slot: int) -> bytes:
        """Header of the next frame of `slot`, with the credits that are owed. It must be sent."""
        number = 0
        if kind is Kind.MESSAGE or kind is Kind.TENSOR:
            number = self._out[slot] & _WRAP
            self._out[slot] += 1
        packed = _HEADER.pack(kind, slot, number, *self._owed)
        if any(self._owed):
            self._owed = [0] * _SLOTS
        return packed

    def owe(self, slot: int) -> None:
        """One of those that arrived on `slot` was released."""
        self._credited[slot] += 1
        self._owed[slot] += 1
        if not self._flush_due:
            self._flush_due = True
            self._endpoint.loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_due = False
        if not self.gone and self._last is None and any(self._owed):
            self.put(Kind.CREDIT, 0, b"")

    # ---- what comes in; all of it raises ProtocolError if it does not fit ----

    def handle(self, frame: Frame, body: bytes) -> None:
        """A whole frame came in: any kind but hello, tensor and part."""
        self.take_credits(frame)
        if frame.kind is Kind.MESSAGE:
            if frame.slot >= LANES or len(body) > self._max_message_bytes:
                raise ProtocolError(f"a message of {len(body)} bytes in slot {frame.slot}")
            self._count_in(frame)
            self._whole[frame.slot] += 1
            self._endpoint.messages(self.peer, Lane(frame.slot)).arrive(body)
            self._end_if_complete()
        elif frame.kind is Kind.BYE:
            self._take_bye(body)
        elif frame.kind is Kind.BYE_READ:
            self.bye_read = True
            self._endpoint.farewell()
        elif frame.kind is Kind.SIDE:
            self._take_side(body)
        elif frame.kind is not Kind.CREDIT and frame.kind is not Kind.PING:
            raise ProtocolError(f"a {frame.kind.name} frame in the middle of a link")

    def _take_side(self, body: bytes) -> None:
        """What a transport whose tensors go another way says about that way."""
        raise ProtocolError("a frame about a way for tensors that this link does not have")

    def begin_tensor(self, frame: Frame, encoded: bytes | memoryview) -> tuple[TensorHeader, int]:
        """The header of a tensor came in: what it says, and how many bytes will follow."""
        self.take_credits(frame)
        if frame.slot < LANES:
            raise ProtocolError(f"a tensor in the message slot {frame.slot}")
        self._count_in(frame)
        try:
            header = msgspec.msgpack.decode(encoded, type=TensorHeader)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ProtocolError(f"a tensor's header does not decode: {error}") from error
        size_bytes = payload_bytes(header)
        if size_bytes > MAX_TENSOR_BYTES:
            raise ProtocolError(f"a tensor of {size_bytes} bytes; the limit is {MAX_TENSOR_BYTES}")
        return header, size_bytes

    def end_tensor(self, slot: int, header: TensorHeader, raw: torch.Tensor) -> None:
        """All of a tensor is here, in memory that belongs to `raw`."""
        self._whole[slot] += 1
        lane = self._endpoint.tensors(self.peer, Lane(slot - LANES))
        lane.arrive(OwnedParcel(header, raw, functools.partial(self.owe, slot)))
        self._end_if_complete()

    def take_credits(self, frame: Frame) -> None:
        """Grant what a header brought."""
        for slot, count in enumerate(frame.credits):
            if count:
                self._granted[slot] += count
                if self._granted[slot] > self._out[slot]:
                    raise ProtocolError(f"credit in slot {slot} for more than was sent")
                if slot < LANES:
                    self._endpoint.messages(self.peer, Lane(slot)).grant(count)
                else:
                    self._endpoint.tensors(self.peer, Lane(slot - LANES)).grant(count)

    def _count_in(self, frame: Frame) -> None:
        slot = frame.slot
        if frame.number != self._in[slot] & _WRAP:
            raise ProtocolError(f"frame {frame.number} of slot {slot} came where {self._in[slot] & _WRAP} was due")
        if self._in[slot] - self._credited[slot] >= self._window:
            raise ProtocolError(f"more than {self._window} in flight in slot {slot}")
        self._in[slot] += 1

    # ---- the clean end ----

    def bye(self) -> None:
        """Tell the peer that nothing follows what was sent."""
        self.put(Kind.BYE, 0, _COUNTS.pack(*(count & _WRAP for count in self._out)))

    def _take_bye(self, body: bytes) -> None:
        if len(body) != _COUNTS.size:
            raise ProtocolError(f"a bye of {len(body)} bytes, not {_COUNTS.size}")
        if self._last is not None:
            raise ProtocolError("a second bye")
        self._last = list(_COUNTS.unpack(body))
        self._end_if_complete()

    def _end_if_complete(self) -> None:
        if self._last is not None and all(self._last[slot] == self._whole[slot] & _WRAP for slot in range(_SLOTS)):
            # Only now: who reads it lets go of what carries the link, and of all that is still under way there.
            self.put(Kind.BYE_READ, 0, b"")
            self._endpoint.ended(self)
