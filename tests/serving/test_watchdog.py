from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from pipelined.errors import DeadlineError, PipelinedError, RankLostError
from pipelined.llm.epochs import EngineState
from pipelined.serving.watchdog import Watchdog


class Engine:
    """Ranks that do as many steps as they are told to have done."""

    layers = ((0, 2), (2, 4))

    def __init__(self, steps: list[int]) -> None:
        self.steps = steps
        self.state = EngineState("ready")
        self.asked = asyncio.Event()
        self.lost: asyncio.Future[PipelinedError] = asyncio.get_running_loop().create_future()
        self.silent = False

    async def stats(self) -> dict[int, dict[str, Any]]:
        self.asked.set()
        if self.silent:
            raise DeadlineError("ranks [1] did not answer")
        return {rank: {"steps_applied": done, "steps_done": done} for rank, done in enumerate(self.steps)}

    def lose(self, error: PipelinedError) -> None:
        self.lost.set_result(error)


async def bitten(engine: Engine, owed: bool = True) -> PipelinedError:
    watchdog = Watchdog(engine, lambda: owed, 0.05)  # type: ignore[arg-type]
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        task = group.create_task(watchdog.run())
        error = await engine.lost
        task.cancel()
    return error


async def test_it_names_the_rank_that_is_behind(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "pipelined.serving"):
        error = await bitten(Engine([7, 5]))
    assert isinstance(error, RankLostError)
    assert error.rank == 1
    assert "rank 1 (layers 2-3) is behind" in str(error)
    assert "watchdog" in caplog.text


async def test_it_tells_of_ranks_that_do_not_answer() -> None:
    engine = Engine([1, 1])
    engine.silent = True
    assert "ranks [1] did not answer" in str(await bitten(engine))


async def test_progress_and_idleness_are_left_alone() -> None:
    engine = Engine([0, 0])

    class Busy(Engine):
        async def stats(self) -> dict[int, dict[str, Any]]:
            self.steps[0] += 1
            return await super().stats()

    busy = Busy([0, 0])
    for watched, owed in ((engine, False), (busy, True)):
        watchdog = Watchdog(watched, lambda owed=owed: owed, 0.02)  # type: ignore[arg-type, misc]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await watchdog.run()
        assert not watched.lost.done()
    assert busy.steps[0] > 0


async def test_a_stuck_engine_begins_anew(serve: Any) -> None:
    async with serve(recover=True) as served:
        lost = asyncio.Event()
        served.engine.on_state = lambda state: lost.set() if state.name == "recovering" else None
        body = {"prompt": [1, 2, 3], "max_tokens": 60, "ignore_eos": True, "return_token_ids": True}
        whole = await served.post("/v1/completions", body)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(served.post("/v1/completions", body))
            await served.busy()
            served.engine.lose(RankLostError("stuck, says the watchdog", rank=1))
            again = await task
        assert again["choices"][0]["token_ids"] == whole["choices"][0]["token_ids"]
        await lost.wait()
