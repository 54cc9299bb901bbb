"""What is UCX's own: driven without polling, and a peer that gives up takes nobody with it."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from pipeline_script import run_pipeline

from pipelined.errors import ConfigError, MissingDependencyError, PeerLost
from pipelined.messages import TensorHeader
from pipelined.testing import CHECKS, run_checks
from pipelined.transport import Lane, resolve

_ABSENT = importlib.util.find_spec("ucxx") is None
needs_ucxx = pytest.mark.skipif(_ABSENT, reason="ucxx is not installed: pip install 'pipelined[ucx]'")

_SLOW = {"tensors_in_order_under_random_sizes", "nothing_leaks"}


@pytest.fixture
def uri() -> str:
    return "ucx://"


@pytest.mark.skipif(not _ABSENT, reason="ucxx is installed")
def test_without_ucxx_it_says_how_to_get_it() -> None:
    with pytest.raises(MissingDependencyError, match=r"pip install 'pipelined\[ucx\]'"):
        resolve("ucx://")


@needs_ucxx
@pytest.mark.parametrize(
    "check",
    [
        pytest.param(check.name, marks=pytest.mark.slow if "processes" in check.needs or check.name in _SLOW else ())
        for check in CHECKS
    ],
)
def test_conforms(check: str) -> None:
    (result,) = run_checks("ucx://", quick=True, only=[check])
    if result.outcome == "skip":
        pytest.skip(result.reason)
    assert result.outcome == "pass", result.reason


@needs_ucxx
def test_unknown_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="no option"):
        resolve("ucx://?tls=tcp")


@needs_ucxx
async def test_waiting_costs_no_cpu(open_world: Any) -> None:
    async with open_world() as (a, b):
        a.tensors(b.me, Lane.HIDDEN).post_send(torch.ones(1 << 20), TensorHeader(0, 0, 0))
        (await b.tensors(a.me, Lane.HIDDEN).post_recv((0, 0))).release()
        waiting = b.tensors(a.me, Lane.HIDDEN).post_recv((1, 0))
        start_s = time.process_time()
        await asyncio.sleep(1.0)
        assert time.process_time() - start_s < 0.05
        assert not waiting.done()
        a.tensors(b.me, Lane.HIDDEN).post_send(torch.ones(3), TensorHeader(0, 1, 0))
        (await waiting).release()


@needs_ucxx
async def test_thousands_of_tensors_of_any_size_on_all_lanes(open_world: Any) -> None:
    async with open_world() as (a, b):
        rng = random.Random(5)
        sizes = [rng.choice([0, 1, 200, 8_000, 70_000, 1_000_000]) for _ in range(400)]

        async def send(lane: Lane) -> None:
            link = a.tensors(b.me, lane)
            for step, size in enumerate(sizes):
                while not link.credits():
                    await link.ready()
                link.post_send(torch.full((size,), step % 251, dtype=torch.uint8), TensorHeader(0, step, 0))

        async def receive(lane: Lane) -> None:
            for step, size in enumerate(sizes):
                received = await b.tensors(a.me, lane).post_recv((step, 0))
                assert received.tensor.shape == (size,)
                assert received.tensor.eq(step % 251).all()
                received.release()

        async with asyncio.TaskGroup() as group:
            for lane in Lane:
                group.create_task(send(lane))
                group.create_task(receive(lane))


@needs_ucxx
async def test_a_peer_that_gives_up_in_mid_transfer_is_lost_and_its_memory_not_read(make_world: Any) -> None:
    """With CMA, UCX would end this process when the memory that it reads is unmapped."""
    for number in range(4):
        a, b = await make_world().open_all(epoch=number)
        receives = [a.tensors(b.me, lane).post_recv((0, 0)) for lane in Lane]
        for lane in Lane:
            b.tensors(a.me, lane).post_send(torch.ones(8 << 20), TensorHeader(0, 0, 0))
        await asyncio.sleep(0.002 * number)
        b.abort()
        gc.collect()  # a tensor that large is unmapped when it goes
        for transfer in receives:
            async with asyncio.timeout(5):
                try:
                    (await transfer).release()
                except PeerLost:
                    continue
        a.abort()


@needs_ucxx
async def test_nothing_is_left_open(make_world: Any) -> None:
    counts = []
    for number in range(4):
        a, b = await make_world().open_all(epoch=number)
        a.tensors(b.me, Lane.HIDDEN).post_send(torch.ones(1 << 20), TensorHeader(0, 0, 0))
        (await b.tensors(a.me, Lane.HIDDEN).post_recv((0, 0))).release()
        await (a.aclose() if number % 2 else b.aclose())
        a.abort()
        b.abort()
        gc.collect()
        counts.append(len(os.listdir("/proc/self/fd")))
    assert counts[-1] <= counts[1]


@needs_ucxx
@pytest.mark.slow
def test_a_pipeline_of_processes_runs_over_it(tmp_path: Path) -> None:
    run_pipeline("ucx://", tmp_path)


@needs_ucxx
@pytest.mark.parametrize("check", ["ring_where_all_send_first", "peer_close", "peer_abort", "nothing_leaks"])
def test_over_tcp_as_between_hosts(check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ends, with other manners: they would wait for their peers when they go."""
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    (result,) = run_checks("ucx://", quick=True, only=[check])
    assert result.outcome == "pass", result.reason
