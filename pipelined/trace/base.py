"""A ring buffer of what happened when, cheap enough to be always on."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

__all__ = ["Span", "Tracer"]


class Span(NamedTuple):
    """Something that lasted.

    Attributes:
        track: Coroutine or resource on the rank: "device", "schedule", "launch", "results", "commit", "link".
        name: What it was: "forward", "wait", "send", ...
        start_s, end_s: By the rank's clock.
        step: Step that it belongs to, -1 if none.
        detail: Cause of a wait ("input", "step", "credit"), rows of a forward, bytes of a transfer.
    """

    track: str
    name: str
    start_s: float
    end_s: float
    step: int = -1
    detail: str | int = ""


class Tracer:
    """The last `capacity` spans of one rank. Not thread-safe: used from the rank's loop."""

    def __init__(self, capacity: int = 65_536) -> None:
        self._spans: deque[Span] = deque(maxlen=capacity)
        self.dropped = 0

    def add(self, track: str, name: str, start_s: float, end_s: float, step: int = -1, detail: str | int = "") -> None:
        """Record a span; the oldest one goes if the buffer is full."""
        if len(self._spans) == self._spans.maxlen:
            self.dropped += 1
        self._spans.append(Span(track, name, start_s, end_s, step, detail))

    def drain(self) -> list[Span]:
        """All spans since the last call, oldest first."""
        spans = list(self._spans)
        self._spans.clear()
        return spans
