"""`tcp://`: messages and tensors over plain TCP, with no dependency; between processes of one host or several.

Every endpoint listens on a port of its own and dials one connection to each peer, which carries all that it sends
there. Sockets are non-blocking and driven from the loop; tensors are sent from and received into their own memory. On
every connection both sides prove, over fresh challenges, that they know the secret; nothing is encrypted.

Options: the address to listen on (`tcp://10.0.0.7`, else 127.0.0.1; beyond loopback a shared secret is needed),
`window`, `heartbeat_ms` (a peer whose loop is silent for ten of them is lost).
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import secrets
import socket
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from pipelined.errors import ConfigError, HandshakeError, ProtocolError
from pipelined.transport import Capabilities
from pipelined.transport.options import integer_option, known_options

from . import greeting
from .peering import SocketEndpoint
from .tcp_frames import Inbox, Outbox, encode
from .wire import Channel, Frame, Kind

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from pipelined.messages import Peer
    from pipelined.transport import EndpointSpec

__all__ = ["TcpChannel", "TcpEndpoint", "TcpTransport"]

_HEARTBEAT_MS = 1000
_BEATS_MISSED = 10
_TURN_BYTES = 1 << 20
"""About 0.3 ms of copying to or from the kernel: the longest that one socket holds the loop."""
_HELLO_TIMEOUT_S = 10.0
_MAX_STRANGERS = 128
_NONCE_BYTES = 16
_ACCEPT_PAUSE_S = 0.1


class TcpTransport:
    """`tcp://[address]?window=N&heartbeat_ms=M`."""

    scheme = "tcp"

    def __init__(self, **options: str) -> None:
        known_options(self.scheme, options, ("address", "window", "heartbeat_ms"))
        self._address = options.get("address", "127.0.0.1")
        self._window = integer_option(self.scheme, options, "window", at_least=1)
        self._heartbeat_ms = integer_option(self.scheme, options, "heartbeat_ms", at_least=1) or _HEARTBEAT_MS
        self.capabilities = Capabilities(
            messages=True,
            tensors=True,
            processes=True,
            hosts=True,
            window=self._window or 64,
            peer_lost_bound_s=self._heartbeat_ms * (_BEATS_MISSED + 2) / 1000,
        )

    async def open(self, spec: EndpointSpec) -> TcpEndpoint:
        """See `Transport`.

        Raises:
            ConfigError: The address can't be listened on, or lacks a secret.
        """
        host, _ = await greeting.listening_host(self.scheme, self._address, spec.secret)
        spec = dataclasses.replace(spec, window=self._window or spec.window)
        endpoint = TcpEndpoint(spec, self.capabilities, self._heartbeat_ms / 1000)
        endpoint.listen(host)
        return await endpoint.connect_first()


class _Stream:
    """A connected or connecting socket that the loop watches."""

    def __init__(self, endpoint: TcpEndpoint, sock: socket.socket, inbox: Inbox, broken: Callable[[str], None]) -> None:
        self.loop = endpoint.loop
        self.sock = sock
        self.heard_s = endpoint.spec.clock.now()
        self._clock = endpoint.spec.clock
        self._inbox = inbox
        self._broken = broken
        self._writing = False
        self._failed = False
        self.open = True
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.loop.add_reader(sock.fileno(), self.read)

    def read(self) -> None:
        """Take in what is here; in turns, so that the loop stays responsive."""
        turn_bytes = 0
        while self.open and not self._failed and turn_bytes < _TURN_BYTES:
            targets = self._inbox.targets()
            try:
                count = self.sock.recvmsg_into(targets)[0]
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self._fail(f"its connection broke: {error}")
                return
            if not count:
                self._fail("it closed its connection")
                return
            self.heard_s = self._clock.now()
            turn_bytes += count
            room = sum(map(len, targets))
            try:
                self._inbox.came(count)
            except ProtocolError as error:
                self._fail(f"it broke the protocol: {error}")
                return
            if count < room:
                return

    def _fail(self, why: str) -> None:
        self._failed = True
        if self.open:
            self.loop.remove_reader(self.sock.fileno())
        self._broken(why)

    def want_write(self, callback: Callable[[], None] | None) -> None:
        """Call back when the socket takes more, or no longer."""
        if callback is not None and not self._writing:
            self.loop.add_writer(self.sock.fileno(), callback)
        elif callback is None and self._writing:
            self.loop.remove_writer(self.sock.fileno())
        self._writing = callback is not None

    def say(self, header: bytes, body: bytes) -> None:
        """Send a frame of the handshake: it fits into the empty buffer of a new connection, or the peer is not well."""
        with contextlib.suppress(OSError):
            self.sock.send(encode(header, len(body)) + body)

    def close(self) -> None:
        """Close at once. Idempotent."""
        if self.open:
            self.open = False
            self.want_write(None)
            self.loop.remove_reader(self.sock.fileno())
            self.sock.close()


class TcpChannel(Channel):
    """What goes out to one peer."""

    def __init__(self, endpoint: TcpEndpoint, peer: Peer, address: greeting.Address) -> None:
        super().__init__(endpoint, peer)
        self.inlet: _Stream | None = None  # the connection that the peer dialled
        self._tcp = endpoint
        self._token = address.token.encode()
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self._welcome = False
        self._outbox = Outbox(self)
        self._pumping = False
        parts = urlsplit(address.url)
        family = socket.AF_INET6 if ":" in (parts.hostname or "") else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        inbox = Inbox(self._handshake, endpoint.spec.max_message_bytes)
        self._stream = _Stream(endpoint, sock, inbox, self.broken)
        code = sock.connect_ex((parts.hostname, parts.port))
        if code not in (0, errno.EINPROGRESS):
            endpoint.loop.call_soon(self.broken, f"{address.url} can't be dialled: {os.strerror(code)}")

    def _handshake(self, frame: Frame, body: bytes) -> None:
        if frame.kind is Kind.REFUSE:
            self._tcp.refused(self, body.decode(errors="replace"))
        elif frame.kind is Kind.HELLO and not self._welcome and len(body) == _NONCE_BYTES:  # its challenge
            hello = self._tcp.greeter.hello(self._token + body)
            self._stream.say(Frame.pack(Kind.HELLO, 0, self._window), self._nonce + hello)
        elif frame.kind is Kind.WELCOME and self._tcp.greeter.check_answer(self._token + self._nonce, body):
            self._welcome = True
            self._pump()
        elif frame.kind is Kind.WELCOME:
            self._tcp.refused(self, f"{self.peer} and {self._tcp.me} were given different secrets")
        else:
            raise ProtocolError(f"a {frame.kind.name} frame in answer to a hello")

    def put(self, kind: Kind, slot: int, body: bytes) -> None:
        """See `Channel`."""
        if not self.gone:
            self._outbox.frame(self.pack(kind, slot), body)
            self._pump()

    def put_tensor(self, slot: int, header: bytes, data: memoryview, sent: Callable[[], None]) -> None:
        """See `Channel`."""
        if not self.gone:
            self._outbox.tensor(slot, header, data, sent)
            self._pump()

    def _pump(self) -> None:
        if not self._welcome or self._pumping:
            return
        self._pumping = True
        try:
            self._send_turn()
        finally:
            self._pumping = False

    def _send_turn(self) -> None:
        turn_bytes = 0
        while not self.gone:
            pieces = self._outbox.next()
            if not pieces:
                self._stream.want_write(None)
                return
            if turn_bytes >= _TURN_BYTES:
                break
            try:
                count = self._stream.sock.sendmsg(pieces)
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:
                self.broken(f"its connection broke: {error}")
                return
            turn_bytes += count
            self._outbox.took(count)
        if not self.gone:
            self._stream.want_write(self._pump)

    def broken(self, why: str) -> None:
        """Either connection ended."""
        if self.inlet is not None and self._stream.open:
            self.inlet.read()  # what arrived before counts
        self._tcp.broken(self, why)

    def beat(self, silent_s: float) -> None:
        """Say that this loop lives, and see whether the peer's has."""
        if self.inlet is not None and not self.gone:
            self.put(Kind.PING, 0, b"")
            clock = self._tcp.spec.clock
            if clock.now() - self.inlet.heard_s > silent_s:
                self.inlet.read()  # this loop itself may have been late
                if self.inlet is not None and clock.now() - self.inlet.heard_s > silent_s:
                    self.broken(f"it has been silent for {silent_s:g} s")

    def _shut(self) -> None:
        self._outbox.clear()
        self._stream.close()
        if self.inlet is not None:
            self.inlet.close()


