"""What rank 0 needs of a planner. Planners are plain synchronous Python: no asyncio, no torch, no I/O."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pipelined.messages import ErrorInfo, PrefillProgress, RequestOutput, StageTimes, Step, StepResult

__all__ = ["Planner"]


class Planner(Protocol):
    """Decides what every rank does, step by step. Only rank 0 has one."""

    def start(self, epoch: int, capacity: int | None) -> None:
        """All ranks are ready. Called once an epoch; drops everything of the last one."""
        ...

    def submit(self, request: Any) -> None:
        """A message of the driver's that is meant for the planner: `Request` or `NewInputs`.

        A bad request does not raise: its error comes out of `news`.
        """
        ...

    def cancel(self, id: Any) -> None:
        """The owner no longer wants it. Unknown ids are ignored."""
        ...

    def next_step(self, now_s: float) -> Step | None:
        """The next step, if there is anything to do now. Called while fewer than W steps are in flight."""
        ...

    def apply(self, result: StepResult) -> None:
        """What became of a step; called once for every step with rows, in order."""
        ...

    def observe(self, times: StageTimes) -> None:
        """Measured stage times, for planners that learn from them."""
        ...

    def news(self) -> Sequence[RequestOutput]:
        """What the driver must be told since the last call."""
        ...

    def progress(self) -> Sequence[PrefillProgress]:
        """How far long prompts have come since the last call."""
        ...

    def abandon(self, error: ErrorInfo) -> None:
        """The epoch is over because of `error`: everything unfinished ends with it (see `news`)."""
        ...

    def idle(self) -> bool:
        """Nothing is owed to anybody."""
        ...

    def integrity(self) -> Mapping[str, int]:
        """Counts of what is held; all zero when idle. Raises AssertionError if the books do not balance."""
        ...

    def stats(self) -> Mapping[str, Any]:
        """Facts worth reporting: counts since `start`, how good predictions are, ..."""
        ...
