"""Pieces of time as a page gets them: numbers in flat lists, texts and colours stored once, short pieces merged."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeVar

from pipelined.trace.idle import BUSY, CAUSES, Segment
from pipelined.trace.timeline import Work, parse_work

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pipelined.trace.timeline import Trace

__all__ = ["COLOURS", "MEANING", "Tables", "merged"]

COLOURS: Final = 8

_Key = TypeVar("_Key")

MEANING: Final = {
    "fill": ("fill", "an upstream stage works on the next step, and the pipeline was not full ahead of it"),
    "drain": ("drain", "no next step, and downstream stages still work on the last ones"),
    "input": ("slower stage", "an upstream stage works on the next step, and takes longer than this one did"),
    "link": ("link", "the next input was sent and had not arrived"),
    "scheduler": ("scheduler", "the next step was being planned, sent or prepared, or results were on their way"),
    "window": ("window full", "as many steps in flight as may be, or no free buffer for an output"),
    "host": ("host", "all was there, and the rank's own loop had not launched it yet"),
    "no_work": ("no work", "nobody asked for anything"),
}
"""What each cause is called, and what it means."""


@dataclass
class Tables:
    """Texts and colours, each stored once and referred to by number."""

    by: str
    groups: dict[str, int] = field(default_factory=dict)
    mixes: dict[tuple[tuple[int, int], ...], int] = field(default_factory=dict)
    details: dict[str, int] = field(default_factory=lambda: {"": 0})
    labels: dict[str, int] = field(default_factory=lambda: {"": 0})
    _known: dict[tuple[int, str | int], tuple[int, int, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, trace: Trace) -> Tables:
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
            return max(step, 0) % COLOURS, text, _number(self.labels, str(step) if step >= 0 else "")
        rows: Counter[str] = Counter()
        for work in works:
            rows[work.request if self.by == "request" else work.kind] += max(1, work.tokens)
        group = _number(self.groups, next(iter(rows), "")) if len(rows) < 2 else -1 - self._mix(rows)
        return group, text, _number(self.labels, _label(works))

    def _mix(self, rows: Counter[str]) -> int:
        most = rows.most_common(COLOURS)
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


def merged(pieces: Iterable[Segment], quantum_ns: int, tables: Tables) -> Iterator[list[int]]:
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


def _single(piece: Segment, tables: Tables) -> list[int]:
    length_ns = piece.end_ns - piece.start_ns
    if piece.cause != BUSY:
        return [length_ns, 1_000_000 + CAUSES.index(piece.cause), -1, 0, 0, 1, 0]
    group, detail, label = tables.look(piece.step, piece.detail)
    return [length_ns, group, piece.step, detail, label, 1, 1000]


def _pile(pile: list[Segment], tables: Tables) -> list[int]:
    if len(pile) == 1:
        return _single(pile[0], tables)
    longest = max(pile, key=lambda piece: (piece.cause == BUSY, piece.end_ns - piece.start_ns))
    length_ns = pile[-1].end_ns - pile[0].start_ns
    busy = [piece for piece in pile if piece.cause == BUSY]
    busy_ns = sum(piece.end_ns - piece.start_ns for piece in busy)
    _, code, *_ = _single(longest, tables)
    return [length_ns, code, -1, 0, 0, len(busy) or 1, 1000 * busy_ns // max(1, length_ns)]
