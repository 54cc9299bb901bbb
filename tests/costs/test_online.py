from __future__ import annotations

import numpy as np
import pytest

from pipelined.costs import LiveCosts, MicroBatch, OnlineFit, PipelineCost, StageCost

TRUE = StageCost(a=2e-9, b=3e-5, c=0.012, d=1e-8)


def prefill(
    cost: StageCost, chunk: int, total: int, noise: float = 0.0, seed: int = 0
) -> list[tuple[MicroBatch, float]]:
    rng = np.random.default_rng(seed)
    works = [MicroBatch(((start, chunk),)) for start in range(0, total, chunk)]
    return [(work, cost.launch_s(work) * float(np.exp(rng.normal(0, noise)))) for work in works]


def test_it_is_usable_from_the_first_sample_on() -> None:
    online = OnlineFit()
    assert online.cost is None
    assert online.predict_s(MicroBatch(((0, 512),))) is None
    online.observe(MicroBatch(((0, 512),)), 0.02)
    assert online.predict_s(MicroBatch(((0, 512),))) == pytest.approx(0.02, rel=0.05)
    twice = online.predict_s(MicroBatch(((0, 1024),)))
    assert twice is not None
    assert 0.02 < twice < 0.05


def test_it_learns_and_predicts_what_comes_next() -> None:
    online = OnlineFit()
    for work, seconds in prefill(TRUE, 512, 16384, 0.02):
        online.observe(work, seconds)
    far = MicroBatch(((24576, 512),))
    assert online.predict_s(far) == pytest.approx(TRUE.launch_s(far), rel=0.08)
    assert online.error is not None
    assert online.error < 0.06
    for work, seconds in prefill(TRUE, 2048, 16384, 0.02, 1):
        online.observe(work, seconds)
    other = MicroBatch(((8192, 1024),))
    assert online.predict_s(other) == pytest.approx(TRUE.launch_s(other), rel=0.04)


def test_a_slow_first_sample_is_forgotten_at_once() -> None:
    online = OnlineFit()
    points = prefill(TRUE, 512, 8192)
    online.observe(points[0][0], 30 * points[0][1])
    for work, seconds in points[1:6]:
        online.observe(work, seconds)
    assert online.predict_s(points[6][0]) == pytest.approx(points[6][1], rel=0.1)
    far = MicroBatch(((16384, 512),))
    assert online.predict_s(far) == pytest.approx(TRUE.launch_s(far), rel=0.6)  # not 30 times


def test_accidents_do_not_count_but_changes_do() -> None:
    online = OnlineFit(memory=50)
    points = prefill(TRUE, 512, 32768)
    for work, seconds in points:
        online.observe(work, seconds)
    work, seconds = points[-1]
    online.observe(work, 100 * seconds)
    online.observe(work, seconds / 1000)
    online.observe(work, 0.0)
    online.observe(work, float("nan"))
    assert online.predict_s(work) == pytest.approx(seconds, rel=0.02)
    for work, seconds in points * 3:  # the machine became six times slower
        online.observe(work, 6 * seconds)
    assert online.predict_s(work) == pytest.approx(6 * seconds, rel=0.1)


def test_a_profile_is_believed_until_times_say_otherwise() -> None:
    online = OnlineFit(TRUE)
    assert online.cost == TRUE
    slower = StageCost(2 * TRUE.a, 2 * TRUE.b, 2 * TRUE.c, 2 * TRUE.d)
    for work, seconds in prefill(slower, 1024, 16384):
        online.observe(work, seconds)
    far = MicroBatch(((20480, 1024),))
    assert online.predict_s(far) == pytest.approx(slower.launch_s(far), rel=0.1)


def test_a_pipeline_learns_stage_by_stage() -> None:
    live = LiveCosts(2)
    assert not live.known
    shape = live.cost.tokens_within(0, 1000)
    assert shape > 64
    live.observe(1, MicroBatch(((0, 512),)), 0.04)
    assert live.known
    assert live.version == 1
    assert live.cost.times_s(MicroBatch(((0, 512),)))[0] == pytest.approx(0.04, rel=0.05)
    live.observe(0, MicroBatch(((0, 512),)), 0.02)
    times = live.cost.times_s(MicroBatch(((0, 512),)))
    assert times == pytest.approx((0.02, 0.04), rel=0.05)
    live.observe(7, MicroBatch(((0, 512),)), 0.02)
    assert live.version == 2
    assert LiveCosts(2, PipelineCost.even(TRUE, 2)).cost.stages == (TRUE, TRUE)


def test_decodes_are_learnt() -> None:
    cost = StageCost(2e-9, 3e-5, 0.012, 0.0, per_decode=5e-4, per_context=2e-8)
    live = LiveCosts(1)
    for n in (1, 2, 4, 8) * 5:
        for work in (MicroBatch((), n, 3000 * n), MicroBatch(((1024 * n, 512),), n, 1000 * n), MicroBatch(((0, 256),))):
            live.observe(0, work, cost.launch_s(work))
    work = MicroBatch(((2048, 512),), 6, 12_000)
    assert live.cost.launch_s(work) == pytest.approx(cost.launch_s(work), rel=0.05)
