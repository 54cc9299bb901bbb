"""Whole behaviours, the same for every transport of ours (`conftest.py` names them)."""

from __future__ import annotations

import asyncio
import gc
import random
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pipelined.errors import (
    BusyError,
    ClosedError,
    ConfigError,
    FrameTooLarge,
    LaneMismatch,
    Truncated,
    WouldBlock,
)
from pipelined.messages import TensorHeader
from pipelined.transport import Lane

if TYPE_CHECKING:
    from collections.abc import Callable

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn]


def head(step: int, index: int = 0, **fields: Any) -> TensorHeader:
    return TensorHeader(epoch=0, step=step, index=index, **fields)


def random_tensor(rng: random.Random) -> torch.Tensor:
    dtype = rng.choice(DTYPES)
    shape = rng.choice([(), (0, 3), (rng.randrange(1, 3000),), (rng.randrange(1, 90), rng.randrange(1, 90))])
    raw = torch.randint(0, 100, (*shape, dtype.itemsize), dtype=torch.uint8)
    tensor = torch.randint(0, 2, shape).bool() if dtype is torch.bool else raw.view(dtype).reshape(shape)
    return tensor.t() if tensor.dim() == 2 and rng.random() < 0.3 else tensor


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return left.numel() == 0 or torch.equal(
        left.contiguous().reshape(-1).view(torch.uint8), right.contiguous().reshape(-1).view(torch.uint8)
    )


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


async def test_messages_arrive_in_order_and_whole(open_world: Any) -> None:
    async with open_world() as (a, b):
        sender, receiver = a.messages(b.me, Lane.RESULTS), b.messages(a.me, Lane.RESULTS)
        sizes = [0, 1, 199, 32 << 10, 100_000, (128 << 10) - 6, 128 << 10, 1_000_000, 5_000_000, 3]
        frames = [random.Random(size).randbytes(size) for size in sizes]
        for frame in frames:
            sender.send_nowait(frame)
        for frame in frames:
            assert await receiver.receive() == frame
        assert sender is a.messages(b.me, Lane.RESULTS)


async def test_two_hundred_random_tensors_over_several_lanes(open_world: Any) -> None:
    rng = random.Random(1)
    async with open_world() as (a, b):
        expected: dict[Lane, list[torch.Tensor]] = {lane: [] for lane in Lane}

        async def feed() -> None:
            for _ in range(200):
                lane = rng.choice(list(Lane))
                link = a.tensors(b.me, lane)
                tensor = random_tensor(rng)
                number = len(expected[lane])
                expected[lane].append(tensor)
                if not link.credits():
                    await link.ready()
                link.post_send(tensor, head(number, 2, name="x", meta=b"m" * rng.randrange(50)))
                await asyncio.sleep(0)

        async def drain(lane: Lane) -> None:
            link, number = b.tensors(a.me, lane), 0
            while not feeding.done() or number < len(expected[lane]):
                if number == len(expected[lane]):
                    await asyncio.sleep(0.001)
                    continue
                received = await link.post_recv((number, 2))
                assert same(received.tensor, expected[lane][number])
                assert received.header.name == "x"
                received.release()
                number += 1

        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            feeding = group.create_task(feed())
            for lane in Lane:
                group.create_task(drain(lane))
        await until(lambda: all(a.tensors(b.me, lane).credits() == 64 for lane in Lane))


async def test_a_sent_buffer_may_be_overwritten(open_world: Any) -> None:
    async with open_world() as (a, b):
        for size in (10, 3_000_000):  # in one go, and in slices
            tensor = torch.full((size,), 7.0)
            await a.tensors(b.me, Lane.KV).post_send(tensor, head(size))
            tensor.fill_(-1)
            received = await b.tensors(a.me, Lane.KV).post_recv((size, 0))
            assert (received.tensor == 7).all()
            received.release()


@pytest.mark.slow
async def test_64_mib_and_the_loop_stays_responsive(open_world: Any) -> None:
    async with open_world() as (a, b):
        longest, running = 0.0, True
        loop = asyncio.get_running_loop()

        async def watch() -> None:
            nonlocal longest
            while running:
                start = loop.time()
                await asyncio.sleep(0)
                longest = max(longest, loop.time() - start)

        async with asyncio.TaskGroup() as group:
            group.create_task(watch())
            tensor = torch.arange(16 << 20, dtype=torch.int32)
            into = torch.zeros_like(tensor)
            a.tensors(b.me, Lane.HIDDEN).post_send(tensor, head(0))
            received = await b.tensors(a.me, Lane.HIDDEN).post_recv((0, 0), into)
            running = False
        assert torch.equal(into, tensor)
        assert received.tensor.data_ptr() == into.data_ptr()
        assert longest < 0.05  # a copy in one go, page faults included, takes longer still


