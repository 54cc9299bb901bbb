"""Pipelines whose ranks are processes: the same results, and what happens when one of them is in trouble."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch
from pipeline_stages import Add, Exits, FailsInSetup, NotPicklable, Pass, RaisesOn, SlowSetup

from pipelined.errors import ConfigError, DeadlineError, EngineClosedError, PipelinedError, RankLostError, StageError
from pipelined.pipeline import Pipeline, ProcessWorld

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).parent


def children() -> list[psutil.Process]:
    """Without multiprocessing's resource tracker, which lives as long as the parent."""
    found = []
    for child in psutil.Process().children(recursive=True):
        try:
            if "resource_tracker" not in " ".join(child.cmdline()) and child.status() != psutil.STATUS_ZOMBIE:
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return found


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No process, no folder."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield
        assert not children()
        assert os.listdir(folder) == []


def x_of(n: int) -> dict[str, Any]:
    return {"n": n, "t": torch.full((50_000,), n)}


@pytest.mark.parametrize("transport", ["shm://", pytest.param("zmq://", marks=pytest.mark.slow)])
async def test_the_same_over_every_transport(transport: str) -> None:
    async with Pipeline(
        [Add(), RaisesOn(4, 7), Add()], workers="process", transport=transport, setup_timeout_s=60
    ) as pipe:
        outputs = [y async for y in pipe.stream((x_of(n) for n in range(30)), return_exceptions=True)]
        for n, y in enumerate(outputs):
            if n + 1 in (4, 7):
                assert isinstance(y, StageError)
                assert (y.rank, y.stage, y.step) == (1, "picky", n)
                assert "pipeline_stages.py" in y.remote_traceback
            else:
                assert y["n"] == n + 2
                assert y["t"].unique().tolist() == [n + 2]
        many = {f"t{i}": torch.full((i,), float(i)) for i in range(63)} | {"n": 1}
        y = await pipe.submit(many)
        assert all(torch.equal(y[f"t{i}"], many[f"t{i}"] + 2) for i in range(63))
        assert not any(count for held in (await pipe.integrity()).values() for count in held.values())
        digests = {rank["digest"] for rank in (await pipe.stats()).values()}
        assert len(digests) == 1


@pytest.mark.parametrize(
    ("rank", "transport"),
    [(1, "shm://")]
    + [
        pytest.param(rank, transport, marks=pytest.mark.slow)
        for rank in range(3)
        for transport in ("shm://", "zmq://", "tcp://")
    ],
)
async def test_a_killed_rank_is_named_within_a_second(rank: int, transport: str) -> None:
    stages = [Add(0, f"stage {n}", 0.02) for n in range(3)]
    world = ProcessWorld()
    async with Pipeline(stages, world=world, transport=transport) as pipe:
        assert (await pipe.submit(x_of(1)))["n"] == 1
        jobs = [asyncio.create_task(pipe.submit(x_of(n))) for n in range(40)]
        await asyncio.sleep(0.1)
        os.kill(world.pids[rank], signal.SIGKILL)
        started_s = time.monotonic()
        ends = await asyncio.gather(*jobs, return_exceptions=True)
        assert time.monotonic() - started_s < 1
        errors = [end for end in ends if not isinstance(end, dict)]
        assert len(errors) > 20
        for error in errors:
            assert isinstance(error, RankLostError)
            assert (error.rank, error.stage) == (rank, f"stage {rank}")
            assert "SIGKILL" in str(error)
        with pytest.raises(RankLostError):
            await pipe.submit(x_of(1))
        with pytest.raises(RankLostError):
            async for _ in pipe.stream([x_of(1)]):
                pass


@pytest.mark.slow
async def test_an_idle_rank_that_is_killed_is_noticed() -> None:
    world = ProcessWorld()
    async with Pipeline([Add(), Add()], world=world) as pipe:
        os.kill(world.pids[1], signal.SIGKILL)
        await asyncio.sleep(0.8)
        with pytest.raises(RankLostError, match="SIGKILL"):
            await pipe.submit(x_of(1))


@pytest.mark.slow
async def test_a_rank_that_exits_by_itself() -> None:
    async with Pipeline([Pass(), Exits(on=3)], workers="process") as pipe:
        ends = await asyncio.gather(*(pipe.submit(x_of(n)) for n in range(6)), return_exceptions=True)
        lost = [end for end in ends if not isinstance(end, dict)]
        assert len(lost) >= 3
        assert all(isinstance(end, RankLostError) and "exit code 3" in str(end) and end.rank == 1 for end in lost)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
async def test_a_stopped_rank_is_lost_after_the_bound(rank: int) -> None:
    world = ProcessWorld()
    async with Pipeline([Add(), Add()], world=world, heartbeat_bound_s=1.0) as pipe:
        await pipe.submit(x_of(0))
        os.kill(world.pids[rank], signal.SIGSTOP)
        started_s = time.monotonic()
        with pytest.raises(RankLostError, match="no heartbeat") as caught:
            await pipe.submit(x_of(1))
        assert 0.7 < time.monotonic() - started_s < 3
        assert caught.value.rank == rank


