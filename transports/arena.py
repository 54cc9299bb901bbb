"""Memory that a sender owns and a receiver maps: memfd segments cut into slots of size classes.

A slot goes out with a tensor and comes back with the receiver's free. The slot used last is used first, so that it is
still in the cache. Slots can be leased from any thread, written in place and sent without a copy.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING

import torch

from pipelined.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Arena", "Segment", "Slot", "map_segment", "slot_bytes"]

SEGMENT_BYTES = 32 << 20
"""Sparse: only what is touched takes memory. A larger slot gets a segment of its own."""

_SMALLEST_SLOT_BYTES = 4096
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def slot_bytes(size_bytes: int) -> int:
    """Capacity of the slot for so many bytes: four classes an octave, whole pages."""
    if size_bytes <= _SMALLEST_SLOT_BYTES:
        return _SMALLEST_SLOT_BYTES
    step = max(_SMALLEST_SLOT_BYTES, 1 << ((size_bytes - 1).bit_length() - 3))
    return -(-size_bytes // step) * step


class Segment:
    """A memfd, mapped; `announced` once the peer was sent its descriptor.

    Raises:
        OSError: No memory or no descriptor to be had.
    """

    __slots__ = ("__weakref__", "address", "announced", "fd", "in_use", "memory", "number", "size_bytes", "used_bytes")

    def __init__(self, number: int, size_bytes: int) -> None:
        self.number = number
        self.size_bytes = size_bytes
        self.used_bytes = 0
        self.in_use = 0
        self.announced = False
        self.fd = os.memfd_create("pipelined", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, size_bytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
            self.memory = memoryview(mmap.mmap(self.fd, size_bytes))
        except BaseException:
            os.close(self.fd)
            raise
        self.address = torch.frombuffer(self.memory, dtype=torch.uint8, count=1).data_ptr()

    def take_fd(self) -> int:
        """The descriptor, for whoever sends and closes it; the mapping stays."""
        fd, self.fd = self.fd, -1
        return fd

    def __del__(self) -> None:
        if getattr(self, "fd", -1) >= 0:
            os.close(self.fd)


class Slot:
    """A piece of a segment. `holds` counts who needs it: the lease's tensor, the receiver."""

    __slots__ = ("address", "capacity_bytes", "holds", "number", "offset", "segment")

    def __init__(self, number: int, segment: Segment, offset: int, capacity_bytes: int) -> None:
        self.number = number
        self.segment = segment
        self.offset = offset
        self.capacity_bytes = capacity_bytes
        self.address = segment.address + offset
        self.holds = 0


class _LeaseWatch(weakref.ref[memoryview]):
    """Notices that the last tensor over a lease is garbage."""

    __slots__ = ("slot",)

    slot: Slot


