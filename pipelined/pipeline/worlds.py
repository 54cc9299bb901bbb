"""Where ranks live: tasks of this loop, or processes of this host. A world starts ranks, ends them, notices ends."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from pipelined.clock import Clock, MonotonicClock
from pipelined.errors import PipelinedError, RankLostError
from pipelined.rank.host import root_cause, run_rank
from pipelined.transport import MemoryRendezvous, Rendezvous

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from pipelined.rank import Planner
    from pipelined.rank.description import RankDescription
    from pipelined.stage import Device, Stage

__all__ = ["TaskWorld", "World", "WorldNews"]


class World(Protocol):
    """Hosts the ranks of one pipeline.

    Attributes:
        processes: Whether the ranks are processes, so that links must reach them.
        clock: The driver's.
        next_epoch: The lowest that was not begun yet.
    """

    processes: bool
    clock: Clock
    next_epoch: int

    @property
    def rendezvous(self) -> Rendezvous:
        """Where its peers find each other; of the latest epoch."""
        ...

    async def start(
        self,
        descriptions: Sequence[RankDescription],
        stages: Sequence[Stage | None],
        planner: Planner | None,
        *,
        lost: Collection[int] = (),
    ) -> None:
        """Begin an epoch: every rank gets its description. Returns before they are ready.

        Ranks that live on from the epoch before keep their process and their stage. Those that are `lost`, and those
        that did not part from their last epoch within the heartbeat's bound, are ended first; like those that have
        ended they begin anew.
        """
        ...

    def on_end(self, callback: Callable[[int, BaseException | None], None]) -> None:
        """Have `callback` called, on the loop, for each rank that ends or loses its epoch."""
        ...

    def on_progress(self, callback: Callable[[int, str], None]) -> None:
        """Have `callback` called, on the loop, with what ranks say of their set-up."""
        ...

    async def stop(self, timeout_s: float) -> None:
        """Wait for ranks that were told to stop; end those that don't within `timeout_s`. Leaves nothing behind."""
        ...

    def kill(self) -> None:
        """End every rank now."""
        ...


class WorldNews:
    """Whom a world tells what becomes of its ranks."""

    def __init__(self) -> None:
        self._ended: Callable[[int, BaseException | None], None] = lambda _rank, _error: None
        self._said: Callable[[int, str], None] = lambda _rank, _what: None
        self._parting = False

    def on_end(self, callback: Callable[[int, BaseException | None], None]) -> None:
        """See `World`."""
        self._ended = callback

    def on_progress(self, callback: Callable[[int, str], None]) -> None:
        """See `World`."""
        self._said = callback

    def _report(self, rank: int, error: BaseException | None) -> None:
        if not self._parting:  # what ends now is no loss of the epoch that begins
            self._ended(rank, error)


class _Berth:
    """The supervisor's end of a rank's lifeline, for a rank that is a task. A `Lifeline`."""

    def __init__(self, rank: int, world: TaskWorld) -> None:
        self._rank = rank
        self._world = world
        self._next: asyncio.Future[RankDescription | None] | None = None
        self.parted = asyncio.Event()
        self.ending = False

    def announce(self, what: str) -> None:
        """See `Lifeline`."""
        self._world._said(self._rank, what)

    async def next(self, description: RankDescription, error: PipelinedError) -> RankDescription | None:
        """See `Lifeline`."""
        if self.ending:  # while the rank failed of itself: a task group then swallows it
            raise asyncio.CancelledError
        self._next = asyncio.get_running_loop().create_future()
        self.parted.set()
        self._world._report(self._rank, error)
        try:
            async with asyncio.timeout(description.linger_s):
                return await self._next
        except TimeoutError:
            raise error from None
        finally:
            self._next = None

    def hand(self, description: RankDescription) -> bool:
        """Give the rank its next epoch; whether it waits for one."""
        if self._next is None or self._next.done():
            return False
        self.parted.clear()
        self._next.set_result(description)
        return True


