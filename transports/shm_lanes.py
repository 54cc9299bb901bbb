"""The lanes of `shm://`: messages and descriptors as frames, tensors in arenas, credits in batches."""

from __future__ import annotations

import array
import asyncio
import ctypes
import enum
import struct
import weakref
from typing import TYPE_CHECKING

import msgspec
import torch

from pipelined.errors import FrameTooLarge, ProtocolError
from pipelined.messages import TensorHeader
from pipelined.transport import Lane
from pipelined.transport.buffers import COPY_SLICE_BYTES, copy_sliced, dtype_of, raw_bytes
from pipelined.transport.lanes import MessageLane, TensorLane

from .arena import Arena, Segment, Slot, map_segment

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipelined.messages import Peer
    from pipelined.transport import EndpointSpec, Event, Transfer

    from .shm_channel import Channel

__all__ = ["Kind", "ShmLink", "ShmMessages", "ShmTensors"]

LAZY_S = 0.005
"""Frees and credits wait this long for a frame to go along with, unless the peer may run short of them."""

_HOARD_BYTES = 256 << 10
"""More memory than this is freed at once, so that the sender writes to what is still in the cache."""

_PLACE = struct.Struct("<IIQQ")  # slot, segment, offset, size
_SEGMENT = struct.Struct("<IQ")  # number, size
_NUMBER = struct.Struct("<I")


class Kind(enum.IntEnum):
    """What a frame is."""

    HELLO = 0
    WELCOME = 1
    REFUSED = 2
    DUPLICATE = 3
    MESSAGE = 4
    CREDIT = 5  # number of messages consumed
    SEGMENT = 6  # a descriptor comes along
    DROP = 7  # a segment is gone
    TENSOR = 8
    FREE = 9  # numbers of slots released
    BYE = 10


_MESSAGE, _TENSOR = int(Kind.MESSAGE), int(Kind.TENSOR)  # plain numbers where it is hot

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(TensorHeader)


class ShmLink:
    """What the lanes to one peer share: the channel, and when frees and credits are sent."""

    def __init__(
        self, channel: Channel, spec: EndpointSpec, arena_bytes: int, on_broken: Callable[[str], None]
    ) -> None:
        """Args: on_broken: called when this side can't go on."""
        self.channel = channel
        self.on_broken = on_broken
        self.spec = spec
        self.arena_bytes = arena_bytes
        self.loop = asyncio.get_running_loop()
        self.messages: list[ShmMessages | None] = [None] * len(Lane)
        self.tensors: list[ShmTensors | None] = [None] * len(Lane)
        self._owing: list[ShmMessages | ShmTensors] = []
        self._pressing = False
        self._timer: asyncio.TimerHandle | None = None
        channel.before_write = self.pay

    def owe(self, lane: ShmMessages | ShmTensors, *, urgent: bool) -> None:
        """A lane has something for the peer that need not go alone, unless it is urgent."""
        if self.channel.closed:
            return
        if not lane.owing:
            lane.owing = True
            self._owing.append(lane)
        if urgent:
            self._pressing = True
            self.channel.wake()
        elif self._timer is None:
            self._timer = self.spec.clock.call_at(self.spec.clock.now() + LAZY_S, self._late)

    def pay(self) -> None:
        """Queue what is owed."""
        if self._pressing:
            self._pressing = False
            owing, self._owing = self._owing, []
            for lane in owing:
                lane.owing = False
                lane.pay()

    def _late(self) -> None:
        self._timer = None
        if self._owing:
            self._pressing = True
            self.channel.wake()

    def close(self) -> None:
        """No more frames."""
        if self._timer is not None:
            self._timer.cancel()
        self._owing.clear()
        self.channel.close()


class ShmMessages(MessageLane):
    """Messages are frames of the channel."""

    def __init__(self, link: ShmLink, peer: Peer, lane: Lane, window: int) -> None:
        spec = link.spec
        super().__init__(spec.me, peer, lane, spec.epoch, window, spec.max_message_bytes)
        link.messages[lane] = self
        self.owing = False
        self._link = link
        self._channel = link.channel
        self._number = int(lane)
        self._consumed = 0

    def transmit(self, frame: bytes) -> None:
        """See `MessageLane`."""
        self._channel.send_now(_MESSAGE, self._number, frame)

    def consumed(self) -> None:
        """See `MessageLane`."""
        self._consumed += 1
        urgent = 2 * (self._consumed + len(self._frames)) >= self.window
        if urgent or not self.owing:
            self._link.owe(self, urgent=urgent)

    def pay(self) -> None:
        """Send the credits."""
        count, self._consumed = self._consumed, 0
        self._link.channel.queue(Kind.CREDIT, self.lane, _NUMBER.pack(count))


