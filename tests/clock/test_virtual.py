from __future__ import annotations

import asyncio
import gc
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelined.clock import LoopClock, VirtualTimeLoop
from pipelined.clock.virtual import run
from pipelined.errors import DeadlockError, VirtualTimeError
from pipelined.stage.emulated import EmulatedDevice


def test_a_year_passes_at_once() -> None:
    async def main() -> float:
        await asyncio.sleep(365 * 86_400)
        return asyncio.get_running_loop().time()

    began_s = time.monotonic()
    assert run(main()) == 365 * 86_400
    assert time.monotonic() - began_s < 5


@given(st.lists(st.floats(0, 1e6), max_size=60))
@settings(deadline=None)
def test_timers_run_by_time_at_their_time(delays: list[float]) -> None:
    async def main() -> None:
        loop, called = asyncio.get_running_loop(), []
        for n, delay in enumerate(delays):
            loop.call_later(delay, lambda n=n: called.append((loop.time(), n)))
        await asyncio.sleep(1e6)
        assert called == sorted((delay, n) for n, delay in enumerate(delays))

    run(main())


def test_time_stands_still_while_anything_is_ready() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        for _ in range(1000):
            await asyncio.sleep(0)
        assert loop.time() == 0
        loop.call_at(-5, lambda: None)
        await asyncio.sleep(0.5)
        assert loop.time() == 0.5

    run(main())


def test_a_cancelled_timer_moves_no_time() -> None:
    async def main() -> float:
        for _ in range(2000):
            async with asyncio.timeout(1000):
                await asyncio.sleep(0.001)
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        assert len(loop._timers) < 1000  # the cancelled do not pile up
        return loop.time()

    assert run(main()) == pytest.approx(2.0)


# ---- one order ----

Log = list[str]


async def busy(seed: int, log: Log) -> None:
    """Tasks, groups, cancellations, time-outs, generators and queues, as a random program."""
    rng, loop = random.Random(seed), asyncio.get_running_loop()
    queue: asyncio.Queue[int] = asyncio.Queue(3)
    note = lambda what: log.append(f"{loop.time():.9f} {asyncio.current_task().get_name()} {what}")  # noqa: E731

    async def numbers() -> AsyncIterator[int]:
        try:
            for n in range(5):
                await asyncio.sleep(rng.choice([0, 0.001, 0.002]))
                yield n
        finally:
            note("generator closed")

    async def child(depth: int) -> None:
        try:
            note("begins")
            async for n in numbers():
                if n == 3:
                    break
            with_timeout = rng.random() < 0.5
            async with asyncio.timeout(0.004 if with_timeout else None):
                await queue.put(depth)
                await asyncio.sleep(rng.choice([0, 0.002, 0.003, 0.005]))
                note(f"got {await queue.get()}")
            if depth < 2:
                async with asyncio.TaskGroup() as group:
                    for _ in range(3):
                        group.create_task(child(depth + 1))
            if rng.random() < 0.15:
                raise ValueError(depth)
        except (asyncio.CancelledError, TimeoutError, ValueError) as error:
            note(f"{type(error).__name__}")
            raise

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(6):
                group.create_task(child(0))
    except* (ValueError, TimeoutError) as failures:
        note(f"ended with {len(failures.exceptions)}")


def log_of(seed: int) -> str:
    log: Log = []
    run(busy(seed, log), seed=seed)
    return "\n".join(log)


@pytest.mark.parametrize("seed", range(8))
def test_the_same_seed_gives_the_same_log(seed: int) -> None:
    first = log_of(seed)
    for n in range(5):
        clutter = [object() for _ in range(random.randrange(1000))]  # other addresses, other ids
        assert log_of(seed) == first
        if n % 2:
            gc.collect()
        del clutter
    assert len(first) > 500