class TaskWorld(WorldNews):
    """Ranks as tasks of the running loop: tests, debugging, notebooks, simulations."""

    processes = False

    def __init__(
        self, clock: Callable[[int], Clock] | None = None, device: Callable[[int, Clock], Device] | None = None
    ) -> None:
        """Args: clock: makes the clock of a rank (or, with -1, of the driver). device: makes the device of a rank."""
        super().__init__()
        self._clock_of = clock or (lambda _: MonotonicClock())
        self._device_of = device
        self.clock = self._clock_of(-1)
        self.rendezvous = MemoryRendezvous()
        self.next_epoch = 0
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._berths: dict[int, _Berth] = {}

    def __repr__(self) -> str:
        return f"<TaskWorld {sum(not task.done() for task in self._tasks.values())} ranks>"

    async def start(
        self,
        descriptions: Sequence[RankDescription],
        stages: Sequence[Stage | None],
        planner: Planner | None,
        *,
        lost: Collection[int] = (),
    ) -> None:
        """See `World`."""
        self.next_epoch = descriptions[0].epoch + 1
        await self._part(lost, descriptions[0].config.heartbeat_bound_s)
        for description, stage in zip(descriptions, stages, strict=True):
            rank = description.config.rank
            if rank in self._tasks:
                if self._berths[rank].hand(description):
                    continue
                await asyncio.wait([self._tasks[rank]])  # it has just given up waiting
            self._spawn(description, stage, planner if rank == 0 else None)

    def _spawn(self, description: RankDescription, stage: Stage | None, planner: Planner | None) -> None:
        """Begin a rank anew."""
        rank = description.config.rank
        berth = self._berths[rank] = _Berth(rank, self)
        run = self._run(description, stage, planner, berth)
        # Held here and awaited in `stop`: the world is the supervisor of its ranks, as a TaskGroup would be, but a
        # rank that fails must not cancel the task that opened the pipeline.
        self._tasks[rank] = asyncio.get_running_loop().create_task(run, name=f"rank {rank}")

    async def _part(self, lost: Collection[int], timeout_s: float) -> None:
        """Wait until each rank has ended or waits for its next epoch; end those that are lost or late."""
        self._parting = True
        try:
            for rank in lost:
                self._cancel(rank)
            try:
                async with self.clock.timeout(timeout_s):
                    for rank in tuple(self._tasks):
                        await self._parted(rank)
            except TimeoutError:
                for rank in self._tasks:
                    if not self._berths[rank].parted.is_set():
                        self._cancel(rank)
                for rank in tuple(self._tasks):
                    await self._parted(rank)
        finally:
            self._parting = False

    async def _parted(self, rank: int) -> None:
        task, berth = self._tasks[rank], self._berths[rank]
        task.add_done_callback(lambda _: berth.parted.set())
        await berth.parted.wait()
        if task.done() or berth.ending:
            await asyncio.wait([task])
            del self._tasks[rank]

    async def _run(
        self, description: RankDescription, stage: Stage | None, planner: Planner | None, berth: _Berth
    ) -> None:
        rank = description.config.rank
        make = self._device_of
        error: BaseException | None = None
        try:
            await run_rank(
                description,
                stage=stage,
                planner=planner,
                rendezvous=self.rendezvous,
                clock=self._clock_of(rank),
                device=None if make is None else lambda clock: make(rank, clock),
                lifeline=berth,
            )
        except asyncio.CancelledError:
            error = RankLostError("the task was ended", rank=rank)
            raise
        except Exception as raised:  # noqa: BLE001 - the supervisor: the driver is told
            error = root_cause(raised)
        finally:
            self._report(rank, error)

    async def stop(self, timeout_s: float) -> None:
        """See `World`."""
        if not self._tasks:
            return
        for rank, berth in self._berths.items():
            if berth.parted.is_set():
                self._cancel(rank)  # nobody will tell it anything
        _, late = await asyncio.wait(self._tasks.values(), timeout=timeout_s)
        self.kill()
        if late:
            await asyncio.wait(late)
        self._tasks.clear()
        self._berths.clear()

    def kill(self) -> None:
        """See `World`."""
        for rank in self._tasks:
            self._cancel(rank)

    def _cancel(self, rank: int) -> None:
        if rank in self._tasks and not self._berths[rank].ending:  # a second time would stop it from tidying up
            self._berths[rank].ending = True
            self._tasks[rank].cancel()
