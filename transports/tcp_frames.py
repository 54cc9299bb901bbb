"""Frames on a TCP stream: what is to leave, in which order, and what comes in, straight to where it belongs.

A frame is a prefix of fixed size, an encoded tensor header if it begins a tensor, and a body. Knows no socket: it says
which memory to send from and to receive into.
"""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import torch

from pipelined.errors import ProtocolError
from pipelined.transport.hello import HELLO_LIMIT_BYTES

from .wire import HEADER_BYTES, MAX_META_BYTES, Channel, Frame, Kind

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipelined.messages import TensorHeader

__all__ = ["Inbox", "Outbox", "encode"]

_LENGTHS = struct.Struct("<IQ")
_PREFIX_BYTES = HEADER_BYTES + _LENGTHS.size
_PART_BYTES = 256 << 10
"""A tensor leaves in parts of that size, so that another lane's frames wait for one of them at most."""
_BATCH_FRAMES = 32
_BUFFER_BYTES = 32 << 10


def encode(header: bytes, body_bytes: int, meta_bytes: int = 0) -> bytes:
    """The prefix of a frame."""
    return header + _LENGTHS.pack(meta_bytes, body_bytes)


@dataclass(eq=False, slots=True)
class _Job:
    """A tensor that is leaving."""

    slot: int
    meta: bytes
    data: memoryview
    sent: Callable[[], None]
    at: int = 0


