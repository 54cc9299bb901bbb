"""A small model of a pipeline that leaves the spans a real one leaves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from pipelined.trace import RankTrace, Span, Trace


@dataclass
class Model:
    """A pipeline whose steps take known times, in seconds.

    Attributes:
        stages: Number of ranks.
        link_s, plan_s, launch_s, result_s: What each hand-over takes.
        window: Steps in flight at most.
    """

    stages: int
    link_s: float = 0.0
    plan_s: float = 0.0
    launch_s: float = 0.0
    result_s: float = 0.0
    window: int = 1000
    spans: list[list[Span]] = field(default_factory=list)
    free_s: list[float] = field(default_factory=list)
    home_s: list[float] = field(default_factory=list)
    planner_s: float = 0.0
    last_end_s: float = 0.0

    def __post_init__(self) -> None:
        self.spans = [[] for _ in range(self.stages)]
        self.free_s = [0.0] * self.stages

    def step(self, times_s: list[float], *, detail: str = "", wanted_s: float = 0.0, needs: int = -1) -> int:
        """A step with these forward times, wanted from `wanted_s` on, after the result of step `needs` is home."""
        number = len(self.home_s)
        ready_s = max(wanted_s, self.home_s[needs] if needs >= 0 else 0.0)
        cause = "no_work"
        if number >= self.window and self.home_s[number - self.window] > max(ready_s, self.planner_s):
            ready_s, cause = self.home_s[number - self.window], "window"
        if ready_s > self.planner_s:
            # Each result that comes home wakes the planner, so its waits end there.
            wakes = sorted({t for t in self.home_s if self.planner_s < t < ready_s} | {ready_s})
            for wake_s in wakes:
                self.spans[0].append(Span("schedule", "wait", self.planner_s, wake_s, -1, cause))
                self.planner_s = wake_s
        planned_s = self.planner_s + self.plan_s
        self.spans[0].append(Span("schedule", "plan", self.planner_s, planned_s, number))
        self.planner_s = arrived_s = planned_s
        for rank, time_s in enumerate(times_s):
            spans = self.spans[rank]
            spans.append(Span("schedule", "prepare", planned_s, planned_s, number))
            if rank:
                spans.append(Span("launch", "wait", min(planned_s, arrived_s), arrived_s, number, "input"))
            start_s = max(self.free_s[rank], arrived_s + self.launch_s)
            end_s = self.free_s[rank] = start_s + time_s
            spans.append(Span("device", "forward", start_s, end_s, number, detail))
            if rank + 1 < self.stages:
                arrived_s = end_s + self.link_s
                spans.append(Span("commit", "send", end_s, arrived_s, number, 4096))
        self.last_end_s = self.free_s[-1]
        self.home_s.append(self.last_end_s + self.result_s)
        self.spans[-1].append(Span("results", "collect", self.last_end_s, self.home_s[-1], number))
        return number

    def trace(self, **times: float) -> Trace:
        """What has been recorded so far."""
        ranks = [RankTrace(rank, f"layers {8 * rank}-{8 * rank + 8}", spans) for rank, spans in enumerate(self.spans)]
        return Trace.of(ranks, **times, meta={"model": "synthetic"})


@pytest.fixture
def model() -> Callable[..., Model]:
    return Model


@pytest.fixture
def busy_server() -> Trace:
    """Four ranks: two prompts in chunks, then both decode; a pause; a third prompt."""
    model = Model(4, link_s=0.002, plan_s=0.0005, launch_s=0.0003, result_s=0.001, window=6)
    for chunk in range(8):
        cost = 0.030 + 0.004 * chunk
        model.step([cost, cost, cost * 1.15, cost], detail=f"#a prefill 1024@{1024 * chunk}")
        if chunk < 4:
            model.step([cost] * 4, detail=f"#b prefill 768@{768 * chunk}")
    last = len(model.home_s) - 1
    for token in range(10):
        last = model.step([0.006] * 4, detail=f"#a decode 1@{8192 + token}, #b decode 1@{3072 + token}", needs=last)
    pause_s = model.last_end_s + 0.15
    for chunk in range(5):
        model.step([0.04] * 4, detail=f"#c prefill 1024@{1024 * chunk}", wanted_s=pause_s)
    return model.trace()
