"""Why a stage was idle: every nanosecond of every device gets exactly one cause. Pure, from spans alone.

A device that idles before step n waits for whatever holds up step n at that moment. For rank 0 that is the plan. For
the others it is the rank before, as long as that one has not computed step n: if it computes, it is waited for
("input", or "fill" if the pipeline was not full); if it is idle itself, its cause is passed on. So a late plan, or a
slow link, keeps its name on all ranks behind it.

=========  ==========================================================================================================
fill       an upstream stage works on step n, and the pipeline was not full ahead of it
drain      there is no next step, and downstream stages still work on the last ones
input      an upstream stage works on step n, and takes longer than this one did
link       step n has been sent to this rank (or to one before it) and has not arrived
scheduler  a step is being planned, is on its way or being prepared; or results are on their way to the planner
window     as many steps are in flight as may be, or an output finds no free buffer
host       all is there, and the rank's own loop has not launched it yet (or not sent it yet)
no_work    nobody asked for anything
=========  ==========================================================================================================
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from pipelined.trace.facts import NEVER, Facts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pipelined.trace.facts import Forward
    from pipelined.trace.timeline import Trace

__all__ = ["BUSY", "CAUSES", "Segment", "StageUse", "attribute", "segments"]

BUSY: Final = "busy"
CAUSES: Final = ("fill", "drain", "input", "link", "scheduler", "window", "host", "no_work")


class Segment(NamedTuple):
    """A piece of a device's time: "busy" with a step, or idle for one of `CAUSES`. Nanoseconds since the start."""

    start_ns: int
    end_ns: int
    cause: str
    step: int = -1
    detail: str | int = ""


@dataclass(frozen=True)
class StageUse:
    """How one stage spent the time of a trace. In whole nanoseconds, so that the sums are exact."""

    rank: int
    label: str
    wall_ns: int
    causes_ns: dict[str, int] = field(default_factory=dict)

    @property
    def idle_ns(self) -> int:
        """Time without work on the device."""
        return sum(self.causes_ns.values())

    @property
    def busy_ns(self) -> int:
        """Time with work on the device."""
        return self.wall_ns - self.idle_ns

    @property
    def busy_s(self) -> float:
        """Seconds with work on the device."""
        return self.busy_ns / 1e9

    @property
    def idle_s(self) -> float:
        """Seconds without."""
        return self.idle_ns / 1e9

    @property
    def wall_s(self) -> float:
        """Seconds of the whole trace."""
        return self.wall_ns / 1e9

    @property
    def causes(self) -> dict[str, float]:
        """Idle seconds by cause, in the order of `CAUSES`, without those that did not occur."""
        return {cause: self.causes_ns[cause] / 1e9 for cause in CAUSES if self.causes_ns.get(cause)}

    @property
    def busy_share(self) -> float:
        """Busy part of the whole, 0 to 1."""
        return self.busy_ns / self.wall_ns if self.wall_ns else 0.0

    @property
    def main_cause(self) -> str:
        """What made it idle for longest; "" if it never was."""
        return max(self.causes_ns, key=lambda cause: self.causes_ns[cause], default="") if self.idle_ns else ""


def attribute(trace: Trace) -> list[StageUse]:
    """Busy time, idle time and its causes, for each rank; busy plus causes is the wall time, to the nanosecond."""
    wall_ns = Facts.wall_ns(trace)
    uses = []
    for rank, pieces in zip(trace.ranks, segments(trace), strict=True):
        causes: dict[str, int] = {}
        for piece in pieces:
            if piece.cause != BUSY:
                causes[piece.cause] = causes.get(piece.cause, 0) + piece.end_ns - piece.start_ns
        uses.append(StageUse(rank.rank, rank.label, wall_ns, causes))
    return uses


def segments(trace: Trace) -> list[list[Segment]]:
    """Each rank's time, cut into busy and idle pieces without gap or overlap, from the trace's start to its end."""
    facts = [Facts.of(trace, rank) for rank in trace.ranks]
    found: list[list[Segment]] = []
    bubbles: dict[int, list[tuple[str, int]]] = {}
    for index in range(len(facts)):
        found.append(_Rank(facts, index, found[-1] if found else [], bubbles).cut(Facts.wall_ns(trace)))
    return found


class _Pen:
    """Writes pieces from `cursor_ns` towards `end_ns`, never back."""

    def __init__(self, start_ns: int, end_ns: int) -> None:
        self.cursor_ns = start_ns
        self.end_ns = end_ns
        self.pieces: list[Segment] = []

    def until(self, when_ns: int, cause: str) -> None:
        when_ns = min(when_ns, self.end_ns)
        if when_ns <= self.cursor_ns:
            return
        if self.pieces and self.pieces[-1].cause == cause:
            self.pieces[-1] = Segment(self.pieces[-1].start_ns, when_ns, cause)
        else:
            self.pieces.append(Segment(self.cursor_ns, when_ns, cause))
        self.cursor_ns = when_ns


