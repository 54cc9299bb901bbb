"""The published measurements, recomputed from the stage models that were published with them or fit them.

Where a model has no cost per chunk, 20 ms are added before `balanced` is compared: without any, the smallest chunks
would be best.
"""

from __future__ import annotations

from typing import Any

import pytest

from pipelined.chunking import BalancedChunks, ChunkPolicy, DynamicChunks, FixedChunks, Runtime, optimum
from pipelined.costs import LiveCosts, PipelineCost, StageCost

# Qwen3-235B on eight stages: fitted to the whole model's times on four GPUs, an eighth of it per stage.
QWEN = StageCost(a=2.869e-9 / 8, b=4.62e-5 / 8, c=0.0)
QWEN_TTFT_S = {131072: 10.54, 262144: 32.68, 524288: 114.33, 1048576: 420.91}
# Kimi-K2.5 on four stages: as published.
KIMI = StageCost(a=3.25e-10, b=6.03e-6, c=26.1e-3, d=5.39e-7)
KIMI_FIXED_TTFT_S = {32768: 14.896, 16384: 11.459, 8192: 10.121, 4096: 10.297}


def qwen_policy() -> ChunkPolicy:
    return DynamicChunks(18432, Runtime(QWEN.a, QWEN.b), smoothing=0.8)


@pytest.mark.parametrize(("tokens", "published_s"), QWEN_TTFT_S.items())
def test_qwen_within_3_percent(simulate: Any, tokens: int, published_s: float) -> None:
    run = simulate(qwen_policy(), PipelineCost.even(QWEN, 8), [tokens])
    assert run.makespan_s == pytest.approx(published_s, rel=0.03)


@pytest.mark.parametrize(("size", "published_s"), KIMI_FIXED_TTFT_S.items())
def test_kimi_within_6_percent(simulate: Any, size: int, published_s: float) -> None:
    run = simulate(FixedChunks(size), PipelineCost.even(KIMI, 4), [131072])
    assert run.makespan_s == pytest.approx(published_s, rel=0.06)


def gain(simulate: Any, theirs: ChunkPolicy, cost: StageCost, stages: int, tokens: int, align: int) -> float:
    """Ours over the exact optimum's, both against the published setting."""
    pipeline = PipelineCost.even(cost, stages)
    before = simulate(theirs, pipeline, [tokens]).makespan_s
    ours = simulate(BalancedChunks(LiveCosts(stages, pipeline)), pipeline, [tokens]).makespan_s
    best = optimum(cost, tokens, stages - 1, align=align, within=2e-4).seconds
    return float((before - ours) / (before - best))


@pytest.mark.parametrize(
    ("tokens", "align"),
    [
        (131072, 64),
        pytest.param(262144, 64, marks=pytest.mark.slow),
        pytest.param(524288, 128, marks=pytest.mark.slow),
        pytest.param(1048576, 128, marks=pytest.mark.slow),
    ],
)
def test_balanced_reaches_the_optimum_on_qwen(simulate: Any, tokens: int, align: int) -> None:
    cost = StageCost(QWEN.a, QWEN.b, 0.02)
    assert gain(simulate, qwen_policy(), cost, 8, tokens, align) >= 0.95


def test_balanced_reaches_the_optimum_on_kimi(simulate: Any) -> None:
    strict = DynamicChunks(32768, Runtime(KIMI.a, KIMI.b, KIMI.d), smoothing=1, least_share=0)
    for theirs in (FixedChunks(4096), FixedChunks(16384), strict):
        assert gain(simulate, theirs, KIMI, 4, 131072, 64) >= 0.95


@pytest.mark.parametrize(("stages", "published"), [(4, 0.828), (8, 0.769)])
def test_strong_scaling_is_better_than_published(simulate: Any, stages: int, published: float) -> None:
    """Throughput of 16 prompts of 128K tokens on P stages, over P times that on one."""
    whole = StageCost(2.869e-9, 4.62e-5, 0.02)
    alone_s = 16 * (whole.c + whole.chunk_s(0, 131072))
    part = PipelineCost.even(StageCost(whole.a / stages, whole.b / stages, 0.02), stages)
    ours = simulate(BalancedChunks(LiveCosts(stages, part)), part, [131072] * 16, 16)
    assert alone_s / ours.makespan_s / stages > published
    lone = simulate(BalancedChunks(LiveCosts(stages, part)), part, [131072])
    theirs = simulate(qwen_policy(), part, [131072])
    assert lone.makespan_s < 0.95 * theirs.makespan_s
