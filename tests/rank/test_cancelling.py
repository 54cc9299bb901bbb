"""A rank that is ended, or a pipeline that is left, at any moment: nothing hangs, nothing is left."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
from typing import Any

import pytest
import torch
from pipeline_stages import Add, Lives, Pass

from pipelined.errors import ConfigError, EngineClosedError, RankLostError
from pipelined.pipeline import Pipeline, TaskWorld


def tasks_of_ours() -> list[asyncio.Task[Any]]:
    return [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]


async def nothing_left() -> None:
    for _ in range(3):
        await asyncio.sleep(0)
    assert not tasks_of_ours()
    for _ in range(100):  # a thread that was told to end may need a moment
        threads = [thread for thread in threading.enumerate() if thread.name.startswith("pipelined-")]
        if not threads:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(threads)


async def iterations(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def x_of(n: int) -> dict[str, Any]:
    return {"n": n} | {f"t{i}": torch.full((4,), n) for i in range(n % 4)}


@pytest.mark.parametrize("device", ["cpu", "stream"])
@pytest.mark.parametrize("rank", [0, 1, 2])
async def test_a_rank_ended_after_any_number_of_iterations(rank: int, device: str) -> None:
    dice = random.Random(rank)
    for count in [*range(rank, 40, 8), *(dice.randrange(40, 400) for _ in range(2))]:
        world = TaskWorld()
        async with Pipeline([Add(), Pass(), Add()], world=world, device=device) as pipe:
            jobs = [asyncio.create_task(pipe.submit(x_of(n))) for n in range(30)]
            await iterations(count)
            world._tasks[rank].cancel()
            async with asyncio.timeout(3):
                ends = await asyncio.gather(*jobs, return_exceptions=True)
            for n, end in enumerate(ends):
                if isinstance(end, dict):
                    assert end["n"] == n + 2
                else:
                    assert isinstance(end, RankLostError), end
                    assert end.rank == rank
        await nothing_left()


@pytest.mark.parametrize("device", ["cpu", "stream"])
async def test_left_after_any_number_of_iterations(device: str) -> None:
    for count in [*range(0, 60, 7), 150]:
        async with Pipeline([Add(), Pass(), Add()], device=device) as pipe:
            jobs = [asyncio.create_task(pipe.submit(x_of(n))) for n in range(30)]
            await iterations(count)
        async with asyncio.timeout(3):
            ends = await asyncio.gather(*jobs, return_exceptions=True)
        assert all(
            isinstance(end, dict | EngineClosedError) or (count == 0 and isinstance(end, ConfigError)) for end in ends
        ), ends
        await nothing_left()


async def test_the_opener_cancelled_after_any_number_of_iterations() -> None:
    """Also while the ranks start: stages that were set up are torn down."""
    opened = 0
    for count in [*range(0, 40, 2), *range(40, 140, 10), None]:
        stages = [Lives(), Lives(), Lives()]

        async def use(stages: list[Lives] = stages) -> None:
            nonlocal opened
            async with Pipeline(stages) as pipe:
                opened += 1
                while True:
                    await pipe.submit(x_of(3))

        task = asyncio.create_task(use())
        if count is not None:
            await iterations(count)
        else:  # as many as it takes: on a busy machine the devices' threads are slow
            async with asyncio.timeout(60):
                while not opened:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
        task.cancel()
        async with asyncio.timeout(3):
            await asyncio.wait([task])
        assert task.cancelled()
        for stage in stages:
            assert [word for word in stage.log if word != "forward"] in (
                [],
                [f"setup {stages.index(stage)}/3", "teardown"],
            )
        await nothing_left()
    assert 0 < opened < 30


async def test_cancelled_twice() -> None:
    """Once while it runs, once more while it is being left."""
    for count in range(0, 30, 2):

        async def use() -> None:
            async with Pipeline([Add(), Add(seconds=0.01)]) as pipe:
                while True:
                    await pipe.submit(x_of(1))

        task = asyncio.create_task(use())
        await asyncio.sleep(0.02)
        task.cancel()
        await iterations(count)
        task.cancel()
        async with asyncio.timeout(3):
            await asyncio.wait([task])
        async with asyncio.timeout(3):
            while tasks_of_ours():  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        await nothing_left()


async def test_nothing_grows() -> None:
    """Many pipelines, one after the other, leave no objects of theirs behind."""

    async def round_() -> None:
        async with Pipeline([Add(), Pass()]) as pipe:
            await asyncio.gather(*(pipe.submit(x_of(n)) for n in range(5)))

    def ours() -> int:
        gc.collect()
        return sum(str(type(each).__module__).startswith("pipelined.") for each in gc.get_objects())

    await round_()
    before = ours()
    for _ in range(5):
        await round_()
    assert ours() <= before + 3