async def test_large_strided_tensors(open_world: Any) -> None:
    async with open_world() as (a, b):
        tensor = torch.arange(1_200_000).reshape(1000, 1200).t()
        a.tensors(b.me, Lane.HIDDEN).post_send(tensor, head(0))
        received = await b.tensors(a.me, Lane.HIDDEN).post_recv((0, 0))
        assert torch.equal(received.tensor, tensor)


async def test_receiving_into_a_buffer(open_world: Any) -> None:
    async with open_world() as (a, b):
        sender, receiver = a.tensors(b.me, Lane.HIDDEN), b.tensors(a.me, Lane.HIDDEN)
        buffer = torch.zeros(100, dtype=torch.float64)
        sender.post_send(torch.ones(3, 5), head(0))
        received = await receiver.post_recv((0, 0), buffer)
        assert received.tensor.data_ptr() == buffer.data_ptr()
        assert same(received.tensor, torch.ones(3, 5))
        sender.post_send(torch.ones(201), head(1))
        with pytest.raises(Truncated, match="804 bytes; the buffer has 800"):
            await receiver.post_recv((1, 0), buffer)
        assert (await receiver.post_recv((1, 0))).tensor.shape == (201,)
        with pytest.raises(ConfigError, match="not contiguous"):
            receiver.post_recv((2, 0), torch.zeros(4, 4).t())


async def test_a_wrong_seq_is_named_and_the_tensor_stays(open_world: Any) -> None:
    async with open_world() as (a, b):
        a.tensors(b.me, Lane.HIDDEN).post_send(torch.ones(1), head(4, 1))
        with pytest.raises(LaneMismatch, match=r"expected step 3, tensor 0 .* got step 4, tensor 1"):
            await b.tensors(a.me, Lane.HIDDEN).post_recv((3, 0))
        assert (await b.tensors(a.me, Lane.HIDDEN).post_recv((4, 1))).tensor.item() == 1


async def test_beyond_the_window(open_world: Any) -> None:
    async with open_world(window=2) as (a, b):
        sender, receiver = a.tensors(b.me, Lane.HIDDEN), b.tensors(a.me, Lane.HIDDEN)
        for step in range(2):
            sender.post_send(torch.ones(1), head(step))
        assert sender.credits() == 0
        with pytest.raises(WouldBlock):
            sender.post_send(torch.ones(1), head(2))
        waiter = asyncio.ensure_future(sender.ready())
        await asyncio.sleep(0.01)
        with pytest.raises(BusyError):
            await sender.ready()
        received = await receiver.post_recv((0, 0))
        await asyncio.sleep(0.02)
        assert not waiter.done()
        received.release()
        received.release()
        await asyncio.wait_for(waiter, 1)
        assert sender.credits() == 1
        with pytest.raises(ClosedError, match="released"):
            _ = received.tensor


async def test_the_window_of_messages(open_world: Any) -> None:
    async with open_world(window=2, max_message_bytes=100) as (a, b):
        sender, receiver = a.messages(b.me, Lane.SCHEDULE), b.messages(a.me, Lane.SCHEDULE)
        with pytest.raises(FrameTooLarge, match="the limit is 100"):
            await sender.send(b"x" * 101)
        sender.send_nowait(b"0")
        await sender.send(b"1")
        with pytest.raises(WouldBlock):
            sender.send_nowait(b"2")
        waiter = asyncio.ensure_future(sender.send(b"2"))
        await asyncio.sleep(0.01)
        with pytest.raises(BusyError):
            await sender.send(b"3")
        assert [await receiver.receive() for _ in range(3)] == [b"0", b"1", b"2"]
        await waiter
        with pytest.raises(WouldBlock):
            receiver.receive_nowait()


async def test_a_stuck_lane_holds_up_no_other(open_world: Any) -> None:
    async with open_world(window=4) as (a, b):
        for step in range(4):
            a.tensors(b.me, Lane.HIDDEN).post_send(torch.ones(100_000), head(step))
            a.messages(b.me, Lane.SCHEDULE).send_nowait(b"x")
        await a.messages(b.me, Lane.HEALTH).send(b"alive")
        assert await asyncio.wait_for(b.messages(a.me, Lane.HEALTH).receive(), 1) == b"alive"
        a.tensors(b.me, Lane.KV).post_send(torch.ones(5), head(0))
        await asyncio.wait_for(b.tensors(a.me, Lane.KV).post_recv((0, 0)), 1)


