"""A running engine whose prompts are cut as each of them asks: for measurements that compare cuts on the same ranks.

A request's `seed` is the place of its cut in a list that was given at the start. Requests of different cuts must not
run at the same time. Starting ranks anew for every cut would cost more than the measurements.
"""

from __future__ import annotations

from itertools import cycle
from typing import TYPE_CHECKING, Any

import msgspec

from pipelined.chunking import make_policy
from pipelined.costs import LiveCosts
from pipelined.messages import SamplingParams
from pipelined.pipeline import ProcessWorld, TaskWorld
from pipelined.rank.description import PlannerRef
from pipelined.scheduler import Scheduler, SchedulerConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipelined.chunking import Budget, ChunkPolicy, Load
    from pipelined.messages import Request
    from pipelined.pipeline import World
    from pipelined.rank.description import RankDescription

__all__ = ["Cut", "CutScheduler", "cut_params", "cut_world", "from_json"]

_FACTORY = f"{__name__}:from_json"


class Cut(msgspec.Struct, frozen=True, omit_defaults=True):
    """How prompts are cut.

    Attributes:
        policy: As in `make_policy`, or "" for the sizes below.
        size, smoothing: Its settings.
        sizes: Of the first chunk, the second and so on, over and over.
    """

    policy: str = ""
    size: int = 256
    smoothing: float = 0.75
    sizes: tuple[int, ...] = ()

    @property
    def setting(self) -> str:
        """What was set by hand, in a word or two."""
        if self.policy == "dynamic":
            return f"{self.size}, σ {self.smoothing:g}"
        return str(self.size) if self.policy == "fixed" else ""


class _Plan(msgspec.Struct, frozen=True):
    scheduling: dict[str, Any]
    cuts: tuple[Cut, ...]


class _Listed:
    """A chunk a micro-batch, of the sizes listed."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = tuple(sizes)

    def micro_batch(self, load: Load) -> _ListedBudget:
        """Of one prompt alone."""
        return _ListedBudget(self._sizes)


class _ListedBudget:
    __slots__ = ("_full", "_sizes")

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self._sizes = sizes
        self._full = False

    def offer(self, prefix_tokens: int, remaining_tokens: int) -> int:
        if self._full:
            return 0
        end = 0
        for size in cycle(self._sizes):
            end += size
            if end > prefix_tokens:
                return min(remaining_tokens, end - prefix_tokens)
        raise AssertionError("a cycle has no end")

    def spend(self, prefix_tokens: int, tokens: int) -> None:
        self._full = True


class _Chosen:
    """The policy whose turn it is."""

    def __init__(self, policy: ChunkPolicy) -> None:
        self.policy = policy

    def micro_batch(self, load: Load) -> Budget:
        return self.policy.micro_batch(load)


class CutScheduler(Scheduler):
    """Each cut has costs of its own to learn: nothing is learnt from what others measured."""

    def __init__(self, config: SchedulerConfig, cuts: Sequence[Cut]) -> None:
        self._each = [(costs := config.costs(), _policy(cut, config, costs)) for cut in cuts]
        self._chosen = _Chosen(self._each[0][1])
        super().__init__(config, self._chosen, self._each[0][0])

    def submit(self, request: Request) -> None:
        """See `Scheduler`; takes up the cut that the request asks for."""
        self.costs, self._chosen.policy = self._each[request.sampling.seed or 0]
        super().submit(request)


def _policy(cut: Cut, config: SchedulerConfig, costs: LiveCosts) -> ChunkPolicy:
    if not cut.policy:
        return _Listed(cut.sizes)
    return make_policy(
        cut.policy,
        chunked_prefill_size=cut.size,
        page_size=config.page_size,
        costs=costs,
        smoothing_factor=cut.smoothing,
        max_micro_batch_tokens=config.max_micro_batch_tokens,
    )


def cut_params(place: int, tokens: int = 1) -> SamplingParams:
    """Of a request that is cut as the list says at `place`, and answers with so many tokens."""
    return SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, seed=place)


def from_json(text: str) -> CutScheduler:
    """How rank 0 makes one, knowing only this function's name."""
    plan = msgspec.json.decode(text, type=_Plan)
    return CutScheduler(SchedulerConfig(**plan.scheduling), plan.cuts)


def cut_world(cuts: Sequence[Cut], *, processes: bool = True) -> World:
    """Where the ranks of such an engine live: give it to `AsyncLLM`."""
    return _CutProcesses(cuts) if processes else _CutTasks(cuts)


def _directed(descriptions: Sequence[RankDescription], cuts: Sequence[Cut]) -> list[RankDescription]:
    first, *others = descriptions
    assert first.planner is not None, "rank 0 plans"
    plan = _Plan(msgspec.json.decode(first.planner.config), tuple(cuts))
    planner = PlannerRef(_FACTORY, msgspec.json.encode(plan).decode())
    return [msgspec.structs.replace(first, planner=planner), *others]


class _CutProcesses(ProcessWorld):
    def __init__(self, cuts: Sequence[Cut]) -> None:
        super().__init__()
        self._cuts = cuts

    async def start(self, descriptions: Sequence[RankDescription], *others: Any, **options: Any) -> None:
        await super().start(_directed(descriptions, self._cuts), *others, **options)


class _CutTasks(TaskWorld):
    def __init__(self, cuts: Sequence[Cut]) -> None:
        super().__init__()
        self._cuts = cuts

    async def start(self, descriptions: Sequence[RankDescription], *others: Any, **options: Any) -> None:
        await super().start(_directed(descriptions, self._cuts), *others, **options)