class Arena:
    """The slots of one lane's sending end. Thread-safe.

    Garbage collection may strike while the lock is held, so what it finds only goes into a queue.
    """

    def __init__(self, limit_bytes: int, on_return: Callable[[], None]) -> None:
        """Args: limit_bytes: of all segments. on_return: called from any thread when a lease becomes garbage."""
        self.limit_bytes = limit_bytes
        self._on_return = on_return
        self._lock = threading.Lock()
        self._returned: deque[Slot] = deque()
        self._idle: dict[int, list[Slot]] = {}
        self._segments: list[Segment] = []
        self._numbers = 0  # slots ever cut
        self._grown = 0  # segments ever made
        self._out: dict[int, Slot] = {}
        self._leases: dict[int, tuple[Slot, _LeaseWatch]] = {}
        self._watches: dict[int, _LeaseWatch] = {}
        self.dropped: list[int] = []  # numbers of segments let go of, for the receiver to unmap

    def __repr__(self) -> str:
        return f"<Arena {len(self._segments)} segments, {len(self._out)} slots out, {len(self._leases)} leases>"

    @property
    def size_bytes(self) -> int:
        """Of all segments, touched or not."""
        return sum(segment.size_bytes for segment in self._segments)

    def allocate(self, size_bytes: int) -> Slot | None:
        """A slot to be filled and sent; None while there is no memory within the limit."""
        with self._lock:
            slot = self._allocate(size_bytes)
            if slot is not None:
                self._out[slot.number] = slot
            return slot

    def lease(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """A tensor over a slot, or None while there is no memory within the limit. Any thread."""
        count = 1
        for size in shape:
            count *= size
        if count == 0:
            return None
        size_bytes = count * dtype.itemsize
        with self._lock:
            slot = self._allocate(size_bytes)
            if slot is None:
                return None
            buffer = slot.segment.memory[slot.offset : slot.offset + size_bytes]
            watch = _LeaseWatch(buffer, self._lease_died)
            watch.slot = slot
            self._leases[slot.address] = (slot, watch)
            self._watches[slot.number] = watch
        return torch.frombuffer(buffer, dtype=dtype, count=count).view(shape)

    def take_lease(self, address: int, size_bytes: int) -> Slot | None:
        """The slot leased at that address, now to be sent; None if there is none. A lease is taken once."""
        if address not in self._leases:
            return None
        with self._lock:
            self._settle()
            slot, _ = self._leases.pop(address, (None, None))
            if slot is None or size_bytes > slot.capacity_bytes:
                return None
            slot.holds += 1
            self._out[slot.number] = slot
            return slot

    def freed(self, number: int) -> None:
        """The receiver needs a slot no longer.

        Raises:
            ProtocolError: It does not have it.
        """
        slot = self._out.pop(number, None)
        if slot is None:
            raise ProtocolError(f"the peer freed slot {number}, which it does not hold")
        self._returned.append(slot)

    def clear(self) -> None:
        """Let go of all segments; what tensors still refer to stays until they are garbage."""
        with self._lock:
            self._segments.clear()
            self._idle.clear()
            self._out.clear()
            self._leases.clear()
            self._watches.clear()
            self._returned.clear()

    def _lease_died(self, watch: weakref.ref[memoryview]) -> None:
        assert isinstance(watch, _LeaseWatch)
        self._returned.append(watch.slot)
        self._on_return()

    # ---- under the lock ----

    def _settle(self) -> None:
        while self._returned:
            slot = self._returned.popleft()
            watch = self._watches.get(slot.number)
            if watch is not None and watch() is None:
                del self._watches[slot.number]
                if (lease := self._leases.get(slot.address)) is not None and lease[0] is slot:
                    del self._leases[slot.address]
            slot.holds -= 1
            if slot.holds == 0:
                slot.segment.in_use -= 1
                self._idle.setdefault(slot.capacity_bytes, []).append(slot)

    def _allocate(self, size_bytes: int) -> Slot | None:
        self._settle()
        capacity = slot_bytes(size_bytes)
        idle = self._idle.get(capacity)
        slot = idle.pop() if idle else self._cut(capacity) or self._larger(capacity)
        if slot is not None:
            slot.holds = 1
            slot.segment.in_use += 1
        return slot

    def _cut(self, capacity: int) -> Slot | None:
        """A new slot, from the last segment that has room or a new one."""
        segment = next((s for s in reversed(self._segments) if s.size_bytes - s.used_bytes >= capacity), None)
        if segment is None:
            segment = self._grow(max(SEGMENT_BYTES, capacity))
        if segment is None:
            return None
        slot = Slot(self._numbers, segment, segment.used_bytes, capacity)
        self._numbers += 1
        segment.used_bytes += capacity
        return slot

    def _grow(self, size_bytes: int) -> Segment | None:
        if self._segments and self.size_bytes + size_bytes > self.limit_bytes:
            self._let_go(size_bytes)
        if self._segments and self.size_bytes + size_bytes > self.limit_bytes:
            return None
        segment = Segment(self._grown, size_bytes)
        self._grown += 1
        self._segments.append(segment)
        return segment

    def _let_go(self, wanted_bytes: int) -> None:
        """Drop segments of which nothing is in use, as many as are needed."""
        for segment in [s for s in self._segments if s.in_use == 0]:
            if self.size_bytes + wanted_bytes <= self.limit_bytes:
                return
            self._segments.remove(segment)
            if segment.announced:
                self.dropped.append(segment.number)
            for slots in self._idle.values():
                slots[:] = [slot for slot in slots if slot.segment is not segment]

    def _larger(self, capacity: int) -> Slot | None:
        """An idle slot of a larger class."""
        fitting = min((size for size, slots in self._idle.items() if size >= capacity and slots), default=None)
        return None if fitting is None else self._idle[fitting].pop()


def map_segment(fd: int, size_bytes: int) -> memoryview:
    """Map a segment that a peer has sent; the descriptor is closed.

    Raises:
        ProtocolError: It is not a sealed memfd of that size: the peer could take the memory away under our hands.
        OSError: It can't be mapped.
    """
    try:
        try:
            sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        except OSError:
            sealed = 0
        if not sealed or os.fstat(fd).st_size < size_bytes or size_bytes <= 0:
            raise ProtocolError(f"the peer sent a descriptor that is not a sealed segment of {size_bytes} bytes")
        return memoryview(mmap.mmap(fd, size_bytes))
    finally:
        os.close(fd)
