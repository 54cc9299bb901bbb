"""Where ranks live: tasks of this loop, or processes of this host. A world starts ranks, ends them, notices ends."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from pipelined.clock import Clock, MonotonicClock
from pipelined.errors import ConfigError, PipelinedError, RankLostError
from pipelined.messages import ErrorInfo
from pipelined.rank.host import root_cause, run_rank
from pipelined.rank.process import EXIT_FAILED, serve_child
from pipelined.transport import FileRendezvous, MemoryRendezvous, Rendezvous

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from pipelined.rank import Planner
    from pipelined.rank.description import RankDescription
    from pipelined.stage import Device, Stage

__all__ = ["Ended", "ProcessWorld", "TaskWorld", "World"]

T = TypeVar("T")

_Process = subprocess.Popen[bytes] | multiprocessing.Process

_REAP_POLL_S = 0.005
_REAP_TRIES = 200

Ended = "Callable[[int, BaseException | None], None]"
"""Called with a rank and why it ended, None if it was told to."""


class World(Protocol):
    """Hosts the ranks of one pipeline."""

    processes: bool
    clock: Clock

    @property
    def rendezvous(self) -> Rendezvous:
        """Where its peers find each other."""
        ...

    async def start(
        self, descriptions: Sequence[RankDescription], stages: Sequence[Stage | None], planner: Planner | None
    ) -> None:
        """Start every rank. Returns before they are ready."""
        ...

    def on_end(self, callback: Callable[[int, BaseException | None], None]) -> None:
        """Have `callback` called, on the loop, for each rank that ends."""
        ...

    async def stop(self, timeout_s: float) -> None:
        """Wait for ranks that were told to stop; end those that don't within `timeout_s`. Leaves nothing behind."""
        ...

    def kill(self) -> None:
        """End every rank now."""
        ...


class TaskWorld:
    """Ranks as tasks of the running loop: tests, debugging, notebooks, simulations."""

    processes = False

    def __init__(
        self, clock: Callable[[int], Clock] | None = None, device: Callable[[int, Clock], Device] | None = None
    ) -> None:
        """Args: clock: makes the clock of a rank (or, with -1, of the driver). device: makes the device of a rank."""
        self._clock_of = clock or (lambda _: MonotonicClock())
        self._device_of = device
        self.clock = self._clock_of(-1)
        self.rendezvous = MemoryRendezvous()
        self._tasks: list[asyncio.Task[None]] = []
        self._ended: Callable[[int, BaseException | None], None] = lambda _rank, _error: None

    def __repr__(self) -> str:
        return f"<TaskWorld {sum(not task.done() for task in self._tasks)} ranks>"

    def on_end(self, callback: Callable[[int, BaseException | None], None]) -> None:
        """See `World`."""
        self._ended = callback

    async def start(
        self, descriptions: Sequence[RankDescription], stages: Sequence[Stage | None], planner: Planner | None
    ) -> None:
        """See `World`."""
        loop = asyncio.get_running_loop()
        for description, stage in zip(descriptions, stages, strict=True):
            rank = description.config.rank
            run = self._run(description, stage, planner if rank == 0 else None)
            # Held here and awaited in `stop`: the world is the supervisor of its ranks, as a TaskGroup would be, but a
            # rank that fails must not cancel the task that opened the pipeline.
            self._tasks.append(loop.create_task(run, name=f"rank {rank}"))

    async def _run(self, description: RankDescription, stage: Stage | None, planner: Planner | None) -> None:
        rank = description.config.rank
        make = self._device_of
        error: BaseException | None = None
        try:
            await run_rank(
                description,
                stage=stage,
                planner=planner,
                rendezvous=self.rendezvous,
                clock=self._clock_of(rank),
                device=None if make is None else lambda clock: make(rank, clock),
            )
        except asyncio.CancelledError:
            error = RankLostError("the task was ended", rank=rank)
            raise
        except Exception as raised:  # noqa: BLE001 - the supervisor: the driver is told
            error = root_cause(raised)
        finally:
            self._ended(rank, error)

    async def stop(self, timeout_s: float) -> None:
        """See `World`."""
        if not self._tasks:
            return
        _, late = await asyncio.wait(self._tasks, timeout=timeout_s)
        self.kill()
        if late:
            await asyncio.wait(late)
        self._tasks.clear()

    def kill(self) -> None:
        """See `World`."""
        for task in self._tasks:
            if not task.cancelling():  # a second time would stop it from tidying up
                task.cancel()


class _Child:
    """One child process and the parent's end of its pipe."""

    def __init__(self, rank: int, pipe: Connection, process: _Process) -> None:
        self.rank = rank
        self.pipe = pipe
        self.process = process
        self.error: ErrorInfo | None = None
        self.gone = asyncio.get_running_loop().create_future()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def reap(self, timeout_s: float | None) -> int | None:
        """Wait for the exit code; blocks. None if it did not end in time."""
        if isinstance(self.process, subprocess.Popen):
            try:
                return self.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                return None
        self.process.join(timeout_s)
        return self.process.exitcode


