"""`lockstep+`: what waits for a receive, what does not, and that the runtime needs no buffer."""

from __future__ import annotations

import asyncio

import pytest
import torch
from wrapping import now, pair, step

from pipelined.clock.virtual import run
from pipelined.errors import DeadlockError, PeerLost, WouldBlock
from pipelined.llm import AsyncLLM
from pipelined.messages import SamplingParams
from pipelined.models.toy import reference_tokens
from pipelined.pipeline import Pipeline
from pipelined.transport import Lane

URI = "lockstep+memory://"


def test_a_transfer_ends_when_the_peer_receives() -> None:
    async def go() -> None:
        async with pair(URI) as (a, b):
            link, far = a.tensors(b.me, Lane.HIDDEN), b.tensors(a.me, Lane.HIDDEN)
            sends = [link.post_send(torch.tensor([number]), step(number)) for number in range(3)]
            await asyncio.sleep(1)
            assert not any(send.done() for send in sends)
            for number in range(3):
                assert (await far.post_recv((number, 0))).tensor.item() == number
                await asyncio.sleep(1)
                assert [send.done() for send in sends] == [other <= number for other in range(3)]

    run(go())


def test_a_send_waits_for_the_receive() -> None:
    async def go() -> None:
        async with pair(URI) as (a, b):

            async def receive_later() -> bytes:
                await asyncio.sleep(5)
                return await b.messages(a.me, Lane.RESULTS).receive()

            receiving = asyncio.ensure_future(receive_later())
            await a.messages(b.me, Lane.RESULTS).send(b"x")
            assert now() == 5.0
            assert await receiving == b"x"

    run(go())


def test_two_that_send_first_stand_still() -> None:
    async def go() -> None:
        async with pair(URI) as (a, b):

            async def exchange(mine, theirs) -> None:
                await mine.send(b"x")
                await theirs.receive()

            left, right = a.messages(b.me, Lane.RESULTS), b.messages(a.me, Lane.RESULTS)
            await asyncio.gather(exchange(left, left), exchange(right, right))

    with pytest.raises(DeadlockError, match="send"):
        run(go())


def test_posting_needs_no_receiver() -> None:
    async def go() -> None:
        async with pair(URI, window=2) as (a, b):
            for frame in (b"1", b"2"):
                a.messages(b.me, Lane.SCHEDULE).send_nowait(frame)
            with pytest.raises(WouldBlock):
                a.messages(b.me, Lane.SCHEDULE).send_nowait(b"3")
            assert [await b.messages(a.me, Lane.SCHEDULE).receive() for _ in range(2)] == [b"1", b"2"]

    run(go())


def test_a_cancelled_send_is_not_sent_and_a_cancelled_receive_loses_nothing() -> None:
    async def go() -> None:
        async with pair(URI) as (a, b):
            link, far = a.messages(b.me, Lane.SCHEDULE), b.messages(a.me, Lane.SCHEDULE)
            for wait in (link.send(b"never"), far.receive()):
                task = asyncio.ensure_future(wait)
                await asyncio.sleep(0.1)
                task.cancel()
                await asyncio.wait([task])
            await link.send(b"first")  # the cancelled receive had asked for it
            await asyncio.sleep(1)
            assert await far.receive() == b"first"

    run(go())


def test_a_loss_ends_the_wait() -> None:
    async def go() -> None:
        async with pair(URI) as (a, b):
            sending = asyncio.ensure_future(a.messages(b.me, Lane.SCHEDULE).send(b"x"))
            transfer = a.tensors(b.me, Lane.HIDDEN).post_send(torch.ones(1), step(0))
            await asyncio.sleep(1)
            b.abort()
            with pytest.raises(PeerLost):
                await sending
            with pytest.raises(PeerLost):
                await transfer

    run(go())


async def test_a_pipeline_runs_over_it() -> None:
    async with Pipeline([lambda x: {"n": x["n"] + 1, "t": x["t"] * 2}] * 4, transport=URI) as pipe:
        xs = [{"n": n, "t": torch.ones(3) * n} for n in range(40)]
        outputs = [output async for output in pipe.stream(xs)]
    assert [output["n"] for output in outputs] == [n + 4 for n in range(40)]
    assert all(torch.equal(output["t"], torch.ones(3) * n * 16) for n, output in enumerate(outputs))


@pytest.mark.parametrize("ranks", [1, 3])
async def test_a_language_model_runs_over_it(ranks: int) -> None:
    prompts = [[(5 * i + j) % 900 for i in range(40 + j)] for j in range(6)]
    settings = {"page_size": 8, "chunked_prefill_size": 16, "transport": URI, "workers": "task", "pp_size": ranks}
    async with AsyncLLM("toy://", **settings) as llm:
        params = SamplingParams(max_tokens=7, seed=1, temperature=0)
        outputs = await asyncio.gather(*(llm.complete(prompt, params) for prompt in prompts))
    assert [output.outputs[0].token_ids for output in outputs] == [
        reference_tokens("toy://", prompt, 7) for prompt in prompts
    ]
