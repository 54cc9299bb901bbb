"""`shm://`: peers in different processes of one host.

One Unix socket for each pair of peers carries messages, frees and credits of all lanes, and a second one beside it the
descriptors of memory that the sender owns and the receiver maps (`arena`); tensors lie there. A peer that dies is seen
at once, as end of file.
"""

from __future__ import annotations

import asyncio
import functools
import hmac
import secrets
import struct
from typing import TYPE_CHECKING

import msgspec

from pipelined.errors import HandshakeError, ProtocolError
from pipelined.messages import DRIVER
from pipelined.transport import Capabilities, Lane
from pipelined.transport.endpoint import BaseEndpoint
from pipelined.transport.hello import HELLO_LIMIT_BYTES, check_hello, decode_hello, encode_hello
from pipelined.transport.options import integer_option, known_options

from .shm_channel import Channel
from .shm_lanes import Kind, ShmLink, ShmMessages, ShmTensors
from .shm_listener import TOKEN_BYTES, Listener, reach, reach_side

if TYPE_CHECKING:
    from pipelined.messages import Peer
    from pipelined.transport import EndpointSpec

__all__ = ["ShmEndpoint", "ShmTransport"]

_MESSAGE, _TENSOR = int(Kind.MESSAGE), int(Kind.TENSOR)  # plain numbers where it is hot
_ARENA_MIB = 1024
_HEADROOM_BYTES = 64 << 10  # of a frame, beyond the message or metadata in it
_RETRY_S = 0.01
_GREETING_S = 5.0
_MOST_STRANGERS = 64
_GREETING_LIMIT_BYTES = TOKEN_BYTES + HELLO_LIMIT_BYTES


class ShmTransport:
    """`shm://?window=N&arena_mib=N`: tensors in flight on a lane, and the memory that they may take in all."""

    scheme = "shm"
    capabilities = Capabilities(messages=True, tensors=True, processes=True, leases=True)

    def __init__(self, **options: str) -> None:
        known_options(self.scheme, options, ("window", "arena_mib"))
        self._window = integer_option(self.scheme, options, "window", at_least=1)
        self._arena_mib = integer_option(self.scheme, options, "arena_mib", at_least=1) or _ARENA_MIB

    async def open(self, spec: EndpointSpec) -> ShmEndpoint:
        """See `Transport`."""
        endpoint = ShmEndpoint(spec, self.capabilities, self._window or spec.window, self._arena_mib << 20)
        await endpoint.listen()
        return await endpoint.connect_first()


