"""What planning costs. Bounds are an order of magnitude above what is measured, so that a busy machine passes."""

from __future__ import annotations

import time
from typing import Any

from pipelined.kv import runs
from pipelined.messages import Chunk, Decode, Sampled, StepResult
from pipelined.scheduler import Scheduler, SchedulerConfig


def test_a_decode_step_costs_little(toolbox: Any) -> None:
    scheduler = Scheduler(SchedulerConfig(context_length=100_000, vocab_size=100, pp_size=4))
    scheduler.start(0, 10_000)
    for number in range(8):
        scheduler.submit(toolbox.request(str(number), [number] * 100, max_tokens=10_000))
    steps, begun_s = 2_000, time.process_time()
    flying = []
    for _ in range(steps):
        while step := scheduler.next_step(0.0):
            flying.append(step)
        step = flying.pop(0)
        sampled = tuple(Sampled(item.seq, 5) for item in step.items if isinstance(item, Decode | Chunk))
        scheduler.apply(StepResult(0, step.number, sampled))
        scheduler.news()
    assert time.process_time() - begun_s < steps / 1_000


def test_a_chunk_of_a_million_tokens_costs_no_more_than_one_of_a_few(toolbox: Any) -> None:
    tokens = 1 << 20
    scheduler = Scheduler(SchedulerConfig(context_length=2 * tokens, vocab_size=100, pp_size=8))
    scheduler.start(0, 2 * tokens // 64)
    scheduler.submit(toolbox.request("long", [index % 97 for index in range(tokens)]))
    scheduler.submit(toolbox.request("waits", [1] * 1000))
    scheduler.next_step(0.0)
    begun_s, pages = time.process_time(), list[int]()
    for _ in range(1000):
        step = scheduler.next_step(0.0)
        assert step is not None
        assert isinstance(step.items[-1], Chunk)
        pages += step.items[-1].new_pages
    assert time.process_time() - begun_s < 0.5  # copying the prompt each time would take longer
    assert len(list(runs(pages))) == 1
