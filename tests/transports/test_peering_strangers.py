"""The socket transports against processes that die or stop, and strangers that send anything."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import socket
import sys
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
import torch

from pipelined.errors import ConfigError, EndOfLane, PeerLost
from pipelined.messages import TensorHeader
from pipelined.transport import Lane, resolve
from pipelined.transports import greeting

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.fixture(params=["zmq://", "zmq://127.0.0.1", "tcp://"])
def uri(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def header(step: int, index: int = 0) -> TensorHeader:
    return TensorHeader(0, step, index)


# ---- processes and strangers ----

_CHILD = """
import asyncio, sys
import torch
from pipelined.messages import Peer, TensorHeader
from pipelined.transport import EndpointSpec, FileRendezvous, Lane, resolve

async def main(uri, directory, how):
    peers = (Peer("test", 0), Peer("test", 1))
    spec = EndpointSpec(peers[1], peers, FileRendezvous(directory), peers[:1])
    async with await resolve(uri).open(spec) as endpoint:
        link = endpoint.messages(peers[0], Lane.SCHEDULE)
        out = endpoint.tensors(peers[0], Lane.HIDDEN)
        await link.send(b"ready")
        if await link.receive() == b"close":
            out.post_send(torch.arange(3_000_000), TensorHeader(0, 0))
            return
        await asyncio.sleep(60)

asyncio.run(main(*sys.argv[1:]))
"""


@contextlib.asynccontextmanager
async def with_child(world: Any) -> AsyncIterator[tuple[Any, Any, asyncio.subprocess.Process]]:
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _CHILD, world.uri, str(world.rendezvous.directory), ""
    )
    try:
        endpoint = await world.open(0, open_timeout_s=25)
        try:
            link = endpoint.messages(world.peers[1], Lane.SCHEDULE)
            assert await link.receive() == b"ready"
            yield endpoint, link, child
        finally:
            endpoint.abort()
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


async def test_killed_process(make_world: Any) -> None:
    async with with_child(make_world()) as (endpoint, link, child):
        lost = endpoint.lost
        posted = endpoint.tensors(link.peer, Lane.HIDDEN).post_recv((0, 0))
        sending = endpoint.tensors(link.peer, Lane.KV).post_send(torch.ones(10_000_000), header(0))
        child.kill()
        async with asyncio.timeout(1):
            with pytest.raises(PeerLost, match="test/1"):
                await link.receive()
            assert isinstance(await _error(posted), PeerLost)
            assert isinstance(await _error(sending), PeerLost | None)
            assert "test/1" in str(await anext(lost))
        with pytest.raises(PeerLost):
            await endpoint.messages(link.peer, Lane.HEALTH).send(b"x")
        await asyncio.wait_for(endpoint.aclose(), 1)


@pytest.mark.slow
async def test_stopped_process(make_world: Any, uri: str) -> None:
    world = make_world()
    world.uri = f"{uri}?heartbeat_ms=100"
    bound_s = resolve(world.uri).capabilities.peer_lost_bound_s
    async with with_child(world) as (_, link, child):
        child.send_signal(signal.SIGSTOP)
        async with asyncio.timeout(bound_s):
            with pytest.raises(PeerLost, match="test/1"):
                await link.receive()
        child.kill()


@pytest.mark.slow
async def test_process_that_closes_cleanly(make_world: Any) -> None:
    async with with_child(make_world()) as (endpoint, link, child):
        await link.send(b"close")
        assert await child.wait() == 0
        received = await endpoint.tensors(link.peer, Lane.HIDDEN).post_recv((0, 0))
        assert received.tensor.equal(torch.arange(3_000_000))
        with pytest.raises(EndOfLane):
            await link.receive()
        assert endpoint.losses == []


async def test_beyond_loopback_needs_a_secret(make_world: Any, uri: str) -> None:
    world = make_world()
    world.uri = f"{uri.split('://')[0]}://192.0.2.1"
    with pytest.raises(ConfigError, match="secret"):
        await world.open(0)
    with pytest.raises(ConfigError, match="can't listen"):  # nobody has that address
        await world.open(0, secret="s")
    world.uri = world.uri.replace("192.0.2.1", "0.0.0.0")
    with pytest.raises(ConfigError, match="wildcard"):
        await world.open(0, secret="s")


@pytest.mark.parametrize("options", ["windw=3", "window=0", "heartbeat_ms=fast"])
def test_bad_options(uri: str, options: str) -> None:
    with pytest.raises(ConfigError, match=options.split("=")[0]):
        resolve(f"{uri}?{options}")


async def test_garbage_from_strangers(open_world: Any) -> None:
    rng = random.Random(2)
    async with open_world() as (a, b):
        scheme = type(a).scheme
        address = greeting.find(scheme, a.spec, a.me)
        assert address is not None
        strangers = []
        for i in range(40):
            stranger = _raw_socket(address.url)
            strangers.append(stranger)
            preface = [b"", b"\xff\0\0\0\0\0\0\0\x01\x7f\x03" + bytes(53), bytes([1, 0, 0, 0])][i % 3]
            with contextlib.suppress(OSError):
                stranger.send(preface + rng.randbytes(rng.choice([1, 40, 64, 5000])))
            if i % 4 == 0:
                stranger.close()
            await asyncio.sleep(0)
        for i in range(20):
            a.messages(b.me, Lane.KV).send_nowait(b"%d" % i)
            b.messages(a.me, Lane.KV).send_nowait(b"%d" % i)
            async with asyncio.timeout(2):
                assert await b.messages(a.me, Lane.KV).receive() == b"%d" % i
                assert await a.messages(b.me, Lane.KV).receive() == b"%d" % i
        for stranger in strangers:
            stranger.close()
        await a.aclose()


def _raw_socket(url: str) -> socket.socket:
    if url.startswith("ipc://"):
        stranger = socket.socket(socket.AF_UNIX)
        stranger.connect(url.removeprefix("ipc://"))
    else:
        parts = urlsplit(url)
        stranger = socket.create_connection((parts.hostname, parts.port))
    stranger.setblocking(False)
    return stranger


async def _error(awaitable: Any) -> BaseException | None:
    try:
        result = await awaitable
    except Exception as error:
        return error
    if hasattr(result, "abort"):
        result.abort()
    return None
