"""Ranks as processes of this host. See `World`."""

from __future__ import annotations

import asyncio
import multiprocessing
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from pipelined.clock import Clock, MonotonicClock
from pipelined.errors import ConfigError
from pipelined.messages import ErrorInfo
from pipelined.pipeline.children import Child, spawn
from pipelined.pipeline.worlds import WorldNews
from pipelined.rank.lifeline import FromChild, Progress, RankFailed
from pipelined.transport import FileRendezvous, Rendezvous

if TYPE_CHECKING:
    from collections.abc import Collection, Coroutine, Sequence

    from pipelined.rank import Planner
    from pipelined.rank.description import RankDescription
    from pipelined.stage import Stage

__all__ = ["ProcessWorld"]

T = TypeVar("T")

_REAP_POLL_S = 0.005
_REAP_TRIES = 200


class ProcessWorld(WorldNews):
    """Ranks as processes of this host, each with a loop of its own."""

    processes = True

    def __init__(self) -> None:
        super().__init__()
        self.clock: Clock = MonotonicClock()
        self.next_epoch = 0
        self._directory = ""
        self._rendezvous: FileRendezvous | None = None
        self._children: dict[int, Child] = {}

    def __repr__(self) -> str:
        return f"<ProcessWorld {self.pids}>"

    @property
    def rendezvous(self) -> Rendezvous:
        """See `World`; there is one once started."""
        assert self._rendezvous is not None
        return self._rendezvous

    @property
    def directory(self) -> str:
        """Of the rendezvous."""
        assert self._rendezvous is not None
        return str(self._rendezvous.directory)

    @property
    def pids(self) -> list[int]:
        """Process ids, by rank."""
        return [child.pid for _, child in sorted(self._children.items())]

    # ---- an epoch begins ----

    async def start(
        self,
        descriptions: Sequence[RankDescription],
        stages: Sequence[Stage | None],
        planner: Planner | None,
        *,
        lost: Collection[int] = (),
    ) -> None:
        """See `World`."""
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            raise ConfigError(
                "a pipeline of processes was started while a child process imports the main script; put what starts "
                'it behind `if __name__ == "__main__":`'
            )
        self.next_epoch = descriptions[0].epoch + 1
        await self._part(lost, descriptions[0].config.heartbeat_bound_s)
        cancelled: asyncio.CancelledError | None = None
        if not self._directory:
            self._directory, cancelled = await _to_its_end(asyncio.to_thread(tempfile.mkdtemp, prefix="pipelined-"))
        # Of an epoch's own: what peers of an earlier one have published there must mislead nobody.
        self._rendezvous = FileRendezvous(Path(self._directory) / str(descriptions[0].epoch))
        for description, stage in zip(descriptions, stages, strict=True):
            if cancelled is not None:
                raise cancelled
            described = msgspec.structs.replace(description, rendezvous=self.directory)
            child = self._children.get(description.config.rank)
            if child is not None:
                child.parted.clear()
                await asyncio.to_thread(child.hand, described)
                continue
            own_planner = planner if description.config.rank == 0 else None
            spawning = asyncio.to_thread(spawn, described, stage, own_planner)
            (pipe, process), cancelled = await _to_its_end(spawning)
            child = self._children[description.config.rank] = Child(description.config.rank, pipe, process)
            asyncio.get_running_loop().add_reader(pipe.fileno(), self._heard, child)

    async def _part(self, lost: Collection[int], timeout_s: float) -> None:
        """Wait until each rank has ended or waits for its next epoch; end those that are lost or late."""
        if not self._children:
            return
        self._parting = True
        try:
            for rank in lost:
                if rank in self._children:
                    self._children[rank].process.kill()
            try:
                async with self.clock.timeout(timeout_s):
                    for child in self._children.values():
                        await child.parted.wait()
            except TimeoutError:
                for child in self._children.values():
                    if not child.parted.is_set():
                        child.process.kill()
                for child in self._children.values():
                    await child.parted.wait()
            for rank in lost:
                if rank in self._children:
                    await asyncio.wait([self._children[rank].gone])
            for child in [child for child in self._children.values() if child.gone.done()]:
                await self._bury(child)
        finally:
            self._parting = False

    # ---- what children say ----

    def _heard(self, child: Child) -> None:
        try:
            message = msgspec.json.decode(child.pipe.recv_bytes(), type=FromChild)
        except (EOFError, OSError):
            asyncio.get_running_loop().remove_reader(child.pipe.fileno())
            self._ending(child, _REAP_TRIES)
        except msgspec.DecodeError:
            child.error = ErrorInfo("ProtocolError", f"rank {child.rank} sent its supervisor garbage")
        else:
            if isinstance(message, Progress):
                self._said(child.rank, message.what)
            elif isinstance(message, RankFailed):
                child.error = message.error
            else:
                child.parted.set()
                self._report(child.rank, message.error.exception())

    def _ending(self, child: Child, tries: int) -> None:
        """Its pipe is closed, so that it is at its end: its exit code will be there any moment."""
        code = child.reap(0)
        if code is None and tries:
            asyncio.get_running_loop().call_later(_REAP_POLL_S, self._ending, child, tries - 1)
        elif not child.gone.done():
            child.gone.set_result(None)
            child.parted.set()
            self._report(child.rank, child.why(code))

    # ---- the end ----

    async def stop(self, timeout_s: float) -> None:
        """See `World`."""
        for child in self._children.values():
            if child.parted.is_set() and not child.gone.done():
                child.process.kill()  # it waits for an epoch that will never be
        if self._children:
            await asyncio.wait([child.gone for child in self._children.values()], timeout=timeout_s)
        self.kill()
        for child in tuple(self._children.values()):
            await self._bury(child)
        if self._directory:
            await asyncio.to_thread(shutil.rmtree, self._directory, ignore_errors=True)
            self._directory = ""

    async def _bury(self, child: Child) -> None:
        await asyncio.to_thread(child.reap, None)
        asyncio.get_running_loop().remove_reader(child.pipe.fileno())
        child.pipe.close()
        if self._children.get(child.rank) is child:
            del self._children[child.rank]

    def kill(self) -> None:
        """See `World`."""
        for child in self._children.values():
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
