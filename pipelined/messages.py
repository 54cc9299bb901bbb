"""Every struct that crosses a socket, and nothing else.

All are msgspec structs: encoded as MessagePack, validated on decoding, never pickled. Knows nothing of transports,
planners or models. Token ids travel packed (`pack_tokens`), so that a prompt of a million tokens is 4 MB and one copy.
"""

from __future__ import annotations

import array
import math
import sys
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from pipelined import errors

__all__ = [
    "DRIVER",
    "Admit",
    "Cancel",
    "Chunk",
    "Decode",
    "ErrorInfo",
    "Failed",
    "Hello",
    "Item",
    "Outcome",
    "Outputs",
    "Peer",
    "Ping",
    "Pong",
    "PrefillProgress",
    "Query",
    "Ready",
    "Release",
    "Report",
    "Request",
    "RequestOutput",
    "Sampled",
    "SamplingParams",
    "StageTimes",
    "Start",
    "Started",
    "Step",
    "StepResult",
    "Stop",
    "Stopped",
    "Submit",
    "TensorHeader",
    "TokenLogprob",
    "pack_tokens",
    "unpack_tokens",
]

DRIVER: Final = -1
"""Rank number of the process that owns the pipeline and talks to it."""

PROTOCOL_VERSION: Final = 1


class Peer(msgspec.Struct, frozen=True, array_like=True, order=True):
    """One end of a link: a rank of a pipeline, or its driver (`rank == DRIVER`)."""

    pipeline: str
    rank: int

    def __str__(self) -> str:
        return f"{self.pipeline}/{'driver' if self.rank == DRIVER else self.rank}"


