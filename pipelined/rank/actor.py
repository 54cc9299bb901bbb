"""The rank: one stage, one loop, four coroutines joined by small queues."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec

from pipelined.errors import ConfigError, DeadlineError, ProtocolError
from pipelined.messages import FromRank, Ready, Start, Started, StartFailed, ToRank
from pipelined.rank.commit import Committer
from pipelined.rank.core import Core, RankContext, stage_error
from pipelined.rank.deadlines import Deadlines
from pipelined.rank.health import Health
from pipelined.rank.launch import Launcher
from pipelined.rank.results import Results, fired
from pipelined.rank.schedule import Applier, Follower, Leader
from pipelined.trace import Tracer
from pipelined.transport import Topology

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipelined.clock import Clock
    from pipelined.rank.config import RankConfig
    from pipelined.rank.flight import Flight
    from pipelined.rank.links import Links
    from pipelined.rank.planner import Planner
    from pipelined.stage import Device, Stage

__all__ = ["Rank"]

_MARGIN_S = 2.0
"""Rank 0 knows who is missing, so that the others wait a little longer than it does."""

_encode = msgspec.msgpack.Encoder().encode
_decode_to_rank = msgspec.msgpack.Decoder(ToRank).decode
_decode_from_rank = msgspec.msgpack.Decoder(FromRank).decode


class Rank:
    """Runs one stage of a pipeline. Rank 0 also has the planner.

    The stage and the device outlive an epoch; links don't: `run` may be called again with new ones.
    """

    def __init__(
        self,
        config: RankConfig,
        stage: Stage,
        device: Device,
        clock: Clock,
        planner: Planner | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        assert (planner is not None) == config.first, "rank 0 plans, and no other rank"
        self.config = config
        self.stage = stage
        self.device = device
        self.clock = clock
        self.planner = planner
        self.tracer = tracer or Tracer()
        self.announce: Callable[[str], None] = lambda _: None
        self._is_set_up = False
        self._sound = False
        self._capacity: int | None = None

    def __repr__(self) -> str:
        return f"<Rank {self.config.rank}/{self.config.size} {self.stage.name}>"

    async def run(self, links: Links, epoch: int = 0) -> None:
        """Set up, agree on the capacity, run steps until told to stop.

        Raises:
            StageError, ConfigError: The stage could not be set up, here or on another rank; names it.
            RankError, TransportError, DeadlineError, ProtocolError: The epoch is over.
        """
        core = Core(
            config=self.config,
            epoch=epoch,
            stage=self.stage,
            device=self.device,
            clock=self.clock,
            links=links,
            tracer=self.tracer,
            deadlines=Deadlines(self.clock, self.config.step_timeout_s, self.config.window),
        )
        (health_link,) = links.health.values()
        health = Health(
            health_link,
            rank=self.config.rank,
            stage=self.stage,
            clock=self.clock,
            counts=core.counts,
            tracer=self.tracer,
        )
        health.integrity = self._integrity
        health.planning = self.planner.stats if self.planner is not None else None
        async with asyncio.TaskGroup() as group:
            task = group.create_task(health.run(), name=f"health {self.config.rank}")
            await self._begin(core)
            await self._serve(core)
            task.cancel()

    @property
    def sound(self) -> bool:
        """Whether the stage was set up well, so that another epoch may have it."""
        return self._sound

    async def settle(self) -> None:
        """Wait until the device has nothing left of an epoch that is over. Takes as long as its work does."""
        await fired(self.device.launch(lambda: None).event)

    async def aclose(self, timeout_s: float = 10.0) -> None:
        """Tear the stage down and stop the device.

        Raises:
            DeadlineError: The stage still computes after `timeout_s`: it is not waited for.
        """
        ends_s = self.clock.now() + timeout_s
        try:
            try:
                async with self.clock.timeout(timeout_s):
                    if self._is_set_up:
                        self._is_set_up = False
                        await self._on_device(self.stage.teardown)
            finally:  # a device that hangs is told as well, so that it can drop whatever would wake it
                async with self.clock.timeout(max(0.0, ends_s - self.clock.now())):
                    await self.device.aclose()
        except TimeoutError as error:
            raise DeadlineError(f"{self!r} still computes, {timeout_s:g} s after it was told to end") from error

    def _integrity(self) -> dict[str, int]:
        held = {f"stage.{name}": count for name, count in self.stage.integrity().items()}
        if self.planner is not None:
            held |= {f"planner.{name}": count for name, count in self.planner.integrity().items()}
        return held

    # ---- before the first step ----

    async def _begin(self, core: Core) -> None:
        config = self.config
        context = RankContext(
            rank=config.rank,
            size=config.size,
            topology=Topology(pp=config.size),
            torch_device=self.device.torch_device,
            links=core.links,
        )
        began_s, again, self._is_set_up = self.clock.now(), self._is_set_up, True
        self.announce(f"{self.stage.name}: {'starts anew' if again else 'loads'}")
        ready = await self._ready_in_time(core, lambda: self._set_up(context, again=again))
        self.announce(f"{self.stage.name}: ready after {self.clock.now() - began_s:.1f} s")
        agreed = await self._agree(core, ready)
        await self._agree(core, await self._ready_in_time(core, lambda: self.stage.start(agreed)))
        if self.planner is not None:
            self.planner.start(core.epoch, agreed)
            assert core.links.news is not None
            await core.links.news.send(_encode(Started(core.epoch, agreed)))

    def _set_up(self, context: RankContext, *, again: bool) -> int | None:
        if again:
            self.stage.reset()
        else:
            self._capacity = self.stage.setup(context)
        self._sound = True
        return self._capacity

    async def _ready_in_time(self, core: Core, work: Callable[[], Any]) -> Ready:
        """Rank 0 watches the others' time, and here its own."""
        try:
            async with self.clock.timeout(self.config.setup_timeout_s if self.config.first else None):
                return await self._ready(core, work)
        except TimeoutError as error:
            raise self._late([0]) from error

    def _late(self, ranks: list[int]) -> DeadlineError:
        return DeadlineError(
            f"ranks {ranks} were not ready within {self.config.setup_timeout_s:g} s; raise the set-up time-out if they "
            "only load slowly"
        )

    async def _ready(self, core: Core, work: Callable[[], Any]) -> Ready:
        """Do a part of the set-up on the device, and make the message that says how it went."""
        config = self.config
        try:
            capacity = await self._on_device(work)
        except Exception as error:  # noqa: BLE001 - the stage's own code: reported to the driver
            self._sound = False
            info = stage_error(error, rank=config.rank, stage=self.stage.name)
            if isinstance(error, ConfigError):  # whoever asked for it can mend it, and knows it by its class
                place = f"rank {config.rank}, stage {self.stage.name}"
                info = msgspec.structs.replace(info, kind=type(error).__name__, message=f"{place}: {error}")
            return Ready(core.epoch, config.rank, error=info)
        return Ready(core.epoch, config.rank, capacity)

    async def _on_device(self, work: Callable[[], Any]) -> Any:
        launch = self.device.launch(work)
        await fired(launch.event)
        return launch.outputs()

    async def _agree(self, core: Core, own: Ready) -> int | None:
        """Wait until every rank is as far as this one; the capacity is the smallest that any of them has."""
        if self.config.first:
            return await self._gather(core, own)
        await core.links.results[0].send(_encode(own))
        if own.error is not None:
            raise own.error.exception()
        try:
            async with self.clock.timeout(self.config.setup_timeout_s + _MARGIN_S):
                message = _decode_to_rank(await core.links.steps[0].receive())
        except TimeoutError as error:
            raise DeadlineError(f"{self!r}: rank 0 gave no start within {self.config.setup_timeout_s:g} s") from error
        if not isinstance(message, Start):
            raise ProtocolError(f"{self!r} expected Start, got {type(message).__name__}")
        return message.capacity

    async def _gather(self, core: Core, own: Ready) -> int | None:
        ready = {0: own}

        async def hear(rank: int) -> None:
            message = _decode_from_rank(await core.links.results[rank].receive())
            if not isinstance(message, Ready):
                raise ProtocolError(f"rank 0 expected Ready of rank {rank}, got {type(message).__name__}")
            ready[rank] = message

        try:
            async with self.clock.timeout(self.config.setup_timeout_s), asyncio.TaskGroup() as group:
                for rank in core.links.results:
                    group.create_task(hear(rank))
        except TimeoutError as error:
            absent = [rank for rank in range(self.config.size) if rank not in ready]
            raise self._late(absent) from error
        assert core.links.news is not None
        for rank, message in sorted(ready.items()):
            if message.error is not None:
                await core.links.news.send(_encode(StartFailed(core.epoch, rank, message.error)))
                raise message.error.exception()
        capacities = [message.capacity for message in ready.values() if message.capacity is not None]
        capacity = min(capacities, default=None)
        for link in core.links.steps.values():
            await link.send(_encode(Start(core.epoch, capacity)))
        return capacity

    # ---- steps ----

    async def _serve(self, core: Core) -> None:
        prepared: asyncio.Queue[Flight | None] = asyncio.Queue(self.config.window + 1)
        launched: asyncio.Queue[Flight | None] = asyncio.Queue(1)
        commits: asyncio.Queue[Flight | None] | None = None
        applier = Applier(core, prepared)
        schedule = Leader(core, applier, self.planner) if self.planner is not None else Follower(core, applier)
        async with asyncio.TaskGroup() as group:
            name = f"of rank {self.config.rank}"
            if core.links.downstream is not None:
                commits = asyncio.Queue(self.config.queue_depth)
                group.create_task(Committer(core, core.links.downstream, commits).run(), name=f"commit {name}")
            group.create_task(schedule.run(), name=f"schedule {name}")
            group.create_task(Launcher(core, prepared, launched, commits).run(), name=f"launch {name}")
            group.create_task(Results(core, launched, schedule.report).run(), name=f"results {name}")
