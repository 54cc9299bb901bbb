"""What only `memory://` does; what it shares with the others is in test_links.py."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch

from pipelined.clock import LoopClock
from pipelined.clock.virtual import run as run_virtually
from pipelined.errors import ConfigError, HandshakeError, PeerLost
from pipelined.messages import Peer, TensorHeader
from pipelined.transport import EndpointSpec, FileRendezvous, Lane, MemoryRendezvous
from pipelined.transport.registry import resolve

WORLD = (Peer("m", 0), Peer("m", 1))


def spec(rank: int, board: MemoryRendezvous, **changes: object) -> EndpointSpec:
    fields = {"me": WORLD[rank], "world": WORLD, "rendezvous": board, "connect": (WORLD[1 - rank],), **changes}
    return EndpointSpec(**fields)  # type: ignore[arg-type]


async def test_it_needs_a_board_of_objects(tmp_path) -> None:
    with pytest.raises(ConfigError, match="use shm://"):
        await resolve("memory://").open(spec(0, FileRendezvous(tmp_path)))  # type: ignore[arg-type]


@pytest.mark.parametrize("uri", ["memory://?windw=3", "memory://?window=0", "memory://?window=x"])
def test_options_are_checked(uri: str) -> None:
    with pytest.raises(ConfigError, match="window"):
        resolve(uri)


async def test_the_window_of_the_uri() -> None:
    board = MemoryRendezvous()
    transport = resolve("memory://?window=5")
    a, b = await asyncio.gather(*(transport.open(spec(rank, board)) for rank in (0, 1)))
    assert a.tensors(b.me, Lane.KV).credits() == 5
    await a.aclose()
    await b.aclose()


async def test_a_loss_is_noticed_at_once() -> None:
    board = MemoryRendezvous()
    a, b = await asyncio.gather(*(resolve("memory://").open(spec(rank, board)) for rank in (0, 1)))
    link = b.messages(a.me, Lane.SCHEDULE)
    a.abort()
    with pytest.raises(PeerLost):
        link.send_nowait(b"x")
    b.abort()


async def test_a_peer_opens_once_an_epoch() -> None:
    board = MemoryRendezvous()
    a, b = await asyncio.gather(*(resolve("memory://").open(spec(rank, board)) for rank in (0, 1)))
    with pytest.raises(HandshakeError, match="already open in epoch 0"):
        await resolve("memory://").open(spec(0, board))
    await a.aclose()
    await b.aclose()


async def test_the_newer_epoch_waits_for_the_older_to_go() -> None:
    board = MemoryRendezvous()
    a, b = await asyncio.gather(*(resolve("memory://").open(spec(rank, board)) for rank in (0, 1)))
    a.abort()
    newer = asyncio.ensure_future(resolve("memory://").open(spec(0, board, epoch=1)))
    await asyncio.sleep(0.01)
    assert not newer.done()
    b.abort()
    again = await resolve("memory://").open(spec(1, board, epoch=1))
    await again.aclose()
    await (await newer).aclose()


def test_between_loops_of_different_threads() -> None:
    board = MemoryRendezvous()
    results: dict[int, list[float]] = {}

    async def turn(rank: int) -> None:
        async with await resolve("memory://").open(spec(rank, board)) as endpoint:
            mine = endpoint.tensors(WORLD[1 - rank], Lane.HIDDEN)
            got = []
            for step in range(200):
                send = mine.post_send(torch.full((100,), float(step)), TensorHeader(0, step))
                received = await mine.post_recv((step, 0))
                got.append(received.tensor[99].item())
                received.release()
                await send
            results[rank] = got
            await endpoint.messages(WORLD[1 - rank], Lane.HEALTH).send(b"done")
            await endpoint.messages(WORLD[1 - rank], Lane.HEALTH).receive()

    threads = [threading.Thread(target=lambda rank=rank: asyncio.run(turn(rank))) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results[0] == results[1] == [float(step) for step in range(200)]


async def test_the_same_order_each_time() -> None:
    async def once() -> list[str]:
        board, log = MemoryRendezvous(), []
        a, b = await asyncio.gather(*(resolve("memory://").open(spec(rank, board)) for rank in (0, 1)))
        for lane in Lane:
            b.tensors(a.me, lane).post_recv((0, 0)).add_done_callback(lambda t, lane=lane: log.append(lane.name))
        for lane in reversed(Lane):
            a.tensors(b.me, lane).post_send(torch.ones(2_000_000 if lane == Lane.KV else 2), TensorHeader(0, 0))
        while len(log) < len(Lane):  # noqa: ASYNC110
            await asyncio.sleep(0)
        a.abort()
        b.abort()
        return log

    assert await once() == await once() == await once()


async def _exchange() -> tuple[str, float]:
    clock, board = LoopClock(), MemoryRendezvous()
    with pytest.raises(HandshakeError, match="m/1"):
        await resolve("memory://").open(spec(0, board, clock=clock, open_timeout_s=3600.0))
    a, b = await asyncio.gather(*(resolve("memory://").open(spec(rank, board, clock=clock)) for rank in (0, 1)))
    log = []
    for step in range(20):
        send = a.tensors(b.me, Lane.HIDDEN).post_send(
            torch.ones(2_000_000 if step % 7 == 0 else 9), TensorHeader(0, step)
        )
        await a.messages(b.me, Lane.SCHEDULE).send(b"step")
        log.append((await b.messages(a.me, Lane.SCHEDULE).receive(), repr(send)))
        (await b.tensors(a.me, Lane.HIDDEN).post_recv((step, 0))).release()
        await clock.sleep(0.5)
    await a.aclose()
    b.abort()
    return repr(log), clock.now()


def test_in_virtual_time() -> None:
    first = run_virtually(_exchange())
    assert first == run_virtually(_exchange())
    assert first[1] == pytest.approx(3610)
