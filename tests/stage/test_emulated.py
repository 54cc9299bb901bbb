from __future__ import annotations

import asyncio
import os
import time
from typing import Any

import pytest
import torch

from pipelined.clock import LoopClock, MonotonicClock
from pipelined.errors import ConfigError, EngineClosedError
from pipelined.stage.completion import Completion
from pipelined.stage.emulated import EmulatedDevice


def device_of(clock: Any = None, **options: Any) -> EmulatedDevice:
    return EmulatedDevice(clock or MonotonicClock(), lambda cost: cost, **options)


def test_it_is_busy_for_the_time_of_the_cost(run: Any, fired: Any) -> None:
    async def main() -> None:
        device, now = device_of(), time.monotonic
        begin = now()
        launches = [device.launch(lambda: torch.ones(2), cost=0.01) for _ in range(10)]
        assert [launch.outputs().tolist() for launch in launches] == [[1, 1]] * 10  # known at once
        assert not launches[-1].event.done()
        lateness = []
        for n, launch in enumerate(launches, 1):
            await fired(launch.event)
            lateness.append(now() - launch.ended_s)
            assert launch.ended_s - launch.started_s == pytest.approx(0.01)
            assert launch.ended_s == pytest.approx(launches[0].started_s + n * 0.01)  # no error adds up
        assert min(lateness) >= 0
        assert sorted(lateness)[5] < 0.005
        assert launches[0].started_s - begin < 0.05
        await device.aclose()

    run(main())


def test_an_idle_device_begins_at_the_launch(run: Any, fired: Any) -> None:
    async def main() -> None:
        device = device_of()
        await fired(device.launch(lambda: None, cost=0.001).event)
        await asyncio.sleep(0.02)
        launch_s = time.monotonic()
        launch = device.launch(lambda: None, cost=0.001)
        assert launch.started_s >= launch_s
        await fired(launch.event)
        await device.aclose()

    run(main())


def test_time_begins_when_the_events_have_fired(run: Any, fired: Any) -> None:
    async def main() -> None:
        device, gate = device_of(), Completion()
        ran: list[int] = []
        first = device.launch(lambda: ran.append(1), cost=0.01, after=[gate])
        second = device.launch(lambda: ran.append(2), cost=0.01)
        await asyncio.sleep(0.02)
        assert ran == []
        assert not first.known()
        released_s = time.monotonic()
        gate.fire()
        assert ran == [1, 2]
        assert first.started_s >= released_s
        assert second.started_s == first.ended_s
        await fired(second.event)
        await device.aclose()

    run(main())


def test_free_work_completes_at_once(run: Any) -> None:
    async def main() -> None:
        device = device_of()
        launches = [device.launch(lambda n=n: n, cost=0) for n in range(100)]
        assert all(launch.event.done() for launch in launches)
        assert [launch.outputs() for launch in launches] == list(range(100))
        await device.aclose()

    run(main())


def test_a_long_chain_of_callbacks_completes_in_order(run: Any, fired: Any) -> None:
    async def main() -> None:
        device, order = device_of(), []
        last = Completion()

        def go(n: int) -> None:
            if n == 3000:
                last.fire()
                return
            launch = device.launch(lambda: order.append(n), cost=0)
            launch.event.add_done_callback(lambda: asyncio.get_running_loop().call_soon(go, n + 1))

        device.launch(lambda: None, cost=0.001).event.add_done_callback(lambda: go(0))
        await fired(last)
        assert order == list(range(3000))
        await device.aclose()

    run(main())


def test_what_a_callback_launches_completes_after_the_other_callbacks(run: Any, fired: Any) -> None:
    async def main() -> None:
        device, order, last = device_of(), [], Completion()

        def launch_more() -> None:
            more = device.launch(lambda: None, cost=0)
            more.event.add_done_callback(lambda: (order.append("more"), last.fire()))
            order.append("first")

        first = device.launch(lambda: None, cost=0.001)
        first.event.add_done_callback(launch_more)
        first.event.add_done_callback(lambda: order.append("second"))
        await fired(last)
        assert order == ["first", "second", "more"]
        await device.aclose()

    run(main())


def test_deferred_work_sees_inputs_as_they_are_at_the_end(run: Any, fired: Any) -> None:
    async def main() -> None:
        for defer, expected in ((False, 1.0), (True, 5.0)):
            device, x = device_of(defer=defer), torch.ones(1)
            launch = device.launch(lambda x=x: x.clone(), cost=0.002, reads=[x])
            assert launch.known() is not defer
            x.fill_(5)  # too early
            await fired(launch.event)
            assert launch.outputs().item() == expected
            await device.aclose()

    run(main())


def test_errors_come_out_of_outputs_and_take_their_time(run: Any, fired: Any) -> None:
    async def main() -> None:
        device = device_of()
        bad = device.launch(lambda: 1 // 0, cost=0.002)
        assert not bad.event.done()
        await fired(bad.event)
        with pytest.raises(ZeroDivisionError):
            bad.outputs()
        await device.aclose()

    run(main())


@pytest.mark.parametrize("cost", [-1.0, float("nan"), float("inf")])
def test_impossible_times_are_refused(cost: float) -> None:
    async def main() -> None:
        with pytest.raises(ConfigError, match="time model"):
            device_of().launch(lambda: None, cost=cost)

    asyncio.run(main())


def test_closing_waits_and_leaves_no_descriptor(run: Any) -> None:
    async def main() -> None:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(20):
            device = device_of()
            launch = device.launch(lambda: None, cost=0.001)
            never = device.launch(lambda: None, after=[Completion()])
            await device.aclose()
            assert launch.event.done()
            with pytest.raises(EngineClosedError):
                never.outputs()
        assert len(os.listdir("/proc/self/fd")) == before

    run(main())


def test_to_host_hands_on_after_the_event(run: Any, fired: Any) -> None:
    async def main() -> None:
        device = device_of()
        launch = device.launch(lambda: {"x": torch.ones(2), "n": 3}, cost=0.002)
        copy = device.to_host(launch.outputs(), launch.event)
        assert copy.known()
        assert not copy.event.done()
        await fired(copy.event)
        assert launch.event.done()
        assert copy.outputs()["n"] == 3
        await device.aclose()

    run(main())


def test_another_clock_than_the_hosts_works_too(run: Any, fired: Any) -> None:
    async def main() -> None:
        clock = LoopClock(skew_s=100.0)
        device = device_of(clock)
        launches = [device.launch(lambda: None, cost=0.003) for _ in range(3)]
        for launch in launches:
            await fired(launch.event)
            assert clock.now() >= launch.ended_s
        await device.aclose()

    run(main())
