"""What a rank's spans say, in whole nanoseconds since the trace's start and sorted for looking up."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pipelined.trace.base import Span
    from pipelined.trace.timeline import RankTrace, Trace

__all__ = ["NEVER", "Facts", "Forward", "Interval"]

NEVER: Final = 2**62


class Forward(NamedTuple):
    """A forward of the device."""

    start_ns: int
    end_ns: int
    step: int
    detail: str | int


class Interval(NamedTuple):
    """Something a coroutine did or waited for."""

    start_ns: int
    end_ns: int
    cause: str


@dataclass
class Facts:
    """One rank's spans, sorted out.

    Attributes:
        forwards: Of the device, by start, clipped to the trace.
        sent: (posted, done) of each step's output.
    """

    forwards: list[Forward] = field(default_factory=list)
    sent: dict[int, tuple[int, int]] = field(default_factory=dict)
    _by_step: dict[int, list[Forward]] = field(default_factory=dict)
    _starts: list[int] = field(default_factory=list)
    _done: list[int] = field(default_factory=list)
    _planned: dict[int, int] = field(default_factory=dict)
    _prepared: dict[int, tuple[int, int]] = field(default_factory=dict)
    _stepped: dict[int, int] = field(default_factory=dict)
    _schedule: list[Interval] = field(default_factory=list)
    _schedule_ends: list[int] = field(default_factory=list)
    _launch: list[Interval] = field(default_factory=list)
    _launch_ends: list[int] = field(default_factory=list)

    @staticmethod
    def wall_ns(trace: Trace) -> int:
        """How long the trace lasted."""
        return max(0, round((trace.ended_s - trace.started_s) * 1e9))

    @classmethod
    def of(cls, trace: Trace, rank: RankTrace) -> Facts:
        """Sort out what `rank` recorded."""
        facts, wall_ns, origin_s = cls(), cls.wall_ns(trace), trace.started_s
        for span in rank.spans:
            start_ns = round((span.start_s - origin_s) * 1e9)
            facts._add(span, start_ns, max(start_ns, round((span.end_s - origin_s) * 1e9)), wall_ns)
        facts._sort()
        return facts

    def _add(self, span: Span, start_ns: int, end_ns: int, wall_ns: int) -> None:
        step = span.step
        match span.track, span.name:
            case "device", "forward":
                if end_ns > 0 and start_ns < wall_ns:
                    self.forwards.append(Forward(max(0, start_ns), min(end_ns, wall_ns), step, span.detail))
            case "launch", "wait":
                self._launch.append(Interval(start_ns, end_ns, str(span.detail)))
                if span.detail == "step":
                    self._stepped[step] = end_ns
            case "schedule", "wait":
                self._schedule.append(Interval(start_ns, end_ns, str(span.detail)))
            case "schedule", "plan":
                self._schedule.append(Interval(start_ns, end_ns, "plan"))
                self._planned[step] = end_ns
            case "schedule", "prepare":
                self._prepared[step] = (start_ns, end_ns)
            case "commit", "send":
                self.sent[step] = (start_ns, end_ns)

    def _sort(self) -> None:
        self.forwards.sort(key=lambda forward: (forward.start_ns, forward.end_ns))
        for forward in self.forwards:
            self._by_step.setdefault(forward.step, []).append(forward)
        self._starts = [forward.start_ns for forward in self.forwards]
        self._done = list(accumulate((forward.end_ns for forward in self.forwards), max))
        for intervals in (self._schedule, self._launch):
            intervals.sort()
        self._schedule_ends = list(accumulate((one.end_ns for one in self._schedule), max))
        self._launch_ends = list(accumulate((one.end_ns for one in self._launch), max))

    def forward_of(self, step: int, before_ns: int) -> Forward | None:
        """The last forward of `step` that began before then (numbers begin again with each epoch)."""
        found = None
        for forward in self._by_step.get(step, ()):
            if found is not None and forward.start_ns >= before_ns:
                break
            found = forward
        return found

    def done_by(self, step: int, after_ns: int) -> int:
        """When this rank had done `step`, which the rank before had done at `after_ns`, and all before it."""
        for forward in self._by_step.get(step, ()):
            if forward.end_ns >= after_ns:
                return self._done[bisect_right(self._starts, forward.start_ns) - 1]
        return 0

    def planned_ns(self, step: int, before_ns: int) -> int:
        """When the plan of `step` was made, as far as can be told; `before_ns` if it can't."""
        if step in self._planned:
            return self._planned[step]
        if step in self._prepared:
            return self._prepared[step][0]
        return self._stepped.get(step, before_ns)

    def prepared_ns(self, step: int) -> int:
        """When this rank had prepared `step`; 0 if that was not recorded."""
        return self._prepared.get(step, (0, 0))[1]

    def schedule_between(self, start_ns: int, end_ns: int) -> Iterator[Interval]:
        """What the schedule coroutine did, by start, as far as it touches that time."""
        return _between(self._schedule, self._schedule_ends, start_ns, end_ns)

    def launch_between(self, start_ns: int, end_ns: int) -> Iterator[Interval]:
        """What the launch coroutine waited for, by start, as far as it touches that time."""
        return _between(self._launch, self._launch_ends, start_ns, end_ns)


def _between(intervals: list[Interval], ends: list[int], start_ns: int, end_ns: int) -> Iterator[Interval]:
    # `ends` are running maxima, so they are sorted even where intervals overlap.
    for index in range(bisect_left(ends, start_ns + 1), len(intervals)):
        if intervals[index].start_ns >= end_ns:
            return
        if intervals[index].end_ns > start_ns:
            yield intervals[index]
