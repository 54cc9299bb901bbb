"""From a request's fields to `SamplingParams`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from pipelined.errors import InvalidRequestError
from pipelined.messages import SamplingParams

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
    given |= {name: value for name, value in more.items() if value is not None}
    params = SamplingParams(**given)
    params.check()
    return params
