"""`sim://`: how long frames take, who shares what, and the whole runtime on it in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelined.clock import LoopClock
from pipelined.clock.virtual import run
from pipelined.errors import ConfigError, DeadlockError, WouldBlock
from pipelined.llm import AsyncLLM
from pipelined.messages import Peer, SamplingParams, TensorHeader
from pipelined.pipeline import Pipeline, TaskWorld
from pipelined.stage import LOGICAL_BYTES
from pipelined.transport import Endpoint, EndpointSpec, Lane, MemoryRendezvous, resolve

SMALL = torch.arange(4.0)


def peers(size: int) -> tuple[Peer, ...]:
    return tuple(Peer("sim", rank) for rank in range(size))


async def opened(uri: str, size: int = 2, skews_s: tuple[float, ...] = (), **changes: Any) -> list[Endpoint]:
    board, world = MemoryRendezvous(), peers(size)
    skews_s = skews_s or (0.0,) * size

    def spec(rank: int) -> EndpointSpec:
        others = tuple(peer for peer in world if peer.rank != rank)
        clock = LoopClock(skews_s[rank])
        return EndpointSpec(me=world[rank], world=world, rendezvous=board, connect=others, clock=clock, **changes)

    return list(await asyncio.gather(*(resolve(uri).open(spec(rank)) for rank in range(size))))


def virtually(body: Callable[..., Coroutine[Any, Any, Any]], uri: str, size: int = 2, **options: Any) -> Any:
    """Run `body(*endpoints)` in virtual time, and close."""

    async def go() -> Any:
        endpoints = await opened(uri, size, **options)
        try:
            return await body(*endpoints)
        finally:
            for endpoint in endpoints:
                await endpoint.aclose()

    return run(go())


def now() -> float:
    return asyncio.get_running_loop().time()


def test_a_frame_takes_its_bytes_and_the_latency() -> None:
    async def body(a: Endpoint, b: Endpoint) -> None:
        send = a.tensors(b.me, Lane.HIDDEN).post_send(SMALL, TensorHeader(0, 0, logical_bytes=2_000_000))
        receive = b.tensors(a.me, Lane.HIDDEN).post_recv((0, 0))
        await send
        assert now() == pytest.approx(1e-3)
        received = await receive
        assert now() == pytest.approx(1e-3 + 7e-6)
        assert torch.equal(received.tensor, SMALL)
        await a.messages(b.me, Lane.RESULTS).send(b"x" * 2000)
        assert await b.messages(a.me, Lane.RESULTS).receive() == b"x" * 2000
        assert now() == pytest.approx(1e-3 + 7e-6 + 1e-6 + 7e-6)

    virtually(body, "sim://?latency_us=7&bandwidth_gbytes_per_s=2")


def test_the_real_size_counts_without_logical_bytes() -> None:
    async def body(a: Endpoint, b: Endpoint) -> None:
        a.tensors(b.me, Lane.HIDDEN).post_send(torch.zeros(1000, dtype=torch.uint8), TensorHeader(0, 0))
        await b.tensors(a.me, Lane.HIDDEN).post_recv((0, 0))
        assert now() == pytest.approx(1e-6)

    virtually(body, "sim://?latency_us=0&bandwidth_gbytes_per_s=1")


def test_lanes_of_a_pair_share_it_and_pairs_do_not() -> None:
    async def body(a: Endpoint, b: Endpoint, c: Endpoint) -> None:
        for peer in (b, c):
            for lane in (Lane.HIDDEN, Lane.KV):
                a.tensors(peer.me, lane).post_send(SMALL, TensorHeader(0, 0, logical_bytes=1_000_000))
        await b.tensors(a.me, Lane.HIDDEN).post_recv((0, 0))
        assert now() == pytest.approx(1e-3)
        await c.tensors(a.me, Lane.HIDDEN).post_recv((0, 0))
        assert now() == pytest.approx(1e-3)
        for peer in (b, c):
            await peer.tensors(a.me, Lane.KV).post_recv((0, 0))
            assert now() == pytest.approx(2e-3)

    virtually(body, "sim://?latency_us=0&bandwidth_gbytes_per_s=1", 3)


def test_a_message_passes_a_queue_of_tensors() -> None:
    async def body(a: Endpoint, b: Endpoint) -> None:
        for step in range(10):
            a.tensors(b.me, Lane.HIDDEN).post_send(SMALL, TensorHeader(0, step, logical_bytes=1_000_000))
        await a.messages(b.me, Lane.SCHEDULE).send(b"")
        await b.messages(a.me, Lane.SCHEDULE).receive()
        assert now() == pytest.approx(1e-3)  # behind the frame that is leaving, not behind all ten

    virtually(body, "sim://?latency_us=0&bandwidth_gbytes_per_s=1")


def test_egress_is_shared_by_all_links_of_a_peer() -> None:
    async def body(a: Endpoint, b: Endpoint, c: Endpoint) -> None:
        for peer in (b, c):
            a.tensors(peer.me, Lane.HIDDEN).post_send(SMALL, TensorHeader(0, 0, logical_bytes=1_000_000))
        await b.tensors(a.me, Lane.HIDDEN).post_recv((0, 0))
        assert now() == pytest.approx(1e-3)
        await c.tensors(a.me, Lane.HIDDEN).post_recv((0, 0))
        assert now() == pytest.approx(2e-3)

    virtually(body, "sim://?latency_us=0&bandwidth_gbytes_per_s=100&egress_gbytes_per_s=1", 3)


def test_a_link_of_its_own() -> None:
    async def body(a: Endpoint, b: Endpoint) -> None:
        await a.messages(b.me, Lane.SCHEDULE).send(b"x")
        await b.messages(a.me, Lane.SCHEDULE).receive()
        assert now() == pytest.approx(50e-6, rel=1e-3)
        await b.messages(a.me, Lane.SCHEDULE).send(b"x")
        await a.messages(b.me, Lane.SCHEDULE).receive()
        assert now() == pytest.approx(55e-6, rel=1e-3)

    virtually(body, "sim://?links=0-1:50:1.5")


def test_credits_take_their_way_back() -> None:
    async def body(a: Endpoint, b: Endpoint) -> None:
        link, far = a.messages(b.me, Lane.SCHEDULE), b.messages(a.me, Lane.SCHEDULE)
        link.send_nowait(b"1")
        with pytest.raises(WouldBlock):
            link.send_nowait(b"2")
        await far.receive()
        assert now() == pytest.approx(1e-3, rel=1e-3)
        with pytest.raises(WouldBlock):
            link.send_nowait(b"2")
        await link.send(b"2")
        assert now() == pytest.approx(2e-3, rel=1e-3)

    virtually(body, "sim://?latency_us=1000&window=1")


def test_skewed_clocks_change_nothing() -> None:
    async def body(a: Endpoint, b: Endpoint) -> float:
        for near, far in ((a, b), (b, a)):
            near.tensors(far.me, Lane.HIDDEN).post_send(SMALL, TensorHeader(0, 0, logical_bytes=123_457))
            await far.tensors(near.me, Lane.HIDDEN).post_recv((0, 0))
        return now()

    plain = virtually(body, "sim://")
    assert virtually(body, "sim://", skews_s=(1e6 / 3, -7e5 / 3)) == pytest.approx(plain, abs=1e-8)


@given(
    frames=st.lists(st.tuples(st.sampled_from([Lane.HIDDEN, Lane.KV]), st.integers(0, 10_000_000)), max_size=20),
    latency_us=st.integers(0, 1000),
)
@settings(max_examples=25, deadline=None)
def test_a_link_is_never_faster_than_its_bandwidth(frames: list[tuple[Lane, int]], latency_us: int) -> None:
    async def body(a: Endpoint, b: Endpoint) -> None:
        for step, (lane, size_bytes) in enumerate(frames):
            a.tensors(b.me, lane).post_send(SMALL, TensorHeader(0, step, logical_bytes=size_bytes))
        last_s = 0.0
        for step, (lane, _) in enumerate(frames):
            await b.tensors(a.me, lane).post_recv((step, 0))
            last_s = now()
        charged = sum(size_bytes or SMALL.nbytes for _, size_bytes in frames)
        assert last_s == pytest.approx(charged / 1e9 + latency_us * 1e-6 * bool(frames))

    virtually(body, f"sim://?bandwidth_gbytes_per_s=1&latency_us={latency_us}")


@pytest.mark.parametrize(
    ("uri", "says"),
    [
        ("sim://?latency=5", "latency_us"),
        ("sim://?latency_us=-1", "at least 0"),
        ("sim://?bandwidth_gbytes_per_s=0", "expected a number"),
        ("sim://?links=0-1", "from-to:latency_us:gbytes_per_s"),
        ("sim://?links=0-1:5:0", "from-to"),
    ],
)
def test_options_are_checked(uri: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        resolve(uri)


def test_waiting_for_what_nobody_sends_is_named() -> None:
    async def body(a: Endpoint, b: Endpoint) -> None:
        await b.messages(a.me, Lane.SCHEDULE).receive()

    with pytest.raises(DeadlockError, match="receive"):
        virtually(body, "sim://")


# ---- the runtime on it ----


class Stage:
    """Takes `cost` seconds of an emulated device; charges the next link for `size_bytes`."""

    name = "emulated"

    def __init__(self, seconds: float, size_bytes: int) -> None:
        self.seconds, self.size_bytes = seconds, size_bytes

    def forward(self, x: dict[str, Any]) -> dict[str, Any]:
        return {"x": x["x"] + 1, LOGICAL_BYTES: self.size_bytes}

    def cost(self, input_id: int) -> float:
        return self.seconds


def makespan(stages: int, inputs: int, stage_s: float, uri: str, size_bytes: int = 0) -> float:
    async def go() -> float:
        world = TaskWorld(clock=lambda rank: LoopClock())
        chain = [Stage(stage_s, size_bytes) for _ in range(stages)]
        async with Pipeline(chain, world=world, device="emulated", transport=uri) as pipe:
            begun_s = now()
            xs = [{"x": torch.tensor([i]), LOGICAL_BYTES: size_bytes} for i in range(inputs)]
            outputs = [output async for output in pipe.stream(xs)]
            assert [int(output["x"]) for output in outputs] == [i + stages for i in range(inputs)]
            assert all(set(output) == {"x"} for output in outputs)
            return now() - begun_s

    return run(go())


@pytest.mark.parametrize(("stages", "inputs"), [(1, 1), (1, 5), (4, 1), (4, 12), (8, 3)])
def test_makespan_is_exact_on_free_links(stages: int, inputs: int) -> None:
    free = "sim://?latency_us=0&bandwidth_gbytes_per_s=inf"
    assert makespan(stages, inputs, 0.01, free) == pytest.approx((inputs + stages - 1) * 0.01, abs=1e-9)


@pytest.mark.parametrize(("stages", "inputs"), [(1, 1), (3, 10), (6, 20)])
def test_makespan_with_links_adds_one_hop_a_link(stages: int, inputs: int) -> None:
    """Every link is crossed once on the critical path: the driver's two, and one between neighbours."""
    took = makespan(stages, inputs, 0.01, "sim://?latency_us=100&bandwidth_gbytes_per_s=1", size_bytes=2_000_000)
    hops = (stages + 1) * (2e-3 + 100e-6)
    told = 1e-6  # the message that an input is there is a few bytes behind it
    assert took == pytest.approx((inputs + stages - 1) * 0.01 + hops, abs=told)