@pytest.mark.slow
@pytest.mark.parametrize("ours", [False, True])
async def test_a_rank_that_cannot_be_set_up(ours: bool) -> None:
    started_s = time.monotonic()
    with pytest.raises(PipelinedError) as caught:
        async with Pipeline([Add(), FailsInSetup(ours), Add()], workers="process"):
            pass
    assert time.monotonic() - started_s < 30
    assert "rank 1" in str(caught.value)
    assert "broken" in str(caught.value)
    assert "weights.bin" in str(caught.value)
    if ours:
        assert isinstance(caught.value, ConfigError)
    else:
        assert isinstance(caught.value, StageError)
        assert "FailsInSetup" in caught.value.remote_traceback or "in setup" in caught.value.remote_traceback


@pytest.mark.slow
async def test_a_slow_rank_is_named_at_the_deadline() -> None:
    with pytest.raises(DeadlineError, match=r"\[1\]"):
        async with Pipeline([Add(), SlowSetup(60), Add()], workers="process", setup_timeout_s=8):
            pass


@pytest.mark.parametrize("where", [0, 1])
async def test_a_stage_that_cannot_be_pickled(where: int) -> None:
    stages: list[Any] = [Add(), Add()]
    stages[where] = NotPicklable()
    with pytest.raises(ConfigError, match=f"rank {where} cannot be sent to a process"):
        async with Pipeline(stages, workers="process"):
            pass


@pytest.mark.slow
async def test_closing_with_large_outputs_in_flight() -> None:
    """Nobody reads them any more, and nobody waits for that."""
    async with Pipeline([Add(), Add()], workers="process", depth=6) as pipe:
        big = {"t": torch.zeros(8 << 20)}
        await pipe.submit(big)
        jobs = [asyncio.create_task(pipe.submit(big)) for _ in range(8)]
        await asyncio.sleep(0.05)
        started_s = time.monotonic()
    assert time.monotonic() - started_s < 8
    ends = await asyncio.gather(*jobs, return_exceptions=True)
    assert all(isinstance(end, dict | EngineClosedError) for end in ends), ends


@pytest.mark.slow
@pytest.mark.parametrize("after_s", [0.0, 0.02, 0.3, 1.0, 2.5, 4.0])
async def test_cancelled_while_starting(after_s: float) -> None:
    async def start() -> None:
        async with Pipeline([Add(), Add()], workers="process"):
            await asyncio.sleep(60)

    task = asyncio.create_task(start())
    await asyncio.sleep(after_s)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(10):
            await task


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm://", "zmq://"])
def test_no_descriptor_is_left(transport: str, run: Any) -> None:
    async def main() -> None:
        async with Pipeline([Add(), Add()], workers="process", transport=transport) as pipe:
            await pipe.submit(x_of(1))

    run(main())  # what is made once, and stays
    gc.collect()
    before = descriptors()
    for _ in range(2):
        run(main())
    gc.collect()
    assert descriptors() <= before


# ---- scripts ----


def script(body: str, **more: Any) -> subprocess.Popen[str]:
    path = Path(tempfile.gettempdir()) / "script.py"
    path.write_text(body)
    environment = os.environ | {"PYTHONPATH": str(HERE)}
    return subprocess.Popen(
        [sys.executable, str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, **more
    )


OPEN = """
import asyncio, sys
from pipelined.pipeline import Pipeline, ProcessWorld
from pipeline_stages import Add

async def main():
    world = ProcessWorld()
    async with Pipeline([Add(), Add(), Add()], world=world) as pipe:
        await pipe.submit({"n": 1})
        print(*world.pids, flush=True)
        async for y in pipe.stream({"n": n} for n in range(10**9)):
            pass
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_children_go_with_their_parent(how: signal.Signals) -> None:
    parent = script(OPEN + '\nif __name__ == "__main__":\n    asyncio.run(main())\n')
    try:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 3
        parent.send_signal(how)
        parent.wait(15)
        deadline_s = time.monotonic() + 3
        while any(psutil.pid_exists(pid) for pid in pids) and time.monotonic() < deadline_s:
            time.sleep(0.02)
        assert not [pid for pid in pids if psutil.pid_exists(pid)]
    finally:
        parent.kill()
        parent.communicate()
        for entry in os.listdir(tempfile.gettempdir()):
            if entry.startswith("script"):
                os.unlink(os.path.join(tempfile.gettempdir(), entry))
            elif how is not signal.SIGINT:  # nobody was left to tidy up
                import shutil

                shutil.rmtree(os.path.join(tempfile.gettempdir(), entry))


@pytest.mark.slow
def test_a_script_without_its_main_guard_is_told() -> None:
    parent = script(OPEN + "\nasyncio.run(main())\n")
    _, err = parent.communicate(timeout=60)
    os.unlink(os.path.join(tempfile.gettempdir(), "script.py"))
    assert parent.returncode == 1
    last = err.strip().splitlines()[-1]
    assert 'if __name__ == "__main__":' in last, err
    assert "rank" in last
