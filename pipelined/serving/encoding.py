"""JSON as it leaves: encoded by msgspec, whatever text is in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from starlette.responses import Response

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["JsonResponse", "encode"]

_encode = msgspec.json.Encoder().encode


def encode(body: Any) -> bytes:
    """`body` as JSON. A lone surrogate, which is no text that UTF-8 could carry, is replaced by a question mark."""
    try:
        return _encode(body)
    except UnicodeEncodeError:
        return _encode(_clean(body))


def _clean(body: Any) -> Any:
    if isinstance(body, str):
        return body.encode("utf-8", "replace").decode("utf-8")
    if isinstance(body, dict):
        return {_clean(key): _clean(value) for key, value in body.items()}
    if isinstance(body, list | tuple):
        return [_clean(value) for value in body]
    return body


class JsonResponse(Response):
    """A whole answer."""

    media_type = "application/json"

    def __init__(self, body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(encode(body), status, headers)