class _Guest:
    """A connection that somebody dialled; a stranger until its hello fits."""

    def __init__(self, endpoint: TcpEndpoint, sock: socket.socket) -> None:
        self._tcp = endpoint
        self._channel: TcpChannel | None = None
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self.stream = _Stream(endpoint, sock, Inbox(self._handshake, endpoint.spec.max_message_bytes), self._broken)
        self.stream.say(Frame.pack(Kind.HELLO), self._nonce)
        clock = endpoint.spec.clock
        self._deadline = clock.call_at(clock.now() + _HELLO_TIMEOUT_S, self.close)

    def _handshake(self, frame: Frame, body: bytes) -> Channel | None:
        if frame.kind is not Kind.HELLO or len(body) < _NONCE_BYTES or not self.stream.open:
            raise ProtocolError(f"a {frame.kind.name} frame before the hello")
        nonce, hello = body[:_NONCE_BYTES], body[_NONCE_BYTES:]
        try:
            channel = self._tcp.admit(hello, self._tcp.token + self._nonce, frame.number)
            assert isinstance(channel, TcpChannel)
            if channel.inlet is not None:
                raise HandshakeError(f"{channel.peer} has dialled {self._tcp.me} before")
        except HandshakeError as error:
            self.stream.say(Frame.pack(Kind.REFUSE), str(error).encode())
            self.close()
            return None
        self._deadline.cancel()
        self._channel = channel
        channel.inlet = self.stream
        self._tcp.forget(self)
        self.stream.say(Frame.pack(Kind.WELCOME), self._tcp.greeter.answer(self._tcp.token + nonce))
        return channel

    def _broken(self, why: str) -> None:
        if self._channel is not None:
            self._channel.broken(why)
        self.close()

    def close(self) -> None:
        """Hang up. Idempotent."""
        self._deadline.cancel()
        self.stream.close()
        self._tcp.forget(self)


