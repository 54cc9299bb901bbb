"""A UCX worker driven from the loop: no thread, no polling, no CPU while nothing happens.

UCX tells by a file descriptor that there is something to do, once it has been armed; and it can be armed only when
there is nothing left to do. So whoever is woken goes on until arming succeeds. Imports `ucxx`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ucxx._lib.libucxx as ucx
from ucxx._lib.arr import Array

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

__all__ = ["UcxWorker"]

_TURN_STEPS = 2
"""A step moves at most about 300 KiB by shared memory, 512 KiB else: a turn holds the loop for a millisecond or two."""

_ONE_HOST = {
    "TLS": "posix,self",
    "POSIX_SEG_SIZE": "60k",  # four times as fast as the default; from 64k on lengths overflow, and UCX loses data
    "POSIX_FIFO_MAX_POLL": "4",
}
"""Shared memory: nothing that another host could reach, and nothing that outlives a process that is killed.

Not CMA, though it is a copy less: with it a receiver reads the memory of its peer, and UCX ends the whole process when
that memory is no more, as after the peer gave up in the middle of a transfer.
"""

_SHARED_MEMORY = {"posix", "sysv", "cma", "xpmem", "knem", "mm", "sm", "shm", "self"}

_ALWAYS = {
    "RNDV_FRAG_MEM_TYPE": "host",  # else it looks for a GPU to bounce through
    "WARN_UNUSED_ENV_VARS": "n",
}


@dataclass(eq=False, slots=True)
class _Pending:
    """A request of UCX's, and the memory that it reads or writes."""

    request: Any
    memory: object
    done: Callable[[str], None]


class UcxWorker:
    """One worker with what it is connected to. Lives on the loop's thread.

    Attributes:
        address: What a peer needs to connect to it.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, *, across_hosts: bool) -> None:
        """Args: across_hosts: whether UCX may listen on devices that other hosts reach."""
        settings = _ALWAYS if across_hosts else _ALWAYS | _ONE_HOST
        # UCX handles errors of no kind of shared memory: with them handled, it would offer none. Of all else it does,
        # and an end that has them not handled waits for its peer when it goes.
        ways = os.environ.get("UCX_TLS", settings.get("TLS", "all"))
        self._handles_errors = not set(ways.split(",")) <= _SHARED_MEMORY
        # What the user has set in the environment stands.
        settings = {name: value for name, value in settings.items() if f"UCX_{name}" not in os.environ}
        self._loop = loop
        self._context: Any = ucx.UCXContext(settings, (ucx.Feature.TAG, ucx.Feature.WAKEUP))
        self._worker: Any = ucx.UCXWorker(self._context)
        self._worker.init_blocking_progress_mode()
        self.address = bytes(self._worker.address.tobytes())
        self._ends: list[Any] = []
        self._pending: list[_Pending] = []
        self._kicking = False
        self._again = False
        self._descriptor = int(self._worker.epoll_file_descriptor)
        self._open = True
        loop.add_reader(self._descriptor, self._kick)
        self._kick()

    def connect(self, address: bytes) -> Any:
        """An end from which a peer's worker can be sent to.

        Raises:
            RuntimeError: UCX finds no way there.
        """
        end = ucx.UCXEndpoint.create_from_worker_address(
            self._worker, ucx.UCXAddress.create_from_buffer(address), endpoint_error_handling=self._handles_errors
        )
        self._ends.append(end)
        self._kick()
        return end

    def send(self, end: Any, data: memoryview, tag: int, done: Callable[[str], None]) -> None:
        """Send; `done` is called with "" once `data` may be written again, or with what went wrong."""
        self._begin(end.tag_send(Array(data), ucx.UCXXTag(tag)), data, done)

    def receive(self, data: memoryview, tag: int, done: Callable[[str], None]) -> None:
        """Receive what is sent with exactly this tag; `done` as with `send`."""
        self._begin(self._worker.tag_recv(Array(data), ucx.UCXXTag(tag), ucx.UCXXTagMaskFull), data, done)

    def _begin(self, request: Any, memory: object, done: Callable[[str], None]) -> None:
        self._pending.append(_Pending(request, memory, done))
        self._kick()

    def _kick(self) -> None:
        """Do what there is to do, then arm; in turns, so that the loop stays responsive."""
        self._again = True
        if self._kicking:
            return
        self._kicking = True
        try:
            steps = 0
            while self._open and self._again:
                if steps >= _TURN_STEPS:
                    self._loop.call_soon(self._kick)
                    return
                steps += 1
                self._again = False
                moved = self._worker.progress_once()
                self._complete()
                if self._open and not self._again:
                    # What was posted by a callback may be done already, and nothing would tell: then look again.
                    self._again = bool(moved) or not self._worker.arm()
        finally:
            self._kicking = False

    def _complete(self) -> None:
        finished = [pending for pending in self._pending if pending.request.completed]
        if finished:
            self._pending = [pending for pending in self._pending if pending not in finished]
            for pending in finished:
                pending.done(self._problem(pending))

    @staticmethod
    def _problem(pending: _Pending) -> str:
        try:
            pending.request.check_error()
        except ucx.UCXError as error:
            return str(error) or type(error).__name__
        return ""

    def close(self) -> None:
        """Let go of everything at once. Idempotent. What is pending is never done."""
        if not self._open:
            return
        self._open = False
        self._loop.remove_reader(self._descriptor)
        # UCX reads and writes the memory of pending requests until the worker is gone, so that goes first. It is gone
        # when nothing refers to it: neither requests nor ends.
        memory = [pending.memory for pending in self._pending]
        self._pending.clear()
        self._ends.clear()
        self._worker = self._context = None
        del memory
