"""Plays many seeds, counts what was covered, and shrinks what failed."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pipelined.errors import ConfigError, nearest
from pipelined.testing.fuzz.case import FAULTS, draw
from pipelined.testing.fuzz.play import play
from pipelined.testing.fuzz.shrink import shrink

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipelined.testing.fuzz.journal import Journal

__all__ = ["MINIMA", "MINIMA_FROM", "Found", "Summary", "fuzz", "parse_faults", "parse_seeds"]

MINIMA_FROM = 1000
"""Seeds from which on coverage is checked."""

MINIMA: dict[str, int] = {
    "preemptions": 50,
    "prefix_hits": 700,
    "evictions": 1000,
    "runs_without_faults": 50,
    "skewed": 100,
    "unequal_capacities": 100,
    "closed_early": 10,
    "steps.mixed": 100,
    **{f"kill.{phase}": 5 for phase in ("setup", "prefill", "decode", "idle", "closing", "restart")},
    "restarts": 50,
    "resumed": 100,
    **{f"kill.by_{how}": 10 for how in ("task", "abort", "hang")},
    **{f"cancel.{phase}": 20 for phase in ("waiting", "prefill", "decode", "ended")},
    "cancel.following": 1,  # who waits for another's prefill of the same prompt does not wait long
    **{f"cancel.by_{how}": 10 for how in ("abort", "task", "close")},
    **{f"link.{kind}": 50 for kind in ("drop", "delay", "corrupt", "duplicate")},
    **{f"ranks.{ranks}": 20 for ranks in range(1, 9)},
    **{f"ended.{reason}": 20 for reason in ("stop", "length", "abort", "NonFiniteError", "StageError")},
}
"""What so many seeds with all kinds of faults must cover at least."""

_TIMELINE_LINES = 60


@dataclass(frozen=True)
class Found:
    """A seed that failed: why, how to see it again, and the smallest case found that fails as well."""

    seed: int
    failures: list[str]
    command: str
    shrunk: list[str]
    timeline: list[str]


@dataclass
class Summary:
    """Of all seeds so far."""

    first: int
    last: int
    faults: tuple[str, ...]
    seeds: int = 0
    rank_steps: list[int] = field(default_factory=list)
    elapsed_s: float = 0.0
    cpu_s: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    found: list[Found] = field(default_factory=list)

    @property
    def missed(self) -> list[str]:
        """Minima of coverage that were not reached; empty for few seeds, or with kinds of faults left out."""
        if self.seeds < MINIMA_FROM or set(self.faults) != set(FAULTS):
            return []
        return [
            f"{name}: {self.counts[name]} of {least}" for name, least in MINIMA.items() if self.counts[name] < least
        ]

    @property
    def rate(self) -> float:
        """Rank-steps a second."""
        return sum(self.rank_steps) / self.elapsed_s if self.elapsed_s else 0.0

    def as_data(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "seeds": [self.first, self.last],
            "faults": list(self.faults),
            "failed": [
                {"seed": one.seed, "failures": one.failures, "command": one.command, "shrunk": one.shrunk}
                for one in self.found
            ],
            "rank_steps": sum(self.rank_steps),
            "rank_steps_per_s": round(self.rate),
            "rank_steps_per_cpu_s": round(sum(self.rank_steps) / self.cpu_s) if self.cpu_s else 0,
            "median_rank_steps": statistics.median(self.rank_steps) if self.rank_steps else 0,
            "elapsed_s": round(self.elapsed_s, 3),
            "coverage": dict(sorted(self.counts.items())),
            "missed": self.missed,
        }


def fuzz(
    seeds: range,
    faults: tuple[str, ...] = FAULTS,
    *,
    on_seed: Callable[[Summary], None] | None = None,
    most_failures: int = 10,
) -> Summary:
    """Play each seed, one after the other.

    Args:
        seeds: Which.
        faults: Kinds of faults that cases may have.
        on_seed: Called after each.
        most_failures: Stop after so many seeds that failed.
    """
    summary = Summary(seeds.start, seeds.stop, faults)
    began_s, began_cpu_s = time.monotonic(), time.process_time()
    for seed in seeds:
        case = draw(seed, faults)
        journal = play(case)
        summary.seeds += 1
        summary.rank_steps.append(journal.rank_steps)
        summary.counts.update(journal.counts)
        summary.elapsed_s, summary.cpu_s = time.monotonic() - began_s, time.process_time() - began_cpu_s
        if journal.failures:
            summary.found.append(_found(seed, faults, journal))
        if on_seed is not None:
            on_seed(summary)
        if len(summary.found) >= most_failures:
            break
    return summary


def _found(seed: int, faults: tuple[str, ...], journal: Journal) -> Found:
    chosen = "" if set(faults) == set(FAULTS) else f" --faults {','.join(faults) or 'none'}"
    case, smallest = shrink(draw(seed, faults), journal)
    timeline = smallest.events.decode().splitlines()
    return Found(
        seed=seed,
        failures=journal.failures,
        command=f"pipelined fuzz --seeds {seed}:{seed + 1}{chosen}",
        shrunk=case.describe(),
        timeline=timeline[-_TIMELINE_LINES:],
    )


def parse_seeds(text: str) -> range:
    """`0:1000`, or one seed.

    Raises:
        ConfigError: It is neither, or an empty range.
    """
    first, colon, last = text.partition(":")
    try:
        seeds = range(int(first), int(last) if colon else int(first) + 1)
    except ValueError:
        seeds = range(0)
    if not seeds:
        raise ConfigError(f"--seeds {text}: expected FIRST:END with FIRST < END, as in 0:1000, or one seed")
    return seeds


def parse_faults(text: str) -> tuple[str, ...]:
    """`drop,kill`, `all` or `none`.

    Raises:
        ConfigError: A kind that there is not.
    """
    if text == "all":
        return FAULTS
    kinds = tuple(part for part in text.split(",") if part and text != "none")
    for kind in kinds:
        if kind not in FAULTS:
            raise ConfigError(f"--faults {text}: no kind {kind!r}{nearest(kind, FAULTS)}")
    return kinds
