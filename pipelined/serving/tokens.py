"""`/tokenize` and `/detokenize`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from pipelined.clock import off_loop
from pipelined.errors import InvalidRequestError
from pipelined.serving.conversation import rendered
from pipelined.serving.protocol import ChatRequest, DetokenizeRequest, TokenizeRequest
from pipelined.serving.state import ERRORS, Server, ServerState
from pipelined.serving.tools import described_tools

__all__ = ["router"]

router = APIRouter(tags=["tokens"], responses=ERRORS)


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, server: Server) -> dict[str, Any]:
    """A text's token ids, or a conversation's."""
    server.check_model(body.model)
    tokenizer = server.engine.tokenizer
    tokens = await off_loop(lambda: _tokens(body, server))
    found: dict[str, Any] = {
        "count": len(tokens),
        "max_model_len": server.engine.info.context_length,
        "tokens": tokens,
        "token_strs": None,
    }
    if body.return_token_strs:
        found["token_strs"] = await off_loop(lambda: [tokenizer.token_text(token) for token in tokens])
    return found


def _tokens(body: TokenizeRequest, server: ServerState) -> list[int]:
    tokenizer = server.engine.tokenizer
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("expected a prompt or messages, one of them", param="prompt")
    if body.messages is None:
        return tokenizer.encode(body.prompt or "", add_special_tokens=body.add_special_tokens is not False)
    if not body.messages:
        raise InvalidRequestError("the conversation is empty; send at least one message", param="messages")
    chat = ChatRequest.model_construct(
        messages=body.messages,
        add_generation_prompt=body.add_generation_prompt,
        chat_template_kwargs=body.chat_template_kwargs,
    )
    return rendered(tokenizer, chat, server.settings, tools=described_tools(body.tools))


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, server: Server) -> dict[str, Any]:
    """The text of token ids."""
    server.check_model(body.model)
    vocab_size = server.engine.info.vocab_size
    wrong = next((token for token in body.tokens if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise InvalidRequestError(f"token id {wrong} is out of range; expected 0 to {vocab_size - 1}", param="tokens")
    skip = bool(body.skip_special_tokens)
    tokenizer = server.engine.tokenizer
    return {"prompt": await off_loop(lambda: tokenizer.decode(body.tokens, skip_special_tokens=skip))}
