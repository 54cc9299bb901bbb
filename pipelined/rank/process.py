"""A rank as a child process: its end of the pipe to the supervisor.

The pipe says three things: the description of each epoch on the way in; on the way out how the rank is doing, and why
it lost an epoch or ends; by its end of file, that the parent is gone. A thread listens, so that a child never outlives
its parent, whatever its loop does.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING

import msgspec
import torch

from pipelined.errors import PipelinedError
from pipelined.messages import ErrorInfo
from pipelined.rank.description import RankDescription
from pipelined.rank.host import root_cause, run_rank
from pipelined.rank.lifeline import EpochOver, FromChild, Progress, RankFailed

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from pipelined.rank.planner import Planner
    from pipelined.stage import Stage

__all__ = ["EXIT_FAILED", "EXIT_ORPHAN", "main", "serve_child"]

EXIT_FAILED = 1
EXIT_ORPHAN = 70

_SWITCH_INTERVAL_S = 0.0005
"""Pure Python on the stage's thread would otherwise hold the loop for 5 ms at a time."""


def serve_child(
    pipe: Connection, *, stage: Stage | None = None, planner: Planner | None = None, description: bytes | None = None
) -> int:
    """Run the rank whose description is given, or comes through the pipe. Returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the supervisor decides
    described = msgspec.json.decode(description or pipe.recv_bytes(), type=RankDescription)
    lifeline = _PipeLine(pipe, described.config.rank)
    threading.Thread(target=lifeline.listen, daemon=True, name="parent watch").start()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    if described.threads is not None:
        torch.set_num_threads(described.threads)  # of this thread; the device's has its own
    gc.freeze()
    try:
        with asyncio.Runner(loop_factory=_new_loop) as runner:
            runner.run(run_rank(described, stage=stage, planner=planner, lifeline=lifeline))
    except Exception as error:  # noqa: BLE001 - the boundary of the process: reported to the supervisor
        return EXIT_FAILED if lifeline.say(RankFailed(lifeline.placed(root_cause(error)))) else EXIT_ORPHAN
    return 0


def _new_loop() -> asyncio.AbstractEventLoop:
    import uvloop

    return uvloop.new_event_loop()


class _PipeLine:
    """A `Lifeline` over a pipe."""

    def __init__(self, pipe: Connection, rank: int) -> None:
        self._pipe = pipe
        self._rank = rank
        self._loop: asyncio.AbstractEventLoop | None = None
        self._next: asyncio.Future[RankDescription] | None = None

    def placed(self, error: BaseException) -> ErrorInfo:
        """The error, with this rank as its place if it has none."""
        info = ErrorInfo.of(error)
        return msgspec.structs.replace(info, rank=self._rank if info.rank is None else info.rank)

    def say(self, message: FromChild) -> bool:
        """Tell the supervisor; whether there is one."""
        try:
            self._pipe.send_bytes(msgspec.json.encode(message))
        except OSError:
            return False
        return True

    def announce(self, what: str) -> None:
        """See `Lifeline`."""
        self.say(Progress(what))

    async def next(self, description: RankDescription, error: PipelinedError) -> RankDescription | None:
        """See `Lifeline`."""
        self._loop = asyncio.get_running_loop()
        self._next = self._loop.create_future()
        self.say(EpochOver(description.epoch, self.placed(error)))
        try:
            async with asyncio.timeout(description.linger_s):
                return await self._next
        except TimeoutError:
            raise error from None

    def listen(self) -> None:
        """On a thread: hand on what the supervisor says, and end with it."""
        try:
            while True:
                description = msgspec.json.decode(self._pipe.recv_bytes(), type=RankDescription)
                if self._loop is not None:
                    self._loop.call_soon_threadsafe(self._came, description)
        except (EOFError, OSError, msgspec.DecodeError):
            os._exit(EXIT_ORPHAN)

    def _came(self, description: RankDescription) -> None:
        if self._next is not None and not self._next.done():
            self._next.set_result(description)


def main(argv: list[str]) -> int:
    """`python -m pipelined.rank FD`: the pipe is open as that file descriptor."""
    from multiprocessing.connection import Connection

    if len(argv) != 1 or not argv[0].isdecimal():
        print("pipelined.rank is started by a supervisor; use `pipelined generate` or the Python API", file=sys.stderr)  # noqa: T201
        return 2
    return serve_child(Connection(int(argv[0])))
