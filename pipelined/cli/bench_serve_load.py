"""Requests for a server: where their prompts come from, when they are sent, and how long they took."""

from __future__ import annotations

import asyncio
import json
import random
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelined.cli.bench_serve_metrics import Outcome
from pipelined.errors import ConfigError, MissingDependencyError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import httpx2

__all__ = ["Load", "Sample", "arrivals_s", "file_samples", "http_client", "random_samples", "run_load"]

_CONNECT_S = 30.0
_OK = 200

_WORDS = ("the", "of", "and", "to", "in", "is", "that", "for", "it", "as", "was", "with", "be", "by", "on", "not")


@dataclass(frozen=True)
class Sample:
    """One request to be: its prompt (text or token ids), and how many tokens to ask for."""

    prompt: str | list[int]
    output_tokens: int


@dataclass(frozen=True)
class Load:
    """How to ask.

    Attributes:
        client, path: Where.
        chat: Prompts are messages.
        body: Fields of every request besides prompt and `max_tokens`.
        keep_text: Collect what is generated.
        max_concurrency: At most so many at a time; None: no bound.
    """

    client: httpx2.AsyncClient
    path: str
    chat: bool
    body: dict[str, Any]
    keep_text: bool = False
    max_concurrency: int | None = None


def http_client(
    base_url: str, headers: Mapping[str, str] | None = None, *, insecure: bool = False
) -> httpx2.AsyncClient:
    """A client for the server at `base_url`; to be closed. insecure: it takes any certificate.

    Raises:
        ConfigError: That is no base URL.
        MissingDependencyError: The library is not installed.
    """
    try:
        import httpx2
    except ImportError as error:
        raise MissingDependencyError("the HTTP client", "pip install 'pipelined[serve]'") from error
    try:
        url = httpx2.URL(base_url)
    except httpx2.InvalidURL as error:
        raise ConfigError(f"{base_url!r} is no base URL: {error}") from error
    if url.scheme not in ("http", "https") or not url.host:
        raise ConfigError(f"{base_url!r} is no base URL; expected http://HOST:PORT")
    return httpx2.AsyncClient(
        base_url=url,
        headers=headers,
        verify=not insecure,
        timeout=httpx2.Timeout(None, connect=_CONNECT_S),  # how long an answer takes is what is measured
        limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
        trust_env=False,
    )


def random_samples(
    count: int, input_tokens: int, output_tokens: int, spread: float, seed: int, *, vocab: int, text: bool
) -> list[Sample]:
    """Prompts of random tokens; lengths are even within `spread` of what is given (0.2: 20 % less to 20 % more).

    Args:
        count: How many.
        input_tokens: Mean length of the prompts.
        output_tokens: Mean length of the answers.
        spread: At least 0, less than 1.
        seed: Of everything random.
        vocab: Token ids are below that.
        text: Words instead of token ids; their number is the length.
    """
    if not 0 <= spread < 1:
        raise ConfigError(f"--random-range-ratio {spread}: expected at least 0, less than 1")
    draw = random.Random(seed)

    def length(mean: int) -> int:
        return max(1, draw.randint(round(mean * (1 - spread)), round(mean * (1 + spread))))

    samples = []
    for _ in range(count):
        size = length(input_tokens)
        prompt: Any = [draw.randrange(vocab) for _ in range(size)]
        if text:
            prompt = " ".join(draw.choice(_WORDS) for _ in range(size))
        samples.append(Sample(prompt, length(output_tokens)))
    return samples


def file_samples(name: str, count: int, output_tokens: int | None) -> list[Sample]:
    """From a file: JSON lines with a `prompt` (and perhaps `output_tokens`), or a list of ShareGPT conversations.

    Raises:
        ConfigError: It is neither.
    """
    try:
        text = Path(name).read_text(encoding="utf-8")
        entries = (
            json.loads(text) if text.lstrip().startswith("[") else [json.loads(line) for line in text.splitlines()]
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"the dataset {name!r} cannot be read: {error}") from error
    samples = []
    for number, entry in enumerate(entries):
        turns = entry.get("conversations", entry.get("conversation"))
        if turns is not None and len(turns) < 2:
            continue
        prompt = entry.get("prompt") if turns is None else turns[0]["value"]
        if prompt is None:
            raise ConfigError(f"entry {number} of {name!r} has neither a prompt nor conversations")
        known = entry.get("output_tokens") or (len(turns[1]["value"].split()) if turns else None)
        samples.append(Sample(prompt, output_tokens or known or 128))
        if len(samples) == count:
            return samples
    if not samples:
        raise ConfigError(f"the dataset {name!r} is empty")
    return [samples[number % len(samples)] for number in range(count)]


