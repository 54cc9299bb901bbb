"""`memory://`: peers in one process. Real copies, no sockets, no polling; the same result each time.

Peers find each other through the objects of a `MemoryRendezvous`. Works on a loop with virtual time, and between loops
in different threads.
"""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import torch

from pipelined.errors import ConfigError, HandshakeError
from pipelined.transport import Capabilities
from pipelined.transport.endpoint import BaseEndpoint
from pipelined.transport.hello import check_hello
from pipelined.transport.lanes import MessageLane, OwnedParcel, TensorLane, copy_sliced, raw_bytes
from pipelined.transport.options import integer_option, known_options

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipelined.messages import Peer, TensorHeader
    from pipelined.transport import EndpointSpec, Lane

__all__ = ["Board", "MemoryEndpoint", "MemoryTransport", "board_of"]


class MemoryTransport:
    """`memory://?window=N`."""

    scheme = "memory"
    capabilities = Capabilities(messages=True, tensors=True)

    def __init__(self, **options: str) -> None:
        known_options(self.scheme, options, ("window",))
        self._window = integer_option(self.scheme, options, "window", at_least=1)

    async def open(self, spec: EndpointSpec) -> MemoryEndpoint:
        """See `Transport`."""
        board = board_of(spec, self.scheme)
        return await MemoryEndpoint(spec, self.capabilities, board, self._window or spec.window).connect_first()


def board_of(spec: EndpointSpec, scheme: str) -> Board:
    """The board of a rendezvous for one scheme.

    Raises:
        ConfigError: The rendezvous is none of one process.
    """
    objects = getattr(spec.rendezvous, "objects", None)
    if not isinstance(objects, dict):
        raise ConfigError(f"{scheme}:// links peers of one process: it needs a MemoryRendezvous; use shm:// otherwise")
    board = objects.setdefault(scheme, Board())
    assert isinstance(board, Board)
    return board


