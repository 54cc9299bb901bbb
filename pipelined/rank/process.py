"""A rank as a child process: its end of the pipe to the supervisor.

The pipe says three things: the description on the way in, an error on the way out, and, by its end of file, that the
parent is gone. A thread listens for the last, so that a child never outlives its parent, whatever its loop does.
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

from pipelined.messages import ErrorInfo
from pipelined.rank.description import RankDescription
from pipelined.rank.host import root_cause, run_rank

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
    threading.Thread(target=_die_with_parent, args=(pipe,), daemon=True, name="parent watch").start()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    if described.threads is not None:
        torch.set_num_threads(described.threads)  # of this thread; the device's has its own
    gc.freeze()
    try:
        with asyncio.Runner(loop_factory=_new_loop) as runner:
            runner.run(run_rank(described, stage=stage, planner=planner))
    except Exception as error:  # noqa: BLE001 - the boundary of the process: reported to the supervisor
        info = ErrorInfo.of(root_cause(error))
        place = msgspec.structs.replace(info, rank=described.config.rank if info.rank is None else info.rank)
        try:
            pipe.send_bytes(msgspec.json.encode(place))
        except OSError:
            return EXIT_ORPHAN
        return EXIT_FAILED
    return 0


def _new_loop() -> asyncio.AbstractEventLoop:
    import uvloop

    return uvloop.new_event_loop()


def _die_with_parent(pipe: Connection) -> None:
    try:
        while pipe.recv_bytes():
            pass
    except (EOFError, OSError):
        os._exit(EXIT_ORPHAN)


def main(argv: list[str]) -> int:
    """`python -m pipelined.rank FD`: the pipe is open as that file descriptor."""
    from multiprocessing.connection import Connection

    if len(argv) != 1 or not argv[0].isdecimal():
        print("pipelined.rank is started by a supervisor; use `pipelined generate` or the Python API", file=sys.stderr)  # noqa: T201
        return 2
    return serve_child(Connection(int(argv[0])))
