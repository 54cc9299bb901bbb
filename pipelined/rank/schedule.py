"""The schedule coroutine: rank 0 plans steps and sends each to every rank; the others receive them.

Either way a step is applied the same way: the stage prepares it, the receive of its inputs is posted, and it joins the
queue of the launch coroutine.
"""

from __future__ import annotations

import asyncio
import zlib
from typing import TYPE_CHECKING

import msgspec

from pipelined.errors import DeadlineError, EndOfLane, ProtocolError
from pipelined.messages import (
    Cancel,
    CancelInput,
    FromRank,
    NewInputs,
    Outputs,
    Request,
    StageTimes,
    Step,
    StepResult,
    Stop,
    Stopped,
    ToRank,
)
from pipelined.rank.flight import Flight
from pipelined.rank.inputs import Inputs

if TYPE_CHECKING:
    from pipelined.messages import ErrorInfo
    from pipelined.rank.core import Core
    from pipelined.rank.planner import Planner
    from pipelined.transport import MessageLink

__all__ = ["Applier", "Follower", "Leader"]

_encode = msgspec.msgpack.Encoder().encode
_decode_to_rank = msgspec.msgpack.Decoder(ToRank).decode
_decode_from_rank = msgspec.msgpack.Decoder(FromRank).decode


class Applier:
    """Applies steps, in order, once each."""

    def __init__(self, core: Core, prepared: asyncio.Queue[Flight | None]) -> None:
        self._core = core
        self._prepared = prepared
        self._next = 0
        self._inputs = Inputs(core.links.upstream) if core.links.upstream is not None else None

    async def apply(self, step: Step, frame: bytes) -> None:
        """Prepare `step`, post the receive of its inputs, queue it for launching.

        Raises:
            ProtocolError: It is not the next step of this epoch.
            StageError: The stage could not prepare a step without rows.
        """
        core = self._core
        if (step.epoch, step.number) != (core.epoch, self._next):
            raise ProtocolError(
                f"rank {core.config.rank} expected step {self._next} of epoch {core.epoch}; "
                f"got step {step.number} of epoch {step.epoch}"
            )
        self._next += 1
        core.counts.steps_applied += 1
        core.counts.digest = zlib.crc32(frame, core.counts.digest)
        started_s = core.clock.now()
        batch, error = self._prepare(step)
        core.tracer.add("schedule", "prepare", started_s, core.clock.now(), step.number)
        if step.rows:
            core.counts.steps_begun += 1
            flight = Flight(step, batch)
            flight.error = error
            if self._inputs is not None:
                self._inputs.expect(flight)
            await self._prepared.put(flight)
        elif error is not None:  # nothing flows that could carry it, and this stage has parted from the plan
            raise error.exception()

    def _prepare(self, step: Step) -> tuple[object, ErrorInfo | None]:
        try:
            return self._core.stage.prepare(step), None
        except Exception as error:  # noqa: BLE001 - the stage's own code: what it raises voids the step
            return None, self._core.error_at(error, step)

    async def finish(self) -> None:
        """No more steps: the launch coroutine ends after what is queued."""
        await self._prepared.put(None)


class Follower:
    """Every rank but 0: does what it is told, in the order it is told."""

    def __init__(self, core: Core, applier: Applier) -> None:
        self._core = core
        self._applier = applier

    async def run(self) -> None:
        """Apply steps until told to stop. While none is owed, waiting has no deadline: HEALTH tells if rank 0 lives."""
        link, clock, tracer = self._core.links.steps[0], self._core.clock, self._core.tracer
        while True:
            waited_s = clock.now()
            frame = await link.receive()
            tracer.add("schedule", "wait", waited_s, clock.now(), detail="step")
            message = _decode_to_rank(frame)
            if isinstance(message, Stop):
                break
            if not isinstance(message, Step):
                raise ProtocolError(f"rank {self._core.config.rank} got {type(message).__name__} instead of a step")
            await self._applier.apply(message, frame)
        await self._applier.finish()

    async def report(self, message: FromRank) -> None:
        """Send something to rank 0."""
        await self._core.links.results[0].send(_encode(message))


