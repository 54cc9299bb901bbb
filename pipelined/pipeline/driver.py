"""The driver: starts a pipeline's ranks, talks to rank 0, hears of losses. Custom pipelines and the LLM build on it."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from pipelined.errors import (
    ClosedError,
    DeadlineError,
    EndOfLane,
    EngineClosedError,
    FrameTooLarge,
    PeerLost,
    PipelinedError,
    RankLostError,
    TransportError,
    WouldBlock,
)
from pipelined.messages import (
    DRIVER,
    FromRank,
    HealthMessage,
    Outputs,
    Ping,
    Pong,
    Query,
    Report,
    Started,
    StartFailed,
    Stop,
    ToRank,
)
from pipelined.pipeline.receipts import DriverReceipts
from pipelined.rank import open_links

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractAsyncContextManager

    from pipelined.pipeline.worlds import World
    from pipelined.rank import Links, Planner
    from pipelined.rank.description import RankDescription
    from pipelined.stage import Stage
    from pipelined.transport import MessageLink

__all__ = ["Driver"]

HEARTBEAT_S = 1.0
"""At most; sooner where the bound asks for it."""

_BLAME_S = 0.1
"""Losing one rank makes its neighbours fail within moments: wait that long before deciding which was first."""

_SAID_S = 2.0
"""The world tells of a rank that ended within this time after its links broke."""

_BLAME_TRIES = 14

_encode = msgspec.msgpack.Encoder().encode
_decode_from_rank = msgspec.msgpack.Decoder(FromRank).decode
_decode_health = msgspec.msgpack.Decoder(HealthMessage).decode


class Driver:
    """Owns a pipeline for one epoch. An async context manager: started inside, everything ended on leaving.

    Attributes:
        capacity: What the ranks agreed on; known after starting.
        links: The driver's links.
        failure: Done, with the error as its result, once the pipeline cannot go on.
    """

    def __init__(
        self,
        descriptions: Sequence[RankDescription],
        world: World,
        *,
        stages: Sequence[Stage | None] | None = None,
        planner: Planner | None = None,
        on_outputs: Callable[[Outputs], None] | None = None,
    ) -> None:
        first = descriptions[0]
        self._descriptions = descriptions
        self._world = world
        self._stages = stages or [None] * len(descriptions)
        self._planner = planner
        self._on_outputs = on_outputs or (lambda _: None)
        self.config = dataclasses.replace(first.config, rank=DRIVER)
        self.clock = world.clock
        self.capacity: int | None = None
        self.links: Links
        self.failure: asyncio.Future[PipelinedError]
        self._group: asyncio.TaskGroup
        self._open: AbstractAsyncContextManager[Links] | None = None
        self._started: asyncio.Future[None]
        self._ends: dict[int, BaseException | None] = {}
        self._stopping = False
        self._queries: dict[int, asyncio.Future[list[Any]]] = {}
        self._bodies: dict[int, list[Any]] = {}
        self._numbers = itertools.count()
        self._receipts = DriverReceipts(self.config.step_timeout_s)
        self._heard_s: dict[int, float] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._outbox: deque[bytes] = deque()
        self._outbox_filled = asyncio.Event()
        self._outbox_empty = asyncio.Event()

    def __repr__(self) -> str:
        state = "failed" if self.failure.done() else "open"
        return f"<Driver {self.config.pipeline} {self.config.size} ranks {state}>"

    # ---- life ----

    async def __aenter__(self) -> Driver:
        """Start the ranks and wait until all are ready.

        Raises:
            PipelinedError: A rank could not set up, died, or was not ready in time.
        """
        loop = asyncio.get_running_loop()
        self.failure, self._started = loop.create_future(), loop.create_future()
        self._world.on_end(self._rank_ended)
        try:
            await self._world.start(self._descriptions, self._stages, self._planner)
            await self._unless_lost(self._connect())
            self._group = await asyncio.TaskGroup().__aenter__()
            self._spawn(self._read_news(), "news")
            self._spawn(self._empty_outbox(), "requests")
            for rank, link in self.links.health.items():
                self._spawn(self._read_health(rank, link), f"health of rank {rank}")
            await self._unless_lost(self._started)
            self._spawn(self._heartbeat(), "heartbeat")
        except BaseException:
            await self._end(clean=False)
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Tell the ranks to stop, wait, end those that don't."""
        ending = asyncio.ensure_future(self._end(clean=not self.failure.done()))
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:  # in a hurry: nothing may be left even so
            self._world.kill()
            await asyncio.wait([ending])
            raise

    def _spawn(self, work: Any, name: str) -> None:
        self._tasks.append(self._group.create_task(work, name=f"driver {name}"))

    async def _connect(self) -> None:
        plan = self._descriptions[0].links
        self._open = open_links(
            self.config,
            plan,
            epoch=self._descriptions[0].epoch,
            rendezvous=self._world.rendezvous,
            clock=self.clock,
            secret=self._descriptions[0].secret,
        )
        self.links = await self._open.__aenter__()

    async def _unless_lost(self, wait: Any) -> None:
        """Await something of the start-up, or raise at once what makes it impossible."""
        task = asyncio.ensure_future(wait)
        try:
            async with self.clock.timeout(self.config.setup_timeout_s + 5.0):
                await asyncio.wait([task, self.failure], return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError as error:
            raise DeadlineError(f"the ranks were not ready within {self.config.setup_timeout_s:g} s") from error
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait([task])
        if self.failure.done():
            raise self.failure.result()
        await task

    async def _end(self, *, clean: bool) -> None:
        self._stopping = True
        grace_s = 0.0
        if clean:
            grace_s = 10.0
            try:
                self._outbox_empty.clear()
                self._send(Stop(self._descriptions[0].epoch))
                if self._outbox:
                    async with self.clock.timeout(grace_s):
                        await self._outbox_empty.wait()
            except (TransportError, TimeoutError):
                grace_s = 0.0
        for task in self._tasks:
            task.cancel()
        if not clean:
            self._world.kill()
        await self._world.stop(grace_s)
        if self._tasks:
            await self._group.__aexit__(None, None, None)
            self._tasks.clear()
        if self._open is not None:
            opened, self._open = self._open, None
            await opened.__aexit__(None, None, None)
        self.lose(EngineClosedError("the pipeline was closed"))

    # ---- losses ----

    def _rank_ended(self, rank: int, error: BaseException | None) -> None:
        if self._stopping and (error is None or isinstance(error, RankLostError)):
            return  # told to, or ended because it did not
        self._ends[rank] = error
        if len(self._ends) == 1:
            self.clock.call_at(self.clock.now() + _BLAME_S, self._blame, _BLAME_TRIES)

    def _blame(self, tries: int) -> None:
        """Of the ranks that ended at about the same time, the one that did not merely lose a neighbour."""

        def innocence(end: tuple[int, BaseException | None]) -> tuple[int, int]:
            rank, error = end
            if isinstance(error, RankLostError):
                return (0, rank)
            if error is None or isinstance(error, TransportError):
                return (2, rank)
            return (1, rank)

        rank, error = end = min(self._ends.items(), key=innocence)
        if tries and not self.failure.done() and innocence(end)[0] == 2 and len(self._ends) < self.config.size:
            # Only neighbours so far: the cause may be in a rank that still closes.
            self.clock.call_at(self.clock.now() + _BLAME_S, self._blame, tries - 1)
            return
        if error is None:
            self.lose(RankLostError("ended before it was told to", rank=rank, stage=self._stage_name(rank)))
        elif isinstance(error, RankLostError):
            self.lose(RankLostError(error.reason, rank=rank, stage=self._stage_name(rank)))
        elif isinstance(error, PipelinedError):
            self.lose(error)
        else:
            self.lose(RankLostError(f"{type(error).__name__}: {error}", rank=rank, stage=self._stage_name(rank)))

    def _stage_name(self, rank: int) -> str:
        stage = self._stages[rank]
        if stage is not None:
            return stage.name
        part = self._descriptions[rank].part
        return f"layers {part.layers[0]}-{part.layers[1]}" if part else f"stage {rank}"

    def lose(self, error: PipelinedError) -> None:
        """The pipeline cannot go on because of `error`; the first one counts."""
        if not self.failure.done():
            self.failure.set_result(error)

    # ---- talking ----

    async def tell(self, message: ToRank) -> None:
        """Send something to rank 0.

        Raises:
            PipelinedError: The pipeline cannot go on; says why.
        """
        if self.failure.done():
            raise self.failure.result()
        try:
            self._send(message)
        except FrameTooLarge:
            raise
        except TransportError:
            # Why the link is gone is known a moment later.
            raise await self.failed() from None

    def tell_nowait(self, message: ToRank) -> None:
        """Like `tell`; never suspends. A link that is gone is not an error here: see `failure`."""
        with suppress(ClosedError, EndOfLane, PeerLost):
            self._send(message)

    def _send(self, message: ToRank) -> None:
        """At once if there is a credit; else it queues: any number of tasks may tell, and a link has one waiter."""
        assert self.links.requests is not None
        frame = _encode(message)
        if not self._outbox:
            try:
                self.links.requests.send_nowait(frame)
            except WouldBlock:
                pass
            else:
                self._receipts.sent += 1
                return
        self._outbox.append(frame)
        self._outbox_filled.set()

    async def _empty_outbox(self) -> None:
        assert self.links.requests is not None
        try:
            while True:
                await self._outbox_filled.wait()
                while self._outbox:
                    await self.links.requests.send(self._outbox[0])
                    self._outbox.popleft()
                    self._receipts.sent += 1
                self._outbox_filled.clear()
                self._outbox_empty.set()
        except TransportError as error:
            await self._unreachable(0, error)

    async def failed(self) -> PipelinedError:
        """Why the pipeline cannot go on, after a link was seen to be gone; known a moment later."""
        try:
            async with self.clock.timeout(_SAID_S):
                return await asyncio.shield(self.failure)
        except TimeoutError:
            return RankLostError("the link to rank 0 is gone", rank=0)

    async def query(self, what: str, timeout_s: float = 10.0) -> dict[int, Any]:
        """Ask every rank for "stats", "trace" or "integrity"; the answers, by rank.

        Raises:
            DeadlineError: Names the ranks that did not answer.
        """
        waits: dict[int, asyncio.Future[list[Any]]] = {}
        for rank, link in self.links.health.items():
            number = next(self._numbers)
            waits[rank] = self._queries[number] = asyncio.get_running_loop().create_future()
            try:
                await link.send(_encode(Query(number, what)))
            except TransportError:
                raise await self.failed() from None
        try:
            async with self.clock.timeout(timeout_s):
                for wait in waits.values():
                    await asyncio.wait((wait, self.failure), return_when=asyncio.FIRST_COMPLETED)
                    if not wait.done():
                        raise self.failure.result()
        except TimeoutError as error:
            silent = [rank for rank, wait in waits.items() if not wait.done()]
            raise DeadlineError(f"ranks {silent} did not answer a query for {what} within {timeout_s:g} s") from error
        return {
            rank: [entry for part in wait.result() for entry in part] if what == "trace" else wait.result()[0]
            for rank, wait in sorted(waits.items())
        }

    async def _read_news(self) -> None:
        assert self.links.news is not None
        try:
            while True:
                message = _decode_from_rank(await self.links.news.receive())
                if isinstance(message, Outputs):
                    self._receipts.heard += 1
                    self._on_outputs(message)
                elif isinstance(message, Started):
                    self.capacity = message.capacity
                    if not self._started.done():  # whoever opens may have been cancelled meanwhile
                        self._started.set_result(None)
                elif isinstance(message, StartFailed):
                    self.lose(message.error.exception())
        except TransportError as error:
            await self._unreachable(0, error)

    async def _read_health(self, rank: int, link: MessageLink) -> None:
        try:
            while True:
                message = _decode_health(await link.receive())
                self._heard_s[rank] = self.clock.now()
                if isinstance(message, Report):
                    self._bodies.setdefault(message.number, []).append(message.body)
                    if not message.more:
                        self._queries.pop(message.number).set_result(self._bodies.pop(message.number))
                elif not isinstance(message, Pong):
                    self.lose(RankLostError("sent nonsense on the HEALTH lane", rank=rank))
                elif rank == 0 and (missing := self._receipts.missing(message, self.clock.now())):
                    self.lose(missing)
        except TransportError as error:
            await self._unreachable(rank, error)

    async def _unreachable(self, rank: int, error: TransportError) -> None:
        """A link is gone. If the rank has ended, the world says why in a moment; if not, it is as good as ended."""
        await self.clock.sleep(_SAID_S)
        self.lose(RankLostError(f"cannot be reached: {error}", rank=rank, stage=self._stage_name(rank)))

    async def _heartbeat(self) -> None:
        heard_s, bound_s = self._heard_s, self.config.heartbeat_bound_s
        every_s = min(HEARTBEAT_S, bound_s / 4)
        try:
            for number in itertools.count():
                slept_s = self.clock.now()
                await self.clock.sleep(every_s)
                now_s = self.clock.now()
                stalled_s = now_s - slept_s - every_s  # this loop's own delay is nobody else's silence
                for rank, link in self.links.health.items():
                    heard_s[rank] = min(now_s, heard_s.get(rank, now_s) + max(0.0, stalled_s))
                    if now_s - heard_s[rank] > bound_s:
                        text = f"no heartbeat for {now_s - heard_s[rank]:.1f} s"
                        self.lose(RankLostError(text, rank=rank, stage=self._stage_name(rank)))
                        return
                    await link.send(_encode(Ping(number)))
        except TransportError:
            return  # whoever reads from that rank has seen it too
