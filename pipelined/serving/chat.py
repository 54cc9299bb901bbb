"""`/v1/chat/completions`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from pipelined.clock import off_loop
from pipelined.errors import InvalidRequestError
from pipelined.serving.conversation import rendered
from pipelined.serving.generation import Deltas, Job, follow, respond, usage
from pipelined.serving.logprobs import chat_logprobs
from pipelined.serving.params import sampling_params
from pipelined.serving.protocol import ChatRequest
from pipelined.serving.state import RESPONSES, Server, ServerState, calendar_s
from pipelined.serving.tools import ToolPlan

if TYPE_CHECKING:
    from pipelined.llm import RequestOutput
    from pipelined.llm.outputs import CompletionOutput
    from pipelined.serving.generation import Delta, Emit, Progress
    from pipelined.serving.tools import ToolStream

__all__ = ["router"]

router = APIRouter(tags=["chat"])


@router.post("/v1/chat/completions", response_class=Response, responses=RESPONSES)
async def chat_completions(body: ChatRequest, request: Request, server: Server) -> Response:
    """Answer a conversation."""
    model = server.check_model(body.model)
    request_id = server.request_id(request, "chatcmpl-")
    server.gate.check(request_id, body.n or 1)
    chat = _Chat(server, body, request_id, model)
    await chat.prepare()
    return respond(server, body, chat, request_id, chat.job.params.n)


class _Chat:
    """One request: its job on the engine, and the shape of its answers."""

    job: Job

    def __init__(self, server: ServerState, body: ChatRequest, request_id: str, model: str) -> None:
        self._server = server
        self._body = body
        self._id = request_id
        self._head = {"id": request_id, "created": calendar_s(), "model": model}
        self._tools = ToolPlan.none()

    async def prepare(self) -> None:
        """Check everything that can be checked before the engine is asked.

        Raises:
            InvalidRequestError: What is wrong.
        """
        body, server = self._body, self._server
        tokenizer = server.engine.tokenizer
        if body.top_logprobs is not None and not body.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs=true", param="top_logprobs")
        if body.chat_template and not server.settings.trust_request_chat_template:
            raise InvalidRequestError(
                "this server takes no chat template from requests (--trust-request-chat-template)",
                param="chat_template",
            )
        self._tools = ToolPlan.of(body, tokenizer, server.settings)
        tokens = await off_loop(lambda: rendered(tokenizer, body, server.settings, tools=self._tools.described))
        params = sampling_params(
            body,
            max_tokens=self._most_tokens(len(tokens)),
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            **self._tools.constraint,
        )
        self.job = Job(self._id, await server.engine.checked(tokens, params), params)

    def _most_tokens(self, prompt_tokens: int) -> int:
        """As asked for; else what the context has room for."""
        body = self._body
        given = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        return given if given is not None else max(1, self._server.engine.info.context_length - prompt_tokens)

    def _aborted(self) -> bool:
        return self._server.gate.is_aborted(self._id)

    # ---- whole ----

    async def whole(self) -> dict[str, Any]:
        """Everything at once."""
        output = (await follow(self._server.engine, [self.job], aborted=self._aborted))[0]
        choices = [self._choice(choice) for choice in output.outputs]
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": usage([output])}

    def _choice(self, choice: CompletionOutput) -> dict[str, Any]:
        content, calls = self._tools.parse(choice.text)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message["tool_calls"] = calls
        found = {
            "index": choice.index,
            "message": message,
            "logprobs": self._logprobs(choice.logprobs, choice.token_ids),
            "finish_reason": "tool_calls" if calls and choice.finish_reason == "stop" else choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self._body.return_token_ids:
            found |= {"token_ids": choice.token_ids, "prompt_token_ids": self.job.tokens}
        return found

    def _logprobs(self, entries: Any, tokens: list[int]) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        as_ids = bool(self._body.return_tokens_as_token_ids)
        return chat_logprobs(entries or [], tokens, self._body.top_logprobs or 0, as_ids=as_ids)

    # ---- stream ----

    def progress(self, progress: Progress) -> dict[str, Any]:
        """An event between the others, for clients that want to know how far the prompt is."""
        done, total = progress
        return {
            **self._head,
            "object": "chat.completion.chunk",
            "choices": [],
            "progress": {"done": done, "total": total},
        }

    async def stream(self, emit: Emit) -> None:
        """Event by event."""
        head = {**self._head, "object": "chat.completion.chunk"}
        options = self._body.stream_options
        told: dict[str, Any] = {"usage": None} if options is not None and options.include_usage else {}
        deltas, n = Deltas(self.job.params.n), self.job.params.n
        streams = [self._tools.stream() for _ in range(n)]
        begun: set[int] = set()

        async def on_output(_place: int, output: RequestOutput) -> None:
            for delta in deltas.of(output):
                index = delta.choice.index
                if index not in begun:
                    begun.add(index)
                    await emit({**head, "choices": [_opening(index)], **told})
                if options is not None and options.include_usage and options.continuous_usage_stats:
                    told["usage"] = usage([output])
                await emit({**head, "choices": [self._piece(delta, streams[index])], **told})

        outputs = await follow(self._server.engine, [self.job], on_output, aborted=self._aborted)
        if options is not None and options.include_usage:
            await emit({**head, "choices": [], "usage": usage(outputs)})

    def _piece(self, delta: Delta, stream: ToolStream) -> dict[str, Any]:
        content, calls = stream.push(delta.text, last=delta.finished)
        said: dict[str, Any] = {}
        if calls:
            said["tool_calls"] = calls
        if content or not calls:
            said["content"] = content
        reason = delta.choice.finish_reason if delta.finished else None
        found = {
            "index": delta.choice.index,
            "delta": {} if delta.finished and not content and not calls else said,
            "logprobs": self._logprobs(delta.logprobs, delta.token_ids),
            "finish_reason": "tool_calls" if reason == "stop" and stream.called else reason,
            "stop_reason": delta.choice.stop_reason if delta.finished else None,
        }
        if self._body.return_token_ids:
            found["token_ids"] = delta.token_ids
        return found


def _opening(index: int) -> dict[str, Any]:
    opening = {"role": "assistant", "content": ""}
    return {"index": index, "delta": opening, "logprobs": None, "finish_reason": None, "stop_reason": None}
