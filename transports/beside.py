"""A TCP link whose tensors go another way beside it: what `gloo://` and `ucx://` share.

The TCP connections carry hellos, messages, credits, byes, heartbeats and the header of each tensor; the bytes of a
tensor go the other way. So who may connect, how a link ends and who is dead is settled on a connection that was proven
with the shared secret, and a death fails what is pending on the other way, too. Knows no library.
"""

from __future__ import annotations

import abc
from collections import deque
from typing import TYPE_CHECKING, cast

import torch

from pipelined.errors import HandshakeError
from pipelined.transport.lanes import payload_bytes

from . import greeting
from .tcp import TcpChannel, TcpEndpoint
from .wire import LANES, Kind

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipelined.messages import Peer, TensorHeader

    from .wire import Frame

__all__ = ["BesideChannel", "BesideEndpoint"]

_SLOTS = 2 * LANES


class BesideChannel(TcpChannel):
    """All lanes with one peer. On each lane at most one tensor is leaving and one arriving at a time.

    A library's channel implements `_open_side`, `_send_beside`, `_receive_beside`, `_take_side` and `_close_side`, and
    calls `_side_stands` once tensors can pass. `number` counts the tensors of a slot alike on both sides.
    """

    def __init__(self, endpoint: BesideEndpoint, peer: Peer, address: greeting.Address) -> None:
        super().__init__(endpoint, peer, address)
        self._beside = endpoint
        self._sent_beside = [0] * _SLOTS
        self._received_beside = [0] * _SLOTS
        self._coming: dict[int, deque[TensorHeader]] = {}  # announced on each slot; the first is being received
        self._asked = False
        self._stands = False
        self._held: list[Callable[[], None]] = []  # what waits for the other way to stand

    @abc.abstractmethod
    def _open_side(self) -> None:
        """Begin to set up the other way. The peer has proven who it is."""

    @abc.abstractmethod
    def _send_beside(self, slot: int, number: int, data: memoryview, sent: Callable[[], None]) -> None:
        """Send `data`; calls `sent` on the loop once its memory may be written. Failures end in `broken`."""

    @abc.abstractmethod
    def _receive_beside(self, slot: int, number: int, raw: torch.Tensor, landed: Callable[[], None]) -> None:
        """Fill `raw`, flat uint8; calls `landed` on the loop. Keeps it alive until nobody can write to it any more."""

    @abc.abstractmethod
    def _close_side(self) -> None:
        """Let go of the other way, at once."""

    def open_side(self) -> None:
        """For the endpoint: the peer said hello."""
        if not self._asked and not self.gone:
            self._asked = True
            self._open_side()

    @property
    def stands(self) -> bool:
        """Whether tensors can pass the other way."""
        return self._stands

    @property
    def settled(self) -> bool:
        """Whether the other way stands, or never will."""
        return self._stands or self.gone

    def _side_stands(self) -> None:
        self._stands = True
        self._beside.side_settled()
        held, self._held = self._held, []
        for action in held:
            action()

    def _once_it_stands(self, action: Callable[[], None]) -> None:
        if self._stands:
            action()
        else:
            self._held.append(action)

    def _shut(self) -> None:
        super()._shut()
        self._held.clear()
        self._close_side()

    # ---- tensors ----

    def put_tensor(self, slot: int, header: bytes, data: memoryview, sent: Callable[[], None]) -> None:
        """See `Channel`."""
        if self.gone or not data.nbytes:
            super().put_tensor(slot, header, data, sent)
            return
        super().put_tensor(slot, header, memoryview(b""), _nothing)
        number = self._sent_beside[slot]
        self._sent_beside[slot] += 1
        self._once_it_stands(lambda: self._send_beside(slot, number, data, sent))

    def end_tensor(self, slot: int, header: TensorHeader, raw: torch.Tensor) -> None:
        """See `Channel`. All of a tensor means its header here."""
        coming = self._coming.setdefault(slot, deque())
        coming.append(header)
        if len(coming) == 1:
            self._once_it_stands(lambda: self._receive_next(slot))

    def _receive_next(self, slot: int) -> None:
        coming = self._coming[slot]
        while coming and not self.gone:
            header = coming[0]
            size_bytes = payload_bytes(header)
            raw = torch.empty(size_bytes, dtype=torch.uint8)
            if size_bytes:
                number = self._received_beside[slot]
                self._received_beside[slot] += 1
                self._receive_beside(slot, number, raw, lambda: self._landed(slot, raw))  # noqa: B023 (left at once)
                return
            coming.popleft()
            super().end_tensor(slot, header, raw)

    def _landed(self, slot: int, raw: torch.Tensor) -> None:
        if not self.gone:
            super().end_tensor(slot, self._coming[slot].popleft(), raw)
            self._receive_next(slot)

    def begin_tensor(self, frame: Frame, encoded: bytes | memoryview) -> tuple[TensorHeader, int]:
        """See `Channel`. Nothing of the tensor follows its header here."""
        return super().begin_tensor(frame, encoded)[0], 0

    def _say_side(self, body: bytes) -> None:
        self.put(Kind.SIDE, 0, body)


class BesideEndpoint(TcpEndpoint):
    """Sets up the other way as soon as a peer has said hello; connecting ends when it stands."""

    def _attach(self, peer: Peer) -> None:
        super()._attach(peer)
        self._beside(peer).open_side()

    def _beside(self, peer: Peer) -> BesideChannel:
        return cast("BesideChannel", self.channels[peer])

    def side_settled(self) -> None:
        """For channels: one stands."""
        self._tell()

    async def _connect_in_time(self, peer: Peer, absent: list[str]) -> None:
        await super()._connect_in_time(peer, absent)
        try:
            async with self.spec.clock.timeout(self.spec.open_timeout_s):
                while peer in self._fates and not self._beside(peer).settled and not self._closed:
                    await self.news()
        except TimeoutError:
            absent.append(f"{peer} (said hello, but can't be reached over {self.scheme})")
            return
        if peer in self._fates and not self._beside(peer).stands and not self._closed:
            why = self.losses[-1] if self.losses else "it closed"
            raise HandshakeError(f"{peer} was not reached over {self.scheme}: {why}")


def _nothing() -> None:
    pass
