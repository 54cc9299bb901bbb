"""Cost models that learn while serving, from the first measured time on."""

from __future__ import annotations

import math
from collections import deque
from statistics import median_low
from typing import TYPE_CHECKING

import numpy as np

from pipelined.costs.fitting import features, from_coefficients
from pipelined.costs.nnls import nnls
from pipelined.costs.pipeline import PipelineCost
from pipelined.costs.stage import StageCost
from pipelined.costs.work import MicroBatch

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["SHAPE", "LiveCosts", "OnlineFit"]

SHAPE = StageCost(a=1 / 16384, b=1.0, c=16.0, d=0.0)
"""What stages are like before anything is measured, in units of a token's time.

Attention costs as much as all the rest at a prefix of about 8K tokens, as on the models known. A launch counts little:
first chunks then are small rather than large, which costs less if it is wrong, and shows what a launch does cost.
"""

_TRUST = 0.01  # weight of a profile against that of one measurement
_GUESS = 1e-3  # likewise of a mere shape
_PREFIX_TRUST = 100.0  # what grows with the prefix is attention, rather than a price of any chunk, until proven
_LAUNCH_TRUST = 10.0  # per squared second: that launches differ by much more than 10 ms takes some measurements to say
_MOST_LAUNCH_S = 0.005  # expected of a launch before it is known: machines differ less in this than in tokens
_WILD = 4.0  # this many times off the prediction is an accident, unless it goes on
_ACCIDENTS = 4
_PATIENCE = 16  # measurements, at most, until the model is fitted again


