"""The injected clock, and the loop whose time jumps when every task waits."""

from pipelined.clock.base import Clock, LoopClock, MonotonicClock

__all__ = ["Clock", "LoopClock", "MonotonicClock"]
