"""A timer that is as precise as the host allows.

The timers of event loops tick in milliseconds: uvloop's fire up to a millisecond late or early. On Linux an alarm is a
timerfd, watched by the loop: it fires within about 0.1 ms on any loop, and waiting costs nothing.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
from typing import TYPE_CHECKING

from pipelined.clock.base import Clock, MonotonicClock

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Alarm"]

_CLOCK_MONOTONIC = 1
_TFD_TIMER_ABSTIME = 1
_LATER_NS = 1000  # so that rounding never makes it fire before the time it was set to


class _TimerSpec(ctypes.Structure):
    """`struct itimerspec`."""

    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    )


class Alarm:
    """Calls back on the running loop each time that the time it was last set to is reached. Never early."""

    def __init__(self, clock: Clock, callback: Callable[[], None]) -> None:
        self._clock = clock
        self._callback = callback
        self._handle: asyncio.TimerHandle | None = None
        self._when_s = 0.0
        self._fd = -1
        self._loop: asyncio.AbstractEventLoop | None = None
        # Another clock than the host's is not the kernel's to watch.
        precise = type(clock) is MonotonicClock and sys.platform == "linux"
        self._libc = ctypes.CDLL(None, use_errno=True) if precise else None

    def set(self, when_s: float) -> None:
        """Call back once `clock.now()` has reached `when_s`; replaces what was set before."""
        self._when_s = when_s
        if self._libc is not None:
            self._arm(self._libc, when_s)
            return
        if self._handle is not None:
            self._handle.cancel()
        self._handle = self._clock.call_at(when_s, self._ring)

    def close(self) -> None:
        """Forget what was set, and close the descriptor. It may be set again."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        if self._fd >= 0:
            assert self._loop is not None
            if not self._loop.is_closed():
                self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd, self._loop = -1, None

    def _ring(self) -> None:
        self._handle = None
        if self._clock.now() < self._when_s:
            self.set(self._when_s)
        else:
            self._callback()

    def _arm(self, libc: ctypes.CDLL, when_s: float) -> None:
        if self._fd < 0:
            self._fd = libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
            if self._fd < 0:
                raise OSError(ctypes.get_errno(), "timerfd_create")
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._fd, self._expired)
        seconds, nanoseconds = divmod(max(1, int(when_s * 1e9) + _LATER_NS), 1_000_000_000)
        spec = _TimerSpec(0, 0, seconds, nanoseconds)
        if libc.timerfd_settime(self._fd, _TFD_TIMER_ABSTIME, ctypes.byref(spec), None):
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def _expired(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:  # set again in the meantime
            return
        self._ring()
