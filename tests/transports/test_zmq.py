"""What is ZMQ's own: the keys of links that leave the host, and strangers that do speak ZMQ."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
import zmq

from pipelined.errors import HandshakeError
from pipelined.messages import TensorHeader
from pipelined.transport import Lane
from pipelined.transports import greeting
from pipelined.transports.wire import HEADER_BYTES, Frame, Kind


@pytest.fixture(params=["zmq://127.0.0.1"])
def uri(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def pretend_public(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loopback addresses are treated as those that other hosts reach."""

    async def public(scheme: str, host: str, secret: str) -> tuple[str, bool]:
        return host, False

    monkeypatch.setattr(greeting, "listening_host", public)


@pytest.mark.skipif(not zmq.has("curve"), reason="this build of ZMQ has no CURVE")
@pytest.mark.usefixtures("pretend_public")
async def test_links_beyond_the_host_are_encrypted(open_world: Any) -> None:
    async with open_world(secret="shared") as (a, b):
        address = greeting.find("zmq", a.spec, a.me)
        assert address is not None
        assert len(address.public_key) == 40
        tensor = torch.arange(3_000_000)
        sending = a.tensors(b.me, Lane.HIDDEN).post_send(tensor, TensorHeader(0, 0))
        assert (await b.tensors(a.me, Lane.HIDDEN).post_recv((0, 0))).tensor.equal(tensor)
        await sending
        with zmq.Context() as context, context.socket(zmq.DEALER) as plain:
            plain.linger = 0
            plain.connect(address.url)
            plain.send_multipart([Frame.pack(Kind.HELLO, 0, 64), a.greeter.hello(address.token.encode())])
            await asyncio.sleep(0.1)
            assert not plain.poll(100), "without the keys nobody even gets an answer"


async def _say(address: greeting.Address, *parts: bytes) -> list[bytes]:
    """What a DEALER is answered."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        stranger.connect(address.url)
        stranger.send_multipart(parts)
        for _ in range(40):
            await asyncio.sleep(0.01)
            if stranger.poll(0):
                return stranger.recv_multipart()
        return []


async def test_strangers_that_speak_zmq(open_world: Any) -> None:
    async with open_world() as (a, b):
        address = greeting.find("zmq", a.spec, a.me)
        assert address is not None
        hello = b.greeter.hello(address.token.encode())
        for parts in (
            [b""],
            [b"x" * HEADER_BYTES, b"y", b"z"] * 5,
            [Frame.pack(Kind.MESSAGE), b"no hello before"],
            [Frame.pack(Kind.TENSOR, 6), b"", b""],
        ):
            assert not await _say(address, *parts)
        for body, words in (
            (b"garbage", "not a hello"),
            (b.greeter.hello(b"another token"), "different secrets"),
            (hello, "dialled"),
        ):
            answer = await _say(address, Frame.pack(Kind.HELLO, 0, 64), body)
            assert Frame.unpack(answer[0]).kind is Kind.REFUSE
            assert words in answer[1].decode()
        a.messages(b.me, Lane.KV).send_nowait(b"well")
        assert await b.messages(a.me, Lane.KV).receive() == b"well"
        assert a.losses == b.losses == []


async def test_a_peer_that_breaks_the_protocol_is_lost(open_world: Any) -> None:
    async with open_world() as (a, b):
        frames = b.channels[a.me]._frames.socket
        frames.send_multipart([Frame.pack(Kind.MESSAGE, 0, 5), b"out of order"])
        async with asyncio.timeout(1):
            assert "protocol" in str(await anext(a.lost))


async def test_unusable_address_on_the_rendezvous(make_world: Any) -> None:
    world = make_world()
    world.rendezvous.publish("zmq.test.1", '{"epoch": 0, "url": "nonsense://x", "token": ""}')
    with pytest.raises(HandshakeError, match="nonsense"):
        await world.open(0, open_timeout_s=0.5)
    world.rendezvous.publish("zmq.test.1", "no json")
    with pytest.raises(HandshakeError, match="decode"):
        await world.open(0, open_timeout_s=0.5)
