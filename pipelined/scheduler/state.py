"""One request's record, and the rules by which it ends. Knows nothing of other requests."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from pipelined.errors import InvalidRequestError

if TYPE_CHECKING:
    from pipelined.kv import Node
    from pipelined.messages import Request, TokenLogprob
    from pipelined.scheduler.config import SchedulerConfig

__all__ = ["NO_SEQ", "Phase", "RequestState", "check_request"]

NO_SEQ = -1
TOKEN_BYTES = 4


class Phase(enum.Enum):
    """Where a request stands."""

    WAITING = "waiting"  # holds nothing
    FOLLOWING = "following"  # waits for the prefill of the same prompt by another request
    PREFILL = "prefill"  # admitted; its next token is not known yet
    DECODE = "decode"  # admitted; its last token is to be run, or being run
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class RequestState:
    """What the scheduler knows of a request.

    Attributes:
        request: As submitted.
        arrival: Place in the order of submission; kept through preemptions.
        limit: Most tokens that it may have in all, by context and capacity.
        tokens: Prompt and output so far, packed as int32.
        seq: Its number on the ranks while it is admitted, `NO_SEQ` otherwise.
        planned: Tokens whose KV is computed by steps planned so far.
        computed: Tokens whose KV is known to be computed.
        pages: Its page table. lock: what it holds of the radix tree.
        followers: Requests that wait for its prefill. leader: whose prefill it waits for.
        refused_at: Version of the books when there was no room for it.
        delivered: Whether the user has tokens of it; what is told of its prefill is then settled.
    """

    request: Request
    arrival: int
    limit: int
    prompt_tokens: int
    tokens: bytearray
    stops: frozenset[int]
    phase: Phase = Phase.WAITING
    seq: int = NO_SEQ
    planned: int = 0
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    lock: Node | None = None
    followers: list[RequestState] = field(default_factory=list)
    leader: RequestState | None = None
    refused_at: int | None = None
    cached_tokens: int = 0
    prefilled_tokens: int = 0
    chunks: list[int] = field(default_factory=list)
    preemptions: int = 0
    delivered: bool = False
    prompt_logprobs: list[tuple[TokenLogprob, ...]] = field(default_factory=list)

    @classmethod
    def of(cls, request: Request, arrival: int, limit: int) -> RequestState:
        """A record of a request that was checked."""
        sampling = request.sampling
        stops = frozenset(sampling.stop_token_ids) | frozenset(() if sampling.ignore_eos else request.eos)
        return cls(
            request=request,
            arrival=arrival,
            limit=limit,
            prompt_tokens=len(request.tokens) // TOKEN_BYTES,
            tokens=bytearray(request.tokens + request.generated),
            stops=stops,
            delivered=bool(request.generated),
        )

    @property
    def total_tokens(self) -> int:
        """Prompt and output so far."""
        return len(self.tokens) // TOKEN_BYTES

    @property
    def last_token(self) -> int:
        """The newest token."""
        return int.from_bytes(self.tokens[-TOKEN_BYTES:], "little", signed=True)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of its prompt are still owed."""
        return self.request.sampling.prompt_logprobs is not None and not self.delivered

    def append(self, token: int) -> None:
        """A token was chosen."""
        self.tokens += token.to_bytes(TOKEN_BYTES, "little", signed=True)

    def ending(self) -> str | None:
        """Why its newest token was its last one: "stop", "length" or None."""
        total = self.total_tokens
        generated = total - self.prompt_tokens
        if generated and self.stops and self.last_token in self.stops:
            return "stop"
        if generated >= self.request.sampling.max_tokens or total >= self.limit:
            return "length"
        return None


def check_request(request: Request, config: SchedulerConfig, capacity_tokens: int) -> None:
    """Refuse what can never be served.

    Raises:
        InvalidRequestError: Says what is wrong, with the numbers.
    """
    request.sampling.check()
    if len(request.tokens) % TOKEN_BYTES or len(request.generated) % TOKEN_BYTES:
        raise InvalidRequestError("packed token ids are not a multiple of 4 bytes; pack them with pack_tokens")
    prompt = len(request.tokens) // TOKEN_BYTES
    if not prompt:
        raise InvalidRequestError("the prompt is empty; give it at least one token")
    if prompt + 1 > config.context_length:
        raise InvalidRequestError(
            f"the prompt has {prompt} tokens, and with one token of output exceeds the context length of "
            f"{config.context_length}; shorten it to {config.context_length - 1} or fewer"
        )
    if prompt + 1 > capacity_tokens:
        raise InvalidRequestError(
            f"the prompt has {prompt} tokens, and with one token of output exceeds the KV cache of {capacity_tokens} "
            f"tokens ({capacity_tokens // config.page_size} pages of {config.page_size}); shorten it to "
            f"{capacity_tokens - 1} or fewer, or give the cache more memory"
        )
    for name, packed in (("prompt", request.tokens), ("generated", request.generated)):
        ids = np.frombuffer(packed, dtype="<i4")
        if ids.size and (ids.min() < 0 or ids.max() >= config.vocab_size):
            bad = int(ids[(ids < 0) | (ids >= config.vocab_size)][0])
            raise InvalidRequestError(f"{name} has token id {bad}; expected 0 to {config.vocab_size - 1}")