class TcpEndpoint(SocketEndpoint):
    """A listening socket and a connection each way with every peer.

    Attributes:
        token: Part of every challenge of this listener.
        silence_s: A peer that is silent for so long is lost.
    """

    scheme = "tcp"

    def __init__(self, spec: EndpointSpec, capabilities: Capabilities, heartbeat_s: float) -> None:
        super().__init__(spec, capabilities)
        self.token = b""
        self.silence_s = heartbeat_s * _BEATS_MISSED
        self._heartbeat_s = heartbeat_s
        self._listener: socket.socket | None = None
        self._strangers: dict[_Guest, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def listen(self, host: str) -> None:
        """Bind, and publish where.

        Raises:
            ConfigError: It can't be bound.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.bind((host, 0))
            listener.listen(128)
        except OSError as error:
            listener.close()
            raise ConfigError(f"tcp:// can't listen on {host}: {error}") from error
        listener.setblocking(False)
        self._listener = listener
        self.loop.add_reader(listener.fileno(), self._accept)
        where = f"[{host}]" if ":" in host else host
        url = f"tcp://{where}:{listener.getsockname()[1]}"
        self.token = greeting.publish(self.scheme, self.spec, url).token.encode()
        self._beat()

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError:  # no descriptors left, most likely: wait, without turning in circles
            self.loop.remove_reader(self._listener.fileno())
            self.spec.clock.call_at(self.spec.clock.now() + _ACCEPT_PAUSE_S, self._resume)
            return
        if len(self._strangers) >= _MAX_STRANGERS:
            next(iter(self._strangers)).close()
        self._strangers[_Guest(self, sock)] = None

    def _resume(self) -> None:
        if self._listener is not None and not self._closed:
            self.loop.add_reader(self._listener.fileno(), self._accept)

    def forget(self, guest: _Guest) -> None:
        """It is no stranger any more, or it went."""
        self._strangers.pop(guest, None)

    def _beat(self) -> None:
        for channel in list(self.channels.values()):
            assert isinstance(channel, TcpChannel)
            channel.beat(self.silence_s)
        clock = self.spec.clock
        self._timer = clock.call_at(clock.now() + self._heartbeat_s, self._beat)

    def _dial(self, peer: Peer, address: greeting.Address) -> Channel:
        return TcpChannel(self, peer, address)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._listener is not None:
            self.loop.remove_reader(self._listener.fileno())
            self._listener.close()
        for guest in list(self._strangers):
            guest.close()
