from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pipelined.llm.outputs import CompletionOutput, Logprob, RequestOutput
from pipelined.serving.generation import Deltas, usage, while_wanted
from pipelined.serving.problems import Problem


async def for_ever() -> Any:
    await asyncio.Event().wait()


async def test_what_is_wanted_is_done_to_its_end() -> None:
    beside: list[str] = []

    async def work() -> int:
        await asyncio.sleep(0)
        return 5

    async def other() -> None:
        try:
            await for_ever()
        finally:
            beside.append("ended")

    assert await while_wanted(for_ever, work(), None, other()) == 5
    assert beside == ["ended"]


async def test_who_goes_away_ends_it() -> None:
    ended = asyncio.Event()

    async def work() -> None:
        try:
            await for_ever()
        finally:
            ended.set()

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    assert await while_wanted(receive, work(), None) is None
    assert ended.is_set()


async def test_failures_come_out_as_they_are() -> None:
    async def work() -> None:
        raise KeyError("mine")

    async def late() -> None:
        raise TimeoutError("its own")

    with pytest.raises(KeyError, match="mine"):
        await while_wanted(for_ever, work(), 10)
    with pytest.raises(TimeoutError, match="its own"):
        await while_wanted(for_ever, late(), 10)
    with pytest.raises(Problem) as slow:
        await while_wanted(for_ever, for_ever(), 0.01)
    assert slow.value.status == 504


async def test_a_caller_that_is_cancelled_leaves_nothing() -> None:
    ended = asyncio.Event()

    async def work() -> None:
        try:
            await for_ever()
        finally:
            ended.set()

    async with asyncio.TaskGroup() as group:
        task = group.create_task(while_wanted(for_ever, work(), None))
        await asyncio.sleep(0.01)
        task.cancel()
    assert ended.is_set()


def test_deltas_add_up() -> None:
    choices = [CompletionOutput(0, logprobs=[]), CompletionOutput(1)]
    output = RequestOutput("r", None, [1, 2], choices)
    deltas = Deltas(2)
    assert deltas.of(output) == []
    choices[0].text, choices[0].token_ids = "ab", [5, 6]
    choices[0].logprobs = [{5: Logprob(-1.0)}, {6: Logprob(-2.0)}]
    (delta,) = deltas.of(output)
    assert (delta.text, delta.token_ids, delta.finished) == ("ab", [5, 6], False)
    assert delta.logprobs is not None
    assert [list(entry) for entry in delta.logprobs] == [[5], [6]]
    assert deltas.of(output) == []
    choices[0].text, choices[1].token_ids, choices[1].finish_reason = "abc", [7], "stop"
    first, second = deltas.of(output)
    assert (first.text, first.token_ids, second.token_ids, second.finished) == ("c", [], [7], True)
    choices[0].finish_reason = "length"
    (last,) = deltas.of(output)
    assert (last.text, last.finished) == ("", True)
    assert deltas.of(output) == []
    assert usage([output])["completion_tokens"] == 3
