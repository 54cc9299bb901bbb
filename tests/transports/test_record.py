"""`record+` and `replay://`: what is written, and a rank that runs alone against its record."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from wrapping import PEERS, pair, step

from pipelined.clock.virtual import run
from pipelined.errors import ConfigError, ProtocolError
from pipelined.messages import Peer, TensorHeader
from pipelined.pipeline import Pipeline
from pipelined.pipeline.payload_stage import as_stage
from pipelined.rank import LinkPlan, RankConfig
from pipelined.rank.description import RankDescription
from pipelined.rank.host import run_rank
from pipelined.transport import EndpointSpec, Lane, MemoryRendezvous, resolve
from pipelined.transports.record import read_record, record_files

# Closing waits for the thread that writes.
pytestmark = pytest.mark.may_block


def test_all_that_passes_is_written_with_its_time(tmp_path: Path) -> None:
    async def go() -> None:
        async with pair(f"record+sim://?path={tmp_path}/run&latency_us=1000") as (a, b):
            await a.messages(b.me, Lane.SCHEDULE).send(b"hello")
            await b.messages(a.me, Lane.SCHEDULE).receive()
            tensor = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
            a.tensors(b.me, Lane.HIDDEN).post_send(tensor, TensorHeader(0, 4, 1, name="x"))
            await b.tensors(a.me, Lane.HIDDEN).post_recv((4, 1))

    run(go())
    (file,) = record_files(tmp_path / "run", PEERS[0], 0)
    message, tensor = read_record(file)
    assert (message.at_s, message.leaving, message.peer, message.lane) == (0.0, True, PEERS[1], Lane.SCHEDULE)
    assert message.body == b"hello"
    assert tensor.header is not None
    assert (tensor.header.seq, tensor.header.name) == ((4, 1), "x")
    assert torch.equal(tensor.tensor(), torch.arange(6, dtype=torch.bfloat16).reshape(2, 3))
    (file,) = record_files(tmp_path / "run", PEERS[1], 0)
    came = list(read_record(file))
    assert [frame.leaving for frame in came] == [False, False]
    assert came[0].at_s == pytest.approx(1e-3, rel=1e-3)
    assert came[1].body == tensor.body


def test_a_record_that_was_cut_off_can_be_read(tmp_path: Path) -> None:
    async def go() -> None:
        async with pair(f"record+memory://?path={tmp_path}") as (a, b):
            for number in range(10):
                a.tensors(b.me, Lane.KV).post_send(torch.ones(100), step(number))

    run(go())
    (file,) = record_files(tmp_path, PEERS[0], 0)
    whole = file.read_bytes()
    for size in (len(whole), len(whole) - 1, 600, 5, 0):
        file.write_bytes(whole[:size])
        frames = list(read_record(file))
        assert [frame.header.step for frame in frames if frame.header] == list(range(len(frames)))
    file.write_bytes(b"\1\0\0\0" + bytes(8) + b"\xc1" * 50)
    with pytest.raises(ProtocolError, match="not what record"):
        list(read_record(file))


class Doubles:
    """Notes what it saw."""

    name = "doubles"

    def __init__(self, factor: int = 2) -> None:
        self.factor = factor
        self.seen: list[list[float]] = []

    def forward(self, x: dict[str, Any]) -> dict[str, Any]:
        self.seen.append(x["x"].tolist())
        return {"x": x["x"] * self.factor}


async def recorded(path: Path) -> list[Doubles]:
    stages = [Doubles() for _ in range(3)]
    async with Pipeline(stages, depth=2, transport=f"record+memory://?path={path}") as pipe:
        async for _ in pipe.stream({"x": torch.ones(2) * n} for n in range(20)):
            pass
    return stages


@pytest.mark.parametrize("rank", [0, 1, 2])
async def test_one_rank_runs_again_alone(rank: int, tmp_path: Path) -> None:
    stages = await recorded(tmp_path)
    again = await replayed(tmp_path, rank, Doubles())
    assert again.seen == stages[rank].seen
    assert len(again.seen) == 20


async def replayed(path: Path, rank: int, stage: Doubles) -> Doubles:
    from pipelined.pipeline.fifo import FifoPlanner

    config = RankConfig("pipeline", rank, 3, window=5, fed=True, drained=True)
    plan = LinkPlan.choose(f"replay://?path={path}", processes=False)
    async with asyncio.timeout(20):
        await run_rank(
            RankDescription(config=config, links=plan),
            stage=as_stage(stage),
            planner=FifoPlanner() if rank == 0 else None,
            rendezvous=MemoryRendezvous(),
        )
    return stage


async def test_what_leaves_otherwise_is_noted(tmp_path: Path) -> None:
    async def go() -> None:
        async with pair(f"record+memory://?path={tmp_path}") as (a, b):
            for number in range(3):
                a.tensors(b.me, Lane.HIDDEN).post_send(torch.ones(2), step(number))
            for number in range(3):
                (await b.tensors(a.me, Lane.HIDDEN).post_recv((number, 0))).release()

    await go()
    spec = EndpointSpec(me=PEERS[0], world=PEERS, rendezvous=MemoryRendezvous(), connect=(PEERS[1],))
    endpoint: Any = await resolve(f"replay://?path={tmp_path}").open(spec)
    for number in range(3):
        await endpoint.tensors(PEERS[1], Lane.HIDDEN).post_send(torch.ones(2) * (number != 1), step(number))
    assert len(endpoint.differences) == 1
    assert "frame 1" in endpoint.differences[0]
    await endpoint.aclose()


async def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="say where"):
        resolve("record+memory://")
    me = Peer("pair", 0)
    spec = EndpointSpec(me=me, world=(me,), rendezvous=MemoryRendezvous(), connect=())
    with pytest.raises(ConfigError, match="no record of pair/0 in epoch 0"):
        await resolve(f"replay://?path={tmp_path}").open(spec)
