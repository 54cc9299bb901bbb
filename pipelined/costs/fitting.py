"""From measured times to a cost model: weighted for relative error, robust, and honest about how well it fits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pipelined.costs.nnls import nnls
from pipelined.costs.stage import StageCost, Window
from pipelined.costs.work import MicroBatch
from pipelined.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

__all__ = ["Fit", "Sample", "features", "fit", "from_coefficients"]

MOST_ERROR = 0.15
"""A fit that misses its points by more than this on average is no basis for a plan."""

MOST_DROPPED = 0.25
"""Outliers are exceptions: if more than this share of the points are, something else is wrong."""

_FEWEST = 4
_OUTLIER_ERROR = 0.25
_OUTLIER_DEVIATIONS = 6.0
_HALVES = 40


class Sample(NamedTuple):
    """A micro-batch, and how long a stage took for it."""

    work: MicroBatch
    seconds: float

    @classmethod
    def of(cls, prefix_tokens: int, tokens: int, seconds: float) -> Sample:
        """A single chunk."""
        return cls(MicroBatch(((prefix_tokens, tokens),)), seconds)


@dataclass(frozen=True)
class Fit:
    """A cost model and how far it can be trusted.

    Attributes:
        cost: The model.
        samples: How many points it was fitted to.
        r2: Share of the times' variance that it explains, over those points.
        mean_error: Mean relative error over those points, |predicted / measured - 1|. worst_error: the largest.
        dropped: Places (in the list given) of the points taken for outliers. warmup: how many were skipped as warm-up.
        problem: Why it should not be used, or "".
    """

    cost: StageCost
    samples: int
    r2: float
    mean_error: float
    worst_error: float
    dropped: tuple[int, ...] = ()
    warmup: int = 0
    problem: str = ""

    @property
    def verdict(self) -> str:
        """One line for people."""
        quality = f"mean error {self.mean_error:.1%}, worst {self.worst_error:.1%}, R2 {self.r2:.4f}"
        state = f"refused: {self.problem}" if self.problem else "good"
        return f"{state} ({self.samples} points, {len(self.dropped)} outliers, {quality})"

    def checked(self) -> StageCost:
        """The model, if it is good.

        Raises:
            ConfigError: It is not; says why and what to do.
        """
        if self.problem:
            raise ConfigError(f"the cost model does not fit: {self.problem}; measure again on an idle machine")
        return self.cost


def features(work: MicroBatch, windows: tuple[int, ...] = ()) -> npt.NDArray[np.float64]:
    """What each coefficient is multiplied by: c, b, d, a, decodes, context, then d and a of each window."""
    L = np.array([prefix for prefix, _ in work.chunks], dtype=np.float64)
    x = np.array([tokens for _, tokens in work.chunks], dtype=np.float64)
    row = [1.0, x.sum(), L.sum(), ((2 * L + x) * x).sum(), float(work.decodes), float(work.context_tokens)]
    for window in windows:
        head = np.clip(window - L, 0.0, x)
        pairs = head * L + 0.5 * head * head + window * (x - head)
        row += [np.minimum(L, window).sum(), 2 * pairs.sum()]
    return np.array(row)


def from_coefficients(
    theta: npt.NDArray[np.float64], windows: tuple[int, ...] = (), *, decodes_seen: bool = True
) -> StageCost:
    """The model with those coefficients, in the order of `features`."""
    c, b, d, a, per_decode, per_context = (float(value) for value in theta[:6])
    tails = theta[6:].reshape(-1, 2)
    terms = tuple(Window(tokens, a=float(own[1]), d=float(own[0])) for tokens, own in zip(windows, tails, strict=True))
    if not decodes_seen:
        return StageCost(a, b, c, d, terms)
    return StageCost(a, b, c, d, terms, per_decode, per_context)


def fit(samples: Sequence[Sample], *, warmup: int = 0, windows: tuple[int, ...] = ()) -> Fit:
    """The model that fits best, by relative error, after dropping `warmup` first points and whatever stands out.

    Args:
        samples: In the order in which they were measured.
        warmup: How many at the start are not to be believed.
        windows: Sizes of the model's sliding windows, where it has some.

    Raises:
        ConfigError: There are too few points to say anything, or one has no time.
    """
    used = list(samples[warmup:])
    if len(used) < _FEWEST:
        raise ConfigError(f"{len(used)} points after a warm-up of {warmup} are too few to fit; expected {_FEWEST}")
    seconds = np.array([sample.seconds for sample in used], dtype=np.float64)
    if not (np.isfinite(seconds).all() and (seconds > 0).all()):
        place = int(np.argmin(np.isfinite(seconds) & (seconds > 0)))
        raise ConfigError(f"point {place + warmup} took {seconds[place]} s; expected more than 0, finite")
    rows = np.array([features(sample.work, windows) for sample in used]) / seconds[:, None]
    keep, theta = _trimmed(rows, seconds)
    errors = np.abs(rows[keep] @ theta - 1)
    times = seconds[keep]
    spread = float(((times - times.mean()) ** 2).sum())
    missed = float(((rows[keep] @ theta * times - times) ** 2).sum())
    found = Fit(
        cost=from_coefficients(theta, windows, decodes_seen=any(sample.work.decodes for sample in used)),
        samples=int(keep.sum()),
        r2=1 - missed / spread if spread > 0 else float(missed <= 1e-12),
        mean_error=float(errors.mean()),
        worst_error=float(errors.max()),
        dropped=tuple(int(place) + warmup for place in np.flatnonzero(~keep)),
        warmup=warmup,
    )
    problem = _problem(found, [sample for sample, kept in zip(used, keep, strict=True) if kept], len(used))
    return Fit(**{**found.__dict__, "problem": problem})


def _misses(rows: npt.NDArray[np.float64], theta: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """How far off each point is, as a log-ratio: 30 times too slow is as bad as 30 times too fast."""
    misses: npt.NDArray[np.float64] = np.abs(np.log(np.maximum(rows @ theta, 1e-12)))
    return misses


def _least_absolute(rows: npt.NDArray[np.float64], weights: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Towards the least sum of absolute log-ratios: a few wild points cannot drag that along."""
    for _ in range(15):
        theta = nnls(rows * weights[:, None], weights)
        errors = np.abs(rows @ theta - 1)
        weights = np.sqrt(_misses(rows, theta) + 1e-3) / np.maximum(errors, 1e-3)
    return theta


