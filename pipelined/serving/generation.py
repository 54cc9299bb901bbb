"""Runs requests on the engine for as long as somebody wants them, and streams what comes of them."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from starlette.responses import Response

from pipelined.llm.outputs import CompletionOutput, RequestOutput
from pipelined.serving.encoding import JsonResponse, encode
from pipelined.serving.problems import Problem, problem_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Sequence
    from contextlib import AbstractContextManager

    from starlette.types import Receive, Scope, Send

    from pipelined.llm import AsyncLLM
    from pipelined.llm.outputs import Logprobs
    from pipelined.messages import SamplingParams
    from pipelined.serving.protocol import GenerationRequest
    from pipelined.serving.state import ServerState

    Emit = Callable[[Any], Awaitable[None]]

__all__ = [
    "Answer",
    "Delta",
    "Deltas",
    "EventStream",
    "Job",
    "Progress",
    "Work",
    "follow",
    "respond",
    "usage",
    "while_wanted",
]

T = TypeVar("T")

Progress = tuple[int, int]
"""Prompt tokens computed so far, and how many must be."""

logger = logging.getLogger("pipelined.serving")

_BODY: Final = "http.response.body"
_FAULT: Final = 500
_TICK_S: Final = 1.0
_UNBUFFERED: Final = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


@dataclass(frozen=True)
class Job:
    """One prompt for the engine.

    Attributes:
        id: Name of the request.
        tokens: The prompt.
        params: As for the engine.
        text: The prompt as it was sent, if it was text.
    """

    id: str
    tokens: list[int]
    params: SamplingParams
    text: str | None = None


async def follow(
    engine: AsyncLLM,
    jobs: Sequence[Job],
    on_output: Callable[[int, RequestOutput], Awaitable[None]] | None = None,
    *,
    aborted: Callable[[], bool] = lambda: False,
) -> list[RequestOutput]:
    """Run all the jobs at once.

    Args:
        engine: Runs them.
        jobs: Prompts, checked already.
        aborted: Whether that was asked for before the engine knew of them.
        on_output: Called with a job's place and its output each time that it has grown; the next waits for it.

    Returns:
        The finished outputs, in order.
    """
    found: list[Any] = [None] * len(jobs)

    async def one(place: int, job: Job) -> None:
        if aborted():
            choices = [CompletionOutput(index, finish_reason="abort") for index in range(job.params.n)]
            found[place] = RequestOutput(job.id, job.text, job.tokens, choices, finished=True)
            if on_output is not None:
                await on_output(place, found[place])
            return
        async with aclosing(engine.generate(job.tokens, job.params, job.id, checked=True)) as outputs:
            async for output in outputs:
                found[place] = output
                if on_output is not None:
                    await on_output(place, output)

    if len(jobs) == 1:
        await one(0, jobs[0])
        return found
    try:
        async with asyncio.TaskGroup() as group:
            for place, job in enumerate(jobs):
                group.create_task(one(place, job), name=job.id)
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None  # one of the prompts failed: the request has
    return found


async def while_wanted(
    receive: Receive,
    work: Coroutine[Any, Any, T],
    timeout_s: float | None,
    beside: Coroutine[Any, Any, None] | None = None,
) -> T | None:
    """Do `work` unless the client goes away; `beside` runs meanwhile.

    Returns:
        What `work` returns; None: the client is gone, and `work` was cancelled.

    Raises:
        Problem: It took longer than `timeout_s`.
        Exception: Whatever `work` raises.
    """
    found: T | None = None
    failure: Exception | None = None

    async def run() -> None:
        nonlocal found, failure
        try:
            async with asyncio.timeout(timeout_s) as limit:
                found = await work
        except Exception as error:  # noqa: BLE001 - handed on below, without the group's wrapping
            failure = error
            if limit.expired():
                failure = Problem(504, f"the request took longer than the {timeout_s:g} s that it may", code="timeout")
        finally:
            for task in others:
                task.cancel()

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        worker.cancel()

    async with asyncio.TaskGroup() as group:
        worker = group.create_task(run())
        others = [group.create_task(each) for each in (watch(), beside) if each is not None]
    if failure is not None:
        raise failure
    return found


class Answer(Response):
    """One JSON object, made by `work` unless the client goes away before."""

    def __init__(
        self,
        work: Callable[[], Coroutine[Any, Any, Any]],
        admission: AbstractContextManager[None],
        *,
        timeout_s: float | None,
        extra_headers: dict[str, str],
    ) -> None:
        """Args: admission: Entered for as long as it takes; what it raises becomes the answer."""
        super().__init__()
        self._work = work
        self._admission = admission
        self._timeout_s = timeout_s
        self._extra_headers = extra_headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As an ASGI application."""
        with self._admission:
            body = await while_wanted(receive, self._work(), self._timeout_s)
        if body is not None:
            await JsonResponse(body, headers=self._extra_headers)(scope, receive, send)