class ShmEndpoint(BaseEndpoint):
    """One process's end of all its links.

    Both sides of a pair may dial. The connection that the smaller peer dialled stays.
    """

    def __init__(self, spec: EndpointSpec, capabilities: Capabilities, window: int, arena_bytes: int) -> None:
        super().__init__(spec, capabilities)
        self._window = window
        self._arena_bytes = arena_bytes
        self._links: dict[Peer, ShmLink] = {}
        self._dialling: set[Peer] = set()
        self._strangers: dict[Channel, asyncio.TimerHandle] = {}
        self._notes: dict[Peer, str] = {}
        self._listener: Listener | None = None

    async def listen(self) -> None:
        """Be there for others, and say where."""
        self._listener = await Listener.start(self._welcome)
        self.spec.rendezvous.publish(_address_key(self.me, self.spec.epoch), self._listener.address)
        self.spec.rendezvous.publish(_epoch_key(self.me), str(self.spec.epoch))

    def _make_messages(self, peer: Peer, lane: Lane) -> ShmMessages:
        return ShmMessages(self._links[peer], peer, lane, self._window)

    def _make_tensors(self, peer: Peer, lane: Lane) -> ShmTensors:
        return ShmTensors(self._links[peer], peer, lane, self._window)

    # ---- dialling ----

    async def _connect(self, peer: Peer) -> None:
        self._dialling.add(peer)
        try:
            while peer not in self._fates:
                self._raise_if_closed()
                if (refusal := self.refusals.pop(peer, None)) is not None:
                    raise refusal
                latest = self.spec.rendezvous.get(_epoch_key(peer))
                if latest is not None and int(latest) > self.spec.epoch:
                    raise HandshakeError(f"{peer} is in epoch {latest} already, {self.me} in epoch {self.spec.epoch}")
                await self._dial(peer)
        finally:
            self._dialling.discard(peer)

    async def _dial(self, peer: Peer) -> None:
        """One attempt. Returns when it has led to something, or is worth another try."""
        address = self.spec.rendezvous.get(_address_key(peer, self.spec.epoch))
        sock = reach(address) if address is not None else None
        token = secrets.token_bytes(TOKEN_BYTES)
        side = reach_side(address, token) if address is not None and sock is not None else None
        if sock is None or side is None:
            if sock is not None:
                sock.close()
            await self.spec.clock.sleep(_RETRY_S)
            return
        answered: asyncio.Future[None] = self.loop.create_future()

        def answer(kind: int, _: int, body: bytes) -> None:
            if not answered.done():
                answered.set_result(None)
            self._answered(peer, channel, kind, body)

        def gone(_: str) -> None:
            if not answered.done():
                answered.set_result(None)

        channel = Channel(_GREETING_LIMIT_BYTES, answer, gone, side)
        try:
            await self.loop.create_unix_connection(lambda: channel, sock=sock)
            channel.queue(Kind.HELLO, 0, token + encode_hello(self.hello))
            await answered
            if peer not in self._fates and peer not in self.refusals:
                await self.spec.clock.sleep(_RETRY_S)  # the peer's own call is on its way
        finally:
            link = self._links.get(peer)
            if link is None or link.channel is not channel:
                channel.close()

    def _answered(self, peer: Peer, channel: Channel, kind: int, body: bytes) -> None:
        """The peer's first frame on a connection that this side dialled."""
        if kind == Kind.WELCOME:
            try:
                check_hello(self.hello, decode_hello(body), peer)
            except HandshakeError as error:
                self.refusals[peer] = error
                channel.close()
            else:
                self._establish(peer, channel)
        elif kind == Kind.REFUSED:
            self.refusals[peer] = HandshakeError(f"{peer} refused {self.me}: {body.decode(errors='replace')}")

    # ---- being dialled ----

    def _welcome(self) -> Channel:
        """Somebody has connected."""

        def greet(kind: int, _: int, body: bytes) -> None:
            if kind != Kind.HELLO or len(body) < TOKEN_BYTES:
                raise ProtocolError("the first frame is not a hello")
            self._greet(channel, body[:TOKEN_BYTES], body[TOKEN_BYTES:])

        channel = Channel(_GREETING_LIMIT_BYTES, greet, lambda _: self._forget(channel))
        if len(self._strangers) >= _MOST_STRANGERS or self._closed:
            channel.close()
            return channel
        deadline_s = self.spec.clock.now() + _GREETING_S
        self._strangers[channel] = self.spec.clock.call_at(deadline_s, self._forget, channel)
        return channel

    def _forget(self, channel: Channel) -> None:
        timer = self._strangers.pop(channel, None)
        if timer is not None:
            timer.cancel()
            channel.close()

    def _greet(self, channel: Channel, token: bytes, body: bytes) -> None:
        side = self._listener.take_side(token) if self._listener is not None else None
        if side is None:
            raise ProtocolError("a hello without a side socket")
        channel.use_side(side)
        try:
            theirs = decode_hello(body)
        except HandshakeError as error:
            raise ProtocolError(str(error)) from error
        try:
            check_hello(self.hello, theirs)
        except HandshakeError as error:
            # Whoever knows the secret is the peer, and what differs is final. Anybody else is only a note.
            if hmac.compare_digest(theirs.secret.encode(), self.hello.secret.encode()):
                self.refusals[theirs.me] = error
                self._tell()
            elif theirs.me in self.spec.world:
                self._notes[theirs.me] = f"refused: {error}"
            channel.queue(Kind.REFUSED, 0, str(error).encode())
            return
        peer = theirs.me
        if peer in self._fates or (peer in self._dialling and self.me < peer):
            channel.queue(Kind.DUPLICATE, 0)
            return
        self._strangers.pop(channel).cancel()
        channel.queue(Kind.WELCOME, 0, encode_hello(self.hello))
        self._establish(peer, channel)

    def _establish(self, peer: Peer, channel: Channel) -> None:
        if peer in self._fates or self._closed:
            channel.close()
            return
        lost = functools.partial(self._link_lost, peer)
        channel.limit_bytes = self.spec.max_message_bytes + _HEADROOM_BYTES
        link = self._links[peer] = ShmLink(channel, self.spec, self._arena_bytes, lost)
        channel.on_frame = functools.partial(self._frame, peer, link)
        channel.on_end = lost
        self._attach(peer)

    # ---- a link's life ----

    def _frame(self, peer: Peer, link: ShmLink, kind: int, lane: int, body: bytes) -> None:
        try:
            if kind == _MESSAGE:
                (link.messages[lane] or self._message_lane(peer, lane)).arrive(body)
            elif kind == _TENSOR:
                (link.tensors[lane] or self._tensor_lane(peer, lane)).on_tensor(body)
            elif kind == Kind.FREE:
                self._tensor_lane(peer, lane).on_free(body)
            elif kind == Kind.CREDIT:
                self._message_lane(peer, lane).grant(int.from_bytes(body, "little"))
            elif kind == Kind.SEGMENT:
                self._tensor_lane(peer, lane).on_segment(body, link.channel.take_fd())
            elif kind == Kind.DROP:
                self._tensor_lane(peer, lane).on_drop(body)
            elif kind == Kind.BYE:
                link.close()
                self._peer_ended(peer)
            else:
                raise ProtocolError(f"a frame of unknown kind {kind}")
        except (struct.error, msgspec.MsgspecError, ValueError, IndexError, OSError) as error:
            raise ProtocolError(f"a frame of kind {kind} on lane {lane} can't be used: {error}") from error

    def _tensor_lane(self, peer: Peer, lane: int) -> ShmTensors:
        link = self.tensors(peer, Lane(lane))
        assert isinstance(link, ShmTensors)
        return link

    def _message_lane(self, peer: Peer, lane: int) -> ShmMessages:
        link = self.messages(peer, Lane(lane))
        assert isinstance(link, ShmMessages)
        return link

    def _link_lost(self, peer: Peer, why: str) -> None:
        self._links[peer].close()
        self._peer_lost(peer, why)

    def _absence(self, peer: Peer) -> str:
        latest = self.spec.rendezvous.get(_epoch_key(peer))
        note = f"last seen in epoch {latest}" if latest not in (None, str(self.spec.epoch)) else self._notes.get(peer)
        return f"{peer} ({note})" if note else str(peer)

    # ---- the end ----

    def _say_bye(self, peer: Peer) -> None:
        self._links[peer].channel.queue(Kind.BYE, 0)

    async def _flush_wire(self) -> None:
        for link in self._links.values():
            await link.channel.drained()

    def _shut(self) -> None:
        if self._listener is not None:
            self._listener.close()
        for channel in list(self._strangers):
            self._forget(channel)
        for link in self._links.values():
            link.close()


def _name(peer: Peer) -> str:
    return f"{peer.pipeline}.{'driver' if peer.rank == DRIVER else peer.rank}"


def _address_key(peer: Peer, epoch: int) -> str:
    return f"shm/{epoch}/{_name(peer)}"


def _epoch_key(peer: Peer) -> str:
    return f"shm/epoch/{_name(peer)}"
