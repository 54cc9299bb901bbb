"""The critical path: which forwards, on which ranks, and which waits between them the whole time consists of. Pure.

Walked backwards from the last forward: it began when its device came free, or when its input had come, whichever was
later; so its time follows that of the forward before it on the same rank, or of the same step on the rank before. On
rank 0 a step may have waited for a result, so that the path goes on at the last rank; or for a request, and there the
path begins. What lies between two forwards is named as the idle time of the rank that waited.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from pipelined.trace.facts import Facts
from pipelined.trace.idle import BUSY, segments

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from pipelined.trace.facts import Forward
    from pipelined.trace.idle import Segment
    from pipelined.trace.timeline import Trace

__all__ = ["CriticalPath", "PathPiece", "critical_path", "path_text"]

_WAITS = ("link", "scheduler", "window", "host", "no_work")


class PathPiece(NamedTuple):
    """A piece of the path. Nanoseconds since the trace's start.

    Attributes:
        start_ns, end_ns: From when to when.
        what: "busy", or what was waited for: "link", "scheduler", "window", "host" or "no_work".
        rank: Whose forward, or who waited; a link is that from the rank before.
        step: Which step, or the first of several put together.
        steps: How many.
    """

    start_ns: int
    end_ns: int
    what: str
    rank: int
    step: int
    steps: int = 1

    @property
    def length_ns(self) -> int:
        """How long it lasted."""
        return self.end_ns - self.start_ns


@dataclass(frozen=True)
class CriticalPath:
    """Pieces without gap or overlap, from the trace's start to its end: they add up to it, to the nanosecond."""

    pieces: tuple[PathPiece, ...]

    def __repr__(self) -> str:
        return f"<CriticalPath pieces={len(self.pieces)} wall={self.wall_ns / 1e9:.3f}s>"

    @property
    def wall_ns(self) -> int:
        """The whole time."""
        return sum(piece.length_ns for piece in self.pieces)

    def runs(self) -> list[PathPiece]:
        """Neighbours of the same kind on the same rank as one."""
        found = []
        for _, group in groupby(self.pieces, key=lambda piece: (piece.what, piece.rank)):
            same = list(group)
            found.append(same[0]._replace(end_ns=same[-1].end_ns, steps=len({piece.step for piece in same})))
        return found

    def parts_ns(self) -> dict[tuple[str, int], int]:
        """Time by (what, rank), the longest first."""
        parts: dict[tuple[str, int], int] = {}
        for piece in self.pieces:
            key = (piece.what, piece.rank)
            parts[key] = parts.get(key, 0) + piece.length_ns
        return dict(sorted(parts.items(), key=lambda part: -part[1]))


def critical_path(trace: Trace) -> CriticalPath:
    """The path through `trace`; of a trace without forwards, one piece of "no_work"."""
    return CriticalPath(tuple(_merged(reversed(_Walk(trace).back()))))


def _merged(pieces: Iterable[PathPiece]) -> Iterator[PathPiece]:
    """Without empty pieces; waits of one kind for one step put together."""
    last: PathPiece | None = None
    for piece in pieces:
        if piece.length_ns <= 0:
            continue
        if last is not None and piece.what != BUSY and piece[2:5] == last[2:5]:
            last = last._replace(end_ns=piece.end_ns)
            continue
        if last is not None:
            yield last
        last = piece
    if last is not None:
        yield last


