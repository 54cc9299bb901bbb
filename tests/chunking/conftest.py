"""A pipeline reduced to its times: a policy cuts prompts, stages take what the cost model says, results come back."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from pipelined.chunking import ChunkPolicy, Load
from pipelined.costs import LiveCosts, MicroBatch, PipelineCost


@dataclass
class Prompt:
    tokens: int
    arrived_s: float
    done: int = 0
    ttft_s: float = 0.0
    to_decode: int = 0
    context: int = 0
    token_times: list[float] = field(default_factory=list)


@dataclass
class Outcome:
    ttfts_s: list[float]
    makespan_s: float
    works: list[MicroBatch]
    itls_s: list[float]


class World:
    """Closed loop: `concurrency` requests at a time, the next arrives when one ends."""

    def __init__(self, policy: ChunkPolicy, cost: PipelineCost, lengths: list[int], concurrency: int, **options: Any):
        self.policy, self.cost = policy, cost
        self.todo = deque(lengths)
        self.window = len(cost.stages) + options.get("depth", 2)
        self.decode_tokens: int = options.get("decode_tokens", 0)
        self.noise: Callable[[], float] = options.get("noise", lambda: 1.0)
        self.learn: LiveCosts | None = options.get("learn")
        self.free = [0.0] * len(cost.stages)
        self.queue: list[Prompt] = []
        self.ready: list[Prompt] = []
        self.finished: list[Prompt] = []
        self.flying: deque[tuple[MicroBatch, float, list[Prompt]]] = deque()
        self.works: list[MicroBatch] = []
        self.now = 0.0
        for _ in range(min(concurrency, len(lengths))):
            self.arrive()

    def arrive(self) -> None:
        if self.todo:
            self.queue.append(Prompt(self.todo.popleft(), self.now, to_decode=self.decode_tokens))

    def plan(self) -> bool:
        stages = len(self.cost.stages)
        share = -(-(len(self.ready) + sum(w.decodes for w, _, _ in self.flying)) // stages)
        decodes, self.ready = self.ready[:share], self.ready[share:]
        context = sum(prompt.context for prompt in decodes)
        chunks: list[tuple[int, int]] = []
        sampled = list(decodes)
        if self.queue:
            queue = tuple((prompt.done, prompt.tokens - prompt.done) for prompt in self.queue)
            flying = tuple(work for work, _, _ in self.flying)
            budget = self.policy.micro_batch(Load(len(decodes), context, len(queue), queue, flying))
            for prompt in list(self.queue):
                left = prompt.tokens - prompt.done
                size = budget.offer(prompt.done, left)
                assert 0 <= size <= left
                assert size or chunks, "the first offer must get prefill on"
                if not size:
                    break
                if size < left:
                    size = (prompt.done + size) // 64 * 64 - prompt.done
                    assert size > 0 or chunks
                    if not size:
                        break
                budget.spend(prompt.done, size)
                chunks.append((prompt.done, size))
                prompt.done += size
                if size < left:
                    break
                self.queue.remove(prompt)
                sampled.append(prompt)
        if not chunks and not decodes:
            return False
        work = MicroBatch(tuple(chunks), len(decodes), context)
        end = self.now
        for stage, seconds in enumerate(self.cost.times_s(work)):
            end = self.free[stage] = max(end, self.free[stage]) + seconds
        self.works.append(work)
        self.flying.append((work, end, sampled))
        return True

    def result(self) -> None:
        work, self.now, sampled = self.flying.popleft()
        if self.learn is not None:
            for stage, seconds in enumerate(self.cost.times_s(work)):
                self.learn.observe(stage, work, seconds * self.noise())
        for prompt in sampled:
            prompt.token_times.append(self.now)
            prompt.ttft_s = prompt.ttft_s or self.now - prompt.arrived_s
            prompt.context = prompt.tokens + len(prompt.token_times)
            if len(prompt.token_times) <= prompt.to_decode:
                self.ready.append(prompt)
            else:
                self.finished.append(prompt)
                self.arrive()

    def run(self) -> Outcome:
        while True:
            while len(self.flying) < self.window and self.plan():
                pass
            if not self.flying:
                break
            self.result()
        times = [prompt.token_times for prompt in self.finished]
        itls = [after - before for own in times for before, after in itertools.pairwise(own)]
        return Outcome([prompt.ttft_s for prompt in self.finished], self.now, self.works, itls)


@pytest.fixture
def simulate() -> Callable[..., Outcome]:
    def run(
        policy: ChunkPolicy, cost: PipelineCost, lengths: list[int], concurrency: int = 1, **options: Any
    ) -> Outcome:
        return World(policy, cost, lengths, concurrency, **options).run()

    return run
