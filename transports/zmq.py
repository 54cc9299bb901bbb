"""`zmq://`: messages and tensors over ZMQ, between processes of one host (ipc) or several (tcp).

Every endpoint binds one ROUTER and reads from it alone. To each peer it dials a DEALER for frames and, when the first
tensor is posted, one more for each tensor lane, so that a large tensor holds up nothing else. Plain sockets in
non-blocking mode, driven from the loop by their file descriptor. That is edge-triggered: it tells only that something
changed, so whoever looks has to go on until there is nothing left.

Options: the address to listen on (`zmq://10.0.0.7`; else ipc), `window`, `heartbeat_ms`. Beyond loopback a shared
secret is needed, and everything is encrypted with CURVE, under keys made for this epoch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

import zmq
from zmq.utils.monitor import parse_monitor_message

from pipelined.errors import ConfigError, HandshakeError, ProtocolError
from pipelined.transport import Capabilities, FileRendezvous
from pipelined.transport.options import integer_option, known_options

from . import greeting
from .peering import SocketEndpoint
from .wire import LANES, Channel, Frame, Kind
from .zmq_route import COPY_BELOW_BYTES, PART_BYTES, WHOLE_BYTES, Route

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipelined.messages import Peer
    from pipelined.transport import EndpointSpec

__all__ = ["ZmqEndpoint", "ZmqTransport"]

_HEARTBEAT_MS = 500
_BEATS_MISSED = 4
_TURN_FRAMES = 64
_MAX_IPC_PATH = 100


class ZmqTransport:
    """`zmq://[address]?window=N&heartbeat_ms=M`."""

    scheme = "zmq"

    def __init__(self, **options: str) -> None:
        known_options(self.scheme, options, ("address", "window", "heartbeat_ms"))
        self._address = options.get("address", "")
        self._window = integer_option(self.scheme, options, "window", at_least=1)
        self._heartbeat_ms = integer_option(self.scheme, options, "heartbeat_ms", at_least=1) or _HEARTBEAT_MS
        self.capabilities = Capabilities(
            messages=True,
            tensors=True,
            processes=True,
            hosts=bool(self._address),
            window=self._window or 64,
            peer_lost_bound_s=self._heartbeat_ms * (_BEATS_MISSED + 2) / 1000,
        )

    async def open(self, spec: EndpointSpec) -> ZmqEndpoint:
        """See `Transport`.

        Raises:
            ConfigError: The address can't be listened on, or lacks a secret.
        """
        host, private = "", True
        if self._address:
            host, private = await greeting.listening_host(self.scheme, self._address, spec.secret)
            if not private and not zmq.has("curve"):
                raise ConfigError(f"zmq://{host} leaves this host, and this build of ZMQ has no CURVE; use tcp://")
        spec = dataclasses.replace(spec, window=self._window or spec.window)
        endpoint = ZmqEndpoint(spec, self.capabilities, self._heartbeat_ms)
        try:
            endpoint.listen(host, encrypted=not private)
        except BaseException:
            endpoint.abort()  # a context that is dropped with a socket open waits for ever
            raise
        return await endpoint.connect_first()


class _Watched:
    """A socket whose file descriptor the loop watches."""

    def __init__(self, endpoint: ZmqEndpoint, socket: zmq.Socket[bytes], callback: Callable[[], None]) -> None:
        self.socket = socket
        self._loop = endpoint.loop
        self._descriptor = int(socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._descriptor, callback)
        self._loop.call_soon(callback)  # the descriptor gives no sign before the socket has been found empty once

    def close(self) -> None:
        """Stop watching, before the number can be another descriptor's."""
        self._loop.remove_reader(self._descriptor)
        self.socket.close(linger=0)


class _Flight:
    """A tensor that ZMQ reads from in place: the parts not free yet, and whom to tell once all are."""

    def __init__(self, endpoint: ZmqEndpoint, sent: Callable[[], None]) -> None:
        self._endpoint = endpoint
        self._sent = sent
        self._parts: list[tuple[weakref.ref[memoryview], zmq.MessageTracker]] = []
        self._sealed = False
        endpoint.flights.add(self)  # nobody else holds it: ZMQ knows the memory only

    def send(self, socket: zmq.Socket[bytes], part: memoryview) -> None:
        """Hand over one part."""
        tracker = socket.send(part, zmq.NOBLOCK, copy=False, track=True)
        assert tracker is not None
        # ZMQ's own thread drops the part when it has done with the memory; that is what wakes this loop.
        self._parts.append((weakref.ref(part, self._freed), tracker))

    def seal(self) -> None:
        """All parts are handed over."""
        self._sealed = True
        self._look()

    def _freed(self, _: object) -> None:  # on ZMQ's thread, or on the loop's
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._endpoint.loop.call_soon_threadsafe(self._look)

    def _look(self) -> None:
        self._parts = [(part, tracker) for part, tracker in self._parts if not tracker.done]
        if self._sealed and not self._parts:
            self._sealed = False
            self._endpoint.flights.discard(self)
            self._sent()