def arrivals_s(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """When each request is sent: at once with an infinite rate, else by a gamma process (burstiness 1: Poisson)."""
    if rate == float("inf"):
        return [0.0] * count
    if rate <= 0 or burstiness <= 0:
        raise ConfigError(f"--request-rate {rate}, --burstiness {burstiness}: expected more than 0")
    draw = random.Random(seed)
    at_s, found = 0.0, []
    for _ in range(count):
        found.append(at_s)
        at_s += draw.gammavariate(burstiness, 1 / (rate * burstiness))
    return found


async def run_load(
    load: Load, samples: Sequence[Sample], at_s: Sequence[float], on_end: Callable[[Outcome], None] | None = None
) -> tuple[list[Outcome], float]:
    """Send everything.

    Returns:
        The outcomes, in order, and how long it took, in seconds.
    """
    turn = asyncio.Semaphore(load.max_concurrency) if load.max_concurrency else nullcontext()
    begin_s = time.perf_counter()

    async def one(sample: Sample, due_s: float) -> Outcome:
        await asyncio.sleep(begin_s + due_s - time.perf_counter())
        asked_s = time.perf_counter()
        async with turn:
            outcome = await _ask(load, sample)
        outcome.queue_s = outcome.start_s - asked_s
        if on_end is not None:
            on_end(outcome)
        return outcome

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(sample, due_s)) for sample, due_s in zip(samples, at_s, strict=True)]
    return [task.result() for task in tasks], time.perf_counter() - begin_s


async def _ask(load: Load, sample: Sample) -> Outcome:
    import httpx2

    body = {**load.body, "max_tokens": sample.output_tokens}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    if load.chat:
        body["messages"] = [{"role": "user", "content": sample.prompt}]
    else:
        body["prompt"] = sample.prompt
    outcome = Outcome(start_s=time.perf_counter())
    events = _Events(outcome, keep_text=load.keep_text)
    try:
        async with load.client.stream("POST", load.path, json=body) as response:
            if response.status_code == _OK:
                async for data in response.aiter_raw():
                    events.hear(data)
            else:
                told = (await response.aread())[:500].decode("utf-8", "replace")
                outcome.error = f"status {response.status_code}: {told}"
    except httpx2.HTTPError as error:
        outcome.error = str(error) or type(error).__name__
        return outcome
    outcome.latency_s = time.perf_counter() - outcome.start_s
    events.end()
    return outcome


class _Events:
    """Times the events of a stream. Only the last ones are looked into, unless the text is to be kept."""

    def __init__(self, outcome: Outcome, *, keep_text: bool) -> None:
        self._outcome = outcome
        self._keep_text = keep_text
        self._rest = b""
        self._tail: list[bytes] = []
        self._latest_s = 0.0
        self._tokens = 0

    def hear(self, data: bytes) -> None:
        """What has come."""
        now_s = time.perf_counter()
        *blocks, self._rest = (self._rest + data).split(b"\n\n")
        for block in blocks:
            if not block.startswith(b"data: ") or block == b"data: [DONE]":
                continue
            self._tail = [*self._tail[-1:], block]
            if b'"choices":[]' in block or b'"error":' in block[:16] or b'"role":"assistant","content":""' in block:
                continue
            if self._keep_text:
                self._outcome.text += _text(json.loads(block[6:]))
            self._tokens += 1
            if self._tokens == 1:
                self._outcome.ttft_s = now_s - self._outcome.start_s
            else:
                self._outcome.itl_s.append(now_s - self._latest_s)
            self._latest_s = now_s

    def end(self) -> None:
        """All has come: counts, and what went wrong."""
        outcome = self._outcome
        outcome.output_tokens = self._tokens
        for block in self._tail:
            event = json.loads(block[6:])
            if "error" in event:
                outcome.error = str(event["error"].get("message", event["error"]))
            if event.get("usage"):
                outcome.prompt_tokens = event["usage"]["prompt_tokens"]
                outcome.output_tokens = event["usage"]["completion_tokens"]
        if not outcome.error and not self._tokens:
            outcome.error = "the stream held no token"


def _text(event: dict[str, Any]) -> str:
    choice = event["choices"][0]
    return str(choice.get("text") or choice.get("delta", {}).get("content") or "")
