"""What happened in a run: an event log, the steps that each rank applied, what requests came to, and what was wrong."""

from __future__ import annotations

import asyncio
import zlib
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from pipelined.messages import Chunk, Decode

if TYPE_CHECKING:
    from pipelined.llm.outputs import RequestOutput
    from pipelined.messages import Step

__all__ = ["Journal", "Outcome"]

_encode = msgspec.msgpack.Encoder().encode


@dataclass
class Outcome:
    """What a request came to.

    Attributes:
        output: The last that its generator gave.
        error: What it raised. given_up: Its own user ended it, by task or by closing.
        ended_s: When it was over; None: never.
    """

    output: RequestOutput | None = None
    error: BaseException | None = None
    given_up: bool = False
    asked: bool = False
    ended_s: float | None = None


@dataclass
class Journal:
    """Of one run.

    Attributes:
        lines: The event log.
        failures: What broke an invariant.
        counts: What was covered, by name.
        epochs: For each epoch and rank, the checksum chain over the steps applied: entry k is over steps 0 to k.
        cancelled: Requests of which a cancellation took effect or may have.
        struck: What was done on purpose that may end the pipeline: (kind, rank, when).
        capacity_tokens: What the ranks agreed on; None while it is not known.
    """

    ranks: int
    lines: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    epochs: list[list[list[int]]] = field(default_factory=list)
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    cancelled: set[int] = field(default_factory=set)
    struck: list[tuple[str, int, float]] = field(default_factory=list)
    last_news: Counter[str] = field(default_factory=Counter)
    capacity_tokens: int | None = None
    doing: str = "setup"

    def __post_init__(self) -> None:
        self._begin(0)

    def _begin(self, epoch: int) -> None:
        while len(self.epochs) <= epoch:
            self.epochs.append([[] for _ in range(self.ranks)])

    @property
    def chains(self) -> list[list[int]]:
        """Of the latest epoch."""
        return self.epochs[-1]

    @property
    def rank_steps(self) -> int:
        """Steps applied, summed over the ranks."""
        return sum(len(chain) for chains in self.epochs for chain in chains)

    @property
    def events(self) -> bytes:
        """The log, byte for byte equal whenever the same case is run."""
        return "\n".join(self.lines).encode()

    def now(self) -> float:
        """Virtual seconds."""
        return asyncio.get_running_loop().time()

    def note(self, what: str) -> None:
        """Add to the log."""
        self.lines.append(f"{self.now():.9f} {what}")

    def fail(self, what: str) -> None:
        """An invariant does not hold."""
        self.note(f"FAILED {what}")
        self.failures.append(what)

    def fail_late(self, what: str) -> None:
        """Likewise, found after the run."""
        self.lines.append(f"FAILED {what}")
        self.failures.append(what)

    def strike(self, kind: str, rank: int) -> None:
        """A rank is about to be ended."""
        self.struck.append((kind, rank, self.now()))
        self.note(f"{kind} rank {rank} while {self.doing}")
        self.counts[f"kill.{self.doing}"] += 1
        self.counts[f"kill.by_{kind}"] += 1

    def applied(self, rank: int, step: Step) -> str:
        """A rank prepares a step; returns the phase that it belongs to."""
        self._begin(step.epoch)
        chain = self.epochs[step.epoch][rank]
        digest = zlib.crc32(_encode(step), chain[-1] if chain else 0)
        chain.append(digest)
        self.lines.append(
            f"{self.now():.9f} rank {rank} applies {step.epoch}.{step.number} rows {step.rows} {digest:08x}"
        )
        if len(chain) != step.number + 1:
            self.fail(f"rank {rank} applied step {step.number} as its number {len(chain) - 1}")
        kinds = {type(item) for item in step.items}
        phase = "prefill" if Chunk in kinds else "decode" if Decode in kinds else "idle"
        if rank == 0:
            self.doing = phase if phase != "idle" else self.doing
            self.counts["steps"] += 1
            self.counts["steps.mixed"] += Chunk in kinds and Decode in kinds
            self.counts["steps.without_rows"] += not step.rows
        return phase
