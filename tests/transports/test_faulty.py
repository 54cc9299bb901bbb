"""`faulty+`: each fault, where it strikes, and what the peers see of it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from wrapping import PEERS, now, pair, step

from pipelined.clock.virtual import run
from pipelined.errors import ClosedError, ConfigError, LaneMismatch, PeerLost, PipelinedError
from pipelined.messages import TensorHeader
from pipelined.pipeline import Pipeline
from pipelined.transport import Lane, MemoryRendezvous, resolve
from pipelined.transports.faulty import FaultEvent, fault_events


def fates(uri: str, frames: int = 200, pause_s: float = 0.0) -> list[tuple[Any, ...]]:
    """What was done to `frames` messages and as many tensors, without the times."""

    async def go() -> list[tuple[Any, ...]]:
        board = MemoryRendezvous()
        async with pair(uri, board, window=2 * frames) as (a, b):
            for number in range(frames):
                a.messages(b.me, Lane.SCHEDULE).send_nowait(b"%d" % number)
                if a.tensors(b.me, Lane.HIDDEN).credits():
                    a.tensors(b.me, Lane.HIDDEN).post_send(torch.ones(8), step(number))
                await asyncio.sleep(pause_s)
            await asyncio.sleep(10)
            return [event[1:] for event in fault_events(board)]

    return run(go())


ALL = "faulty+memory://?seed=5&drop=0.1&duplicate=0.1&corrupt=0.1&delay=0.1&detect=0"


def test_the_same_seed_does_the_same_whatever_the_timing() -> None:
    first = fates(ALL)
    assert {event[0] for event in first} == {"drop", "duplicate", "corrupt", "delay"}

    def by_lane(events: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        return sorted(events, key=lambda event: (event[3], event[4], event[5]))

    assert by_lane(fates(ALL, pause_s=0.5)) == by_lane(first)
    assert fates(ALL.replace("seed=5", "seed=6")) != first


def test_one_probability_does_not_change_what_else_happens() -> None:
    def drops(uri: str) -> set[int]:
        return {event[5] for event in fates(uri) if event[0] == "drop" and event[4] == "messages"}

    assert drops("faulty+memory://?drop=0.1&detect=0") == drops("faulty+memory://?drop=0.1&detect=0&delay=0.5") != set()


def test_a_lost_tensor_is_a_mismatch_at_the_next() -> None:
    async def go() -> None:
        board = MemoryRendezvous()
        async with pair("faulty+memory://?drop=1&ranks=0&lanes=HIDDEN", board) as (a, b):
            a.tensors(b.me, Lane.HIDDEN).post_send(torch.ones(1), step(0))
            a.tensors(b.me, Lane.KV).post_send(torch.ones(1), step(0))
            await b.tensors(a.me, Lane.KV).post_recv((0, 0))
            assert a.tensors(b.me, Lane.HIDDEN).credits() == 64  # what is lost holds no place
            (event,) = fault_events(board)
            assert event == FaultEvent(now(), "drop", PEERS[0], PEERS[1], "HIDDEN", "tensors", 0)
        async with pair("faulty+memory://?drop=0.5&seed=3") as (a, b):
            for number in range(20):
                a.tensors(b.me, Lane.HIDDEN).post_send(torch.ones(1), step(number))

            async def receive_all() -> None:
                for number in range(20):
                    await b.tensors(a.me, Lane.HIDDEN).post_recv((number, 0))

            with pytest.raises(LaneMismatch):
                await receive_all()

    run(go())


def received(uri: str, frames: int = 50) -> tuple[list[bytes], PipelinedError | None]:
    """Messages that came of `frames`, and the error that ended it, if one did."""

    async def go() -> tuple[list[bytes], PipelinedError | None]:
        got: list[bytes] = []
        async with pair(uri) as (a, b):
            for number in range(frames):
                a.messages(b.me, Lane.SCHEDULE).send_nowait(b"%d" % number)
            try:
                async with asyncio.timeout(1):
                    while True:
                        got.append(await b.messages(a.me, Lane.SCHEDULE).receive())
            except PeerLost as error:
                return got, error
            except TimeoutError:
                return got, None

    return run(go())


SENT = [b"%d" % number for number in range(50)]


@pytest.mark.parametrize("fault", ["drop", "corrupt"])
def test_a_gap_or_damage_in_messages_loses_the_peer(fault: str) -> None:
    got, error = received(f"faulty+memory://?{fault}=0.1")
    assert got != SENT[: len(got)] or len(got) < 50
    assert error is not None
    assert "SCHEDULE" in str(error)


def test_duplicates_are_dropped_or_not() -> None:
    assert received("faulty+memory://?duplicate=0.3") == (SENT, None)
    got, error = received("faulty+memory://?duplicate=0.3&detect=0")
    assert error is None
    assert len(got) > 50
    assert list(dict.fromkeys(got)) == SENT


def test_without_detection_it_comes_as_it_is() -> None:
    got, error = received("faulty+memory://?drop=0.2&detect=0")
    assert error is None
    assert len(got) < 50
    got, error = received("faulty+memory://?corrupt=0.2&detect=0")
    assert error is None
    assert len(got) == 50
    assert got != SENT


@pytest.mark.parametrize("size", [1, 1000, 300_000])
def test_one_bit_of_a_tensor(size: int) -> None:
    async def go(detect: int) -> None:
        async with pair(f"faulty+memory://?corrupt=1&ranks=0&detect={detect}") as (a, b):
            tensor = torch.zeros(size, dtype=torch.uint8)
            await a.tensors(b.me, Lane.HIDDEN).post_send(tensor, TensorHeader(0, 0, meta=b"meta"))
            assert not tensor.any()
            transfer = b.tensors(a.me, Lane.HIDDEN).post_recv((0, 0))
            if detect:
                with pytest.raises(PeerLost, match="damaged"):
                    await transfer
                return
            got = await transfer
            assert got.header.meta == b"meta"
            assert sum(bin(byte).count("1") for byte in got.tensor.tolist()) == 1

    run(go(0))
    run(go(1))


def test_a_delay_keeps_the_order() -> None:
    async def go() -> None:
        async with pair("faulty+memory://?delay=0.3&delay_ms=50&seed=1") as (a, b):
            for number in range(40):
                a.tensors(b.me, Lane.HIDDEN).post_send(torch.tensor([number]), step(number))
            for number in range(40):
                assert (await b.tensors(a.me, Lane.HIDDEN).post_recv((number, 0))).tensor.item() == number
            assert 0.01 < now() <= 0.05

    run(go())


def test_a_stall_stops_one_lane_for_a_while_or_for_ever() -> None:
    async def go(uri: str) -> float | None:
        async with pair(uri) as (a, b):
            await a.messages(b.me, Lane.RESULTS).send(b"x")
            await b.messages(a.me, Lane.RESULTS).receive()
            for _ in range(64):
                a.messages(b.me, Lane.SCHEDULE).send_nowait(b"x")
            try:
                async with asyncio.timeout(100):
                    await b.messages(a.me, Lane.SCHEDULE).receive()
            except TimeoutError:
                at_s = now()
                await a.aclose()  # can't flush, and gives up
                assert now() - at_s < 10
                return None
            return now()

    assert run(go("faulty+memory://?stall=1&stall_ms=2000&lanes=SCHEDULE")) == pytest.approx(2.0)
    assert run(go("faulty+memory://?stall=1&lanes=SCHEDULE")) is None


def test_a_kill_is_a_loss_for_the_peer() -> None:
    async def go() -> None:
        board = MemoryRendezvous()
        async with pair("faulty+memory://?kill_after=3&ranks=0", board) as (a, b):
            for number in range(5):
                a.messages(b.me, Lane.SCHEDULE).send_nowait(b"%d" % number)
            got = []

            async def receive_all() -> None:
                while True:
                    got.append(await b.messages(a.me, Lane.SCHEDULE).receive())

            with pytest.raises(PeerLost):
                await receive_all()
            assert got in ([], [b"0", b"1", b"2"])  # what came before may go with the loss
            with pytest.raises(ClosedError):
                await a.messages(b.me, Lane.RESULTS).receive()
            assert [event.kind for event in fault_events(board)] == ["kill"]

    run(go())


def test_stamps_are_not_the_owners() -> None:
    async def go() -> None:
        async with pair("faulty+memory://", max_message_bytes=100) as (a, b):
            await a.messages(b.me, Lane.SCHEDULE).send(b"x" * 100)
            assert await b.messages(a.me, Lane.SCHEDULE).receive() == b"x" * 100
            with pytest.raises(PipelinedError, match="limit is 100"):
                a.messages(b.me, Lane.SCHEDULE).send_nowait(b"x" * 101)

    run(go())


@pytest.mark.parametrize(
    ("uri", "says"),
    [
        ("faulty+memory://?drop=1.5", "at most 1"),
        ("faulty+memory://?lanes=HIDEN", "did you mean 'HIDDEN'"),
        ("faulty+memory://?ranks=one", "'driver'"),
        ("faulty+memory://?dorp=1", "did you mean 'drop'"),
        ("faulty+memory://?kill_after=-1", "whole number"),
    ],
)
def test_options_are_checked(uri: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        resolve(uri)


async def test_a_rank_that_is_killed_is_named() -> None:
    async def stream() -> None:
        async with Pipeline([lambda x: x] * 3, transport="faulty+memory://?kill_after=20&ranks=1") as pipe:
            async for _ in pipe.stream({"n": n} for n in range(100)):
                pass

    with pytest.raises(PipelinedError, match="lost pipeline/1"):
        await stream()
