"""`unix://`: messages and tensors between processes of one Linux host, over one Unix socket for each pair of peers.

An example of a transport in a package of its own. Order, windows, matching and the ways in which a link ends come from
`pipelined.transport`; this module adds how peers find each other and how bytes move.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hmac
import os
import secrets
import socket
import struct
from collections import deque
from typing import TYPE_CHECKING, cast

import msgspec
import torch

from pipelined.errors import HandshakeError, ProtocolError
from pipelined.messages import TensorHeader
from pipelined.transport import Capabilities, Lane
from pipelined.transport.endpoint import BaseEndpoint
from pipelined.transport.hello import HELLO_LIMIT_BYTES, check_hello, decode_hello, encode_hello
from pipelined.transport.lanes import MessageLane, OwnedParcel, TensorLane, payload_bytes, raw_bytes
from pipelined.transport.options import integer_option, known_options

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipelined.messages import Peer
    from pipelined.transport import EndpointSpec

_HELLO, _WELCOME, _REFUSED, _MESSAGE, _CONSUMED, _TENSOR, _RELEASED, _BYE = range(8)
_HEAD = struct.Struct("<BBxxIQ")  # kind, lane, bytes of the encoded TensorHeader, bytes of the body
_SLICE_BYTES, _MAX_META_BYTES = 1 << 20, 16 << 20
_RETRY_S, _GREETING_S = 0.01, 5.0


class UnixTransport:
    """`unix://?window=N`."""

    scheme = "unix"
    capabilities = Capabilities(messages=True, tensors=True, processes=True)

    def __init__(self, **options: str) -> None:
        known_options(self.scheme, options, ("window",))
        self._window = integer_option(self.scheme, options, "window", at_least=1)

    async def open(self, spec: EndpointSpec) -> UnixEndpoint:
        """See `Transport`."""
        endpoint = UnixEndpoint(dataclasses.replace(spec, window=self._window or spec.window), self.capabilities)
        await endpoint.listen()
        return await endpoint.connect_first()


class _Link(asyncio.BufferedProtocol):
    """One connection. What comes in goes straight to where it belongs; what goes out is copied in slices."""

    def __init__(self, endpoint: UnixEndpoint, peer: Peer | None = None) -> None:
        """Args: peer: whom this side has dialled; None: somebody has dialled us, and will say who it is."""
        self.peer = peer
        self.accepted = self.full = self.gone = False
        self._endpoint = endpoint
        self._transport: asyncio.Transport | None = None
        self._queue: deque[tuple[memoryview, Callable[[], None] | None]] = deque()
        self._expect(bytearray(_HEAD.size), self._head)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=0)  # so that `full` means: something has not left yet
        if self.peer is None:
            self._endpoint.dialled(self, transport.get_extra_info("socket"))

    def connection_lost(self, exc: Exception | None) -> None:
        self.close(f"its connection ended ({exc or 'end of file'})")

    def close(self, why: str) -> None:
        """Hang up at once. Idempotent."""
        if not self.gone:
            self.gone = True
            self._queue.clear()
            if self._transport is not None:
                self._transport.abort()
            self._endpoint.hung_up(self, why)

    # ---- out ----

    def frame(self, kind: int, lane: int = 0, body: bytes = b"") -> None:
        """Send a frame. Never suspends."""
        self._put((memoryview(_HEAD.pack(kind, lane, 0, len(body)) + body), None))

    def tensor(self, header: TensorHeader, lane: int, tensor: torch.Tensor, sent: Callable[[], None]) -> None:
        """Send a tensor; `sent` once its memory may be written again."""
        meta, body = msgspec.msgpack.encode(header), raw_bytes(tensor).numpy().data
        self._put((memoryview(_HEAD.pack(_TENSOR, lane, len(meta), len(body)) + meta), None), (body, sent))

    def _put(self, *pieces: tuple[memoryview, Callable[[], None] | None]) -> None:
        if not self.gone:
            self._queue.extend(pieces)  # all at once: a `sent` that is called now may put a frame, too
            self._pump()

    def _pump(self) -> None:
        while self._queue and not self.full and self._transport is not None:
            piece, sent = self._queue.popleft()
            self._transport.write(bytes(piece[:_SLICE_BYTES]))
            if len(piece) > _SLICE_BYTES:
                self._queue.appendleft((piece[_SLICE_BYTES:], sent))
            elif sent is not None:
                sent()

    def pause_writing(self) -> None:
        self.full = True

    def resume_writing(self) -> None:
        self.full = False
        self._pump()
        self._endpoint.look_again()

    # ---- in ----

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._target[self._at : self._at + _SLICE_BYTES]

    def buffer_updated(self, nbytes: int) -> None:
        self._at += nbytes
        try:
            while self._at == len(self._target) and not self.gone:
                self._then()
        except (ProtocolError, HandshakeError, msgspec.MsgspecError, RecursionError) as error:
            self.close(f"it broke the protocol: {error}")

    def _expect(self, target: bytearray | memoryview, then: Callable[[], None]) -> None:
        self._target, self._at, self._then = memoryview(target), 0, then

    def _head(self) -> None:
        kind, lane, meta_bytes, body_bytes = _HEAD.unpack(self._target)
        limit_bytes = self._endpoint.spec.max_message_bytes if self.accepted else HELLO_LIMIT_BYTES
        tensor = self.accepted and kind == _TENSOR
        if lane >= len(Lane) or meta_bytes > tensor * _MAX_META_BYTES or (not tensor and body_bytes > limit_bytes):
            raise ProtocolError(f"a frame of kind {kind} on lane {lane} with {meta_bytes} + {body_bytes} bytes")
        coming = bytearray(meta_bytes if tensor else body_bytes)
        whole, tensor_head = self._whole, self._tensor_head
        self._expect(coming, lambda: tensor_head(lane, coming, body_bytes) if tensor else whole(kind, lane, coming))

    def _tensor_head(self, lane: int, meta: bytearray, body_bytes: int) -> None:
        header = msgspec.msgpack.decode(meta, type=TensorHeader)
        if payload_bytes(header) != body_bytes:
            raise ProtocolError(f"a tensor of shape {header.shape} and dtype {header.dtype} with {body_bytes} bytes")
        raw = torch.empty(body_bytes, dtype=torch.uint8)
        parcel = OwnedParcel(header, raw, lambda: self.frame(_RELEASED, lane))
        self._expect(raw.numpy().data, lambda: self._whole(_TENSOR, lane, parcel))

    def _whole(self, kind: int, lane: int, body: bytearray | OwnedParcel) -> None:
        self._expect(bytearray(_HEAD.size), self._head)
        self._endpoint.came(self, kind, Lane(lane), body if isinstance(body, OwnedParcel) else bytes(body))


class _Messages(MessageLane):
    def __init__(self, link: _Link, spec: EndpointSpec, peer: Peer, lane: Lane) -> None:
        super().__init__(spec.me, peer, lane, spec.epoch, spec.window, spec.max_message_bytes)
        self._link = link

    def transmit(self, frame: bytes) -> None:
        self._link.frame(_MESSAGE, self.lane, frame)

    def consumed(self) -> None:
        self._link.frame(_CONSUMED, self.lane)


class _Tensors(TensorLane):
    def __init__(self, link: _Link, spec: EndpointSpec, peer: Peer, lane: Lane) -> None:
        super().__init__(spec.me, peer, lane, spec.epoch, spec.window)
        self._link = link

    def transmit(self, header: TensorHeader, tensor: torch.Tensor, sent: Callable[[], None]) -> None:
        self._link.tensor(header, self.lane, tensor, sent)


class UnixEndpoint(BaseEndpoint):
    """A listening socket and a connection with every peer. Of two peers the smaller one dials."""

    def __init__(self, spec: EndpointSpec, capabilities: Capabilities) -> None:
        super().__init__(spec, capabilities)
        self._links: dict[Peer, _Link] = {}
        self._strangers: dict[_Link, asyncio.TimerHandle] = {}
        self._server: asyncio.Server | None = None

    async def listen(self) -> None:
        """Listen under a name that nobody can guess, in the abstract namespace, and publish it."""
        name = f"pipelined-unix-{secrets.token_hex(16)}"
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        sock.bind(f"\0{name}")
        self._server = await self.loop.create_unix_server(lambda: _Link(self), sock=sock)
        self.spec.rendezvous.publish(self._key(self.me), name)

    def _key(self, peer: Peer) -> str:
        return f"unix.{self.spec.epoch}.{peer.pipeline}.{peer.rank}"

    async def _connect(self, peer: Peer) -> None:
        while peer not in self._fates:
            self._raise_if_closed()
            if (refusal := self.refusals.pop(peer, None)) is not None:
                raise refusal
            name = self.spec.rendezvous.get(self._key(peer))
            if self.me < peer and name is not None:
                await self._dial(peer, name)
            await self.spec.clock.sleep(_RETRY_S)

    async def _dial(self, peer: Peer, name: str) -> None:
        """One attempt. Returns when it has led to something, or is worth another one."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            sock.connect(f"\0{name}")
        except OSError:
            sock.close()
            return
        link = _Link(self, peer)
        try:
            await self.loop.create_unix_connection(lambda: link, sock=sock)
            link.frame(_HELLO, 0, encode_hello(self.hello))
            while not (link.accepted or link.gone or peer in self.refusals):
                await self.news()
        finally:
            if not link.accepted:
                link.close("it was not accepted")

    def dialled(self, link: _Link, sock: socket.socket) -> None:
        """Somebody has connected: only processes of the same user may go on, and not for long without a hello."""
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        if struct.unpack("3i", credentials)[1] == os.geteuid():
            until_s = self.spec.clock.now() + _GREETING_S
            self._strangers[link] = self.spec.clock.call_at(until_s, link.close, "it said no hello")
        else:
            link.close("another user")

    def _greeted(self, link: _Link, kind: int, body: bytes) -> None:
        if kind == _REFUSED and link.peer is not None:
            self.refusals[link.peer] = HandshakeError(f"{link.peer} refused: {body.decode(errors='replace')}")
            self._tell()
        elif kind == _WELCOME and link.peer is not None:
            check_hello(self.hello, decode_hello(body), link.peer)
            self._accept(link.peer, link)
        elif kind == _HELLO and link.peer is None:
            theirs = decode_hello(body)
            try:
                check_hello(self.hello, theirs)
            except HandshakeError as error:
                link.frame(_REFUSED, 0, str(error).encode())
                if hmac.compare_digest(theirs.secret.encode(), self.hello.secret.encode()):
                    self.refusals[theirs.me] = error  # whoever knows the secret is the peer: no use in waiting
                    self._tell()
                return
            if theirs.me not in self._fates:
                link.frame(_WELCOME, 0, encode_hello(self.hello))
                self._accept(theirs.me, link)
        else:
            raise ProtocolError(f"a frame of kind {kind} before the hello")

    def _accept(self, peer: Peer, link: _Link) -> None:
        if (timer := self._strangers.pop(link, None)) is not None:
            timer.cancel()
        link.peer, link.accepted, self._links[peer] = peer, True, link
        self._attach(peer)

    def came(self, link: _Link, kind: int, lane: Lane, body: bytes | OwnedParcel) -> None:
        """A whole frame."""
        peer = cast("Peer", link.peer)
        if isinstance(body, OwnedParcel):
            self.tensors(peer, lane).arrive(body)
        elif not link.accepted:
            self._greeted(link, kind, body)
        elif kind == _MESSAGE:
            self.messages(peer, lane).arrive(body)
        elif kind in (_CONSUMED, _RELEASED):
            (self.messages if kind == _CONSUMED else self.tensors)(peer, lane).grant()
        elif kind == _BYE:
            self._peer_ended(peer)
        else:
            raise ProtocolError(f"a frame of kind {kind} in the middle of a link")

    def hung_up(self, link: _Link, why: str) -> None:
        """A connection is over."""
        if (timer := self._strangers.pop(link, None)) is not None:
            timer.cancel()
        if link.accepted and link.peer is not None and not self._closed:
            self._peer_lost(link.peer, why)
        self._tell()

    def look_again(self) -> None:
        """Something has left: whoever waits for it looks again."""
        self._tell()

    # ---- what the base asks for ----

    def _make_messages(self, peer: Peer, lane: Lane) -> MessageLane:
        return _Messages(self._links[peer], self.spec, peer, lane)

    def _make_tensors(self, peer: Peer, lane: Lane) -> TensorLane:
        return _Tensors(self._links[peer], self.spec, peer, lane)

    def _say_bye(self, peer: Peer) -> None:
        self._links[peer].frame(_BYE)

    async def _flush_wire(self) -> None:
        while any(link.full and not link.gone for link in self._links.values()):
            await self.news()

    def _shut(self) -> None:
        if self._server is not None:
            self._server.close()
        for link in [*self._strangers, *self._links.values()]:
            link.close("closed here")
