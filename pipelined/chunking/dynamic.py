"""Chunks that shrink along the prompt, by the published rule of dynamic chunking."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pipelined.chunking.fixed import TokenBudget
from pipelined.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipelined.chunking.base import Load
    from pipelined.costs import LiveCosts, PipelineCost

__all__ = ["DynamicChunks", "Runtime"]

ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Runtime:
    """Cumulative run time of a prompt of n tokens: quadratic * n^2 + linear * n, and a constant that cancels out.

    Attributes:
        quadratic: Seconds per squared token. linear: per token.
        prefix: Seconds per prefix token that a chunk pays whatever its size; 0 in the published rule, which knows
            lengths of whole prompts only.
    """

    quadratic: float
    linear: float
    prefix: float = 0.0

    @classmethod
    def fit(cls, lengths: Sequence[int], seconds: Sequence[float]) -> Runtime:
        """Least squares on the run times of whole prompts, as published.

        Raises:
            ConfigError: Fewer than three lengths, or times that no rising curve fits.
        """
        if len(set(lengths)) < 3:
            raise ConfigError(f"{len(set(lengths))} prompt lengths are too few to fit a run time; expected 3 or more")
        scale = max(lengths)
        quadratic, linear, _ = np.polyfit(np.array(lengths) / scale, np.array(seconds), 2)
        if quadratic < 0 or quadratic + linear <= 0:
            raise ConfigError(
                f"run times do not grow as lengths do (fit: {quadratic / scale**2:.3g}*n^2 + {linear / scale:.3g}*n); "
                "measure again on an idle machine"
            )
        return cls(float(quadratic) / scale**2, float(linear) / scale)

    @classmethod
    def of(cls, cost: PipelineCost, chunk: int) -> Runtime:
        """That of the stage that is slowest at a first chunk of that size."""
        stage = max(cost.distinct, key=lambda one: one.chunk_s(0, chunk))
        return cls(stage.a, stage.b)

    def size(self, prefix_tokens: int, chunk: int) -> float:
        """The x with Runtime(L + x) - Runtime(L) = Runtime(chunk), 0 where the prefix alone takes longer."""
        goal = self.quadratic * chunk * chunk + self.linear * chunk - self.prefix * prefix_tokens
        slope = self.linear + 2 * self.quadratic * prefix_tokens
        below = slope + math.sqrt(max(0.0, slope * slope + 4 * self.quadratic * goal))
        return max(0.0, 2 * goal / below) if below > 0 else float(chunk)


class DynamicChunks:
    """The next chunk moves from the initial size towards that of equal run time, by the smoothing factor.

    A micro-batch has the size that is right for its first prompt; others use up what that one leaves.

    Args:
        chunked_prefill_size: Initial size.
        runtime: Of prompts; `LiveCosts`: taken from what is known at the time.
        smoothing: 0: always the initial size; 1: strictly the solution.
        page_size: Sizes are multiples of max(page_size, 64), rounded down; the last chunk is what is left.
        least_share: Never below this share of the initial size.
    """

    def __init__(
        self,
        chunked_prefill_size: int,
        runtime: Runtime | LiveCosts,
        *,
        smoothing: float = 0.75,
        page_size: int = 64,
        least_share: float = 0.25,
    ) -> None:
        if chunked_prefill_size < 1:
            raise ConfigError(f"chunked_prefill_size={chunked_prefill_size} is not a chunk; expected 1 token or more")
        if not 0 <= smoothing <= 1:
            raise ConfigError(f"smoothing_factor={smoothing} is out of range; expected 0 (fixed) to 1 (strict)")
        self.chunked_prefill_size = chunked_prefill_size
        self.smoothing = smoothing
        self._source = runtime
        self._alignment = max(page_size, ALIGNMENT)
        self._least = int(chunked_prefill_size * least_share)

    def __repr__(self) -> str:
        return f"<DynamicChunks {self.chunked_prefill_size} smoothing={self.smoothing}>"

    def size(self, prefix_tokens: int) -> int:
        """Of a chunk behind that prefix."""
        first = self.chunked_prefill_size
        source = self._source
        runtime = source if isinstance(source, Runtime) else Runtime.of(source.cost, first)
        smoothed = first + self.smoothing * (runtime.size(prefix_tokens, first) - first)
        aligned = max(int(smoothed), self._least) // self._alignment * self._alignment
        return max(aligned, self._alignment)

    def micro_batch(self, load: Load) -> _DynamicBudget:
        """A size that is settled by the first offer that is accepted."""
        return _DynamicBudget(self)


class _DynamicBudget:
    __slots__ = ("_policy", "_tokens")

    def __init__(self, policy: DynamicChunks) -> None:
        self._policy = policy
        self._tokens: TokenBudget | None = None

    def offer(self, prefix_tokens: int, remaining_tokens: int) -> int:
        if self._tokens is None:
            return min(self._policy.size(prefix_tokens), remaining_tokens)
        return self._tokens.offer(prefix_tokens, remaining_tokens)

    def spend(self, prefix_tokens: int, tokens: int) -> None:
        if self._tokens is None:
            self._tokens = TokenBudget(self._policy.size(prefix_tokens))
        self._tokens.spend(prefix_tokens, tokens)
