"""The best cut of one prompt into chunks, by exact search. Slow: what the fast search is held against."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pipelined.errors import ConfigError

if TYPE_CHECKING:
    from pipelined.costs import StageCost

__all__ = ["Cut", "cut_seconds", "optimum"]


class Cut(NamedTuple):
    """Sizes of the chunks, and the time to first token that they give."""

    sizes: tuple[int, ...]
    seconds: float


def cut_seconds(cost: StageCost, sizes: tuple[int, ...], fill: float, prefix_tokens: int = 0) -> float:
    """T = sum t_i + fill * max t_i of those chunks; fill = P - 1 for stages alike."""
    times = []
    for size in sizes:
        times.append(cost.c + cost.chunk_s(prefix_tokens, size))
        prefix_tokens += size
    return sum(times) + fill * max(times)


def optimum(
    cost: StageCost, tokens: int, fill: float, *, prefix_tokens: int = 0, align: int = 64, within: float = 1e-4
) -> Cut:
    """The least sum t_i + fill * max t_i over all cuts into multiples of `align` (the last chunk: what is left).

    Dynamic programming gives the least sum under a bound on the largest time; branch and bound finds the best bound.

    Args:
        cost: Of each of the stages alike.
        tokens: To cut, at least 1.
        fill: How often the largest chunk counts besides.
        prefix_tokens: Before them.
        align: Step of the sizes.
        within: Relative distance from the true optimum that is good enough.
    """
    if tokens < 1 or align < 1:
        raise ConfigError(f"{tokens} tokens in steps of {align} cannot be cut; expected 1 or more of both")
    search = _Search(cost, tokens, prefix_tokens, align)
    best, low = search.least_sum(search.smallest_s, fill)
    found, high = search.least_sum(search.largest_s, fill)
    best = min(best, found, key=lambda cut: cut.seconds)
    # (low, high, least sum with chunks up to high): with the largest time in between, T is sum + fill * low or more.
    gaps = [(low, high, found.seconds - fill * high)]
    while gaps:
        gap = min(gaps, key=lambda gap: gap[2] + fill * gap[0])
        low, high, least_s = gap
        middle = math.sqrt(low * high)
        if least_s + fill * low >= best.seconds * (1 - within) or not low < middle < high:
            break
        gaps.remove(gap)
        found, peak = search.least_sum(middle, fill)
        best = min(best, found, key=lambda cut: cut.seconds)
        gaps.append((middle, high, least_s))
        if peak > low:  # between the peak and the bound there is nothing better than what was found
            gaps.append((low, peak, found.seconds - fill * peak))
    return best


class _Search:
    """Dynamic programming over the cuts, under a bound on the time of each chunk."""

    def __init__(self, cost: StageCost, tokens: int, prefix: int, align: int) -> None:
        self._cost, self._tokens = cost, tokens
        self._ends = prefix + np.minimum(np.arange(1, -(-tokens // align) + 1) * align, tokens).astype(np.float64)
        self._starts = np.concatenate(([float(prefix)], self._ends[:-1]))
        self._align = align
        self.largest_s = cost.c + cost.chunk_s(prefix, tokens)
        self.smallest_s = float(cost.c + cost.chunks_s(self._starts, self._ends - self._starts).max())

    def least_sum(self, most_s: float, fill: float) -> tuple[Cut, float]:
        """The cut with the least sum of times of chunks that take `most_s` or less each, and its largest time."""
        cost, starts, ends = self._cost, self._starts, self._ends
        count = len(ends)
        reach = (cost.many_within(starts, np.full(count, most_s * (1 + 1e-12) - cost.c)) // self._align).astype(int)
        rest = np.zeros(count + 1)
        steps = np.empty(count, dtype=int)
        for at in range(count - 1, -1, -1):
            far = min(count, at + max(1, reach[at]))
            if far < count and cost.c + cost.chunk_s(starts[at], ends[-1] - starts[at]) <= most_s:
                far = count  # the last chunk need not be a whole number of steps
            sums = cost.chunks_s(starts[at : at + 1], ends[at:far] - starts[at]) + rest[at + 1 : far + 1]
            best = int(sums.argmin())
            steps[at] = best + 1
            rest[at] = cost.c + sums[best]
        sizes, peak, at = [], 0.0, 0
        while at < count:
            end = at + int(steps[at])
            size = int(ends[end - 1] - starts[at])
            peak = max(peak, cost.c + cost.chunk_s(float(starts[at]), size))
            sizes.append(size)
            at = end
        return Cut(tuple(sizes), float(rest[0]) + fill * peak), peak
