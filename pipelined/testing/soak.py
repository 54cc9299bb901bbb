"""A long run in real time, on real processes: many streams, users who go away, ranks that are killed or stopped.

The model is emulated: its tokens depend on their position alone, so that one that is lost, doubled or changed is seen.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from pipelined.errors import ConfigError, PipelinedError
from pipelined.llm import AsyncLLM
from pipelined.messages import SamplingParams
from pipelined.pipeline import ProcessWorld
from pipelined.rank.health import resident_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Soak", "SoakPlan", "SoakReport"]

MODEL = "emulated://?layers=8&hidden=64&vocab=32000&context=4096&kv=200000&c={launch_s}&b=1e-6"
_VOCAB, _FACTOR = 32_000, 7919

_SAMPLE_S = 1.0
_QUIET_S = 60.0
_SPARE_DESCRIPTORS = 4
"""A sample may find a link that is being opened."""

_GROWTH_BYTES = 48 << 20
"""How much a process may have grown between the two halves of a run: allocators keep some."""


@dataclass(frozen=True)
class SoakPlan:
    """What to do.

    Attributes:
        seconds: How long streams begin.
        streams: So many at a time.
        kill_every_s: On average; 0: never.
        stop_share: Of the kills: the rank is stopped (SIGSTOP) instead of killed.
        vanish_share: Of the users: they go away in the middle.
        pp_size: Ranks.
        launch_s: Of an emulated step.
        seed: Of everything random but the kernel.
    """

    seconds: float = 60.0
    streams: int = 200
    kill_every_s: float = 10.0
    stop_share: float = 0.2
    vanish_share: float = 0.2
    pp_size: int = 2
    launch_s: float = 0.02
    seed: int = 0

    def __post_init__(self) -> None:
        if not (self.seconds > 0 and self.streams > 0 and self.pp_size > 0 and self.kill_every_s >= 0):
            raise ConfigError("a soak needs more than 0 seconds, streams and ranks, and no negative kill interval")


@dataclass
class SoakReport:
    """What came of it.

    Attributes:
        wrong: What must not be, in words; empty if all is well.
        completed, vanished: Streams that ended with all their tokens, and those whose user went away.
        tokens: That were delivered.
        kills, stops: Ranks that were killed and stopped. restarts: Epochs that followed.
        longest_gap_s: Longest time that a stream was silent.
        rss_bytes: Of this process, in the first and the second half at most. descriptors: before and after.
    """

    wrong: list[str] = field(default_factory=list)
    completed: int = 0
    vanished: int = 0
    tokens: int = 0
    kills: int = 0
    stops: int = 0
    restarts: int = 0
    longest_gap_s: float = 0.0
    rss_bytes: tuple[int, int] = (0, 0)
    descriptors: tuple[int, int] = (0, 0)

    def as_data(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


class Soak:
    """One run."""

    def __init__(self, plan: SoakPlan, on_second: Callable[[SoakReport], None] | None = None) -> None:
        self.plan = plan
        self.report = SoakReport()
        self._on_second = on_second or (lambda _: None)
        self._chance = random.Random(plan.seed)
        self._world = ProcessWorld()
        self._rss: list[int] = []
        self._of_ranks: dict[int, dict[int | None, int]] = {}  # by process: descriptors, by epoch
        self._ends_s = 0.0
        self.engine = AsyncLLM(
            MODEL.format(launch_s=plan.launch_s),
            world=self._world,
            pp_size=plan.pp_size,
            device="emulated",
            threads_per_rank=1,
            page_size=16,
            max_running_requests=max(64, plan.streams),
            recover=True,
            heartbeat_bound_s=3.0,
        )

    async def run(self) -> SoakReport:
        """Do it. Every rank is gone afterwards."""
        loop, plan, report = asyncio.get_running_loop(), self.plan, self.report
        async with self.engine as engine:
            await engine.complete([1, 2, 3], SamplingParams(max_tokens=4, temperature=0))  # what is made once
            before = _descriptors()
            self._ends_s = loop.time() + plan.seconds
            async with asyncio.TaskGroup() as group:
                beside = [group.create_task(self._sample())]
                if plan.kill_every_s:
                    beside.append(group.create_task(self._strike()))
                users = [group.create_task(self._user(random.Random(f"{plan.seed} {n}"))) for n in range(plan.streams)]
                await asyncio.wait(users)
                for task in beside:
                    task.cancel()
            await self._quiet()
            report.descriptors = (before, _descriptors())
            report.restarts = engine.state.restarts
        half = len(self._rss) // 2
        report.rss_bytes = (max(self._rss[:half], default=0), max(self._rss[half:], default=0))
        self._judge()
        return report

    def _judge(self) -> None:
        report = self.report
        if report.descriptors[1] > report.descriptors[0]:
            report.wrong.append(f"descriptors before and after: {report.descriptors}")
        if report.rss_bytes[1] > report.rss_bytes[0] + _GROWTH_BYTES:
            report.wrong.append(f"memory in the first half and in the second: {report.rss_bytes}")
        for pid, counts in self._of_ranks.items():
            first, *_, last = [*counts.values()] * 2
            if last > first + _SPARE_DESCRIPTORS:
                report.wrong.append(f"descriptors of the rank in process {pid}, by epoch: {counts}")
        if not report.completed:
            report.wrong.append("no stream was completed")

    # ---- users ----

    async def _user(self, chance: random.Random) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(chance.uniform(0.0, 1.0))
        while loop.time() < self._ends_s:
            try:
                await self._stream(chance)
            except PipelinedError as error:
                self.report.wrong.append(f"{type(error).__name__}: {error}")
                return

    async def _stream(self, chance: random.Random) -> None:
        loop, report = asyncio.get_running_loop(), self.report
        prompt = [chance.randrange(_VOCAB) for _ in range(chance.randint(1, 400))]
        count = chance.randint(1, 200)
        leaves_at = chance.randint(0, count) if chance.random() < self.plan.vanish_share else None
        right = [position * _FACTOR % _VOCAB for position in range(len(prompt), len(prompt) + count)]
        stream = self.engine.generate(prompt, SamplingParams(max_tokens=count, temperature=0))
        seen, heard_s = 0, loop.time()
        try:
            async for output in stream:
                tokens = output.outputs[0].token_ids
                report.longest_gap_s = max(report.longest_gap_s, loop.time() - heard_s)
                report.tokens += len(tokens) - seen
                if tokens[seen:] != right[seen : len(tokens)]:
                    report.wrong.append(f"tokens {seen} to {len(tokens)} of {count} are not what they should be")
                    return
                seen, heard_s = len(tokens), loop.time()
                if leaves_at is not None and seen >= leaves_at:
                    report.vanished += 1
                    return
        finally:
            await stream.aclose()
        report.completed += 1
        if seen != count:
            report.wrong.append(f"a stream of {count} tokens ended after {seen}")

    # ---- trouble ----

    async def _strike(self) -> None:
        """End ranks, now and then, whenever the engine is well."""
        chance, every_s = self._chance, self.plan.kill_every_s
        while True:
            await asyncio.sleep(every_s * chance.uniform(0.5, 1.5))
            pids = self._world.pids
            if self.engine.state.name != "ready" or len(pids) != self.plan.pp_size:
                continue
            stops = chance.random() < self.plan.stop_share
            with suppress(ProcessLookupError):  # it has just ended by itself
                os.kill(chance.choice(pids), signal.SIGSTOP if stops else signal.SIGKILL)
            self.report.stops += stops
            self.report.kills += not stops

    # ---- what is held ----

    async def _sample(self) -> None:
        while True:
            self._rss.append(resident_bytes())
            if self.engine.state.name == "ready":
                for pid in self._world.pids:
                    with suppress(OSError):  # killed a moment ago
                        self._of_ranks.setdefault(pid, {})[self.engine.state.epoch] = _descriptors(pid)
            self._on_second(self.report)
            await asyncio.sleep(_SAMPLE_S)

    async def _quiet(self) -> None:
        """Wait until nobody holds anything."""
        held: Any = {}
        try:
            async with asyncio.timeout(_QUIET_S):
                while True:
                    try:
                        held = await self.engine.integrity()
                    except PipelinedError:  # a rank was lost a moment ago
                        held = {-1: {"recovering": 1}}
                    if not any(count for of_rank in held.values() for count in of_rank.values()):
                        return
                    await asyncio.sleep(0.2)
        except TimeoutError:
            self.report.wrong.append(f"still held when all was over: {held}")


def _descriptors(pid: int | str = "self") -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))
