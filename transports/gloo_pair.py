"""A gloo process group of two, and threads that wait for it. Knows no loop and no lane.

Gloo's handles can't be awaited: `is_completed` stays false, and there is no future. So each operation blocks a helper
thread. Nor can they be cancelled. What ends them is an operation that times out, which breaks the pair; except those
whose bytes are just on the wire, which gloo forgets to wake when a pair breaks: these end by their own time limit.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from datetime import timedelta
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.distributed_c10d import ProcessGroupGloo, Store

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Helpers", "Pair", "make_device"]

_SLOWEST_BYTES_PER_S = 10e6
_CONNECT = timedelta(seconds=5)
"""Both sides wait for each other's address first, for as long as the link stands; connecting itself takes no time."""
_AT_ONCE = timedelta(milliseconds=1)
_LAST_TAG = (1 << 31) - 1


class Helpers:
    """Threads for jobs that block: one a job, kept for the next job, as many as are ever busy at once.

    They are daemons, so that idle ones keep no process alive; but one that is inside of gloo when the interpreter ends
    would abort the process, so whoever makes them calls `join` before.
    """

    def __init__(self, name: str, ended: Callable[[], None]) -> None:
        """Args: ended: called once, on one of the threads or in `stop`, when the last has nothing left to do."""
        self._name = name
        self._ended = ended
        self._lock = threading.Lock()
        self._idle: deque[SimpleQueue[Callable[[], None] | None]] = deque()
        self._stopping = False
        self.threads: list[threading.Thread] = []

    def run(self, job: Callable[[], None]) -> None:
        """Run `job` on a thread that is free. Nothing once stopped."""
        with self._lock:
            if self._stopping:
                return
            if self._idle:
                self._idle.pop().put(job)
                return
            jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
            jobs.put(job)
            thread = threading.Thread(target=self._work, args=(jobs,), name=self._name, daemon=True)
            self.threads.append(thread)
        thread.start()

    def stop(self) -> None:
        """Take no more jobs; each thread ends with the job that it has."""
        with self._lock:
            self._stopping = True
            for jobs in self._idle:
                jobs.put(None)
            none_left = not self.threads
        if none_left:
            self._ended()

    def join(self, timeout_s: float) -> None:
        """After `stop`: wait for all of them, at most so long for each."""
        for thread in list(self.threads):
            thread.join(timeout_s)

    def _work(self, jobs: SimpleQueue[Callable[[], None] | None]) -> None:
        while (job := jobs.get()) is not None:
            job()
            job = None  # else its tensors would live until the next one
            with self._lock:
                if self._stopping:
                    break
                self._idle.append(jobs)
        with self._lock:
            self.threads.remove(threading.current_thread())
            last = not self.threads
        if last:
            self._ended()


class _Board(Store):
    """Where gloo's two sides tell each other their addresses: what one sets is sent to the other."""

    def __init__(self, tell: Callable[[str, bytes], None]) -> None:
        super().__init__()
        self._tell = tell
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._closed = False

    def put(self, key: str, value: bytes) -> None:
        """The other side has set it."""
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def close(self) -> None:
        """Whoever waits gets an error."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def set(self, key: str, value: bytes | str) -> None:
        """See `Store`."""
        encoded = value.encode() if isinstance(value, str) else bytes(value)
        self.put(key, encoded)
        self._tell(key, encoded)

    def get(self, key: str) -> bytes:
        """See `Store`."""
        self.wait([key])
        return self._values[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """See `Store`. For as long as the link stands."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or all(key in self._values for key in keys))
            if self._closed:
                raise RuntimeError("the link is closed")

    def check(self, keys: Sequence[str]) -> bool:
        """See `Store`."""
        with self._changed:
            return all(key in self._values for key in keys)


class Pair:
    """Two processes. `connect`, `send`, `receive` and `break_up` block: they are for helper threads."""

    def __init__(self, place: int, patience_s: float, tell: Callable[[str, bytes], None]) -> None:
        """Make one side.

        Args:
            place: 0 on one side, 1 on the other.
            patience_s: A transfer that takes longer, and longer than its size excuses, breaks the pair. Not shorter
                than what it takes elsewhere to give up a silent peer.
            tell: Hands a key and a value to the other side's `put`.
        """
        self._place = place
        self._patience_s = patience_s
        self._board: _Board | None = _Board(tell)
        self._group: Any = None
        self._lock = threading.Lock()
        self._over = False

    def put(self, key: str, value: bytes) -> None:
        """The other side told this."""
        if (board := self._board) is not None:
            board.put(key, value)

    def connect(self, device: object) -> None:
        """Set up the group.

        Raises:
            RuntimeError: The other side is gone or can't be reached, or this one was closed.
        """
        board = self._board
        if board is None:
            return
        gloo: Any = ProcessGroupGloo  # torch's stubs leave out most of it
        options = gloo._Options()
        options._devices = [device]
        options._threads = 1  # for collective operations, of which there are none
        options._timeout = _CONNECT
        group = gloo(board, self._place, 2, options)
        with self._lock:
            if not self._over:
                self._group = group

    def send(self, tensor: torch.Tensor, tag: int) -> None:
        """Returns once the tensor's memory may be written again.

        Raises:
            RuntimeError: The pair is broken.
        """
        self._standing().send([tensor], 1 - self._place, tag).wait(self._limit(tensor))

    def receive(self, tensor: torch.Tensor, tag: int) -> None:
        """Returns once the tensor is filled with what was sent under this tag.

        Raises:
            RuntimeError: The pair is broken.
        """
        self._standing().recv([tensor], 1 - self._place, tag).wait(self._limit(tensor))

    def _limit(self, tensor: torch.Tensor) -> timedelta:
        return timedelta(seconds=self._patience_s + tensor.nbytes / _SLOWEST_BYTES_PER_S)

    def _standing(self) -> Any:
        group = self._group
        if group is None:
            raise RuntimeError("the pair is closed")
        return group

    def close(self) -> None:
        """Wake `connect`. Does not block; `break_up` does the rest."""
        self._over = True
        board, self._board = self._board, None
        if board is not None:
            board.close()

    def break_up(self) -> None:
        """Make operations fail, here and on the other side, and let the group go."""
        with self._lock:
            self._over = True
            group, self._group = self._group, None
        if group is not None:
            nothing = torch.empty(1, dtype=torch.uint8)
            with contextlib.suppress(RuntimeError):
                group.recv([nothing], 1 - self._place, _LAST_TAG).wait(_AT_ONCE)


def make_device(host: str) -> object:
    """A gloo device, with a thread of its own, that listens on the address `host` only."""
    return ProcessGroupGloo.create_device(hostname=host)
