"""A pipeline of one's own: three stages, a process each, tensors through shared memory; one input that fails.

Run it: python examples/custom_pipeline.py
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import torch

from pipelined import Pipeline
from pipelined.errors import StageError

if TYPE_CHECKING:
    from pipelined.stage import Payload, StageContext


class Frames:
    """Makes the signal of a number: a second of a sine wave."""

    def forward(self, x: Payload) -> Payload:
        time_s = torch.linspace(0, 1, 16_000)
        return {"hertz": x["hertz"], "signal": torch.sin(2 * torch.pi * x["hertz"] * time_s)}


class Spectrum:
    """Looks for the loudest frequency. Its window is made once, in the process in which the stage runs."""

    def setup(self, ctx: StageContext) -> None:
        self.window = torch.hann_window(16_000)

    def forward(self, x: Payload) -> Payload:
        if x["hertz"] >= 8_000:
            raise ValueError(f"{x['hertz']} Hz cannot be told apart at 16,000 samples a second")
        return {"hertz": x["hertz"], "power": torch.fft.rfft(x["signal"] * self.window).abs()}


def loudest(x: Payload) -> Payload:
    """A stage may be a plain function."""
    return {"hertz": x["hertz"], "found": int(x["power"].argmax())}


async def main() -> list[Any]:
    results: list[Any] = []
    async with Pipeline([Frames(), Spectrum(), loudest], workers="process", transport="shm://") as pipe:
        inputs = ({"hertz": hertz} for hertz in (440, 1_000, 9_999, 5_000))
        async for y in pipe.stream(inputs, return_exceptions=True):  # several in flight, in order
            if isinstance(y, StageError):
                print(f"this one failed, and no other: {y}")
            else:
                print(f"{y['hertz']} Hz: found {y['found']}")
            results.append(y)
        one = await pipe.submit({"hertz": 7})  # or one at a time
        print(f"{one['hertz']} Hz: found {one['found']}")
    return [*results, one]


if __name__ == "__main__":  # the processes import this file
    asyncio.run(main())