class EventStream(Response):
    """Server-sent events, made by `work` while the client listens; `[DONE]` at the end.

    An error once the stream has begun is an event of its own (`{"error": ...}`). While there is nothing else to send,
    comments tell how far the prompt has been computed, or just that the connection lives.
    """

    def __init__(
        self,
        work: Callable[[Emit], Coroutine[Any, Any, None]],
        admission: AbstractContextManager[None],
        *,
        timeout_s: float | None,
        keep_alive_s: float,
        extra_headers: dict[str, str],
        progress: Callable[[], Progress | None] = lambda: None,
        progress_event: Callable[[Progress], Any] | None = None,
    ) -> None:
        """Describe.

        Args:
            work: Makes the events.
            admission: Entered for as long as it takes; what it raises before the stream begins is the answer.
            timeout_s: `work` may take that long.
            keep_alive_s: Interval of comments on a silent stream.
            extra_headers: Of the response.
            progress: How far the prompt is.
            progress_event: Makes an event of it, where the client wants that instead of comments.
        """
        super().__init__()
        sent = {"Content-Type": "text/event-stream; charset=utf-8", **_UNBUFFERED, **extra_headers}
        self._raw = [(name.lower().encode(), value.encode("latin-1", "replace")) for name, value in sent.items()]
        self._work = work
        self._admission = admission
        self._timeout_s = timeout_s
        self._keep_alive_s = keep_alive_s
        self._progress = progress
        self._progress_event = progress_event
        self._events = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As an ASGI application."""

        async def emit(event: Any) -> None:
            self._events += 1
            await send({"type": _BODY, "body": b"data: " + encode(event) + b"\n\n", "more_body": True})

        async def work() -> bool:
            await self._work(emit)
            return True

        with self._admission:
            await send({"type": "http.response.start", "status": 200, "headers": self._raw})
            try:
                if not await while_wanted(receive, work(), self._timeout_s, self._beats(send)):
                    return
            except Exception as error:  # told in the stream: its status has been sent
                problem = problem_of(error)
                if problem.status == _FAULT:
                    logger.error("a stream failed", exc_info=error)
                await emit(problem.body())
            await send({"type": _BODY, "body": b"data: [DONE]\n\n", "more_body": False})

    async def _beats(self, send: Send) -> None:
        """Whatever is to be said while the work is silent."""
        tick_s = min(_TICK_S, self._keep_alive_s)
        silent_s, told = 0.0, None
        while True:
            before = self._events
            await asyncio.sleep(tick_s)
            silent_s = silent_s + tick_s if self._events == before else 0.0
            progress = self._progress() if silent_s else None
            if progress is not None and progress != told:
                told = progress
                body = b": prefill %d of %d tokens\n\n" % progress
                if self._progress_event is not None:
                    body = b"data: " + encode(self._progress_event(progress)) + b"\n\n"
            elif silent_s >= self._keep_alive_s:
                body = b": still working\n\n"
            else:
                continue
            silent_s = 0.0
            await send({"type": _BODY, "body": body, "more_body": True})


class Work(Protocol):
    """A request of one kind: how it is answered whole, and event by event."""

    async def whole(self) -> Any:
        """The whole answer."""
        ...

    async def stream(self, emit: Emit) -> None:
        """All the events but the last."""
        ...

    def progress(self, progress: Progress) -> Any:
        """An event that tells how far the prompt is."""
        ...


def respond(server: ServerState, body: GenerationRequest, work: Work, request_id: str, sequences: int) -> Response:
    """Answer a request as it wants to be answered; it is let in once the answer begins."""
    admission = server.gate.admit(request_id, sequences)
    headers, timeout_s = {"X-Request-Id": request_id}, server.settings.request_timeout_s
    if not body.stream:
        return Answer(work.whole, admission, timeout_s=timeout_s, extra_headers=headers)
    options = body.stream_options
    return EventStream(
        work.stream,
        admission,
        timeout_s=timeout_s,
        keep_alive_s=server.settings.keep_alive_s,
        extra_headers=headers,
        progress=lambda: server.progress(request_id),
        progress_event=work.progress if options is not None and options.include_progress else None,
    )


@dataclass(frozen=True)
class Delta:
    """What is new of one continuation."""

    choice: CompletionOutput
    text: str
    token_ids: list[int]
    logprobs: Logprobs | None
    finished: bool


class Deltas:
    """Cuts a growing output into what is new since the last look."""

    def __init__(self, n: int) -> None:
        self._shown = [[0, 0, 0] for _ in range(n)]

    def of(self, output: RequestOutput) -> list[Delta]:
        """What each continuation has gained."""
        found = []
        for choice, shown in zip(output.outputs, self._shown, strict=True):
            characters, tokens, done = shown
            finished = choice.finished and not done
            if len(choice.token_ids) == tokens and len(choice.text) == characters and not finished:
                continue
            shown[:] = [len(choice.text), len(choice.token_ids), int(choice.finished)]
            logprobs = None if choice.logprobs is None else choice.logprobs[tokens:]
            found.append(Delta(choice, choice.text[characters:], choice.token_ids[tokens:], logprobs, finished))
        return found


def usage(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Tokens in and out, as OpenAI counts them: a prompt once, however many continuations it has."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    completion = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    cached = sum(output.metrics.cached_tokens for output in outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
