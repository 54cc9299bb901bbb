"""What every endpoint does the same way: keeps its links, connects with a deadline, notices losses, closes.

A transport subclasses `BaseEndpoint` and adds how bytes move: `_make_messages` and `_make_tensors` (links), `_connect`,
and three steps of closing. Everything runs on the owner's loop.
"""

from __future__ import annotations

import abc
import asyncio
from typing import TYPE_CHECKING, Self, TypeVar

from pipelined.errors import ClosedError, ConfigError, HandshakeError, PeerLost
from pipelined.transport.hello import hello_of
from pipelined.transport.lane_end import LaneEnd

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from pipelined.messages import Peer
    from pipelined.transport.base import Capabilities, EndpointSpec, Lane
    from pipelined.transport.message_lane import MessageLane
    from pipelined.transport.tensor_lane import TensorLane

__all__ = ["BaseEndpoint"]

L = TypeVar("L", bound=LaneEnd)

CLOSE_TIMEOUT_S = 5.0
"""How long `aclose` waits for what was posted to leave; after that it aborts."""


class _Losses:
    """Iterates over the peers lost so far and to come, until the endpoint closes."""

    def __init__(self, endpoint: BaseEndpoint) -> None:
        self._endpoint = endpoint
        self._seen = 0

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> PeerLost:
        while self._seen >= len(self._endpoint.losses):
            if self._endpoint.closed:
                raise StopAsyncIteration
            await self._endpoint.news()
        self._seen += 1
        return self._endpoint.losses[self._seen - 1]