class _ViewWatch(weakref.ref[memoryview]):
    """Notices that the last tensor over a received slot is garbage, though it was never released."""

    __slots__ = ("lane", "slot")

    lane: ShmTensors
    slot: int


class _Parcel:
    """A tensor in the peer's memory. Every tensor made from it keeps `_buffer` alive."""

    __slots__ = ("_buffer", "_lane", "_slot", "header", "size_bytes")

    def __init__(self, header: TensorHeader, buffer: memoryview, size_bytes: int, lane: ShmTensors, slot: int) -> None:
        self.header = header
        self.size_bytes = size_bytes
        self._buffer = buffer
        self._lane = lane
        self._slot = slot

    @property
    def raw(self) -> torch.Tensor:
        """See `Parcel`."""
        return torch.frombuffer(self._buffer, dtype=torch.uint8)[: self.size_bytes]

    def tensor(self) -> torch.Tensor:
        """See `Parcel`."""
        dtype, shape = dtype_of(self.header.dtype), self.header.shape
        if self.size_bytes == 0:
            return torch.empty(shape, dtype=dtype)
        flat = torch.frombuffer(self._buffer, dtype=dtype)
        return flat if len(shape) == 1 else flat.view(shape)

    def release(self) -> None:
        """See `Parcel`."""
        self._lane.free(self._slot)


