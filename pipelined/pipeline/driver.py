"""The driver: starts a pipeline's ranks, talks to rank 0, hears of losses. Custom pipelines and the LLM build on it."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
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
from pipelined.pipeline.blame import Blame
from pipelined.pipeline.outbox import Outbox
from pipelined.pipeline.receipts import DriverReceipts
from pipelined.rank import open_links

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from contextlib import AbstractAsyncContextManager

    from pipelined.pipeline.worlds import World
    from pipelined.rank import Links, Planner
    from pipelined.rank.description import RankDescription
    from pipelined.stage import Stage
    from pipelined.transport import MessageLink

__all__ = ["Driver"]

HEARTBEAT_S = 1.0
"""At most; sooner where the bound asks for it."""

_SAID_S = 2.0
"""The world tells of a rank that ended within this time after its links broke."""

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
        lost: Collection[int] | None = None,
    ) -> None:
        """Args: lost: in a later epoch, ranks that must begin anew; None: it is the first."""
        first = descriptions[0]
        self._descriptions = descriptions
        self._world = world
        self._stages = stages or [None] * len(descriptions)
        self._planner = planner
        self._on_outputs = on_outputs or (lambda _: None)
        self._lost = lost
        self.config = dataclasses.replace(first.config, rank=DRIVER)
        self.clock = world.clock
        self.capacity: int | None = None
        self.links: Links
        self.failure: asyncio.Future[PipelinedError]
        self._group: asyncio.TaskGroup
        self._open: AbstractAsyncContextManager[Links] | None = None
        self._started: asyncio.Future[None]
        self._stopping = False
        self._parted = False
        self._queries: dict[int, asyncio.Future[list[Any]]] = {}
        self._bodies: dict[int, list[Any]] = {}
        self._numbers = itertools.count()
        self._receipts = DriverReceipts(self.config.step_timeout_s)
        self._heard_s: dict[int, float] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._outbox = Outbox(self._receipts)
        self._blame = Blame(self.clock, self.config.size, self._stage_name, self.lose)

    def __repr__(self) -> str:
        state = "failed" if self.failure.done() else "open"
        return f"<Driver {self.config.pipeline} {self.config.size} ranks {state}>"

    # ---- life ----

    async def __aenter__(self) -> Driver:
        """Start the ranks and wait until all are ready.

        Raises:
            PipelinedError: A rank could not set up, died, or was not ready in time. Nothing is left then, but in a
                later epoch: there the other ranks wait for another one.
        """
        loop = asyncio.get_running_loop()
        self.failure, self._started = loop.create_future(), loop.create_future()
        self._world.on_end(self._rank_ended)
        try:
            await self._world.start(self._descriptions, self._stages, self._planner, lost=self._lost or ())
            await self._unless_lost(self._connect())
            self._group = await asyncio.TaskGroup().__aenter__()
            self._spawn(self._read_news(), "news")
            self._spawn(self._empty_outbox(), "requests")
            for rank, link in self.links.health.items():
                self._spawn(self._read_health(rank, link), f"health of rank {rank}")
            await self._unless_lost(self._started)
            self._spawn(self._heartbeat(), "heartbeat")
        except BaseException:
            await (self._end(clean=False) if self._lost is None else self.part())
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
        opening = open_links(
            self.config,
            plan,
            epoch=self._descriptions[0].epoch,
            rendezvous=self._world.rendezvous,
            clock=self.clock,
            secret=self._descriptions[0].secret,
            dtype=self._descriptions[0].dtype,
        )
        self.links = await opening.__aenter__()
        self._open = opening

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

    async def part(self) -> None:
        """Let go of an epoch that is over, and not of the ranks: those that live wait for the next one."""
        self._stopping = self._parted = True
        self.lose(EngineClosedError("the epoch is over"))
        error = self.failure.result()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await self._group.__aexit__(None, None, None)
            self._tasks.clear()
        if self._open is not None:
            opened, self._open = self._open, None
            await opened.__aexit__(type(error), error, error.__traceback__)  # at once: nothing is flushed

    async def _end(self, *, clean: bool) -> None:
        self._stopping = True
        grace_s = 0.0
        if clean:
            grace_s = 10.0
            try:
                self._send(Stop(self._descriptions[0].epoch))
                async with self.clock.timeout(grace_s):
                    await self._outbox.emptied()
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
        if not self._parted:
            self._blame.ended(rank, error)

    def _stage_name(self, rank: int) -> str:
        stage = self._stages[rank]
        if stage is not None:
            return stage.name
        part = self._descriptions[rank].part
        return f"layers {part.layers[0]}-{part.layers[1] - 1}" if part else f"stage {rank}"

    def lose(self, error: PipelinedError) -> None:
        """The pipeline cannot go on because of `error`; the first one counts."""
        self._blame.over = True
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
        assert self.links.requests is not None
        self._outbox.put(message, self.links.requests)

    async def _empty_outbox(self) -> None:
        assert self.links.requests is not None
        try:
            await self._outbox.serve(self.links.requests)
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
