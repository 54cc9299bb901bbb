"""Chunk policies compared on running engines: the tuned ones at the best of a sweep, `balanced` as it is."""

from __future__ import annotations

import asyncio
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from pipelined.planning.profile_cuts import Cut, cut_params, cut_world

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from pipelined.llm import AsyncLLM, EngineConfig

__all__ = ["Measured", "Row", "Sweep", "sweep"]

_TUNED = ("fixed", "dynamic")


class Measured(NamedTuple):
    """Prompts that came at one moment.

    Attributes:
        ttft_s: Mean time to first token.
        tokens_per_s: Of prompts, until the last first token.
    """

    ttft_s: float
    tokens_per_s: float


class Row(msgspec.Struct, frozen=True):
    """A policy at one place and load; medians of the measurements after the sweep."""

    where: str
    concurrency: int
    policy: str
    setting: str
    ttft_s: float
    tokens_per_s: float


@dataclass(frozen=True)
class Sweep:
    """What is compared.

    Attributes:
        where: For people.
        config: Of the engine; how it cuts does not matter.
        prompt: Token ids; all prompts are this one, and nothing is cached.
        fixed: Sizes to try. dynamic: first sizes. smoothings: tried with each of those.
        loads: Prompts at a time, and how often the winners and `balanced` are measured in turn. Rising.
    """

    where: str
    config: EngineConfig
    prompt: Sequence[int] = field(repr=False)
    fixed: tuple[int, ...]
    dynamic: tuple[int, ...]
    smoothings: tuple[float, ...]
    loads: tuple[tuple[int, int], ...]

    def cuts(self) -> list[Cut]:
        """All that is tried, `balanced` last."""
        found = [Cut("fixed", size) for size in self.fixed]
        found += [Cut("dynamic", size, smoothing) for size in self.dynamic for smoothing in self.smoothings]
        return [*found, Cut("balanced")]


async def sweep(plan: Sweep, tell: Callable[[str], None] = lambda _: None) -> list[Row]:
    """Measure it. `tell` hears what is measured next."""
    from pipelined.llm import AsyncLLM

    cuts = plan.cuts()
    rows: list[Row] = []
    tell(f"{plan.where}: starting ranks")
    async with AsyncLLM(plan.config, world=cut_world(cuts, processes=plan.config.workers == "process")) as llm:
        runs = _Runs(llm, plan, cuts, tell)
        for place in range(len(cuts)):  # each policy has costs of its own to learn, and the first launch is slow
            await runs.measure(place, 1)
        least = dict.fromkeys(_TUNED, 0)
        for concurrency, rounds in plan.loads:
            winners = []
            for policy in _TUNED:
                # The more prompts wait, the larger chunks pay: sizes below the best so far need no other try.
                places = [p for p, cut in enumerate(cuts) if cut.policy == policy and cut.size >= least[policy]]
                winners.append(await runs.best(places, concurrency))
                least[policy] = cuts[winners[-1]].size
            rows += await runs.compare([*winners, len(cuts) - 1], concurrency, rounds)
    return rows


class _Runs:
    def __init__(self, llm: AsyncLLM, plan: Sweep, cuts: Sequence[Cut], tell: Callable[[str], None]) -> None:
        self._llm, self._plan, self._cuts, self._tell = llm, plan, cuts, tell

    async def best(self, places: Iterable[int], concurrency: int) -> int:
        """The cut that is soonest (one prompt) or has the highest throughput (several)."""
        found = {place: await self.measure(place, concurrency) for place in places}
        if concurrency == 1:
            return min(found, key=lambda place: found[place].ttft_s)
        return max(found, key=lambda place: found[place].tokens_per_s)

    async def compare(self, places: Sequence[int], concurrency: int, rounds: int) -> list[Row]:
        """Measured in turn, so that the machine's moods strike all alike."""
        found: dict[int, list[Measured]] = {place: [] for place in places}
        for turn in range(rounds):
            for place in places if turn % 2 else reversed(places):
                found[place].append(await self.measure(place, concurrency))
        return [
            Row(
                self._plan.where,
                concurrency,
                self._cuts[place].policy,
                self._cuts[place].setting,
                statistics.median(one.ttft_s for one in measured),
                statistics.median(one.tokens_per_s for one in measured),
            )
            for place, measured in found.items()
        ]

    async def measure(self, place: int, concurrency: int) -> Measured:
        """So many prompts at one moment."""
        llm, cut = self._llm, self._cuts[place]
        self._tell(f"{self._plan.where}, {concurrency} at a time: {cut.policy} {cut.setting}")
        params = cut_params(place)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(llm.complete(self._plan.prompt, params)) for _ in range(concurrency)]
        times = [ttft_s for task in tasks if (ttft_s := task.result().metrics.ttft_s) is not None]
        assert len(times) == concurrency, "each prompt gets a token"
        return Measured(statistics.fmean(times), concurrency * len(self._plan.prompt) / max(times))
