"""Every wait on a peer that owes something ends, and the error says who owed what."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from pipeline_stages import Add, FailsInSetup, Pass, SlowSetup

from pipelined.clock import MonotonicClock
from pipelined.errors import ConfigError, DeadlineError, PipelinedError, StageError
from pipelined.llm import AsyncLLM
from pipelined.messages import SamplingParams
from pipelined.pipeline import Pipeline, TaskWorld
from pipelined.rank import RankConfig
from pipelined.rank.deadlines import Deadlines
from pipelined.stage.emulated import EmulatedDevice


async def test_a_wait_has_a_floor_and_grows_with_what_was_seen() -> None:
    deadlines = Deadlines(MonotonicClock(), 0.05, window=2)
    started_s = time.monotonic()
    with pytest.raises(DeadlineError, match=r"the thing did not come within 0\.05 s"):
        await deadlines.wait(asyncio.sleep(10), "the thing")
    assert time.monotonic() - started_s < 1
    deadlines.saw(0.5)
    deadlines.saw(0.1)
    assert deadlines.timeout_s == pytest.approx(0.05 + 20 * 2 * 0.5)
    assert await deadlines.wait(asyncio.sleep(0, "came"), "the thing") == "came"


class Stuck(EmulatedDevice):
    """Never completes what takes time."""

    def _first(self, launch: Any) -> None:
        if launch.cost_s == 0:
            super()._first(launch)

    async def aclose(self) -> None:
        self._alarm.close()


def world_with_a_stuck(rank: int) -> TaskWorld:
    return TaskWorld(
        device=lambda own, clock: Stuck(clock, lambda _: 1.0) if own == rank else EmulatedDevice(clock, lambda _: 0.0)
    )


@pytest.mark.parametrize("rank", [0, 1, 2])
async def test_a_device_that_is_stuck_is_reported(rank: int) -> None:
    started_s = time.monotonic()
    with pytest.raises(DeadlineError, match=r"did not come within 0\.3 s"):
        async with Pipeline([Add(), Add(), Add()], world=world_with_a_stuck(rank), step_timeout_s=0.3) as pipe:
            await pipe.submit({"n": 1})
    assert time.monotonic() - started_s < 5


@pytest.mark.parametrize(("pp_size", "rank"), [(1, 0), (2, 0), (2, 1)])
async def test_a_stall_of_the_engine_is_reported(pp_size: int, rank: int) -> None:
    """The last stage sends nothing on, so that only rank 0 can miss its results."""
    world = world_with_a_stuck(rank)
    with pytest.raises(DeadlineError, match="step 0"):
        async with AsyncLLM("toy://?layers=2", pp_size=pp_size, world=world, step_timeout_s=0.3) as llm:
            async with asyncio.timeout(5):
                await llm.complete([1, 2, 3], SamplingParams(max_tokens=2))


async def test_new_requests_do_not_put_off_the_deadline() -> None:
    async with AsyncLLM("toy://?layers=2", world=world_with_a_stuck(0), step_timeout_s=0.4) as llm:

        async def ask() -> None:
            await llm.complete([1, 2, 3], SamplingParams(max_tokens=2))

        first, others = asyncio.ensure_future(ask()), []
        async with asyncio.timeout(4):
            while not first.done():
                others.append(asyncio.ensure_future(ask()))
                await asyncio.sleep(0.05)
        with pytest.raises(DeadlineError, match="step 0"):
            await first
        ends = await asyncio.gather(*others, return_exceptions=True)
        assert all(isinstance(end, DeadlineError) for end in ends)


async def test_idle_waits_have_no_deadline() -> None:
    async with Pipeline([Add(), Add()], step_timeout_s=0.05) as pipe:
        await pipe.submit({"n": 1})
        await asyncio.sleep(0.3)
        assert (await pipe.submit({"n": 1}))["n"] == 3


async def test_a_step_that_takes_long_raises_the_deadline_of_the_next() -> None:
    """A floor far below the time of a step works once such a step has been seen; the first one has the floor alone."""
    async with Pipeline([Add(seconds=0.15), Add(seconds=0.15)], step_timeout_s=0.6, depth=3) as pipe:
        outputs = [y["n"] async for y in pipe.stream({"n": n} for n in range(8))]
        assert outputs == [n + 2 for n in range(8)]


@pytest.mark.parametrize("slow", [0, 1, 2])
async def test_a_slow_rank_is_named(slow: int) -> None:
    stages: list[Any] = [Add(), Add(), Add()]
    stages[slow] = SlowSetup(2.5)
    with pytest.raises(DeadlineError) as caught:
        async with Pipeline(stages, setup_timeout_s=0.8):
            pass
    assert f"[{slow}]" in str(caught.value)
    assert "set-up time-out" in str(caught.value)


@pytest.mark.parametrize("ours", [False, True])
@pytest.mark.parametrize("rank", [0, 1, 2])
async def test_a_rank_that_cannot_be_set_up_is_named_at_once(rank: int, ours: bool) -> None:
    """Also while others are still at it."""
    stages: list[Any] = [Pass(), Pass(), Pass()]
    stages[rank - 1] = SlowSetup(0.5)
    stages[rank] = FailsInSetup(ours)
    with pytest.raises(PipelinedError) as caught:
        async with Pipeline(stages, setup_timeout_s=30):
            pass
    assert isinstance(caught.value, ConfigError if ours else StageError)
    assert f"rank {rank}" in str(caught.value)
    assert "broken" in str(caught.value)
    assert "weights.bin" in str(caught.value)
    if isinstance(caught.value, StageError):
        assert "pipeline_stages.py" in caught.value.remote_traceback


@pytest.mark.parametrize("settings", [{"size": 0}, {"window": 0}])
def test_shapes_that_cannot_be(settings: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        RankConfig(**({"pipeline": "p", "rank": 0, "size": 1, "window": 1} | settings))  # type: ignore[arg-type]


@pytest.mark.parametrize("fed", [False, True])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_who_is_connected_to_whom_is_symmetric(size: int, fed: bool) -> None:
    of = {rank: RankConfig("p", rank, size, 3, fed, fed).peers() for rank in range(-1, size)}
    for kind in ("messages", "tensors", "health"):
        for rank, peers in of.items():
            assert all(rank in getattr(of[other], kind) for other in getattr(peers, kind)), (kind, rank)