async def test_a_ring_in_which_all_send_first(open_world: Any) -> None:
    async with open_world(3) as endpoints:

        async def turn(rank: int) -> None:
            me, following, previous = endpoints[rank], endpoints[(rank + 1) % 3].me, endpoints[rank - 1].me
            sends = [me.tensors(following, Lane.HIDDEN).post_send(torch.full((9000,), rank), head(n)) for n in range(8)]
            for n in range(8):
                received = await me.tensors(previous, Lane.HIDDEN).post_recv((n, 0))
                assert received.tensor[0] == previous.rank
                received.release()
            for send in sends:
                await send

        async with asyncio.timeout(5), asyncio.TaskGroup() as group:
            for rank in range(3):
                group.create_task(turn(rank))


async def test_cancelled_waiters_lose_nothing(open_world: Any) -> None:
    async with open_world(window=1) as (a, b):
        receiver = b.messages(a.me, Lane.RESULTS)
        waiting = asyncio.ensure_future(receiver.receive())
        await asyncio.sleep(0.01)
        with pytest.raises(BusyError):
            await receiver.receive()
        await a.messages(b.me, Lane.RESULTS).send(b"kept")
        waiting.cancel()
        assert await asyncio.gather(waiting, return_exceptions=True) != [b"kept"]
        assert await receiver.receive() == b"kept"

        transfer = b.tensors(a.me, Lane.HIDDEN).post_recv((0, 0))
        waiting = asyncio.ensure_future(transfer)
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.sleep(0)
        a.tensors(b.me, Lane.HIDDEN).post_send(torch.ones(2), head(0))
        assert (await transfer).tensor.shape == (2,)
        withdrawn = b.tensors(a.me, Lane.HIDDEN).post_recv((1, 0))
        assert withdrawn.cancel()
        assert not withdrawn.cancel()
        with pytest.raises(ClosedError, match="withdrawn"):
            await withdrawn


async def test_leases(open_world: Any) -> None:
    async with open_world() as (a, b):
        link = a.tensors(b.me, Lane.HIDDEN)
        for step in range(200):
            lease = await asyncio.to_thread(link.lease, (16, 64), torch.bfloat16)
            lease.fill_(step)
            if step % 3 == 0:
                continue  # never sent
            link.post_send(lease, head(step))
            received = await b.tensors(a.me, Lane.HIDDEN).post_recv((step, 0))
            assert (received.tensor == step).all()
            if step % 2:
                received.release()  # else forgotten


async def test_a_view_stays_valid_though_its_owner_forgot_it(open_world: Any) -> None:
    async with open_world(window=4) as (a, b):
        link, views = a.tensors(b.me, Lane.HIDDEN), []
        for step in range(3):
            link.post_send(torch.full((5000,), float(step)), head(step))
            views.append((await b.tensors(a.me, Lane.HIDDEN).post_recv((step, 0))).tensor)
        gc.collect()
        await asyncio.sleep(0.02)
        link.post_send(torch.full((5000,), 9.0), head(3))
        await b.tensors(a.me, Lane.HIDDEN).post_recv((3, 0))
        assert [view[4999].item() for view in views] == [0, 1, 2]
        views.clear()
        await until(lambda: link.credits() == 4)


class Fired:
    """An event that fires when told."""

    def __init__(self) -> None:
        self.fired = False
        self.callbacks: list[Callable[[], None]] = []

    def done(self) -> bool:
        return self.fired

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        self.callbacks.append(callback)

    def fire(self) -> None:
        self.fired = True
        for callback in self.callbacks:
            callback()


async def test_sends_and_receives_wait_for_their_events(open_world: Any) -> None:
    async with open_world() as (a, b):
        link, event, late = a.tensors(b.me, Lane.HIDDEN), Fired(), Fired()
        tensor, into = torch.zeros(3), torch.zeros(3)
        first = link.post_send(tensor, head(0), after=event)
        second = link.post_send(torch.ones(1), head(1))
        receive = b.tensors(a.me, Lane.HIDDEN).post_recv((0, 0), into, after=late)
        await asyncio.sleep(0.01)
        assert not first.done()
        assert not second.done()  # in order
        tensor.fill_(5)
        event.fire()
        await second
        await asyncio.sleep(0.01)
        assert (into == 0).all()
        late.fire()
        await receive
        assert (into == 5).all()