class BaseEndpoint(abc.ABC):
    """An `Endpoint` without the moving of bytes.

    Attributes:
        spec: What it was opened with.
        hello: What it says first on every link.
        loop: Whose callbacks it may run in.
        losses: Peers lost so far.
        refusals: For transports: peers whose hello did not fit, for whoever waits to connect to them.
    """

    def __init__(self, spec: EndpointSpec, capabilities: Capabilities) -> None:
        if spec.me not in spec.world:
            raise ConfigError(f"{spec.me} is not in its own world: {', '.join(map(str, spec.world)) or 'nobody'}")
        self.spec = spec
        self.hello = hello_of(spec)
        self.loop = asyncio.get_running_loop()
        self.losses: list[PeerLost] = []
        self.refusals: dict[Peer, HandshakeError] = {}
        self._capabilities = capabilities
        self._fates: dict[Peer, Callable[[LaneEnd], None] | None] = {}
        self._messages: dict[tuple[Peer, Lane], MessageLane] = {}
        self._tensors: dict[tuple[Peer, Lane], TensorLane] = {}
        self._locks: dict[Peer, asyncio.Lock] = {}
        self._watchers: list[asyncio.Future[None]] = []
        self._parted: set[Peer] = set()
        self._closing = False
        self._closed = False

    def __repr__(self) -> str:
        state = "closed" if self._closed else "closing" if self._closing else "open"
        name = type(self).__name__
        return f"<{name} {self.me} epoch {self.spec.epoch} {state}, {len(self._fates)} peers>"

    @property
    def me(self) -> Peer:
        """See `Endpoint`."""
        return self.spec.me

    @property
    def capabilities(self) -> Capabilities:
        """See `Endpoint`."""
        return self._capabilities

    @property
    def closed(self) -> bool:
        """Whether it is closed, one way or the other."""
        return self._closed

    # ---- what a transport adds ----

    @abc.abstractmethod
    def _make_messages(self, peer: Peer, lane: Lane) -> MessageLane:
        """A new message lane; kept by the base."""

    @abc.abstractmethod
    def _make_tensors(self, peer: Peer, lane: Lane) -> TensorLane:
        """A new tensor lane; kept by the base."""

    @abc.abstractmethod
    async def _connect(self, peer: Peer) -> None:
        """Return once both have said hello and `_attach(peer)` was called, however long it takes.

        Idempotent. The base sets the deadline.

        Raises:
            HandshakeError: The hello does not fit.
        """

    def _absence(self, peer: Peer) -> str:
        """How to name a peer that did not say hello in time, with what is known of it."""
        return str(peer)

    async def _flush_wire(self) -> None:  # noqa: B027 - there may be nothing to do
        """Wait until everything transmitted has left this process."""

    @abc.abstractmethod
    def _say_bye(self, peer: Peer) -> None:
        """Tell an open peer that this is a clean end. Everything posted has left."""

    @abc.abstractmethod
    def _shut(self) -> None:
        """Let go of everything at once. Peers that were not told bye (`_open_peers`) see a loss."""

    # ---- for transports: what happens to peers ----

    def _attach(self, peer: Peer) -> None:
        """Both have said hello."""
        self._fates.setdefault(peer, None)
        self._tell()

    def _peer_ended(self, peer: Peer) -> None:
        """The peer closed cleanly, and all it sent has been handed over."""
        if peer in self._fates and self._fates[peer] is None:
            self._settle(peer, lambda lane: lane.end())

    def _peer_lost(self, peer: Peer, why: str) -> None:
        """The peer is gone without a word. Nothing if it had ended."""
        if peer in self._fates and self._fates[peer] is None:
            if not self._closed:
                self.losses.append(PeerLost(f"{self.me} lost {peer}: {why}"))
            self._settle(peer, lambda lane: lane.lose(why))

    def _settle(self, peer: Peer, fate: Callable[[LaneEnd], None]) -> None:
        self._fates[peer] = fate
        for (of, _), lane in [*self._messages.items(), *self._tensors.items()]:
            if of == peer:
                fate(lane)
        self._tell()

    def _open_peers(self) -> list[Peer]:
        """Those that have neither ended nor been lost, nor been told bye."""
        return [peer for peer, fate in self._fates.items() if fate is None and peer not in self._parted]

    async def news(self) -> None:
        """Wait until a peer attaches, ends or is lost, a hello is refused, or the endpoint closes."""
        watcher: asyncio.Future[None] = self.loop.create_future()
        self._watchers.append(watcher)
        try:
            await watcher
        finally:
            if watcher in self._watchers:
                self._watchers.remove(watcher)

    def _tell(self) -> None:
        watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            if not watcher.done():
                watcher.set_result(None)

    # ---- links ----

    def messages(self, peer: Peer, lane: Lane) -> MessageLane:
        """See `Endpoint`."""
        link = self._messages.get((peer, lane))
        if link is None:
            link = self._messages[peer, lane] = self._born(self._make_messages, peer, lane)
        return link

    def tensors(self, peer: Peer, lane: Lane) -> TensorLane:
        """See `Endpoint`."""
        link = self._tensors.get((peer, lane))
        if link is None:
            link = self._tensors[peer, lane] = self._born(self._make_tensors, peer, lane)
        return link

    def _born(self, make: Callable[[Peer, Lane], L], peer: Peer, lane: Lane) -> L:
        if peer not in self._fates:
            known = ", ".join(map(str, self._fates)) or "nobody"
            raise ConfigError(f"{self.me} is not connected to {peer}; connected to {known}: await connect() first")
        link = make(peer, lane)
        if self.spec.taps:
            link.set_taps(tuple(tap(self, link) for tap in self.spec.taps))
        if (fate := self._fates[peer]) is not None:
            fate(link)
        if self._closing or self._closed:
            link.close_local()
        return link

    def _lanes(self) -> Iterator[LaneEnd]:
        yield from self._messages.values()
        yield from self._tensors.values()

    # ---- connecting ----

    async def connect(self, peer: Peer) -> None:
        """See `Endpoint`."""
        await self._connect_all((peer,))

    async def connect_first(self) -> Self:
        """For transports: connect to all of `spec.connect`, or shut down again.

        Raises:
            HandshakeError: Names every peer that was absent, or the first that does not fit and how.
        """
        try:
            await self._connect_all(self.spec.connect)
        except BaseException:
            self.abort()
            raise
        return self

    async def _connect_all(self, peers: tuple[Peer, ...]) -> None:
        absent: list[str] = []
        try:
            async with asyncio.TaskGroup() as group:
                for peer in peers:
                    group.create_task(self._connect_in_time(peer, absent))
        except* (HandshakeError, ClosedError) as several:
            raise several.exceptions[0].with_traceback(None) from None
        if absent:
            raise HandshakeError(
                f"{self.me} waited {self.spec.open_timeout_s:g} s for {', '.join(absent)}; "
                "see whether each of them runs and was given the same rendezvous and epoch"
            )

    async def _connect_in_time(self, peer: Peer, absent: list[str]) -> None:
        if peer not in self.spec.world or peer == self.me:
            raise HandshakeError(f"{peer} is not another peer of {self.me}'s world; it can't be connected to")
        try:
            async with self.spec.clock.timeout(self.spec.open_timeout_s), self._locks.setdefault(peer, asyncio.Lock()):
                if peer not in self._fates:
                    self._raise_if_closed()
                    await self._connect(peer)
        except TimeoutError:
            absent.append(self._absence(peer))

    def _raise_if_closed(self) -> None:
        if self._closing or self._closed:
            raise ClosedError(f"{self!r} can't connect any more")

    # ---- losses and the end ----

    @property
    def lost(self) -> AsyncIterator[PeerLost]:
        """See `Endpoint`. Each iterator sees all losses, those of before it was made too."""
        return _Losses(self)

    async def aclose(self) -> None:
        """See `Endpoint`. If what was posted can't leave within `CLOSE_TIMEOUT_S`, this is an abort."""
        if self._closing:
            while not self._closed:
                await self.news()
            return
        if self._closed:
            return
        self._closing = True
        for lane in self._lanes():
            lane.begin_close()
        try:
            async with self.spec.clock.timeout(CLOSE_TIMEOUT_S):
                for lane in list(self._lanes()):
                    await lane.wait_flushed()
                for peer in self._open_peers():
                    self._say_bye(peer)
                    self._parted.add(peer)
                await self._flush_wire()
        except TimeoutError:
            pass
        finally:
            self.abort()

    def abort(self) -> None:
        """See `Endpoint`."""
        if self._closed:
            return
        self._closed = True
        self._shut()
        for lane in self._lanes():
            lane.close_local()
        self._tell()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None or isinstance(error, asyncio.CancelledError):
            await self.aclose()
        else:
            self.abort()
