"""Which transport carries what."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from pipelined.clock import MonotonicClock
from pipelined.errors import ConfigError
from pipelined.messages import DRIVER, TensorHeader
from pipelined.rank.config import RankConfig
from pipelined.rank.links import LinkPlan, Links, open_links
from pipelined.transport import FileRendezvous, MemoryRendezvous, Rendezvous

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("uri", ["zmq://", "zmq", "zmq://127.0.0.1", "zmq://127.0.0.1?heartbeat_ms=200"])
def test_zmq_carries_health_too(uri: str) -> None:
    assert LinkPlan.choose(uri, processes=True) == LinkPlan(uri, uri, uri)


def test_health_is_apart_from_what_moves_tensors() -> None:
    assert LinkPlan.choose("shm://", processes=True) == LinkPlan("shm://", "shm://", "zmq://")
    assert LinkPlan.choose("shm://", processes=True, messages="zmq://127.0.0.1").health == "zmq://127.0.0.1"
    assert LinkPlan.choose("memory://", processes=False) == LinkPlan("memory://", "memory://", "memory://")


@pytest.mark.parametrize(
    ("plan", "files"),
    [
        (LinkPlan("tcp://?window=8", "tcp://?window=16", "tcp://?window=32"), True),
        (LinkPlan("tcp://?window=8", "tcp://?window=16", "tcp://?window=32"), False),
        (LinkPlan("shm://?arena_mib=32", "shm://?window=16", "zmq://"), True),
        (LinkPlan("zmq://?window=8", "zmq://?window=16", "zmq://"), True),
        (LinkPlan("memory://", "memory://?window=16", "delay+memory://?latency_us=1"), False),
    ],
)
async def test_uris_of_one_scheme_do_not_meet(plan: LinkPlan, files: bool, tmp_path: Path) -> None:
    board: Rendezvous = FileRendezvous(tmp_path) if files else MemoryRendezvous()
    config = RankConfig(pipeline="p", rank=0, size=2, window=2)
    async with AsyncExitStack() as stack:

        async def enter(rank: int) -> Links:
            mine = replace(config, rank=rank)
            return await stack.enter_async_context(
                open_links(mine, plan, epoch=0, rendezvous=board, clock=MonotonicClock())
            )

        driver, first, last = await asyncio.gather(*(enter(rank) for rank in (DRIVER, 0, 1)))
        assert driver.requests is not None
        assert first.requests is not None
        await driver.requests.send(b"request")
        assert await first.requests.receive() == b"request"
        await first.steps[1].send(b"step")
        assert await last.steps[0].receive() == b"step"
        await driver.health[1].send(b"alive")
        assert await last.health[DRIVER].receive() == b"alive"
        assert first.downstream is not None
        assert last.upstream is not None
        first.downstream.post_send(torch.ones(3), TensorHeader(0, 0))
        received = await last.upstream.post_recv((0, 0))
        assert received.tensor.tolist() == [1, 1, 1]
        received.release()


def test_what_does_not_reach_processes_is_refused() -> None:
    with pytest.raises(ConfigError, match="other processes"):
        LinkPlan.choose("memory://", processes=True)
