from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelined.errors import ConfigError
from pipelined.trace import RankTrace, Span, Trace, read_chrome, write_chrome

spans = st.builds(
    lambda track, name, start, length, step, detail: Span(track, name, start, start + length, step, detail),
    st.sampled_from(["device", "commit", "launch", "of my own <&>"]),
    st.sampled_from(["forward", "send", "wait"]),
    st.integers(0, 10**9).map(lambda ns: 5000 + ns / 1e9),
    st.integers(0, 10**8).map(lambda ns: ns / 1e9),
    st.integers(-1, 5),
    st.text(max_size=5) | st.integers(0, 2**40),
)


def rounded(trace: Trace) -> list[list[tuple[object, ...]]]:
    """Spans of each rank in a fixed order, with times in nanoseconds."""
    return [
        sorted((s.track, s.name, round(s.start_s * 1e9), round(s.end_s * 1e9), s.step, str(s.detail)) for s in r.spans)
        for r in trace.ranks
    ]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(spans, max_size=12), max_size=3))
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, ranks: list[list[Span]]) -> None:
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    trace = Trace.of([RankTrace(i, f"l{i}", s, dropped=i) for i, s in enumerate(ranks)], meta={"model": "m", "pp": 2})
    write_chrome(trace, path)
    back = read_chrome(path)
    assert (back.started_s, back.ended_s, back.meta) == (trace.started_s, trace.ended_s, trace.meta)
    assert [(r.rank, r.label, r.dropped) for r in back.ranks] == [(r.rank, r.label, r.dropped) for r in trace.ranks]
    for mine, theirs in zip(rounded(back), rounded(trace), strict=True):
        assert len(mine) == len(theirs)
        for one, other in zip(mine, theirs, strict=True):
            assert (one[0], one[1], one[4], one[5]) == (other[0], other[1], other[4], other[5])
            assert abs(one[2] - other[2]) <= 2  # float64 holds seconds since boot to about a nanosecond
            assert abs(one[3] - other[3]) <= 2


def test_arrows_join_each_send_to_the_forward_that_used_it(busy_server: Trace, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_chrome(busy_server, path)
    events = json.loads(path.read_text())["traceEvents"]
    steps = {e["args"]["step"] for e in events if e["ph"] == "X" and e["name"] == "forward"}
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert len(starts) == len(steps) * 3

    def slice_at(event: dict[str, object]) -> dict[str, object]:
        place = ("pid", "tid", "ts")
        (found,) = [
            e for e in events if e["ph"] == "X" and all(e[k] == event[k] for k in place) and e["name"] != "wait"
        ]
        return found

    for number, start in list(starts.items())[::7]:
        sent, used = slice_at(start), slice_at(ends[number])
        assert (sent["name"], used["name"]) == ("send", "forward")
        assert used["pid"] == sent["pid"] + 1  # type: ignore[operator]
        assert sent["args"]["step"] == used["args"]["step"]  # type: ignore[index]


def test_slices_of_a_thread_never_overlap(tmp_path: Path) -> None:
    sends = [Span("commit", "send", 0.1 * n, 0.1 * n + 0.35, n) for n in range(8)]
    path = tmp_path / "trace.json"
    write_chrome(Trace.of([RankTrace(0, "a", sends)]), path)
    events = json.loads(path.read_text())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert set(names.values()) == {"commit", "commit (2)", "commit (3)", "commit (4)"}
    for thread in names:
        ends = 0.0
        for event in sorted((e for e in events if e["ph"] == "X" and e["tid"] == thread), key=lambda e: e["ts"]):
            assert event["ts"] >= ends - 1e-3
            ends = event["ts"] + event["dur"]


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"otherData": {"format": "x"}}', "not json", '{"otherData": 3}'])
def test_what_is_not_ours_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="not a trace written by pipelined"):
        read_chrome(path)
