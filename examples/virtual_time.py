"""The real runtime in virtual time: an hour of eight ranks' work, tested in moments, the same way each time.

The stages, the ranks and the transport are those that run in processes; the clock and the device are other ones. The
device is busy for the time that each stage's `cost` gives, and computes at once.

Run it: python examples/virtual_time.py
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from pipelined import Pipeline
from pipelined.clock import LoopClock
from pipelined.clock.virtual import run
from pipelined.pipeline import TaskWorld
from pipelined.stage.emulated import EmulatedDevice

if TYPE_CHECKING:
    from pipelined.stage import Payload

STAGES, INPUTS, STAGE_S = 8, 100, 36.0


class AddOne:
    def cost(self, _id: int) -> float:
        return STAGE_S

    def forward(self, x: Payload) -> Payload:
        return {"n": x["n"] + 1}


async def makespan() -> float:
    """Virtual seconds for all inputs."""
    world = TaskWorld(clock=lambda _rank: LoopClock(), device=lambda _rank, clock: EmulatedDevice(clock, float))
    async with Pipeline([AddOne() for _ in range(STAGES)], world=world) as pipe:
        started_s = world.clock.now()
        outputs = [y["n"] async for y in pipe.stream({"n": n} for n in range(INPUTS))]
        assert outputs == [n + STAGES for n in range(INPUTS)]
        return world.clock.now() - started_s


def main() -> float:
    started_s = time.perf_counter()
    virtual_s = run(makespan())
    ideal_s = (INPUTS + STAGES - 1) * STAGE_S
    print(f"{virtual_s:.1f} s of virtual time, ideal {ideal_s:.1f} s; took {time.perf_counter() - started_s:.2f} s")
    return virtual_s


if __name__ == "__main__":
    main()
