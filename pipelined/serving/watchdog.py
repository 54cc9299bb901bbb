"""Notices that work is owed and nothing moves: says where it is stuck, and has the pipeline begin anew."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from pipelined.errors import ConfigError, DeadlineError, PipelinedError, RankLostError

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipelined.llm import AsyncLLM

__all__ = ["Watchdog"]

logger = logging.getLogger("pipelined.serving")

_LOOKS = 10
"""Within the time-out."""


class Watchdog:
    """Looks at the ranks' progress from time to time."""

    def __init__(self, engine: AsyncLLM, owed: Callable[[], bool], timeout_s: float) -> None:
        """Args: owed: whether there is work. timeout_s: without progress for so long, it is stuck."""
        self._engine = engine
        self._owed = owed
        self._timeout_s = timeout_s

    async def run(self) -> None:
        """For ever."""
        loop = asyncio.get_running_loop()
        seen: Any = None
        since_s = loop.time()
        while True:
            await asyncio.sleep(self._timeout_s / _LOOKS)
            if not self._owed() or self._engine.state.name != "ready":
                seen, since_s = None, loop.time()
                continue
            progress = await self._progress()
            if progress != seen:
                seen, since_s = progress, loop.time()
            elif loop.time() - since_s >= self._timeout_s:
                self._bite(progress)
                seen, since_s = None, loop.time()

    async def _progress(self) -> dict[int, int] | str:
        """Steps that each rank has done; or why they can't be asked, which names who is silent."""
        try:
            stats = await self._engine.stats()
        except DeadlineError as error:
            return str(error)
        except (ConfigError, PipelinedError):  # lost meanwhile, which others see to
            return ""
        return {rank: own["steps_applied"] + own["steps_done"] for rank, own in stats.items()}

    def _bite(self, progress: dict[int, int] | str) -> None:
        text = f"no progress for {self._timeout_s:g} s while requests wait: "
        rank = None
        if isinstance(progress, dict) and progress:
            rank = min(progress, key=lambda each: (progress[each], each))
            told = ", ".join(f"rank {each}: {done}" for each, done in sorted(progress.items()))
            first, end = self._engine.layers[rank]
            text += f"rank {rank} (layers {first}-{end - 1}) is behind (steps taken and done: {told})"
        else:
            text += str(progress) or "the ranks cannot be asked"
        logger.error("watchdog: %s", text)
        self._engine.lose(RankLostError(text, rank=rank))
