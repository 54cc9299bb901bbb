"""The fast search against the exact one."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelined.chunking import BalancedChunks, Load, Task, cut_seconds, find_target, optimum
from pipelined.costs import LiveCosts, MicroBatch, PipelineCost, StageCost, Window, makespan


@st.composite
def costs(draw: st.DrawFn) -> StageCost:
    """From launch-bound to attention-bound, with prefix costs or without."""
    b = 10 ** draw(st.floats(-6, -3))
    a = b / 10 ** draw(st.floats(3, 5.5))
    c = b * 10 ** draw(st.floats(1, 4))
    d = draw(st.just(0.0) | st.floats(0, 0.1)) * b
    return StageCost(a, b, c, d)


def cut(policy: BalancedChunks, tokens: int, prefix: int = 0) -> tuple[int, ...]:
    sizes, end = [], prefix + tokens
    flying: list[MicroBatch] = []
    while prefix < end:
        load = Load(prompts=1, queue=((prefix, end - prefix),), flying=tuple(flying))
        budget = policy.micro_batch(load)
        size = budget.offer(prefix, end - prefix)
        assert size == budget.offer(prefix, end - prefix), "an offer changes nothing"
        assert 0 < size <= end - prefix
        assert size == end - prefix or size % policy.align == 0
        budget.spend(prefix, size)
        sizes.append(size)
        flying = [*flying, MicroBatch(((prefix, size),))][-policy.costs.pp_size - 1 :]
        prefix += size
    return tuple(sizes)


@given(costs(), st.integers(1, 20_000), st.integers(1, 12), st.integers(0, 500).map(lambda n: 64 * n))
@settings(max_examples=60, deadline=None)
def test_a_lone_prompt_takes_no_longer_than_the_optimum(cost: StageCost, tokens: int, stages: int, prefix: int) -> None:
    policy = BalancedChunks(LiveCosts(stages, PipelineCost.even(cost, stages)))
    sizes = cut(policy, tokens, prefix)
    assert sum(sizes) == tokens
    best = optimum(cost, tokens, stages - 1, prefix_tokens=prefix, within=1e-3)
    assert cut_seconds(cost, sizes, stages - 1, prefix) <= 1.01 * best.seconds


@given(costs(), st.integers(1000, 200_000), st.integers(1, 12))
@settings(max_examples=40, deadline=None)
def test_it_is_never_worse_than_the_best_fixed_size(cost: StageCost, tokens: int, stages: int) -> None:
    ours = cut_seconds(
        cost, cut(BalancedChunks(LiveCosts(stages, PipelineCost.even(cost, stages))), tokens), stages - 1
    )
    for size in (64 * 2**n for n in range(12)):
        whole, rest = divmod(tokens, size)
        fixed = (size,) * whole + ((rest,) if rest else ())
        assert ours <= cut_seconds(cost, fixed, stages - 1) * 1.002


@given(costs(), st.lists(st.floats(0.4, 1), min_size=1, max_size=7), st.integers(500, 30_000))
@settings(max_examples=30, deadline=None)
def test_stages_of_different_speed(cost: StageCost, speeds: list[float], tokens: int) -> None:
    stages = PipelineCost(tuple(StageCost(cost.a * s, cost.b * s, cost.c * s, cost.d * s) for s in [*speeds, 1.0]))

    def takes(sizes: tuple[int, ...]) -> float:
        starts = np.cumsum((0, *sizes[:-1]))
        works = [MicroBatch(((int(start), size),)) for start, size in zip(starts, sizes, strict=True)]
        return float(makespan([stages.times_s(work) for work in works])[-1, -1])

    ours = takes(cut(BalancedChunks(LiveCosts(len(stages.stages), stages)), tokens))
    best = optimum(cost, tokens, sum(speeds), within=1e-3)
    assert ours <= 1.01 * best.seconds  # with each stage counted by its speed, wherever it stands


def test_windows_make_late_chunks_even() -> None:
    cost = StageCost(0, 1e-5, 0.01, 0, (Window(4096, a=1e-9),))
    sizes = cut(BalancedChunks(LiveCosts(8, PipelineCost.even(cost, 8))), 200_000)
    late = sizes[len(sizes) // 2 : -3]
    assert max(late) - min(late) <= 64
    assert sizes[0] > late[0]


def test_no_tail_is_too_small() -> None:
    cost = StageCost(1e-9, 1e-5, 0.05)
    policy = BalancedChunks(LiveCosts(4, PipelineCost.even(cost, 4)))
    for tokens in range(20_000, 21_000, 37):
        sizes = cut(policy, tokens)
        assert sizes[-1] > sizes[0] / 8, tokens


def test_planning_is_fast() -> None:
    """Bounds are an order of magnitude above what is measured, so that a busy machine passes."""
    cost = PipelineCost.even(StageCost(3.6e-10, 5.8e-6, 0.02), 8)
    policy = BalancedChunks(LiveCosts(8, cost))
    begun_s = time.process_time()
    policy.target(Load(prompts=1), 0, 1 << 20)
    assert time.process_time() - begun_s < 0.05
    begun_s = time.process_time()
    sizes = cut(policy, 1 << 20)
    assert time.process_time() - begun_s < 0.5
    assert len(sizes) > 200


def test_the_target_grows_with_the_queue_up_to_its_bounds() -> None:
    cost = PipelineCost.even(StageCost(1e-9, 1e-5, 0.02), 4)
    targets = [find_target(Task(cost, ((0, 20_000),) * prompts)).seconds for prompts in (1, 4, 16, 64)]
    assert targets == sorted(targets)
    assert targets[-1] > 3 * targets[0]
    assert find_target(Task(cost, ((0, 20_000),) * 64, most_s=0.05)).seconds <= 0.05
    policy = BalancedChunks(LiveCosts(4, cost), most_tokens=1000)
    assert policy.micro_batch(Load(prompts=64)).offer(0, 20_000) == 960
    assert policy.micro_batch(Load(prompts=1)).offer(0, 1000) <= 1000


def test_one_stage_takes_whole_prompts() -> None:
    policy = BalancedChunks(LiveCosts(1, PipelineCost.even(StageCost(1e-9, 1e-5, 0.02), 1)))
    assert cut(policy, 5000) == (5000,)


def test_what_is_under_way_is_sunk() -> None:
    cost = PipelineCost.even(StageCost(1e-9, 1e-5, 0.02), 4)
    alone = find_target(Task(cost, ((0, 20_000),)))
    behind = find_target(Task(cost, ((0, 20_000),), sunk_s=2 * alone.seconds))
    assert behind.seconds >= 2 * alone.seconds * 0.99
    assert behind.micro_batches < alone.micro_batches


@pytest.mark.parametrize("page_size", [1, 16, 48, 64, 256])
def test_chunks_are_whole_pages(page_size: int) -> None:
    policy = BalancedChunks(LiveCosts(2), page_size=page_size)
    assert policy.align % page_size == 0
    assert policy.align >= 64
    assert sum(cut(policy, 10_000)) == 10_000