class _Walk:
    """Goes backwards from forward to forward, and notes the pieces, the latest first."""

    def __init__(self, trace: Trace) -> None:
        self._wall_ns = Facts.wall_ns(trace)
        self._numbers = [rank.rank for rank in trace.ranks]
        self._facts = [Facts.of(trace, rank) for rank in trace.ranks]
        self._segments = segments(trace)
        self._segment_starts = [[piece.start_ns for piece in pieces] for pieces in self._segments]
        self._places = [{forward: i for i, forward in enumerate(facts.forwards)} for facts in self._facts]
        self._ends = sorted((f.end_ns, i) for i, f in enumerate(self._facts[-1].forwards)) if self._facts else []
        self._found: list[PathPiece] = []
        self._at_ns = self._wall_ns

    def back(self) -> list[PathPiece]:
        last = max(
            ((f.end_ns, rank, i) for rank, facts in enumerate(self._facts) for i, f in enumerate(facts.forwards)),
            default=None,
        )
        if last is None:
            self._note(0, "no_work", 0, -1)
            return self._found
        ended_ns, rank, index = last
        self._waits(rank, ended_ns, self._facts[rank].forwards[index].step)
        seen: set[tuple[int, int]] = set()  # a trace from a damaged file may go round in circles
        place: tuple[int, int] | None = (rank, index)
        while place is not None and place not in seen:
            seen.add(place)
            place = self._before(*place)
        self._note(0, "no_work", 0, -1)
        return self._found

    def _note(self, start_ns: int, what: str, rank: int, step: int) -> None:
        """From `start_ns` to where the walk is."""
        start_ns = max(0, min(start_ns, self._at_ns))
        number = self._numbers[rank] if self._numbers else 0
        self._found.append(PathPiece(start_ns, self._at_ns, what, number, step))
        self._at_ns = start_ns

    def _waits(self, rank: int, since_ns: int, step: int) -> None:
        """What that rank waited for since then."""
        for piece in reversed(list(self._between(rank, since_ns, self._at_ns))):
            what = piece.cause if piece.cause in _WAITS else "host" if rank else "scheduler"
            self._note(max(since_ns, piece.start_ns), what, rank, step)

    def _between(self, rank: int, start_ns: int, end_ns: int) -> Iterator[Segment]:
        pieces, starts = self._segments[rank], self._segment_starts[rank]
        for index in range(max(0, bisect_right(starts, start_ns) - 1), len(pieces)):
            if pieces[index].start_ns >= end_ns:
                return
            if pieces[index].end_ns > start_ns:
                yield pieces[index]

    def _before(self, rank: int, index: int) -> tuple[int, int] | None:
        """The forward that this one had to wait for; notes what lies between them, and this one itself."""
        forwards = self._facts[rank].forwards
        forward = forwards[index]
        own = index - 1 if index else None
        free_ns = min(forwards[own].end_ns, forward.end_ns) if own is not None else 0
        self._note(max(forward.start_ns, free_ns), BUSY, rank, forward.step)
        own_place = (rank, own) if own is not None else None
        if self._at_ns <= free_ns:
            return own_place
        if rank:
            return self._before_input(rank, forward, free_ns, own_place)
        return self._before_plan(forward, free_ns, own_place)

    def _before_input(
        self, rank: int, forward: Forward, free_ns: int, own: tuple[int, int] | None
    ) -> tuple[int, int] | None:
        above = self._facts[rank - 1].forward_of(forward.step, forward.start_ns)
        if above is None:
            self._waits(rank, free_ns, forward.step)
            return own
        place = (rank - 1, self._places[rank - 1][above])
        if above.end_ns <= free_ns:
            # It was there in time to be sent: only the way can have held it up.
            links = [p.end_ns for p in self._between(rank, free_ns, self._at_ns) if p.cause == "link"]
            self._waits(rank, links[-1] if links else free_ns, forward.step)
            if not links:
                return own
            self._note(above.end_ns, "link", rank, forward.step)
            return place
        self._waits(rank, min(above.end_ns, self._at_ns), forward.step)
        return place

    def _before_plan(self, forward: Forward, free_ns: int, own: tuple[int, int] | None) -> tuple[int, int] | None:
        planned_ns = min(self._facts[0].planned_ns(forward.step, self._at_ns), self._at_ns)
        result = self._result_before(planned_ns)
        since_ns = max(free_ns, result[0]) if result else free_ns
        asked = [p for p in self._between(0, since_ns, self._at_ns) if p.cause == "no_work"]
        if asked and 2 * sum(p.end_ns - max(p.start_ns, since_ns) for p in asked) > self._at_ns - since_ns:
            self._waits(0, asked[-1].end_ns, forward.step)  # a request came: nothing before it matters
            return None
        self._waits(0, since_ns, forward.step)
        if result and result[0] > free_ns:
            return len(self._facts) - 1, result[1]
        return own

    def _result_before(self, when_ns: int) -> tuple[int, int] | None:
        """(end, index) of the last rank's latest forward that had ended by then, where it is another's than ours."""
        at = bisect_right(self._ends, (when_ns, 1 << 62))
        return self._ends[at - 1] if at and len(self._facts) > 1 else None


def path_text(path: CriticalPath, most: int = 4) -> str:
    """One line: shares of the path by what it was, of the busy part also by rank."""
    wall_ns = path.wall_ns
    if not wall_ns:
        return "critical path: nothing happened"
    names = {BUSY: "computing", "no_work": "no request"}
    sums: dict[str, list[tuple[int, int]]] = {}
    for (what, rank), length_ns in path.parts_ns().items():
        sums.setdefault(what, []).append((length_ns, rank))
    parts = []
    for what, items in sorted(sums.items(), key=lambda item: -sum(part for part, _ in item[1])):
        if 2000 * sum(part for part, _ in items) < wall_ns:
            continue
        text = f"{names.get(what, what)} {_share(sum(part for part, _ in items), wall_ns)}"
        if what in (BUSY, "link") and len(path.parts_ns()) > 1:
            text += f" ({_by_rank(items, what, wall_ns, most)})"
        parts.append(text)
    return f"critical path, {wall_ns / 1e9:.3f} s: {', '.join(parts)}"


def _by_rank(items: Sequence[tuple[int, int]], what: str, wall_ns: int, most: int) -> str:
    def name(rank: int) -> str:
        return f"{rank - 1} to {rank}" if what == "link" else f"rank {rank}"

    first = [item for item in items[:most] if 2000 * item[0] >= wall_ns] or items[:1]
    shown = [f"{name(rank)} {_share(length_ns, wall_ns)}" for length_ns, rank in first]
    rest = sum(length_ns for length_ns, _ in items[len(first) :])
    return ", ".join(shown + ([f"others {_share(rest, wall_ns)}"] if 2000 * rest >= wall_ns else []))


def _share(part_ns: int, wall_ns: int) -> str:
    return f"{100 * part_ns / wall_ns:.1f} %"
