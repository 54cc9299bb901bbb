"""What all transports share: order, windows, matching, and the ways a link ends.

A transport subclasses `TensorLane` and `MessageLane` with the few methods that move bytes; that a wrong seq is a
`LaneMismatch`, that a cancelled waiter loses nothing, that a lost peer is `PeerLost` for ever, is written once, here.
Everything runs on the owner's loop.
"""

from __future__ import annotations

import abc
import asyncio
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import msgspec
import torch

from pipelined.errors import (
    BusyError,
    ClosedError,
    EndOfLane,
    FrameTooLarge,
    LaneMismatch,
    PeerLost,
    TransportError,
    Truncated,
    WouldBlock,
)
from pipelined.transport.transfer import Transfer

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipelined.messages import Peer, TensorHeader
    from pipelined.transport.base import Event, Lane

__all__ = ["MessageLane", "Parcel", "TensorLane", "copy_sliced", "raw_bytes", "tensor_over"]

COPY_SLICE_BYTES = 4 << 20
"""About 1 ms of memcpy: the longest that a copy holds the loop at a stretch."""


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's memory as a flat uint8 tensor: works for every dtype, bf16 and fp8 included."""
    return tensor.detach().reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)


def tensor_over(raw: torch.Tensor, header: TensorHeader) -> torch.Tensor:
    """The flat uint8 tensor `raw` seen with the header's shape and dtype; no copy."""
    dtype = getattr(torch, header.dtype)
    if raw.numel() == 0:
        return torch.empty(header.shape, dtype=dtype)
    return raw.view(dtype).view(header.shape)


def copy_sliced(target: torch.Tensor, source: torch.Tensor, then: Callable[[], None]) -> None:
    """Copy between flat uint8 tensors, then call `then`; large ones in slices, so that the loop stays responsive."""
    total = source.numel()
    if total <= COPY_SLICE_BYTES:
        target[:total].copy_(source)
        then()
        return
    loop = asyncio.get_running_loop()

    def step(at: int) -> None:
        until = min(total, at + COPY_SLICE_BYTES)
        target[at:until].copy_(source[at:until])
        if until < total:
            loop.call_soon(step, until)
        else:
            then()

    step(0)


class _LaneEnd:
    """State common to both kinds: name, credits, the one waiter of each kind, and how it ended."""

    def __init__(self, me: Peer, peer: Peer, lane: Lane, epoch: int, window: int) -> None:
        self.me = me
        self.peer = peer
        self.lane = lane
        self.epoch = epoch
        self.window = window
        self._credits = window
        self._over: TransportError | None = None  # no more sends
        self._ended = False  # clean: what arrived may still be received
        self._writer: asyncio.Future[None] | None = None

    def __repr__(self) -> str:
        state = type(self._over).__name__ if self._over else "open"
        return f"<{type(self).__name__} {self.me}->{self.peer} {self.lane.name} {state}>"

    def credits(self) -> int:
        """How many may be posted now."""
        return 0 if self._over else self._credits

    def grant(self, count: int = 1) -> None:
        """For transports: the peer has released that many."""
        self._credits += count
        self._wake_writer()

    async def _wait_credit(self) -> None:
        if self._over:
            raise self._over
        if self._credits > 0:
            return
        if self._writer is not None:
            raise BusyError(f"another task already waits for a credit on {self!r}")
        self._writer = asyncio.get_running_loop().create_future()
        try:
            await self._writer
        finally:
            self._writer = None
        if self._over:
            raise self._over

    def _wake_writer(self) -> None:
        if self._writer is not None and not self._writer.done():
            self._writer.set_result(None)

    def _spend(self) -> None:
        if self._over:
            raise self._over
        if self._credits <= 0:
            raise WouldBlock(f"{self.window} already in flight on {self!r}; await ready()")
        self._credits -= 1

    def close_local(self) -> None:
        """For transports: this side closed."""
        self._finish(ClosedError(f"{self.me} closed its end of {self.lane.name} with {self.peer}"))

    def end(self) -> None:
        """For transports: the peer closed cleanly and all it sent has been handed to `arrive`."""
        if self._over is None:
            self._ended = True
            self._over = EndOfLane(f"{self.peer} closed {self.lane.name}")
            self._drained()
            self._wake_writer()

    def lose(self, why: str) -> None:
        """For transports: the peer is gone."""
        if self._over is None or self._ended:
            self._finish(PeerLost(f"{self.me} lost {self.peer} ({self.lane.name}): {why}"))

    def _finish(self, error: TransportError) -> None:
        self._over, self._ended = error, False
        self._dropped(error)
        self._wake_writer()

    def _drained(self) -> None:
        """After a clean end: what waits for more gets EndOfLane once nothing is left."""

    def _dropped(self, error: TransportError) -> None:
        """After a close or a loss: everything pending fails with `error`, what arrived is released."""