def test_the_same_seed_gives_the_same_log_in_another_process() -> None:
    script = "import sys; sys.path.insert(0, sys.argv[1]); import test_virtual; print(test_virtual.log_of(3), end='')"
    logs = {
        subprocess.run(
            [sys.executable, "-c", script, os.path.dirname(__file__)],
            env={**os.environ, "PYTHONHASHSEED": str(hash_seed)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in (1, 2)
    }
    assert logs == {log_of(3)}


def cancellation_order(loop_factory: Any) -> str:
    async def main() -> str:
        order: list[str] = []

        async def waits(n: int) -> None:
            try:
                await asyncio.sleep(100)
            except asyncio.CancelledError:
                order.append(str(n))
                raise

        async def fails() -> None:
            await asyncio.sleep(0.001)
            raise KeyError

        try:
            async with asyncio.TaskGroup() as group:
                for n in range(20):
                    group.create_task(waits(n))
                group.create_task(fails())
        except* KeyError:
            pass
        return " ".join(order)

    clutter.append([object() for _ in range(random.randrange(500))])
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(main())


clutter: list[Any] = []


def test_sixty_runs_cancel_in_one_order() -> None:
    assert len({cancellation_order(VirtualTimeLoop) for _ in range(60)}) == 1
    # What this is for: without the numbered tasks the orders differ.
    assert len({cancellation_order(asyncio.new_event_loop) for _ in range(60)}) > 1


def test_the_seed_orders_what_is_due_at_the_same_instant() -> None:
    async def main() -> tuple[int, ...]:
        order: list[int] = []
        for n in range(8):
            asyncio.get_running_loop().call_later(1, order.append, n)
        await asyncio.sleep(2)
        return tuple(order)

    assert run(main()) == tuple(range(8))
    orders = [run(main(), seed=seed) for seed in range(1, 20)]
    assert len(set(orders)) > 10
    assert orders == [run(main(), seed=seed) for seed in range(1, 20)]


def test_tasks_have_the_same_names_each_time() -> None:
    async def main() -> list[str]:
        tasks = [asyncio.create_task(asyncio.sleep(0)) for _ in range(2)]
        named = asyncio.create_task(asyncio.sleep(0), name="mine")
        await asyncio.gather(*tasks, named)
        return [task.get_name() for task in [*tasks, named]]

    assert run(main()) == run(main()) == ["Task-1", "Task-2", "mine"]


def test_generators_left_open_are_closed_in_order() -> None:
    closed: list[int] = []

    async def generator(n: int) -> AsyncIterator[int]:
        try:
            yield n
        finally:
            await asyncio.sleep(0)
            closed.append(n)

    async def main() -> list[Any]:
        generators = [generator(n) for n in range(30)]
        for each in generators:
            await anext(each)
        return generators

    kept = run(main())
    assert closed == list(range(30))
    del kept


# ---- what there is not ----


def test_a_deadlock_is_an_error_that_says_who_waits_where() -> None:
    async def stuck(event: asyncio.Event) -> None:
        await event.wait()

    async def main() -> None:
        await asyncio.sleep(3)
        async with asyncio.TaskGroup() as group:
            group.create_task(stuck(asyncio.Event()), name="left")
            group.create_task(stuck(asyncio.Event()), name="right")

    with pytest.raises(DeadlockError) as caught:
        run(main())
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("at 3.000000 s every task waits")
    assert [line.split(":")[0].strip() for line in lines[1:]] == ["Task-0", "left", "right"]
    assert all("Event.wait (locks.py:" in line for line in lines[2:])


def test_cancelled_timers_do_not_hide_a_deadlock() -> None:
    async def main() -> None:
        asyncio.get_running_loop().call_later(7, int).cancel()
        await asyncio.Event().wait()

    with pytest.raises(DeadlockError, match=r"at 0\.000000 s"):
        run(main())


def test_after_a_deadlock_the_tasks_are_cancelled_and_cleaned_up() -> None:
    cleaned: list[str] = []

    async def main() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.append("yes")

    with pytest.raises(DeadlockError):
        run(main())
    assert cleaned == ["yes"]


def test_polling_without_waiting_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelined.clock.virtual._TURNS_AT_ONE_INSTANT", 1000)

    async def main() -> None:
        while True:  # noqa: ASYNC110
            await asyncio.sleep(0)

    with pytest.raises(VirtualTimeError, match="polls without waiting"):
        run(main())


async def _threads() -> None:
    await asyncio.to_thread(int)


async def _reader() -> None:
    a, b = socket.socketpair()
    with a, b:
        asyncio.get_running_loop().add_reader(a, lambda: None)


async def _connection() -> None:
    await asyncio.open_connection("127.0.0.1", 1)


async def _server() -> None:
    await asyncio.start_unix_server(lambda r, w: None, "/nowhere")


async def _process() -> None:
    await asyncio.create_subprocess_exec("true")


@pytest.mark.parametrize("refused", [_threads, _reader, _connection, _server, _process])
def test_threads_and_descriptors_are_refused(refused: Any) -> None:
    with pytest.raises(VirtualTimeError, match="in virtual time; use an emulated device"):
        run(refused())


def test_a_call_from_another_thread_is_refused() -> None:
    async def main() -> None:
        loop, errors = asyncio.get_running_loop(), []

        def call() -> None:
            try:
                loop.call_soon_threadsafe(int)
            except VirtualTimeError as error:
                errors.append(str(error))

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        assert "from another thread" in errors[0]
        called: list[int] = []
        loop.call_soon_threadsafe(called.append, 1)
        await asyncio.sleep(0)
        assert called == [1]

    run(main())


def test_the_collector_is_on_again_afterwards() -> None:
    async def main() -> bool:
        return gc.isenabled()

    assert run(main()) is False
    assert gc.isenabled()


def test_its_repr(virtual_loop: VirtualTimeLoop) -> None:
    virtual_loop.run_until_complete(asyncio.sleep(1.5))
    assert repr(virtual_loop) == "<VirtualTimeLoop 1.500000 s, seed 0>"


# ---- the emulated device in virtual time ----


def test_a_pipeline_of_emulated_devices_takes_the_ideal_time_exactly() -> None:
    """T = sum of chunk times + (P - 1) times the largest, for equal chunks: (M + P - 1) t."""
    ranks, chunks, time_s = 8, 50, 0.25  # exact in binary

    async def main() -> float:
        clock = LoopClock()
        devices = [EmulatedDevice(clock, lambda cost: cost) for _ in range(ranks)]
        events: list[Any] = [None] * chunks
        for device in devices:
            launches = [device.launch(int, cost=time_s, after=[event] if event else []) for event in events]
            events = [launch.event for launch in launches]
        for device in devices:
            await device.aclose()
        return clock.now()

    assert run(main()) == (chunks + ranks - 1) * time_s


@pytest.mark.slow
def test_it_is_fast() -> None:
    async def main() -> int:
        async def one(n: int) -> None:
            for _ in range(1000):
                await asyncio.sleep(0.001 * (n % 7 + 1))

        async with asyncio.TaskGroup() as group:
            for n in range(100):
                group.create_task(one(n))
        return 100_000

    began_s = time.process_time()
    assert run(main()) / (time.process_time() - began_s) > 30_000
