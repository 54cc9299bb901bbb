"""What is gloo's own: threads and process groups that come and go beside the user's."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pipeline_script import run_pipeline

from pipelined.errors import ConfigError, PeerLost
from pipelined.messages import TensorHeader
from pipelined.testing import CHECKS, run_checks
from pipelined.transport import Lane, resolve

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch without gloo")

_SLOW = {"a_frozen_peer_holds_up_nobody", "tensors_in_order_under_random_sizes", "peer_abort", "closes_of_both"}


@pytest.fixture
def uri() -> str:
    return "gloo://"


def _helpers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("gloo test/")]


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(check.name, marks=pytest.mark.slow if "processes" in check.needs or check.name in _SLOW else ())
        for check in CHECKS
    ],
)
def test_conforms(check: str) -> None:
    (result,) = run_checks("gloo://", quick=True, only=[check])
    if result.outcome == "skip":
        pytest.skip(result.reason)
    assert result.outcome == "pass", result.reason


def test_it_carries_tensors_only() -> None:
    capabilities = resolve("gloo://").capabilities
    assert (capabilities.tensors, capabilities.messages, capabilities.processes) == (True, False, True)
    with pytest.raises(ConfigError, match="no option"):
        resolve("gloo://?threads=3")


async def test_threads_are_bounded_and_gone_after_closing(open_world: Any) -> None:
    async with open_world(3) as ends:
        receives, sends = [], []
        for sender in ends:
            for receiver in ends:
                if sender is not receiver:
                    for lane in Lane:
                        for step in range(6):
                            tensor = torch.full((50_000,), float(step))
                            sends.append(sender.tensors(receiver.me, lane).post_send(tensor, TensorHeader(0, step, 0)))
                            receives.append(receiver.tensors(sender.me, lane).post_recv((step, 0)))
        for number, transfer in enumerate(receives):
            received = await transfer
            assert received.tensor.eq(float(number % 6)).all()
            received.release()
        for transfer in sends:
            await transfer
        most = 3 * 2 * (2 * len(Lane))  # ends, peers of each, directions of each lane
        assert 3 <= len(_helpers()) <= most
        async with asyncio.TaskGroup() as group:
            for end in ends:
                group.create_task(end.aclose())
        for _ in range(100):  # the last instructions of the last thread
            if not _helpers():
                break
            await asyncio.sleep(0.01)
        assert not _helpers()


async def test_beside_a_default_group_of_the_users(open_world: Any, tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        async with open_world() as (a, b), open_world(epoch=3) as (c, d):
            for near, far in ((a, b), (c, d)):
                near.tensors(far.me, Lane.HIDDEN).post_send(torch.arange(9), TensorHeader(0, 0, 0))
                received = await far.tensors(near.me, Lane.HIDDEN).post_recv((0, 0))
                assert received.tensor.tolist() == list(range(9))
                received.release()
            assert dist.get_world_size() == 1
        dist.barrier()
    finally:
        dist.destroy_process_group()


async def test_what_gloo_loses_is_a_lost_peer_on_every_lane(open_world: Any) -> None:
    """Its connection breaks while that beside it stands."""
    async with open_world() as (a, b):
        await asyncio.to_thread(b.channels[a.me]._pair.break_up)
        send = a.tensors(b.me, Lane.HIDDEN).post_send(torch.ones(10_000), TensorHeader(0, 0, 0))
        async with asyncio.timeout(5):
            with pytest.raises(PeerLost):
                await b.tensors(a.me, Lane.KV).post_recv((0, 0))
            with pytest.raises(PeerLost):
                while True:
                    await send
                    await asyncio.sleep(0.01)
                    send = a.tensors(b.me, Lane.HIDDEN).post_send(torch.ones(10_000), TensorHeader(0, 1, 0))
            with pytest.raises(PeerLost):
                await a.messages(b.me, Lane.HEALTH).receive()
            assert "gloo" in str([*a.losses, *b.losses])  # whoever noticed first


_LEFT_OPEN = """
import asyncio, sys, torch
from pipelined.messages import Peer, TensorHeader
from pipelined.transport import EndpointSpec, FileRendezvous, Lane, resolve

async def main():
    peers = (Peer("t", 0), Peer("t", 1))
    board = FileRendezvous(sys.argv[1])
    specs = [EndpointSpec(me=p, world=peers, rendezvous=board, connect=(peers[1 - p.rank],)) for p in peers]
    ends = await asyncio.gather(*(resolve("gloo://").open(spec) for spec in specs))
    ends[0].tensors(peers[1], Lane.HIDDEN).post_send(torch.ones(1 << 20), TensorHeader(0, 0, 0))

asyncio.run(main())
print("over")
"""


def test_a_process_that_closes_nothing_still_ends_well(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _LEFT_OPEN, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stdout.strip()) == (0, "over"), ended.stderr


@pytest.mark.slow
def test_a_pipeline_of_processes_runs_over_it(tmp_path: Path) -> None:
    run_pipeline("gloo://", tmp_path)
