from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import uvloop

from pipelined.clock import Alarm, Clock, LoopClock, MonotonicClock, VirtualTimeLoop

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop, "virtual": VirtualTimeLoop}


def run(loop: str, main: Callable[[], Any]) -> Any:
    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        return runner.run(main())


@pytest.fixture(
    params=[
        ("asyncio", MonotonicClock()),
        ("uvloop", MonotonicClock()),
        ("asyncio", LoopClock(5.0)),
        ("virtual", LoopClock(-3.0)),
    ],
    ids=lambda param: f"{param[0]}-{type(param[1]).__name__}",
)
def world(request: pytest.FixtureRequest) -> tuple[str, Clock]:
    return request.param


def test_call_at_is_never_early(world: tuple[str, Clock]) -> None:
    loop, clock = world

    async def main() -> None:
        for _ in range(40):
            called: asyncio.Future[float] = asyncio.get_running_loop().create_future()
            when_s = clock.now() + random.random() * 0.004
            clock.call_at(when_s, lambda called=called: called.set_result(clock.now()))
            assert await called >= when_s

    run(loop, main)


def test_timeouts_and_sleeps_go_by_the_clock(world: tuple[str, Clock]) -> None:
    loop, clock = world

    async def main() -> None:
        began_s = clock.now()
        with pytest.raises(TimeoutError):
            async with clock.timeout(0.01):
                await clock.sleep(10)
        assert 0.009 <= clock.now() - began_s < 1
        async with clock.timeout(None):
            await clock.sleep(0.001)

    run(loop, main)


def test_a_cancelled_timer_is_not_called(world: tuple[str, Clock]) -> None:
    loop, clock = world

    async def main() -> None:
        called: list[int] = []
        clock.call_at(clock.now() + 0.005, called.append, 1).cancel()
        await clock.sleep(0.02)
        assert called == []

    run(loop, main)


def test_an_alarm_is_never_early_and_hardly_late(world: tuple[str, Clock]) -> None:
    loop, clock = world

    async def main() -> None:
        lateness = []
        rung: asyncio.Future[float] | None = None

        def ring() -> None:
            assert rung is not None
            rung.set_result(clock.now())

        alarm = Alarm(clock, ring)
        for _ in range(40):
            rung = asyncio.get_running_loop().create_future()
            when_s = clock.now() + random.uniform(-0.001, 0.004)
            alarm.set(when_s)
            lateness.append(await rung - when_s)
        alarm.close()
        assert min(lateness) >= 0
        assert sorted(lateness)[20] < 0.01

    run(loop, main)


def test_setting_an_alarm_again_replaces_the_time(world: tuple[str, Clock]) -> None:
    loop, clock = world

    async def main() -> None:
        rung: list[float] = []
        alarm = Alarm(clock, lambda: rung.append(clock.now()))
        began_s = clock.now()
        alarm.set(began_s + 0.002)
        alarm.set(began_s + 0.2)
        await clock.sleep(0.02)
        assert rung == []
        await clock.sleep(0.2)
        assert len(rung) == 1
        alarm.set(clock.now() + 0.001)
        alarm.close()
        await clock.sleep(0.01)
        assert len(rung) == 1

    run(loop, main)


def test_alarms_leave_no_descriptor() -> None:
    async def main() -> None:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(50):
            alarm = Alarm(MonotonicClock(), lambda: None)
            alarm.set(time.monotonic() + 1)
            alarm.close()
            alarm.close()
        assert len(os.listdir("/proc/self/fd")) == before

    run("asyncio", main)


def test_a_skewed_clock_reads_otherwise_and_wakes_alike(virtual_loop: VirtualTimeLoop) -> None:
    async def main() -> None:
        early, late = LoopClock(-1.0), LoopClock(100.0)
        woken: list[tuple[str, float]] = []
        early.call_at(early.now() + 1, lambda: woken.append(("early", early.now())))
        late.call_at(late.now() + 1, lambda: woken.append(("late", late.now())))
        await asyncio.sleep(2)
        assert woken == [("early", 0.0), ("late", 101.0)]

    virtual_loop.run_until_complete(main())
