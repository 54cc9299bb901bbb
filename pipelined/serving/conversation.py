"""From messages to tokens, by the model's chat template."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pipelined.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipelined.llm.text import Tokenizer
    from pipelined.serving.protocol import ChatRequest, Message
    from pipelined.serving.settings import ServerSettings

__all__ = ["plain_messages", "rendered"]


def rendered(
    tokenizer: Tokenizer,
    body: ChatRequest,
    settings: ServerSettings,
    *,
    tools: list[dict[str, Any]] | None = None,
) -> list[int]:
    """The conversation's token ids.

    Raises:
        InvalidRequestError: There is no template, it refuses the messages, or a message is not text.
    """
    more: dict[str, Any] = dict(body.chat_template_kwargs or {})
    for name in ("messages", "conversation", "tokenize", "add_generation_prompt", "chat_template", "return_tensors"):
        if name in more:
            raise InvalidRequestError(f"chat_template_kwargs may not hold {name!r}", param="chat_template_kwargs")
    if tools is not None:
        more["tools"] = tools
    if body.continue_final_message:
        more["continue_final_message"] = True
    return tokenizer.chat(
        plain_messages(body.messages),
        add_generation_prompt=bool(body.add_generation_prompt) and not body.continue_final_message,
        chat_template=body.chat_template or settings.chat_template,
        **more,
    )


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as templates expect them: text instead of parts, arguments of calls as objects.

    Raises:
        InvalidRequestError: A part is not text.
    """
    return [_plain(number, message) for number, message in enumerate(messages)]


def _plain(number: int, message: Message) -> dict[str, Any]:
    found: dict[str, Any] = {"role": message.role, "content": _text(number, message)}
    for name in ("name", "tool_call_id", "reasoning_content"):
        value = getattr(message, name)
        if value is not None:
            found[name] = value
    if message.tool_calls:
        found["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(number, call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    return found


def _text(number: int, message: Message) -> str:
    content = message.content
    if content is None or isinstance(content, str):
        return content or ""
    for place, part in enumerate(content):
        if part.type not in ("text", "input_text", "refusal") or part.text is None:
            raise InvalidRequestError(
                f"part {place} of message {number} is of type {part.type!r}; this model reads text alone",
                param=f"messages.{number}.content.{place}",
            )
    return "".join(part.text or "" for part in content)


def _arguments(number: int, arguments: Any) -> dict[str, Any]:
    if isinstance(arguments, dict):
        return arguments
    try:
        found = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise InvalidRequestError(
            f"the arguments of a tool call in message {number} are no JSON object",
            param=f"messages.{number}.tool_calls",
        )
    return found
