"""`serve`'s processes: any of them may be killed, and clients go on or wait."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from pipelined.errors import ConfigError, EngineClosedError, RankLostError
from pipelined.llm import AsyncLLM, EngineConfig
from pipelined.messages import ErrorInfo
from pipelined.models.toy import reference_tokens
from pipelined.serving import ServerSettings
from pipelined.serving.exit_codes import EXIT_DEAD, EXIT_GIVEN_UP
from pipelined.serving.remote_world import RemoteWorld
from pipelined.serving.run import listen
from pipelined.serving.supervisor import Supervisor
from pipelined.serving.world_wire import BeginEpoch, Done, RankEnded, RankSaid, StopRanks, Wire, from_front

TOY = "toy://?layers=6&vocab=997&hidden=4&context=2048&kv=65536"


# ---- the connection ----


@asynccontextmanager
async def joined() -> AsyncIterator[tuple[RemoteWorld, Wire]]:
    """A world, and its supervisor's end of the connection."""
    ours, theirs = socket.socketpair()
    front, main = await Wire.over(ours), await Wire.over(theirs)
    world = RemoteWorld(front, 3)
    async with asyncio.TaskGroup() as group:
        listening = group.create_task(world.listen())
        yield world, main
        listening.cancel()
        front.close()
        main.close()


def descriptions(epoch: int) -> Sequence[Any]:
    return AsyncLLM(TOY, pp_size=2, recover=True)._descriptions(epoch, None)


async def test_a_world_of_another_process(tmp_path: Path) -> None:
    async with joined() as (world, main):
        ended, said = [], []
        world.on_end(lambda *what: ended.append(what))
        world.on_progress(lambda *what: said.append(what))
        starting = asyncio.create_task(world.start(descriptions(5), [None, None], None, lost={1}))
        asked: Any = await main.receive(from_front)
        assert isinstance(asked, BeginEpoch)
        assert (asked.descriptions, asked.lost) == (tuple(descriptions(5)), (1,))
        # What an earlier epoch's ranks said last is no loss of this one.
        main.send(RankEnded(4, 0, ErrorInfo("RankLostError", "long ago")))
        main.send(RankSaid(1, "loads"))
        main.send(Done(asked.number, str(tmp_path)))
        await starting
        assert world.next_epoch == 6
        world.rendezvous.publish("a", "b")
        assert (tmp_path / "a").read_text() == "b"
        main.send(RankEnded(5, 1, ErrorInfo("RankLostError", "just now", rank=1)))
        stopping = asyncio.create_task(world.stop(1.0))
        asked = await main.receive(from_front)
        assert isinstance(asked, StopRanks)
        main.send(Done(asked.number))
        await stopping
        assert said == [(1, "loads")]
        ((rank, error),) = ended
        assert rank == 1
        assert isinstance(error, RankLostError)
        assert "just now" in str(error)


async def test_errors_of_the_supervisor_and_its_end() -> None:
    async with joined() as (world, main):
        starting = asyncio.create_task(world.start(descriptions(5), [None, None], None))
        asked: Any = await main.receive(from_front)
        main.send(Done(asked.number, error=ErrorInfo("ConfigError", "no room")))
        with pytest.raises(ConfigError, match="no room"):
            await starting
        starting = asyncio.create_task(world.start(descriptions(6), [None, None], None))
        await main.receive(from_front)
        main.close()
        with pytest.raises(EngineClosedError, match="supervises"):
            await starting


# ---- all of it ----


class Running:
    """A supervisor with its processes, and a client."""

    def __init__(self, **settings: Any) -> None:
        config: dict[str, Any] = {"pp_size": 2, "threads_per_rank": 1, "page_size": 4, "chunked_prefill_size": 32}
        server = ServerSettings(port=0, drain_timeout_s=5.0)
        self.bound = bound = listen(server)
        application = settings.pop("application", "pipelined.serving.run:serve")
        config = config | {"model": TOY, "recover": True, "heartbeat_bound_s": 5.0} | settings
        self.supervisor = Supervisor(EngineConfig(**config), server, bound, application=application)
        self.url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        self.task = asyncio.create_task(self.supervisor.run())
        self.client = httpx2.AsyncClient(base_url=self.url, timeout=120)

    async def ready(self) -> None:
        async with asyncio.timeout(120):
            while True:
                assert not self.task.done(), self.task.result()
                try:
                    if (await self.client.get("/health")).status_code == 200:
                        return
                except httpx2.TransportError:
                    pass
                await asyncio.sleep(0.1)

    async def stream(self, prompt: list[int], count: int) -> list[int]:
        """Tokens as they come."""
        body = {"model": TOY, "prompt": prompt, "max_tokens": count, "temperature": 0, "logprobs": 0, "stream": True}
        found: list[int] = []
        async with self.client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    assert "error" not in event, event
                    for choice in event["choices"]:
                        found += [int(one.partition(":")[2]) for one in (choice["logprobs"] or {}).get("tokens", ())]
        return found

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(60):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.02)