class _ZmqChannel(Channel):
    """What goes out to one peer."""

    def __init__(self, endpoint: ZmqEndpoint, peer: Peer, address: greeting.Address) -> None:
        super().__init__(endpoint, peer)
        self._zmq = endpoint
        self._address = address
        self._tensors: dict[int, zmq.Socket[bytes]] = {}
        frames = endpoint.context.socket(zmq.DEALER)
        self._monitor = _Watched(endpoint, frames.get_monitor_socket(zmq.Event.ALL), self._on_event)
        self._frames = _Watched(endpoint, frames, self._on_refusal)
        frames.setsockopt(zmq.HEARTBEAT_IVL, endpoint.heartbeat_ms)
        frames.setsockopt(zmq.HEARTBEAT_TIMEOUT, endpoint.heartbeat_ms * _BEATS_MISSED)
        self._dial(frames, 0)

    def _dial(self, socket: zmq.Socket[bytes], slot: int) -> None:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 0)  # the lanes' windows are what bounds the queue
        socket.setsockopt(zmq.RECONNECT_IVL, -1)  # a broken link is a lost peer, never a gap in a lane
        socket.setsockopt(zmq.IPV6, 1)
        if self._address.public_key:
            public_key, secret_key = zmq.curve_keypair()
            socket.setsockopt(zmq.CURVE_PUBLICKEY, public_key)
            socket.setsockopt(zmq.CURVE_SECRETKEY, secret_key)
            socket.setsockopt(zmq.CURVE_SERVERKEY, self._address.public_key.encode())
        try:
            socket.connect(self._address.url)
        except zmq.ZMQError as error:
            raise HandshakeError(
                f"{self.peer} published {self._address.url}, which can't be dialled: {error}"
            ) from error
        hello = self._zmq.greeter.hello(self._address.token.encode())
        with contextlib.suppress(zmq.Again):  # refused already: the monitor tells, and the address is tried again
            socket.send_multipart([Frame.pack(Kind.HELLO, slot, self._window), hello], zmq.NOBLOCK)

    def put(self, kind: Kind, slot: int, body: bytes) -> None:
        if self.gone:
            return
        frames = self._frames.socket
        with contextlib.suppress(zmq.Again):  # no connection: the monitor has told, or will
            frames.send_multipart([self.pack(kind, slot), body], zmq.NOBLOCK, copy=len(body) < COPY_BELOW_BYTES)
        if int(frames.getsockopt(zmq.EVENTS)) & zmq.POLLIN:  # sending may have eaten the sign that something came
            self._on_refusal()

    def put_tensor(self, slot: int, header: bytes, data: memoryview, sent: Callable[[], None]) -> None:
        if self.gone:
            return
        socket = self._tensors.get(slot)
        if socket is None:
            socket = self._tensors[slot] = self._zmq.context.socket(zmq.DEALER)
            self._dial(socket, slot)
        if data.nbytes < COPY_BELOW_BYTES:
            with contextlib.suppress(zmq.Again):
                socket.send_multipart([self.pack(Kind.TENSOR, slot), header, data], zmq.NOBLOCK)
            sent()
            return
        flight = _Flight(self._zmq, sent)
        with contextlib.suppress(zmq.Again):
            socket.send_multipart([self.pack(Kind.TENSOR, slot), header], zmq.NOBLOCK | zmq.SNDMORE)
            if data.nbytes <= WHOLE_BYTES:
                flight.send(socket, data[:])
            else:
                socket.send(b"", zmq.NOBLOCK)
                for at in range(0, data.nbytes, PART_BYTES):
                    socket.send(Frame.pack(Kind.PART, slot), zmq.NOBLOCK | zmq.SNDMORE)
                    flight.send(socket, data[at : at + PART_BYTES])
        flight.seal()

    def _on_refusal(self) -> None:
        while not self.gone:
            try:
                parts = self._frames.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(parts) == 2:
                self._zmq.refused(self, parts[1].decode(errors="replace"))

    def _on_event(self) -> None:
        while not self.gone:
            try:
                event = zmq.Event(parse_monitor_message(self._monitor.socket.recv_multipart(zmq.NOBLOCK))["event"])
            except zmq.Again:
                return
            if event in _BROKEN:
                self._on_refusal()
                self._zmq.drain()  # what arrived before counts
                self._zmq.broken(self, _BROKEN[event])

    def _shut(self) -> None:
        # In this order: ZMQ reports that the monitor is off, and would wait for ever if nobody were left to read it.
        self._frames.socket.disable_monitor()
        self._frames.close()
        self._monitor.close()
        for socket in self._tensors.values():
            socket.close(linger=0)


_BROKEN = {
    zmq.EVENT_DISCONNECTED: "the connection broke, or its heartbeat stopped",
    zmq.EVENT_CLOSED: "the connection could not be made",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "the handshake of ZMQ failed",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "what listens there does not speak ZMQ",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "the keys do not fit",
}
"""Event of a monitor -> what it means for a link that never reconnects."""


