from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from pipelined.trace import BUSY, CAUSES, RankTrace, Span, Trace, attribute, segments, write_timeline

FIELDS = 7


def page_of(trace: Trace, tmp_path: Path, title: str = "t") -> tuple[str, dict[str, Any]]:
    path = tmp_path / "timeline.html"
    write_timeline(trace, path, title=title)
    text = path.read_text(encoding="utf-8")
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert match is not None
    return text, json.loads(match[1])


def items(rank: dict[str, Any]) -> list[list[int]]:
    flat = rank["items"]
    return [flat[i : i + FIELDS] for i in range(0, len(flat), FIELDS)]


def test_shows_every_piece_of_a_small_trace(busy_server: Trace, tmp_path: Path) -> None:
    _, data = page_of(busy_server, tmp_path)
    assert data["merged_s"] == 0
    assert data["by"] == "request"
    assert data["groups"] == ["a", "b", "c"]
    for rank, pieces, use in zip(data["ranks"], segments(busy_server), attribute(busy_server), strict=True):
        assert len(items(rank)) == len(pieces)
        assert (rank["busy_s"], rank["causes"]) == (use.busy_s, use.causes)
        at = 0
        for (length, code, step, detail, *_), piece in zip(items(rank), pieces, strict=True):
            assert abs(at * data["unit_s"] - piece.start_ns / 1e9) <= data["unit_s"]
            at += length
            if piece.cause == BUSY:
                assert (step, data["details"][detail]) == (piece.step, piece.detail)
            else:
                assert code == 1_000_000 + CAUSES.index(piece.cause)
    mixed = [code for code in (item[1] for item in items(data["ranks"][0])) if code < 0]
    assert mixed
    assert data["mixes"][-1 - mixed[0]] == [[0, 500], [1, 500]]


def test_custom_pipelines_have_a_colour_a_micro_batch(model: Any, tmp_path: Path) -> None:
    pipe = model(2)
    for number in range(20):
        pipe.step([0.01] * 2, detail=f"input {number}")
    _, data = page_of(pipe.trace(), tmp_path)
    assert data["by"] == "micro-batch"
    assert {item[1] for item in items(data["ranks"][0]) if item[2] >= 0} == set(range(8))


def test_needs_nothing_else_and_is_well_formed(busy_server: Trace, tmp_path: Path) -> None:
    text, _ = page_of(busy_server, tmp_path)
    assert not re.search(r"""(?:src|href)\s*=|@import|url\(|https?:|fetch\(|XMLHttp|innerHTML|%%""", text)
    open_tags: list[str] = []

    class Checker(HTMLParser):
        def handle_starttag(self, tag: str, attrs: object) -> None:
            if tag not in ("meta", "br"):
                open_tags.append(tag)

        def handle_endtag(self, tag: str) -> None:
            assert open_tags.pop() == tag

    Checker().feed(text)
    assert not open_tags


def test_nothing_of_the_trace_becomes_markup(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script><!-- %%DATA%% & \u2028"
    spans = [Span("device", "forward", 0, 1, 0, evil)]
    trace = Trace.of([RankTrace(0, evil, spans)], meta={evil: evil})
    text, data = page_of(trace, tmp_path, title=evil)
    assert "<script>alert" not in text
    assert text.count("</script>") == 2
    assert (data["title"], data["ranks"][0]["label"], data["details"][1]) == (evil, evil, evil)


def test_a_long_trace_is_thinned_out_and_says_so(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelined.trace.picture._MOST_PIECES", 3000)
    pipe = model(4, link_s=1e-4, launch_s=1e-5)
    last = -1
    for _ in range(800):
        last = pipe.step([0.001] * 4, detail="7", needs=last)
    trace = pipe.trace()
    _, data = page_of(trace, tmp_path)
    assert data["merged_s"] > 0
    assert sum(len(items(rank)) for rank in data["ranks"]) <= 3000
    for rank, use in zip(data["ranks"], attribute(trace), strict=True):
        shown = sum(item[0] * item[6] / 1000 for item in items(rank)) * data["unit_s"]
        assert shown == pytest.approx(use.busy_s, rel=0.02)
        assert sum(item[0] for item in items(rank)) * data["unit_s"] == pytest.approx(trace.wall_s, rel=1e-6)


@pytest.mark.parametrize("ranks", [[], [RankTrace(0, "", [])]])
def test_empty(ranks: list[RankTrace], tmp_path: Path) -> None:
    _, data = page_of(Trace.of(ranks), tmp_path)
    assert len(data["ranks"]) == len(ranks)
