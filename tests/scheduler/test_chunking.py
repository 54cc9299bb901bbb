"""Chunk policies in the scheduler: what they are told, and what the scheduler learns."""

from __future__ import annotations

from typing import Any

import pytest

from pipelined.costs import MicroBatch, PipelineCost, StageCost, encode_costs
from pipelined.errors import ConfigError
from pipelined.messages import Chunk, Decode, Release, Sampled, StageTimes, Step, StepResult
from pipelined.scheduler import Scheduler, SchedulerConfig

COST = StageCost(a=1e-8, b=1e-4, c=0.01)


def work_of(step: Step) -> MicroBatch:
    chunks = tuple((item.start, item.tokens) for item in step.items if isinstance(item, Chunk))
    decodes = [item.position for item in step.items if isinstance(item, Decode)]
    return MicroBatch(chunks, len(decodes), sum(decodes))


def serve(toolbox: Any, scheduler: Scheduler, lengths: list[int], max_tokens: int = 1) -> list[MicroBatch]:
    """All steps of these requests, with the stages' times reported as they end."""
    scheduler.start(0, 10_000)
    for number, length in enumerate(lengths):
        scheduler.submit(
            toolbox.request(str(number), [(number + i) % 97 for i in range(length)], max_tokens=max_tokens)
        )
    window, flying, works = scheduler.config.pp_size + 2, [], []
    while True:
        while len(flying) < window and (step := scheduler.next_step(0.0)) is not None:
            if step.rows:
                flying.append(step)
                works.append(work_of(step))
            else:
                assert all(isinstance(item, Release) for item in step.items)
        if not flying:
            break
        step = flying.pop(0)
        for rank in range(scheduler.config.pp_size):
            scheduler.observe(StageTimes(0, rank, ((step.number, COST.launch_s(work_of(step))),)))
        tokens = [Sampled(i.seq, 5) for i in step.items if isinstance(i, Decode) or (isinstance(i, Chunk) and i.last)]
        scheduler.apply(StepResult(0, step.number, tuple(tokens)))
    scheduler.news()
    assert scheduler.idle()
    assert not any(scheduler.integrity().values())
    return works


def config(**settings: Any) -> SchedulerConfig:
    return SchedulerConfig(context_length=200_000, vocab_size=100, **settings)


@pytest.mark.parametrize("policy", ["fixed", "dynamic", "balanced"])
@pytest.mark.parametrize("page_size", [16, 48, 64])
def test_every_policy_serves_everything(toolbox: Any, policy: str, page_size: int) -> None:
    scheduler = Scheduler(
        config(pp_size=3, page_size=page_size, chunk_policy=policy, chunked_prefill_size=page_size * 32)
    )
    lengths = [5000, 1, 63, 64, 700, 12_000]
    works = serve(toolbox, scheduler, lengths, max_tokens=3)
    assert sum(tokens for work in works for _, tokens in work.chunks) == sum(lengths)
    assert all(prefix % page_size == 0 for work in works for prefix, _ in work.chunks)


def test_costs_are_learnt_whatever_the_policy(toolbox: Any) -> None:
    scheduler = Scheduler(config(pp_size=2, chunked_prefill_size=512))
    assert not scheduler.costs.known
    serve(toolbox, scheduler, [20_000])
    far = MicroBatch(((30_000, 512),))
    assert scheduler.costs.cost.launch_s(far) == pytest.approx(COST.launch_s(far), rel=0.05)
    assert scheduler.costs.error is not None
    assert scheduler.costs.error < 0.15
    version = scheduler.costs.version
    scheduler.observe(StageTimes(7, 0, ((0, 1.0),)))
    scheduler.observe(StageTimes(0, 0, ((10_000, 1.0),)))
    assert scheduler.costs.version == version


def test_a_profile_balances_from_the_first_chunk_on(toolbox: Any) -> None:
    costs = encode_costs(PipelineCost.even(COST, 4))
    scheduler = Scheduler(config(pp_size=4, chunk_policy="balanced", stage_costs=costs))
    works = serve(toolbox, scheduler, [60_000])
    times = [COST.launch_s(work) for work in works]
    assert works[0].tokens > 5 * works[-2].tokens
    assert min(times[:-1]) > 0.8 * max(times)  # sizes are multiples of 64


def test_without_a_profile_chunks_become_even(toolbox: Any) -> None:
    scheduler = Scheduler(config(pp_size=4, chunk_policy="balanced"))
    works = serve(toolbox, scheduler, [100_000])
    assert len(works) > 12
    late = [COST.launch_s(work) for work in works[-8:-1]]
    assert max(late) < 1.15 * min(late)


def test_what_is_behind_a_cached_prefix_is_sized_by_it(toolbox: Any) -> None:
    costs = encode_costs(PipelineCost.even(COST, 4))
    scheduler = Scheduler(config(pp_size=4, chunk_policy="balanced", stage_costs=costs))
    scheduler.start(0, 10_000)
    works = []
    for length in (64_000, 90_000):  # the second begins like the first
        scheduler.submit(toolbox.request(str(length), [i % 97 for i in range(length)], max_tokens=1))
        while (step := scheduler.next_step(0.0)) is not None:
            if step.rows:
                works.append(work_of(step))
                last = [Sampled(item.seq, 5) for item in step.items if isinstance(item, Chunk) and item.last]
                scheduler.apply(StepResult(0, step.number, tuple(last)))
    second = [work for work in works if sum(n for _, n in work.chunks) and work.chunks[0][0] >= 63_936][-20:]
    times = [COST.launch_s(work) for work in second]
    assert len(second) > 3
    assert min(times[:-1]) > 0.75 * max(times)
    assert sum(work.tokens for work in works) < 64_000 + 27_000


def test_settings_are_checked() -> None:
    costs = encode_costs(PipelineCost.even(COST, 2))
    for settings, message in (
        ({"stage_costs": costs, "pp_size": 4}, "of 2 stages, pp_size=4"),
        ({"stage_costs": "[{}]"}, "missing required field `a`"),
        ({"chunk_policy": "dynamic", "smoothing_factor": 1.5}, "smoothing_factor=1.5"),
        ({"chunk_policy": "balanced", "max_micro_batch_tokens": 3}, "max_micro_batch_tokens=3"),
        ({"chunk_policy": "balanced", "target_itl_s": 0.0}, "target_itl_s=0.0"),
    ):
        with pytest.raises(ConfigError, match=message):
            Scheduler(config(**settings))  # type: ignore[arg-type]