class _Rank:
    """Cuts one rank's time, given the pieces of the rank before."""

    def __init__(
        self, facts: Sequence[Facts], index: int, upstream: list[Segment], bubbles: dict[int, list[tuple[str, int]]]
    ) -> None:
        self._all = facts
        self._index = index
        self._me = facts[index]
        self._upstream = upstream
        self._upstream_starts = [piece.start_ns for piece in upstream]
        self._bubbles = bubbles  # how long rank 0 idled ahead of each step: [(cause for the ranks behind it, length)]
        self._below = facts[index + 1 :]

    def cut(self, wall_ns: int) -> list[Segment]:
        pieces: list[Segment] = []
        cursor_ns, last = 0, None
        for forward in self._me.forwards:
            if forward.start_ns > cursor_ns:
                pieces += self._gap(cursor_ns, forward.start_ns, last, forward)
                cursor_ns = forward.start_ns
            if forward.end_ns > cursor_ns:
                pieces.append(Segment(cursor_ns, forward.end_ns, BUSY, forward.step, forward.detail))
                cursor_ns = forward.end_ns
            last = forward
        if cursor_ns < wall_ns:
            pieces += self._gap(cursor_ns, wall_ns, last, None)
        return pieces

    def _gap(self, start_ns: int, end_ns: int, last: Forward | None, following: Forward | None) -> list[Segment]:
        pen = _Pen(start_ns, end_ns)
        done_ns = max((rank.done_by(last.step, start_ns) for rank in self._below), default=0) if last else 0
        if self._index == 0:
            self._unplanned(pen, done_ns, following)
            if following is not None:
                self._bubbles[following.step] = _bubble(pen.pieces) if done_ns > end_ns else [("fill", NEVER)]
                self._launched(pen, following.step)
        elif following is None:
            pen.until(done_ns, "drain")
            for piece in self._pieces_above(pen):
                cause = {BUSY: "input", "drain": "no_work", "fill": "no_work"}.get(piece.cause, piece.cause)
                pen.until(piece.end_ns, cause)
        else:
            above = self._all[self._index - 1]
            computed = above.forward_of(following.step, end_ns)
            if computed is not None:
                bubble = self._bubbles.get(following.step, []) if last is not None else [("fill", NEVER)]
                self._inherited(pen, computed.end_ns, bubble)
                sent = above.sent.get(following.step)
                if sent is not None and sent[0] < end_ns:
                    pen.until(sent[0], "host")
            self._launched(pen, following.step, above.sent.get(following.step, (0, 0))[1])
        return pen.pieces

    def _unplanned(self, pen: _Pen, done_ns: int, following: Forward | None) -> None:
        """Rank 0, until the plan of the following step is made. `done_ns`: when all before it left the pipeline."""
        planned_ns = self._me.planned_ns(following.step, pen.end_ns) if following is not None else pen.end_ns
        limit = _Pen(pen.cursor_ns, min(planned_ns, pen.end_ns))
        done_ns = max(done_ns, pen.cursor_ns)
        between = False
        for start_ns, end_ns, cause in self._me.schedule_between(limit.cursor_ns, limit.end_ns):
            limit.until(min(start_ns, done_ns), "drain")
            limit.until(start_ns, "scheduler" if between else "no_work")
            between = True
            if cause == "window":
                limit.until(end_ns, "window")
            elif cause == "plan":
                limit.until(end_ns, "scheduler")
            else:
                limit.until(min(end_ns, done_ns), "drain")
                # A wait that began before the last step was done ends with that step's result, which is on its way.
                limit.until(end_ns, "scheduler" if start_ns < done_ns else "no_work")
        limit.until(done_ns, "drain")
        limit.until(limit.end_ns, "scheduler" if between and following is not None else "no_work")
        pen.pieces, pen.cursor_ns = limit.pieces, max(pen.cursor_ns, limit.cursor_ns)

    def _inherited(self, pen: _Pen, computed_ns: int, bubble: list[tuple[str, int]]) -> None:
        """While the rank before has not computed the step: it is waited for, or what it waits for is.

        A bubble that entered at rank 0 travels behind the step before it: as much of the wait is the bubble's.
        """
        until = _Pen(pen.cursor_ns, min(computed_ns, pen.end_ns))
        left = list(bubble)
        for piece in self._pieces_above(until):
            if piece.cause not in (BUSY, "input", "fill"):
                until.until(piece.end_ns, piece.cause)
                continue
            while left and until.cursor_ns < min(piece.end_ns, until.end_ns):
                cause, length_ns = left.pop(0)
                before_ns = until.cursor_ns
                until.until(min(piece.end_ns, before_ns + length_ns), cause)
                if before_ns + length_ns > until.cursor_ns:
                    left.insert(0, (cause, before_ns + length_ns - until.cursor_ns))
            until.until(piece.end_ns, "input")
        pen.pieces, pen.cursor_ns = until.pieces, until.cursor_ns

    def _launched(self, pen: _Pen, step: int, sent_ns: int = 0) -> None:
        """From when inputs and plan are under way to this rank, until the launch."""
        known = {"input": "link", "step": "scheduler"}
        seen = False
        for start_ns, end_ns, cause in self._me.launch_between(pen.cursor_ns, pen.end_ns):
            self._unexplained(pen, start_ns, step, 0)
            pen.until(end_ns, known.get(cause, "window"))
            seen = True
        self._unexplained(pen, pen.end_ns, step, 0 if seen else sent_ns)

    def _unexplained(self, pen: _Pen, until_ns: int, step: int, sent_ns: int) -> None:
        pen.until(min(until_ns, sent_ns), "link")
        pen.until(min(until_ns, self._me.prepared_ns(step)), "scheduler")
        pen.until(until_ns, "host")

    def _pieces_above(self, pen: _Pen) -> Iterator[Segment]:
        first = max(0, bisect_right(self._upstream_starts, pen.cursor_ns) - 1)
        for index in range(first, len(self._upstream)):
            if self._upstream[index].start_ns >= pen.end_ns:
                return
            yield self._upstream[index]


def _bubble(pieces: list[Segment]) -> list[tuple[str, int]]:
    planning = sum(piece.end_ns - piece.start_ns for piece in pieces if piece.cause == "scheduler")
    others = sum(piece.end_ns - piece.start_ns for piece in pieces if piece.cause in ("drain", "no_work"))
    return [(cause, length_ns) for cause, length_ns in (("fill", others), ("scheduler", planning)) if length_ns]
