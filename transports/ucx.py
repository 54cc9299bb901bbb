"""`ucx://`: tensors over UCX (`ucxx`): shared memory on one host, UCX's networks across hosts.

Messages, headers and liveness go over TCP beside it (see `beside.py`); a peer that died is noticed there, and what was
pending in UCX fails. UCX's own connections are neither authenticated nor encrypted: on a loopback address nothing of
it can be reached from another host, beyond that the network has to be trusted.

Options: those of `tcp://` (the address to listen on, `window`, `heartbeat_ms`). UCX's own settings are environment
variables (`UCX_TLS`, `UCX_NET_DEVICES` and so on), which stand over what is chosen here.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from pipelined.errors import HandshakeError, MissingDependencyError

from . import greeting
from .beside import BesideChannel, BesideEndpoint
from .tcp import TcpTransport
from .wire import LANES

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from pipelined.messages import Peer
    from pipelined.transport import Capabilities, EndpointSpec

    from .ucx_worker import UcxWorker

__all__ = ["UcxEndpoint", "UcxTransport"]

_NUMBER_BITS = 32
_SLOT_BITS = 8
_INSTALL = "pip install 'pipelined[ucx]'"


class UcxTransport(TcpTransport):
    """`ucx://[address]?window=N&heartbeat_ms=M`."""

    scheme = "ucx"
    requires = ("ucxx",)

    def __init__(self, **options: str) -> None:
        super().__init__(**options)
        try:
            from .ucx_worker import UcxWorker
        except ImportError as error:
            raise MissingDependencyError(f"transport ucx:// (loading ucxx: {error})", _INSTALL) from error
        self._worker = UcxWorker

    async def open(self, spec: EndpointSpec) -> UcxEndpoint:
        """See `Transport`.

        Raises:
            ConfigError: The address can't be listened on, or lacks a secret.
        """
        host, private = await greeting.listening_host(self.scheme, self._address, spec.secret)
        spec = dataclasses.replace(spec, window=self._window or spec.window)
        endpoint = UcxEndpoint(spec, self.capabilities, self._heartbeat_ms / 1000)
        endpoint.worker = self._worker(endpoint.loop, across_hosts=not private)
        endpoint.listen(host)
        return await endpoint.connect_first()


class _UcxChannel(BesideChannel):
    """Sends to and receives from one peer's worker."""

    def __init__(self, endpoint: UcxEndpoint, peer: Peer, address: greeting.Address) -> None:
        super().__init__(endpoint, peer, address)
        self._ucx = endpoint
        self._end: Any = None  # where the peer's worker is sent to

    def _open_side(self) -> None:
        self._say_side(self._ucx.running.address)

    def _take_side(self, body: bytes) -> None:
        if self._end is None:
            try:
                self._end = self._ucx.running.connect(body)
            except RuntimeError as error:
                self.broken(f"UCX finds no way to it: {error}")
                return
            self._side_stands()

    def _send_beside(self, slot: int, number: int, data: memoryview, sent: Callable[[], None]) -> None:
        def done(problem: str) -> None:
            if problem:
                self.broken(f"UCX could not send to it: {problem}")
            elif not self.gone:
                sent()

        self._ucx.running.send(self._end, data, self._ucx.tag(self._ucx.me, slot, number), done)

    def _receive_beside(self, slot: int, number: int, raw: torch.Tensor, landed: Callable[[], None]) -> None:
        def done(problem: str) -> None:
            if problem:
                self.broken(f"UCX could not receive from it: {problem}")
            else:
                # From a callback of its own: this one may run in the middle of reading from the peer.
                self._ucx.loop.call_soon(self._believe, landed)

        self._ucx.running.receive(raw.numpy().data, self._ucx.tag(self.peer, slot, number), done)

    def _believe(self, landed: Callable[[], None]) -> None:
        # UCX may have read the peer's memory after the peer had given it away; but before it did, it hung up.
        if self.inlet is not None and not self.gone:
            self.inlet.read()
        if not self.gone:
            landed()

    def _close_side(self) -> None:
        self._end = None  # the worker keeps it, and the requests, as long as it may use their memory


class UcxEndpoint(BesideEndpoint):
    """A UCX worker for all peers, beside the TCP connections to each."""

    scheme = "ucx"

    def __init__(self, spec: EndpointSpec, capabilities: Capabilities, heartbeat_s: float) -> None:
        super().__init__(spec, capabilities, heartbeat_s)
        self.worker: UcxWorker | None = None
        self._places = {peer: place for place, peer in enumerate(sorted(spec.world))}

    @property
    def running(self) -> UcxWorker:
        """The worker, which an endpoint has from opening to closing."""
        assert self.worker is not None
        return self.worker

    def tag(self, source: Peer, slot: int, number: int) -> int:
        """Tag of a tensor, different from all others that come to one worker; 64 bits."""
        place = self._places[source] << (_NUMBER_BITS + _SLOT_BITS)
        return place | (slot - LANES) << _NUMBER_BITS | number % (1 << _NUMBER_BITS)

    def _dial(self, peer: Peer, address: greeting.Address) -> _UcxChannel:
        try:
            return _UcxChannel(self, peer, address)
        except ValueError as error:
            raise HandshakeError(f"{peer} published {address.url}, which is no address: {error}") from error

    def _stop(self) -> None:
        super()._stop()
        if self.worker is not None:
            self.worker.close()
