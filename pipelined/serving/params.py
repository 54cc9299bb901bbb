"""From a request's fields to `SamplingParams`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from pipelined.errors import InvalidRequestError
from pipelined.messages import SamplingParams
from pipelined.serving.encoding import encode

if TYPE_CHECKING:
    from pipelined.serving.protocol import GenerationRequest

__all__ = ["sampling_params"]

_PLAIN: Final = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop_token_ids",
    "ignore_eos",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
)


def sampling_params(body: GenerationRequest, **more: Any) -> SamplingParams:
    """What was given, the rest at its default; `more` wins where it is not None.

    Raises:
        InvalidRequestError: A field that is known to OpenAI and not to us would have changed the output.
    """
    if body.logit_bias:
        raise InvalidRequestError("logit_bias is not supported; leave it out", param="logit_bias")
    given = {name: value for name in _PLAIN if (value := getattr(body, name)) is not None}
    if body.stop:
        given["stop"] = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
    if given.get("seed", 0) < 0:
        given["seed"] += 2**63  # other servers take negative seeds
    given |= _constraint(body)
    given |= {name: value for name, value in more.items() if value is not None}
    params = SamplingParams(**given)
    params.check()
    return params


def _constraint(body: GenerationRequest) -> dict[str, Any]:
    """What `response_format` (or `regex`) asks for, as sampling parameters."""
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        return {} if body.regex is None else {"regex": body.regex}
    if body.regex is not None:
        raise InvalidRequestError("regex contradicts response_format; give one of them", param="regex")
    if wanted.type == "json_object":
        return {"json_schema": '{"type": "object"}'}
    if wanted.type == "regex":
        if wanted.pattern is None:
            raise InvalidRequestError("response_format of type regex needs a pattern", param="response_format.pattern")
        return {"regex": wanted.pattern}
    if wanted.json_schema is None or wanted.json_schema.schema_ is None:
        raise InvalidRequestError(
            "response_format of type json_schema needs a schema", param="response_format.json_schema.schema"
        )
    return {"json_schema": encode(wanted.json_schema.schema_).decode()}
