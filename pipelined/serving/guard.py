"""Who may come in, and with how much: API keys and the size of bodies, before anything else sees a request."""

from __future__ import annotations

import base64
import binascii
import hmac
from typing import TYPE_CHECKING, Final

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException

from pipelined.serving.problems import Problem

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from pipelined.serving.settings import ServerSettings

__all__ = ["Guard"]

_OPEN: Final = frozenset({"/health"})
"""For load balancers, which have no key. It tells nothing but whether the server works."""


class Guard:
    """An ASGI application around another one."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._keys = [key.encode() for key in settings.api_keys]
        self._most_bytes = settings.max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As an ASGI application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        problem = self._too_large(headers) or self._stranger(scope["path"], headers)
        if problem is not None:
            await problem.response()(scope, receive, send)
            return
        await self._app(scope, self._measured(receive), send)

    def _stranger(self, path: str, headers: Headers) -> Problem | None:
        if not self._keys or path in _OPEN:
            return None
        given = _key(headers.get("authorization", ""))
        # Every key is compared, each in constant time: how long it takes tells nothing.
        if sum(hmac.compare_digest(given, key) for key in self._keys):
            return None
        # A browser asks its user for the key (as the password) where a page is wanted.
        kind = 'Basic realm="pipelined"' if "text/html" in headers.get("accept", "") else "Bearer"
        message = "the API key is wrong" if given else "an API key is needed: Authorization: Bearer KEY"
        return Problem(401, message, code="invalid_api_key", headers={"WWW-Authenticate": kind})

    def _too_large(self, headers: Headers) -> Problem | None:
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) <= self._most_bytes:
            return None
        return Problem(413, self._limit(), code="request_too_large", headers={"Connection": "close"})

    def _limit(self) -> str:
        return f"the body is larger than the {self._most_bytes} bytes that this server reads"

    def _measured(self, receive: Receive) -> Receive:
        """`receive` that refuses to go on beyond the limit, for bodies that don't say how long they are."""
        read = 0

        async def measured() -> Message:
            nonlocal read
            message = await receive()
            if message["type"] == "http.request":
                read += len(message.get("body", b""))
                if read > self._most_bytes:
                    raise HTTPException(413, self._limit(), {"Connection": "close"})
            return message

        return measured


def _key(authorization: str) -> bytes:
    """The key of `Bearer KEY`, or the password of `Basic`; empty if there is none."""
    kind, _, value = authorization.partition(" ")
    if kind.lower() == "bearer":
        return value.strip().encode()
    if kind.lower() == "basic":
        try:
            return base64.b64decode(value, validate=True).partition(b":")[2]
        except binascii.Error:
            return b""
    return b""
