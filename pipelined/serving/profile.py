"""Records what the ranks do between two moments, as a Chrome trace."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from pipelined.serving.problems import Problem
from pipelined.trace import RankTrace, Trace, write_chrome

if TYPE_CHECKING:
    from pipelined.llm import AsyncLLM
    from pipelined.serving.metrics_ranks import RankFeed

__all__ = ["Profiler"]


class Profiler:
    """One recording at a time."""

    def __init__(self, engine: AsyncLLM, feed: RankFeed, folder: str) -> None:
        self._engine = engine
        self._feed = feed
        self._folder = folder
        self._started_s: float | None = None

    async def start(self) -> None:
        """From now on.

        Raises:
            Problem: One is under way.
        """
        if self._started_s is not None:
            raise Problem(409, "a profile is being recorded already; stop it first", code="profile_running")
        self._started_s = self._engine.now()
        await self._feed.record()

    async def stop(self) -> Trace:
        """Until now.

        Raises:
            Problem: None is under way.
        """
        if self._started_s is None:
            raise Problem(409, "no profile is being recorded; start one first", code="no_profile")
        started_s, self._started_s = self._started_s, None
        spans = await self._feed.recorded()
        engine, ended_s = self._engine, self._engine.now()
        ranks = [RankTrace(rank, "layers {}-{}".format(*engine.layers[rank]), own) for rank, own in spans.items()]
        return Trace(ranks, started_s, ended_s, {"model": engine.info.ref, "pp_size": len(ranks)})

    def write(self, trace: Trace) -> str:
        """To a file of its own; blocks. Returns its path."""
        path = Path(self._folder) / f"profile-{datetime.now(UTC):%Y%m%d-%H%M%S-%f}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_chrome(trace, path)
        return str(path.resolve())