class Board:
    """The open endpoints of one rendezvous, and who waits for another one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._endpoints: dict[Peer, list[MemoryEndpoint]] = {}

    def add(self, endpoint: MemoryEndpoint) -> None:
        """It is open; everybody looks again."""
        with self._lock:
            of_peer = self._endpoints.setdefault(endpoint.me, [])
            if any(other.spec.epoch == endpoint.spec.epoch for other in of_peer):
                raise HandshakeError(f"{endpoint.me} is already open in epoch {endpoint.spec.epoch}; close it first")
            of_peer.append(endpoint)
            everybody = [other for others in self._endpoints.values() for other in others]
        for other in everybody:
            other.call(other.look_again)

    def remove(self, endpoint: MemoryEndpoint) -> None:
        """It closed."""
        with self._lock:
            of_peer = self._endpoints[endpoint.me]
            of_peer.remove(endpoint)
            if not of_peer:
                del self._endpoints[endpoint.me]

    def latest(self, peer: Peer) -> MemoryEndpoint | None:
        """The endpoint of the highest epoch."""
        with self._lock:
            return max(self._endpoints.get(peer, ()), key=lambda endpoint: endpoint.spec.epoch, default=None)


class _Messages(MessageLane):
    def __init__(self, near: MemoryEndpoint, far: MemoryEndpoint, lane: Lane) -> None:
        super().__init__(near.me, far.me, lane, near.spec.epoch, near.window, near.spec.max_message_bytes)
        self._far = far

    def transmit(self, frame: bytes) -> None:
        self._far.call(self._far.arrive_message, self.me, self.lane, bytes(memoryview(frame)))

    def consumed(self) -> None:
        self._far.call(self._far.grant_message, self.me, self.lane)


class _Tensors(TensorLane):
    def __init__(self, near: MemoryEndpoint, far: MemoryEndpoint, lane: Lane) -> None:
        super().__init__(near.me, far.me, lane, near.spec.epoch, near.window)
        self._far = far

    def transmit(self, header: TensorHeader, tensor: torch.Tensor, sent: Callable[[], None]) -> None:
        copy = torch.empty(tensor.nbytes, dtype=torch.uint8)

        def copied() -> None:
            if self.alive:
                self._far.call(self._far.arrive_tensor, self.me, self.lane, header, copy)
            sent()

        copy_sliced(copy, raw_bytes(tensor), copied, wanted=lambda: self.alive)


class MemoryEndpoint(BaseEndpoint):
    """One peer of one process. What other endpoints do to it goes through `call`, so that it happens on its loop."""

    def __init__(self, spec: EndpointSpec, capabilities: Capabilities, board: Board, window: int) -> None:
        super().__init__(spec, capabilities)
        self.window = window
        self._board = board
        self._linked: dict[Peer, MemoryEndpoint] = {}
        board.add(self)

    def call(self, callback: Callable[..., None], *args: object) -> None:
        """Run a callback on this endpoint's loop, soon and in the order of calls."""
        if asyncio.get_running_loop() is self.loop:
            self.loop.call_soon(callback, *args)
        elif not self.loop.is_closed():
            self.loop.call_soon_threadsafe(callback, *args)

    # ---- called by the other side ----

    def look_again(self) -> None:
        """Somebody opened."""
        self._tell()

    def link(self, other: MemoryEndpoint) -> None:
        """Both hellos fit."""
        if not self._closed:
            self._linked.setdefault(other.me, other)
            self._attach(other.me)

    def refuse(self, peer: Peer, error: HandshakeError) -> None:
        """The hellos do not fit, and `peer` has said so."""
        self.refusals[peer] = error
        self._tell()

    def arrive_message(self, peer: Peer, lane: Lane, frame: bytes) -> None:
        """A frame came."""
        self.messages(peer, lane).arrive(frame)

    def grant_message(self, peer: Peer, lane: Lane) -> None:
        """A frame was consumed there."""
        self.messages(peer, lane).grant()

    def arrive_tensor(self, peer: Peer, lane: Lane, header: TensorHeader, raw: torch.Tensor) -> None:
        """A tensor came."""
        far = self._linked[peer]
        self.tensors(peer, lane).arrive(
            OwnedParcel(header, raw, lambda: far.call(far.grant_tensor, self.me, lane)),
        )

    def grant_tensor(self, peer: Peer, lane: Lane) -> None:
        """A tensor was released there."""
        self.tensors(peer, lane).grant()

    # ---- what the base asks for ----

    def _make_messages(self, peer: Peer, lane: Lane) -> MessageLane:
        return _Messages(self, self._linked[peer], lane)

    def _make_tensors(self, peer: Peer, lane: Lane) -> TensorLane:
        return _Tensors(self, self._linked[peer], lane)

    async def _connect(self, peer: Peer) -> None:
        while peer not in self._linked:
            self._raise_if_closed()
            if (refusal := self.refusals.pop(peer, None)) is not None:
                raise refusal
            other = self._board.latest(peer)
            if other is not None and other.spec.epoch >= self.spec.epoch:
                try:
                    check_hello(self.hello, other.hello, peer)
                except HandshakeError as error:
                    if other.spec.epoch == self.spec.epoch:  # else only this side is out of date
                        other.call(other.refuse, self.me, error)
                    raise
                other.call(other.link, self)
                self.link(other)
            else:  # absent, or an incarnation that is about to go
                await self.news()

    def _absence(self, peer: Peer) -> str:
        other = self._board.latest(peer)
        return f"{peer} (which is still in epoch {other.spec.epoch})" if other is not None else str(peer)

    def _say_bye(self, peer: Peer) -> None:
        far = self._linked[peer]
        far.call(far._peer_ended, self.me)

    def _shut(self) -> None:
        self._board.remove(self)
        for peer in self._open_peers():
            far = self._linked[peer]
            if far.loop is self.loop:
                far._peer_lost(self.me, "it aborted")
            else:
                far.call(far._peer_lost, self.me, "it aborted")
