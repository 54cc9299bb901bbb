"""The handshake: what both sides of a link must agree on before anything else crosses it (R14)."""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING

import msgspec

from pipelined.errors import HandshakeError
from pipelined.messages import PROTOCOL_VERSION, Hello, Peer

if TYPE_CHECKING:
    from pipelined.transport.base import EndpointSpec

__all__ = ["HELLO_LIMIT_BYTES", "check_hello", "decode_hello", "encode_hello", "hello_of"]

HELLO_LIMIT_BYTES = 256 << 10
"""A longer hello is refused before it is read: thousands of peers fit."""

_decoder = msgspec.msgpack.Decoder(Hello)


def hello_of(spec: EndpointSpec) -> Hello:
    """What an endpoint opened with `spec` says first."""
    return Hello(
        version=PROTOCOL_VERSION,
        pipeline="+".join(sorted({peer.pipeline for peer in spec.world})),
        epoch=spec.epoch,
        me=spec.me,
        world=tuple(sorted(spec.world)),
        secret=spec.secret,
        dtype=spec.dtype,
    )


def encode_hello(hello: Hello) -> bytes:
    """As it crosses the link."""
    return msgspec.msgpack.encode(hello)


def decode_hello(frame: bytes | memoryview) -> Hello:
    """What a stranger sent first.

    Raises:
        HandshakeError: It is not a hello.
    """
    try:
        return _decoder.decode(frame)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise HandshakeError(f"the first frame on a link is not a hello: {error}") from error


def check_hello(mine: Hello, theirs: Hello, expected: Peer | None = None) -> None:
    """Whether two peers may talk.

    Args:
        mine: What this side says.
        theirs: What the other side said.
        expected: Who it should be, where that is known.

    Raises:
        HandshakeError: Names what differs, with both values (but never a secret).
    """
    if theirs.version != mine.version:
        raise HandshakeError(f"{theirs.me} speaks protocol version {theirs.version}, {mine.me} version {mine.version}")
    if not hmac.compare_digest(theirs.secret.encode(), mine.secret.encode()):
        raise HandshakeError(f"{theirs.me} and {mine.me} were given different secrets")
    if expected is not None and theirs.me != expected:
        raise HandshakeError(f"{mine.me} expected {expected} and was answered by {theirs.me}")
    for what in ("pipeline", "epoch", "world", "dtype"):
        their, my = getattr(theirs, what), getattr(mine, what)
        if their != my:
            raise HandshakeError(f"{theirs.me} has {what} {_told(their)}, {mine.me} has {_told(my)}")
    if theirs.me not in mine.world or theirs.me == mine.me:
        raise HandshakeError(f"{theirs.me} is not another peer of {mine.me}'s world {_told(mine.world)}")


def _told(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else repr(value)
