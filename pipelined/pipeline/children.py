"""Child processes that run a rank each: how they are started, and the parent's end of their pipes."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import msgspec

from pipelined.errors import ConfigError, PipelinedError, RankLostError
from pipelined.rank.process import EXIT_FAILED, serve_child

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from pipelined.messages import ErrorInfo
    from pipelined.rank import Planner
    from pipelined.rank.description import RankDescription
    from pipelined.stage import Stage

__all__ = ["Child", "spawn"]

Process = subprocess.Popen[bytes] | multiprocessing.Process


class Child:
    """One child process and the parent's end of its pipe.

    Attributes:
        error: What it said that it fails with.
        parted: It waits for its next epoch, or has ended.
        gone: Done once it has ended.
    """

    def __init__(self, rank: int, pipe: Connection, process: Process) -> None:
        self.rank = rank
        self.pipe = pipe
        self.process = process
        self.error: ErrorInfo | None = None
        self.parted = asyncio.Event()
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self.process.pid is not None
        return self.process.pid

    def hand(self, description: RankDescription) -> None:
        """Give it its next epoch; blocks for a moment. One that has ended meanwhile is noticed elsewhere."""
        try:
            self.pipe.send_bytes(msgspec.json.encode(description))
        except OSError:
            return

    def reap(self, timeout_s: float | None) -> int | None:
        """Wait for the exit code; blocks. None if it did not end in time."""
        if isinstance(self.process, subprocess.Popen):
            try:
                return self.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                return None
        self.process.join(timeout_s)
        return self.process.exitcode

    def why(self, code: int | None) -> PipelinedError | None:
        """What its end was, by what it said and its exit code; None if it ended as it was told to."""
        if self.error is not None:
            return self.error.exception()
        if code == 0:
            return None
        if code == EXIT_FAILED:  # whatever fails later is told through the pipe
            return RankLostError(
                f"process {self.pid} ended before it began: its main script or its stage could not be imported there; "
                'its message is above (a script that starts processes needs `if __name__ == "__main__":`)',
                rank=self.rank,
            )
        how = f"was killed by {signal.Signals(-code).name}" if code and code < 0 else f"ended with exit code {code}"
        if code == -signal.SIGKILL:
            how += " (by somebody, or by the system because memory ran out)"
        return RankLostError(f"process {self.pid} {how}", rank=self.rank)


def spawn(description: RankDescription, stage: Stage | None, planner: Planner | None) -> tuple[Connection, Process]:
    """Start a child; blocks for some milliseconds."""
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    encoded = msgspec.json.encode(description)
    try:
        if stage is None:
            command = [sys.executable, "-m", "pipelined.rank", str(theirs.fileno())]
            environment = _environment(description.threads)
            process: Process
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=environment)
            ours.send_bytes(encoded)
        else:
            context = multiprocessing.get_context("spawn")
            process = context.Process(  # type: ignore[assignment]
                target=_spawned, args=(theirs, encoded, stage, planner), name=f"rank {description.config.rank}"
            )
            try:
                process.start()  # type: ignore[union-attr]
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                raise ConfigError(
                    f"stage {stage.name!r} of rank {description.config.rank} cannot be sent to a process of its own: "
                    f"{error}; what it holds must be picklable (open files, locks and models in its `setup`), or use "
                    "workers='task'"
                ) from error
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return ours, process


def _environment(threads: int | None) -> dict[str, str]:
    environment = dict(os.environ)
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    return environment


def _spawned(pipe: Connection, description: bytes, stage: Stage, planner: Planner | None) -> None:
    code = serve_child(pipe, stage=stage, planner=planner, description=description)
    sys.stdout.flush()
    sys.stderr.flush()
    assert threading.current_thread() is threading.main_thread()
    os._exit(code)