@pytest.fixture
async def running() -> AsyncIterator[Any]:
    made: list[Running] = []

    def run(**settings: Any) -> Running:
        made.append(Running(**settings))
        return made[-1]

    yield run
    for one in made:
        await one.client.aclose()
        one.task.cancel()
        await asyncio.wait([one.task])
        one.bound.close()
    children = [child for child in psutil.Process().children(recursive=True) if child.status() != "zombie"]
    assert not [child for child in children if "pipelined" in " ".join(child.cmdline())]


@pytest.mark.slow
@pytest.mark.may_block
async def test_any_process_may_be_killed(running: Any) -> None:
    served = running()
    await served.ready()
    supervisor = served.supervisor
    pids, front = supervisor.world.pids, supervisor.front_pid
    prompts = [[n] * 40 for n in range(1, 5)]
    streams = [asyncio.create_task(served.stream(prompt, 1500)) for prompt in prompts]
    await asyncio.sleep(1.0)
    os.kill(pids[0], signal.SIGKILL)
    await served.until(lambda: supervisor.world.pids and supervisor.world.pids[0] != pids[0])
    for prompt, stream in zip(prompts, streams, strict=True):
        assert await stream == reference_tokens(TOY, prompt, 1500)
    pids = [supervisor.world.pids[0], pids[1]]
    assert (supervisor.world.pids, supervisor.front_pid) == (pids, front)

    streams = [asyncio.create_task(served.stream(prompt, 1900)) for prompt in prompts]
    await asyncio.sleep(0.5)
    assert front is not None
    os.kill(front, signal.SIGKILL)
    ends = await asyncio.gather(*streams, return_exceptions=True)
    assert any(isinstance(end, httpx2.TransportError) for end in ends)
    assert await served.stream([8] * 30, 20) == reference_tokens(TOY, [8] * 30, 20)  # waits for the new one
    assert supervisor.world.pids == pids
    assert supervisor.front_pid != front
    stats = (await served.client.get("/server_info")).json()
    assert stats

    supervisor._hear(signal.SIGTERM)
    assert await served.task == 0


@pytest.mark.slow
@pytest.mark.may_block
async def test_both_are_given_up_in_the_end(running: Any) -> None:
    """An engine that is lost again and again, an HTTP process that is, and what never can be: each by its exit code."""
    served = running(max_restarts=1)
    await served.ready()
    os.kill(served.supervisor.world.pids[1], signal.SIGKILL)
    await asyncio.sleep(0.5)
    await served.ready()
    os.kill(served.supervisor.world.pids[1], signal.SIGKILL)
    assert await asyncio.wait_for(served.task, 60) == EXIT_DEAD

    assert await asyncio.wait_for(running(max_restarts=1, application="os:abort").task, 90) == EXIT_GIVEN_UP
    assert await asyncio.wait_for(running(model="toy://?layers=0").task, 60) == 2


@pytest.mark.slow
@pytest.mark.may_block
async def test_without_its_main_process_nothing_lives(running: Any, tmp_path: Path) -> None:
    script = tmp_path / "main.py"
    script.write_text(
        "import asyncio\n"
        "from pipelined.llm import EngineConfig\n"
        "from pipelined.serving import ServerSettings\n"
        "from pipelined.serving.run import listen\n"
        "from pipelined.serving.supervisor import Supervisor\n"
        "settings = ServerSettings(port=0)\n"
        f"config = EngineConfig(model={TOY!r}, pp_size=2, recover=True, threads_per_rank=1)\n"
        "supervisor = Supervisor(config, settings, listen(settings))\n"
        "asyncio.run(supervisor.run())\n"
    )
    main = subprocess.Popen([sys.executable, str(script)], stderr=subprocess.PIPE, text=True)  # noqa: ASYNC220
    assert main.stderr is not None
    try:
        await asyncio.to_thread(lambda: next(line for line in main.stderr if "listening on" in line))  # type: ignore[union-attr]
        family = psutil.Process(main.pid).children(recursive=True)
        assert len(family) == 3
        main.kill()
        _, alive = await asyncio.to_thread(psutil.wait_procs, family, 20)
        assert not alive
    finally:
        main.kill()
        await asyncio.to_thread(main.communicate)