def _starts(rows: npt.NDArray[np.float64], seconds: npt.NDArray[np.float64]) -> Iterator[npt.NDArray[np.float64]]:
    """Coefficients to begin with; at least one of them was not dragged along by the wild points."""
    # Relative errors are moved most by times that are too short, absolute ones by times that are too long: try both.
    yield _least_absolute(rows, np.ones(len(rows)))
    yield _least_absolute(rows, seconds / seconds.max())
    # Where wild points stand together, some halves of the points are free of them (least trimmed squares, Rousseeuw).
    dice = np.random.default_rng(0)
    for _ in range(_HALVES):
        half = dice.permutation(len(rows))[: max(_FEWEST, len(rows) // 2)]
        yield nnls(rows[half], np.ones(len(half)))


def _typical_miss(rows: npt.NDArray[np.float64], theta: npt.NDArray[np.float64]) -> float:
    """The mean miss of the points that count at least: the best of them, as many as must be left after dropping."""
    misses = np.sort(_misses(rows, theta))
    return float(misses[: max(1, math.ceil(len(rows) * (1 - MOST_DROPPED)))].mean())


def _trimmed(
    rows: npt.NDArray[np.float64], seconds: npt.NDArray[np.float64]
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.float64]]:
    """(which points count, coefficients). Rows are divided by their time, so that 1 is the goal of each."""
    theta = min(_starts(rows, seconds), key=lambda found: _typical_miss(rows, found))
    keep = np.ones(len(rows), dtype=bool)
    for _ in range(6):
        misses = _misses(rows, theta)
        limit = max(_OUTLIER_ERROR, _OUTLIER_DEVIATIONS * float(np.median(misses)))
        now = misses <= limit
        if not now.any():
            now[:] = True
        theta = nnls(rows[now], np.ones(int(now.sum())))
        if np.array_equal(now, keep):
            break
        keep = now
    else:
        theta = nnls(rows[keep], np.ones(int(keep.sum())))
    return keep, theta


def _problem(found: Fit, kept: Sequence[Sample], given: int) -> str:
    """Why the fit is not to be used, or ""."""
    if len(found.dropped) > MOST_DROPPED * given:
        return f"{len(found.dropped)} of {given} points stand out from the rest (at most {MOST_DROPPED:.0%} may)"
    if found.mean_error > MOST_ERROR:
        return f"it misses its points by {found.mean_error:.0%} on average (at most {MOST_ERROR:.0%} is good)"
    sizes = {tokens for sample in kept for _, tokens in sample.work.chunks}
    if len(sizes) < 2:
        return f"chunks of {len(sizes)} size(s) only cannot tell costs apart; measure two sizes or more"
    longest = max(sizes)
    if found.cost.chunk_s(0, longest) <= 0:
        return f"time does not grow with tokens: {longest} of them take as long as none"
    return ""