PROMPT = [(7 * i) % 900 for i in range(700)]


def traced(seed: int, uri: str = "sim://", model: str = "toy://?vocab=997") -> bytes:
    async def go() -> bytes:
        world = TaskWorld(clock=lambda rank: LoopClock(0.25 * rank))
        settings = {"page_size": 16, "chunked_prefill_size": 64, "pp_size": 4, "transport": uri}
        async with AsyncLLM(model, world=world, device="emulated", **settings) as llm:
            params = SamplingParams(max_tokens=6, seed=1, temperature=0)
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(llm.complete(PROMPT[i:], params)) for i in range(3)]
            tokens = [task.result().outputs[0].token_ids for task in tasks]
            return msgspec.msgpack.encode([tokens, await llm.trace(), await llm.integrity(), now()])

    return run(go(), seed=seed)


EMULATED = "emulated://?layers=8&hidden=1024&context=4096&a=1e-10&b=1e-6&c=1e-4&d=1e-9"


def test_the_same_seed_gives_the_same_trace_byte_for_byte() -> None:
    first = traced(3, model=EMULATED)
    assert len(first) > 10_000
    assert traced(3, model=EMULATED) == first


def test_what_comes_out_does_not_depend_on_the_order_of_equal_times() -> None:
    tokens = {str(msgspec.msgpack.decode(traced(seed, model=EMULATED), strict=False)[0]) for seed in range(4)}
    assert len(tokens) == 1


