"""What the engine returns: classes in the shape that vLLM's and SGLang's users know. Knows nothing of the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from pipelined.messages import TokenLogprob

__all__ = [
    "CompletionOutput",
    "Logprob",
    "Logprobs",
    "PromptLogprobs",
    "RequestMetrics",
    "RequestOutput",
    "logprobs_of",
    "prompt_logprobs_of",
]


@dataclass(frozen=True, slots=True)
class Logprob:
    """How likely the model held one token to be at one position.

    Attributes:
        logprob: Natural logarithm of its probability.
        rank: 1 for the most likely of all tokens; None where it is not known.
        decoded_token: The token as text, on its own; None without a tokenizer.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


Logprobs = list[dict[int, Logprob]]
"""One entry a generated token: the chosen token first, then the most likely ones, by token id."""

PromptLogprobs = list[dict[int, Logprob] | None]
"""One entry a prompt token. The first is None: nothing comes before it."""


@dataclass(slots=True)
class CompletionOutput:
    """One continuation of a prompt.

    Attributes:
        index: Which of the `n` continuations.
        text: What was generated, without the stop string; "" without a tokenizer.
        token_ids: What was generated, as token ids.
        logprobs: One entry a token, or None where none were asked for.
        cumulative_logprob: Sum over the chosen tokens, or None where no log-probabilities were asked for.
        finish_reason: "stop", "length" or "abort"; None while it is being generated.
        stop_reason: The stop string or the stop token's id that ended it; None where end-of-sequence or length did.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: Logprobs | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        """Whether nothing more will come."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """What one request took.

    Attributes:
        ttft_s: Seconds from submission to the first token; None before there is one.
        e2e_s: Seconds from submission to the end; None before that.
        cached_tokens: Prompt tokens whose KV was found in the prefix cache.
        chunks: Tokens of each prefill chunk, in order.
        preemptions: How often it lost its pages and was computed again.
    """

    ttft_s: float | None = None
    e2e_s: float | None = None
    cached_tokens: int = 0
    chunks: list[int] = field(default_factory=list)
    preemptions: int = 0


@dataclass(slots=True)
class RequestOutput:
    """A request and what has come of it so far.

    Attributes:
        request_id: Name of the request.
        prompt: Its text, None if it came as token ids.
        prompt_token_ids: Its token ids.
        outputs: The continuations, by index.
        finished: Whether all of them are complete.
        prompt_logprobs: One entry a prompt token, or None where none were asked for.
        metrics: What it took.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    prompt_logprobs: PromptLogprobs | None = None
    metrics: RequestMetrics = field(default_factory=RequestMetrics)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens whose KV was found in the prefix cache."""
        return self.metrics.cached_tokens


def logprobs_of(
    entries: Iterable[Sequence[TokenLogprob]], token_text: Callable[[int], str | None] | None = None
) -> Logprobs:
    """Log-probabilities as they came from the last stage, in the shape of the API.

    Args:
        entries: One a token: the chosen token first, then the most likely ones (which may name it again).
        token_text: Gives a token's text; None leaves `decoded_token` empty.
    """
    return [_entry(entry, token_text) for entry in entries]


def prompt_logprobs_of(
    entries: Iterable[Sequence[TokenLogprob]], token_text: Callable[[int], str | None] | None = None
) -> PromptLogprobs:
    """Likewise for a prompt: `entries` begin with its second token, the result with None for its first."""
    return [None, *(_entry(entry, token_text) for entry in entries)]


def _entry(entry: Sequence[TokenLogprob], token_text: Callable[[int], str | None] | None) -> dict[int, Logprob]:
    found: dict[int, Logprob] = {}
    for one in entry:
        if one.token not in found:
            text = token_text(one.token) if token_text is not None else None
            found[one.token] = Logprob(one.logprob, one.rank or None, text)
    return found
