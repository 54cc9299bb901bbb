"""A trace: what all ranks recorded, on one time axis. Plain data."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pipelined.trace.base import Span

__all__ = ["RankTrace", "Trace", "Work", "parse_work"]


@dataclass(frozen=True)
class RankTrace:
    """What one rank recorded.

    Attributes:
        rank: Its number.
        label: What to call it: the stage's name, or "layers 0-14".
        spans: In any order.
        dropped: How many spans its ring buffer had to let go; then the trace begins later than the run.
    """

    rank: int
    label: str
    spans: Sequence[Span]
    dropped: int = 0

    def __repr__(self) -> str:
        return f"<RankTrace {self.rank} {self.label!r} spans={len(self.spans)}>"


@dataclass(frozen=True)
class Trace:
    """What all ranks of a pipeline recorded, in the order of its stages, by clocks that agree.

    Attributes:
        ranks: First stage first.
        started_s, ended_s: The time that is looked at; spans may reach over its ends.
        meta: Facts for the reader (model, transport, ...): builtins.
    """

    ranks: Sequence[RankTrace]
    started_s: float
    ended_s: float
    meta: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        ranks: Iterable[RankTrace],
        *,
        started_s: float | None = None,
        ended_s: float | None = None,
        meta: dict[str, Any] | None = None,
    ) -> Trace:
        """A trace of these ranks. Ends not given are those of the devices' work (of all spans if there is none)."""
        ordered = sorted(ranks, key=lambda rank: rank.rank)
        every = [span for rank in ordered for span in rank.spans]
        work = [span for span in every if span.track == "device"] or every
        if started_s is None:
            started_s = min((span.start_s for span in work), default=0.0)
        if ended_s is None:
            ended_s = max((span.end_s for span in work), default=started_s)
        return cls(ordered, started_s, max(started_s, ended_s), dict(meta or {}))

    @property
    def wall_s(self) -> float:
        """How long it lasted."""
        return self.ended_s - self.started_s

    def __repr__(self) -> str:
        spans = sum(len(rank.spans) for rank in self.ranks)
        return f"<Trace ranks={len(self.ranks)} spans={spans} wall={self.wall_s:.3f}s>"


@dataclass(frozen=True)
class Work:
    """One request's part in a forward, as told by the span's `detail`.

    Attributes:
        request: Whose it is, "" if that was not told.
        kind: "prefill", "decode", or whatever else was told.
        tokens: How many rows, 0 if unknown.
        prefix: How many tokens lie before them, -1 if unknown.
    """

    request: str
    kind: str
    tokens: int
    prefix: int = -1

    def __str__(self) -> str:
        parts = [f"#{self.request}"] if self.request else []
        if self.kind:
            parts.append(self.kind)
        if self.tokens:
            parts.append(f"{self.tokens}@{self.prefix}" if self.prefix >= 0 else str(self.tokens))
        return " ".join(parts)


_WORK: Final = re.compile(
    r"(?:#(?P<request>[^\s,+;]+)\s*)?(?P<kind>[A-Za-z_]+)?\s*(?:(?P<tokens>\d+)(?:@(?P<prefix>\d+))?)?"
)


def parse_work(detail: str | int) -> list[Work]:
    """What a forward worked on: `prefill 1024@2048`, `#7 prefill 1024@2048, #3 decode 1@90`, or a number of rows.

    Parts are separated by `,`, `;` or `+`. What is not understood is left out: this is for pictures, not for books.
    """
    if isinstance(detail, int):
        return [Work("", "", detail)] if detail > 0 else []
    found = []
    for part in re.split(r"\s*[,;+]\s*", detail.strip()):
        match = _WORK.fullmatch(part)
        if part and match is not None:
            tokens, prefix = match["tokens"], match["prefix"]
            found.append(
                Work(match["request"] or "", match["kind"] or "", int(tokens or 0), int(prefix) if prefix else -1)
            )
    return found
