"""The HEALTH lane of a rank: answers pings and questions from the loop, whatever the device does."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any

import msgspec

from pipelined.errors import EndOfLane, ProtocolError
from pipelined.messages import HealthMessage, Ping, Pong, Query, Report

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pipelined.clock import Clock
    from pipelined.rank.core import Counts
    from pipelined.stage import Stage
    from pipelined.trace import Tracer
    from pipelined.transport import MessageLink

__all__ = ["Health", "resident_bytes"]

_SPANS_A_PART = 4_000

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(HealthMessage).decode


class Health:
    """Serves one rank, for one epoch."""

    def __init__(
        self, link: MessageLink, *, rank: int, stage: Stage, clock: Clock, counts: Counts, tracer: Tracer
    ) -> None:
        self._link = link
        self._rank = rank
        self._stage = stage
        self._clock = clock
        self._counts = counts
        self._tracer = tracer
        self._rss_imports_bytes = resident_bytes()  # the stage has been made, but not set up
        self.integrity: Callable[[], dict[str, int]] = lambda: {}
        self.planning: Callable[[], Mapping[str, Any]] | None = None

    async def run(self) -> None:
        """Answer until the driver is gone."""
        try:
            while True:
                message = _decode(await self._link.receive())
                if isinstance(message, Ping):
                    await self._link.send(_encode(self._pong(message.number)))
                elif isinstance(message, Query):
                    await self._answer(message)
                else:
                    raise ProtocolError(f"rank {self._rank} got {type(message).__name__} on the HEALTH lane")
        except EndOfLane:
            return

    def _pong(self, number: int) -> Pong:
        counts = self._counts
        return Pong(number, counts.steps_done, counts.heard, counts.told)

    async def _answer(self, query: Query) -> None:
        parts = self._trace_parts() if query.what == "trace" else [self._body(query.what)]
        for index, body in enumerate(parts):
            report = Report(query.number, query.what, body, more=index < len(parts) - 1)
            await self._link.send(_encode(report))

    def _body(self, what: str) -> dict[str, Any]:
        if what == "stats":
            return {
                "rank": self._rank,
                "stage": self._stage.name,
                "now_s": self._clock.now(),
                "rss_bytes": resident_bytes(),
                "rss_imports_bytes": self._rss_imports_bytes,
                **dataclasses.asdict(self._counts),
                **self._stage.stats(),
                **({"planner": dict(self.planning())} if self.planning is not None else {}),
            }
        if what == "integrity":
            return self.integrity()
        raise ProtocolError(f"unknown query {what!r}: expected stats, trace or integrity")

    def _trace_parts(self) -> list[list[Any]]:
        spans = self._tracer.drain()
        return [spans[at : at + _SPANS_A_PART] for at in range(0, max(1, len(spans)), _SPANS_A_PART)]


def resident_bytes() -> int:
    """Memory that this process has in RAM, mapped files (weights) included; 0 where that can't be known."""
    try:
        with open("/proc/self/statm") as file:
            pages = file.read().split()
    except OSError:
        return 0
    return int(pages[1]) * os.sysconf("SC_PAGE_SIZE")