class Outbox:
    """Frames and tensors that wait to leave: frames first, then the lanes' tensors in turn, a part each."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._frames: deque[tuple[bytes, bytes]] = deque()
        self._jobs: deque[_Job] = deque()
        self._now: list[memoryview] = []  # what has to leave next, without anything in between
        self._done: Callable[[], None] | None = None  # called when it has

    def frame(self, header: bytes, body: bytes) -> None:
        """Queue a frame."""
        self._frames.append((encode(header, len(body)), body))

    def tensor(self, slot: int, meta: bytes, data: memoryview, sent: Callable[[], None]) -> None:
        """Queue a tensor; `sent` once its last byte was taken."""
        self._jobs.append(_Job(slot, meta, data, sent))

    def clear(self) -> None:
        """Nothing leaves any more."""
        self._frames.clear()
        self._jobs.clear()
        self._now, self._done = [], None

    def next(self) -> list[memoryview]:
        """Memory to send from, in this order; empty if there is nothing to send."""
        if not self._now:
            if self._frames:
                batch = list(islice(self._frames, _BATCH_FRAMES))
                for _ in batch:
                    self._frames.popleft()
                self._now = [memoryview(piece) for frame in batch for piece in frame if piece]
            elif self._jobs:
                self._part(self._jobs.popleft())
        return self._now

    def _part(self, job: _Job) -> None:
        part = job.data[job.at : job.at + _PART_BYTES]
        if job.at == 0:
            header = self._channel.pack(Kind.TENSOR, job.slot)
            self._now = [memoryview(encode(header, len(part), len(job.meta)) + job.meta), part]
        else:
            self._now = [memoryview(encode(self._channel.pack(Kind.PART, job.slot), len(part))), part]
        job.at += len(part)
        if job.at == len(job.data):
            self._done = job.sent
        else:
            self._jobs.append(job)

    def took(self, count: int) -> None:
        """That many bytes of `next()` were sent."""
        now = self._now
        whole = 0
        while whole < len(now) and count >= len(now[whole]):
            count -= len(now[whole])
            whole += 1
        del now[:whole]
        if now:
            if count:
                now[0] = now[0][count:]
            return
        done, self._done = self._done, None
        if done is not None:
            done()


class _Assembly:
    """A tensor that is coming in."""

    def __init__(self, header: TensorHeader, size_bytes: int) -> None:
        self.header = header
        self.raw = torch.empty(size_bytes, dtype=torch.uint8)
        self.view = self.raw.numpy().data
        self.filled = 0


class Inbox:
    """Turns a stream into frames. All that is allocated was checked against a limit before.

    Methods raise ProtocolError if the stream can't be what a peer sends.
    """

    def __init__(self, opening: Callable[[Frame, bytes], Channel | None], max_message_bytes: int) -> None:
        """Args: opening: gets the frames of the handshake; what it returns gets the rest."""
        self._opening = opening
        self._max_message_bytes = max_message_bytes
        self._channel: Channel | None = None
        self._buffer = bytearray(_BUFFER_BYTES)
        self._start = self._end = 0
        self._body: memoryview | None = None  # a body that goes straight to where it belongs
        self._filled = 0
        self._whole: Callable[[], None] = _nothing
        self._tensors: dict[int, _Assembly] = {}

    def targets(self) -> list[memoryview]:
        """Where to receive into, in this order."""
        if self._start == self._end:
            self._start = self._end = 0
        elif len(self._buffer) - self._end < _BUFFER_BYTES // 2:
            rest = self._buffer[self._start : self._end]
            self._buffer[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
        space = memoryview(self._buffer)[self._end :]
        return [space] if self._body is None else [self._body[self._filled :], space]

    def came(self, count: int) -> None:
        """That many bytes were received into `targets()`."""
        if self._body is not None:
            taken = min(count, len(self._body) - self._filled)
            self._filled += taken
            count -= taken
        self._end += count
        while self._advance():
            pass

    def _advance(self) -> bool:
        """Do one step with what is here; False if more has to come."""
        if self._body is not None:
            if self._filled < len(self._body):
                return False
            whole, self._body = self._whole, None
            whole()
            return True
        available = self._end - self._start
        if available < _PREFIX_BYTES:
            return False
        at = self._start + HEADER_BYTES
        frame = Frame.unpack(memoryview(self._buffer)[self._start : at])
        meta_bytes, body_bytes = _LENGTHS.unpack_from(self._buffer, at)
        self._check(frame, meta_bytes, body_bytes)
        if available < _PREFIX_BYTES + meta_bytes:
            self._make_room(_PREFIX_BYTES + meta_bytes)
            return False
        at += _LENGTHS.size
        meta = bytes(memoryview(self._buffer)[at : at + meta_bytes])
        self._start = at + meta_bytes
        if frame.kind in (Kind.TENSOR, Kind.PART):
            self._tensor(frame, meta, body_bytes)
        else:
            self._frame(frame, body_bytes)
        return True

    def _make_room(self, needed_bytes: int) -> None:
        if len(self._buffer) - self._start < needed_bytes:
            kept = self._buffer[self._start : self._end]
            self._buffer = bytearray(needed_bytes + _BUFFER_BYTES)
            self._buffer[: len(kept)] = kept
            self._start, self._end = 0, len(kept)

    def _check(self, frame: Frame, meta_bytes: int, body_bytes: int) -> None:
        if self._channel is None:
            limit = HELLO_LIMIT_BYTES
        elif frame.kind in (Kind.TENSOR, Kind.PART):
            limit = _PART_BYTES
        else:
            limit = max(self._max_message_bytes, 1 << 10)
        meta_limit = MAX_META_BYTES if frame.kind is Kind.TENSOR and self._channel is not None else 0
        if body_bytes > limit or meta_bytes > meta_limit:
            raise ProtocolError(
                f"a {frame.kind.name} frame of {meta_bytes} + {body_bytes} bytes; at most {meta_limit} + {limit}"
            )

    def _frame(self, frame: Frame, body_bytes: int) -> None:
        if self._end - self._start >= body_bytes:
            body = bytes(memoryview(self._buffer)[self._start : self._start + body_bytes])
            self._start += body_bytes
            self._give(frame, body)
        else:
            body_in = bytearray(body_bytes)
            self._receive(memoryview(body_in), lambda: self._give(frame, bytes(body_in)))

    def _give(self, frame: Frame, body: bytes) -> None:
        if self._channel is None:
            self._channel = self._opening(frame, body)
        else:
            self._channel.handle(frame, body)

    def _tensor(self, frame: Frame, meta: bytes, body_bytes: int) -> None:
        channel, slot = self._channel, frame.slot
        if channel is None:
            raise ProtocolError("a tensor before the hello")
        if frame.kind is Kind.TENSOR:
            if slot in self._tensors:
                raise ProtocolError("a tensor in the middle of another of its lane")
            self._tensors[slot] = _Assembly(*channel.begin_tensor(frame, meta))
        assembly = self._tensors.get(slot)
        if assembly is None or body_bytes > len(assembly.view) - assembly.filled or not (body_bytes or meta):
            raise ProtocolError("the parts of a tensor do not add up to it")
        if frame.kind is Kind.PART:
            channel.take_credits(frame)
        until = assembly.filled + body_bytes
        self._receive(assembly.view[assembly.filled : until], lambda: self._landed(channel, slot, assembly))
        assembly.filled = until

    def _landed(self, channel: Channel, slot: int, assembly: _Assembly) -> None:
        if assembly.filled == len(assembly.view):
            del self._tensors[slot]
            channel.end_tensor(slot, assembly.header, assembly.raw)

    def _receive(self, body: memoryview, whole: Callable[[], None]) -> None:
        """Fill `body` with what is here of it, then from the stream."""
        here = min(len(body), self._end - self._start)
        body[:here] = memoryview(self._buffer)[self._start : self._start + here]
        self._start += here
        self._body, self._filled, self._whole = body, here, whole


def _nothing() -> None:
    pass
