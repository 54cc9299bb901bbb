"""What the ranks do, in numbers that only grow, and as pieces of time: asked for when somebody looks, and not before.

Counts of a rank begin again with each epoch; here they go on. Why a stage was idle follows from all ranks' spans
together, so that it is worked out here, window after window: up to the moment until which every rank's work is known,
since a forward is only told of when it is over.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from pipelined.clock import off_loop
from pipelined.errors import PipelinedError
from pipelined.trace import BUSY, CAUSES, Histogram, RankTrace, Segment, Trace, segments

if TYPE_CHECKING:
    from pipelined.llm import AsyncLLM
    from pipelined.trace import Span

__all__ = ["RankFeed", "RankTotals"]

KEPT_S: Final = 30.0
"""So much of the timeline is kept."""

_MARGIN_FORWARDS: Final = 8
_MARGIN_S: Final = (0.25, 60.0)
"""Spans before a window are looked at, too, since causes lie in the past: as far back as so many long forwards."""

_PAUSE_S: Final = 10.0
"""Of a time in which nobody asked, no more than that is worked out afterwards."""

_STUCK_S: Final = 120.0
"""A forward is waited for no longer than that: from then on its rank counts as idle."""

_ANSWER_S: Final = 2.0
_INTEREST_S: Final = 300.0
_EVERY_S: Final = 2.0
_MOST_SPANS: Final = 65_536

_COUNTED: Final = ("steps_done", "steps_void", "busy_s", "sent_bytes")
_MEASURED: Final = ("chunk_s", "input_wait_s", "credit_wait_s", "result_wait_s")


@dataclass
class RankTotals:
    """One rank, through all epochs.

    Attributes:
        latest: What it last said of itself, as `AsyncLLM.stats` gives it.
        counts: Sums by name. histograms: likewise.
        idle_s: Idle time by cause, of those `CAUSES` that were worked out.
        pieces: Busy and idle pieces of late, in nanoseconds since the feed's origin.
    """

    latest: dict[str, Any] = field(default_factory=dict)
    counts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_COUNTED, 0.0))
    histograms: dict[str, Histogram] = field(default_factory=dict)
    idle_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0))
    pieces: deque[Segment] = field(default_factory=deque)
    spans: deque[Span] = field(default_factory=lambda: deque(maxlen=_MOST_SPANS))

    def take(self, stats: dict[str, Any], *, anew: bool) -> None:
        """Add what is new in `stats`. `anew`: an epoch has begun since the last time, and its counts with it."""
        before = {} if anew else self.latest
        for name in _COUNTED:
            self.counts[name] += max(0, stats[name] - before.get(name, 0))
        for name in _MEASURED:
            mine = self.histograms.setdefault(name, Histogram(tuple(stats[name]["bounds"])))
            old = before.get(name) or {"counts": [0] * len(mine.counts), "total": 0.0}
            mine.counts = [a + b - c for a, b, c in zip(mine.counts, stats[name]["counts"], old["counts"], strict=True)]
            mine.total += stats[name]["total"] - old["total"]
        self.latest = stats

    @property
    def known_s(self) -> float:
        """Until when all of its work is known."""
        if self.latest["steps_begun"] == self.latest["steps_done"]:
            return float(self.latest["now_s"])
        return max((span.end_s for span in self.spans if span.track == "device"), default=0.0)


class RankFeed:
    """The one who asks the ranks, for everybody who wants to know.

    Attributes:
        ranks: By number.
        origin_s: Times of pieces count from here, by the engine's clock.
        known_s: Until then everything is worked out.
        planner: What rank 0's planner says of itself.
        reachable: Whether the ranks answered the last time.
        evictions, preemptions: Of all epochs.
    """

    def __init__(self, engine: AsyncLLM) -> None:
        self._engine = engine
        self.ranks = {rank: RankTotals() for rank in range(len(engine.layers))}
        self.origin_s = self.known_s = 0.0
        self._begun = False
        self.planner: dict[str, Any] = {}
        self.reachable = False
        self.evicted_pages = self.preemptions = 0
        self._epoch: int | None = None
        self._asking = asyncio.Lock()
        self._asked_s = self._wanted_s = float("-inf")
        self._recording: dict[int, deque[Span]] | None = None

    def __repr__(self) -> str:
        return f"<RankFeed {len(self.ranks)} ranks known until {self.known_s - self.origin_s:.1f} s>"

    # ---- asking ----

    async def refresh(self, oldest_s: float = 0.5) -> None:
        """Ask the ranks, unless that was done within `oldest_s`. Does nothing while they can't be reached."""
        loop = asyncio.get_running_loop()
        self._wanted_s = loop.time()
        async with self._asking:
            if loop.time() - self._asked_s >= oldest_s:
                await self._ask()
                self._asked_s = loop.time()

    async def run(self) -> None:
        """For ever: while somebody looks from time to time, look in between as well, so that windows stay short."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_EVERY_S)
            wanted_s = self._wanted_s
            if loop.time() - wanted_s < _INTEREST_S:
                await self.refresh(_EVERY_S / 2)
                self._wanted_s = wanted_s

    async def _ask(self) -> None:
        engine, epoch = self._engine, self._engine.state.epoch
        if not self._begun and engine.state.epoch is not None:
            self.origin_s = self.known_s = engine.now()
            self._begun = True
        try:
            async with asyncio.timeout(_ANSWER_S):
                stats = await engine.stats()
                spans = await engine.trace()
        except (TimeoutError, PipelinedError):
            self.reachable = False
            return
        self.reachable = True
        if asyncio.get_running_loop().time() - self._asked_s > _PAUSE_S:
            self._skip(engine.now() - _PAUSE_S)
        anew, self._epoch = epoch != self._epoch, epoch
        for rank, totals in self.ranks.items():
            if rank in stats:
                totals.take(stats[rank], anew=anew)
            totals.spans.extend(spans.get(rank, ()))
            if self._recording is not None:
                self._recording[rank].extend(spans.get(rank, ()))
        self._plan(stats.get(0, {}).get("planner", {}), anew=anew)
        if self._window() is not None:
            await off_loop(self._work_out)

    def _plan(self, planner: dict[str, Any], *, anew: bool) -> None:
        before = {} if anew else self.planner
        self.evicted_pages += max(0, planner.get("evicted_pages", 0) - before.get("evicted_pages", 0))
        self.preemptions += max(0, planner.get("preemptions", 0) - before.get("preemptions", 0))
        self.planner = planner

    # ---- working out ----

    def _window(self) -> tuple[float, float] | None:
        """What can be worked out now."""
        now_s = self._engine.now()
        known_s = max(min(totals.known_s for totals in self.ranks.values()), now_s - _STUCK_S)
        return (self.known_s, known_s) if known_s > self.known_s else None

    def _skip(self, until_s: float) -> None:
        """What lies before is not worked out any more."""
        if until_s > self.known_s:
            self.known_s = until_s
            for totals in self.ranks.values():
                totals.pieces.clear()  # they are to lie back to back

    def _work_out(self) -> None:
        window = self._window()
        if window is None:
            return
        begun_s, known_s = window
        margin_s = self._margin_s()
        first_s = max(self.origin_s, begun_s - margin_s)
        traces = [
            RankTrace(rank, "", [span for span in totals.spans if span.end_s >= first_s])
            for rank, totals in self.ranks.items()
        ]
        cut_ns, offset_ns = round((begun_s - first_s) * 1e9), round((first_s - self.origin_s) * 1e9)
        for totals, pieces in zip(self.ranks.values(), segments(Trace(traces, first_s, known_s)), strict=True):
            for piece in pieces:
                start_ns = max(piece.start_ns, cut_ns)
                if start_ns >= piece.end_ns:
                    continue
                if piece.cause != BUSY:
                    totals.idle_s[piece.cause] += (piece.end_ns - start_ns) / 1e9
                totals.pieces.append(piece._replace(start_ns=start_ns + offset_ns, end_ns=piece.end_ns + offset_ns))
            self._forget(totals, known_s, margin_s)
        self.known_s = known_s

    def _margin_s(self) -> float:
        forwards = (span for totals in self.ranks.values() for span in totals.spans if span.track == "device")
        longest_s = max((span.end_s - span.start_s for span in forwards), default=0.0)
        return min(max(_MARGIN_FORWARDS * longest_s, _MARGIN_S[0]), _MARGIN_S[1])

    def _forget(self, totals: RankTotals, known_s: float, margin_s: float) -> None:
        while totals.spans and totals.spans[0].end_s < known_s - margin_s:
            totals.spans.popleft()
        oldest_ns = round((known_s - KEPT_S - self.origin_s) * 1e9)
        while totals.pieces and totals.pieces[0].end_ns < oldest_ns:
            totals.pieces.popleft()

    # ---- recording ----

    async def record(self) -> None:
        """Keep all spans from now on."""
        await self.refresh(0.0)
        self._recording = {rank: deque(maxlen=4 * _MOST_SPANS) for rank in self.ranks}

    async def recorded(self) -> dict[int, list[Span]]:
        """What was kept since, by rank; and no more is."""
        await self.refresh(0.0)
        recording, self._recording = self._recording or {}, None
        return {rank: list(spans) for rank, spans in recording.items()}
