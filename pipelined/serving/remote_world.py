"""The ranks of another process: a `World` for the HTTP process, whose ranks outlive it."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING

from pipelined.clock import Clock, MonotonicClock
from pipelined.errors import DeadlineError, EngineClosedError, ProtocolError
from pipelined.pipeline import WorldNews
from pipelined.serving.world_wire import (
    BeginEpoch,
    Done,
    KillRanks,
    RankEnded,
    RankSaid,
    StopRanks,
    from_supervisor,
)
from pipelined.transport import FileRendezvous, Rendezvous

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from pipelined.rank import Planner
    from pipelined.rank.description import RankDescription
    from pipelined.serving.world_wire import Wire
    from pipelined.stage import Stage

__all__ = ["RemoteWorld"]

_ANSWER_S = 60.0
"""The supervisor answers within this time, beside what it was told to wait for."""


class RemoteWorld(WorldNews):
    """Asks the supervisor for everything. `listen` must run meanwhile."""

    processes = True

    def __init__(self, wire: Wire, next_epoch: int) -> None:
        super().__init__()
        self.clock: Clock = MonotonicClock()
        self.next_epoch = next_epoch
        self._wire = wire
        self._rendezvous: FileRendezvous | None = None
        self._numbers = itertools.count()
        self._owed: dict[int, asyncio.Future[Done]] = {}

    def __repr__(self) -> str:
        return f"<RemoteWorld epoch {self.next_epoch - 1}>"

    @property
    def rendezvous(self) -> Rendezvous:
        """See `World`; there is one once started."""
        assert self._rendezvous is not None
        return self._rendezvous

    async def listen(self) -> None:
        """Take in what the supervisor says, until it is gone."""
        while (message := await self._wire.receive(from_supervisor)) is not None:
            if isinstance(message, Done):
                owed = self._owed.pop(message.number, None)
                if owed is not None and not owed.done():
                    owed.set_result(message)
            elif isinstance(message, RankSaid):
                self._said(message.rank, message.what)
            elif not isinstance(message, RankEnded):
                raise ProtocolError(f"the supervisor said {type(message).__name__} a second time")
            elif message.epoch == self.next_epoch - 1:  # else of an epoch that is over already
                self._ended(message.rank, None if message.error is None else message.error.exception())
        for owed in self._owed.values():
            if not owed.done():
                owed.set_exception(EngineClosedError("the process that supervises the ranks is gone"))

    async def start(
        self,
        descriptions: Sequence[RankDescription],
        stages: Sequence[Stage | None],
        planner: Planner | None,
        *,
        lost: Collection[int] = (),
    ) -> None:
        """See `World`. Stages and planner are those of the descriptions."""
        assert planner is None, "what is sent to a rank from here is described"
        self.next_epoch = descriptions[0].epoch + 1
        config = descriptions[0].config
        number = next(self._numbers)
        done = await self._ask(
            number, BeginEpoch(number, tuple(descriptions), tuple(sorted(lost))), config.heartbeat_bound_s
        )
        self._rendezvous = FileRendezvous(done.directory)

    async def stop(self, timeout_s: float) -> None:
        """See `World`."""
        number = next(self._numbers)
        await self._ask(number, StopRanks(number, timeout_s), timeout_s)

    def kill(self) -> None:
        """See `World`."""
        self._wire.send(KillRanks())

    async def _ask(self, number: int, message: BeginEpoch | StopRanks, timeout_s: float) -> Done:
        owed: asyncio.Future[Done] = asyncio.get_running_loop().create_future()
        self._owed[number] = owed
        self._wire.send(message)
        try:
            async with self.clock.timeout(timeout_s + _ANSWER_S):
                done = await owed
        except TimeoutError as error:
            raise DeadlineError(f"the supervisor of the ranks did not answer {type(message).__name__}") from error
        if done.error is not None:
            raise done.error.exception()
        return done
