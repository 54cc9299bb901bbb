from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelined.trace import BUSY, CAUSES, RankTrace, Span, StageUse, Trace, attribute, segments

TRACKS = [("device", "forward"), ("launch", "wait"), ("schedule", "wait"), ("schedule", "plan"), ("commit", "send")]
TRACKS += [("schedule", "prepare"), ("results", "collect"), ("link", "busy")]


@st.composite
def any_span(draw: Any) -> Span:
    track, name = draw(st.sampled_from(TRACKS))
    start = draw(st.floats(-1, 3, allow_nan=False))
    length = draw(st.floats(0, 2, allow_nan=False) | st.just(0.0))
    detail = draw(st.sampled_from(["", "step", "input", "credit", "window", "no_work", "odd", 7]))
    return Span(track, name, start, start + length, draw(st.integers(-1, 4)), detail)


SPANS = st.lists(any_span(), max_size=25)


@settings(max_examples=200, deadline=None)
@given(st.lists(SPANS, min_size=1, max_size=4), st.floats(0, 1), st.floats(0, 3))
def test_every_nanosecond_has_one_cause(ranks: list[list[Span]], start: float, length: float) -> None:
    trace = Trace([RankTrace(i, "", spans) for i, spans in enumerate(ranks)], start, start + length)
    wall_ns = round((trace.ended_s - trace.started_s) * 1e9)
    for use, pieces in zip(attribute(trace), segments(trace), strict=True):
        cursor = 0
        for piece in pieces:
            assert piece.start_ns == cursor
            assert piece.end_ns > cursor
            assert piece.cause == BUSY or piece.cause in CAUSES
            cursor = piece.end_ns
        assert cursor == wall_ns
        assert use.busy_ns + sum(use.causes_ns.values()) == use.wall_ns == wall_ns
        assert use.busy_ns == covered([s for s in ranks[use.rank] if s.name == "forward"], trace)


def covered(spans: list[Span], trace: Trace) -> int:
    wall_ns = round((trace.ended_s - trace.started_s) * 1e9)
    total = cursor = 0
    for start, end in sorted(
        (round((s.start_s - trace.started_s) * 1e9), round((s.end_s - trace.started_s) * 1e9)) for s in spans
    ):
        start, end = max(start, cursor), min(end, wall_ns)
        if end > start:
            total, cursor = total + end - start, end
    return total


def causes(use: StageUse) -> dict[str, float]:
    return {cause: pytest.approx(seconds, abs=1e-6) for cause, seconds in use.causes.items()}


def test_equal_stages_have_fill_and_drain_alone(model: Any) -> None:
    pipe = model(4)
    for _ in range(10):
        pipe.step([0.01] * 4)
    for use in attribute(pipe.trace()):
        assert use.busy_s == pytest.approx(0.1)
        expected = {"fill": 0.01 * use.rank, "drain": 0.01 * (3 - use.rank)}
        assert causes(use) == {cause: seconds for cause, seconds in expected.items() if seconds}


def test_a_slow_stage_is_input_behind_it(model: Any) -> None:
    pipe = model(3)
    for _ in range(10):
        pipe.step([0.01, 0.03, 0.01])
    uses = attribute(pipe.trace())
    assert uses[0].causes.keys() == {"drain"}
    assert causes(uses[1]) == {"fill": 0.01, "drain": 0.01}
    assert causes(uses[2]) == {"fill": 0.04, "input": 9 * 0.02}


def test_the_window_holds_up_the_stages_before_a_slow_one(model: Any) -> None:
    pipe = model(2, window=2)
    for _ in range(20):
        pipe.step([0.01, 0.03])
    first = attribute(pipe.trace())[0]
    assert first.main_cause == "window"
    assert first.causes["window"] > 0.3


