"""Traces as Chrome trace JSON, for chrome://tracing and ui.perfetto.dev, and back.

A process a rank, a thread a coroutine (several where its spans overlap), and an arrow from each output's send to the
forward that used it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import msgspec
from msgspec import Meta

from pipelined.errors import ConfigError
from pipelined.trace.base import Span
from pipelined.trace.timeline import RankTrace, Trace

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["read_chrome", "write_chrome"]

_FORMAT: Final = "pipelined-trace-1"
_TRACKS: Final = ("device", "launch", "schedule", "results", "commit", "link")
_LANES: Final = 100  # thread ids of a track: track number times this, plus a lane for spans that overlap


class _Place(NamedTuple):
    rank: int
    thread: int
    at_us: float


def write_chrome(trace: Trace, path: str | Path) -> None:
    """Write `trace` to `path`. Times are kept to the nanosecond."""
    document = {
        "displayTimeUnit": "ms",
        "otherData": {
            "format": _FORMAT,
            "started_s": trace.started_s,
            "ended_s": trace.ended_s,
            "meta": trace.meta,
            "ranks": [{"rank": r.rank, "label": r.label, "dropped": r.dropped} for r in trace.ranks],
        },
        "traceEvents": list(_events(trace)),
    }
    Path(path).write_bytes(msgspec.json.encode(document))


def read_chrome(path: str | Path) -> Trace:
    """Read what `write_chrome` wrote.

    Raises:
        ConfigError: The file is not such a trace.
        OSError: It can't be read.
    """
    try:
        return _decode(msgspec.json.decode(Path(path).read_bytes(), type=_Document))
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        what = " ".join(str(error).split())
        raise ConfigError(f"{path} is not a trace written by pipelined (expected format {_FORMAT}): {what}") from error


def _events(trace: Trace) -> Iterator[dict[str, Any]]:
    sends: dict[int, list[_Place]] = {}
    arrows = 0
    for rank in trace.ranks:
        yield _name(rank.rank, 0, "process_name", f"rank {rank.rank}: {rank.label}")
        yield {"ph": "M", "pid": rank.rank, "tid": 0, "name": "process_sort_index", "args": {"sort_index": rank.rank}}
        sent_here: dict[int, list[_Place]] = {}
        for track, number in _numbered({span.track for span in rank.spans}).items():
            lanes: list[float] = []
            for span in sorted((s for s in rank.spans if s.track == track), key=lambda s: (s.start_s, -s.end_s)):
                lane = _free_lane(lanes, span)
                thread = number * _LANES + lane
                if lane == len(lanes) - 1 and lanes[lane] == -1.0:
                    yield _name(rank.rank, thread, "thread_name", track if lane == 0 else f"{track} ({lane + 1})")
                lanes[lane] = span.end_s
                start_us = _us(span.start_s - trace.started_s)
                yield _slice(rank.rank, thread, start_us, span, trace.started_s)
                if (span.track, span.name) == ("commit", "send"):
                    sent_here.setdefault(span.step, []).append(_Place(rank.rank, thread, start_us))
                elif (span.track, span.name) == ("device", "forward"):
                    source = _latest(sends.get(span.step, ()), start_us)
                    if source is not None:
                        arrows += 1
                        yield from _arrow(arrows, source, _Place(rank.rank, thread, start_us))
        sends = sent_here


def _slice(rank: int, thread: int, start_us: float, span: Span, origin_s: float) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": rank,
        "tid": thread,
        "ts": start_us,
        "dur": round(_us(span.end_s - origin_s) - start_us, 3),
        "name": span.name,
        "cat": span.track,
        "args": {"step": span.step, "detail": span.detail},
    }


def _arrow(number: int, source: _Place, target: _Place) -> Iterator[dict[str, Any]]:
    common = {"name": "hand-off", "cat": "hand-off", "id": number}
    yield common | {"ph": "s", "pid": source.rank, "tid": source.thread, "ts": source.at_us}
    arrives_us = max(target.at_us, source.at_us)
    yield common | {"ph": "f", "bp": "e", "pid": target.rank, "tid": target.thread, "ts": arrives_us}


def _name(rank: int, thread: int, kind: str, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": rank, "tid": thread, "name": kind, "args": {"name": name}}


def _us(seconds: float) -> float:
    return round(seconds * 1e9) / 1e3


def _numbered(tracks: Iterable[str]) -> dict[str, int]:
    known = [track for track in _TRACKS if track in (found := set(tracks))]
    return {track: number for number, track in enumerate([*known, *sorted(found - set(_TRACKS))], start=1)}


def _free_lane(lanes: list[float], span: Span) -> int:
    # -1.0 marks a lane just opened; a viewer draws slices of one thread wrongly where they overlap without nesting.
    for lane, busy_until_s in enumerate(lanes):
        if busy_until_s <= span.start_s:
            return lane
    if len(lanes) == _LANES:
        return _LANES - 1
    lanes.append(-1.0)
    return len(lanes) - 1


def _latest(sends: Iterable[_Place], before_us: float) -> _Place | None:
    """Of several sends of that step (numbers begin again with each epoch), the last one before the forward."""
    found = None
    for send in sends:
        if found is None or send.at_us <= before_us:
            found = send
    return found


class _Args(msgspec.Struct):
    step: Annotated[int, Meta(ge=-1, lt=2**62)] = -1
    detail: str | Annotated[int, Meta(gt=-(2**62), lt=2**62)] = ""


class _Event(msgspec.Struct):
    ph: str
    pid: int = -1
    name: str = ""
    cat: str = ""
    ts: Annotated[float, Meta(gt=-1e15, lt=1e15)] = 0.0
    dur: Annotated[float, Meta(ge=0, lt=1e15)] = 0.0
    args: _Args = msgspec.field(default_factory=_Args)


class _RankEntry(msgspec.Struct):
    rank: Annotated[int, Meta(ge=0, lt=2**31)]
    label: str
    dropped: Annotated[int, Meta(ge=0, lt=2**62)] = 0


class _Other(msgspec.Struct):
    format: str
    started_s: Annotated[float, Meta(gt=-1e12, lt=1e12)]
    ended_s: Annotated[float, Meta(gt=-1e12, lt=1e12)]
    ranks: list[_RankEntry]
    meta: dict[str, Any] = {}


class _Document(msgspec.Struct):
    other: _Other = msgspec.field(name="otherData")
    events: list[_Event] = msgspec.field(name="traceEvents")


def _decode(document: _Document) -> Trace:
    other = document.other
    if other.format != _FORMAT:
        raise ValueError(f"$.otherData.format is {other.format!r}")
    if other.ended_s < other.started_s:
        raise ValueError(f"$.otherData.ended_s is {other.ended_s}, before its start at {other.started_s}")
    origin_s = other.started_s
    spans: dict[int, list[Span]] = {entry.rank: [] for entry in other.ranks}
    if len(spans) < len(other.ranks):
        raise ValueError("$.otherData.ranks names a rank twice")
    for index, event in enumerate(document.events):
        if event.ph != "X":
            continue
        if event.pid not in spans:
            raise ValueError(f"$.traceEvents[{index}].pid is {event.pid}, a rank that $.otherData.ranks lacks")
        end_s = origin_s + (event.ts + event.dur) / 1e6
        span = Span(event.cat, event.name, origin_s + event.ts / 1e6, end_s, event.args.step, event.args.detail)
        spans[event.pid].append(span)
    ranks = [RankTrace(entry.rank, entry.label, spans[entry.rank], entry.dropped) for entry in other.ranks]
    return Trace(ranks, origin_s, other.ended_s, other.meta)
