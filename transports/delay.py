"""`delay+`: latency, bandwidth and jitter in front of any transport: `delay+shm://?latency_us=500&jitter_us=100`.

What the transport itself takes comes on top. In real time the loop's timers set the precision, 1 to 2 ms.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import TYPE_CHECKING

from pipelined.transport.options import integer_option, number_option
from pipelined.transport.taps import HoldingTap, Outgoing

from .wrapped import WrappedTransport

if TYPE_CHECKING:
    from pipelined.messages import Peer
    from pipelined.transport import EndpointSpec, Transport
    from pipelined.transport.endpoint import BaseEndpoint
    from pipelined.transport.lane_end import LaneEnd

__all__ = ["DelayTransport"]


class DelayTransport(WrappedTransport):
    """See the module. Options, each off by default.

    - `latency_us`: added to each frame.
    - `bandwidth_gbytes_per_s`: all lanes to one peer share it, first come, first served; 10**9 bytes a second.
    - `jitter_us`: up to that much more, at random; order on a lane is kept.
    - `delay_seed`: of the jitter. The same for the same (peers, epoch, lane), whatever the timing.
    """

    name = "delay"
    options = ("latency_us", "bandwidth_gbytes_per_s", "jitter_us", "delay_seed")

    def __init__(self, inner: Transport, options: dict[str, str]) -> None:
        super().__init__(inner, options)
        self.latency_s = number_option(self.scheme, options, "latency_us", 0.0) * 1e-6
        gbytes_per_s = number_option(self.scheme, options, "bandwidth_gbytes_per_s", math.inf, at_least=1e-9)
        self.bytes_per_s = gbytes_per_s * 1e9
        self.jitter_s = number_option(self.scheme, options, "jitter_us", 0.0) * 1e-6
        self.seed = integer_option(self.scheme, options, "delay_seed") or 0

    def tapped(self, spec: EndpointSpec) -> EndpointSpec:
        """See `WrappedTransport`."""
        free_s: dict[Peer, float] = {}  # when everything sent to a peer so far will have left

        def tap(endpoint: BaseEndpoint, lane: LaneEnd) -> _DelayTap:
            return _DelayTap(endpoint, lane, self, free_s)

        return replace(spec, taps=(*spec.taps, tap))


class _DelayTap(HoldingTap):
    def __init__(self, endpoint: BaseEndpoint, lane: LaneEnd, model: DelayTransport, free_s: dict[Peer, float]) -> None:
        super().__init__(endpoint, lane)
        self._model = model
        self._free_s = free_s
        self._last_s = -math.inf
        place = f"{endpoint.me}>{lane.peer} {endpoint.spec.epoch} {lane.lane.name} {lane.kind}"
        self._random = random.Random(f"delay {model.seed} {place}")

    def outgoing(self, item: Outgoing) -> None:
        """See `Tap`."""
        model, peer, now_s = self._model, self.lane.peer, self.clock.now()
        leaves_s = max(now_s, self._free_s.get(peer, now_s)) + item.charged_bytes / model.bytes_per_s
        self._free_s[peer] = leaves_s
        jitter_s = model.jitter_s and self._random.random() * model.jitter_s
        self._last_s = max(self._last_s, leaves_s + model.latency_s + jitter_s)
        self.hold(item, self._last_s)