def prefill(ranks: int, tokens: int, chunk: int) -> tuple[int, float, float]:
    """Chunks, virtual seconds to the first token, and what the models of stages and links say."""

    async def go() -> tuple[int, float, float]:
        model = "emulated://?layers=64&hidden=8192&a=1e-12&b=2e-6&c=1e-3&d=1e-10"
        settings = {"pp_size": ranks, "transport": "sim://", "chunked_prefill_size": chunk}
        world = TaskWorld(clock=lambda rank: LoopClock())
        async with AsyncLLM(model, world=world, device="emulated", **settings) as llm:
            prompt = [i % 30_000 for i in range(tokens)]
            output = await llm.complete(prompt, SamplingParams(max_tokens=1, seed=1, temperature=0))
            chunks, times, at = output.metrics.chunks, [], 0
            for size in chunks:
                times.append(1e-3 + 1e-10 * at + 2e-6 * size + 1e-12 * (2 * at * size + size * size))
                at += size
            assert at == tokens
            assert output.metrics.ttft_s is not None
            hop_s = chunks[0] * 8192 * 2 / 25e9 + 5e-6
            # Chunks take longer from one to the next, so the last stage is the last to wait for each.
            return len(chunks), output.metrics.ttft_s, sum(times) + (ranks - 1) * (max(times) + hop_s)

    return run(go())


def test_a_long_prefill_takes_what_the_model_says() -> None:
    chunks, ttft_s, ideal_s = prefill(4, 65_536, 2048)
    assert chunks == 32
    assert ttft_s == pytest.approx(ideal_s, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [8, 64])
def test_a_million_tokens(ranks: int) -> None:
    chunks, ttft_s, ideal_s = prefill(ranks, 1 << 20, 5376)
    assert chunks == 196
    assert ttft_s == pytest.approx(ideal_s, rel=0.03)
