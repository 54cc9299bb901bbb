"""Searches how prompts should be cut for a workload, by running it on the real scheduler in virtual time.

The steps of the published guide, and those that it leaves to the reader: the best fixed size; first sizes of dynamic
chunks of two to four times that; the smoothing factor; balanced chunks; the window of micro-batches in flight; which
layers go to which stage. Each begins with the best that was found before.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from statistics import mean
from typing import TYPE_CHECKING, Any, Final

from pipelined.clock import MonotonicClock
from pipelined.errors import ConfigError, PartitionError, nearest
from pipelined.planning.scenario import Chunking, Link, Scenario, StagePart
from pipelined.planning.simulate import Percentiles, Simulation, simulate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from pipelined.clock import Clock
    from pipelined.planning.plan_source import Subject
    from pipelined.planning.tune_workload import Workload

__all__ = ["GOALS", "Setting", "Trial", "Tuned", "Tuner", "scored"]

GOALS: Final = ("ttft", "latency", "throughput")
"""What is made small: mean time to first token, mean time to last token, or the time that the whole takes."""

_SMOOTHINGS: Final = (0.6, 0.65, 0.7, 0.8, 0.85, 1.0)
_DEPTHS: Final = (1, 2, 3, 4, 8)
_MOST_MOVES: Final = 4
_BETTER: Final = 2e-3  # less is no reason to set anything


@dataclass(frozen=True)
class Setting:
    """How an engine cuts and cues. As in `EngineConfig`; None: its default.

    Attributes:
        partition: Layers of each stage; None: even, or as they were measured.
    """

    policy: str
    chunked_prefill_size: int
    smoothing_factor: float = 0.75
    max_micro_batch_tokens: int | None = None
    depth: int = 2
    partition: tuple[int, ...] | None = None

    @property
    def text(self) -> str:
        """For people."""
        words = {
            "fixed": f"fixed {self.chunked_prefill_size}",
            "dynamic": f"dynamic from {self.chunked_prefill_size}, σ {self.smoothing_factor:g}",
            "balanced": "balanced"
            + (f", at most {self.max_micro_batch_tokens} tokens" if self.max_micro_batch_tokens else ""),
        }[self.policy]
        layers = f", layers {'-'.join(map(str, self.partition))}" if self.partition else ""
        return f"{words}, window P+{self.depth}{layers}"

    def settings(self) -> dict[str, Any]:
        """For `EngineConfig`: what this policy looks at."""
        found: dict[str, Any] = {"chunking": self.policy}
        if self.policy != "balanced":
            found["chunked_prefill_size"] = self.chunked_prefill_size
        if self.policy == "dynamic":
            found["smoothing_factor"] = self.smoothing_factor
        if self.policy == "balanced" and self.max_micro_batch_tokens is not None:
            found["max_micro_batch_tokens"] = self.max_micro_batch_tokens
        found["depth"] = self.depth
        if self.partition is not None:
            found["layer_partition"] = self.partition
        return found


@dataclass(frozen=True)
class Trial:
    """A setting, and what the workload came to. Times in seconds.

    Attributes:
        step: Which step of the search tried it.
        score: What is made small.
    """

    setting: Setting
    step: str
    score: float
    ttft: Percentiles
    itl: Percentiles | None
    latency_s: float
    prompt_tokens_per_s: float
    wall_s: float


def scored(result: Simulation, goal: str) -> float:
    """What is made small, of a run."""
    if goal == "ttft":
        return result.ttft.mean
    if goal == "throughput":
        return result.wall_s
    return mean(request.token_times_s[-1] - request.arrived_s for request in result.requests)


@dataclass(frozen=True)
class Tuned:
    """What the search found.

    Attributes:
        trials: All, the best first.
        default: The setting to be held against.
        cut_short: The budget ran out before the search was at its end.
    """

    trials: tuple[Trial, ...]
    default: Trial
    cut_short: bool

    @property
    def winner(self) -> Trial:
        """The best; of those as good as it, the one that is nearest to the default."""
        alike = [trial for trial in self.trials if trial.score <= self.trials[0].score * (1 + _BETTER)]
        if any(trial is self.default for trial in alike):
            return self.default
        return min(alike, key=lambda trial: (_differences(trial.setting, self.default.setting), trial.score))

    @property
    def gain(self) -> float:
        """How much of the default's score is saved."""
        return 1 - self.winner.score / self.default.score if self.default.score else 0.0


