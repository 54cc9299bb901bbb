from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelined.costs import MicroBatch, PipelineCost, StageCost, Window
from pipelined.errors import ConfigError

coefficients = st.floats(1e-9, 1e-2) | st.just(0.0)
windows = st.lists(st.builds(Window, st.integers(1, 5000), coefficients, coefficients), max_size=2).map(tuple)
costs = st.builds(StageCost, coefficients, st.floats(1e-6, 1e-2), coefficients, coefficients, windows)
prefixes, sizes = st.integers(0, 200_000), st.integers(1, 200_000)


def by_hand(cost: StageCost, prefix: int, tokens: int) -> float:
    """Token by token."""
    ends = prefix + np.arange(tokens) + 0.5
    seconds = cost.d * prefix + cost.b * tokens + 2 * cost.a * ends.sum()
    for window in cost.windows:
        seconds += window.d * min(prefix, window.tokens) + 2 * window.a * np.minimum(ends, window.tokens).sum()
    return float(seconds)


@given(costs, st.integers(0, 3000), st.integers(1, 3000))
def test_a_chunk_costs_what_its_tokens_cost(cost: StageCost, prefix: int, tokens: int) -> None:
    # whole tokens meet the edge of a window half a token early or late
    slack = sum(2 * window.a for window in cost.windows)
    assert cost.chunk_s(prefix, tokens) == pytest.approx(by_hand(cost, prefix, tokens), rel=1e-9, abs=slack + 1e-15)


@given(costs, prefixes, sizes)
def test_sizes_invert_times(cost: StageCost, prefix: int, tokens: int) -> None:
    assert cost.tokens_within(prefix, cost.chunk_s(prefix, tokens)) == pytest.approx(tokens, rel=1e-5)


@given(costs, prefixes, sizes)
def test_many_are_as_one(cost: StageCost, prefix: int, tokens: int) -> None:
    at, x = np.array([float(prefix)]), np.array([float(tokens)])
    assert cost.chunks_s(at, x)[0] == pytest.approx(cost.chunk_s(prefix, tokens), rel=1e-9)
    assert cost.many_within(at, cost.chunks_s(at, x))[0] == pytest.approx(tokens, rel=1e-5)


@given(costs, prefixes, sizes, sizes)
def test_time_grows_with_tokens_and_prefix(cost: StageCost, prefix: int, tokens: int, more: int) -> None:
    assert cost.chunk_s(prefix, tokens + more) > cost.chunk_s(prefix, tokens)
    assert cost.chunk_s(prefix + more, tokens) >= cost.chunk_s(prefix, tokens) * (1 - 1e-12)


@given(costs, prefixes, sizes, sizes)
def test_cutting_a_chunk_adds_a_launch_and_a_look_at_the_prefix(
    c: StageCost, prefix: int, head: int, tail: int
) -> None:
    whole = c.launch_s(MicroBatch(((prefix, head + tail),)))
    parts = c.launch_s(MicroBatch(((prefix, head),))) + c.launch_s(MicroBatch(((prefix + head, tail),)))
    looks = c.d * (prefix + head) + sum(w.d * min(prefix + head, w.tokens) for w in c.windows)
    assert parts == pytest.approx(whole + c.c + looks, rel=1e-9)


def test_a_window_saturates() -> None:
    cost = StageCost(0, 1e-6, 0, 0, (Window(1000, a=1e-8, d=1e-8),))
    assert cost.chunk_s(1000, 64) == cost.chunk_s(100_000, 64)
    assert cost.chunk_s(500, 64) < cost.chunk_s(1000, 64)


def test_what_takes_no_time_has_no_bound() -> None:
    assert StageCost(0, 0, 1).tokens_within(5, 1) == float("inf")
    assert StageCost(0, 0, 1, 0, (Window(10, 1e-3),)).tokens_within(5, 1) < 1000
    assert StageCost(0, 1, 1, 1).tokens_within(5, 4) == 0


def test_decodes() -> None:
    cost = StageCost(a=1e-6, b=1e-3, c=0.1, d=1e-5)
    alone = cost.launch_s(MicroBatch(decodes=2, context_tokens=3000))
    assert alone == pytest.approx(cost.launch_s(MicroBatch(((1000, 1), (2000, 1)))))
    assert StageCost(0, 1, 5, per_decode=2, per_context=0.5).launch_s(MicroBatch((), 2, 10)) == 5 + 4 + 5
    assert cost.decode_s(0, 0) == 0


def test_a_pipeline_is_as_slow_as_its_slowest_stage() -> None:
    fast, slow = StageCost(0, 1, 1), StageCost(0, 2, 0)
    pipeline = PipelineCost((fast, slow, fast))
    work = MicroBatch(((0, 10),))
    assert pipeline.times_s(work) == (11, 20, 11)
    assert pipeline.launch_s(work) == 20
    assert pipeline.tokens_within(0, 20) == 10
    assert pipeline.fill([work]) == pytest.approx(22 / 20)
    assert PipelineCost.even(fast, 4).fill([work]) == pytest.approx(3)
    assert len(PipelineCost.even(fast, 4).distinct) == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: StageCost(-1, 0, 0), r"a=-1 is out of range; expected 0 or more"),
        (lambda: StageCost(0, float("nan"), 0), r"b=nan"),
        (lambda: StageCost(0, 0, 0, 0, (Window(0),)), r"windows\[0\].tokens=0"),
        (lambda: StageCost(0, 0, 0, 0, (Window(5, -1.0),)), r"windows\[0\].a=-1"),
        (lambda: PipelineCost(()), "one stage or more"),
    ],
)
def test_nonsense_is_refused(make: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()  # type: ignore[operator]
