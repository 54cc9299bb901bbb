"""The injected clock, and the loop whose time jumps when every task waits."""

from pipelined.clock.alarm import Alarm
from pipelined.clock.base import Clock, LoopClock, MonotonicClock
from pipelined.clock.offload import off_loop
from pipelined.clock.virtual import VirtualTimeLoop, virtual_loop

__all__ = ["Alarm", "Clock", "LoopClock", "MonotonicClock", "VirtualTimeLoop", "off_loop", "virtual_loop"]