def _differences(one: Setting, other: Setting) -> int:
    mine, theirs = one.settings(), other.settings()
    return sum(mine.get(name) != theirs.get(name) for name in {*mine, *theirs})


class _BudgetSpent(Exception):
    """The time for the search is over."""


@dataclass
class Tuner:
    """Runs a workload with one setting after the other. Not to be used on a running loop.

    Attributes:
        subject: Whose costs.
        workload: What is served.
        pp_size: Stages.
        default: The setting to be held against.
        goal: One of `GOALS`.
        link: Between the stages.
        hidden: Elements of 2 bytes of a hidden state.
        page_size, kv_cache_tokens, max_running_requests: As in `EngineConfig`.
        known_costs: The engine is given the profile; otherwise it learns while serving, from its own times.
        most_micro_batch_tokens: Of balanced chunks, unless a setting says otherwise.
        target_itl_s: Inter-token latency that they keep to.
        budget_s: The search ends after so long.
        progress: Told what is tried, and the best score so far.
        clock: For the budget.
    """

    subject: Subject
    workload: Workload
    pp_size: int
    default: Setting
    goal: str = "ttft"
    link: Link = field(default_factory=Link)
    hidden: int = 4096
    page_size: int = 64
    kv_cache_tokens: int | None = None
    max_running_requests: int = 64
    known_costs: bool = False
    most_micro_batch_tokens: int = 8192
    target_itl_s: float | None = None
    budget_s: float = 120.0
    progress: Callable[[str, float], None] | None = None
    clock: Clock = field(default_factory=MonotonicClock)
    _trials: dict[Setting, Trial] = field(default_factory=dict)
    _ends_s: float = 0.0

    def __post_init__(self) -> None:
        if self.goal not in GOALS:
            raise ConfigError(f"unknown goal {self.goal!r}{nearest(self.goal, GOALS)}")

    def search(self) -> Tuned:
        """Try all steps.

        Raises:
            ConfigError: A request of the workload cannot be served.
            PartitionError: The default's layers cannot be cut so.
        """
        self.workload.check(self.subject.context_length, self.kv_cache_tokens, self.page_size)
        self._ends_s = self.clock.now() + self.budget_s
        default = self._run(self.default, "default")
        cut_short = False
        try:
            self._steps()
        except _BudgetSpent:
            cut_short = True
        trials = sorted(self._trials.values(), key=lambda trial: (trial.score, trial.step != "default"))
        return Tuned(tuple(trials), default, cut_short)

    def _steps(self) -> None:
        base = replace(self.default, max_micro_batch_tokens=None)
        self._try("balanced", [replace(base, policy="balanced")])
        fixed = self._try("fixed size", [replace(base, policy="fixed", chunked_prefill_size=n) for n in self._sizes()])
        size = fixed.setting.chunked_prefill_size
        between = [self._page(n) for n in (size * 3 // 4, size * 3 // 2)]
        fixed = self._try("fixed size", [replace(fixed.setting, chunked_prefill_size=n) for n in between], fixed)
        size = fixed.setting.chunked_prefill_size
        first = [
            replace(base, policy="dynamic", chunked_prefill_size=n * size, smoothing_factor=0.75) for n in (1, 2, 3, 4)
        ]
        dynamic = self._try("dynamic, first size", first)
        self._try(
            "smoothing factor", [replace(dynamic.setting, smoothing_factor=share) for share in _SMOOTHINGS], dynamic
        )
        bounds = [n for n in (2048, 4096, 16384, 32768) if n < 2 * self.workload.longest_prompt]
        self._try(
            "balanced, its bound",
            [replace(base, policy="balanced", max_micro_batch_tokens=self._page(n)) for n in bounds],
        )
        best = self._best().setting
        best = self._try("window", [replace(best, depth=n) for n in _DEPTHS], self._trials[best]).setting
        for _ in range(_MOST_MOVES):
            moved = self._try("layers", list(self._moves(best)), self._trials[best]).setting
            if moved == best:
                return
            best = moved

    def _page(self, tokens: int) -> int:
        return max(1, round(tokens / self.page_size)) * self.page_size

    def _sizes(self) -> list[int]:
        """Powers of two, from a page or so to the longest prompt."""
        sizes = [self._page(1 << power) for power in range(7, 17)]
        longest = self.workload.longest_prompt
        return sorted({size for size in sizes if size < 2 * longest} or {self._page(longest)})

    def _moves(self, setting: Setting) -> Iterator[Setting]:
        """A layer of the stage that is slowest at the longest prompt's half, given to each of the others."""
        if not self.subject.layers or self.pp_size == 1:
            return
        sizes = [end - start for start, end in self.subject.parts(self.pp_size, setting.partition)]
        length = self.workload.longest_prompt
        stages = self.subject.stages(self.pp_size, tuple(sizes)).stages
        times = [stage.c + stage.chunk_s(length / 2, 512) for stage in stages]
        slowest = max(range(self.pp_size), key=lambda rank: times[rank])
        for rank in range(self.pp_size):
            if rank != slowest and sizes[slowest] > 1:
                moved = [size + (place == rank) - (place == slowest) for place, size in enumerate(sizes)]
                yield replace(setting, partition=tuple(moved))

    def _best(self) -> Trial:
        return min(self._trials.values(), key=lambda trial: trial.score)

    def _try(self, step: str, settings: Iterable[Setting], so_far: Trial | None = None) -> Trial:
        """The best of these and `so_far`; of settings alike, the earlier one."""
        found = [so_far] if so_far is not None else []
        for setting in settings:
            if setting not in self._trials and self.clock.now() > self._ends_s:
                raise _BudgetSpent
            try:
                found.append(self._run(setting, step))
            except PartitionError:
                continue  # the model may not be cut there
        best = found[0]
        for trial in found[1:]:
            if trial.score < best.score * (1 - _BETTER):
                best = trial
        return best

    def _run(self, setting: Setting, step: str) -> Trial:
        known = self._trials.get(setting)
        if known is not None:
            return known
        if self.progress is not None:
            self.progress(setting.text, self._best().score if self._trials else 0.0)
        result = simulate(self._scenario(setting))
        trial = self._trials[setting] = Trial(
            setting=setting,
            step=step,
            score=scored(result, self.goal),
            ttft=result.ttft,
            itl=result.itl,
            latency_s=scored(result, "latency"),
            prompt_tokens_per_s=result.prompt_tokens_per_s,
            wall_s=result.wall_s,
        )
        return trial

    def _scenario(self, setting: Setting) -> Scenario:
        cost = self.subject.stages(self.pp_size, setting.partition)
        balanced = setting.policy == "balanced"
        bound = setting.max_micro_batch_tokens or self.most_micro_batch_tokens
        # The engine is given its profile only for the layers that were measured.
        known = self.known_costs and self.subject.measured(self.pp_size, setting.partition)
        return Scenario(
            stages=tuple(StagePart.of(stage) for stage in cost.stages),
            chunking=Chunking(
                policy=setting.policy,
                chunked_prefill_size=setting.chunked_prefill_size,
                smoothing_factor=setting.smoothing_factor,
                max_micro_batch_tokens=bound if balanced else None,
                target_itl_s=self.target_itl_s if balanced else None,
                known_costs=known,
            ),
            arrivals=self.workload.arrivals,
            link=self.link,
            hidden=self.hidden,
            page_size=self.page_size,
            kv_cache_tokens=self.kv_cache_tokens,
            max_running_requests=self.max_running_requests,
            depth=setting.depth,
        )
