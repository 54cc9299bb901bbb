"""The launch coroutine: takes the next step, awaits its inputs, hands it to the device."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from pipelined.errors import ProtocolError, TransportError
from pipelined.messages import ErrorInfo
from pipelined.rank.payload import MAX_TENSORS

if TYPE_CHECKING:
    import asyncio

    from pipelined.rank.core import Core
    from pipelined.rank.flight import Flight
    from pipelined.transport import Received, Transfer

__all__ = ["Launcher"]


class Launcher:
    """Keeps the device fed: while it computes one step, the next is launched or waits for its inputs here."""

    def __init__(
        self,
        core: Core,
        prepared: asyncio.Queue[Flight | None],
        results: asyncio.Queue[Flight | None],
        commits: asyncio.Queue[Flight | None] | None,
    ) -> None:
        self._core = core
        self._prepared = prepared
        self._results = results
        self._commits = commits

    async def run(self) -> None:
        """Launch until there are no more steps."""
        clock, tracer, counts = self._core.clock, self._core.tracer, self._core.counts
        while True:
            waited_s = clock.now()
            flight = await self._prepared.get()
            if flight is None:
                break
            tracer.add("launch", "wait", waited_s, clock.now(), flight.step.number, "step")
            waited_s = clock.now()
            await self._inputs(flight)
            if flight.transfers:
                now_s = clock.now()
                counts.input_wait_s.add(now_s - waited_s)
                tracer.add("launch", "wait", waited_s, now_s, flight.step.number, "input")
            self._launch(flight)
            waited_s = clock.now()
            await self._results.put(flight)
            if self._commits is not None:
                await self._commits.put(flight)
            tracer.add("launch", "wait", waited_s, clock.now(), flight.step.number, "credit")
        await self._results.put(None)
        if self._commits is not None:
            await self._commits.put(None)

    async def _inputs(self, flight: Flight) -> None:
        step = flight.step
        if self._core.links.upstream is None:
            return
        # Inputs are posted in order, and those of the steps before have arrived: the first receive is posted.
        received = [await self._arrived(flight.transfers[0], flight)]
        head = received[0].header
        for transfer in flight.transfers[1:]:
            received.append(await self._arrived(transfer, flight))
        if head.count != len(received):
            raise ProtocolError(f"step {step.number} announces {head.count} tensors; expected 1 to {MAX_TENSORS}")
        if head.rows != step.rows:
            raise ProtocolError(
                f"rank {self._core.config.rank}: the plan says {step.rows} rows for step {step.number}, "
                f"its tensors say {head.rows}"
            )
        error = flight.error  # of this stage's own `prepare`
        flight.take_inputs(received)
        flight.error = flight.error or error

    async def _arrived(self, transfer: Transfer[Received], flight: Flight) -> Received:
        if transfer.done() and transfer.error is None:
            return transfer.result()
        config = self._core.config
        who = f"rank {config.rank}, stage {self._core.stage.name}, lane HIDDEN: step {flight.step.number} from "
        who += "the driver" if config.first else f"rank {config.rank - 1}"
        try:
            return await self._core.deadlines.wait(transfer, who)
        except TransportError as error:
            raise type(error)(f"{who}: {error}") from error

    def _launch(self, flight: Flight) -> None:
        core = self._core
        flight.hold()  # for the launch, or for this function if there is none
        flight.hold()  # for the results coroutine
        if self._commits is not None:
            flight.hold()
        if flight.error is not None:
            core.counts.steps_void += 1
            flight.let_go(core.device)
            return
        try:
            cost = core.stage.cost(flight.batch)
            work = partial(core.stage.forward, flight.batch, flight.inputs)
            launch = core.device.launch(work, cost=cost, reads=flight.reads())
        except Exception as error:  # noqa: BLE001 - the stage's own code, and what a time model makes of its cost
            core.counts.steps_void += 1
            flight.error = core.error_at(error, flight.step)
            flight.let_go(core.device)
            return
        flight.launched(launch)
        launch.event.add_done_callback(partial(flight.let_go, core.device))


def failed(flight: Flight, core: Core) -> ErrorInfo | None:
    """Why the step is void, once its outputs are known; None if it is not."""
    if flight.error is None and flight.launch is not None:
        try:
            flight.launch.outputs()
        except Exception as error:  # noqa: BLE001 - the stage's own code: what it raises voids the step
            flight.error = core.error_at(error, flight.step)
            core.counts.steps_void += 1
    return flight.error
