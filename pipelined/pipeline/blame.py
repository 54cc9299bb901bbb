"""Which rank was the first to go, of those that ended at about the same time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipelined.errors import PipelinedError, RankLostError, TransportError

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipelined.clock import Clock

__all__ = ["Blame"]

_BLAME_S = 0.1
"""Losing one rank makes its neighbours fail within moments: wait that long before deciding which was first."""

_BLAME_TRIES = 14


class Blame:
    """Hears of ranks that end, and names the cause once."""

    def __init__(
        self, clock: Clock, size: int, stage_name: Callable[[int], str], lose: Callable[[PipelinedError], None]
    ) -> None:
        """Args: stage_name: of a rank. lose: told of the cause."""
        self._clock = clock
        self._size = size
        self._stage_name = stage_name
        self._lose = lose
        self._ends: dict[int, BaseException | None] = {}
        self.over = False

    def __repr__(self) -> str:
        return f"<Blame {sorted(self._ends)} of {self._size} ended>"

    def ended(self, rank: int, error: BaseException | None) -> None:
        """A rank ended, or lost its links, because of `error`."""
        self._ends.setdefault(rank, error)
        if len(self._ends) == 1:
            self._clock.call_at(self._clock.now() + _BLAME_S, self._decide, _BLAME_TRIES)

    def _decide(self, tries: int) -> None:
        rank, error = end = min(self._ends.items(), key=_innocence)
        if tries and not self.over and _innocence(end)[0] == 2 and len(self._ends) < self._size:
            # Only neighbours so far: the cause may be in a rank that still closes.
            self._clock.call_at(self._clock.now() + _BLAME_S, self._decide, tries - 1)
        elif error is None:
            self._lose(RankLostError("ended before it was told to", rank=rank, stage=self._stage_name(rank)))
        elif isinstance(error, RankLostError):
            self._lose(RankLostError(error.reason, rank=rank, stage=self._stage_name(rank)))
        elif isinstance(error, PipelinedError):
            self._lose(error)
        else:
            self._lose(RankLostError(f"{type(error).__name__}: {error}", rank=rank, stage=self._stage_name(rank)))


def _innocence(end: tuple[int, BaseException | None]) -> tuple[int, int]:
    """The one that did not merely lose a neighbour comes first."""
    rank, error = end
    if isinstance(error, RankLostError):
        return (0, rank)
    if error is None or isinstance(error, TransportError):
        return (2, rank)
    return (1, rank)
