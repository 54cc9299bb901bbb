"""The timeline as one HTML file that needs nothing else: what each stage did when, and why it was idle.

Everything that depends on the trace is handed to the page as JSON; the page's script puts it in place as text, never
as markup.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from pipelined.trace.critical import critical_path
from pipelined.trace.idle import BUSY, CAUSES, Segment, attribute, segments
from pipelined.trace.timeline import Work, parse_work

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pipelined.trace.idle import StageUse
    from pipelined.trace.timeline import Trace

__all__ = ["write_timeline"]

_MOST_PIECES: Final = 60_000
_COLOURS: Final = 8
_MOST_PATH: Final = 20_000

_Key = TypeVar("_Key")

_MEANING: Final = {
    "fill": ("fill", "an upstream stage works on the next step, and the pipeline was not full ahead of it"),
    "drain": ("drain", "no next step, and downstream stages still work on the last ones"),
    "input": ("slower stage", "an upstream stage works on the next step, and takes longer than this one did"),
    "link": ("link", "the next input was sent and had not arrived"),
    "scheduler": ("scheduler", "the next step was being planned, sent or prepared, or results were on their way"),
    "window": ("window full", "as many steps in flight as may be, or no free buffer for an output"),
    "host": ("host", "all was there, and the rank's own loop had not launched it yet"),
    "no_work": ("no work", "nobody asked for anything"),
}


def write_timeline(trace: Trace, path: str | Path, *, title: str = "Pipeline timeline") -> None:
    """Write a self-contained page that shows `trace`.

    Args:
        trace: What to show; its `meta` stands under the title.
        path: Of the HTML file.
        title: Headline.
    """
    from importlib.resources import files

    page = files("pipelined.trace").joinpath("page")
    parts = {name: page.joinpath(name).read_text(encoding="utf-8") for name in ("page.html", "page.css", "page.js")}
    data = msgspec.json.encode(_data(trace, title)).decode()
    # In JSON these can only stand inside strings; escaped, nothing can end the script element early.
    data = data.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
    values = {"TITLE": escape(title), "STYLE": parts["page.css"], "DATA": data, "SCRIPT": parts["page.js"]}
    pieces = parts["page.html"].split("%%")  # markers at odd places, so that no value is searched for markers
    text = "".join(values[piece] if index % 2 else piece for index, piece in enumerate(pieces))
    Path(path).write_text(text, encoding="utf-8")


def _data(trace: Trace, title: str) -> dict[str, Any]:
    pieces = segments(trace)
    uses = attribute(trace)
    wall_ns = uses[0].wall_ns if uses else 0
    unit_ns = max(1, wall_ns // 50_000_000)
    tables = _Tables.of(trace)
    count = sum(len(rank) for rank in pieces)
    quantum_ns = 0 if count <= _MOST_PIECES else wall_ns * len(pieces) // (_MOST_PIECES // 2) or 1
    ranks = [
        _rank(use, list(_merged(rank, quantum_ns, tables)), unit_ns) for use, rank in zip(uses, pieces, strict=True)
    ]
    return {
        "title": title,
        "meta": [[str(key), str(value)] for key, value in trace.meta.items()],
        "unit_s": unit_ns / 1e9,
        "wall_s": wall_ns / 1e9,
        "merged_s": quantum_ns / 1e9,
        "dropped": sum(rank.dropped for rank in trace.ranks),
        "steps": len({piece.step for rank in pieces for piece in rank if piece.cause == BUSY}),
        "causes": [[cause, *_MEANING[cause]] for cause in CAUSES],
        "by": tables.by,
        "groups": list(tables.groups),
        "mixes": list(tables.mixes),
        "details": list(tables.details),
        "labels": list(tables.labels),
        "ranks": ranks,
        "path": _path(trace, unit_ns),
    }


def _path(trace: Trace, unit_ns: int) -> list[int]:
    """The critical path for the page: [row, from, to, busy or not] of each run, in units; of many, the longest."""
    runs = critical_path(trace).runs()
    if len(runs) > _MOST_PATH:
        least_ns = sorted(run.length_ns for run in runs)[-_MOST_PATH]
        runs = [run for run in runs if run.length_ns >= least_ns][:_MOST_PATH]
    rows = {rank.rank: row for row, rank in enumerate(trace.ranks)}
    flat: list[int] = []
    for run in runs:
        flat += [rows.get(run.rank, 0), run.start_ns // unit_ns, run.end_ns // unit_ns, int(run.what == BUSY)]
    return flat


def _rank(use: StageUse, items: list[list[int]], unit_ns: int) -> dict[str, Any]:
    # Pieces lie back to back: each is stored by its length alone, rounded so that errors don't add up.
    ended_ns = written = 0
    flat: list[int] = []
    for length_ns, *rest in items:
        ended_ns += length_ns
        length = round(ended_ns / unit_ns) - written
        written += length
        flat += [length, *rest]
    return {"rank": use.rank, "label": use.label, "busy_s": use.busy_s, "causes": use.causes, "items": flat}


@dataclass
class _Tables:
    """Texts and colours, each stored once and referred to by number."""

    by: str
    groups: dict[str, int] = field(default_factory=dict)
    mixes: dict[tuple[tuple[int, int], ...], int] = field(default_factory=dict)
    details: dict[str, int] = field(default_factory=lambda: {"": 0})
    labels: dict[str, int] = field(default_factory=lambda: {"": 0})
    _known: dict[tuple[int, str | int], tuple[int, int, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, trace: Trace) -> _Tables:
        """What the colours stand for depends on what the forwards tell: requests, kinds, or nothing."""
        by = "micro-batch"
        for rank in trace.ranks[:1]:
            for span in rank.spans:
                if span.track == "device":
                    works = parse_work(span.detail)
                    if any(work.request for work in works):
                        return cls("request")
                    if any(work.kind in ("prefill", "decode") for work in works):
                        by = "kind"
        return cls(by)

    def look(self, step: int, detail: str | int) -> tuple[int, int, int]:
        """(colour group or -1 - mix, detail, label) of a forward."""
        key = (step if self.by == "micro-batch" else -1, detail)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._new(step, detail)
        return found

    def _new(self, step: int, detail: str | int) -> tuple[int, int, int]:
        works = parse_work(detail)
        text = _number(self.details, str(detail))
        if self.by == "micro-batch":
            return max(step, 0) % _COLOURS, text, _number(self.labels, str(step) if step >= 0 else "")
        rows: Counter[str] = Counter()
        for work in works:
            rows[work.request if self.by == "request" else work.kind] += max(1, work.tokens)
        group = _number(self.groups, next(iter(rows), "")) if len(rows) < 2 else -1 - self._mix(rows)
        return group, text, _number(self.labels, _label(works))

    def _mix(self, rows: Counter[str]) -> int:
        most = rows.most_common(_COLOURS)
        total = sum(count for _, count in most)
        # A decode of one token beside a chunk of a thousand still gets a visible stripe.
        shares = [(_number(self.groups, name), max(60, 1000 * count // total)) for name, count in most]
        return _number(self.mixes, tuple(shares))


def _number(table: dict[_Key, int], key: _Key) -> int:
    return table.setdefault(key, len(table))


def _label(works: Iterable[Work]) -> str:
    works = list(works)
    if len(works) == 1 and works[0].prefix >= 0 and works[0].tokens > 1:
        return f"{works[0].tokens}\n@{works[0].prefix}"
    total = sum(work.tokens for work in works)
    return str(total) if total else ""


def _merged(pieces: Iterable[Segment], quantum_ns: int, tables: _Tables) -> Iterator[list[int]]:
    """Pieces for the page: [length, colour group or cause, step, detail, label, how many, busy per mille].

    A cause is 1,000,000 plus its number. Pieces shorter than `quantum_ns` are put together with their neighbours until
    they are that long; such a piece shows what filled most of it.
    """
    pile: list[Segment] = []
    piled_ns = 0
    for piece in pieces:
        length_ns = piece.end_ns - piece.start_ns
        if length_ns >= quantum_ns:
            if pile:
                yield _pile(pile, tables)
                pile, piled_ns = [], 0
            yield _single(piece, tables)
            continue
        pile.append(piece)
        piled_ns += length_ns
        if piled_ns >= quantum_ns:
            yield _pile(pile, tables)
            pile, piled_ns = [], 0
    if pile:
        yield _pile(pile, tables)


def _single(piece: Segment, tables: _Tables) -> list[int]:
    length_ns = piece.end_ns - piece.start_ns
    if piece.cause != BUSY:
        return [length_ns, 1_000_000 + CAUSES.index(piece.cause), -1, 0, 0, 1, 0]
    group, detail, label = tables.look(piece.step, piece.detail)
    return [length_ns, group, piece.step, detail, label, 1, 1000]


def _pile(pile: list[Segment], tables: _Tables) -> list[int]:
    if len(pile) == 1:
        return _single(pile[0], tables)
    longest = max(pile, key=lambda piece: (piece.cause == BUSY, piece.end_ns - piece.start_ns))
    length_ns = pile[-1].end_ns - pile[0].start_ns
    busy = [piece for piece in pile if piece.cause == BUSY]
    busy_ns = sum(piece.end_ns - piece.start_ns for piece in busy)
    _, code, *_ = _single(longest, tables)
    return [length_ns, code, -1, 0, 0, len(busy) or 1, 1000 * busy_ns // max(1, length_ns)]
