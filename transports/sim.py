"""`sim://`: peers of one loop, joined by links that have latency and bandwidth. For virtual time, and real time alike.

::

    sim://?latency_us=5&bandwidth_gbytes_per_s=25
    sim://?egress_gbytes_per_s=50&links=0-1:50:1.5,3-4:100:0.5

Each directed pair of peers has a link. Its lanes share the bandwidth, first come, first served, a frame at a time: what
is queued on one lane behind its own frame holds up no other lane. A tensor is charged by its header's `logical_bytes`
if that is not 0, else by its size, a message by its size. A send is done when its last byte has left, and arrives a
latency later; credits travel back with the latency alone. Payloads are really copied.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pipelined.errors import ConfigError
from pipelined.messages import DRIVER
from pipelined.transport import Capabilities
from pipelined.transport.lanes import LaneEnd, MessageLane, TensorLane, copy_sliced, raw_bytes, tensor_over
from pipelined.transport.options import integer_option, known_options, number_option

from .memory import Board, MemoryEndpoint, board_of

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from pipelined.clock import Clock
    from pipelined.messages import Peer, TensorHeader
    from pipelined.transport import EndpointSpec, Lane

__all__ = ["LinkModel", "SimEndpoint", "SimTransport"]

_ROUNDING = 2
"""A skewed clock may read that many units in the last place less than the time a timer was set to."""


@dataclass(frozen=True)
class LinkModel:
    """How long frames take.

    Attributes:
        latency_s: From the last byte leaving to its arrival.
        bytes_per_s: Of one link.
        egress_bytes_per_s: Of all links out of a peer together.
        pairs: (from, to) ranks whose links are different: latency and bytes a second. The driver is rank -1.
    """

    latency_s: float = 5e-6
    bytes_per_s: float = 25e9
    egress_bytes_per_s: float = math.inf
    pairs: tuple[tuple[int, int, float, float], ...] = ()

    @classmethod
    def parse(cls, options: dict[str, str]) -> LinkModel:
        """From a URI's options.

        Raises:
            ConfigError: A value is no number or out of range.
        """

        def gbytes(name: str, default: float) -> float:
            return number_option("sim", options, name, default, at_least=1e-9) * 1e9

        return cls(
            latency_s=number_option("sim", options, "latency_us", 5.0) * 1e-6,
            bytes_per_s=gbytes("bandwidth_gbytes_per_s", 25.0),
            egress_bytes_per_s=gbytes("egress_gbytes_per_s", math.inf),
            pairs=tuple(_pair(text) for text in options.get("links", "").split(",") if text),
        )

    def between(self, near: Peer, far: Peer) -> tuple[float, float]:
        """Latency and bytes a second of the link from `near` to `far`."""
        for source, target, latency_s, bytes_per_s in self.pairs:
            if (source, target) == (near.rank, far.rank):
                return latency_s, bytes_per_s
        return self.latency_s, self.bytes_per_s


def _pair(text: str) -> tuple[int, int, float, float]:
    try:
        ranks, latency_us, gbytes_per_s = text.split(":")
        source, target = (DRIVER if rank == "driver" else int(rank) for rank in ranks.split("-"))
        latency_s, bytes_per_s = float(latency_us) * 1e-6, float(gbytes_per_s) * 1e9
    except ValueError:
        latency_s = bytes_per_s = math.nan
    if not (latency_s >= 0 and bytes_per_s > 0):
        raise ConfigError(
            f"sim://?links={text}: expected from-to:latency_us:gbytes_per_s, as in 0-1:50:1.5 or driver-0:500:0.1"
        )
    return source, target, latency_s, bytes_per_s


class SimTransport:
    """See the module."""

    scheme = "sim"
    capabilities = Capabilities(messages=True, tensors=True)

    def __init__(self, **options: str) -> None:
        known = ("window", "latency_us", "bandwidth_gbytes_per_s", "egress_gbytes_per_s", "links")
        known_options(self.scheme, options, known)
        self._window = integer_option(self.scheme, options, "window", at_least=1)
        self.model = LinkModel.parse(options)

    async def open(self, spec: EndpointSpec) -> SimEndpoint:
        """See `Transport`."""
        board = board_of(spec, self.scheme)
        window = self._window or spec.window
        return await SimEndpoint(spec, self.capabilities, board, window, self.model).connect_first()


def _reached(clock: Clock) -> float:
    now_s = clock.now()
    return now_s + _ROUNDING * math.ulp(now_s)


class _Timeline:
    """Calls at times that never decrease, in the order of asking, with one timer: ties keep that order."""

    __slots__ = ("_calls", "_clock", "_timer")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._calls: deque[tuple[float, Callable[..., None], tuple[Any, ...]]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def at(self, when_s: float, callback: Callable[..., None], *args: Any) -> None:
        self._calls.append((when_s, callback, args))
        if self._timer is None:
            self._timer = self._clock.call_at(when_s, self._ring)

    def clear(self) -> None:
        self._calls.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _ring(self) -> None:
        self._timer = None
        calls, now_s = self._calls, _reached(self._clock)
        while calls and calls[0][0] <= now_s:
            _, callback, args = calls.popleft()
            callback(*args)
        if calls and self._timer is None:
            self._timer = self._clock.call_at(calls[0][0], self._ring)


class _Wire:
    """One direction between two peers, on the clock of the one that sends."""

    def __init__(self, near: SimEndpoint, far: SimEndpoint) -> None:
        self.near = near
        self.latency_s, self._bytes_per_s = near.model.between(near.me, far.me)
        self._free_s = -math.inf  # when everything sent so far will have left
        self._clock = near.spec.clock
        self._leaving = _Timeline(self._clock)
        self._arriving = _Timeline(self._clock)

    def carry(self, size_bytes: int, arrive: Callable[..., None], *args: Any, sent: Callable[[], None] | None) -> None:
        """Have `arrive(*args)` called when that many bytes have arrived, and `sent` when they have left."""
        near, now_s = self.near, self._clock.now()
        left_s = max(now_s, self._free_s) + size_bytes / self._bytes_per_s
        if near.egress_bytes_per_s < math.inf:
            near.egress_free_s = max(now_s, near.egress_free_s) + size_bytes / near.egress_bytes_per_s
            left_s = max(left_s, near.egress_free_s)
        self._free_s = left_s
        self._arriving.at(left_s + self.latency_s, arrive, *args)
        if sent is not None:
            if left_s > now_s:
                self._leaving.at(left_s, sent)
            else:
                sent()

    def cut(self) -> None:
        """What is under way never arrives."""
        self._leaving.clear()
        self._arriving.clear()


class _Credited(LaneEnd):
    """A lane end whose credits take their time to come back. They need a timer only while somebody waits for one."""

    clock: Clock
    _returning: deque[float]
    _timer: asyncio.TimerHandle | None

    def keep_time(self, clock: Clock) -> None:
        self.clock = clock
        self._returning = deque()
        self._timer = None

    def returned(self, latency_s: float) -> None:
        """A frame was consumed or released there: the credit is on its way."""
        self._returning.append(self.clock.now() + latency_s)
        if self._writer is not None or self._on_top:
            self._watch()

    def credits(self) -> int:
        self._absorb()
        return super().credits()

    def _spend(self) -> None:
        self._absorb()
        super()._spend()

    async def _wait_credit(self) -> None:
        self._absorb()
        self._watch()
        await super()._wait_credit()

    def _absorb(self) -> None:
        if self._returning:
            now_s = _reached(self.clock)
            while self._returning and self._returning[0] <= now_s:
                self._returning.popleft()
                self.grant()

    def _watch(self) -> None:
        if self._returning and self._timer is None:
            self._timer = self.clock.call_at(self._returning[0], self._ring)

    def _ring(self) -> None:
        self._timer = None
        self._absorb()
        self._watch()


class _Messages(_Credited, MessageLane):
    def __init__(self, near: SimEndpoint, far: SimEndpoint, lane: Lane) -> None:
        super().__init__(near.me, far.me, lane, near.spec.epoch, near.window, near.spec.max_message_bytes)
        self.near, self._far = near, far
        self._path = near.wire(far.me)
        self.keep_time(near.spec.clock)

    def transmit(self, frame: bytes) -> None:
        own = frame if type(frame) is bytes else bytes(frame)
        self._path.carry(len(own), self._far.arrive_message, self.me, self.lane, own, sent=None)

    def consumed(self) -> None:
        self._far.credit_message(self.me, self.lane, self.near.wire(self.peer).latency_s)


class _Tensors(_Credited, TensorLane):
    def __init__(self, near: SimEndpoint, far: SimEndpoint, lane: Lane) -> None:
        super().__init__(near.me, far.me, lane, near.spec.epoch, near.window)
        self.near, self._far = near, far
        self._path = near.wire(far.me)
        self.keep_time(near.spec.clock)

    def transmit(self, header: TensorHeader, tensor: torch.Tensor, sent: Callable[[], None]) -> None:
        if tensor.nbytes <= _CLONED_BYTES and tensor.is_cpu:
            self._carry(header, tensor.detach().clone(), sent)
            return
        copy = torch.empty(tensor.nbytes, dtype=torch.uint8)

        def copied() -> None:
            if self.alive:
                self._carry(header, tensor_over(copy, header), sent)
            else:
                sent()

        copy_sliced(copy, raw_bytes(tensor), copied, wanted=lambda: self.alive)

    def _carry(self, header: TensorHeader, copy: torch.Tensor, sent: Callable[[], None]) -> None:
        size_bytes = header.logical_bytes or copy.nbytes
        self._path.carry(size_bytes, self._far.arrive_copy, self.me, self.lane, header, copy, sent=sent)

    def release(self) -> None:
        """A parcel of this lane was released: the peer has a credit more."""
        self._far.credit_tensor(self.me, self.lane, self.near.wire(self.peer).latency_s)


_CLONED_BYTES = 64 << 10
"""Up to here, a copy by torch is cheaper than one by hand."""


class _Parcel:
    """A tensor that arrived. It owns its memory: releasing it is a matter of credits."""

    __slots__ = ("_lane", "_tensor", "header")

    def __init__(self, header: TensorHeader, tensor: torch.Tensor, lane: _Tensors) -> None:
        self.header = header
        self._tensor = tensor
        self._lane: _Tensors | None = lane

    @property
    def size_bytes(self) -> int:
        return self._tensor.nbytes

    @property
    def raw(self) -> torch.Tensor:
        return raw_bytes(self._tensor)

    def tensor(self) -> torch.Tensor:
        return self._tensor

    def release(self) -> None:
        lane, self._lane = self._lane, None
        if lane is not None:
            lane.release()

    def __del__(self) -> None:
        lane = self._lane
        if lane is not None and not lane.near.loop.is_closed():
            lane.near.loop.call_soon_threadsafe(lane.release)


class SimEndpoint(MemoryEndpoint):
    """One peer of a simulated world."""

    def __init__(
        self, spec: EndpointSpec, capabilities: Capabilities, board: Board, window: int, model: LinkModel
    ) -> None:
        self.model = model
        self.egress_bytes_per_s = model.egress_bytes_per_s
        self.egress_free_s = -math.inf
        self._wires: dict[Peer, _Wire] = {}
        super().__init__(spec, capabilities, board, window)

    def wire(self, peer: Peer) -> _Wire:
        """The link to a peer."""
        wire = self._wires.get(peer)
        if wire is None:
            far = self._linked[peer]
            assert isinstance(far, SimEndpoint)
            wire = self._wires[peer] = _Wire(self, far)
        return wire

    def link(self, other: MemoryEndpoint) -> None:
        """See `MemoryEndpoint`.

        Raises:
            ConfigError: The other one lives on another loop: there is no order of time between the two.
        """
        if other.loop is not self.loop:
            raise ConfigError(f"sim:// links peers of one event loop; {self.me} and {other.me} are on two")
        super().link(other)

    # ---- called by the other side ----

    def arrive_copy(self, peer: Peer, lane: Lane, header: TensorHeader, copy: torch.Tensor) -> None:
        """A tensor came."""
        link = self.tensors(peer, lane)
        assert isinstance(link, _Tensors)
        link.arrive(_Parcel(header, copy, link))

    def credit_message(self, peer: Peer, lane: Lane, latency_s: float) -> None:
        """A frame was consumed there."""
        link = self.messages(peer, lane)
        assert isinstance(link, _Messages)
        link.returned(latency_s)

    def credit_tensor(self, peer: Peer, lane: Lane, latency_s: float) -> None:
        """A tensor was released there."""
        link = self.tensors(peer, lane)
        assert isinstance(link, _Tensors)
        link.returned(latency_s)

    # ---- what the base asks for ----

    def _make_messages(self, peer: Peer, lane: Lane) -> MessageLane:
        far = self._linked[peer]
        assert isinstance(far, SimEndpoint)
        return _Messages(self, far, lane)

    def _make_tensors(self, peer: Peer, lane: Lane) -> TensorLane:
        far = self._linked[peer]
        assert isinstance(far, SimEndpoint)
        return _Tensors(self, far, lane)

    def _say_bye(self, peer: Peer) -> None:
        self.wire(peer).carry(0, self._linked[peer]._peer_ended, self.me, sent=None)

    def _shut(self) -> None:
        for peer in self._open_peers():
            self.wire(peer).cut()
        super()._shut()
