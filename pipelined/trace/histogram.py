"""How often a quantity was how large: a few integers, cheap enough for every step."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["STEP_S", "WAIT_S", "Histogram"]

STEP_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0)
"""Bounds for the time of a stage's step, in seconds."""

WAIT_S: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
"""Bounds for waits between steps, in seconds."""


@dataclass(slots=True)
class Histogram:
    """Counts of values by size.

    Attributes:
        bounds: Upper ends, inclusive, ascending; what is beyond the last is counted, too.
        counts: How many values each of them has, not those below it; one more than bounds.
        total: Sum of the values.
    """

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)
        assert len(self.counts) == len(self.bounds) + 1, "a count for each bound, and one for what lies beyond"

    def add(self, value: float, times: int = 1) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def count(self) -> int:
        """How many values there were."""
        return sum(self.counts)

    def cumulated(self) -> Iterable[tuple[float | None, int]]:
        """(bound, how many values up to it), ascending; None is infinity."""
        return zip((*self.bounds, None), accumulate(self.counts), strict=True)