class MessageLane(_LaneEnd, abc.ABC):
    """A `MessageLink`. The transport implements `transmit` and `consumed`, and calls `arrive` and `grant`."""

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
        if len(frame) > self.max_bytes:
            raise FrameTooLarge(f"{len(frame)} bytes on {self!r}; the limit is {self.max_bytes}")
        self._spend()
        self.transmit(frame)

    async def send(self, frame: bytes) -> None:
        """See `MessageLink`."""
        if self._credits <= 0 or self._over:
            await self._wait_credit()
        self.send_nowait(frame)

    def receive_nowait(self) -> bytes:
        """See `MessageLink`."""
        if self._frames:
            frame = self._frames.popleft()
            if self._over is None:
                self.consumed()
            return frame
        if self._over:
            raise self._over
        raise WouldBlock(f"nothing has arrived on {self!r}")

    async def receive(self) -> bytes:
        """See `MessageLink`."""
        if self._reader is not None:
            raise BusyError(f"another task already receives on {self!r}")
        while not self._frames and not self._over:
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        return self.receive_nowait()

    def arrive(self, frame: bytes) -> None:
        """For transports: a frame came in."""
        if self._over is None:
            self._frames.append(frame)
            self._wake_reader()

    def _wake_reader(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _drained(self) -> None:
        self._wake_reader()

    def _dropped(self, error: TransportError) -> None:
        self._frames.clear()
        self._wake_reader()


class Parcel(Protocol):
    """What a transport hands to `TensorLane.arrive`: a header and memory that holds the data."""

    @property
    def header(self) -> TensorHeader:
        """What it is."""
        ...

    @property
    def raw(self) -> torch.Tensor:
        """The data, flat uint8."""
        ...

    def release(self) -> None:
        """The memory is free again; tell the sender."""
        ...


class _ReceivedParcel:
    """A `Received` over a parcel, or over the buffer that it was copied into."""

    __slots__ = ("_parcel", "_tensor", "header")

    def __init__(self, header: TensorHeader, tensor: torch.Tensor, parcel: Parcel | None) -> None:
        self.header = header
        self._tensor: torch.Tensor | None = tensor
        self._parcel = parcel

    def __repr__(self) -> str:
        return f"<Received {self.header.step}.{self.header.index} {self.header.name!r} {list(self.header.shape)}>"

    @property
    def tensor(self) -> torch.Tensor:
        """See `Received`."""
        if self._tensor is None:
            raise ClosedError(f"{self!r} was released; its memory belongs to the sender again")
        return self._tensor

    def release(self) -> None:
        """See `Received`."""
        self._tensor = None
        parcel, self._parcel = self._parcel, None
        if parcel is not None:
            parcel.release()

    def __del__(self) -> None:
        self.release()


@dataclass(eq=False)
class _Posted:
    seq: tuple[int, int]
    into: torch.Tensor | None
    after: Event | None
    transfer: Transfer[_ReceivedParcel]


@dataclass(eq=False)
class _Outgoing:
    header: TensorHeader
    tensor: torch.Tensor
    after: Event | None
    transfer: Transfer[None]


class TensorLane(_LaneEnd, abc.ABC):
    """A `TensorLink`. The transport implements `transmit`, and calls `arrive` and `grant`."""

    def __init__(self, me: Peer, peer: Peer, lane: Lane, epoch: int, window: int) -> None:
        super().__init__(me, peer, lane, epoch, window)
        self._outgoing: deque[_Outgoing] = deque()
        self._sending = False
        self._arrived: deque[Parcel] = deque()
        self._posted: deque[_Posted] = deque()
        self._copying: _Posted | None = None

    @abc.abstractmethod
    def transmit(self, header: TensorHeader, tensor: torch.Tensor, sent: Callable[[], None]) -> None:
        """Move one tensor, contiguous, whose event has fired.

        Must not suspend. Calls `sent` once the tensor's memory may be written again and the next one may be
        transmitted; with what can't be moved in one go (a copy in slices, a full socket) later than before returning.
        """

    def lease(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """See `TensorLink`; plain memory unless the transport has its own."""
        return torch.empty(shape, dtype=dtype)

    async def ready(self) -> None:
        """See `TensorLink`."""
        await self._wait_credit()

    def flushed(self) -> bool:
        """Whether everything posted has been transmitted."""
        return not self._outgoing and not self._sending

    # ---- sending ----

    def post_send(self, tensor: torch.Tensor, header: TensorHeader, *, after: Event | None = None) -> Transfer[None]:
        """See `TensorLink`."""
        self._spend()
        header = msgspec.structs.replace(
            header, epoch=self.epoch, shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch.")
        )
        transfer: Transfer[None] = Transfer(f"send {header.step}.{header.index} to {self.peer}", keep=tensor)
        self._outgoing.append(_Outgoing(header, tensor, after, transfer))
        if after is not None and not after.done():
            after.add_done_callback(self._pump)
        else:
            self._pump()
        return transfer

    def _pump(self) -> None:
        while self._outgoing and not self._sending and not (self._over and not self._ended):
            head = self._outgoing[0]
            if head.after is not None and not head.after.done():
                return
            self._outgoing.popleft()
            self._sending = True
            tensor = head.tensor if head.tensor.is_contiguous() else head.tensor.contiguous()

            def sent(transfer: Transfer[None] = head.transfer) -> None:
                self._sending = False
                if not transfer.done():
                    transfer.finish(None)
                self._pump()

            self.transmit(head.header, tensor, sent)

    # ---- receiving ----

    def post_recv(
        self, seq: tuple[int, int], into: torch.Tensor | None = None, *, after: Event | None = None
    ) -> Transfer[_ReceivedParcel]:
        """See `TensorLink`."""
        transfer: Transfer[_ReceivedParcel] = Transfer(
            f"recv {seq[0]}.{seq[1]} from {self.peer}", keep=into, withdraw=self._withdraw
        )
        if self._over is not None and not (self._ended and self._arrived):
            transfer.fail(self._over)
            return transfer
        self._posted.append(_Posted(seq, into, after, transfer))
        if after is not None and not after.done():
            after.add_done_callback(self._match)
        self._match()
        return transfer

    def arrive(self, parcel: Parcel) -> None:
        """For transports: a tensor came in."""
        if self._over is not None:
            parcel.release()
            return
        self._arrived.append(parcel)
        self._match()

    def _withdraw(self, transfer: Transfer[_ReceivedParcel]) -> bool:
        for posted in self._posted:
            if posted.transfer is transfer:
                self._posted.remove(posted)
                return True
        return False

    def _match(self) -> None:
        while self._posted and self._arrived and self._copying is None:
            posted, parcel = self._posted[0], self._arrived[0]
            if posted.after is not None and not posted.after.done():
                return
            self._posted.popleft()
            if (problem := self._problem(posted, parcel)) is not None:
                posted.transfer.fail(problem)
                continue
            self._arrived.popleft()
            self._deliver(posted, parcel)
        if self._ended and not self._arrived and self._over is not None:
            while self._posted:
                self._posted.popleft().transfer.fail(self._over)

    def _problem(self, posted: _Posted, parcel: Parcel) -> TransportError | None:
        header = parcel.header
        if (header.epoch, *header.seq) != (self.epoch, *posted.seq):
            return LaneMismatch(
                f"{self.me} expected step {posted.seq[0]}, tensor {posted.seq[1]} of epoch {self.epoch} from "
                f"{self.peer} on {self.lane.name}; got step {header.step}, tensor {header.index}, epoch {header.epoch}"
            )
        if posted.into is not None and parcel.raw.numel() > posted.into.numel() * posted.into.element_size():
            return Truncated(
                f"step {header.step}, tensor {header.index} from {self.peer} has {parcel.raw.numel()} bytes; "
                f"the buffer has {posted.into.numel() * posted.into.element_size()}"
            )
        return None

    def _deliver(self, posted: _Posted, parcel: Parcel) -> None:
        header = parcel.header
        if posted.into is None:
            posted.transfer.finish(_ReceivedParcel(header, tensor_over(parcel.raw, header), parcel))
            return
        target = raw_bytes(posted.into)
        self._copying = posted

        def landed() -> None:
            self._copying = None
            tensor = tensor_over(target[: parcel.raw.numel()], header)
            parcel.release()
            if not posted.transfer.done():
                posted.transfer.finish(_ReceivedParcel(header, tensor, None))
            self._match()

        copy_sliced(target, parcel.raw, landed)

    # ---- ends ----

    def _drained(self) -> None:
        self._match()

    def _dropped(self, error: TransportError) -> None:
        while self._outgoing:
            self._outgoing.popleft().transfer.fail(error)
        while self._posted:
            self._posted.popleft().transfer.fail(error)
        if self._copying is not None and not self._copying.transfer.done():
            self._copying.transfer.fail(error)
        while self._arrived:
            self._arrived.popleft().release()
