from __future__ import annotations

import asyncio
import gc
import itertools
import random
import threading
import time
import weakref
from typing import Any

import pytest
import torch

from pipelined.clock import MonotonicClock
from pipelined.errors import ConfigError, EngineClosedError
from pipelined.stage.completion import Completion
from pipelined.stage.cpu import CpuDevice


def test_work_runs_in_order_off_the_loop_and_wakes_on_it(run: Any, fired: Any) -> None:
    async def main() -> None:
        device = CpuDevice(MonotonicClock(), threads=1)
        order: list[tuple[str, int, int]] = []
        loop_thread = threading.get_ident()

        def work(n: int) -> int:
            order.append(("ran", n, threading.get_ident()))
            return n * n

        launches = [device.launch(lambda n=n: work(n)) for n in range(200)]
        for n, launch in enumerate(launches):
            launch.when_known(lambda launch, n=n: order.append(("known", n, threading.get_ident())))
            launch.event.add_done_callback(lambda n=n: order.append(("done", n, threading.get_ident())))
        await fired(launches[-1].event)
        assert [launch.outputs() for launch in launches] == [n * n for n in range(200)]
        for what in ("ran", "known", "done"):
            assert [n for kind, n, _ in order if kind == what] == list(range(200))
        assert {thread for kind, _, thread in order if kind != "ran"} == {loop_thread}
        workers = {thread for kind, _, thread in order if kind == "ran"}
        assert len(workers) == 1
        assert loop_thread not in workers
        assert all(a.started_s <= a.ended_s <= b.started_s for a, b in itertools.pairwise(launches))
        await device.aclose()

    run(main())


def test_a_launch_waits_for_its_events_and_keeps_the_order(run: Any, fired: Any) -> None:
    async def main() -> None:
        device = CpuDevice(MonotonicClock(), threads=1)
        gate, ran = Completion(), []
        first = device.launch(lambda: ran.append("first"), after=[gate])
        second = device.launch(lambda: ran.append("second"))
        third = device.launch(lambda: ran.append("third"), after=[first.event, second.event])
        await asyncio.sleep(0.02)
        assert ran == []
        assert not second.event.done()
        gate.fire()
        await fired(third.event)
        assert ran == ["first", "second", "third"]
        await device.aclose()

    run(main())


@pytest.mark.parametrize("seed", range(5))
def test_any_pattern_of_events_keeps_the_order(run: Any, fired: Any, seed: int) -> None:
    async def main() -> None:
        rng = random.Random(seed)
        device = CpuDevice(MonotonicClock(), threads=1)
        gates = [Completion(done=rng.random() < 0.3) for _ in range(10)]
        fired_gates = {id(gate) for gate in gates if gate.done()}
        ran: list[int] = []
        launches: list[Any] = []

        def work(n: int, needs: list[Completion]) -> None:
            assert all(id(gate) in fired_gates for gate in needs)
            ran.append(n)

        for n in range(40):
            needs = rng.sample(gates, rng.randrange(3))
            earlier = [launch.event for launch in rng.sample(launches, min(len(launches), rng.randrange(2)))]
            launches.append(device.launch(lambda n=n, needs=needs: work(n, needs), after=[*needs, *earlier]))
        for gate in rng.sample(gates, len(gates)):
            if not gate.done():
                fired_gates.add(id(gate))
                gate.fire()
            if rng.random() < 0.5:
                await asyncio.sleep(0)
        await fired(launches[-1].event)
        for launch in launches:
            launch.outputs()
        assert ran == list(range(40))
        await device.aclose()

    run(main())


def test_an_error_belongs_to_its_launch_alone(run: Any, fired: Any) -> None:
    async def main() -> None:
        device = CpuDevice(MonotonicClock(), threads=1)

        def explode() -> None:
            raise ZeroDivisionError("mine")

        bad, good = device.launch(explode), device.launch(lambda: 7)
        known: list[object] = []
        bad.when_known(known.append)
        await fired(good.event)
        assert bad.event.done()
        assert known == [bad]
        with pytest.raises(ZeroDivisionError, match="mine") as caught:
            bad.outputs()
        assert caught.traceback[-1].name == "explode"
        assert good.outputs() == 7
        await device.aclose()

    run(main())


