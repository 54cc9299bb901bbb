"""The results coroutine: waits for each launch to complete, accounts for its time, and reports what came of it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from pipelined.messages import StageTimes, StepResult, Stopped
from pipelined.rank.launch import failed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from pipelined.messages import FromRank, Outcome
    from pipelined.rank.core import Core
    from pipelined.rank.flight import Flight
    from pipelined.transport import Event

__all__ = ["Results"]

_TIMES_BATCH = 16
"""Stage times are only for learning from: they travel in batches, small ones while there is most to learn."""


class Results:
    """Takes flights in the order of their launch."""

    def __init__(
        self, core: Core, launched: asyncio.Queue[Flight | None], report: Callable[[FromRank], Awaitable[None]]
    ) -> None:
        self._core = core
        self._launched = launched
        self._report = report
        self._times: list[tuple[int, float]] = []

    async def run(self) -> None:
        """Report until there are no more steps."""
        core = self._core
        while (flight := await self._launched.get()) is not None:
            if flight.launch is not None:
                await fired(flight.launch.event)
                self._account(flight)
            if core.config.last:
                await self._tell(flight)
            flight.let_go(core.device)
            core.counts.steps_done += 1
            if len(self._times) >= min(_TIMES_BATCH, 1 + core.counts.steps_done // 4):
                await self._send_times()
        await self._send_times()
        await self._report(Stopped(core.epoch, core.config.rank))

    def _account(self, flight: Flight) -> None:
        core, launch = self._core, flight.launch
        assert launch is not None
        seconds = launch.ended_s - launch.started_s
        core.counts.busy_s += seconds
        if flight.step.prefills:
            core.counts.chunk_s.add(seconds)
        core.deadlines.saw(seconds)
        self._times.append((flight.step.number, seconds))
        detail = core.stage.describe(flight.batch) or str(flight.step.rows)
        core.tracer.add("device", "forward", launch.started_s, launch.ended_s, flight.step.number, detail)

    async def _send_times(self) -> None:
        if self._times:
            times, self._times = tuple(self._times), []
            await self._report(StageTimes(self._core.epoch, self._core.config.rank, times))

    async def _tell(self, flight: Flight) -> None:
        core = self._core
        outcomes: tuple[Outcome, ...] = ()
        error = failed(flight, core)
        if error is None and not core.config.drained:
            try:
                outcomes = await self._collect(flight)
            except Exception as raised:  # noqa: BLE001 - the stage's own code: what it raises voids the step
                error = core.error_at(raised, flight.step)
        await self._report(StepResult(core.epoch, flight.step.number, outcomes, error))

    async def _collect(self, flight: Flight) -> tuple[Outcome, ...]:
        core, launch = self._core, flight.launch
        assert launch is not None
        copy = core.device.to_host(launch.outputs(), after=launch.event)
        await fired(copy.event)
        started_s = core.clock.now()
        outcomes = tuple(core.stage.collect(flight.batch, copy.outputs()))
        core.tracer.add("results", "collect", started_s, core.clock.now(), flight.step.number)
        return outcomes


async def fired(event: Event) -> None:
    """Wait for an event of this rank's own device."""
    if not event.done():
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        event.add_done_callback(lambda: None if waiter.done() else waiter.set_result(None))
        await waiter