class ProcessWorld:
    """Ranks as processes of this host, each with a loop of its own."""

    processes = True

    def __init__(self) -> None:
        self.clock: Clock = MonotonicClock()
        self._directory = ""
        self._rendezvous: FileRendezvous | None = None
        self._children: list[_Child] = []
        self._ended: Callable[[int, BaseException | None], None] = lambda _rank, _error: None

    def __repr__(self) -> str:
        return f"<ProcessWorld {[child.pid for child in self._children]}>"

    @property
    def rendezvous(self) -> Rendezvous:
        """See `World`; there is one once started."""
        assert self._rendezvous is not None
        return self._rendezvous

    @property
    def pids(self) -> list[int]:
        """Process ids, by rank."""
        return [child.pid for child in self._children]

    def on_end(self, callback: Callable[[int, BaseException | None], None]) -> None:
        """See `World`."""
        self._ended = callback

    async def start(
        self, descriptions: Sequence[RankDescription], stages: Sequence[Stage | None], planner: Planner | None
    ) -> None:
        """See `World`."""
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            raise ConfigError(
                "a pipeline of processes was started while a child process imports the main script; put what starts "
                'it behind `if __name__ == "__main__":`'
            )
        self._directory, cancelled = await _to_its_end(asyncio.to_thread(tempfile.mkdtemp, prefix="pipelined-"))
        self._rendezvous = FileRendezvous(self._directory)
        for description, stage in zip(descriptions, stages, strict=True):
            if cancelled is not None:
                raise cancelled
            described = msgspec.structs.replace(description, rendezvous=self._directory)
            own_planner = planner if description.config.rank == 0 else None
            spawning = asyncio.to_thread(_spawn, described, stage, own_planner)
            (pipe, process), cancelled = await _to_its_end(spawning)
            self._adopt(description.config.rank, pipe, process)

    def _adopt(self, rank: int, pipe: Connection, process: _Process) -> None:
        child = _Child(rank, pipe, process)
        self._children.append(child)
        asyncio.get_running_loop().add_reader(pipe.fileno(), self._heard, child)

    def _heard(self, child: _Child) -> None:
        try:
            child.error = msgspec.json.decode(child.pipe.recv_bytes(), type=ErrorInfo)
        except (EOFError, OSError):
            asyncio.get_running_loop().remove_reader(child.pipe.fileno())
            self._ending(child, _REAP_TRIES)
        except msgspec.DecodeError:
            child.error = ErrorInfo("ProtocolError", f"rank {child.rank} sent its supervisor garbage")

    def _ending(self, child: _Child, tries: int) -> None:
        """Its pipe is closed, so that it is at its end: its exit code will be there any moment."""
        code = child.reap(0)
        if code is None and tries:
            asyncio.get_running_loop().call_later(_REAP_POLL_S, self._ending, child, tries - 1)
        elif not child.gone.done():
            child.gone.set_result(None)
            self._ended(child.rank, self._why(child, code))

    def _why(self, child: _Child, code: int | None) -> PipelinedError | None:
        if child.error is not None:
            return child.error.exception()
        if code == 0:
            return None
        if code == EXIT_FAILED:  # whatever fails later is told through the pipe
            return RankLostError(
                f"process {child.pid} ended before it began: its main script or its stage could not be imported there; "
                'its message is above (a script that starts processes needs `if __name__ == "__main__":`)',
                rank=child.rank,
            )
        how = f"was killed by {signal.Signals(-code).name}" if code and code < 0 else f"ended with exit code {code}"
        return RankLostError(f"process {child.pid} {how}", rank=child.rank)

    async def stop(self, timeout_s: float) -> None:
        """See `World`."""
        if self._children:
            await asyncio.wait([child.gone for child in self._children], timeout=timeout_s)
        self.kill()
        loop = asyncio.get_running_loop()
        for child in self._children:
            await asyncio.to_thread(child.reap, None)
            loop.remove_reader(child.pipe.fileno())
            child.pipe.close()
        self._children.clear()
        if self._directory:
            await asyncio.to_thread(shutil.rmtree, self._directory, ignore_errors=True)

    def kill(self) -> None:
        """See `World`."""
        for child in self._children:
            if not child.gone.done():
                child.process.kill()


async def _to_its_end(work: Coroutine[Any, Any, T]) -> tuple[T, asyncio.CancelledError | None]:
    """Await work in a thread, which goes on when the wait is cancelled: what it made must be known to be ended."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    return task.result(), cancelled


def _spawn(description: RankDescription, stage: Stage | None, planner: Planner | None) -> tuple[Connection, _Process]:
    """Start a child; blocks for some milliseconds."""
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    encoded = msgspec.json.encode(description)
    try:
        if stage is None:
            command = [sys.executable, "-m", "pipelined.rank", str(theirs.fileno())]
            environment = _environment(description.threads)
            process: _Process
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
