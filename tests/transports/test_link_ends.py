"""How links and endpoints begin and end, the same for every transport of ours (`conftest.py` names them)."""

from __future__ import annotations

import asyncio
import gc
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pipelined.errors import ClosedError, ConfigError, EndOfLane, HandshakeError, PeerLost
from pipelined.messages import DRIVER, Peer, TensorHeader
from pipelined.transport import Lane

if TYPE_CHECKING:
    from collections.abc import Callable


def head(step: int, index: int = 0, **fields: Any) -> TensorHeader:
    return TensorHeader(epoch=0, step=step, index=index, **fields)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


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
    async with asyncio.timeout(5):
        # Two are the loop's own, and it closes handles in a later turn.
        while len(os.listdir("/proc/self/fd")) > before + 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
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