def test_a_slow_link_keeps_its_name_on_all_ranks_behind(model: Any) -> None:
    pipe = model(3, link_s=0.005)
    last = pipe.step([0.01] * 3)
    for _ in range(4):
        last = pipe.step([0.01] * 3, needs=last)
    uses = attribute(pipe.trace())
    assert "link" not in uses[0].causes
    assert uses[1].causes["link"] == pytest.approx(5 * 0.005, abs=1e-6)
    assert uses[2].causes["link"] == pytest.approx(10 * 0.005, abs=1e-6)


def test_one_token_at_a_time_fills_and_drains(model: Any) -> None:
    pipe = model(2, result_s=0.001, plan_s=0.0005)
    last = pipe.step([0.01] * 2)
    for _ in range(9):
        last = pipe.step([0.01] * 2, needs=last)
    first, second = attribute(pipe.trace())
    assert causes(first) == {"drain": 0.1, "scheduler": 9 * 0.0015}
    assert causes(second) == {"fill": 0.1, "scheduler": 9 * 0.0015}


def test_planning_and_launching_have_names(model: Any) -> None:
    pipe = model(2, launch_s=0.001)
    last = pipe.step([0.01] * 2)
    for _ in range(3):
        last = pipe.step([0.01] * 2, needs=last)
    assert attribute(pipe.trace())[0].causes["host"] == pytest.approx(3 * 0.001, abs=1e-6)
    pipe = model(2, plan_s=0.015)
    for _ in range(5):
        pipe.step([0.01] * 2)
    for use in attribute(pipe.trace()):
        assert use.causes["scheduler"] == pytest.approx(4 * 0.005, abs=1e-6)


def test_nothing_asked_for_is_no_work_on_all_ranks(model: Any) -> None:
    pipe = model(3)
    pipe.step([0.01] * 3)
    pipe.step([0.01] * 3, wanted_s=1.0)
    for use in attribute(pipe.trace(started_s=0.0, ended_s=1.5)):
        assert use.main_cause == "no_work"
        assert use.causes["no_work"] == pytest.approx(1.5 - 0.06, abs=1e-6)
        assert use.causes.get("fill", 0) == pytest.approx(2 * 0.01 * use.rank, abs=1e-6)
        assert use.causes.get("drain", 0) == pytest.approx(2 * 0.01 * (2 - use.rank), abs=1e-6)


def test_half_empty_pipeline_is_fill_and_not_a_slow_stage(model: Any) -> None:
    pipe = model(4)
    last = [pipe.step([0.01] * 4), pipe.step([0.01] * 4)]
    for _ in range(10):
        last = [pipe.step([0.01] * 4, needs=before) for before in last]
    for use in attribute(pipe.trace()):
        assert use.busy_share == pytest.approx(0.5, abs=0.03)
        assert use.causes.get("input", 0) < 0.001


def test_blocked_output_is_window() -> None:
    spans = [Span("device", "forward", 0, 1, 0), Span("launch", "wait", 1, 3, 0, "credit")]
    spans += [Span("schedule", "plan", 0, 0.5, 1), Span("device", "forward", 3, 4, 1)]
    assert attribute(Trace.of([RankTrace(0, "", spans)]))[0].causes == {"window": 2.0}


def test_devices_alone_still_add_up() -> None:
    ranks = [RankTrace(r, "", [Span("device", "forward", r + n, r + n + 0.5, n) for n in range(3)]) for r in range(2)]
    uses = attribute(Trace.of(ranks))
    assert [use.busy_s for use in uses] == [1.5, 1.5]


def test_empty_trace() -> None:
    assert attribute(Trace.of([])) == []
    (use,) = attribute(Trace.of([RankTrace(0, "", [])]))
    assert (use.busy_s, use.idle_s, use.main_cause, use.busy_share) == (0, 0, "", 0)


@pytest.mark.slow
def test_two_hundred_thousand_spans_in_seconds(model: Any) -> None:
    pipe = model(8, link_s=1e-4)
    for _ in range(6000):
        pipe.step([0.001] * 8)
    trace = pipe.trace()
    assert sum(len(rank.spans) for rank in trace.ranks) > 190_000
    started = time.perf_counter()
    attribute(trace)
    assert time.perf_counter() - started < 10
