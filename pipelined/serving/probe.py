"""Really runs a token through every stage, one probe at a time however many ask."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING

from pipelined.messages import SamplingParams

if TYPE_CHECKING:
    from pipelined.llm import AsyncLLM

__all__ = ["Probe"]


class Probe:
    """Asks the engine for one token."""

    def __init__(self, engine: AsyncLLM, timeout_s: float) -> None:
        self._engine = engine
        self._timeout_s = timeout_s
        self._one = asyncio.Lock()
        self._begun = itertools.count(1)
        self._latest = 0
        self._error: Exception | None = None

    async def run(self) -> None:
        """Returns once a probe that began after the call has its token. Probes don't pile up: all share the next one.

        Raises:
            TimeoutError: There was no token in time.
            PipelinedError: The engine cannot.
        """
        arrived = self._latest
        async with self._one:
            if self._latest == arrived:  # else one has begun since, and ended
                await self._ask()
        if self._error is not None:
            raise self._error

    async def _ask(self) -> None:
        self._latest = number = next(self._begun)
        self._error = TimeoutError("the probe was given up")
        params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
        try:
            async with asyncio.timeout(self._timeout_s):
                async for _ in self._engine.generate([0], params, f"health-{number}"):
                    pass
            self._error = None
        except Exception as error:  # noqa: BLE001 - for everyone who waits for this probe
            self._error = error
