from __future__ import annotations

import pytest

from pipelined.trace import RankTrace, Span, Trace, Work, parse_work


@pytest.mark.parametrize(
    ("detail", "works"),
    [
        ("", []),
        (0, []),
        (17, [Work("", "", 17)]),
        ("17", [Work("", "", 17)]),
        ("prefill 1024@2048", [Work("", "prefill", 1024, 2048)]),
        ("#7 prefill 1024@0, #3 decode 1@90", [Work("7", "prefill", 1024, 0), Work("3", "decode", 1, 90)]),
        ("prefill 64@0 + decode 3", [Work("", "prefill", 64, 0), Work("", "decode", 3)]),
        ("input 5", [Work("", "input", 5)]),
        ("what? is <this>", []),
    ],
)
def test_parse_work(detail: str | int, works: list[Work]) -> None:
    assert parse_work(detail) == works


def test_work_reads_back() -> None:
    works = [Work("a", "prefill", 8, 0), Work("", "decode", 3), Work("b", "", 1)]
    assert parse_work(", ".join(map(str, works))) == works


def test_ends_are_those_of_the_work_and_ranks_are_sorted() -> None:
    early = Span("schedule", "wait", 0, 9)
    trace = Trace.of(
        [
            RankTrace(1, "b", [Span("device", "forward", 3, 5)]),
            RankTrace(0, "a", [early, Span("device", "forward", 2, 3)]),
        ]
    )
    assert [rank.rank for rank in trace.ranks] == [0, 1]
    assert (trace.started_s, trace.ended_s, trace.wall_s) == (2, 5, 3)
    assert repr(trace) == "<Trace ranks=2 spans=3 wall=3.000s>"
    assert repr(trace.ranks[1]) == "<RankTrace 1 'b' spans=1>"
