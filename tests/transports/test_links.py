"""Whole behaviours, the same for every transport of ours (`conftest.py` names them)."""

from __future__ import annotations

import asyncio
import gc
import os
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pipelined.errors import (
    BusyError,
    ClosedError,
    ConfigError,
    EndOfLane,
    FrameTooLarge,
    HandshakeError,
    LaneMismatch,
    PeerLost,
    Truncated,
    WouldBlock,
)
from pipelined.messages import DRIVER, Peer, TensorHeader
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


@pytest.mark.parametrize("how", ["aclose", "abort"])
@pytest.mark.parametrize("state", ["idle", "posted", "sent"])
async def test_the_ends_of_a_link(open_world: Any, how: str, state: str) -> None:
    async with open_world(3) as (a, b, c):
        link, receiver = a.tensors(b.me, Lane.HIDDEN), b.tensors(a.me, Lane.HIDDEN)
        pending = [a.tensors(b.me, Lane.HIDDEN).post_recv((0, 0)), b.tensors(a.me, Lane.KV).post_recv((0, 0))]
        reading = [asyncio.ensure_future(x.messages(y.me, Lane.HEALTH).receive()) for x, y in ((a, b), (b, a), (c, a))]
        await asyncio.sleep(0.01)
        if state == "posted":
            link.post_send(torch.ones(2_000_000), head(0))  # still being copied
        elif state == "sent":
            await link.post_send(torch.ones(2), head(0))
            await asyncio.sleep(0.01)
        losses = b.lost
        if how == "aclose":
            await a.aclose()
            await a.aclose()
        else:
            a.abort()
            a.abort()
        gone = EndOfLane if how == "aclose" else PeerLost
        results = await asyncio.wait_for(asyncio.gather(*reading, return_exceptions=True), 1)
        assert [type(result) for result in results] == [ClosedError, gone, gone]
        with pytest.raises(ClosedError):
            await pending[0]
        with pytest.raises(gone):
            await pending[1]
        if how == "aclose" and state != "idle":
            assert (await receiver.post_recv((0, 0))).tensor[0] == 1  # what was posted has left
        for _ in range(2):
            with pytest.raises(gone):
                await receiver.post_recv((1, 0))
            with pytest.raises(gone):
                receiver.post_send(torch.ones(1), head(0))
            with pytest.raises(gone):
                await b.messages(a.me, Lane.SCHEDULE).send(b"x")
            with pytest.raises(gone):
                await b.tensors(a.me, Lane.RESULTS).ready()  # a lane that did not exist before
        if how == "abort":
            assert "lost test/0" in str(await asyncio.wait_for(anext(losses), 1))
        with pytest.raises(ClosedError):
            a.messages(b.me, Lane.SCHEDULE).send_nowait(b"x")
        with pytest.raises(ClosedError):
            await link.ready()
        await b.aclose()
        assert [loss async for loss in losses] == []
        await c.aclose()


async def test_both_close_at_once(open_world: Any) -> None:
    async with open_world() as (a, b):
        for end, other in ((a, b), (b, a)):
            end.messages(other.me, Lane.RESULTS).send_nowait(b"last words")
            end.tensors(other.me, Lane.HIDDEN).post_send(torch.ones(10), head(0))
        async with asyncio.timeout(2):
            await asyncio.gather(a.aclose(), b.aclose(), a.aclose())
        assert a.closed
        assert b.closed


async def test_leaving_the_context(open_world: Any) -> None:
    async with open_world() as (a, b):
        async with a:
            pass
        with pytest.raises(EndOfLane):
            await b.messages(a.me, Lane.HEALTH).receive()
    async with open_world() as (a, b):
        with pytest.raises(KeyError):
            async with a:
                raise KeyError
        with pytest.raises(PeerLost):
            await b.messages(a.me, Lane.HEALTH).receive()


