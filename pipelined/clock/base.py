"""Where a rank gets its time from. Runtime code never calls `time.*`."""

from __future__ import annotations

import asyncio
import math
import time
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Clock", "LoopClock", "MonotonicClock"]


class Clock(Protocol):
    """A monotonic clock and the waits that go with it. One per rank; simulated ranks may be skewed."""

    def now(self) -> float:
        """Seconds since an epoch of this clock's own."""
        ...

    async def sleep(self, delay_s: float) -> None:
        """Suspend for `delay_s` of this clock. Cancellable."""
        ...

    def call_at(self, when_s: float, callback: Callable[..., object], *args: object) -> asyncio.TimerHandle:
        """Call back on the running loop once `now()` has reached `when_s`."""
        ...

    def timeout(self, delay_s: float | None) -> asyncio.Timeout:
        """A context manager like `asyncio.timeout`, measured by this clock."""
        ...


class MonotonicClock:
    """Real time. Ranks on one host share it, so their traces line up."""

    def now(self) -> float:
        """Seconds of the host's monotonic clock."""
        return time.monotonic()

    async def sleep(self, delay_s: float) -> None:
        """Suspend for `delay_s`."""
        await asyncio.sleep(delay_s)

    def call_at(self, when_s: float, callback: Callable[..., object], *args: object) -> asyncio.TimerHandle:
        """Call back once `now()` has reached `when_s` (at once if it has); up to 2 ms late. See `Alarm`."""
        loop = asyncio.get_running_loop()
        delay_s = max(0.0, when_s - time.monotonic())
        if delay_s and not isinstance(loop, asyncio.BaseEventLoop):
            # uvloop rounds to milliseconds and counts from the last tick: up to 1 ms early after rounding up.
            delay_s = math.ceil(delay_s * 1e3) / 1e3 + 1e-3
        return loop.call_later(delay_s, callback, *args)

    def timeout(self, delay_s: float | None) -> asyncio.Timeout:
        """`asyncio.timeout`."""
        return asyncio.timeout(delay_s)


class LoopClock:
    """The running loop's own time, shifted by `skew_s`: what a rank has in a simulated world.

    On the virtual-time loop it jumps. All timers are the loop's: skew shifts what a rank reads, not when it wakes.
    """

    def __init__(self, skew_s: float = 0.0) -> None:
        self.skew_s = skew_s

    def now(self) -> float:
        """The loop's time plus the skew."""
        return asyncio.get_running_loop().time() + self.skew_s

    async def sleep(self, delay_s: float) -> None:
        """Suspend for `delay_s` of the loop's time."""
        await asyncio.sleep(delay_s)

    def call_at(self, when_s: float, callback: Callable[..., object], *args: object) -> asyncio.TimerHandle:
        """Call back once `now()` has reached `when_s`."""
        at_s = when_s - self.skew_s
        while (early_s := when_s - (at_s + self.skew_s)) > 0:  # rounded: `now()` would not have reached `when_s`
            at_s += max(early_s, math.ulp(at_s))
        return asyncio.get_running_loop().call_at(at_s, callback, *args)

    def timeout(self, delay_s: float | None) -> asyncio.Timeout:
        """`asyncio.timeout` on the loop's time."""
        return asyncio.timeout(delay_s)
