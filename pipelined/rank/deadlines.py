"""How long a wait on a peer that owes work may take."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipelined.errors import DeadlineError

if TYPE_CHECKING:
    from collections.abc import Awaitable
    from typing import TypeVar

    from pipelined.clock import Clock

    T = TypeVar("T")

__all__ = ["Deadlines"]

_SLACK = 20.0
"""How many times longer than the slowest step so far, for a window of steps queued before it."""


class Deadlines:
    """A floor, plus a multiple of the time that the steps in flight took here so far, scaled by rows."""

    def __init__(self, clock: Clock, floor_s: float, window: int) -> None:
        self._clock = clock
        self._floor_s = floor_s
        self._window = window
        self._slowest_s = 0.0

    def saw(self, seconds: float) -> None:
        """A step took that long on this rank."""
        self._slowest_s = max(self._slowest_s, seconds)

    @property
    def timeout_s(self) -> float:
        """How long the next wait may take."""
        return self._floor_s + _SLACK * self._window * self._slowest_s

    async def wait(self, what: Awaitable[T], who: str) -> T:
        """Await `what`.

        Raises:
            DeadlineError: It took too long; says who waited for what.
        """
        timeout_s = self.timeout_s
        try:
            async with self._clock.timeout(timeout_s):
                return await what
        except TimeoutError as error:
            if isinstance(error, DeadlineError):
                raise
            raise DeadlineError(f"{who} did not come within {timeout_s:g} s") from error