def test_outputs_are_not_known_early(run: Any, fired: Any) -> None:
    async def main() -> None:
        device = CpuDevice(MonotonicClock(), threads=1)
        hold = threading.Event()
        launch = device.launch(hold.wait)
        with pytest.raises(RuntimeError, match="not known yet"):
            launch.outputs()
        assert repr(launch) == "<Launch cpu#1 pending, not done>"
        hold.set()
        await fired(launch.event)
        assert repr(launch) == "<Launch cpu#1 known, done>"
        assert repr(device) == "<CpuDevice 'cpu' 0 running, 0 held>"
        await device.aclose()
        assert repr(device) == "<CpuDevice 'cpu' closed>"

    run(main())


def test_closing_waits_for_what_was_launched_and_ends_the_thread(run: Any) -> None:
    async def main() -> None:
        before = threading.active_count()
        device = CpuDevice(MonotonicClock(), threads=1)
        running = device.launch(lambda: time.sleep(0.05) or "slept")
        chained = device.launch(lambda: "chained", after=[running.event])
        never = device.launch(lambda: "never", after=[Completion()])
        await device.aclose()
        assert running.outputs() == "slept"
        assert chained.outputs() == "chained"
        assert never.event.done()
        with pytest.raises(EngineClosedError, match="before the inputs"):
            never.outputs()
        assert threading.active_count() == before
        with pytest.raises(EngineClosedError):
            device.launch(lambda: None)
        await device.aclose()

    run(main())


def test_the_loop_is_free_while_closing(run: Any) -> None:
    async def main() -> None:
        device = CpuDevice(MonotonicClock(), threads=1)
        device.launch(lambda: time.sleep(0.1))
        closing = asyncio.create_task(device.aclose())
        ticks = 0
        while not closing.done():
            await asyncio.sleep(0.005)
            ticks += 1
        assert ticks >= 5

    run(main())


def test_a_callback_that_raises_holds_up_no_other(fired: Any) -> None:
    async def main() -> None:
        reported: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context["exception"]))
        device = CpuDevice(MonotonicClock(), threads=1)
        hold = threading.Event()
        device.launch(hold.wait)
        bad, good = device.launch(lambda: 1), device.launch(lambda: 2)
        bad.when_known(lambda launch: 1 // 0)
        hold.set()
        await fired(good.event)
        assert bad.event.done()
        assert [type(error) for error in reported] == [ZeroDivisionError]
        await device.aclose()

    asyncio.run(main())


def test_closing_the_loop_without_the_device_ends_the_thread() -> None:
    hold = threading.Event()

    async def main() -> threading.Thread:
        device = CpuDevice(MonotonicClock(), threads=1)
        device.launch(hold.wait)
        assert device._thread is not None
        return device._thread

    thread = asyncio.run(main())
    hold.set()
    thread.join(5)
    assert not thread.is_alive()


def test_nothing_keeps_outputs_or_failed_inputs_alive(fired: Any) -> None:
    async def main() -> None:
        device = CpuDevice(MonotonicClock(), threads=1)
        made, tensor = device.launch(lambda: torch.zeros(3)), torch.ones(3)

        def fail(tensor: torch.Tensor) -> None:
            raise ValueError

        failed = device.launch(lambda tensor=tensor: fail(tensor), reads=[tensor])
        await fired(failed.event)
        refs = [weakref.ref(made.outputs()), weakref.ref(tensor)]
        gc.disable()
        try:
            del made, failed, tensor
            await asyncio.sleep(0)
            assert [ref() for ref in refs] == [None, None]
        finally:
            gc.enable()
        await device.aclose()

    asyncio.run(main())


@pytest.mark.parametrize("threads", [1, 2])
def test_torch_threads_are_those_of_the_device(fired: Any, threads: int) -> None:
    async def main() -> tuple[int, float]:
        device = CpuDevice(MonotonicClock(), threads=threads)
        a = torch.randn(1024, 1024)

        def busy() -> float:
            a @ a
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(15):
                a @ a
            return (time.process_time() - cpu) / (time.perf_counter() - wall)

        load = device.launch(busy if threads == 1 else float)
        count = device.launch(torch.get_num_threads)
        await fired(count.event)
        await device.aclose()
        return count.outputs(), load.outputs()

    count, load = asyncio.run(main())
    assert count == threads
    if threads == 1:
        assert load < 1.3


def test_zero_threads_are_refused() -> None:
    with pytest.raises(ConfigError, match="threads=0"):
        CpuDevice(MonotonicClock(), threads=0)
