from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipelined.costs import makespan
from pipelined.trace import (
    BUSY,
    RankTrace,
    Span,
    Trace,
    critical_path,
    path_text,
    read_chrome,
    segments,
    write_chrome,
    write_timeline,
)

TIMES = st.integers(1, 50).map(lambda ms: ms / 1e3)


def check(trace: Trace) -> None:
    """From end to end without a hole; busy pieces are forwards, and each follows from the one before it."""
    path = critical_path(trace)
    wall_ns = round(trace.wall_s * 1e9)
    assert path.wall_ns == sum(piece.length_ns for piece in path.pieces) == wall_ns
    at = 0
    for piece in path.pieces:
        assert piece.start_ns == at
        assert piece.end_ns > at
        at = piece.end_ns
        if piece.what == BUSY:
            assert any(
                one.cause == BUSY
                and one.step == piece.step
                and one.start_ns <= piece.start_ns
                and piece.end_ns <= one.end_ns
                for one in segments(trace)[piece.rank]
            )
    busy = [piece for piece in path.pieces if piece.what == BUSY]
    for before, after in pairwise(busy):
        same_rank = after.rank == before.rank
        handed_on = after.rank == before.rank + 1 and after.step == before.step
        came_home = after.rank == 0 and before.rank == len(trace.ranks) - 1 and after.step > before.step
        assert same_rank or handed_on or came_home
    runs = path.runs()
    assert sum(run.length_ns for run in runs) == wall_ns == sum(path.parts_ns().values())
    assert all((one.what, one.rank) != (two.what, two.rank) for one, two in pairwise(runs))


@given(
    times=st.integers(1, 5).flatmap(
        lambda p: st.lists(st.lists(TIMES, min_size=p, max_size=p), min_size=1, max_size=8)
    ),
    hop_s=st.sampled_from([0.0, 0.001, 0.03]),
    data=st.data(),
)
def test_a_pipeline_that_waits_for_nothing_else_is_computing_and_links(
    times: list[list[float]], hop_s: float, data: st.DataObject
) -> None:
    finish = makespan(times, hop_s)
    ranks = []
    for rank in range(len(times[0])):
        spans = []
        for step, own in enumerate(times):
            end_s = float(finish[step, rank])
            spans.append(Span("device", "forward", end_s - own[rank], end_s, step))
            if rank:
                arrived_s = float(finish[step, rank - 1]) + hop_s
                spans.append(Span("launch", "wait", 0.0 if not step else arrived_s - hop_s, arrived_s, step, "input"))
            spans.append(Span("commit", "send", end_s, end_s + hop_s, step, 9))
        ranks.append(RankTrace(rank, "", data.draw(st.permutations(spans))))
    trace = Trace.of(ranks, started_s=0.0, ended_s=float(finish[-1, -1]))
    check(trace)
    path = critical_path(trace)
    assert {piece.what for piece in path.pieces} <= {BUSY, "link"}
    busy_ns = sum(piece.length_ns for piece in path.pieces if piece.what == BUSY)
    hops = len(times[0]) - 1
    assert busy_ns == pytest.approx(float(finish[-1, -1]) * 1e9 - hops * hop_s * 1e9, abs=100)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # the fixture is a class
@given(data=st.data())
def test_any_run_is_covered_whatever_held_it_up(model: Callable[..., Any], data: st.DataObject) -> None:
    delay = st.sampled_from([0.0, 0.0003, 0.02])
    stages = data.draw(st.integers(1, 4))
    pipe = model(
        stages,
        link_s=data.draw(delay),
        plan_s=data.draw(delay),
        launch_s=data.draw(delay),
        result_s=data.draw(delay),
        window=data.draw(st.integers(1, 6)),
    )
    for number in range(data.draw(st.integers(1, 10))):
        pipe.step(
            [data.draw(TIMES) for _ in range(stages)],
            wanted_s=data.draw(st.sampled_from([0.0, 0.0, 0.3])),
            needs=data.draw(st.sampled_from([-1, number - 1])),
        )
    check(pipe.trace(started_s=0.0, ended_s=pipe.home_s[-1]))


def test_a_step_that_waits_for_a_result_leads_back_to_the_last_rank(model: Callable[..., Any]) -> None:
    pipe = model(3, result_s=0.004)
    last = -1
    for _ in range(4):
        last = pipe.step([0.01, 0.02, 0.03], needs=last)
    path = critical_path(pipe.trace(started_s=0.0))
    assert [piece.rank for piece in path.pieces if piece.what == BUSY] == [0, 1, 2] * 4
    waits = [piece for piece in path.pieces if piece.what != BUSY]
    assert [piece.length_ns for piece in waits] == [4_000_000] * 3
    assert {piece.what for piece in waits} == {"scheduler"}


def test_a_path_begins_where_its_request_came(model: Callable[..., Any]) -> None:
    pipe = model(2)
    pipe.step([0.5, 0.5])
    pipe.step([0.1, 0.1], wanted_s=5.0)
    first, *rest = critical_path(pipe.trace(started_s=0.0)).pieces
    assert (first.what, first.start_ns, first.end_ns) == ("no_work", 0, 5_000_000_000)
    assert [(piece.what, piece.rank, piece.step) for piece in rest] == [(BUSY, 0, 1), (BUSY, 1, 1)]


def test_the_slowest_rank_holds_the_path(model: Callable[..., Any]) -> None:
    pipe = model(3)
    for _ in range(10):
        pipe.step([0.01, 0.03, 0.01])
    path = critical_path(pipe.trace())
    assert path.parts_ns() == {(BUSY, 1): 300_000_000, (BUSY, 0): 10_000_000, (BUSY, 2): 10_000_000}
    assert [(run.rank, run.steps) for run in path.runs()] == [(0, 1), (1, 10), (2, 1)]
    assert path_text(path) == ("critical path, 0.320 s: computing 100.0 % (rank 1 93.8 %, rank 0 3.1 %, rank 2 3.1 %)")
    assert repr(path) == "<CriticalPath pieces=12 wall=0.320s>"


def test_it_survives_a_file_and_stands_in_the_picture(busy_server: Trace, tmp_path: Path) -> None:
    check(busy_server)
    write_chrome(busy_server, tmp_path / "trace.json")
    again = read_chrome(tmp_path / "trace.json")
    check(again)
    assert critical_path(again).parts_ns().keys() == critical_path(busy_server).parts_ns().keys()
    write_timeline(busy_server, tmp_path / "picture.html")
    assert '"path":[0,' in (tmp_path / "picture.html").read_text()


@pytest.mark.parametrize(
    "spans",
    [
        [],
        [Span("device", "forward", 1.0, 1.0, 0)],
        [Span("device", "forward", 0.0, 2.0, 0), Span("device", "forward", 1.0, 1.5, 0)],
        [Span("device", "forward", 0.5, 0.5, step) for step in (3, 3, 1)],
    ],
)
def test_odd_traces_are_covered_too(spans: list[Span]) -> None:
    trace = Trace.of([RankTrace(0, "", spans), RankTrace(1, "", spans)], started_s=0.0, ended_s=2.0)
    path = critical_path(trace)
    assert path.wall_ns == 2_000_000_000
    assert path_text(path).startswith("critical path")
    assert path_text(critical_path(Trace((), 0.0, 0.0))) == "critical path: nothing happened"
