"""`gloo://`: tensors over torch.distributed's gloo, on CPUs, between processes of one host or several.

Each pair of peers has a process group of its own, made directly: nothing of torch's global state is touched, so a
default group of the user's and any number of endpoints live side by side. Headers, credits and liveness go over TCP
beside it (see `beside.py`), and so do the addresses that gloo exchanges. It offers no messages: those go over ZMQ.

Gloo blocks, so each tensor under way takes a helper thread: at most one for each direction of each lane in use, that is
ten a peer; a pipeline's rank, which sends to one peer and receives from another on one lane, has two. They wait without
using CPU, and end with the endpoint. Gloo itself has one thread an endpoint and one a peer. The exception: a thread in
whose transfer the peer died, or this side aborted, may be left for as long as a silent peer is given (10 s), since
gloo does not wake it. Its transfer has failed long before.

Gloo's own connections are neither authenticated nor encrypted: beyond loopback the network has to be trusted.
Options: those of `tcp://` (the address to listen on, `window`, `heartbeat_ms`).
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import dataclasses
from typing import TYPE_CHECKING

import msgspec
import torch

from pipelined.errors import ConfigError, HandshakeError, MissingDependencyError, ProtocolError

from . import greeting
from .beside import BesideChannel, BesideEndpoint
from .tcp import TcpTransport
from .wire import LANES

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipelined.messages import Peer
    from pipelined.transport import Capabilities, EndpointSpec

    from .gloo_pair import Helpers, Pair

__all__ = ["GlooEndpoint", "GlooTransport"]

_NUMBERS = 1 << 24
"""Tags are 31 bits: the lane, and the tensor's number in it. No more than the window are ever under way."""
_CLOSE_PATIENCE_S = 1.0
"""How long `aclose` waits for helper threads: they take 20 ms, or far longer."""
_INSTALL = "pip install torch"


class GlooTransport(TcpTransport):
    """`gloo://[address]?window=N&heartbeat_ms=M`."""

    scheme = "gloo"

    def __init__(self, **options: str) -> None:
        super().__init__(**options)
        self.capabilities = dataclasses.replace(self.capabilities, messages=False)
        if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
            raise MissingDependencyError("transport gloo:// (this build of torch has no gloo)", _INSTALL)

    async def open(self, spec: EndpointSpec) -> GlooEndpoint:
        """See `Transport`.

        Raises:
            ConfigError: The address can't be listened on, or lacks a secret.
        """
        host, _ = await greeting.listening_host(self.scheme, self._address, spec.secret)
        spec = dataclasses.replace(spec, window=self._window or spec.window)
        endpoint = GlooEndpoint(spec, self.capabilities, self._heartbeat_ms / 1000)
        endpoint.start(host)
        endpoint.listen(host)
        return await endpoint.connect_first()


class _GlooChannel(BesideChannel):
    """Sends to and receives from one peer, in helper threads."""

    def __init__(self, endpoint: GlooEndpoint, peer: Peer, address: greeting.Address) -> None:
        super().__init__(endpoint, peer, address)
        self._gloo = endpoint
        self._pair: Pair = endpoint.make_pair(peer, self._tell)

    def _tell(self, key: str, value: bytes) -> None:  # on a helper thread
        self._gloo.from_thread(self._say_side, msgspec.msgpack.encode((key, value)))

    def _open_side(self) -> None:
        device = self._gloo.device
        self._in_thread(lambda: self._pair.connect(device), self._side_stands)

    def _take_side(self, body: bytes) -> None:
        try:
            key, value = msgspec.msgpack.decode(body, type=tuple[str, bytes])
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"a key of gloo's does not decode: {error}") from error
        self._pair.put(key, value)

    def _send_beside(self, slot: int, number: int, data: memoryview, sent: Callable[[], None]) -> None:
        tensor, tag = torch.frombuffer(data, dtype=torch.uint8), _tag(slot, number)
        self._in_thread(lambda: self._pair.send(tensor, tag), sent)

    def _receive_beside(self, slot: int, number: int, raw: torch.Tensor, landed: Callable[[], None]) -> None:
        self._in_thread(lambda: self._pair.receive(raw, _tag(slot, number)), landed)

    def _in_thread(self, block: Callable[[], None], then: Callable[[], None]) -> None:
        """Do what blocks in a helper thread, then the rest on the loop; what fails breaks the link."""

        def job() -> None:
            try:
                block()
            except RuntimeError as error:  # all that torch raises, whatever went wrong
                self._gloo.from_thread(self.broken, f"gloo lost the connection to it: {str(error).splitlines()[0]}")
            else:
                self._gloo.from_thread(self._unless_gone, then)

        self._gloo.helpers.run(job)

    def _unless_gone(self, then: Callable[[], None]) -> None:
        if not self.gone:
            then()

    def at_exit(self) -> None:
        """The process ends, and nobody has closed this."""
        self._pair.close()
        self._pair.break_up()

    def _close_side(self) -> None:
        self._pair.close()
        self._gloo.helpers.run(self._pair.break_up)


def _tag(slot: int, number: int) -> int:
    return (slot - LANES) * _NUMBERS + number % _NUMBERS


class GlooEndpoint(BesideEndpoint):
    """A gloo device and helper threads for all peers, beside the TCP connections to each."""

    scheme = "gloo"

    def __init__(self, spec: EndpointSpec, capabilities: Capabilities, heartbeat_s: float) -> None:
        super().__init__(spec, capabilities, heartbeat_s)
        self.device: object = None
        self.helpers: Helpers
        self._threads_ended = asyncio.Event()

    def start(self, host: str) -> None:
        """Listen for gloo's own connections. Threads begin with the first peer.

        Raises:
            ConfigError: That address can't be listened on.
        """
        from .gloo_pair import Helpers, make_device

        self.helpers = Helpers(f"gloo {self.me}", self._ended)
        try:
            self.device = make_device(host)
        except RuntimeError as error:
            raise ConfigError(f"gloo:// can't listen on {host}: {error}") from error
        atexit.register(self._at_exit)

    def _ended(self) -> None:  # on the last helper thread
        atexit.unregister(self._at_exit)
        self.from_thread(self._threads_ended.set)

    def _at_exit(self) -> None:
        for channel in self.channels.values():
            assert isinstance(channel, _GlooChannel)
            channel.at_exit()
        self.helpers.stop()
        self.helpers.join(2 * self.silence_s)

    def make_pair(self, peer: Peer, tell: Callable[[str, bytes], None]) -> Pair:
        """The group that this endpoint will share with a peer."""
        from .gloo_pair import Pair

        return Pair(int(self.me > peer), self.silence_s, tell)

    def from_thread(self, callback: Callable[..., None], *args: object) -> None:
        """Call back on the loop, from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self.loop.call_soon_threadsafe(callback, *args)

    async def aclose(self) -> None:
        """See `Endpoint`. Returns when the helper threads have ended, but for those that gloo does not let go of."""
        await super().aclose()
        with contextlib.suppress(TimeoutError):
            async with self.spec.clock.timeout(_CLOSE_PATIENCE_S):
                await self._threads_ended.wait()

    def _dial(self, peer: Peer, address: greeting.Address) -> _GlooChannel:
        try:
            return _GlooChannel(self, peer, address)
        except ValueError as error:
            raise HandshakeError(f"{peer} published {address.url}, which is no address: {error}") from error

    def _stop(self) -> None:
        super()._stop()
        self.device = None
        self.helpers.stop()
