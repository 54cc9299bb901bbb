"""`/v1/completions`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from pipelined.errors import InvalidRequestError
from pipelined.serving.generation import Deltas, Job, follow, respond, usage
from pipelined.serving.logprobs import CompletionLogprobs
from pipelined.serving.params import sampling_params
from pipelined.serving.protocol import CompletionRequest
from pipelined.serving.state import RESPONSES, Server, ServerState, calendar_s

if TYPE_CHECKING:
    from pipelined.llm import RequestOutput
    from pipelined.llm.outputs import CompletionOutput
    from pipelined.serving.generation import Delta, Emit, Progress

__all__ = ["router"]

router = APIRouter(tags=["completions"])


@router.post("/v1/completions", response_class=Response, responses=RESPONSES)
async def completions(body: CompletionRequest, request: Request, server: Server) -> Response:
    """Complete a prompt, or several."""
    model = server.check_model(body.model)
    request_id = server.request_id(request, "cmpl-")
    prompts = _prompts(body)
    server.gate.check(request_id, len(prompts) * (body.n or 1))
    completion = _Completion(server, body, request_id, model)
    await completion.prepare(prompts)
    return respond(server, body, completion, request_id, sum(job.params.n for job in completion.jobs))


def _prompts(body: CompletionRequest) -> list[Any]:
    prompt: Any = body.prompt
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        return [prompt]
    if not prompt:
        raise InvalidRequestError("the prompt is empty; expected at least one token", param="prompt")
    return list(prompt)


class _Completion:
    """One request: its jobs on the engine, and the shape of its answers."""

    def __init__(self, server: ServerState, body: CompletionRequest, request_id: str, model: str) -> None:
        self._server = server
        self._body = body
        self._head = {"id": request_id, "object": "text_completion", "created": calendar_s(), "model": model}
        self._as_ids = bool(body.return_tokens_as_token_ids)
        self.jobs: list[Job] = []

    async def prepare(self, prompts: list[Any]) -> None:
        """Check everything that can be checked before the engine is asked.

        Raises:
            InvalidRequestError: What is wrong.
        """
        body, engine = self._body, self._server.engine
        if body.suffix:
            raise InvalidRequestError("suffix is not supported; leave it out", param="suffix")
        if body.best_of is not None and body.best_of != (body.n or 1):
            raise InvalidRequestError(f"best_of={body.best_of} is not supported; use n", param="best_of")
        max_tokens = body.max_tokens
        if max_tokens == 0 and body.echo:
            max_tokens = 1  # the prompt's log-probabilities alone: what comes behind is left out
        prompt_logprobs = body.logprobs if body.echo else None
        params = sampling_params(
            body,
            max_tokens=max_tokens,
            logprobs=body.logprobs,
            prompt_logprobs=prompt_logprobs,
        )
        request_id = self._head["id"]
        for number, prompt in enumerate(prompts):
            tokens = await engine.checked(prompt, params)
            name = f"{request_id}-{number}" if len(prompts) > 1 else str(request_id)
            self.jobs.append(Job(name, tokens, params, prompt if isinstance(prompt, str) else None))

    def _aborted(self) -> bool:
        return self._server.gate.is_aborted(str(self._head["id"]))

    # ---- whole ----

    async def whole(self) -> dict[str, Any]:
        """Everything at once."""
        outputs = await follow(self._server.engine, self.jobs, aborted=self._aborted)
        choices = [
            self._choice(place * job.params.n + choice.index, job, output, choice)
            for place, (job, output) in enumerate(zip(self.jobs, outputs, strict=True))
            for choice in output.outputs
        ]
        counts = usage(outputs)
        if self._body.max_tokens == 0:
            counts |= {"completion_tokens": 0, "total_tokens": counts["prompt_tokens"]}
        return {**self._head, "choices": choices, "usage": counts}

    def _choice(self, index: int, job: Job, output: RequestOutput, choice: CompletionOutput) -> dict[str, Any]:
        body = self._body
        tokens, text, entries = list(choice.token_ids), choice.text, list(choice.logprobs or [])
        if body.max_tokens == 0:
            tokens, text, entries = [], "", []
        found: dict[str, Any] = {
            "index": index,
            "text": self._echoed(job) + text,
            "logprobs": None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if body.logprobs is not None:
            known = [*(output.prompt_logprobs or []), *entries] if body.echo else entries
            shown = [*job.tokens, *tokens] if body.echo else tokens
            found["logprobs"] = self._logprobs().of(known, shown)
        if body.return_token_ids:
            found |= {"token_ids": tokens, "prompt_token_ids": job.tokens}
        return found

    def _echoed(self, job: Job) -> str:
        if not self._body.echo:
            return ""
        return job.text if job.text is not None else self._server.engine.tokenizer.decode(job.tokens)

    def _logprobs(self) -> CompletionLogprobs:
        return CompletionLogprobs(self._server.engine.tokenizer.token_text, as_ids=self._as_ids)

    # ---- stream ----

    def progress(self, progress: Progress) -> dict[str, Any]:
        """An event between the others, for clients that want to know how far the prompt is."""
        done, total = progress
        return {**self._head, "choices": [], "progress": {"done": done, "total": total}}

    async def stream(self, emit: Emit) -> None:
        """Event by event."""
        options = self._body.stream_options
        deltas = [Deltas(job.params.n) for job in self.jobs]
        logprobs = [[self._logprobs() for _ in range(job.params.n)] for job in self.jobs]
        begun: set[int] = set()
        latest: list[RequestOutput | None] = [None] * len(self.jobs)

        async def on_output(place: int, output: RequestOutput) -> None:
            latest[place] = output
            job = self.jobs[place]
            for delta in deltas[place].of(output):
                index = place * job.params.n + delta.choice.index
                first = index not in begun
                begun.add(index)
                choice = self._piece(index, job, output, delta, logprobs[place][delta.choice.index], first=first)
                event = {**self._head, "choices": [choice]}
                if options is not None and options.include_usage:
                    now = [one for one in latest if one is not None]
                    event["usage"] = usage(now) if options.continuous_usage_stats else None
                await emit(event)

        outputs = await follow(self._server.engine, self.jobs, on_output, aborted=self._aborted)
        if options is not None and options.include_usage:
            await emit({**self._head, "choices": [], "usage": usage(outputs)})

    def _piece(
        self,
        index: int,
        job: Job,
        output: RequestOutput,
        delta: Delta,
        logprobs: CompletionLogprobs,
        *,
        first: bool,
    ) -> dict[str, Any]:
        body = self._body
        silent = body.max_tokens == 0
        tokens, text, entries = delta.token_ids, delta.text, delta.logprobs or []
        if silent:
            tokens, text, entries = [], "", []
        if first and body.echo:
            text = self._echoed(job) + text
        found: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": None,
            "finish_reason": delta.choice.finish_reason if delta.finished else None,
            "stop_reason": delta.choice.stop_reason if delta.finished else None,
        }
        if body.logprobs is not None:
            before = first and bool(body.echo)
            known = [*(output.prompt_logprobs or []), *entries] if before else entries
            found["logprobs"] = logprobs.of(known, [*job.tokens, *tokens] if before else tokens)
        if body.return_token_ids:
            found["token_ids"] = tokens
            if first:
                found["prompt_token_ids"] = job.tokens
        return found