class ZmqEndpoint(SocketEndpoint):
    """A context with one thread for all links, and the socket that everybody dials."""

    scheme = "zmq"

    def __init__(self, spec: EndpointSpec, capabilities: Capabilities, heartbeat_ms: int) -> None:
        super().__init__(spec, capabilities)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self.heartbeat_ms = heartbeat_ms
        self.flights: set[_Flight] = set()
        self._router: _Watched | None = None
        self._routes: dict[bytes, Route] = {}
        self._token = b""
        self._own_directory: Path | None = None

    def listen(self, host: str, *, encrypted: bool) -> None:
        """Bind, and publish where.

        Raises:
            ConfigError: It can't be bound.
        """
        router = self.context.socket(zmq.ROUTER)
        router.setsockopt(zmq.LINGER, 0)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # Above what all windows allow: reading never stops, or a busy peer's heartbeat would stop too.
        router.setsockopt(zmq.RCVHWM, 4 * LANES * self.spec.window + 1000)
        router.setsockopt(zmq.MAXMSGSIZE, max(self.spec.max_message_bytes, WHOLE_BYTES))
        router.setsockopt(zmq.IPV6, 1)
        public_key = ""
        if encrypted:
            public, secret = zmq.curve_keypair()
            public_key = public.decode()
            router.setsockopt(zmq.CURVE_SERVER, 1)
            router.setsockopt(zmq.CURVE_SECRETKEY, secret)
        url = self._url(host)
        try:
            router.bind(url)
        except zmq.ZMQError as error:
            raise ConfigError(f"zmq:// can't listen on {url}: {error}") from error
        self._router = _Watched(self, router, self.drain)
        url = bytes(router.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()
        self._token = greeting.publish(self.scheme, self.spec, url, public_key).token.encode()
        self.drain()

    def _url(self, host: str) -> str:
        if host:
            return f"tcp://[{host}]:*" if ":" in host else f"tcp://{host}:*"
        name = f"zmq.{self.me.rank}.{self.spec.epoch}.{id(self):x}"
        board = self.spec.rendezvous
        if isinstance(board, FileRendezvous) and len(str(board.directory / name)) < _MAX_IPC_PATH:
            return f"ipc://{board.directory / name}"
        self._own_directory = Path(tempfile.mkdtemp(prefix="pipelined-"))
        return f"ipc://{self._own_directory / name}"

    def _dial(self, peer: Peer, address: greeting.Address) -> Channel:
        return _ZmqChannel(self, peer, address)

    def _stop(self) -> None:
        if self._router is not None:
            self._router.close()
        self.context.destroy(linger=0)
        if self._own_directory is not None:
            shutil.rmtree(self._own_directory, ignore_errors=True)

    # ---- what comes in ----

    def drain(self) -> None:
        """Read until nothing is left; in turns, so that the loop stays responsive."""
        copied_bytes = frames = 0
        while self._router is not None and not self._closed:
            if frames == _TURN_FRAMES or copied_bytes >= PART_BYTES:
                self.loop.call_soon(self.drain)
                return
            try:
                route = self._router.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            frames += 1
            copied_bytes += self._take(route, self._rest(self._router.socket))
            if self._router is None or self._closed or not int(self._router.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                return  # cheaper to ask than to fail

    @staticmethod
    def _rest(router: zmq.Socket[bytes]) -> list[zmq.Frame]:
        """The other parts of a message; no more than any of ours has are kept."""
        parts: list[zmq.Frame] = []
        more = True
        while more:
            part = router.recv(copy=False)
            more = bool(part.more)
            if len(parts) < 4:
                parts.append(part)
        return parts

    def _take(self, route: bytes, parts: list[zmq.Frame]) -> int:
        link = self._routes.get(route)
        if link is not None and link.channel.gone:
            del self._routes[route]
            return 0
        try:
            frame = Frame.unpack(parts[0].buffer)
            if link is not None:
                return link.take(frame, parts)
            if frame.kind is Kind.HELLO and len(parts) == 2:
                self._greet(route, frame, parts[1].bytes)
        except HandshakeError as error:
            self._refuse(route, str(error))
        except ProtocolError as error:
            if link is not None:
                self.broken(link.channel, f"it broke the protocol: {error}")
        return 0

    def _greet(self, route: bytes, frame: Frame, hello: bytes) -> None:
        channel = self.admit(hello, self._token, frame.number)
        if any(link.channel is channel and link.slot == frame.slot for link in self._routes.values()):
            raise HandshakeError(f"{channel.peer} has dialled {self.me} before")
        self._routes[route] = Route(channel, frame.slot)

    def _refuse(self, route: bytes, why: str) -> None:
        assert self._router is not None
        with contextlib.suppress(zmq.ZMQError):  # it is gone already
            self._router.socket.send_multipart([route, Frame.pack(Kind.REFUSE), why.encode()], zmq.NOBLOCK)
