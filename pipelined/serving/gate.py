"""How much work is let in: a bound on what waits, and when to come back. Knows nothing of HTTP or of the engine."""

from __future__ import annotations

import asyncio
import math
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pipelined.serving.problems import Problem

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Gate"]

_SMOOTHING = 0.2
_MOST_S = 120


class Gate:
    """Counts sequences from their admission to their end.

    Attributes:
        limit: Most sequences inside at a time.
        inside: How many there are.
        closed: Nobody is let in any more.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.inside = 0
        self.closed = False
        self._ids: dict[str, int] = {}
        self._aborted: set[str] = set()
        self._pace_s = 1.0
        self._ended_s: float | None = None

    def __repr__(self) -> str:
        return f"<Gate {self.inside}/{self.limit}{' closed' if self.closed else ''}>"

    @property
    def ids(self) -> tuple[str, ...]:
        """Names of the requests inside."""
        return tuple(self._ids)

    def sequences(self, request_id: str) -> int:
        """How many belong to a request; 0 if it is not inside."""
        return self._ids.get(request_id, 0)

    def abort(self, request_id: str) -> None:
        """Note that a request inside is not wanted any more."""
        if request_id in self._ids:
            self._aborted.add(request_id)

    def is_aborted(self, request_id: str) -> bool:
        """Whether that was noted."""
        return request_id in self._aborted

    def check(self, request_id: str, sequences: int) -> None:
        """Whether it could be let in now.

        Raises:
            Problem: 503, nobody is let in any more; 429 with `Retry-After`, too many are inside; 400, it alone is too
                large, or its name is taken.
        """
        if self.closed:
            raise Problem(503, "the server is shutting down", code="shutting_down", headers={"Retry-After": "10"})
        if sequences > self.limit:
            raise Problem(
                400, f"the request has {sequences} sequences; this server takes at most {self.limit} at a time"
            )
        if self.inside + sequences > self.limit:
            wait_s = self.retry_after_s(self.inside + sequences - self.limit)
            raise Problem(
                429,
                f"{self.inside} sequences run or wait, of {self.limit} at most; try again in about {wait_s} s",
                code="queue_full",
                headers={"Retry-After": str(wait_s)},
            )
        if request_id in self._ids:
            raise Problem(400, f"request id {request_id!r} is in use; choose another one", param="request_id")

    @contextmanager
    def admit(self, request_id: str, sequences: int) -> Iterator[None]:
        """Inside, it counts. Raises as `check` does."""
        self.check(request_id, sequences)
        self._ids[request_id] = sequences
        self.inside += sequences
        try:
            yield
        finally:
            del self._ids[request_id]
            self._aborted.discard(request_id)
            self.inside -= sequences
            self._ended(sequences)

    def retry_after_s(self, sequences: int) -> int:
        """Seconds until about that many will have ended, by the pace of late."""
        return max(1, min(_MOST_S, math.ceil(sequences * self._pace_s)))

    def _ended(self, sequences: int) -> None:
        now_s = asyncio.get_running_loop().time()
        if self._ended_s is not None:
            pace_s = (now_s - self._ended_s) / sequences
            self._pace_s += _SMOOTHING * (pace_s - self._pace_s)
        self._ended_s = now_s if self.inside else None
