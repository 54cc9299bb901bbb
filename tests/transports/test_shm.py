"""What only `shm://` does; what it shares with the others is in test_links.py."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import resource
import signal
import socket
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch
import uvloop

from pipelined.errors import ConfigError, EndOfLane, PeerLost, PipelinedError
from pipelined.messages import Peer, TensorHeader
from pipelined.transport import EndpointSpec, FileRendezvous, Lane
from pipelined.transport.registry import resolve
from pipelined.transports.shm_listener import reach

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

WORLD = (Peer("c", 0), Peer("c", 1))
CHILD = Path(__file__).with_name("shm_child.py")


def spec(rank: int, directory: Path, **changes: Any) -> EndpointSpec:
    fields = {"me": WORLD[rank], "world": WORLD, "connect": (WORLD[1 - rank],), **changes}
    return EndpointSpec(rendezvous=FileRendezvous(directory), **fields)


@asynccontextmanager
async def pair(directory: Path, uri: str = "shm://", **changes: Any) -> AsyncIterator[Any]:
    ends = await asyncio.gather(*(resolve(uri).open(spec(rank, directory, **changes)) for rank in (0, 1)))
    try:
        yield ends
    finally:
        for end in ends:
            end.abort()


@asynccontextmanager
async def child(directory: Path, behaviour: str) -> AsyncIterator[Any]:
    process = await asyncio.create_subprocess_exec(sys.executable, str(CHILD), str(directory), behaviour)
    endpoint = await resolve("shm://").open(spec(0, directory))
    try:
        yield endpoint, process
    finally:
        endpoint.abort()
        if process.returncode is None:
            process.send_signal(signal.SIGCONT)
            process.kill()
        await process.wait()


async def test_another_process_echoes(tmp_path: Path) -> None:
    async with child(tmp_path, "echo") as (endpoint, process):
        link = endpoint.tensors(WORLD[1], Lane.HIDDEN)
        for step in range(50):
            link.post_send(torch.full((step * 1000,), float(step)), TensorHeader(0, step))
        for step in range(50):
            received = await link.post_recv((step, 0))
            assert torch.equal(received.tensor, torch.full((step * 1000,), step + 1.0))
            received.release()
        with pytest.raises(EndOfLane):
            await asyncio.wait_for(link.post_recv((50, 0)), 5)
        assert await process.wait() == 0


@pytest.mark.parametrize("behaviour", ["wait", "flood"])
async def test_a_killed_peer_is_noticed_on_every_lane(tmp_path: Path, behaviour: str) -> None:
    async with child(tmp_path, behaviour) as (endpoint, process):
        link = endpoint.tensors(WORLD[1], Lane.HIDDEN)
        if behaviour == "flood":
            received = [await link.post_recv((step, 0)) for step in range(5)]
        else:
            await endpoint.messages(WORLD[1], Lane.HEALTH).receive()
        waiting = [asyncio.ensure_future(endpoint.messages(WORLD[1], lane).receive()) for lane in Lane]
        posted = endpoint.tensors(WORLD[1], Lane.KV).post_recv((0, 0))
        await asyncio.sleep(0.01)
        killed_s = time.monotonic()
        process.kill()
        for waiter in waiting:
            with pytest.raises(PeerLost, match=r"c/0 lost c/1 \(\w+\): "):
                await waiter
        with pytest.raises(PeerLost):
            await posted
        assert time.monotonic() - killed_s < 1
        assert "lost c/1" in str(await anext(endpoint.lost))
        if behaviour == "flood":  # what was received stays readable
            assert all((one.tensor == 1).all() for one in received)
        with pytest.raises(PeerLost):
            link.post_send(torch.ones(1), TensorHeader(0, 0))


async def test_a_stopped_peer_blocks_nothing_and_aclose_gives_up(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("pipelined.transport.endpoint.CLOSE_TIMEOUT_S", 0.3)
    async with child(tmp_path, "wait") as (endpoint, process):
        await endpoint.messages(WORLD[1], Lane.HEALTH).receive()
        process.send_signal(signal.SIGSTOP)
        link = endpoint.messages(WORLD[1], Lane.KV)
        for _ in range(64):  # more than a socket takes
            link.send_nowait(b"x" * 100_000)
        transfer = endpoint.tensors(WORLD[1], Lane.KV).post_send(torch.ones(1000), TensorHeader(0, 0))
        await asyncio.sleep(0.05)
        assert transfer.done()
        await asyncio.wait_for(endpoint.aclose(), 2)


def test_under_uvloop(tmp_path: Path) -> None:
    async def body() -> None:
        async with pair(tmp_path) as (a, b):
            for step in range(100):
                a.tensors(b.me, Lane.HIDDEN).post_send(torch.full((step * 500,), step), TensorHeader(0, step))
                received = await b.tensors(a.me, Lane.HIDDEN).post_recv((step, 0))
                assert (received.tensor == step).all()
                received.release()
            await a.messages(b.me, Lane.KV).send(b"x" * 3_000_000)
            await a.aclose()
            assert len(await b.messages(a.me, Lane.KV).receive()) == 3_000_000
            with pytest.raises(EndOfLane):
                await b.messages(a.me, Lane.KV).receive()

    uvloop.run(body())


async def test_a_lease_is_sent_in_place_and_its_memory_comes_back(tmp_path: Path) -> None:
    async with pair(tmp_path) as (a, b):
        link, receiver = a.tensors(b.me, Lane.HIDDEN), b.tensors(a.me, Lane.HIDDEN)
        lease = link.lease((1000,), torch.float32)
        lease.fill_(1)
        await link.post_send(lease, TensorHeader(0, 0))
        received = await receiver.post_recv((0, 0))
        lease[0] = 42  # not allowed, but shows that it is the same memory
        assert received.tensor[0] == 42
        address = lease.data_ptr()
        received.release()
        await asyncio.sleep(0.05)
        assert link.lease((1000,), torch.float32).data_ptr() != address  # the old tensor may still be written to
        del lease
        assert link.lease((1000,), torch.float32).data_ptr() == address  # the hot slot again
        for step in range(1, 500):
            unsent = link.lease((1000,), torch.float32)
            del unsent
            link.post_send(torch.ones(1000), TensorHeader(0, step))
            (await receiver.post_recv((step, 0))).release()
            while link.credits() < 40:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        assert link._arena.size_bytes == 32 << 20


async def test_a_full_arena_is_back_pressure(tmp_path: Path) -> None:
    async with pair(tmp_path, "shm://?arena_mib=33") as (a, b):
        link, receiver = a.tensors(b.me, Lane.HIDDEN), b.tensors(a.me, Lane.HIDDEN)
        big = torch.ones(3 << 20)  # 12 MiB
        sends = [link.post_send(big * step, TensorHeader(0, step)) for step in range(6)]
        await asyncio.sleep(0.1)
        lease = link.lease((3 << 20,), torch.float32)  # there is always plain memory
        assert [send.done() for send in sends] == [True] * 2 + [False] * 4
        a.messages(b.me, Lane.HEALTH).send_nowait(b"alive")
        assert await b.messages(a.me, Lane.HEALTH).receive() == b"alive"
        for step in range(6):
            received = await receiver.post_recv((step, 0))
            assert (received.tensor == step).all()
            received.release()
        assert link._arena.size_bytes <= 33 << 20
        del lease
        for step, size in enumerate([2 << 20, 20 << 20, 3 << 20, 1 << 10], start=6):  # also one beyond the limit
            link.post_send(torch.full((size,), step), TensorHeader(0, step))
            received = await receiver.post_recv((step, 0))
            assert (received.tensor == step).all()
            received.release()
            del received


async def test_only_the_same_user_gets_through(tmp_path: Path, monkeypatch: Any) -> None:
    async with pair(tmp_path) as (a, _):
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        stranger = socket.socket(socket.AF_UNIX)
        stranger.connect(a._listener.address.replace("@", "\0"))
        stranger.setblocking(False)
        await asyncio.sleep(0.05)
        assert stranger.recv(1) == b""
        assert reach(a._listener.address) is None
        stranger.close()


async def test_garbage_on_the_listening_socket(tmp_path: Path) -> None:
    rng = random.Random(3)
    async with pair(tmp_path) as (a, b):
        strangers = []
        for round_number in range(100):
            stranger = socket.socket(socket.AF_UNIX)
            stranger.connect(a._listener.address.replace("@", "\0"))
            stranger.setblocking(False)
            fds = [os.open("/dev/null", os.O_RDONLY)] if round_number % 3 == 0 else []
            garbage = rng.choice([rng.randbytes(300), b"\x05\0\0\0\0\0hello", b"\xff\xff\xff\xff\0\0", b"\x09\0"])
            socket.send_fds(stranger, [garbage], fds)
            for fd in fds:
                os.close(fd)
            strangers.append(stranger)
            await asyncio.sleep(0)
        await a.messages(b.me, Lane.HEALTH).send(b"fine")
        assert await b.messages(a.me, Lane.HEALTH).receive() == b"fine"
        for stranger in strangers:
            stranger.close()
        async with asyncio.timeout(5):
            while a._strangers:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_mutated_frames_from_the_peer_end_the_link_and_no_more(tmp_path: Path) -> None:
    rng = random.Random(4)
    for epoch in range(40):
        async with pair(tmp_path, epoch=epoch) as (a, b):
            a.tensors(b.me, Lane.HIDDEN).post_send(torch.ones(9), TensorHeader(0, 0))
            channel = a._links[b.me].channel
            channel.queue(rng.randrange(256), rng.randrange(7), rng.randbytes(rng.choice([0, 4, 12, 24, 40])))
            a.messages(b.me, Lane.KV).send_nowait(b"x")
            try:
                async with asyncio.timeout(1):
                    await b.messages(a.me, Lane.KV).receive()
            except PipelinedError:
                pass
            b.abort()


async def test_idle_costs_nothing(tmp_path: Path) -> None:
    async with pair(tmp_path) as (a, b):
        b.tensors(a.me, Lane.HIDDEN).post_recv((0, 0))
        await asyncio.sleep(0.05)
        before = resource.getrusage(resource.RUSAGE_SELF)
        await asyncio.sleep(0.5)
        after = resource.getrusage(resource.RUSAGE_SELF)
        assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.02


async def test_memory_is_given_back_when_an_endpoint_closes(tmp_path: Path) -> None:
    maps = Path("/proc/self/maps")
    async with pair(tmp_path) as (a, b):
        a.tensors(b.me, Lane.HIDDEN).post_send(torch.ones(4 << 20), TensorHeader(0, 0))
        received = await b.tensors(a.me, Lane.HIDDEN).post_recv((0, 0))
        kept = received.tensor[:3]
    assert kept.tolist() == [1, 1, 1]
    del kept, received
    gc.collect()
    assert "memfd:pipelined" not in maps.read_text()  # noqa: ASYNC240
    assert not [one for one in psutil.Process().open_files() if "memfd" in one.path]


def test_options_are_checked() -> None:
    for uri in ("shm://?arena=1", "shm://?arena_mib=0", "shm://?window=-1"):
        with pytest.raises(ConfigError):
            resolve(uri)
