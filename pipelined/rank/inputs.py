"""Posts the receives of a rank's inputs, ahead of their launches and in the order of the lane.

How many tensors a step has is known once its first one is there. A lane matches receives in the order of posting, so
the first receive of a step is posted once the last one of the step before it has been.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from pipelined.rank.payload import MAX_TENSORS

if TYPE_CHECKING:
    from pipelined.rank.flight import Flight
    from pipelined.transport import Received, TensorLink, Transfer

__all__ = ["Inputs"]


class Inputs:
    """Of one upstream link."""

    def __init__(self, link: TensorLink) -> None:
        self._link = link
        self._waiting: deque[Flight] = deque()
        self._head: Flight | None = None
        self._posting = False

    def __repr__(self) -> str:
        return f"<Inputs of {self._head}, {len(self._waiting)} waiting>"

    def expect(self, flight: Flight) -> None:
        """Receive the inputs of `flight` next. Its `transfers` are all there once the first of them is done."""
        self._waiting.append(flight)
        self._post()

    def _post(self) -> None:
        if self._posting:  # called back from within `post_recv`: the loop below goes on
            return
        self._posting = True
        try:
            while self._head is None and self._waiting:
                self._head = flight = self._waiting.popleft()
                transfer = self._link.post_recv((flight.step.number, 0))
                flight.transfers.append(transfer)
                transfer.add_done_callback(partial(self._came, flight))
        finally:
            self._posting = False

    def _came(self, flight: Flight, transfer: Transfer[Received]) -> None:
        if transfer.error is not None:  # whoever launches it raises that
            return
        number, count = flight.step.number, min(transfer.result().header.count, MAX_TENSORS)
        flight.transfers.extend(self._link.post_recv((number, index)) for index in range(1, count))
        self._head = None
        self._post()
