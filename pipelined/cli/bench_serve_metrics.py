"""What a load on a server comes to: pure arithmetic, with the keys of `vllm bench serve`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["METRICS", "Outcome", "detailed", "summarize"]

METRICS: Final = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}


@dataclass
class Outcome:
    """One request.

    Attributes:
        start_s: When it was sent. queue_s: how long it had waited for its turn before, with a bound on concurrency.
        ttft_s, latency_s: From then to the first token, and to the end.
        itl_s: Between tokens (or whatever came at once).
        prompt_tokens, output_tokens: As the server counts them.
        text: What was generated, where it was kept.
        error: Why it failed; "" if it did not.
    """

    start_s: float = 0.0
    queue_s: float = 0.0
    ttft_s: float = 0.0
    latency_s: float = 0.0
    itl_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    text: str = ""
    error: str = ""

    @property
    def tpot_s(self) -> float:
        """Mean time of each token after the first; 0 if there is none."""
        return (self.latency_s - self.ttft_s) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0


def summarize(
    outcomes: Sequence[Outcome],
    duration_s: float,
    *,
    metrics: Sequence[str] = ("ttft", "tpot", "itl"),
    percentiles: Sequence[float] = (99.0,),
    goodput_s: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """The figures of a run.

    Args:
        outcomes: All requests.
        duration_s: From the first one sent to the last one ended.
        metrics: Those of `METRICS` whose statistics are wanted.
        percentiles: Of them.
        goodput_s: Bounds on "ttft", "tpot" and "e2el": requests within all of them are good.
    """
    done = [one for one in outcomes if not one.error]
    prompt, output = sum(one.prompt_tokens for one in done), sum(one.output_tokens for one in done)
    goodput = None
    if goodput_s:
        good = sum(all(_value(one, name) <= bound_s for name, bound_s in goodput_s.items()) for one in done)
        goodput = good / duration_s
    found: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(done),
        "failed": len(outcomes) - len(done),
        "total_input_tokens": prompt,
        "total_output_tokens": output,
        "request_throughput": len(done) / duration_s,
        "request_goodput": goodput,
        "output_throughput": output / duration_s,
        "total_token_throughput": (prompt + output) / duration_s,
        "max_output_tokens_per_s": _peak_tokens_per_s(done),
        "max_concurrent_requests": _peak_requests(done),
    }
    for name in metrics:
        found |= _statistics(name, _values(done, name), percentiles)
    return found


def detailed(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Figures of each request."""
    return {
        "input_lens": [one.prompt_tokens for one in outcomes],
        "output_lens": [one.output_tokens for one in outcomes],
        "ttfts": [one.ttft_s for one in outcomes],
        "itls": [one.itl_s for one in outcomes],
        "latencies": [one.latency_s for one in outcomes],
        "start_times": [one.start_s for one in outcomes],
        "queue_times": [one.queue_s for one in outcomes],
        "generated_texts": [one.text for one in outcomes],
        "errors": [one.error for one in outcomes],
    }


def _value(one: Outcome, name: str) -> float:
    return {"ttft": one.ttft_s, "tpot": one.tpot_s, "e2el": one.latency_s}[name]


def _values(done: Sequence[Outcome], name: str) -> list[float]:
    if name == "itl":
        return [gap_s for one in done for gap_s in one.itl_s]
    if name == "tpot":
        return [one.tpot_s for one in done if one.output_tokens > 1]
    return [_value(one, name) for one in done]


def _statistics(name: str, values_s: list[float], percentiles: Sequence[float]) -> dict[str, float]:
    values_ms = np.asarray(values_s or [0.0]) * 1e3
    found = {
        f"mean_{name}_ms": float(values_ms.mean()),
        f"median_{name}_ms": float(np.median(values_ms)),
        f"std_{name}_ms": float(values_ms.std()),
    }
    for percentile in percentiles:
        found[f"p{percentile:g}_{name}_ms"] = float(np.percentile(values_ms, percentile))
    return found


def _peak_tokens_per_s(done: Sequence[Outcome]) -> float:
    """Most tokens within one of the run's seconds."""
    if not done:
        return 0.0
    begin_s = min(one.start_s for one in done)
    counts: dict[int, int] = {}
    for one in done:
        at_s = one.start_s + one.ttft_s - begin_s
        for gap_s in (0.0, *one.itl_s):
            at_s += gap_s
            counts[math.floor(at_s)] = counts.get(math.floor(at_s), 0) + 1
    return float(max(counts.values()))


def _peak_requests(done: Sequence[Outcome]) -> int:
    """Most requests under way at a time; one that ends as another begins leaves first."""
    events = sorted(event for one in done for event in ((one.start_s, 1), (one.start_s + one.latency_s, -1)))
    most = now = 0
    for _, change in events:
        now += change
        most = max(most, now)
    return most
