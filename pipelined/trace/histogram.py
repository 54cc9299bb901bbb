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

    def quantile(self, share: float) -> float | None:
        """A value that about this share of all lies below, 0 to 1, by the bounds; None if there are none."""
        rank = share * self.count
        low = 0.0
        for bound, (count, below) in zip(self.bounds, _with_sums(self.counts), strict=False):
            if count and below + count >= rank:
                return low + (bound - low) * max(0.0, rank - below) / count
            low = bound
        return low if self.count else None


def _with_sums(counts: list[int]) -> Iterable[tuple[int, int]]:
    return zip(counts, accumulate(counts, initial=0), strict=False)
