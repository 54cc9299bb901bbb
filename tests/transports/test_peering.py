"""The socket transports as a whole: both ends in one loop, the same behaviour whatever the socket."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pipelined.errors import (
    ClosedError,
    ConfigError,
    EndOfLane,
    FrameTooLarge,
    HandshakeError,
    LaneMismatch,
    PeerLost,
    TransportError,
    Truncated,
    WouldBlock,
)
from pipelined.messages import TensorHeader
from pipelined.transport import Lane, resolve
from pipelined.transport.lanes import raw_bytes

if TYPE_CHECKING:
    pass

_DTYPES = [
    *(torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn),
]


@pytest.fixture(params=["zmq://", "zmq://127.0.0.1", "tcp://"])
def uri(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def header(step: int, index: int = 0) -> TensorHeader:
    return TensorHeader(0, step, index)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and raw_bytes(a.contiguous()).equal(raw_bytes(b))


def random_tensor(rng: random.Random, most_bytes: int = 300_000) -> torch.Tensor:
    dtype = rng.choice(_DTYPES)
    rank = rng.randrange(4)
    shape = [rng.choice([0, 1, 3, 17, 64]) for _ in range(rank)]
    if rng.random() < 0.3:
        shape = [rng.randrange(1, most_bytes // dtype.itemsize)]
    values = torch.randint(
        0, 2, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(rng.randrange(2**31))
    )
    tensor = values.to(dtype)
    return tensor.transpose(0, -1) if rank > 1 and rng.random() < 0.5 else tensor


async def test_messages_keep_order_both_ways_and_lanes_apart(open_world: Any) -> None:
    async with open_world(3) as endpoints:
        for lane in (Lane.SCHEDULE, Lane.HEALTH):
            for near in endpoints:
                for far in endpoints:
                    if near is not far:
                        for i in range(50):
                            near.messages(far.me, lane).send_nowait(f"{near.me} {lane} {i}".encode())
        for lane in (Lane.HEALTH, Lane.SCHEDULE):
            for near in endpoints:
                for far in endpoints:
                    if near is not far:
                        got = [await far.messages(near.me, lane).receive() for _ in range(50)]
                        assert got == [f"{near.me} {lane} {i}".encode() for i in range(50)]


async def test_message_window_and_limit(open_world: Any) -> None:
    async with open_world(window=3, max_message_bytes=100) as (a, b):
        out, back = a.messages(b.me, Lane.SCHEDULE), b.messages(a.me, Lane.SCHEDULE)
        with pytest.raises(FrameTooLarge):
            out.send_nowait(bytes(101))
        for i in range(3):
            out.send_nowait(bytes([i]))
        with pytest.raises(WouldBlock):
            out.send_nowait(b"3")
        sending = asyncio.create_task(out.send(b"late"))
        await asyncio.sleep(0.05)
        assert not sending.done()
        assert await back.receive() == b"\0"
        await asyncio.wait_for(sending, 1)
        assert [await back.receive() for _ in range(3)] == [b"\1", b"\2", b"late"]


async def test_many_messages_of_all_sizes(open_world: Any) -> None:
    rng = random.Random(5)
    frames = [rng.randbytes(rng.choice([0, 1, 200, 5_000, 40_000, 200_000])) for _ in range(400)]
    async with open_world(window=16) as (a, b):

        async def send() -> None:
            for frame in frames:
                await a.messages(b.me, Lane.RESULTS).send(frame)

        async with asyncio.TaskGroup() as group:
            group.create_task(send())
            for frame in frames:
                assert await b.messages(a.me, Lane.RESULTS).receive() == frame


@pytest.mark.parametrize("seed", range(3))
async def test_tensors_of_every_kind(open_world: Any, seed: int) -> None:
    rng = random.Random(seed)
    async with open_world(window=8) as (a, b):
        out, back = a.tensors(b.me, Lane.HIDDEN), b.tensors(a.me, Lane.HIDDEN)
        tensors = [random_tensor(rng) for _ in range(80)]

        async def send() -> None:
            for step, tensor in enumerate(tensors):
                await out.ready()
                out.post_send(tensor, header(step))

        async with asyncio.TaskGroup() as group:
            group.create_task(send())
            for step, tensor in enumerate(tensors):
                buffer = torch.empty(tensor.nbytes + 64, dtype=torch.uint8) if rng.random() < 0.5 else None
                received = await back.post_recv((step, 0), buffer)
                assert same(tensor, received.tensor)
                assert buffer is None or not tensor.nbytes or received.tensor.data_ptr() == buffer.data_ptr()
                received.release()
        await _until(lambda: out.credits() == 8)


async def test_large_tensors(open_world: Any) -> None:
    async with open_world() as (a, b):
        for step, size in enumerate((1 << 20, (16 << 20) + 12, 50_000_000)):
            tensor = torch.arange(size // 4, dtype=torch.int32)
            sending = a.tensors(b.me, Lane.KV).post_send(tensor, header(step))
            received = await b.tensors(a.me, Lane.KV).post_recv((step, 0))
            await sending
            assert received.tensor.equal(tensor)


async def test_overwriting_after_done_corrupts_nothing(open_world: Any) -> None:
    async with open_world() as (a, b):
        out, back = a.tensors(b.me, Lane.HIDDEN), b.tensors(a.me, Lane.HIDDEN)
        buffer = torch.empty(500_000, dtype=torch.int32)
        received = []
        for step in range(12):
            buffer.fill_(step)
            sending = out.post_send(buffer, header(step))
            if step % 6 == 0:
                gc.collect()  # what waits for the end of a transfer must be held by somebody
            await sending
            buffer.fill_(-1)
        for step in range(12):
            received.append(await back.post_recv((step, 0)))
        for step, got in enumerate(received):
            assert got.tensor.eq(step).all()


async def test_ring_where_all_send_first(open_world: Any) -> None:
    async with open_world(3) as endpoints:
        tensor = torch.ones(3_000_000, dtype=torch.float32)
        following = {near: endpoints[(i + 1) % 3] for i, near in enumerate(endpoints)}
        sends = [
            near.tensors(far.me, Lane.HIDDEN).post_send(tensor * near.me.rank, header(step))
            for step in range(4)
            for near, far in following.items()
        ]
        for near, far in following.items():
            for step in range(4):
                received = await far.tensors(near.me, Lane.HIDDEN).post_recv((step, 0))
                assert received.tensor[::1000].eq(near.me.rank).all()
        for send in sends:
            await send


async def test_tensor_window(open_world: Any) -> None:
    async with open_world(window=4) as (a, b):
        out, back = a.tensors(b.me, Lane.HIDDEN), b.tensors(a.me, Lane.HIDDEN)
        for step in range(4):
            out.post_send(torch.ones(10), header(step))
        with pytest.raises(WouldBlock):
            out.post_send(torch.ones(10), header(4))
        first = await back.post_recv((0, 0))
        await asyncio.sleep(0.05)
        assert out.credits() == 0, "arrived is not released"
        # A full lane holds up no other one.
        a.messages(b.me, Lane.HIDDEN).send_nowait(b"message")
        assert await b.messages(a.me, Lane.HIDDEN).receive() == b"message"
        a.tensors(b.me, Lane.KV).post_send(torch.ones(10), header(0))
        await b.tensors(a.me, Lane.KV).post_recv((0, 0))
        first.release()
        await asyncio.wait_for(out.ready(), 1)


async def test_wrong_seq_and_too_small(open_world: Any) -> None:
    async with open_world() as (a, b):
        a.tensors(b.me, Lane.HIDDEN).post_send(torch.ones(10), header(3, 1))
        back = b.tensors(a.me, Lane.HIDDEN)
        with pytest.raises(LaneMismatch, match="expected step 4"):
            await back.post_recv((4, 1))
        with pytest.raises(Truncated):
            await back.post_recv((3, 1), torch.empty(39, dtype=torch.uint8))
        assert (await back.post_recv((3, 1))).tensor.eq(1).all()


async def test_a_large_tensor_holds_up_no_message(open_world: Any) -> None:
    async with open_world() as (a, b):
        sends = [a.tensors(b.me, Lane.HIDDEN).post_send(torch.ones(2_000_000), header(i)) for i in range(10)]
        receives = [b.tensors(a.me, Lane.HIDDEN).post_recv((i, 0)) for i in range(10)]
        a.messages(b.me, Lane.HEALTH).send_nowait(b"ping")
        assert await b.messages(a.me, Lane.HEALTH).receive() == b"ping"
        assert not receives[-1].done()
        for transfer in (*sends, *receives):
            await transfer


# ---- ends ----


@pytest.mark.parametrize("closing", ["near", "far", "both"])
@pytest.mark.parametrize("when", ["idle", "posted", "moving"])
async def test_close_matrix(open_world: Any, closing: str, when: str) -> None:
    async with open_world() as (a, b):
        waiting = asyncio.create_task(_error(b.messages(a.me, Lane.SCHEDULE).receive()))
        tensor = torch.full((5_000_000 if when == "moving" else 1000,), 7.0)
        sends = [a.tensors(b.me, Lane.HIDDEN).post_send(tensor, header(i)) for i in range(3)] if when != "idle" else []
        await asyncio.sleep(0)
        async with asyncio.timeout(4):
            async with asyncio.TaskGroup() as group:
                for name, endpoint in (("near", a), ("far", b)):
                    if closing in (name, "both"):
                        group.create_task(endpoint.aclose())
            error = await waiting
            assert isinstance(error, EndOfLane if closing == "near" else ClosedError), error
            if closing == "near":
                for send in sends:
                    await send
                for i in range(len(sends)):
                    assert (await b.tensors(a.me, Lane.HIDDEN).post_recv((i, 0))).tensor.eq(7).all()
                assert isinstance(await _error(b.tensors(a.me, Lane.HIDDEN).post_recv((3, 0))), EndOfLane)
                assert isinstance(await _error(b.messages(a.me, Lane.KV).send(b"")), EndOfLane)
            elif closing == "far":
                assert isinstance(await _error(a.messages(b.me, Lane.SCHEDULE).receive()), EndOfLane)
            for send in sends:
                assert isinstance(await _error(send), TransportError | None)
            await asyncio.gather(a.aclose(), b.aclose())
            await a.aclose()
        assert a.losses == b.losses == []


async def test_abort_is_a_loss_on_every_lane(open_world: Any) -> None:
    async with open_world() as (a, b):
        waiting = [asyncio.create_task(_error(b.messages(a.me, lane).receive())) for lane in Lane]
        posted = [b.tensors(a.me, lane).post_recv((0, 0)) for lane in Lane]
        await asyncio.sleep(0)
        a.abort()
        async with asyncio.timeout(1):
            for task in waiting:
                assert isinstance(await task, PeerLost)
            for transfer in posted:
                assert isinstance(await _error(transfer), PeerLost)
            async for loss in b.lost:
                assert str(a.me) in str(loss)
                break
        with pytest.raises(PeerLost):
            b.messages(a.me, Lane.KV).send_nowait(b"x")


# ---- handshakes ----


async def test_wrong_secret_is_refused_by_both(make_world: Any) -> None:
    await _refused(make_world(), "different secrets", {"secret": "one"}, {"secret": "two"})


async def test_window_is_part_of_the_agreement(make_world: Any) -> None:
    await _refused(make_world(), "window", {"window": 4}, {"window": 5})


async def test_another_world_is_refused(make_world: Any) -> None:
    world, larger = make_world(2), make_world(3)
    await _refused(world, "world", {}, {"world": larger.peers})


async def test_another_epoch_is_refused(make_world: Any) -> None:
    world = make_world()
    async with asyncio.TaskGroup() as group:
        old = group.create_task(_error(world.open(0)))
        new = group.create_task(_error(world.open(1, epoch=1, open_timeout_s=0.5)))
    assert "epoch 1" in str(old.result())
    assert "still in epoch 0" in str(new.result())
    assert isinstance(old.result(), HandshakeError)
    assert isinstance(new.result(), HandshakeError)


async def test_absent_peers_are_named(make_world: Any) -> None:
    world = make_world(3)
    with pytest.raises(HandshakeError, match=r"test/1 .*test/2 "):
        await world.open(0, open_timeout_s=0.1)


async def test_connecting_later_from_either_side(make_world: Any) -> None:
    world = make_world(3)
    endpoints = [await world.open(rank, connect=()) for rank in range(3)]
    a, b, c = endpoints
    await a.connect(b.me)
    await asyncio.gather(c.connect(a.me), a.connect(c.me), b.connect(c.me))
    await a.connect(b.me)
    for near in endpoints:
        for far in endpoints:
            if near is not far:
                near.messages(far.me, Lane.KV).send_nowait(b"x")
                assert await far.messages(near.me, Lane.KV).receive() == b"x"
    with pytest.raises(ConfigError, match="not connected"):
        a.messages(a.me, Lane.KV)
    for endpoint in endpoints:
        await endpoint.aclose()


async def test_a_secret_that_both_know(open_world: Any) -> None:
    async with open_world(secret="shared") as (a, b):
        a.messages(b.me, Lane.KV).send_nowait(b"x")
        assert await b.messages(a.me, Lane.KV).receive() == b"x"


# ---- resources ----


async def test_rounds_leak_nothing(make_world: Any) -> None:
    async def one_round() -> None:
        endpoints = await make_world().open_all()
        a, b = endpoints
        a.tensors(b.me, Lane.KV).post_send(torch.ones(300_000), header(0))
        (await b.tensors(a.me, Lane.KV).post_recv((0, 0))).release()
        await a.aclose()
        await b.aclose()

    await one_round()
    before = len(os.listdir("/proc/self/fd")), threading.active_count(), len(asyncio.all_tasks())
    for _ in range(15):
        await one_round()
    await _until(lambda: len(os.listdir("/proc/self/fd")) <= before[0])
    assert (threading.active_count(), len(asyncio.all_tasks())) == before[1:]


async def test_waiting_costs_no_processor_time(open_world: Any) -> None:
    async with open_world() as (a, b):
        waiting = [asyncio.create_task(_error(e.messages(o.me, Lane.KV).receive())) for e, o in ((a, b), (b, a))]
        posted = b.tensors(a.me, Lane.KV).post_recv((0, 0))
        await asyncio.sleep(0.1)
        start = time.process_time()
        await asyncio.sleep(1)
        assert time.process_time() - start < 0.02
        await a.aclose()
        await _error(posted)
        for task in waiting:
            await task


def test_under_uvloop(uri: str, tmp_path: Path) -> None:
    uvloop = pytest.importorskip("uvloop")
    from pipelined.messages import Peer
    from pipelined.transport import EndpointSpec, FileRendezvous

    async def main() -> None:
        peers = (Peer("u", 0), Peer("u", 1))
        board = FileRendezvous(tmp_path / "r")
        a, b = await asyncio.gather(
            *(resolve(uri).open(EndpointSpec(me, peers, board, tuple({*peers} - {me}))) for me in peers)
        )
        async with a, b:
            for i in range(300):
                a.messages(b.me, Lane.KV).send_nowait(b"%d" % i)
                assert await b.messages(a.me, Lane.KV).receive() == b"%d" % i
            big = torch.arange(4_000_000)
            sending = a.tensors(b.me, Lane.KV).post_send(big, header(0))
            assert (await b.tensors(a.me, Lane.KV).post_recv((0, 0))).tensor.equal(big)
            await sending

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(main(), 20))


# ---- helpers ----


async def _error(awaitable: Any) -> BaseException | None:
    try:
        result = await awaitable
    except Exception as error:
        return error
    if hasattr(result, "abort"):
        result.abort()
    return None


async def _until(condition: Any, timeout_s: float = 2.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def _refused(world: Any, words: str, *changes: dict[str, Any]) -> None:
    start = time.monotonic()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_error(world.open(rank, **changes[rank]))) for rank in range(2)]
    errors = [task.result() for task in tasks]
    assert all(isinstance(error, HandshakeError) for error in errors), errors
    assert any(words in str(error) for error in errors), errors
    assert time.monotonic() - start < 3, "each was told, and did not have to wait"
