"""Ranks are lost and the engine goes on: every token as in an undisturbed run, none lost, doubled or changed."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from typing import Any

import pytest
from llm_tools import TOY, at_rest, greedy, right

from pipelined.errors import ConfigError, EngineClosedError, InvalidRequestError, RankLostError
from pipelined.llm import AsyncLLM
from pipelined.llm.quarantine import Quarantine
from pipelined.llm.requests import LiveRequest
from pipelined.messages import RequestOutput, pack_tokens, unpack_tokens
from pipelined.models.toy import ToyStage, reference_tokens
from pipelined.pipeline import ProcessWorld, TaskWorld
from pipelined.stage.stream import StreamDevice

pytestmark = pytest.mark.filterwarnings("error")


def slow_world() -> TaskWorld:
    """Steps take a moment, so that there is something to interrupt."""
    return TaskWorld(device=lambda _, clock: StreamDevice(clock, 0.002))


async def state_of(llm: AsyncLLM, name: str, timeout_s: float = 30.0) -> None:
    async with asyncio.timeout(timeout_s):
        while llm.state.name != name:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def streamed(llm: AsyncLLM, prompt: list[int], n: int, **more: Any) -> list[int]:
    """The tokens of a stream, as they grow: what came once must stay."""
    seen: list[int] = []
    async for output in llm.generate(prompt, greedy(n, **more)):
        tokens = output.outputs[0].token_ids
        assert tokens[: len(seen)] == seen
        seen = list(tokens)
    return seen


@pytest.mark.parametrize("rank", [0, 1, 2])
async def test_requests_go_on_after_a_rank_is_lost(rank: int, engine: Any) -> None:
    world = slow_world()
    prompts = [[n] * 40 for n in range(12)]
    async with engine(pp_size=3, world=world, recover=True) as llm:
        stages = dict(world._berths)
        tasks = [asyncio.create_task(streamed(llm, prompt, 60)) for prompt in prompts]
        await asyncio.sleep(0.15)
        world._tasks[rank].cancel()
        await state_of(llm, "recovering")
        assert f"rank {rank}" in llm.state.reason
        late = asyncio.create_task(streamed(llm, [500] * 30, 20))  # comes in between, and waits
        for prompt, task in zip(prompts, tasks, strict=True):
            right(TOY, prompt, await task, 60)
        right(TOY, [500] * 30, await late, 20)
        state = llm.state
        assert (state.name, state.epoch, state.restarts, state.peers_lost) == ("ready", 1, 1, 1)
        assert f"rank {rank}" in state.history[0]
        # Those that live keep what they are: only one rank began anew.
        assert [one for one in range(3) if world._berths[one] is not stages[one]] == [rank]


async def test_again_and_again(engine: Any) -> None:
    """With tokens between losses there is no end to them."""
    world, dice = slow_world(), random.Random(1)
    prompts = [[n] * 30 for n in range(8)]
    async with engine(pp_size=3, world=world, recover=True, max_restarts=2) as llm:
        tasks = [asyncio.create_task(streamed(llm, prompt, 900)) for prompt in prompts]
        for _ in range(8):
            before = {key: len(live.output.outputs[0].token_ids) for key, live in llm._live.items()}
            while any(len(llm._live[key].output.outputs[0].token_ids) <= length for key, length in before.items()):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            world._tasks[dice.randrange(3)].cancel()
            await state_of(llm, "recovering")
            await state_of(llm, "ready")
        for prompt, task in zip(prompts, tasks, strict=True):
            right(TOY, prompt, await task, 900)
        assert llm.state.restarts == 8


async def test_everything_of_a_request_goes_on(engine: Any) -> None:
    """Continuations, minimum, stop tokens, log-probabilities, counts, the time to the first token."""
    world = slow_world()
    prompt = list(range(50))
    plain = reference_tokens(TOY, prompt, 40, stop_token_ids=(), min_tokens=0)
    stop = plain[30]
    async with engine(pp_size=2, world=world, recover=True) as llm:
        params = greedy(100, n=3, logprobs=1, prompt_logprobs=0, min_tokens=20, stop_token_ids=(stop,))
        stream, output, ttft_s = llm.generate(prompt, params), None, None
        async for output in stream:
            ttft_s = ttft_s or output.metrics.ttft_s
            if len(output.outputs[0].token_ids) == 10 and not llm.state.restarts:
                world._tasks[1].cancel()
                await state_of(llm, "recovering")
                assert output.prompt_logprobs is not None
                chunks = list(output.metrics.chunks)
        assert output is not None
        for choice in output.outputs:
            right(TOY, prompt, choice.token_ids, 100, min_tokens=20, stop_token_ids=(stop,))
            assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
            assert len(choice.logprobs) == len(choice.token_ids)
            assert all(token in entry for token, entry in zip(choice.token_ids, choice.logprobs, strict=True))
        assert len(output.prompt_logprobs) == 50
        assert output.metrics.chunks == chunks
        assert output.metrics.ttft_s == ttft_s
        assert llm.state.restarts == 1


async def test_who_goes_away_meanwhile_is_not_resumed(engine: Any) -> None:
    world = slow_world()
    async with engine(pp_size=2, world=world, recover=True) as llm:
        stream = llm.generate([1] * 30, greedy(500), request_id="closed")
        named = asyncio.create_task(llm.complete([2] * 30, greedy(500)))
        await anext(stream)
        world._tasks[0].cancel()
        await state_of(llm, "recovering")
        await stream.aclose()
        (name,) = [live.id for live in llm._live.values()]
        await llm.abort(name)
        assert (await named).outputs[0].finish_reason == "abort"
        with pytest.raises(InvalidRequestError):  # refused as ever
            await llm.complete([], greedy(1))
        await state_of(llm, "ready")
        await at_rest(llm)


async def test_it_gives_up_and_says_why(engine: Any) -> None:
    """Losses without a token between them: the history is told, and whoever waits hears it."""
    world = slow_world()
    seen = []
    async with engine(pp_size=2, world=world, recover=True, max_restarts=2, healthy=False) as llm:
        llm.on_state = lambda state: seen.append(state.name)
        for _ in range(2):
            world._tasks[1].cancel()
            await state_of(llm, "recovering")
            await state_of(llm, "ready")
        world._tasks[1].cancel()
        await state_of(llm, "dead")
        assert [name for name, after in zip(seen, [*seen[1:], ""], strict=True) if name != after] == [
            *["recovering", "ready"] * 2,
            "dead",
        ]
        with pytest.raises(RankLostError, match=r"lost 3 times within 60 s .*layers 3-5.*layers 3-5") as caught:
            await llm.complete([1], greedy(1))
        assert caught.value.rank == 1
        assert len(llm.state.history) == 3


async def test_a_request_that_ends_the_pipeline_each_time_is_given_up(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = slow_world()
    prepare = ToyStage.prepare

    def ending(self: Any, step: Any) -> Any:
        if any(13 in unpack_tokens(item.tokens) for item in step.items if hasattr(item, "prompt_tokens")):
            asyncio.get_running_loop().call_later(0.003, world._tasks[1].cancel)
        return prepare(self, step)

    monkeypatch.setattr(ToyStage, "prepare", ending)
    prompts = [[n] * 90 for n in range(20, 26)]
    async with engine(pp_size=2, world=world, recover=True) as llm:
        bad = asyncio.create_task(llm.complete([1] * 90 + [13], greedy(5)))
        tasks = [asyncio.create_task(streamed(llm, prompt, 30)) for prompt in prompts]
        with pytest.raises(RankLostError, match="times while it worked on this request"):
            await bad
        for prompt, task in zip(prompts, tasks, strict=True):
            right(TOY, prompt, await task, 30)
        await state_of(llm, "ready")
        right(TOY, [8], (await llm.complete([8], greedy(4))).outputs[0].token_ids, 4)


async def test_closed_while_it_recovers(engine: Any) -> None:
    world = slow_world()
    async with engine(pp_size=2, world=world, recover=True, healthy=False) as llm:
        tasks = [asyncio.create_task(llm.complete([n] * 30, greedy(500))) for n in range(5)]
        await asyncio.sleep(0.05)
        world._tasks[0].cancel()
        await state_of(llm, "recovering")
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(end, EngineClosedError) for end in ends), ends
    assert not world._tasks


async def test_draining(engine: Any) -> None:
    async with engine(pp_size=2, world=slow_world(), recover=True) as llm:
        running = asyncio.create_task(llm.complete([1] * 30, greedy(30)))
        await asyncio.sleep(0.02)
        draining = asyncio.create_task(llm.drain())
        await asyncio.sleep(0)
        assert llm.state.name == "draining"
        with pytest.raises(EngineClosedError, match="about to stop"):
            await llm.complete([2], greedy(1))
        right(TOY, [1] * 30, (await running).outputs[0].token_ids, 30)
        await draining


async def test_a_device_that_hangs_is_begun_anew(engine: Any) -> None:
    """The rank lives and answers, and its step never ends."""
    hung: list[float] = []

    def device(rank: int, clock: Any) -> StreamDevice:
        slow = rank == 1 and not hung
        if rank == 1:
            hung.append(0)
        return StreamDevice(clock, 0.002, time_of=lambda _: 1e6 if slow and len(llm._live) > 0 else 0.002)

    world = TaskWorld(device=device)
    async with engine(
        pp_size=2, world=world, recover=True, step_timeout_s=0.5, heartbeat_bound_s=1.0, healthy=False
    ) as llm:
        right(TOY, [8] * 30, await streamed(llm, [8] * 30, 12), 12)
        assert llm.state.restarts == 1
        assert "did not come within" in llm.state.history[0]


async def test_the_state_of_an_engine() -> None:
    llm = AsyncLLM(TOY, workers="task", pp_size=2)
    assert (llm.state.name, llm.state.epoch, llm.state.serves) == ("stopped", None, False)
    seen, said = [], []
    llm.on_state, llm.on_progress = lambda state: seen.append(state.name), lambda *what: said.append(what)
    async with llm:
        assert (llm.state.name, llm.state.epoch, llm.state.serves) == ("ready", 0, True)
        assert llm.state.reason == ""
    assert llm.state.name == "stopped"
    assert (seen[0], seen[-1]) == ("starting", "stopped")
    assert {rank for rank, what in said if "ready after" in what} == {0, 1}


def test_suspects_are_run_one_at_a_time() -> None:
    from pipelined.llm.text import NoTokenizer

    lives = [LiveRequest(str(n), None, [1], greedy(9), NoTokenizer(), 0.0, str(n)) for n in range(6)]
    quarantine = Quarantine(2, most_running=4)
    for live in lives:
        live.submitted = True
    assert quarantine.after_loss(lives) == lives
    asked = quarantine.after_loss(lives)
    assert asked == [lives[0], lives[4], lives[5]]  # the last two only waited
    for live in asked:
        live.submitted = True
    lives[0].hear(0, RequestOutput("0/0", pack_tokens([1])), 0.0)
    assert quarantine.released(lives[0]) is lives[1]
    assert quarantine.released(lives[2]) is None  # its owner gave it up
    for given_up in (False, True):
        lives[1].submitted = True
        asked = quarantine.after_loss([lives[1], *lives[3:]])
        assert (lives[1] in asked, lives[1].error is not None) == (not given_up, given_up)
    assert quarantine.probe is lives[3]


def test_what_cannot_be() -> None:
    with pytest.raises(ConfigError, match="max_restarts=0"):
        AsyncLLM(TOY, max_restarts=0)
    with pytest.raises(ConfigError, match="heartbeat_bound_s"):
        AsyncLLM(TOY, heartbeat_bound_s=0.0)


@pytest.mark.parametrize("cut", [1, 3, 7])
def test_the_record_of_a_request(cut: int) -> None:
    """What is asked for after a loss is the rest of what is not finished."""
    from pipelined.llm.text import NoTokenizer

    live = LiveRequest("x", None, [1, 2, 3], greedy(9, n=2), NoTokenizer(), 0.0, "k")
    assert [unpack_tokens(one.generated) for one in live.messages(())] == [[], []]
    for token in range(cut):
        live.hear(1, RequestOutput("k/1", pack_tokens([token])), 1.0)
    live.hear(0, RequestOutput("k/0", pack_tokens([5]), finish_reason="stop"), 1.0)
    (message,) = live.messages((7,))
    assert (message.id, message.choice, message.eos) == ("k/1", 1, (7,))
    assert unpack_tokens(message.tokens) == [1, 2, 3]
    assert unpack_tokens(message.generated) == list(range(cut))


# ---- processes ----


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "how", "transport"),
    [(0, signal.SIGKILL, "shm://"), (1, signal.SIGKILL, "zmq://"), (1, signal.SIGSTOP, "shm://")],
)
async def test_processes(rank: int, how: signal.Signals, transport: str) -> None:
    world = ProcessWorld()
    prompts = [[n] * 40 for n in range(6)]
    settings = {"page_size": 4, "chunked_prefill_size": 32, "threads_per_rank": 1, "heartbeat_bound_s": 2.0}
    async with AsyncLLM(TOY, pp_size=2, world=world, recover=True, transport=transport, **settings) as llm:
        loop = asyncio.get_running_loop()
        noticed = loop.create_future()
        llm.on_state = lambda state: None if noticed.done() else noticed.set_result(loop.time())
        pids = world.pids
        for again in range(2):
            tasks = [asyncio.create_task(streamed(llm, prompt, 1500)) for prompt in prompts]
            while not all(len(live.output.outputs[0].token_ids) > 20 for live in llm._live.values()) or not llm._live:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            if not again:
                struck_s = loop.time()
                os.kill(pids[rank], how)
            for prompt, task in zip(prompts, tasks, strict=True):
                right(TOY, prompt, await task, 1500)
        # One process is new, and nothing but that.
        assert [one for one in range(2) if world.pids[one] != pids[one]] == [rank]
        assert llm.state.restarts == 1
        took_s = await noticed - struck_s
        if how is signal.SIGKILL:
            assert "SIGKILL" in llm.state.history[0]
            assert took_s < 1 or os.getloadavg()[0] > 2
        else:
            assert "no heartbeat" in llm.state.history[0]
            assert 1 < took_s < 20
        await at_rest(llm)
