"""An endpoint over sockets: who is dialled when, and what a hello, a refusal and a broken link lead to.

Each side dials the other, and the link that a peer dialled carries what that peer sends. Whoever gets a fitting hello
from a peer that it has not dialled dials back. Knows no socket; the transports bring them.
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING

from pipelined.errors import HandshakeError
from pipelined.transport.endpoint import BaseEndpoint

from . import greeting
from .wire import Messages, Tensors

if TYPE_CHECKING:
    from pipelined.messages import Hello, Peer
    from pipelined.transport import Capabilities, EndpointSpec, Lane
    from pipelined.transport.lanes import MessageLane, TensorLane

    from .wire import Channel

__all__ = ["SocketEndpoint"]

_POLL_S = 0.01


class SocketEndpoint(BaseEndpoint):
    """What the endpoints of socket transports share.

    Attributes:
        scheme: Of the transport.
        greeter: Makes and checks hellos.
        channels: Peers that were dialled.
    """

    scheme: str

    def __init__(self, spec: EndpointSpec, capabilities: Capabilities) -> None:
        super().__init__(spec, capabilities)
        self.greeter = greeting.Greeter(self.hello)
        self.channels: dict[Peer, Channel] = {}
        self._heard: dict[Peer, HandshakeError] = {}  # hellos that came in the name of a peer and did not fit
        self._broken: dict[Peer, greeting.Address | None] = {}  # addresses at which nobody said hello

    @abc.abstractmethod
    def _dial(self, peer: Peer, address: greeting.Address) -> Channel:
        """Begin to connect and say hello there; a failure ends in `refused` or `broken`."""

    @abc.abstractmethod
    def _stop(self) -> None:
        """Stop listening and free what is not a channel's."""

    # ---- connecting ----

    async def _connect(self, peer: Peer) -> None:
        try:
            while peer not in self._fates:
                self._raise_if_closed()
                if (error := self.refusals.pop(peer, None)) is not None:
                    raise error
                if peer in self.channels:
                    await self.news()
                elif (address := self._address(peer)) is not None and address != self._broken.get(peer):
                    self.channels[peer] = self._dial(peer, address)
                else:
                    await self.spec.clock.sleep(_POLL_S)
        finally:
            if peer not in self._fates and (channel := self.channels.pop(peer, None)) is not None:
                channel.close()

    def _address(self, peer: Peer) -> greeting.Address | None:
        address = greeting.find(self.scheme, self.spec, peer)
        if address is None or address.epoch < self.spec.epoch:
            return None
        if address.epoch > self.spec.epoch:
            raise HandshakeError(f"{peer} has epoch {address.epoch}, {self.me} has epoch {self.spec.epoch}")
        return address

    def _absence(self, peer: Peer) -> str:
        address = greeting.find(self.scheme, self.spec, peer)
        if peer in self._heard:
            return f"{peer} (a hello in its name was refused: {self._heard[peer]})"
        if address is None:
            return f"{peer} (never published an address)"
        if address.epoch != self.spec.epoch:
            return f"{peer} (which is still in epoch {address.epoch})"
        if peer in self._broken:
            return f"{peer} (nobody answers at the address that it published)"
        return f"{peer} (published an address, but said no hello)"

    def admit(self, encoded: bytes, challenge: bytes, window: int) -> Channel:
        """A hello came in on a link that somebody dialled.

        Raises:
            HandshakeError: It does not fit; the text is fit for the other side, too.
        """
        hello = self.greeter.decode(encoded)
        try:
            channel = self._fitting(hello, challenge, window)
        except HandshakeError as error:
            self._heard[hello.me] = error
            raise
        self._attach(hello.me)
        return channel

    def _fitting(self, hello: Hello, challenge: bytes, window: int) -> Channel:
        peer = hello.me
        self.greeter.check(hello, challenge)
        if window != self.spec.window:
            raise HandshakeError(f"{peer} has window {window}, {self.me} has window {self.spec.window}")
        channel = self.channels.get(peer)
        if channel is None:
            if (address := self._address(peer)) is None:
                raise HandshakeError(f"{peer} said hello to {self.me}, but published no address to be dialled at")
            channel = self.channels[peer] = self._dial(peer, address)
        if channel.gone:
            raise HandshakeError(f"{self.me} has lost {peer} in this epoch; a new one has to begin")
        return channel

    # ---- called by channels ----

    def refused(self, channel: Channel, why: str) -> None:
        """The peer did not like our hello."""
        if channel.peer in self._fates:
            self.broken(channel, why)
        elif not channel.gone:
            channel.close()
            self.channels.pop(channel.peer, None)
            self.refusals[channel.peer] = HandshakeError(why)
            self._tell()

    def broken(self, channel: Channel, why: str) -> None:
        """The link is no more, or can't be trusted."""
        if channel.gone:
            return
        channel.close()
        if channel.peer not in self._fates:
            # Left over from before, or its owner gave up. Whether it gave up because of us is known if we refused it.
            self._broken[channel.peer] = greeting.find(self.scheme, self.spec, channel.peer)
            self.channels.pop(channel.peer, None)
            if channel.peer in self._heard:
                self.refusals[channel.peer] = self._heard[channel.peer]
            self._tell()
            return
        self._peer_lost(channel.peer, why)
        self._tell()

    def ended(self, channel: Channel) -> None:
        """The peer said bye and all that it sent is here."""
        self._peer_ended(channel.peer)

    def farewell(self) -> None:
        """A peer has read our bye."""
        self._tell()

    # ---- what the base asks for ----

    def _make_messages(self, peer: Peer, lane: Lane) -> MessageLane:
        return Messages(self.channels[peer], lane, self.spec)

    def _make_tensors(self, peer: Peer, lane: Lane) -> TensorLane:
        return Tensors(self.channels[peer], lane, self.spec)

    def _say_bye(self, peer: Peer) -> None:
        self.channels[peer].bye()

    async def _flush_wire(self) -> None:
        # A bye that was read is the one sure sign that what was sent before it has left this process.
        while any(not channel.bye_read and not channel.gone for channel in self.channels.values()):
            await self.news()

    def _shut(self) -> None:
        for channel in self.channels.values():
            channel.close()
        self._stop()
