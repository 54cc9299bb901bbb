"""The planner of custom pipelines: one step an input, in the order of arrival."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from pipelined.messages import NewInputs, Step, Submit

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pipelined.messages import ErrorInfo, PrefillProgress, RequestOutput, StageTimes, StepResult

__all__ = ["FifoPlanner"]


class FifoPlanner:
    """See `Planner`. Step n carries the n-th input of the epoch, so that tensors and steps match by number."""

    def __init__(self) -> None:
        self._epoch = 0
        self._number = 0
        self._in_flight = 0
        self._waiting: deque[int] = deque()
        self._cancelled: set[int] = set()

    def __repr__(self) -> str:
        return f"<FifoPlanner waiting={len(self._waiting)} in_flight={self._in_flight}>"

    def start(self, epoch: int, capacity: int | None) -> None:
        """Number from 0 again."""
        self._epoch, self._number, self._in_flight = epoch, 0, 0
        self._waiting.clear()
        self._cancelled.clear()

    def submit(self, request: NewInputs) -> None:
        """Queue inputs."""
        self._waiting.extend(request.ids)

    def cancel(self, id: int) -> None:
        """Let the input pass void if it has not been planned yet; its tensors are on the lane and must be taken."""
        if id in self._waiting:
            self._cancelled.add(id)

    def next_step(self, now_s: float) -> Step | None:
        """The step of the next input."""
        if not self._waiting:
            return None
        id = self._waiting.popleft()
        step = Step(self._epoch, self._number, 1, (Submit(id, id in self._cancelled),))
        self._cancelled.discard(id)
        self._number += 1
        self._in_flight += 1
        return step

    def apply(self, result: StepResult) -> None:
        """A step came home."""
        self._in_flight -= 1

    def observe(self, times: StageTimes) -> None:
        """Nothing to learn."""

    def news(self) -> Sequence[RequestOutput]:
        """None: outputs go from the last stage to the driver."""
        return ()

    def progress(self) -> Sequence[PrefillProgress]:
        """None: there are no prompts."""
        return ()

    def abandon(self, error: ErrorInfo) -> None:
        """Forget what waits; the driver fails it."""
        self._waiting.clear()
        self._cancelled.clear()

    def idle(self) -> bool:
        """Nothing waits, nothing is in flight."""
        return not self._waiting and not self._in_flight

    def integrity(self) -> Mapping[str, Any]:
        """Counts of what is held."""
        return {"waiting": len(self._waiting), "in_flight": self._in_flight, "cancelled": len(self._cancelled)}

    def stats(self) -> Mapping[str, Any]:
        """Nothing that `integrity` does not say."""
        return {}
