"""A device that computes next to nothing and is busy for a given time, real or virtual."""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Any

from pipelined.clock.alarm import Alarm
from pipelined.errors import ConfigError
from pipelined.stage.serial import SerialDevice

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipelined.clock import Clock
    from pipelined.stage.completion import DeviceLaunch

__all__ = ["EmulatedDevice"]


class EmulatedDevice(SerialDevice):
    """Runs the work inline, and completes it at `end = max(previous end, begin) + time_of(cost)`.

    Ends are absolute: a timer that fires late delays one completion, never those after it. `started_s` and `ended_s`
    are the ideal times. Outputs are known from the beginning and may be read after the event, as on a GPU.
    """

    def __init__(
        self, clock: Clock, time_of: Callable[[Any], float], name: str = "emulated", *, defer: bool = False
    ) -> None:
        """Args: time_of: seconds for what `launch` was given as cost. defer: run the work at the end, not at the begin.

        A cost of None takes no time.
        With `defer`, inputs that change before the event change the result, and outputs are known at the end.
        """
        super().__init__(clock, name or "emulated")
        self._time_of = time_of
        self._defer = defer
        self._free_s = -math.inf  # when everything begun so far will have ended
        self._running: deque[DeviceLaunch] = deque()
        self._advancing = False
        self._alarm = Alarm(clock, self._advance)

    def _cost_s(self, cost: Any) -> float:
        if cost is None:  # setting up and tearing down are nobody's stage time
            return 0.0
        cost_s = self._time_of(cost)
        if not 0 <= cost_s < math.inf:
            raise ConfigError(f"the time model of {self.name} gave {cost_s} s for {cost!r}; expected 0 or more, finite")
        return cost_s

    def _begin(self, launch: DeviceLaunch) -> None:
        launch.started_s = max(self._free_s, self.clock.now())
        launch.ended_s = self._free_s = launch.started_s + launch.cost_s
        self._running.append(launch)
        if not self._defer:
            self._run(launch)
            launch.tell_known()
        if len(self._running) == 1 and not self._advancing:
            self._first(launch)

    def _first(self, launch: DeviceLaunch) -> None:
        """It is the only one running: whatever takes no time completes within `launch`."""
        self._advance()

    def _advance(self) -> None:
        """Complete what has ended; set the alarm for the next."""
        self._advancing = True
        try:
            while self._running and self._running[0].ended_s <= self.clock.now():
                launch = self._running.popleft()
                self._end(launch)
                self._complete(launch)
        finally:
            self._advancing = False
            if self._running:
                self._alarm.set(self._running[0].ended_s)

    def _run(self, launch: DeviceLaunch) -> None:
        """The device gets to it."""
        launch.run()

    def _end(self, launch: DeviceLaunch) -> None:
        """The device is through with it; consumers are told next."""
        if self._defer:
            launch.run()

    async def aclose(self) -> None:
        """See `Device`. Given up, it forgets what still runs: nothing may wake it afterwards."""
        try:
            await super().aclose()
        finally:
            self._alarm.close()
