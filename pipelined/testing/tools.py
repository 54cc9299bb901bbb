"""Small doubles that checks hand to a transport: payloads with a known pattern, an event, clocks at other speeds."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import torch

from pipelined.messages import TensorHeader

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ManualEvent", "ScaledClock", "bits", "header", "pattern", "same"]

_BLOCK_BYTES = 65_521  # prime, so that a shifted or repeated block never lines up with a page


def pattern(seed: int, size_bytes: int) -> torch.Tensor:
    """A flat uint8 tensor of that size which no other seed (modulo 251) gives."""
    block = ((torch.arange(min(_BLOCK_BYTES, max(1, size_bytes))) * 7 + seed * 97) % 251).to(torch.uint8)
    return block.repeat(size_bytes // block.numel() + 1)[:size_bytes].clone()


def header(step: int, index: int = 0, *, count: int = 1, name: str = "x", meta: bytes = b"") -> TensorHeader:
    """A header for step `step`; the link fills in the rest."""
    return TensorHeader(epoch=0, step=step, index=index, count=count, name=name, meta=meta)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes, flat; works for dtypes that can't be compared."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal in shape, dtype and every bit (NaNs too)."""
    return left.shape == right.shape and left.dtype == right.dtype and torch.equal(bits(left), bits(right))


class ManualEvent:
    """An `Event` that fires when told to."""

    def __init__(self) -> None:
        self._fired = False
        self._callbacks: list[Callable[[], None]] = []

    def done(self) -> bool:
        """Whether `fire` was called."""
        return self._fired

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call back on `fire`; at once if that was before."""
        if self._fired:
            callback()
        else:
            self._callbacks.append(callback)

    def fire(self) -> None:
        """Everything launched before the event has completed."""
        self._fired = True
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()


class ScaledClock:
    """A clock that runs `rate` times as fast as real time, `skew_s` ahead: shows who reads another one."""

    def __init__(self, rate: float, skew_s: float = 0.0) -> None:
        self.rate = rate
        self.skew_s = skew_s
        self._start_s = time.monotonic()

    def now(self) -> float:
        """Seconds of this clock."""
        return (time.monotonic() - self._start_s) * self.rate + self.skew_s

    async def sleep(self, delay_s: float) -> None:
        """Suspend for `delay_s` of this clock."""
        await asyncio.sleep(delay_s / self.rate)

    def call_at(self, when_s: float, callback: Callable[..., object], *args: object) -> asyncio.TimerHandle:
        """Call back once `now()` has reached `when_s`."""
        return asyncio.get_running_loop().call_later(max(0.0, when_s - self.now()) / self.rate, callback, *args)

    def timeout(self, delay_s: float | None) -> asyncio.Timeout:
        """`asyncio.timeout` of `delay_s` of this clock."""
        return asyncio.timeout(None if delay_s is None else delay_s / self.rate)
