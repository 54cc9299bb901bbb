"""`delay+`: how much later things come, and that nothing else changes."""

from __future__ import annotations

import pytest
import torch
from wrapping import now, pair, step

from pipelined.clock.virtual import run
from pipelined.errors import ConfigError
from pipelined.transport import Lane, resolve


def arrivals(uri: str, frames: int = 50, lane: Lane = Lane.SCHEDULE) -> list[float]:
    async def go() -> list[float]:
        async with pair(uri) as (a, b):
            times = []
            for number in range(frames):
                a.messages(b.me, lane).send_nowait(b"%d" % number)
            for number in range(frames):
                assert await b.messages(a.me, lane).receive() == b"%d" % number
                times.append(now())
            return times

    return run(go())


def test_latency_delays_all_and_holds_up_none() -> None:
    assert arrivals("delay+memory://?latency_us=300") == pytest.approx([300e-6] * 50)


def test_bandwidth_spaces_them() -> None:
    async def go() -> None:
        async with pair("delay+memory://?bandwidth_gbytes_per_s=0.001&latency_us=500") as (a, b):
            for number in range(3):
                a.tensors(b.me, Lane.HIDDEN).post_send(torch.full((1000,), number, dtype=torch.uint8), step(number))
            for number in range(3):
                received = await b.tensors(a.me, Lane.HIDDEN).post_recv((number, 0))
                assert received.tensor.unique().tolist() == [number]
                assert now() == pytest.approx((number + 1) * 1e-3 + 500e-6)

    run(go())


def test_jitter_is_seeded_and_keeps_the_order() -> None:
    uri = "delay+memory://?latency_us=100&jitter_us=400"
    times = arrivals(uri)
    assert times == sorted(times)
    assert 100e-6 <= times[0] < times[-1] <= 500e-6
    assert arrivals(uri) == times
    assert arrivals(uri + "&delay_seed=1") != times
    assert arrivals(uri, lane=Lane.HEALTH) != times


def test_a_send_is_done_before_it_arrives_and_may_be_overwritten() -> None:
    async def go() -> None:
        async with pair("delay+memory://?latency_us=1000") as (a, b):
            tensor = torch.ones(10)
            await a.tensors(b.me, Lane.KV).post_send(tensor, step(0))
            assert now() == 0.0
            tensor.zero_()
            received = await b.tensors(a.me, Lane.KV).post_recv((0, 0))
            assert received.tensor.tolist() == [1.0] * 10

    run(go())


def test_closing_waits_for_what_is_held() -> None:
    async def go() -> None:
        async with pair("delay+memory://?latency_us=1000") as (a, b):
            await a.messages(b.me, Lane.SCHEDULE).send(b"last")
            await a.aclose()
            assert now() == pytest.approx(1e-3)
            assert await b.messages(a.me, Lane.SCHEDULE).receive() == b"last"

    run(go())


def test_wrappers_add_up_and_share_the_options() -> None:
    transport = resolve("delay+delay+sim://?latency_us=100&window=3")
    assert transport.scheme == "delay+delay+sim"

    async def go() -> None:
        async with pair("delay+sim://?jitter_us=0&latency_us=100&links=0-1:1000:1") as (a, b):
            await a.messages(b.me, Lane.SCHEDULE).send(b"")
            await b.messages(a.me, Lane.SCHEDULE).receive()
            assert now() == pytest.approx(1100e-6)

    run(go())


@pytest.mark.parametrize(
    ("uri", "says"),
    [
        ("delay+memory://?latency_us=x", "expected a number, at least 0"),
        ("delay+memory://?latncy_us=1", "did you mean 'latency_us'"),
        ("delay+memory://?windo=1", "did you mean 'window'"),
        ("delay://", "put it before one"),
        ("memory+delay+shm://", "'memory' wraps nothing"),
        ("dely+memory://", "did you mean 'delay'"),
    ],
)
def test_what_cannot_be_is_named(uri: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says.replace("+", r"\+")):
        resolve(uri)
