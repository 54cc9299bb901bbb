"""Pipelines of one's own: `async with Pipeline([A(), B(), C()]) as pipe`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from pipelined.errors import ConfigError, EngineClosedError, PipelinedError, TransportError
from pipelined.messages import CancelInput, ErrorInfo, NewInputs, TensorHeader
from pipelined.pipeline.driver import Driver
from pipelined.pipeline.fifo import FifoPlanner
from pipelined.pipeline.owed import Owed, own_copy
from pipelined.pipeline.payload_stage import as_stage
from pipelined.pipeline.process_world import ProcessWorld
from pipelined.pipeline.worlds import TaskWorld, World
from pipelined.rank import LinkPlan, RankConfig
from pipelined.rank.deadlines import Deadlines
from pipelined.rank.description import RankDescription
from pipelined.rank.payload import join, split
from pipelined.trace import Span

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Coroutine, Iterable, Sequence

    from pipelined.stage import Payload
    from pipelined.transport import TensorLink

__all__ = ["Pipeline"]

Frame = tuple[TensorHeader, torch.Tensor]


class Pipeline:
    """Runs inputs through a chain of stages, each on a rank of its own, several inputs at a time.

    A stage is any object with `forward(x) -> y` (or a plain function), where x and y are dicts of tensors and of
    builtins that msgspec can encode; it may have `setup(ctx)` and `teardown()`. Its work runs off the event loop.
    Inputs are read-only memory of the transport, valid during the call.

    Order: outputs come in the order of submission. An exception in a stage fails that input alone. A rank that dies
    fails everything in flight with an error that names it; the pipeline is over then.
    """

    def __init__(
        self,
        stages: Sequence[Any],
        *,
        workers: str = "task",
        transport: str | None = None,
        messages: str | None = None,
        device: str = "cpu",
        threads_per_rank: int | None = 1,
        depth: int | None = None,
        step_timeout_s: float = 300.0,
        setup_timeout_s: float = 120.0,
        heartbeat_bound_s: float = 15.0,
        world: World | None = None,
        name: str | None = None,
    ) -> None:
        """Describe a pipeline; nothing starts before `async with`.

        Args:
            stages: First to last.
            workers: "task": all ranks in this process and loop; "process": a process each, to which the stage objects
                are sent by multiprocessing's spawn (so they must be picklable, and a script needs its main guard).
            transport: URI for tensors; default memory:// for tasks, shm:// for processes.
            messages: URI for metadata; default the tensor transport if it carries messages, else zmq://.
            device: "cpu", "stream", "emulated" or "cuda".
            threads_per_rank: CPU threads of each stage's computations.
            depth: How many steps beyond one a rank may be in flight; default as many as there are ranks, at least 2,
                so that hand-offs that take half as long as a stage's work cost no throughput.
            step_timeout_s: Floor of every deadline on a peer that owes work.
            setup_timeout_s: All ranks must be ready within this time.
            heartbeat_bound_s: A rank whose loop is silent for so long counts as lost.
            world: Where the ranks live, instead of what `workers` says.
            name: For links and errors.

        Raises:
            ConfigError: Something of this cannot be.
        """
        if not stages:
            raise ConfigError("a pipeline needs at least one stage")
        if workers not in ("task", "process"):
            raise ConfigError(f"workers={workers!r}: expected 'task' or 'process'")
        if depth is not None and depth < 1:
            raise ConfigError(f"depth={depth}: expected at least 1")
        processes = world.processes if world is not None else workers == "process"
        self._stages = [as_stage(stage) for stage in stages]
        self._plan = LinkPlan.choose(
            transport or ("shm://" if processes else "memory://"), processes=processes, messages=messages
        )
        self._world = world
        self._processes = processes
        size = len(stages)
        first = RankConfig(
            pipeline=name or "pipeline",
            rank=0,
            size=size,
            window=size + (depth or max(2, size)),
            fed=True,
            drained=True,
            step_timeout_s=step_timeout_s,
            setup_timeout_s=setup_timeout_s,
            heartbeat_bound_s=heartbeat_bound_s,
        )
        self._descriptions = [
            RankDescription(config=replace(first, rank=rank), links=self._plan, device=device, threads=threads_per_rank)
            for rank in range(size)
        ]
        self._limit = self._descriptions[0].config.window
        self._driver: Driver | None = None
        self._next_id = 0
        self._owed: set[Owed] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        names = " > ".join(stage.name for stage in self._stages)
        return f"<Pipeline {names} {'open' if self._driver else 'closed'}>"

    # ---- life ----

    async def __aenter__(self) -> Pipeline:
        """Start the ranks and wait until all are ready.

        Raises:
            PipelinedError: One could not set up; names it.
        """
        world = self._world or (ProcessWorld() if self._processes else TaskWorld())
        driver = Driver(self._descriptions, world, stages=self._stages, planner=FifoPlanner())
        await driver.__aenter__()
        self._driver = driver
        self._deadlines = Deadlines(driver.clock, driver.config.step_timeout_s, driver.config.window)
        self._slots = asyncio.Semaphore(self._limit)
        self._posting = asyncio.Lock()
        self._posted: asyncio.Queue[Owed] = asyncio.Queue()
        self._next_id = 0
        self._over: PipelinedError | None = None
        driver.failure.add_done_callback(lambda failure: self._finish(failure.result()))
        self._group = await asyncio.TaskGroup().__aenter__()
        self._spawn(self._read_outputs(), "pipeline outputs")
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Stop the ranks; what is unfinished fails with `EngineClosedError`."""
        driver, self._driver = self._driver, None
        assert driver is not None
        self._finish(EngineClosedError("the pipeline was closed"))
        try:
            for task in self._tasks:
                task.cancel()
            await self._group.__aexit__(None, None, None)
        finally:
            await driver.__aexit__(*exc)

    def _finish(self, error: PipelinedError) -> None:
        """Nothing more will come: whoever waits, for an output or for room, learns why. The first error counts."""
        if self._over is None:
            self._over = error
            for owed in tuple(self._owed):
                owed.fail(error)
            self._slots.release()  # each that it wakes wakes the next

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = self._group.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _open(self) -> Driver:
        if self._driver is None:
            raise ConfigError("the pipeline is not open; use `async with Pipeline(...) as pipe:`")
        if self._driver.failure.done():
            raise self._driver.failure.result()
        return self._driver

    # ---- inputs ----

    async def submit(self, x: Payload) -> Payload:
        """Send one input through; returns its output. Waits while too many are in flight.

        If the wait is cancelled, the stages that have not seen the input skip it.

        Raises:
            StageError: A stage raised on it; carries the stage's traceback.
            ConfigError: The payload cannot travel.
            PipelinedError: The pipeline cannot go on.
        """
        self._open()
        owed = await self._post(split(x, step=0, rows=1))
        try:
            return await owed.future
        finally:
            self._forget(owed)

    def _forget(self, owed: Owed) -> None:
        """Nobody waits for it any more: if it is not through yet, the stages may skip it."""
        if not owed.future.done() or owed.future.cancelled():
            owed.future.cancel()
            if owed.id >= 0 and owed in self._owed and self._driver is not None:
                self._driver.tell_nowait(CancelInput(owed.id))

    async def _post(self, frames: list[Frame]) -> Owed:
        """Send an input on its way, once there is room. Its errors are in the future, whatever happens."""
        await self._slots.acquire()
        owed = Owed()
        self._owed.add(owed)
        if self._over is not None:
            self._slots.release()
            self._settle(owed, self._over)
            return owed
        link = self._open().links.downstream
        assert link is not None
        if not self._posting.locked() and link.credits() >= len(frames):
            for header, tensor in frames:
                link.post_send(tensor, msgspec.structs.replace(header, step=self._next_id))
            self._announce(owed)
            return owed
        # Posting suspends, and must not stop half-way if the caller is cancelled.
        task = self._spawn(self._post_all(link, frames, owed), "pipeline input")
        try:
            await asyncio.wait((task, owed.future), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._forget(owed)
            raise
        return owed

    async def _post_all(self, link: TensorLink, frames: list[Frame], owed: Owed) -> None:
        driver = self._open()
        try:
            async with self._posting:
                for header, tensor in frames:
                    if link.credits() == 0:
                        who = f"the driver, lane HIDDEN: a credit for input {self._next_id}"
                        await self._deadlines.wait(link.ready(), who)
                    link.post_send(tensor, msgspec.structs.replace(header, step=self._next_id))
                self._announce(owed)
        except TransportError:
            driver.lose(await driver.failed())
        except PipelinedError as error:
            driver.lose(error)

    def _announce(self, owed: Owed) -> None:
        """All its tensors are posted: number it and tell rank 0. Never suspends."""
        owed.id = self._next_id
        self._next_id += 1
        self._posted.put_nowait(owed)
        driver = self._open()
        driver.tell_nowait(NewInputs((owed.id,)))
        if owed.future.cancelled():
            driver.tell_nowait(CancelInput(owed.id))

    def _settle(self, owed: Owed, output: Payload | ErrorInfo | Exception) -> None:
        self._owed.discard(owed)
        if isinstance(output, Exception):
            owed.fail(output)
        else:
            owed.settle(output)

    async def stream(
        self, xs: Iterable[Payload] | AsyncIterable[Payload], *, return_exceptions: bool = False
    ) -> AsyncGenerator[Any]:
        """Send inputs through, as many at a time as may be in flight; yields outputs in order.

        Args:
            xs: Inputs; taken only as fast as they fit, from a synchronous iterable on the loop.
            return_exceptions: Yield the error of an input in its place and go on, rather than raise it.

        Closing the generator cancels what it has not yielded.
        """
        self._open()
        ahead: asyncio.Queue[Owed | None] = asyncio.Queue()
        room = asyncio.Semaphore(self._limit)
        feeder = self._spawn(self._feed(xs, ahead, room), "pipeline stream")
        try:
            while (owed := await ahead.get()) is not None:
                room.release()
                try:
                    output = await owed.future
                except PipelinedError as error:
                    if not return_exceptions or error is self._over:
                        raise
                    yield error
                else:
                    yield output
                finally:
                    self._forget(owed)
        finally:
            feeder.cancel()
            while not ahead.empty():
                if (owed := ahead.get_nowait()) is not None:
                    self._forget(owed)

    async def _feed(
        self,
        xs: Iterable[Payload] | AsyncIterable[Payload],
        ahead: asyncio.Queue[Owed | None],
        room: asyncio.Semaphore,
    ) -> None:
        end = Owed()  # for what ends the stream before its inputs do
        try:
            async for x in each_of(xs):
                await room.acquire()
                ahead.put_nowait(await self._post_or_refuse(x))
        except asyncio.CancelledError:
            end.fail(self._over or EngineClosedError("the stream was closed"))
            raise
        except Exception as error:  # noqa: BLE001 - raised by the user's iterable: it belongs to who iterates the output
            end.fail(error)
        finally:
            if end.future.done():
                ahead.put_nowait(end)
            ahead.put_nowait(None)

    async def _post_or_refuse(self, x: Payload) -> Owed:
        try:
            frames = split(x, step=0, rows=1)
        except ConfigError as error:
            refused = Owed()
            refused.fail(error)
            return refused
        return await self._post(frames)

    # ---- outputs ----

    async def _read_outputs(self) -> None:
        driver = self._open()
        link = driver.links.upstream
        assert link is not None
        try:
            while True:
                owed = await self._posted.get()
                output = await self._output(link, owed.id)
                self._slots.release()
                self._settle(owed, output)
        except TransportError:
            driver.lose(await driver.failed())
        except PipelinedError as error:
            driver.lose(error)

    async def _output(self, link: TensorLink, number: int) -> Payload | ErrorInfo:
        who = f"the driver, lane HIDDEN: output {number} of rank {len(self._stages) - 1}"
        received = [await self._deadlines.wait(link.post_recv((number, 0)), who)]
        for index in range(1, received[0].header.count):
            received.append(await self._deadlines.wait(link.post_recv((number, index)), who))
        payload = join(received)
        if isinstance(payload, dict):
            for name, value in payload.items():
                if isinstance(value, torch.Tensor):
                    payload[name] = await own_copy(value)
        for frame in received:
            frame.release()
        return payload

    # ---- seeing ----

    async def stats(self) -> dict[int, dict[str, Any]]:
        """What each rank has done so far: steps, busy seconds, bytes sent, ..."""
        return await self._open().query("stats")

    async def integrity(self) -> dict[int, dict[str, int]]:
        """What each rank holds; all zero when nothing is in flight."""
        return await self._open().query("integrity")

    async def trace(self) -> dict[int, list[Span]]:
        """The spans of each rank since the last call."""
        spans = await self._open().query("trace")
        return {rank: [Span(*span) for span in of_rank] for rank, of_rank in spans.items()}


async def each_of(xs: Iterable[Payload] | AsyncIterable[Payload]) -> AsyncGenerator[Payload]:
    """The items of an iterable of either kind."""
    if isinstance(xs, AsyncIterable):
        async for x in xs:
            yield x
    else:
        for x in xs:
            yield x