async def test_absent_peers_are_named(make_world: Any) -> None:
    world = make_world(4)
    endpoints = await asyncio.gather(*(world.open(rank, open_timeout_s=0.3) for rank in (0, 1)), return_exceptions=True)
    for error in endpoints:
        assert isinstance(error, HandshakeError)
        assert "0.3 s for test/2, test/3" in str(error)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"secret": "other"}, "secret"),
        ({"epoch": 3}, "epoch"),
        ({"world": tuple(Peer("test", rank) for rank in (DRIVER, 0, 1))}, "world"),
    ],
)
async def test_hellos_that_do_not_fit(make_world: Any, changes: dict[str, Any], named: str) -> None:
    world = make_world(2)
    errors = await asyncio.gather(
        world.open(0, open_timeout_s=0.5), world.open(1, open_timeout_s=0.5, **changes), return_exceptions=True
    )
    assert all(isinstance(error, HandshakeError) for error in errors)
    assert any(named in str(error) for error in errors), errors


async def test_connecting_later_from_one_side(make_world: Any) -> None:
    world = make_world(3)
    for first, second in ((0, 1), (2, 0)):
        a, b = [await world.open(rank, connect=()) for rank in (first, second)]
        with pytest.raises(ConfigError, match="not connected"):
            a.messages(b.me, Lane.KV)
        await a.connect(b.me)
        await a.connect(b.me)
        await asyncio.sleep(0.01)
        await b.connect(a.me)
        await b.messages(a.me, Lane.KV).send(b"hi")
        assert await a.messages(b.me, Lane.KV).receive() == b"hi"
        a.abort()
        b.abort()


async def test_epochs_follow_each_other(make_world: Any) -> None:
    world = make_world(2)
    for epoch in range(3):
        a, b = await world.open_all(epoch=epoch)
        a.tensors(b.me, Lane.HIDDEN).post_send(torch.ones(1), head(0))
        received = await b.tensors(a.me, Lane.HIDDEN).post_recv((0, 0))
        assert received.header.epoch == epoch
        (a if epoch else b).abort()
        await (b if epoch else a).aclose()


async def test_nothing_is_left_after_many_rounds(make_world: Any) -> None:
    world = make_world(2)

    async def a_round(epoch: int) -> None:
        a, b = await world.open_all(epoch=epoch)
        lease = a.tensors(b.me, Lane.HIDDEN).lease((5000,), torch.float32)
        a.tensors(b.me, Lane.HIDDEN).post_send(lease, head(0))
        await b.tensors(a.me, Lane.HIDDEN).post_recv((0, 0))
        b.tensors(a.me, Lane.KV).lease((5,), torch.float32)
        await (a.aclose() if epoch % 2 else b.aclose())
        a.abort()
        b.abort()

    def held() -> tuple[int, int]:
        gc.collect()
        maps = Path("/proc/self/maps").read_text().count("memfd:pipelined")
        return len(os.listdir("/proc/self/fd")), maps

    await a_round(0)
    before = held()
    for epoch in range(1, 30):
        await a_round(epoch)
    assert held() == before
    assert len(asyncio.all_tasks()) == 1


async def test_opening_may_be_cancelled_at_any_time(make_world: Any) -> None:
    world = make_world(2)
    before = len(os.listdir("/proc/self/fd"))
    for turn in range(25):
        opening = [asyncio.ensure_future(world.open(rank, epoch=turn)) for rank in (0, 1)]
        for _ in range(turn):
            await asyncio.sleep(0)
        opening[turn % 2].cancel()
        other = opening[1 - turn % 2]
        await asyncio.wait([other], timeout=0.02)
        other.cancel()
        for end in await asyncio.gather(*opening, return_exceptions=True):
            if not isinstance(end, BaseException):
                end.abort()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before + 2  # the loop's own
    assert len(asyncio.all_tasks()) == 1


async def test_repr(open_world: Any) -> None:
    async with open_world() as (a, b):
        assert repr(a).endswith("Endpoint test/0 epoch 0 open, 1 peers>")
        link = a.tensors(b.me, Lane.HIDDEN)
        assert repr(link) == "<tensors test/0->test/1 HIDDEN open>"
        transfer = link.post_recv((7, 1))
        assert repr(transfer) == "<Transfer recv 7.1 from test/1 pending>"
        b.abort()
        await until(transfer.done)
        assert repr(transfer) == "<Transfer recv 7.1 from test/1 failed>"
        assert repr(link) == "<tensors test/0->test/1 HIDDEN PeerLost>"
        with pytest.raises(PeerLost):
            await transfer
