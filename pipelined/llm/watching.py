"""Who looks at what becomes of requests: metrics, progress, logs. Knows none of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from pipelined.llm.requests import LiveRequest
    from pipelined.messages import PrefillProgress, RequestOutput

__all__ = ["RequestWatcher"]


class RequestWatcher(Protocol):
    """Called by the engine, on its loop, at once and in order. Must be quick, and must not raise."""

    def arrived(self, live: LiveRequest, now_s: float) -> None:
        """A request was taken."""
        ...

    def progressed(self, live: LiveRequest, progress: PrefillProgress) -> None:
        """A part of a long prompt has been computed; of as many continuations as there are, each tells."""
        ...

    def heard(self, live: LiveRequest, choice: int, news: RequestOutput, now_s: float) -> None:
        """There is news of a continuation: tokens, its end, or an error. The output has it already."""
        ...

    def ended(self, live: LiveRequest, now_s: float) -> None:
        """Nobody works on it any more: it is finished, has failed, or its owner has gone away."""
        ...