def pack_tokens(token_ids: list[int]) -> bytes:
    """Token ids as little-endian int32, back to back."""
    packed = array.array("i", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(packed: bytes) -> list[int]:
    """What `pack_tokens` packed.

    Raises:
        ProtocolError: The length is not a multiple of four.
    """
    if len(packed) % 4:
        raise errors.ProtocolError(f"packed token ids are {len(packed)} bytes, not a multiple of 4")
    tokens = array.array("i", packed)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens.tolist()


class ErrorInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """An exception, flattened so that it can be raised again on the other side."""

    kind: str
    message: str
    rank: int | None = None
    stage: str | None = None
    step: int | None = None
    lane: str | None = None
    traceback: str = ""

    @classmethod
    def of(cls, error: BaseException, traceback: str = "") -> ErrorInfo:
        """Flatten `error`, with its place if it has one."""
        return cls(
            kind=type(error).__name__,
            message=error.reason if isinstance(error, errors.RankError) else str(error),
            rank=getattr(error, "rank", None),
            stage=getattr(error, "stage", None),
            step=getattr(error, "step", None),
            lane=getattr(error, "lane", None),
            traceback=getattr(error, "remote_traceback", "") or traceback,
        )

    def exception(self) -> errors.PipelinedError:
        """The error again: its own class if it is one of ours, `StageError` otherwise."""
        found = getattr(errors, self.kind, None) if self.kind in errors.__all__ else None
        kind: type[errors.PipelinedError] = found if isinstance(found, type) else errors.StageError
        if issubclass(kind, errors.RankError):
            error: errors.RankError = kind(
                self.message,
                rank=self.rank,
                stage=self.stage,
                step=self.step,
                lane=self.lane,
                remote_traceback=self.traceback,
            )
            return error
        # Past `__init__`, whose arguments differ; `__new__` is its own where another exception is a base as well.
        plain: errors.PipelinedError = kind.__new__(kind, self.message)
        return plain


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the tokens of one request are chosen. Names and defaults are those of vLLM and SGLang.

    Attributes:
        n: Number of independent continuations.
        temperature: 0 is greedy.
        top_k: Keep the k most likely tokens; -1 or 0 keeps all.
        top_p: Keep the smallest set of tokens whose probability sums to at least this.
        min_p: Drop tokens less likely than this share of the most likely one.
        seed: Noise depends on (seed, choice, position) alone. None draws a fresh seed.
        repetition_penalty: Divides positive, multiplies negative logits of tokens in prompt or output (CTRL).
        presence_penalty: Subtracted once from logits of tokens in the output.
        frequency_penalty: Subtracted once per occurrence in the output.
        stop: Strings that end the text; not part of it.
        stop_token_ids: Tokens that end the output, besides the model's end-of-sequence tokens.
        max_tokens: Most tokens to generate.
        min_tokens: No end-of-sequence or stop token before that many.
        ignore_eos: Go on after the model's end-of-sequence tokens.
        logprobs: None: none; 0: of the chosen token; k: of the k most likely as well.
        prompt_logprobs: Likewise for every prompt token but the first.
        json_schema: The text is JSON that follows this schema (JSON text itself). Not with ignore_eos.
        regex: The whole text matches this regular expression. Likewise.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    max_tokens: int = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    json_schema: str | None = None
    regex: str | None = None

    @property
    def constrained(self) -> bool:
        """Whether a grammar says which tokens may come."""
        return self.json_schema is not None or self.regex is not None

    def __post_init__(self) -> None:
        # A single stop string and lists are what users write; inside, both are tuples.
        for field in ("stop", "stop_token_ids"):
            given = getattr(self, field)
            if not isinstance(given, tuple):
                msgspec.structs.force_setattr(
                    self, field, (given,) if isinstance(given, str | int) else tuple(given or ())
                )

    def check(self) -> None:
        """Refuse what is out of range.

        Raises:
            InvalidRequestError: Names the field, its value and the range.
        """
        try:
            # What is built in Python is not validated, and what does not fit would fail on the other side.
            msgspec.msgpack.decode(msgspec.msgpack.encode(self), type=SamplingParams)
        except (msgspec.ValidationError, TypeError, OverflowError) as error:
            raise errors.InvalidRequestError(f"a sampling parameter is of the wrong type: {error}") from None
        for field, ok, expected in self._rules():
            if not ok:
                given = getattr(self, field)
                raise errors.InvalidRequestError(f"{field}={given!r} is out of range: {expected}", param=field)

    def _rules(self) -> list[tuple[str, bool, str]]:
        repetition, all_logprobs = self.repetition_penalty, (self.logprobs, self.prompt_logprobs)
        return [
            ("n", 1 <= self.n <= 128, "expected 1 to 128"),
            ("temperature", 0 <= self.temperature < math.inf, "expected 0 or more"),
            ("top_k", self.top_k >= -1, "expected -1 (all), or 1 or more"),
            ("top_p", 0 < self.top_p <= 1, "expected more than 0, at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "expected 0 to 1"),
            ("seed", self.seed is None or 0 <= self.seed < 2**63, "expected 0 to 2**63 - 1"),
            ("repetition_penalty", 0 < repetition <= 100, "expected more than 0, at most 100"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "expected -2 to 2"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "expected -2 to 2"),
            ("stop", len(self.stop) <= 32 and all(self.stop), "expected at most 32 strings, none empty"),
            ("stop_token_ids", all(0 <= t < 2**31 for t in self.stop_token_ids), "expected token ids, 0 or more"),
            ("max_tokens", 1 <= self.max_tokens < 2**31, "expected 1 or more"),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, "expected 0 to max_tokens"),
            ("logprobs", all_logprobs[0] is None or 0 <= all_logprobs[0] <= 20, "expected None or 0 to 20"),
            ("regex", self.regex is None or self.json_schema is None, "expected a regex or a json_schema, not both"),
            (
                "ignore_eos",
                not (self.ignore_eos and self.constrained),
                "not with a json_schema or regex, which must end",
            ),
            ("prompt_logprobs", all_logprobs[1] is None or 0 <= all_logprobs[1] <= 20, "expected None or 0 to 20"),
        ]


# ---- steps: planned by rank 0, sent once to every rank, applied once and in order ----


class Submit(msgspec.Struct, frozen=True, tag="submit", array_like=True):
    """Custom pipelines: the input of that id passes through the stages. A cancelled one flows as a void step."""

    id: int
    cancelled: bool = False


class Admit(msgspec.Struct, frozen=True, tag="admit", array_like=True):
    """A sequence gets a slot on every rank: its tokens, and the pages of its cached prefix.

    Attributes:
        seq: The scheduler's number for it; never used twice in an epoch.
        tokens: Prompt and what was generated before (after a preemption), packed.
        prompt_tokens: How many of them are prompt.
        cached_tokens: Length of the prefix whose KV lies in `pages` already.
        pages: Page ids of that prefix, in order.
        sampling: Seed filled in.
        choice: Which of the n continuations.
        eos: End-of-sequence token ids of the model (empty with ignore_eos).
    """

    seq: int
    tokens: bytes
    prompt_tokens: int
    sampling: SamplingParams
    cached_tokens: int = 0
    pages: tuple[int, ...] = ()
    choice: int = 0
    eos: tuple[int, ...] = ()


class Chunk(msgspec.Struct, frozen=True, tag="chunk", array_like=True):
    """`tokens` tokens of an admitted sequence from position `start` on; `last` asks for the next token."""

    seq: int
    start: int
    tokens: int
    new_pages: tuple[int, ...] = ()
    last: bool = False


class Decode(msgspec.Struct, frozen=True, tag="decode", array_like=True):
    """Run `token` at `position` of an admitted sequence and sample the next one."""

    seq: int
    position: int
    token: int
    new_pages: tuple[int, ...] = ()


class Release(msgspec.Struct, frozen=True, tag="release", array_like=True):
    """The sequence's slot is over on every rank. Its pages may be written from the next step on."""

    seq: int


Item = Submit | Admit | Chunk | Decode | Release


class Step(msgspec.Struct, frozen=True, tag="step"):
    """The envelope of a plan.

    Attributes:
        epoch: Incarnation of the pipeline's links.
        number: Position in the epoch's order, from 0.
        rows: Rows of activations that flow for it (tokens for an LLM, 1 for a custom input); 0: nothing flows.
        items: What to do, in order.
    """

    epoch: int
    number: int
    rows: int
    items: tuple[Item, ...]

    @property
    def prefills(self) -> bool:
        """Whether a part of a prompt is computed in it."""
        return any(isinstance(item, Chunk) for item in self.items)

    def __repr__(self) -> str:
        return f"<Step {self.epoch}.{self.number} rows={self.rows} items={len(self.items)}>"


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Natural-log probability of a token, and its rank among all (1: the most likely)."""

    token: int
    logprob: float
    rank: int = 0


class Sampled(msgspec.Struct, frozen=True, tag="sampled", omit_defaults=True):
    """A token was chosen for `seq`. `logprobs` starts with the chosen token, then the most likely ones."""

    seq: int
    token: int
    logprobs: tuple[TokenLogprob, ...] = ()


class PromptLogprobs(msgspec.Struct, frozen=True, tag="prompt_logprobs"):
    """Log-probabilities of the prompt tokens from position `start` on, each entry as in `Sampled.logprobs`."""

    seq: int
    start: int
    entries: tuple[tuple[TokenLogprob, ...], ...]


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The step went wrong for `seq` alone."""

    seq: int
    error: ErrorInfo


Outcome = Sampled | PromptLogprobs | Failed


class StepResult(msgspec.Struct, frozen=True, tag="result", omit_defaults=True):
    """What the last stage reports of a step that flowed. `error`: the whole step is void."""

    epoch: int
    number: int
    outcomes: tuple[Outcome, ...] = ()
    error: ErrorInfo | None = None


class StageTimes(msgspec.Struct, frozen=True, tag="times"):
    """Measured forward times of a rank, (step number, seconds) each; sent in batches."""

    epoch: int
    rank: int
    times: tuple[tuple[int, float], ...]


class Ready(msgspec.Struct, frozen=True, tag="ready", omit_defaults=True):
    """A rank has set up its stage. `capacity`: units (pages) that it could hold, None where it does not matter."""

    epoch: int
    rank: int
    capacity: int | None = None
    error: ErrorInfo | None = None


class Start(msgspec.Struct, frozen=True, tag="start"):
    """All ranks are ready; the pipeline runs on this capacity, the minimum over the ranks."""

    epoch: int
    capacity: int | None = None


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """No more steps: those under way flow to the end, then each rank says `Stopped` and tears down."""

    epoch: int


class Stopped(msgspec.Struct, frozen=True, tag="stopped"):
    """Everything that this rank had to do and to say in the epoch is done and said."""

    epoch: int
    rank: int


class TensorHeader(msgspec.Struct, frozen=True, array_like=True):
    """Precedes each tensor on the wire.

    Attributes:
        epoch: Of the links. step, index: Which step, and which of its `count` tensors.
        rows: Rows of the step, to be held against the plan.
        name: Key in the payload; "" for a frame that carries only `meta`.
        shape: Sizes. dtype: Name as in torch, without the prefix.
        status: 0: data; 1: the step is void and `meta` holds an encoded `ErrorInfo`.
        meta: With index 0, the payload's builtins, encoded.
        logical_bytes: What a simulated link shall charge; 0: the real size.
    """

    epoch: int
    step: int
    index: int = 0
    count: int = 1
    rows: int = 0
    name: str = ""
    shape: tuple[int, ...] = ()
    dtype: str = "uint8"
    status: int = 0
    meta: bytes = b""
    logical_bytes: int = 0

    @property
    def seq(self) -> tuple[int, int]:
        """(step, index): what a receive is posted for."""
        return (self.step, self.index)


class Hello(msgspec.Struct, frozen=True):
    """First frame on every link. Both sides must agree on all of it but `me`."""

    version: int
    pipeline: str
    epoch: int
    me: Peer
    world: tuple[Peer, ...]
    secret: str = ""
    dtype: str = ""


# ---- between driver and rank 0 ----


class NewInputs(msgspec.Struct, frozen=True, tag="inputs"):
    """Custom pipelines: these inputs' tensors are under way on the HIDDEN lane, in this order."""

    ids: tuple[int, ...]


class Request(msgspec.Struct, frozen=True, tag="request", omit_defaults=True):
    """LLM: one sequence to complete. `seed` in `sampling` is filled in. `generated` resumes after a loss."""

    id: str
    tokens: bytes
    sampling: SamplingParams
    choice: int = 0
    eos: tuple[int, ...] = ()
    generated: bytes = b""


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """The owner no longer wants it. Unknown and finished ids are ignored."""

    id: str


class CancelInput(msgspec.Struct, frozen=True, tag="cancel_input"):
    """Custom pipelines: skip the stages for this input."""

    id: int


class Started(msgspec.Struct, frozen=True, tag="started"):
    """The pipeline runs, on that capacity."""

    epoch: int
    capacity: int | None = None


class StartFailed(msgspec.Struct, frozen=True, tag="start_failed"):
    """A rank could not set up."""

    epoch: int
    rank: int
    error: ErrorInfo


class RequestOutput(msgspec.Struct, frozen=True, omit_defaults=True):
    """News of one request. `finish_reason` ("stop", "length", "abort") or `error` comes with the last.

    Attributes:
        tokens: New ones, packed; the token that stopped it is among them.
        prompt_logprobs: All of them, with the first token.
        stop_token: The token that ended it, with "stop".
        cached_tokens, chunks: Of the prefill that led to the first token; with the first and the last news.
        prefilled_tokens: Run as chunks in all, recomputed ones too. preemptions: how many there were. Likewise.
    """

    id: str
    tokens: bytes = b""
    logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    prompt_logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    finish_reason: str | None = None
    stop_token: int | None = None
    error: ErrorInfo | None = None
    cached_tokens: int = 0
    prefilled_tokens: int = 0
    chunks: tuple[int, ...] = ()
    preemptions: int = 0


class PrefillProgress(msgspec.Struct, frozen=True, array_like=True):
    """Of `total` tokens that must be computed before the next token of a request, the first `done` are."""

    id: str
    done: int
    total: int


class Outputs(msgspec.Struct, frozen=True, tag="outputs", omit_defaults=True):
    """All the news of one applied result."""

    outputs: tuple[RequestOutput, ...]
    progress: tuple[PrefillProgress, ...] = ()


# ---- HEALTH lane: driver and any rank ----


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Are you alive? Answered by the loop, whatever the device does."""

    number: int


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    """Yes. `steps_done`: how many steps have left this rank, so that the asker sees progress.

    `heard`, `told`: messages that rank 0 has had from the driver, and `Outputs` that it has sent it: what is lost on
    the way without another behind it shows here alone.
    """

    number: int
    steps_done: int
    heard: int = 0
    told: int = 0


class Query(msgspec.Struct, frozen=True, tag="query"):
    """Ask a rank for what it knows of itself: `what` is "stats", "trace" or "integrity"."""

    number: int
    what: str


class Report(msgspec.Struct, frozen=True, tag="report"):
    """Answer to a `Query`: builtins, possibly in several parts."""

    number: int
    what: str
    body: Any
    more: bool = False


ToRank = Step | Start | Stop | NewInputs | Request | Cancel | CancelInput
"""What a rank may receive on the SCHEDULE lane."""

FromRank = StepResult | StageTimes | Ready | Stopped | Started | StartFailed | Outputs
"""What a rank may send on the RESULTS lane."""

HealthMessage = Ping | Pong | Query | Report
