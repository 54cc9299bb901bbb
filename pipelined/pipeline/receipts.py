"""Whether what one peer says it sent has reached the other.

A frame that is lost with none behind it shows in no other way: its lane looks idle, and whoever waits for it would wait
for ever.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipelined.errors import DeadlineError

if TYPE_CHECKING:
    from pipelined.messages import Pong

__all__ = ["DriverReceipts", "Receipts"]


class Receipts:
    """Counts of one lane, compared with every heartbeat."""

    def __init__(self, bound_s: float) -> None:
        """Args: bound_s: how long a frame may be under way."""
        self._bound_s = bound_s
        self._owed = 0
        self._since_s = 0.0

    def __repr__(self) -> str:
        return f"<Receipts owed={self._owed}>"

    def overdue(self, sent: int, received: int, now_s: float) -> bool:
        """Compare. Both counts never decrease; lanes are not in step, so that being behind for a while is normal.

        Args:
            sent: Frames posted, as far as is known.
            received: Frames taken in, of those.
            now_s: The clock.

        Returns:
            Whether a frame has been under way for longer than it may.
        """
        if received >= self._owed:
            self._owed = sent if received < sent else 0
            self._since_s = now_s
        return self._owed > received and now_s - self._since_s > self._bound_s


class DriverReceipts:
    """Between the driver and rank 0, both ways.

    Attributes:
        sent, heard: Messages to rank 0, and `Outputs` of it.
    """

    def __init__(self, bound_s: float) -> None:
        self.sent = 0
        self.heard = 0
        self._bound_s = bound_s
        self._requests, self._news = Receipts(bound_s), Receipts(bound_s)

    def missing(self, pong: Pong, now_s: float) -> DeadlineError | None:
        """What is overdue by what rank 0 says, if anything."""
        if self._requests.overdue(self.sent, pong.heard, now_s):
            who = "rank 0, lane SCHEDULE: a message of the driver"
        elif self._news.overdue(pong.told, self.heard, now_s):
            who = "driver, lane RESULTS: a message of rank 0"
        else:
            return None
        return DeadlineError(f"{who} did not arrive within {self._bound_s:g} s")