class Leader:
    """Rank 0: hears the driver and all ranks, asks the planner, sends steps."""

    def __init__(self, core: Core, applier: Applier, planner: Planner) -> None:
        self._core = core
        self._applier = applier
        self._planner = planner
        self._in_flight: set[int] = set()
        self._wake = asyncio.Event()
        self._stopping = False
        self._progress_s = 0.0

    def __repr__(self) -> str:
        return f"<Leader in_flight={len(self._in_flight)}/{self._core.config.window} stopping={self._stopping}>"

    async def run(self) -> None:
        """Plan until the driver says stop and everything in flight has come home."""
        links = self._core.links
        assert links.requests is not None
        async with asyncio.TaskGroup() as readers:
            for rank, link in links.results.items():
                readers.create_task(self._read_results(link), name=f"results of rank {rank}")
            requests = readers.create_task(self._read_requests(links.requests), name="requests")
            await self._plan()
            requests.cancel()
            stop = _encode(Stop(self._core.epoch))
            for link in links.steps.values():
                await link.send(stop)
            await self._applier.finish()

    async def report(self, message: FromRank) -> None:
        """Rank 0's own results and times, when it is asked as any rank is."""
        self._heard(message)

    async def _plan(self) -> None:
        core, clock, tracer = self._core, self._core.clock, self._core.tracer
        while True:
            self._wake.clear()
            while len(self._in_flight) < core.config.window:
                started_s = clock.now()
                step = None if self._stopping else self._planner.next_step(started_s)
                if step is None:
                    break
                tracer.add("schedule", "plan", started_s, clock.now(), step.number)
                await self._send(step)
            await self._tell_driver()
            if self._stopping and not self._in_flight:
                return
            waited_s = clock.now()
            cause = "window" if len(self._in_flight) >= core.config.window else "no_work"
            await self._woken()
            now_s = clock.now()
            if cause == "window":
                core.counts.result_wait_s.add(now_s - waited_s)
            tracer.add("schedule", "wait", waited_s, now_s, detail=cause)

    async def _woken(self) -> None:
        """Wait for anything new; while a result is owed, no longer than that may take."""
        core = self._core
        if not self._in_flight:
            await self._wake.wait()
            return
        timeout_s = core.deadlines.timeout_s
        try:
            async with core.clock.timeout(max(0.0, self._progress_s + timeout_s - core.clock.now())):
                await self._wake.wait()
        except TimeoutError as error:
            raise DeadlineError(
                f"rank 0, lane RESULTS: the result of step {min(self._in_flight)} from rank {core.config.size - 1} "
                f"did not come within {timeout_s:g} s"
            ) from error

    async def _send(self, step: Step) -> None:
        if step.rows:
            if not self._in_flight:
                self._progress_s = self._core.clock.now()
            self._in_flight.add(step.number)
        frame = _encode(step)
        for link in self._core.links.steps.values():
            await link.send(frame)
        await self._applier.apply(step, frame)

    async def _tell_driver(self) -> None:
        outputs, progress = tuple(self._planner.news()), tuple(self._planner.progress())
        if outputs or progress:
            assert self._core.links.news is not None
            await self._core.links.news.send(_encode(Outputs(outputs, progress)))
            self._core.counts.told += 1

    async def _read_results(self, link: MessageLink) -> None:
        while not isinstance(message := _decode_from_rank(await link.receive()), Stopped):
            self._heard(message)

    def _heard(self, message: FromRank) -> None:
        if isinstance(message, StepResult):
            if message.epoch != self._core.epoch or message.number not in self._in_flight:
                raise ProtocolError(f"a result for step {message.number} of epoch {message.epoch}, which is not owed")
            self._in_flight.discard(message.number)
            self._progress_s = self._core.clock.now()
            self._planner.apply(message)
            self._wake.set()
        elif isinstance(message, StageTimes):
            self._core.deadlines.saw(max((seconds for _, seconds in message.times), default=0.0))
            self._planner.observe(message)
        elif not isinstance(message, Stopped):
            raise ProtocolError(f"rank 0 got {type(message).__name__} instead of a result")

    async def _read_requests(self, link: MessageLink) -> None:
        try:
            while True:
                frame = await link.receive()
                self._core.counts.heard += 1
                self._asked(_decode_to_rank(frame))
        except EndOfLane:
            self._stop()

    def _asked(self, message: ToRank) -> None:
        if isinstance(message, Request | NewInputs):
            self._planner.submit(message)
        elif isinstance(message, Cancel | CancelInput):
            self._planner.cancel(message.id)
        elif isinstance(message, Stop):
            self._stop()
        else:
            raise ProtocolError(f"rank 0 got {type(message).__name__} from the driver")
        self._wake.set()

    def _stop(self) -> None:
        self._stopping = True
        self._wake.set()
