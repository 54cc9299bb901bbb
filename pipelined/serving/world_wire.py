"""What the HTTP process and the process that supervises the ranks say to each other: length-prefixed frames."""

from __future__ import annotations

import asyncio
import struct
from typing import TYPE_CHECKING, Any, Final

import msgspec

from pipelined.errors import ProtocolError
from pipelined.llm import EngineConfig
from pipelined.messages import ErrorInfo
from pipelined.rank.description import RankDescription
from pipelined.serving.settings import ServerSettings

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

__all__ = [
    "BeginEpoch",
    "Done",
    "KillRanks",
    "RankEnded",
    "RankSaid",
    "StopRanks",
    "Welcome",
    "Wire",
    "from_front",
    "from_supervisor",
]

_LENGTH: Final = struct.Struct("<I")
_MOST_BYTES: Final = 64 << 20


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The first frame: what to serve, and how.

    Attributes:
        config: Of the engine.
        settings: Of the HTTP server.
        application: `module:function` that serves an engine: `await function(engine, settings, socket)`.
        log_format: Of its logs.
        next_epoch: 0: there are no ranks yet.
        listener: File descriptor of the bound socket.
    """

    config: EngineConfig
    settings: ServerSettings
    application: str
    log_format: str
    next_epoch: int
    listener: int


class BeginEpoch(msgspec.Struct, frozen=True, tag="begin"):
    """`World.start`. Answered by `Done`."""

    number: int
    descriptions: tuple[RankDescription, ...]
    lost: tuple[int, ...] = ()


class StopRanks(msgspec.Struct, frozen=True, tag="stop"):
    """`World.stop`. Answered by `Done`."""

    number: int
    timeout_s: float


class KillRanks(msgspec.Struct, frozen=True, tag="kill"):
    """`World.kill`."""


class Done(msgspec.Struct, frozen=True, tag="done"):
    """What was asked for under that number has been done, or failed. `directory`: of the epoch's rendezvous."""

    number: int
    directory: str = ""
    error: ErrorInfo | None = None


class RankEnded(msgspec.Struct, frozen=True, tag="ended"):
    """A rank ended or lost its epoch; `error` is None if it was told to."""

    epoch: int
    rank: int
    error: ErrorInfo | None = None


class RankSaid(msgspec.Struct, frozen=True, tag="said"):
    """A rank is that far with its set-up."""

    rank: int
    what: str


FromFront = BeginEpoch | StopRanks | KillRanks
FromSupervisor = Welcome | Done | RankEnded | RankSaid

from_front = msgspec.msgpack.Decoder(FromFront).decode
from_supervisor = msgspec.msgpack.Decoder(FromSupervisor).decode


class Wire:
    """One end of the connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def over(cls, sock: socket.socket) -> Wire:
        """Over a connected stream socket."""
        return cls(*await asyncio.open_connection(sock=sock))

    def send(self, message: FromFront | FromSupervisor) -> None:
        """Queue a frame. One that nobody will read any more is dropped: its reader's end is noticed elsewhere."""
        frame = msgspec.msgpack.encode(message)
        if not self._writer.is_closing():
            self._writer.write(_LENGTH.pack(len(frame)) + frame)

    async def receive(self, decode: Callable[[bytes], Any]) -> Any:
        """The next frame, by `from_front` or `from_supervisor`; None once the other side is gone.

        Raises:
            ProtocolError: It is not what it should be.
        """
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            if length > _MOST_BYTES:
                raise ProtocolError(f"a frame of {length} bytes between serving processes; at most {_MOST_BYTES}")
            return decode(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        except msgspec.DecodeError as error:
            raise ProtocolError(f"a frame between serving processes makes no sense: {error}") from error

    def close(self) -> None:
        """Let go of it."""
        self._writer.close()
