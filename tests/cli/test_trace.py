"""`pipelined trace show`: the books of a recorded run, and one line for a file that is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelined.cli.main import main
from pipelined.errors import ConfigError
from pipelined.trace import RankTrace, Span, Trace, attribute, critical_path, read_chrome, write_chrome, write_timeline


def recorded(path: Path) -> Trace:
    def spans(rank: int) -> list[Span]:
        forwards = [
            Span("device", "forward", 1.0 + s + rank, 2.0 + s + rank, s, f"#a prefill 9@{9 * s}") for s in (0, 1)
        ]
        return [*forwards, Span("schedule", "plan", 1.0, 1.0, 0)]

    trace = Trace.of([RankTrace(rank, f"layers {rank}", spans(rank)) for rank in range(2)])
    write_chrome(trace, path)
    return trace


@pytest.fixture
def file(tmp_path: Path) -> Path:
    recorded(tmp_path / "trace.json")
    return tmp_path / "trace.json"


def test_table_json_and_picture(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "show", str(file), "--timeline", str(tmp_path / "t.html")]) == 0
    out = capsys.readouterr().out
    assert "idle because of" in out
    assert "critical path, 3.000 s: computing 100.0 %" in out
    assert "<canvas" in (tmp_path / "t.html").read_text()
    assert main(["trace", "show", str(file), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert sum(sum(row["critical_ns"].values()) for row in rows) == 3_000_000_000
    assert [row["busy_s"] for row in rows] == [2.0, 2.0]


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ('"dur":1000000.0', '"dur":-1', "$.traceEvents[3].dur"),
        ('"dur":1000000.0', '"dur":1e300', "$.traceEvents[3].dur"),
        ('"pid":1', '"pid":7', "is 7, a rank that $.otherData.ranks lacks"),
        ('"rank":1', '"rank":0', "$.otherData.ranks names a rank twice"),
        ('"ended_s":4.0', '"ended_s":0.5', "$.otherData.ended_s is 0.5, before its start at 1.0"),
        ('"step":1', '"step":"x"', "$.traceEvents[4].args.step"),
    ],
)
def test_what_is_wrong_with_a_trace_is_said_with_its_place(
    before: str, after: str, said: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = file.read_text()
    assert before in text
    file.write_text(text.replace(before, after))
    assert main(["trace", "show", str(file)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"[" * 100_000, b"{}", b'{"otherData": {}, "traceEvents": []}'])
def test_a_file_that_is_no_trace(content: bytes, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_bytes(content)
    assert main(["trace", "show", str(file)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@given(data=st.data())
def test_a_damaged_trace_is_shown_or_refused(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    recorded(path)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.sampled_from(b'0123456789"{}[],:-e.'))
    path.write_bytes(bytes(content))
    said = ""
    try:
        trace = read_chrome(path)
    except ConfigError as error:
        said = str(error)
    assert "\n" not in said
    if said:
        return
    wall_ns = round(trace.wall_s * 1e9)
    assert critical_path(trace).wall_ns == wall_ns
    assert all(use.busy_ns + use.idle_ns == wall_ns for use in attribute(trace))
    write_timeline(trace, path.with_suffix(".html"))