class OnlineFit:
    """One stage. Exponential forgetting; relative errors; a weak prior for what has not been seen yet.

    Args:
        prior: What to believe at first: its shape, scaled to what is measured. None: `SHAPE`.
        memory: Over about so many measurements does it average.
        windows: As in `fit`.
    """

    def __init__(self, prior: StageCost | None = None, *, memory: int = 200, windows: tuple[int, ...] = ()) -> None:
        self._keep = 1 - 1 / memory
        self._known = prior is not None
        self._shape = prior or SHAPE
        self._windows = windows or tuple(window.tokens for window in self._shape.windows)
        self._prior = self._coefficients(self._shape)
        size = len(self._prior)
        self._gram = np.zeros((size, size))
        self._moment = np.zeros(size)
        self._typical = np.zeros(size)
        self._scales: deque[float] = deque(maxlen=15)
        self._accidents = 0
        self._decodes_seen = prior is not None and prior.per_decode is not None
        self._cost: StageCost | None = prior
        self._solved = 0
        self.samples = 0
        self.error: float | None = None
        """Mean relative error of the predictions made before each measurement, lately."""

    def __repr__(self) -> str:
        error = "unknown" if self.error is None else f"{self.error:.1%}"
        return f"<OnlineFit samples={self.samples} error={error}>"

    @property
    def cost(self) -> StageCost | None:
        """What is believed now; None before the first measurement, without a prior."""
        # Solving takes a while, and one measurement more of many changes little.
        news = self.samples - self._solved
        if news >= max(1, min(_PATIENCE, self.samples // 8)):
            self._cost, self._solved = self._solve(), self.samples
        return self._cost

    def predict_s(self, work: MicroBatch) -> float | None:
        """Seconds for `work`, if anything is known."""
        return None if self.cost is None else self.cost.launch_s(work)

    def observe(self, work: MicroBatch, seconds: float) -> None:
        """A measurement. Times that are not positive and finite, and empty work, are ignored."""
        if not 0 < seconds < math.inf or not work.tokens:
            return
        predicted = self.predict_s(work)
        weight = self._weight(predicted, seconds)
        if predicted is not None and weight == 1.0:
            miss = min(1.0, abs(predicted / seconds - 1))
            self.error = miss if self.error is None else 0.9 * self.error + 0.1 * miss
        row = features(work, self._windows) / seconds
        self._gram = self._keep * self._gram + weight * np.outer(row, row)
        self._moment = self._keep * self._moment + weight * row
        self._typical = np.maximum(0.99 * self._typical, row)
        self._scales.append(seconds / max(self._shape.launch_s(work), 1e-12))
        self._decodes_seen = self._decodes_seen or work.decodes > 0
        self.samples += 1

    def _weight(self, predicted: float | None, seconds: float) -> float:
        """Accidents count for little, until they are the rule."""
        if not predicted or self.samples < _ACCIDENTS:
            return 1.0
        ratio = max(seconds / predicted, predicted / seconds)
        self._accidents = self._accidents + 1 if ratio > _WILD else 0
        # Errors are relative: of a time much too short they are huge, so that it must count for less still.
        return 1e-3 * min(1.0, (seconds / predicted) ** 2) if 0 < self._accidents <= _ACCIDENTS else 1.0

    def _solve(self) -> StageCost:
        # A profile is believed as it stands; a mere shape is scaled to what was measured, unmoved by a slow first time.
        prior = self._prior
        if not self._known:
            prior = prior * median_low(self._scales)
            prior[0] = min(prior[0], _MOST_LAUNCH_S)
        unit = np.maximum(self._typical, 1e-12 / max(self._scales))
        weights = (_TRUST if self._known else _GUESS) * unit * unit
        if not self._known:
            weights[0] = max(weights[0], _LAUNCH_TRUST)
            weights[2] *= _PREFIX_TRUST
        trust = np.diag(weights)
        gram = self._gram + trust
        moment = self._moment + trust @ prior
        column = 1 / np.sqrt(np.diag(gram))
        factor = np.linalg.cholesky(gram * np.outer(column, column) + 1e-13 * np.eye(len(column)))
        goal = np.asarray(np.linalg.solve(factor, column * moment), dtype=np.float64)
        theta = nnls(np.asarray(factor.T, dtype=np.float64), goal) * column
        return from_coefficients(theta, self._windows, decodes_seen=self._decodes_seen)

    def _coefficients(self, cost: StageCost) -> npt.NDArray[np.float64]:
        per_decode = cost.chunk_s(0, 1) if cost.per_decode is None else cost.per_decode
        per_context = cost.d + 2 * cost.a if cost.per_context is None else cost.per_context
        own = {window.tokens: (window.d, window.a) for window in cost.windows}
        tails = [value for tokens in self._windows for value in own.get(tokens, (0.0, 0.0))]
        return np.array([cost.c, cost.b, cost.d, cost.a, per_decode, per_context, *tails])


class LiveCosts:
    """The costs of a pipeline, as far as they are known: from a profile, from measured times, or from experience.

    Args:
        pp_size: Stages.
        profile: Measured before, if it was.
        windows: Sizes of the model's sliding windows.
    """

    def __init__(
        self, pp_size: int, profile: PipelineCost | None = None, *, windows: tuple[int, ...] = (), memory: int = 200
    ) -> None:
        self.pp_size = pp_size
        self.version = 0
        """Grows with every change of `cost`."""
        self.most_tokens_seen = 0
        """Of the micro-batches measured, the largest: far beyond it, an unprofiled `cost` is a guess."""
        priors = profile.stages if profile else (None,) * pp_size
        self._profiled = profile is not None
        self._fits = [OnlineFit(prior, memory=memory, windows=windows) for prior in priors]
        self._cost: PipelineCost | None = profile or PipelineCost.even(SHAPE, pp_size)

    def __repr__(self) -> str:
        return f"<LiveCosts stages={self.pp_size} version={self.version} known={self.known}>"

    @property
    def profiled(self) -> bool:
        """Whether it began with a profile."""
        return self._profiled

    @property
    def known(self) -> bool:
        """Whether `cost` is in seconds. Before, it is a shape in units of a token's time."""
        return self._profiled or any(fit.samples for fit in self._fits)

    @property
    def cost(self) -> PipelineCost:
        """What is believed now. Stages that have not reported count as the slowest of those that have."""
        if self._cost is None:
            known = [fit.cost for fit in self._fits]
            reported = [cost for cost in known if cost is not None]
            slowest = max(reported, key=lambda cost: cost.chunk_s(0, 1024))
            self._cost = PipelineCost(tuple(cost or slowest for cost in known))
        return self._cost

    @property
    def error(self) -> float | None:
        """Relative error of the predictions lately, the worst stage's."""
        return max((fit.error for fit in self._fits if fit.error is not None), default=None)

    def observe(self, rank: int, work: MicroBatch, seconds: float) -> None:
        """A stage took that long for a micro-batch. Ranks that there are none of are ignored."""
        if 0 <= rank < len(self._fits):
            fit = self._fits[rank]
            before, samples = fit.cost, fit.samples
            fit.observe(work, seconds)
            if fit.samples != samples:
                self.most_tokens_seen = max(self.most_tokens_seen, work.tokens)
            if fit.cost is not before:
                self.version += 1
                self._cost = None
