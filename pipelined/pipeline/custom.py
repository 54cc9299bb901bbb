"""Pipelines of one's own: `async with Pipeline([A(), B(), C()]) as pipe`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from pipelined.errors import ConfigError, PipelinedError, TransportError
from pipelined.messages import CancelInput, ErrorInfo, NewInputs
from pipelined.pipeline.driver import Driver
from pipelined.pipeline.fifo import FifoPlanner
from pipelined.pipeline.payload_stage import as_stage
from pipelined.pipeline.worlds import ProcessWorld, TaskWorld, World
from pipelined.rank import LinkPlan, RankConfig
from pipelined.rank.deadlines import Deadlines
from pipelined.rank.description import RankDescription
from pipelined.rank.payload import join, split
from pipelined.trace import Span
from pipelined.transport.buffers import copy_sliced, raw_bytes

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Coroutine, Iterable, Sequence

    from pipelined.messages import TensorHeader
    from pipelined.stage import Payload
    from pipelined.transport import TensorLink

__all__ = ["Pipeline"]


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
        depth: int = 2,
        step_timeout_s: float = 300.0,
        setup_timeout_s: float = 120.0,
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
            depth: How many steps beyond one a rank may be in flight.
            step_timeout_s: Floor of every deadline on a peer that owes work.
            setup_timeout_s: All ranks must be ready within this time.
            world: Where the ranks live, instead of what `workers` says.
            name: For links and errors.

        Raises:
            ConfigError: Something of this cannot be.
        """
        if not stages:
            raise ConfigError("a pipeline needs at least one stage")
        if workers not in ("task", "process"):
            raise ConfigError(f"workers={workers!r}: expected 'task' or 'process'")
        if depth < 1:
            raise ConfigError(f"depth={depth}: expected at least 1")
        processes = world.processes if world is not None else workers == "process"
        self._stages = [as_stage(stage) for stage in stages]
        self._plan = LinkPlan.choose(
            transport or ("shm://" if processes else "memory://"), processes=processes, messages=messages
        )
        size = len(stages)
        self._world = world
        self._processes = processes
        self._descriptions = [
            RankDescription(
                config=RankConfig(
                    pipeline=name or "pipeline",
                    rank=rank,
                    size=size,
                    window=size + depth,
                    fed=True,
                    drained=True,
                    step_timeout_s=step_timeout_s,
                    setup_timeout_s=setup_timeout_s,
                ),
                links=self._plan,
                device=device,
                threads=threads_per_rank,
            )
            for rank in range(size)
        ]
        self._limit = self._descriptions[0].config.window
        self._driver: Driver | None = None
        self._next_id = 0
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
        self._owed: asyncio.Queue[_Owed] = asyncio.Queue()
        self._slots = asyncio.Semaphore(self._limit)
        self._posting = asyncio.Lock()
        self._next_id = 0
        driver = Driver(self._descriptions, world, stages=self._stages, planner=FifoPlanner())
        await driver.__aenter__()
        self._driver = driver
        self._deadlines = Deadlines(driver.clock, driver.config.step_timeout_s, driver.config.window)
        self._group = await asyncio.TaskGroup().__aenter__()
        self._spawn(self._read_outputs(), "pipeline outputs")
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Stop the ranks; what is unfinished is cancelled."""
        driver, self._driver = self._driver, None
        assert driver is not None
        try:
            for task in self._tasks:
                task.cancel()
            await self._group.__aexit__(None, None, None)
        finally:
            await driver.__aexit__(*exc)
            while not self._owed.empty():
                self._owed.get_nowait().fail(driver.failure.result())

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
        owed = await self._post(x)
        try:
            return await owed.future
        finally:
            self._forget(owed)

    def _forget(self, owed: _Owed) -> None:
        """Nobody waits for it any more: if it is not through yet, the stages may skip it."""
        if not owed.future.done() or owed.future.cancelled():
            owed.future.cancel()
            if self._driver is not None and not self._driver.failure.done():
                self._driver.tell_nowait(CancelInput(owed.id))

    async def _post(self, x: Payload) -> _Owed:
        link = self._open().links.downstream
        assert link is not None
        frames = split(x, step=0, rows=1)  # refuses what cannot travel before a number is taken
        await self._slots.acquire()
        owed = _Owed(asyncio.get_running_loop().create_future())
        if self._posting.locked() or link.credits() < len(frames):
            # Posting suspends, and must not stop half-way if the caller is cancelled.
            task = self._spawn(self._post_all(link, frames, owed), "pipeline input")
            await asyncio.shield(task)
        else:
            for header, tensor in frames:
                link.post_send(tensor, msgspec.structs.replace(header, step=self._next_id))
            self._announce(owed)
        return owed

    async def _post_all(self, link: TensorLink, frames: list[tuple[TensorHeader, torch.Tensor]], owed: _Owed) -> None:
        try:
            async with self._posting:
                for header, tensor in frames:
                    if link.credits() == 0:
                        who = f"the driver, lane HIDDEN: a credit for input {self._next_id}"
                        await self._deadlines.wait(link.ready(), who)
                    link.post_send(tensor, msgspec.structs.replace(header, step=self._next_id))
                self._announce(owed)
        except PipelinedError as error:
            owed.fail(error)

    def _announce(self, owed: _Owed) -> None:
        """All its tensors are posted: number it and tell rank 0. Never suspends."""
        owed.id = self._next_id
        self._next_id += 1
        self._owed.put_nowait(owed)
        self._open().tell_nowait(NewInputs((owed.id,)))

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
        ahead: asyncio.Queue[_Owed | None] = asyncio.Queue(self._limit)
        feeder = self._spawn(self._feed(xs, ahead), "pipeline stream")
        try:
            while (owed := await ahead.get()) is not None:
                try:
                    output = await owed.future
                except PipelinedError as error:
                    if not return_exceptions:
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

    async def _feed(self, xs: Iterable[Payload] | AsyncIterable[Payload], ahead: asyncio.Queue[_Owed | None]) -> None:
        try:
            if isinstance(xs, AsyncIterable):
                async for x in xs:
                    await ahead.put(await self._post(x))
            else:
                for x in xs:
                    await ahead.put(await self._post(x))
        except Exception as error:  # noqa: BLE001 - raised by the user's iterable: it belongs to who iterates the output
            broken = _Owed(asyncio.get_running_loop().create_future())
            broken.fail(error)
            await ahead.put(broken)
        await ahead.put(None)

    # ---- outputs ----

    async def _read_outputs(self) -> None:
        driver = self._open()
        link = driver.links.upstream
        assert link is not None
        while True:
            owed = await self._owed.get()
            try:
                output = await self._output(link, owed.id)
            except TransportError:
                error = await driver.failed()
            except PipelinedError as raised:
                error = raised
            else:
                self._slots.release()
                owed.settle(output)
                continue
            driver.lose(error)
            owed.fail(error)
            while not self._owed.empty():
                self._owed.get_nowait().fail(error)
            for _ in range(self._limit):
                self._slots.release()  # whoever waits to submit learns of it
            return

    async def _output(self, link: TensorLink, number: int) -> Payload | ErrorInfo:
        who = f"the driver, lane HIDDEN: output {number} of rank {len(self._stages) - 1}"
        received = [await self._deadlines.wait(link.post_recv((number, 0)), who)]
        for index in range(1, received[0].header.count):
            received.append(await self._deadlines.wait(link.post_recv((number, index)), who))
        payload = join(received)
        if isinstance(payload, dict):
            for name, value in payload.items():
                if isinstance(value, torch.Tensor):
                    payload[name] = await _own(value)
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


async def _own(view: torch.Tensor) -> torch.Tensor:
    """A copy of the transport's memory, for the caller to keep. Not `clone`: torch's threads would spin beside it."""
    copy = torch.empty(view.shape, dtype=view.dtype)
    copied: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    copy_sliced(raw_bytes(copy), raw_bytes(view), lambda: copied.done() or copied.set_result(None))
    if not copied.done():
        await copied
    return copy


class _Owed:
    """An output that somebody waits for."""

    __slots__ = ("future", "id")

    def __init__(self, future: asyncio.Future[Payload]) -> None:
        self.future = future
        self.id = -1

    def settle(self, output: Payload | ErrorInfo) -> None:
        """Hand over the output, or raise the error of its step."""
        if isinstance(output, ErrorInfo):
            self.fail(output.exception())
        elif not self.future.done():
            self.future.set_result(output)

    def fail(self, error: Exception) -> None:
        """Have the wait raise `error`."""
        if not self.future.done():
            self.future.set_exception(error)
            self.future.exception()  # nobody may be waiting: not worth a warning
