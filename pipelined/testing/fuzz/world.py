"""A world of tasks in which each stage, the planner and each device are watched, and ranks can be ended."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import lru_cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from pipelined.clock import LoopClock
from pipelined.errors import RankLostError
from pipelined.messages import Peer
from pipelined.pipeline import TaskWorld
from pipelined.rank.core import RankContext
from pipelined.rank.description import FAMILIES, family
from pipelined.scheduler import Scheduler, SchedulerConfig
from pipelined.stage import Stage
from pipelined.stage.emulated import EmulatedDevice
from pipelined.stage.stream import StreamDevice
from pipelined.transport import Topology

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from pipelined.clock import Clock
    from pipelined.messages import Request, RequestOutput, Step, StepResult
    from pipelined.rank import Planner
    from pipelined.rank.description import RankDescription
    from pipelined.stage import Device, StageContext
    from pipelined.testing.fuzz.case import Case, Kill
    from pipelined.testing.fuzz.journal import Journal

__all__ = ["FuzzWorld", "reference"]

_HUNG_S = 1e7
_SCHEME = "sim"


@lru_cache(maxsize=1)
def reference() -> Callable[..., list[int]]:
    """The toy's own oracle, found as the toy is."""
    (point,) = entry_points(group=FAMILIES, name="toy")
    found: Callable[..., list[int]] = import_module(point.module).reference_tokens
    return found


class FuzzWorld(TaskWorld):
    """Runs the ranks of one case."""

    def __init__(self, case: Case, journal: Journal) -> None:
        skews_s = case.skews_s or (0.0,) * (case.ranks + 1)
        super().__init__(clock=lambda rank: LoopClock(skews_s[rank + 1]), device=self._make_device)
        self.case = case
        self.journal = journal
        self.devices: dict[int, EmulatedDevice] = {}
        self.stages: dict[int, WatchedStage] = {}
        self.planner: WatchedPlanner | None = None
        self.on_applied: list[Callable[[int], None]] = []
        self._seen = [{"prefill": 0, "decode": 0} for _ in case.kills]
        self._hung: set[int] = set()
        self._killed: set[int] = set()
        self._begun: list[Kill] = []

    def on_end(self, callback: Callable[[int, BaseException | None], None]) -> None:
        """See `World`. What a killed rank still says of itself, nobody hears."""

        def ended(rank: int, error: BaseException | None) -> None:
            callback(rank, RankLostError("was killed", rank=rank) if rank in self._killed else error)

        super().on_end(ended)

    async def start(
        self,
        descriptions: Sequence[RankDescription],
        stages: Sequence[Stage | None],
        planner: Planner | None,
        *,
        lost: Collection[int] = (),
    ) -> None:
        """See `World`."""
        await super().start(descriptions, stages, planner, lost=lost)
        self.journal.note(f"epoch {descriptions[0].epoch} begins")
        now = "restart" if descriptions[0].epoch else "setup"
        for kill in self.case.kills:
            if kill.phase == now and kill.count == 0 and kill not in self._begun:
                self._begun.append(kill)
                self.journal.doing = now
                self.end_later(kill)

    def _spawn(self, description: RankDescription, stage: Stage | None, planner: Planner | None) -> None:
        config, part = description.config, description.part
        assert part is not None
        context = RankContext(config.rank, config.size, Topology(pp=config.size), _cpu())
        stage = self.stages[config.rank] = WatchedStage(
            family("toy").build(part.info, part.layers, context), config.rank, self
        )
        if config.rank == 0:
            planner = self.planner = WatchedPlanner(self.case, self.journal, description)
        self._killed.discard(config.rank)
        self._hung.discard(config.rank)
        super()._spawn(description, stage, planner)

    def _make_device(self, rank: int, clock: Clock) -> Device:
        case = self.case
        slow = case.slow[rank]

        def time_of(cost: list[tuple[int, int]]) -> float:
            if rank in self._hung:
                return _HUNG_S
            return slow * (case.launch_s + case.row_s * sum(tokens for _, tokens in cost))

        if case.device == "stream":
            self.devices[rank] = StreamDevice(clock, case.launch_s / 4, time_of=time_of)
        else:
            self.devices[rank] = EmulatedDevice(clock, time_of)
        return self.devices[rank]

    # ---- kills ----

    def applied(self, rank: int, step: Step) -> None:
        """A rank prepares a step."""
        phase = self.journal.applied(rank, step)
        for callback in tuple(self.on_applied):
            callback(rank)
        for kill, seen in zip(self.case.kills, self._seen, strict=True):
            if kill.rank == rank and kill.phase == phase in seen:
                if seen[phase] == kill.count:
                    self.end_later(kill)
                seen[phase] += 1

    def setting_up(self, rank: int) -> None:
        """A stage is set up."""
        for kill in self.case.kills:
            if kill.rank == rank and kill.phase == "setup" and kill.count and kill not in self._begun:
                self._begun.append(kill)
                self.end_later(kill)

    def end_later(self, kill: Kill) -> None:
        """End the rank `delay_s` from now."""
        asyncio.get_running_loop().call_later(kill.delay_s, self._end, kill)

    def _end(self, kill: Kill) -> None:
        if kill.rank not in self._tasks or self._tasks[kill.rank].done():
            return
        (self._hung if kill.how == "hang" else self._killed).add(kill.rank)
        self.journal.strike(kill.how, kill.rank)
        if kill.how == "abort":
            endpoint = self.board().latest(Peer("llm", kill.rank)) if self.board() else None
            if endpoint is not None:
                endpoint.abort()
        if kill.how != "hang":
            self._tasks[kill.rank].cancel()

    # ---- what is left ----

    def link_faults(self) -> list[Any]:
        """What was done to frames, and what of it was noticed, in order."""
        events: Any = self.rendezvous.objects.get("faulty", ())
        return list(events)

    def board(self) -> Any:
        """The open endpoints, None before the first."""
        return self.rendezvous.objects.get(_SCHEME)

    def held(self) -> set[str]:
        """Lanes with credits out: frames sent and not consumed, or tensors received and not released."""
        found: set[str] = set()
        endpoints = [one for of_peer in self.board()._endpoints.values() for one in of_peer] if self.board() else []
        for endpoint in endpoints:
            for lane in endpoint._lanes():
                if lane.credits() != lane.window:
                    found.add(f"{lane.me}>{lane.peer} {lane.lane.name} {lane.kind}")
        return found