class ShmTensors(TensorLane):
    """Tensors lie in the sender's arena; only their places cross the channel."""

    def __init__(self, link: ShmLink, peer: Peer, lane: Lane, window: int) -> None:
        super().__init__(link.spec.me, peer, lane, link.spec.epoch, window)
        link.tensors[lane] = self
        self.owing = False
        self._link = link
        self._number = int(lane)
        self._arena = Arena(link.arena_bytes, self._lease_returned)
        self._stuck: Callable[[], None] | None = None  # a send that waits for memory
        self._maps: dict[int, memoryview] = {}
        self._held: dict[int, tuple[_ViewWatch, int]] = {}
        self._freed: array.array[int] = array.array("I")
        self._freed_bytes = 0

    # ---- sending ----

    def lease(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """See `TensorLink`. Plain memory once the lane is over, or while the arena is full."""
        try:
            leased = self._arena.lease(shape, dtype) if self.alive else None
        except OSError:
            leased = None
        return torch.empty(shape, dtype=dtype) if leased is None else leased

    def post_send(self, tensor: torch.Tensor, header: TensorHeader, *, after: Event | None = None) -> Transfer[None]:
        """See `TensorLink`.

        Raises:
            FrameTooLarge: The header's `meta` is longer than a message may be.
        """
        if len(header.meta) > self._link.spec.max_message_bytes:
            limit = self._link.spec.max_message_bytes
            raise FrameTooLarge(f"{len(header.meta)} bytes of metadata on {self!r}; the limit is {limit}")
        return super().post_send(tensor, header, after=after)

    def transmit(self, header: TensorHeader, tensor: torch.Tensor, sent: Callable[[], None]) -> None:
        """See `TensorLane`."""
        size_bytes = tensor.nbytes
        slot = self._arena.take_lease(tensor.data_ptr(), size_bytes) if size_bytes else None
        if slot is not None:
            self._announce(header, slot, size_bytes)
            sent()
            return
        try:
            slot = self._arena.allocate(size_bytes)
        except OSError as error:
            self._link.on_broken(f"no shared memory for {size_bytes} bytes: {error}")
            return
        if slot is None:
            self._stuck = lambda: self.transmit(header, tensor, sent)
            return
        if size_bytes <= COPY_SLICE_BYTES and tensor.is_cpu:
            ctypes.memmove(slot.address, tensor.data_ptr(), size_bytes)
            self._announce(header, slot, size_bytes)
            sent()
            return

        def copied() -> None:
            if self.alive:
                self._announce(header, slot, size_bytes)
            sent()

        place = slot.segment.memory[slot.offset : slot.offset + size_bytes]
        copy_sliced(torch.frombuffer(place, dtype=torch.uint8), raw_bytes(tensor), copied, wanted=lambda: self.alive)

    def _announce(self, header: TensorHeader, slot: Slot, size_bytes: int) -> None:
        channel, arena = self._link.channel, self._arena
        while arena.dropped:
            channel.queue(Kind.DROP, self.lane, _NUMBER.pack(arena.dropped.pop()))
        segment: Segment = slot.segment
        if not segment.announced:
            segment.announced = True
            place = _SEGMENT.pack(segment.number, segment.size_bytes)
            channel.queue_with_fd(segment.take_fd(), Kind.SEGMENT, self.lane, place)
        place = _PLACE.pack(slot.number, segment.number, slot.offset, size_bytes)
        channel.send_now(_TENSOR, self._number, place + _encoder.encode(header))

    def on_free(self, body: bytes) -> None:
        """The peer has released slots.

        Raises:
            ProtocolError: It does not hold them.
        """
        numbers = array.array("I", body)
        for number in numbers:
            self._arena.freed(number)
        self.grant(len(numbers))
        self._unstick()

    def _unstick(self) -> None:
        if self._stuck is not None:
            retry, self._stuck = self._stuck, None
            if self.alive:
                retry()

    def _lease_returned(self) -> None:
        if self._stuck is not None and not self._link.loop.is_closed():
            self._link.loop.call_soon_threadsafe(self._unstick)

    # ---- the end ----

    def end(self) -> None:
        """See `LaneEnd`."""
        super().end()
        self._let_go()

    def lose(self, why: str) -> None:
        """See `LaneEnd`."""
        super().lose(why)
        self._let_go()

    def close_local(self) -> None:
        """See `LaneEnd`."""
        super().close_local()
        self._let_go()

    def _let_go(self) -> None:
        """Memory goes now, but for what tensors still refer to."""
        self._stuck = None
        self._maps.clear()
        self._held.clear()
        self._arena.clear()

    # ---- receiving ----

    def on_segment(self, body: bytes, fd: int) -> None:
        """The peer has made a new segment.

        Raises:
            ProtocolError: It can't be used.
        """
        number, size_bytes = _SEGMENT.unpack(body)
        self._maps[number] = map_segment(fd, size_bytes)

    def on_drop(self, body: bytes) -> None:
        """The peer has let go of a segment; it is unmapped when the last tensor over it is garbage."""
        self._maps.pop(_NUMBER.unpack(body)[0], None)

    def on_tensor(self, body: bytes) -> None:
        """A tensor lies ready.

        Raises:
            ProtocolError: Not within a known segment.
        """
        slot, segment, offset, size_bytes = _PLACE.unpack_from(body)
        header = _decoder.decode(body[_PLACE.size :])
        memory = self._maps.get(segment)
        if memory is None or offset + size_bytes > len(memory) or slot in self._held:
            raise ProtocolError(f"a tensor in slot {slot}, segment {segment}, which is not there for it")
        if self._over is not None and not self._taps:  # taps of a closing lane may still have use for it
            return
        buffer = memory[offset : offset + max(1, size_bytes)]
        watch = _ViewWatch(buffer, _view_died)
        watch.lane, watch.slot = self, slot
        self._held[slot] = (watch, size_bytes)
        self.arrive(_Parcel(header, buffer, size_bytes, self, slot))

    def free(self, slot: int) -> None:
        """A slot is needed no longer, here."""
        held = self._held.pop(slot, None)
        if held is None:
            return
        self._freed.append(slot)
        self._freed_bytes += held[1]
        short = 2 * (len(self._freed) + len(self._held)) >= self.window
        self._link.owe(self, urgent=short or self._freed_bytes >= _HOARD_BYTES)

    def pay(self) -> None:
        """Send the frees."""
        self._link.channel.queue(Kind.FREE, self.lane, self._freed.tobytes())
        self._freed = array.array("I")
        self._freed_bytes = 0

    def view_died(self, slot: int) -> None:
        """Any thread: nothing refers to a slot any more."""
        if not self._link.loop.is_closed():
            self._link.loop.call_soon_threadsafe(self.free, slot)


def _view_died(watch: weakref.ref[memoryview]) -> None:
    assert isinstance(watch, _ViewWatch)
    watch.lane.view_died(watch.slot)
