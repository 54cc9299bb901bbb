"""A small HTTP client for measuring servers: one request a connection, the body handed on as it comes.

It does little per byte, since it often shares its cores with what it measures.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from pipelined.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["HttpTarget", "request"]

_LIMIT_BYTES = 1 << 20


class HttpTarget:
    """A server, by its base URL.

    Attributes:
        host, port: Where to connect.
        tls: None for plain HTTP.
        prefix: Path before that of each request.
    """

    def __init__(self, base_url: str, *, insecure: bool = False) -> None:
        """Args: insecure: take any certificate."""
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{base_url!r} is no base URL; expected http://HOST:PORT")
        self.host = parts.hostname
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self.prefix = parts.path.rstrip("/")
        self.tls = ssl.create_default_context() if parts.scheme == "https" else None
        if self.tls is not None and insecure:
            self.tls.check_hostname = False
            self.tls.verify_mode = ssl.CERT_NONE


async def request(
    target: HttpTarget,
    method: str,
    path: str,
    body: bytes = b"",
    headers: Mapping[str, str] | None = None,
    on_data: Callable[[bytes], None] | None = None,
) -> tuple[int, bytes]:
    """Ask once.

    Args:
        target: The server.
        method: Of HTTP.
        path: Behind the base URL's own.
        body: JSON, or nothing.
        headers: Further ones.
        on_data: Called with each piece of the body of a 200, as it comes.

    Returns:
        The status, and the body unless it went to `on_data`.

    Raises:
        OSError: The server could not be reached, or went away.
    """
    reader, writer = await asyncio.open_connection(target.host, target.port, ssl=target.tls, limit=_LIMIT_BYTES)
    try:
        lines = [f"{method} {target.prefix}{path} HTTP/1.1", f"Host: {target.host}:{target.port}", "Connection: close"]
        if body:
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        await writer.drain()
        try:
            status, answered = await _head(reader)
            collected: list[bytes] = []
            hear = on_data if on_data is not None and status == 200 else collected.append
            if answered.get("transfer-encoding") == "chunked":
                await _chunks(reader, hear)
            elif "content-length" in answered:
                hear(await reader.readexactly(int(answered["content-length"])))
            else:
                hear(await reader.read())
        except (asyncio.IncompleteReadError, ValueError) as error:
            raise ConnectionError("the server ended the answer before its end") from error
        return status, b"".join(collected)
    finally:
        writer.close()


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    status = int(head[0].split(" ", 2)[1])
    pairs = (line.partition(":") for line in head[1:] if line)
    return status, {name.strip().lower(): value.strip().lower() for name, _, value in pairs}


async def _chunks(reader: asyncio.StreamReader, hear: Callable[[bytes], None]) -> None:
    while size := int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16):
        hear((await reader.readexactly(size + 2))[:-2])
    await reader.readuntil(b"\r\n")
