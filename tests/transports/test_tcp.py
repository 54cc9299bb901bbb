"""What is TCP's own: frames cut anywhere, streams of anything, connections that say nothing."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelined.errors import HandshakeError, ProtocolError
from pipelined.messages import TensorHeader
from pipelined.transport import Lane
from pipelined.transports import greeting
from pipelined.transports.tcp_frames import Inbox, Outbox
from pipelined.transports.wire import Frame, Kind


@pytest.fixture(params=["tcp://"])
def uri(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class _Sink:
    """Stands where a channel stands, and keeps what comes."""

    def __init__(self) -> None:
        self.got: list[object] = []

    def pack(self, kind: Kind, slot: int) -> bytes:
        return Frame.pack(kind, slot)

    def take_credits(self, frame: Frame) -> None:
        pass

    def handle(self, frame: Frame, body: bytes) -> None:
        self.got.append(body)

    def begin_tensor(self, frame: Frame, encoded: bytes) -> tuple[Any, int]:
        return None, int.from_bytes(encoded, "little")

    def end_tensor(self, slot: int, header: object, raw: torch.Tensor) -> None:
        self.got.append((slot, bytes(raw.numpy())))


def _inbox(sink: Any) -> Inbox:
    inbox = Inbox(lambda frame, body: sink, 1 << 20)
    _feed(inbox, _stream([(None, b"hello")]), random.Random(0))
    return inbox


def _stream(items: list[tuple[int | None, bytes]]) -> bytes:
    """Messages (slot None) and tensors as they leave."""
    outbox = Outbox(_Sink())  # type: ignore[arg-type]
    for slot, data in items:
        if slot is None:
            outbox.frame(Frame.pack(Kind.MESSAGE), data)
        else:
            outbox.tensor(slot, len(data).to_bytes(8, "little"), memoryview(data), lambda: None)
    out = b""
    while pieces := outbox.next():
        count = max(1, sum(map(len, pieces)) // 2)
        out += b"".join(pieces)[:count]
        outbox.took(count)
    return out


def _feed(inbox: Inbox, stream: bytes, rng: random.Random) -> None:
    while stream:
        count = min(rng.choice([1, 7, 100, 40_000, 1 << 20]), len(stream))
        chunk, stream = stream[:count], stream[count:]
        while chunk:
            taken = 0
            for target in inbox.targets():
                part = chunk[taken : taken + len(target)]
                target[: len(part)] = part
                taken += len(part)
            inbox.came(taken)
            chunk = chunk[taken:]


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(
        st.tuples(st.sampled_from([None, 5, 6, 8]), st.sampled_from([0, 1, 39, 300, 33_000, 262_144, 700_000])),
        max_size=7,
        unique_by=lambda item: item[0] if item[0] is not None else object(),
    ),
    seed=st.integers(0, 1 << 30),
)
def test_whatever_the_cuts_everything_arrives(sizes: list[tuple[int | None, int]], seed: int) -> None:
    rng = random.Random(seed)
    items = [(slot, rng.randbytes(size)) for slot, size in sizes]
    sink = _Sink()
    _feed(_inbox(sink), _stream(items), rng)
    expected = [data if slot is None else (slot, data) for slot, data in items]
    assert sorted(map(repr, sink.got)) == sorted(map(repr, expected))
    assert [got for got in sink.got if isinstance(got, bytes)] == [data for slot, data in items if slot is None]


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 1 << 30), mutate=st.booleans())
def test_any_bytes_at_all_are_frames_or_an_error(seed: int, mutate: bool) -> None:
    rng = random.Random(seed)
    stream = bytearray(_stream([(None, b"abc"), (6, rng.randbytes(1000)), (None, rng.randbytes(100))]))
    if mutate:
        for _ in range(rng.randrange(1, 5)):
            stream[rng.randrange(len(stream))] = rng.randrange(256)
    else:
        stream = bytearray(rng.randbytes(500))

    class Sizes(_Sink):
        def begin_tensor(self, frame: Frame, encoded: bytes) -> tuple[Any, int]:
            if len(encoded) != 8 or (size := int.from_bytes(encoded, "little")) > 10_000:
                raise ProtocolError("size")
            return None, size

    with contextlib.suppress(ProtocolError):
        _feed(_inbox(Sizes()), bytes(stream), rng)


async def test_a_stream_that_breaks_the_protocol_loses_the_peer(open_world: Any) -> None:
    async with open_world() as (a, b):
        b.channels[a.me]._stream.sock.send(bytes(100))
        async with asyncio.timeout(1):
            assert "protocol" in str(await anext(a.lost))
        async with asyncio.timeout(1):
            await anext(b.lost)


async def test_crowds_of_silent_strangers(open_world: Any) -> None:
    async with open_world() as (a, b):
        address = greeting.find("tcp", a.spec, a.me)
        assert address is not None
        host, port = address.url.removeprefix("tcp://").split(":")
        writers = [(await asyncio.open_connection(host, int(port)))[1] for _ in range(200)]
        a.messages(b.me, Lane.KV).send_nowait(b"well")
        assert await b.messages(a.me, Lane.KV).receive() == b"well"
        assert len(a._strangers) <= 128
        for writer in writers:
            writer.close()


async def test_the_listener_too_has_to_know_the_secret(make_world: Any) -> None:
    """Somebody else sits at the published address: it gets a hello, and nothing after it."""
    world = make_world()
    heard: list[bytes] = []

    async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from pipelined.transports.tcp_frames import encode

        writer.write(encode(Frame.pack(Kind.HELLO), 16) + bytes(16))
        heard.append(await reader.read(4096))
        writer.write(encode(Frame.pack(Kind.WELCOME), 32) + bytes(32))
        heard.append(await reader.read(4096))
        writer.close()

    server = await asyncio.start_server(impostor, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    world.rendezvous.publish("tcp.test.1", f'{{"epoch": 0, "url": "tcp://127.0.0.1:{port}", "token": "t"}}')
    with pytest.raises(HandshakeError, match="different secrets"):
        await world.open(0, secret="the secret itself")
    await asyncio.sleep(0.05)
    assert b"the secret" not in b"".join(heard)
    assert heard[1] == b""
    server.close()


async def test_empty_and_full_bodies(open_world: Any) -> None:
    async with open_world(max_message_bytes=200_000) as (a, b):
        for size in (0, 200_000, 32_768, 32_728):
            a.messages(b.me, Lane.KV).send_nowait(bytes(size))
            assert await b.messages(a.me, Lane.KV).receive() == bytes(size)
        meta = bytes(100_000)
        a.tensors(b.me, Lane.KV).post_send(torch.empty(0), TensorHeader(0, 0, meta=meta))
        received = await b.tensors(a.me, Lane.KV).post_recv((0, 0))
        assert received.header.meta == meta
        assert received.tensor.shape == (0,)
