"""The cost model of one stage: how long a micro-batch takes it."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

from pipelined.errors import ConfigError

if TYPE_CHECKING:
    from typing import TypeAlias

    import numpy.typing as npt

    from pipelined.costs.work import MicroBatch

    FloatArray: TypeAlias = npt.NDArray[np.float64]

__all__ = ["StageCost", "Window"]


@dataclass(frozen=True, slots=True)
class Window:
    """Layers that attend to the last `tokens` tokens only: their share of the costs saturates.

    Attributes:
        tokens: Size of the window.
        a: As in `StageCost`, of these layers. d: likewise.
    """

    tokens: int
    a: float = 0.0
    d: float = 0.0


@dataclass(frozen=True, slots=True)
class StageCost:
    """Seconds of a micro-batch: c + the sum over its chunks of d*L + b*x + a*(2*L*x + x*x), L the prefix, x the tokens.

    Layers of several kinds are a sum of terms: `a` and `d` are those of full attention, and each window adds its own,
    with the prefix cut off at the window.

    Attributes:
        a: Seconds per pair of tokens that attend to each other, halved (x tokens alone have x*x).
        b: Seconds per token.
        c: Seconds per launch.
        d: Seconds per prefix token, whatever the chunk.
        windows: Terms of layers with sliding windows.
        per_decode: Seconds per sequence that decodes; None: as a chunk of one token.
        per_context: Seconds per token of its context; None: as a chunk of one token.
    """

    a: float
    b: float
    c: float
    d: float = 0.0
    windows: tuple[Window, ...] = ()
    per_decode: float | None = None
    per_context: float | None = None

    def __post_init__(self) -> None:
        numbers = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "windows"}
        for i, window in enumerate(self.windows):
            numbers |= {f"windows[{i}].a": window.a, f"windows[{i}].d": window.d}
            if window.tokens < 1:
                raise ConfigError(f"windows[{i}].tokens={window.tokens} is no window; expected 1 or more")
        for name, value in numbers.items():
            if value is not None and not 0 <= value < math.inf:
                raise ConfigError(f"cost coefficient {name}={value} is out of range; expected 0 or more, finite")

    def chunk_s(self, prefix_tokens: float, tokens: float) -> float:
        """Seconds of a chunk in a launch that has begun: without `c`."""
        L, x = prefix_tokens, tokens
        seconds = self.d * L + self.b * x + self.a * (2 * L * x + x * x)
        for window in self.windows:
            seconds += window.d * min(L, window.tokens) + 2 * window.a * _pairs(L, x, window.tokens)
        return seconds

    def decode_s(self, decodes: int, context_tokens: int) -> float:
        """Seconds that decodes add to a launch."""
        if not decodes:
            return 0.0
        mean = context_tokens / decodes
        one = self.chunk_s(mean, 1) - self.chunk_s(0, 1)
        each = self.chunk_s(0, 1) if self.per_decode is None else self.per_decode
        return decodes * each + (decodes * one if self.per_context is None else context_tokens * self.per_context)

    def launch_s(self, work: MicroBatch) -> float:
        """Seconds of a whole micro-batch."""
        chunks = sum(self.chunk_s(prefix, tokens) for prefix, tokens in work.chunks)
        return self.c + chunks + self.decode_s(work.decodes, work.context_tokens)

    def tokens_within(self, prefix_tokens: float, seconds: float) -> float:
        """The x for which `chunk_s(prefix_tokens, x) == seconds`: 0 if even the prefix takes longer, or infinity."""
        L, left = prefix_tokens, seconds - self.d * prefix_tokens
        for window in self.windows:
            left -= window.d * min(L, window.tokens)
        if left <= 0:
            return 0.0
        # Time is convex in x, so Newton comes down safely from a bound: as if windows held what they hold at the start.
        x = _root(self.a, self.b + 2 * self.a * L + sum(2 * w.a * min(L, w.tokens) for w in self.windows), left)
        for window in self.windows:  # nor more than any window alone allows
            x = min(x, window.tokens + left / (2 * window.a * window.tokens) if window.a else math.inf)
        if not self.windows or x == math.inf:
            return x
        for _ in range(40):
            slope = self.b + 2 * self.a * (L + x) + sum(2 * w.a * min(L + x, w.tokens) for w in self.windows)
            step = (self.chunk_s(L, x) - self.chunk_s(L, 0) - left) / slope
            x -= step
            if abs(step) <= 1e-9 * x:
                break
        return x

    def chunks_s(self, prefix_tokens: FloatArray, tokens: FloatArray) -> FloatArray:
        """`chunk_s` of many at once (arrays that broadcast)."""
        L, x = prefix_tokens, tokens
        seconds: FloatArray = self.d * L + self.b * x + self.a * (2 * L + x) * x
        for window in self.windows:
            w = float(window.tokens)
            head = np.clip(w - L, 0.0, x)  # tokens that the window holds back not yet
            pairs = head * L + 0.5 * head * head + w * (x - head)
            seconds = seconds + window.d * np.minimum(L, w) + 2 * window.a * pairs
        return seconds

    def rates_s(self, prefix_tokens: FloatArray) -> FloatArray:
        """Seconds that one more token takes, behind so many."""
        rate: FloatArray = self.b + 2 * self.a * prefix_tokens
        for window in self.windows:
            rate = rate + 2 * window.a * np.minimum(prefix_tokens, float(window.tokens))
        return rate

    def looks_s(self, prefix_tokens: FloatArray) -> FloatArray:
        """Seconds that a chunk takes for its prefix alone, whatever its size."""
        look: FloatArray = self.d * prefix_tokens
        for window in self.windows:
            look = look + window.d * np.minimum(prefix_tokens, float(window.tokens))
        return look

    def many_within(self, prefix_tokens: FloatArray, seconds: FloatArray) -> FloatArray:
        """`tokens_within` of many at once (arrays that broadcast)."""
        L = prefix_tokens
        left = np.maximum(seconds - self.looks_s(L), 0.0)
        slope = self.rates_s(L)
        with np.errstate(divide="ignore", invalid="ignore"):
            x: FloatArray = 2 * left / (slope + np.sqrt(slope * slope + 4 * self.a * left))
        x = np.where(left > 0, np.nan_to_num(x, nan=0.0, posinf=math.inf), 0.0)
        if not self.windows:
            return x
        for window in self.windows:
            if window.a:
                x = np.minimum(x, window.tokens + left / (2 * window.a * window.tokens))
        x, start = np.minimum(x, 1e15), self.chunks_s(L, np.zeros_like(x))
        for _ in range(12):
            with np.errstate(divide="ignore", invalid="ignore"):
                x = x - np.nan_to_num((self.chunks_s(L, x) - start - left) / self.rates_s(L + x))
        return x


def _pairs(prefix: float, tokens: float, window: float) -> float:
    """The integral of min(prefix + u, window) over the chunk."""
    head = min(max(window - prefix, 0.0), tokens)
    return head * prefix + 0.5 * head * head + window * (tokens - head)


def _root(a: float, b: float, y: float) -> float:
    """The positive x with a*x*x + b*x == y, in the form that loses no digits."""
    below = b + math.sqrt(b * b + 4 * a * y)
    return 2 * y / below if below > 0 else math.inf
