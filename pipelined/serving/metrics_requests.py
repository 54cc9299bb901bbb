"""What becomes of requests, in numbers: counted as it happens, with integers only. Knows no Prometheus and no HTTP."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from pipelined.trace import Histogram

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipelined.llm.requests import LiveRequest
    from pipelined.messages import PrefillProgress, RequestOutput

__all__ = ["Finished", "RequestTally", "Watched"]

_TTFT_S: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0),
    *(80.0, 160.0, 640.0, 2560.0),
)
_ITL_S: Final = (0.002, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 1.0, 2.5, 5.0, 10.0)
_E2E_S: Final = (0.1, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)
_TOKENS: Final = tuple(float(factor * 10**power) for power in range(7) for factor in (1, 2, 5))
_CHUNK_TOKENS: Final = tuple(float(2**power) for power in range(4, 18))

_REMEMBERED: Final = 256
_PROBES: Final = "health-"
_TOKEN_BYTES: Final = 4


class Finished(NamedTuple):
    """A request that is over, for the list of late."""

    id: str
    reason: str
    prompt_tokens: int
    cached_tokens: int
    tokens: int
    ttft_s: float | None
    e2e_s: float


@dataclass(slots=True)
class Watched:
    """A request under way.

    Attributes:
        id: Its name.
        arrived_s: When it came, by the engine's clock. first_s: its first token, None before.
        prefill_done, prefill_total: Tokens that must be computed before its next one, and how many are.
        tokens: Generated so far, of all continuations.
    """

    id: str
    prompt_tokens: int
    sequences: int
    arrived_s: float
    prefill_total: int
    prefill_done: int = 0
    cached_tokens: int = 0
    first_s: float | None = None
    tokens: int = 0
    last_s: dict[int, float] = field(default_factory=dict)

    @property
    def phase(self) -> str:
        """What it is at: "waiting", "prefill" or "decode"."""
        if self.first_s is not None:
            return "decode"
        return "prefill" if self.prefill_done else "waiting"


class RequestTally:
    """A `RequestWatcher` that counts. What `/health_generate` asks for is not counted.

    Attributes:
        live: Requests under way, by the engine's key.
        ended_by: How many continuations ended, by "stop", "length", "abort" or "error".
        errors: How many requests failed, by the class of the error.
        on_progress: Called when a request's prefill has moved on. on_end: when it is over, with the reason.
    """

    def __init__(self) -> None:
        self.live: dict[str, Watched] = {}
        self.ttft_s, self.itl_s, self.e2e_s = Histogram(_TTFT_S), Histogram(_ITL_S), Histogram(_E2E_S)
        self.request_prompt_tokens, self.request_tokens = Histogram(_TOKENS), Histogram(_TOKENS)
        self.chunk_tokens = Histogram(_CHUNK_TOKENS)
        self.prompt_tokens = self.cached_tokens = self.generation_tokens = self.requests = 0
        self.ended_by: Counter[str] = Counter(stop=0, length=0, abort=0, error=0)
        self.errors: Counter[str] = Counter()
        self.finished: deque[Finished] = deque(maxlen=_REMEMBERED)
        self.recent_itl_s: deque[float] = deque(maxlen=4 * _REMEMBERED)
        self.on_progress: Callable[[Watched], None] = lambda _: None
        self.on_end: Callable[[Watched, str], None] = lambda _watched, _reason: None

    def __repr__(self) -> str:
        return f"<RequestTally {len(self.live)} of {self.requests} live>"

    # ---- as a watcher ----

    def arrived(self, live: LiveRequest, now_s: float) -> None:
        """See `RequestWatcher`."""
        if live.id.startswith(_PROBES):
            return
        self.requests += 1
        prompt = len(live.output.prompt_token_ids)
        self.live[live.key] = Watched(live.id, prompt, live.params.n, now_s, prompt)

    def progressed(self, live: LiveRequest, progress: PrefillProgress) -> None:
        """See `RequestWatcher`."""
        watched = self.live.get(live.key)
        if watched is not None:
            watched.prefill_done, watched.prefill_total = progress.done, progress.total
            self.on_progress(watched)

    def heard(self, live: LiveRequest, choice: int, news: RequestOutput, now_s: float) -> None:
        """See `RequestWatcher`."""
        watched = self.live.get(live.key)
        if watched is None or not news.tokens:
            return
        count = len(news.tokens) // _TOKEN_BYTES
        self.generation_tokens += count
        watched.tokens += count
        before_s = watched.last_s.get(choice)
        watched.last_s[choice] = now_s
        if before_s is not None:
            gap_s = (now_s - before_s) / count
            self.itl_s.add(gap_s, count)
            self.recent_itl_s.append(gap_s)
        elif watched.first_s is None:
            watched.first_s = now_s
            self.ttft_s.add(now_s - watched.arrived_s)
        if choice == 0 and before_s is None:
            self._prefilled(watched, live)

    def ended(self, live: LiveRequest, now_s: float) -> None:
        """See `RequestWatcher`."""
        watched = self.live.pop(live.key, None)
        if watched is None:
            return
        output, e2e_s = live.output, now_s - watched.arrived_s
        reasons = [choice.finish_reason or ("error" if live.error else "abort") for choice in output.outputs]
        self.ended_by.update(reasons)
        if live.error is not None:
            self.errors[type(live.error).__name__] += 1
        elif output.finished:
            self.e2e_s.add(e2e_s)
            self.request_tokens.add(watched.tokens)
        ttft_s = None if watched.first_s is None else watched.first_s - watched.arrived_s
        self.finished.append(
            Finished(
                watched.id, reasons[0], watched.prompt_tokens, watched.cached_tokens, watched.tokens, ttft_s, e2e_s
            )
        )
        self.on_end(watched, reasons[0])

    def _prefilled(self, watched: Watched, live: LiveRequest) -> None:
        """Its first token is there: what its prefill was like is known."""
        metrics = live.output.metrics
        watched.cached_tokens = metrics.cached_tokens
        watched.prefill_done = watched.prefill_total
        self.prompt_tokens += watched.prompt_tokens
        self.cached_tokens += metrics.cached_tokens
        self.request_prompt_tokens.add(watched.prompt_tokens)
        for tokens in metrics.chunks:
            self.chunk_tokens.add(tokens)
        self.on_progress(watched)