def _cpu() -> Any:
    import torch

    return torch.device("cpu")


class WatchedStage(Stage):
    """A stage whose preparations are noted."""

    def __init__(self, stage: Stage, rank: int, world: FuzzWorld) -> None:
        self.name = stage.name
        self.inner = stage
        self._rank = rank
        self._world = world
        # What is called most goes straight to the stage.
        for name in ("start", "forward", "collect", "describe", "cost", "reset", "integrity", "stats", "teardown"):
            setattr(self, name, getattr(stage, name))

    def setup(self, ctx: StageContext) -> int | None:
        """See `Stage`."""
        self._world.setting_up(self._rank)
        return self.inner.setup(ctx)

    def prepare(self, step: Step) -> Any:
        """See `Stage`."""
        self._world.applied(self._rank, step)
        return self.inner.prepare(step)


class WatchedPlanner:
    """A scheduler that notes what it is told and what it tells."""

    def __init__(self, case: Case, journal: Journal, description: RankDescription) -> None:
        assert description.planner is not None
        config = SchedulerConfig.from_json(description.planner.config)
        self.inner = Scheduler(replace(config, chunk_policy=case.policy))
        self._journal = journal
        self._epoch = 0
        self.next_step = self.inner.next_step
        self.observe = self.inner.observe
        self.abandon = self.inner.abandon
        self.idle = self.inner.idle
        self.integrity = self.inner.integrity
        self.stats = self.inner.stats
        self.progress = self.inner.progress

    def start(self, epoch: int, capacity: int | None) -> None:
        """See `Planner`."""
        self._epoch = epoch
        self.inner.start(epoch, capacity)
        self._journal.capacity_tokens = (capacity or 0) * self.inner.config.page_size

    def submit(self, request: Request) -> None:
        """See `Planner`."""
        self._journal.note(f"planner takes {request.id} with {len(request.generated) // 4} tokens")
        self._journal.counts["resumed"] += bool(request.generated)
        self.inner.submit(request)

    def cancel(self, id: str) -> None:
        """See `Planner`."""
        pool = self.inner._pool
        state = pool.requests.get(id) if pool else None
        phase = state.phase.value if state else "ended"
        self._journal.counts[f"cancel.{phase}"] += 1
        self._journal.note(f"planner cancels {id}, {phase}")
        self.inner.cancel(id)

    def apply(self, result: StepResult) -> None:
        """See `Planner`."""
        self.inner.apply(result)

    def news(self) -> Sequence[RequestOutput]:
        """See `Planner`."""
        news = self.inner.news()
        for one in news:
            ends = one.finish_reason or (one.error.kind if one.error else "")
            self._journal.note(f"news of {one.id}: {len(one.tokens) // 4} tokens {ends}")
            if ends:
                self._journal.last_news[f"{self._epoch}: {one.id}"] += 1
                self._journal.counts[f"ended.{ends}"] += 1
                self._journal.counts["prefix_hits"] += one.cached_tokens > 0
        return news
