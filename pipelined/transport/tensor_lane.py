"""Tensor links: sends in the order of posting, receives matched by (step, index)."""

from __future__ import annotations

import abc
import asyncio
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import torch

from pipelined.errors import ConfigError, LaneMismatch, ProtocolError, TransportError, Truncated
from pipelined.transport.buffers import (
    COPY_SLICE_BYTES,
    contiguous_sliced,
    copy_sliced,
    dtype_of,
    payload_bytes,
    raw_bytes,
    tensor_over,
)
from pipelined.transport.lane_end import LaneEnd
from pipelined.transport.parcels import Parcel, ReceivedParcel
from pipelined.transport.taps import Outgoing
from pipelined.transport.transfer import Transfer

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipelined.messages import Peer, TensorHeader
    from pipelined.transport.base import Event, Lane
    from pipelined.transport.taps import Tap

__all__ = ["TensorLane"]


@dataclass(eq=False, slots=True)
class _Posted:
    """A receive that waits for its tensor."""

    seq: tuple[int, int]
    into: torch.Tensor | None
    after: Event | None
    transfer: Transfer[ReceivedParcel]


@dataclass(eq=False, slots=True)
class _Outgoing:
    """A send that has not left."""

    header: TensorHeader
    tensor: torch.Tensor
    after: Event | None
    transfer: Transfer[None]


