"""The CPU as a device: one worker thread with its own number of torch threads."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from queue import SimpleQueue
from typing import TYPE_CHECKING

from pipelined.errors import ConfigError
from pipelined.stage.serial import SerialDevice

if TYPE_CHECKING:
    from pipelined.clock import Clock
    from pipelined.stage.completion import DeviceLaunch

__all__ = ["CpuDevice"]

_JOIN_POLL_S = 0.001


class CpuDevice(SerialDevice):
    """Runs work in order on a thread of its own. Outputs become known when the event fires.

    The loop is woken once for all launches that ended since it last ran.
    """

    def __init__(self, clock: Clock, threads: int | None = None, name: str = "cpu") -> None:
        """Args: clock: readable from any thread. threads: of torch within one launch; None: as torch is set.

        Raises:
            ConfigError: `threads` is less than 1.
        """
        if threads is not None and threads < 1:
            raise ConfigError(f"threads={threads}: expected at least 1")
        super().__init__(clock, name or "cpu")
        self.threads = threads
        self._queue: SimpleQueue[DeviceLaunch | None] = SimpleQueue()
        self._ended: deque[DeviceLaunch] = deque()
        self._waking = False
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def _begin(self, launch: DeviceLaunch) -> None:
        if self._thread is None:
            self._loop = asyncio.get_running_loop()
            self._thread = threading.Thread(target=self._work, name=f"pipelined-{self.name}", daemon=True)
            self._thread.start()
        self._queue.put(launch)

    async def _stop(self) -> None:
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._queue.put(None)
        # Joining would block the loop; the thread has nothing left to do but to see the None.
        while thread.is_alive():  # noqa: ASYNC110
            await asyncio.sleep(_JOIN_POLL_S)
        self._loop = None

    # ---- on the worker thread ----

    def _work(self) -> None:
        if self.threads is not None:
            import torch

            torch.set_num_threads(self.threads)  # of OpenMP and MKL, for this thread alone
        now, ended, loop = self.clock.now, self._ended, self._loop
        assert loop is not None
        while (launch := self._queue.get()) is not None:
            launch.started_s = now()
            launch.run()
            launch.ended_s = now()
            ended.append(launch)
            del launch  # its outputs must not live until the next launch comes
            # If a wake-up is under way, it is sure to see what was just appended: `_drain` lowers the flag first.
            if not self._waking:
                self._waking = True
                try:
                    loop.call_soon_threadsafe(self._drain)
                except RuntimeError:  # the loop was closed without `aclose`: nobody is left to tell
                    return

    # ---- on the loop ----

    def _drain(self) -> None:
        self._waking = False
        try:
            while self._ended:
                self._complete(self._ended.popleft())
        finally:
            if self._ended:  # a callback raised: the loop reports it, the others still get theirs
                asyncio.get_running_loop().call_soon(self._drain)
