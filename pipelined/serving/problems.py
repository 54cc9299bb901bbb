"""Errors as clients of OpenAI's API know them: a status and `{"error": {message, type, param, code}}`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from pipelined.errors import (
    DeadlineError,
    EngineClosedError,
    InvalidRequestError,
    PipelinedError,
    RankLostError,
    TransportError,
)
from pipelined.serving.encoding import JsonResponse

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastapi import FastAPI
    from starlette.requests import Request
    from starlette.responses import Response

__all__ = ["Problem", "install_problems", "problem_of"]

_PASSING = (RankLostError, EngineClosedError, TransportError, DeadlineError)
"""What a client may simply try again."""

_RETRY_S = 5

_UNION_MEMBER: Final = re.compile(r"(str|int|float|bool|NamedTool|\w+\[.*)$")
"""How pydantic names them in a place."""

_KINDS = {
    400: "invalid_request_error",
    401: "invalid_request_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class Problem(Exception):
    """What is wrong with a request, or with us.

    Attributes:
        status: Of the response. message: For a person. param: The field that is wrong. code: For a program.
        headers: To be sent along.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """As OpenAI's clients expect it."""
        kind = _KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JsonResponse:
        """The whole answer."""
        return JsonResponse(self.body(), self.status, headers=self.headers)


def problem_of(error: BaseException) -> Problem:
    """How a client is told of `error`."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, InvalidRequestError):
        return Problem(400, str(error), param=error.param, code=error.code)
    if isinstance(error, _PASSING):
        return Problem(503, str(error), code="engine_unavailable", headers={"Retry-After": str(_RETRY_S)})
    if isinstance(error, PipelinedError):
        return Problem(500, str(error), code=type(error).__name__)
    return Problem(500, "something went wrong in the server; its log says what", code="internal_error")


def _validation(errors: Sequence[Any]) -> Problem:
    """The first thing that is wrong, by its field."""
    first = errors[0]
    place = _field(first["loc"])
    param = ".".join(place) or None
    if first["type"] == "json_invalid":
        return Problem(400, f"the body is no JSON: {first.get('ctx', {}).get('error', first['msg'])}")
    if not place and first["loc"][:1] == ("body",):
        return Problem(400, "the body is missing or no JSON object; send one, with Content-Type: application/json")
    # Of a union, each member says why it is none: all of them together are what is expected.
    reasons = dict.fromkeys(error["msg"] for error in errors if _field(error["loc"]) == place)
    return Problem(400, f"{param or 'the request'}: {'; or: '.join(list(reasons)[:4])}", param=param)


def _field(loc: Sequence[Any]) -> list[str]:
    """The path to the field, without where it stood and which member of a union was tried."""
    path: list[str] = []
    for part in loc[1:]:
        if isinstance(part, str) and _UNION_MEMBER.match(part):
            break
        path.append(str(part))
    return path


def install_problems(app: FastAPI) -> None:
    """Have every error of `app` told in this shape."""

    async def told(_request: Request, error: Exception) -> Response:
        return problem_of(error).response()

    async def invalid(_request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return _validation(error.errors()).response()

    async def http(_request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        headers = dict(error.headers or {})
        return Problem(error.status_code, str(error.detail), headers=headers).response()

    app.add_exception_handler(Problem, told)
    app.add_exception_handler(PipelinedError, told)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(Exception, told)
