"""What requests look like: OpenAI's fields, and those of other servers that people use beside them.

Unknown fields are ignored; a known one of the wrong type is refused by name. Whether values are in range is not decided
here: `SamplingParams.check` and the engine do that.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field
from pydantic_core import PydanticCustomError

__all__ = [
    "AbortRequest",
    "ChatRequest",
    "CompletionRequest",
    "DetokenizeRequest",
    "GenerationRequest",
    "Message",
    "ResponseFormat",
    "StreamOptions",
    "TokenizeRequest",
    "Tool",
]

_EXPECTED: Final = "expected a text, a list of token ids, or a list of either"


def _alike(given: Any) -> Any:
    """Refuse a list at its first odd element: of a million, pydantic would report each, for each kind that it tries."""
    if not isinstance(given, list) or not given:
        return given
    kind = type(given[0])
    odd = next((place for place, value in enumerate(given) if type(value) is not kind), None)
    if odd is not None or kind not in (int, str, list):
        raise PydanticCustomError("list_type", f"element {odd or 0} is not like the others: {_EXPECTED}")
    if kind is list:
        for inner in given:
            if any(type(value) is not int for value in inner):
                raise PydanticCustomError("list_type", f"a list in the list holds no token ids: {_EXPECTED}")
    return given


Prompt = Annotated[str | list[int] | list[str] | list[list[int]], BeforeValidator(_alike)]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())


class StreamOptions(_Body):
    """What a stream tells besides the text."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False
    include_progress: bool | None = False


class JsonSchema(_Body):
    """A schema by name, as `response_format` carries it."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(_Body):
    """What the text must be."""

    type: Literal["text", "json_object", "json_schema", "regex"]
    json_schema: JsonSchema | None = None
    pattern: str | None = None


class GenerationRequest(_Body):
    """Fields that completions and chat share."""

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    regex: str | None = None
    return_token_ids: bool | None = False
    return_tokens_as_token_ids: bool | None = False
    user: str | None = None


class CompletionRequest(GenerationRequest):
    """Of `/v1/completions`."""

    prompt: Prompt
    echo: bool | None = False
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = True


class ContentPart(_Body):
    """A piece of a message."""

    type: str
    text: str | None = None


class FunctionCall(_Body):
    """Which function, with which arguments (as JSON text)."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(_Body):
    """A call that the assistant made."""

    id: str | None = None
    type: str | None = "function"
    function: FunctionCall


class Message(_Body):
    """One turn of a conversation."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class Function(_Body):
    """What a tool is called and what it wants."""

    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Body):
    """A function that the model may call."""

    type: Literal["function"] = "function"
    function: Function


class NamedFunction(_Body):
    """A function by its name."""

    name: str


class NamedTool(_Body):
    """The tool that must be called."""

    type: Literal["function"] = "function"
    function: NamedFunction


class ChatRequest(GenerationRequest):
    """Of `/v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = True
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = True
    continue_final_message: bool | None = False


class TokenizeRequest(_Body):
    """Of `/tokenize`: a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = True
    add_generation_prompt: bool | None = True
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = False


class DetokenizeRequest(_Body):
    """Of `/detokenize`."""

    model: str | None = None
    tokens: Annotated[list[int], FailFast()]
    skip_special_tokens: bool | None = False


class AbortRequest(_Body):
    """Of `/abort`: one request, or all."""

    request_id: str | None = None
    abort_all: bool | None = False