class TensorLane(LaneEnd, abc.ABC):
    """A `TensorLink`. The transport implements `transmit`, and calls `arrive` and `grant`."""

    kind = "tensors"

    def __init__(self, me: Peer, peer: Peer, lane: Lane, epoch: int, window: int) -> None:
        super().__init__(me, peer, lane, epoch, window)
        self._peer_name = str(peer)
        self._outgoing: deque[_Outgoing] = deque()
        self._leaving: _Outgoing | None = None
        self._pumping = False
        self._arrived: deque[Parcel] = deque()
        self._posted: deque[_Posted] = deque()
        self._copying: _Posted | None = None

    @abc.abstractmethod
    def transmit(self, header: TensorHeader, tensor: torch.Tensor, sent: Callable[[], None]) -> None:
        """Move one tensor, contiguous, whose event has fired.

        Must not suspend. Calls `sent` once the tensor's memory may be written again and the next one may be
        transmitted; with what can't be moved in one go (a copy in slices, a full socket) later than before returning.
        It may still be called after the lane is over, and then does nothing.
        """

    def lease(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """See `TensorLink`; plain memory unless the transport has its own."""
        return torch.empty(shape, dtype=dtype)

    async def ready(self) -> None:
        """See `TensorLink`."""
        await self._wait_credit()

    def flushed(self) -> bool:
        """Whether everything posted has been transmitted."""
        return not self._outgoing and self._leaving is None and super().flushed()

    # ---- sending ----

    def post_send(self, tensor: torch.Tensor, header: TensorHeader, *, after: Event | None = None) -> Transfer[None]:
        """See `TensorLink`."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        dtype_of(dtype)
        self._spend()
        header = msgspec.structs.replace(header, epoch=self.epoch, shape=tuple(tensor.shape), dtype=dtype)
        transfer: Transfer[None] = Transfer(f"send {header.step}.{header.index} to {self._peer_name}", keep=tensor)
        self._outgoing.append(_Outgoing(header, tensor, after, transfer))
        if after is not None and not after.done():
            after.add_done_callback(self._pump)
        else:
            self._pump()
        return transfer

    def _pump(self) -> None:
        """Transmit what may leave; at most about `COPY_SLICE_BYTES` at a stretch, the rest in later iterations."""
        if self._pumping:  # `sent` was called before `transmit` returned: the loop below goes on
            return
        self._pumping = True
        moved_bytes = 0
        try:
            while self._outgoing and self._leaving is None:
                head = self._outgoing[0]
                if head.after is not None and not head.after.done():
                    return
                if moved_bytes >= COPY_SLICE_BYTES:
                    asyncio.get_running_loop().call_soon(self._pump)
                    return
                self._leaving = self._outgoing.popleft()
                moved_bytes += head.tensor.nbytes
                if head.tensor.is_contiguous():
                    self._transmit(head, head.tensor)
                else:
                    contiguous_sliced(head.tensor, lambda copy, head=head: self._transmit(head, copy))  # type: ignore[misc]
        finally:
            self._pumping = False

    def _transmit(self, head: _Outgoing, tensor: torch.Tensor) -> None:
        def sent() -> None:
            if self._leaving is head:
                self._leaving = None
                head.transfer.finish(None)
                self._pump()
                if self.flushed():
                    self.wake_flusher()

        if self._leaving is head:  # else the lane ended while the tensor was made contiguous
            if self._taps:
                self._taps[0].outgoing(Outgoing(tensor, head.header, sent))
            else:
                self.transmit(head.header, tensor, sent)

    def wanted(self) -> int:
        """See `LaneEnd`."""
        return len(self._posted) - len(self._arrived)

    def set_taps(self, taps: tuple[Tap, ...]) -> None:
        """See `LaneEnd`."""
        self.insert_taps(taps, self._wire, self._accept)

    def _wire(self, item: Outgoing) -> None:
        if self.alive:
            assert isinstance(item.body, torch.Tensor)
            assert item.header is not None
            self.transmit(item.header, item.body, item.sent)
        else:
            item.sent()

    # ---- receiving ----

    def post_recv(
        self, seq: tuple[int, int], into: torch.Tensor | None = None, *, after: Event | None = None
    ) -> Transfer[ReceivedParcel]:
        """See `TensorLink`."""
        if into is not None and not into.is_contiguous():
            raise ConfigError(
                f"the buffer for step {seq[0]}, tensor {seq[1]} is not contiguous; receive into one that is"
            )
        transfer: Transfer[ReceivedParcel] = Transfer(
            f"recv {seq[0]}.{seq[1]} from {self._peer_name}", keep=into, withdraw=self._withdraw
        )
        if self._over is not None and not (self._ended and self._arrived):
            transfer.fail(self._over)
            return transfer
        self._posted.append(_Posted(seq, into, after, transfer))
        if after is not None and not after.done():
            after.add_done_callback(self._match)
        self._match()
        for tap in self._taps:
            tap.receiving()
        return transfer

    def arrive(self, parcel: Parcel) -> None:
        """For transports: a tensor came in.

        Raises:
            ProtocolError: The header does not fit the data; the link can't be trusted any more.
        """
        if payload_bytes(parcel.header) != parcel.size_bytes:
            raise ProtocolError(
                f"a tensor of shape {list(parcel.header.shape)} and dtype {parcel.header.dtype} came with "
                f"{parcel.size_bytes} bytes on {self!r}"
            )
        if self._taps:
            self._taps[-1].incoming(parcel)
        else:
            self._accept(parcel)

    def _accept(self, parcel: Parcel) -> None:
        if self._over is not None:
            parcel.release()
            return
        self._arrived.append(parcel)
        self._match()

    def _withdraw(self, transfer: Transfer[ReceivedParcel]) -> bool:
        for posted in self._posted:
            if posted.transfer is transfer:
                self._posted.remove(posted)
                asyncio.get_running_loop().call_soon(self._match)  # the next one may fit what has arrived
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
        if header.epoch != self.epoch or (header.step, header.index) != posted.seq:
            return LaneMismatch(
                f"{self.me} expected step {posted.seq[0]}, tensor {posted.seq[1]} of epoch {self.epoch} from "
                f"{self.peer} on {self.lane.name}; got step {header.step}, tensor {header.index}, epoch {header.epoch}"
            )
        if posted.into is None:
            return None
        if parcel.size_bytes > posted.into.nbytes:
            return Truncated(
                f"step {header.step}, tensor {header.index} from {self.peer} has {parcel.size_bytes} bytes; "
                f"the buffer has {posted.into.nbytes}"
            )
        if posted.into.data_ptr() % dtype_of(header.dtype).itemsize:
            return Truncated(
                f"the buffer for step {header.step}, tensor {header.index} is not aligned for {header.dtype}"
            )
        return None

    def _deliver(self, posted: _Posted, parcel: Parcel) -> None:
        header = parcel.header
        if posted.into is None:
            posted.transfer.finish(ReceivedParcel(header, parcel.tensor(), parcel))
            return
        target = raw_bytes(posted.into)
        self._copying = posted

        def landed() -> None:
            parcel.release()
            if self._copying is posted:
                self._copying = None
                tensor = tensor_over(target[: parcel.size_bytes], header)
                posted.transfer.finish(ReceivedParcel(header, tensor, None))
                self._match()

        copy_sliced(target, parcel.raw, landed, wanted=lambda: self._copying is posted)

    # ---- ends ----

    def _drained(self) -> None:
        self._match()

    def _stop_sending(self, error: TransportError) -> None:
        leaving, self._leaving = self._leaving, None
        if leaving is not None:
            leaving.transfer.fail(error)
        while self._outgoing:
            self._outgoing.popleft().transfer.fail(error)

    def _stop_receiving(self, error: TransportError) -> None:
        copying, self._copying = self._copying, None
        if copying is not None:
            copying.transfer.fail(error)
        while self._posted:
            self._posted.popleft().transfer.fail(error)
        while self._arrived:
            self._arrived.popleft().release()
