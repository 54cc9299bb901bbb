"""A real model's requests of every kind go on after a loss exactly as if there had been none."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pipelined.llm import AsyncLLM
from pipelined.messages import SamplingParams
from pipelined.pipeline import TaskWorld

SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["a", "b"]}'

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "logprobs": 2},
    "seeded": {"seed": 7, "temperature": 0.9, "top_p": 0.95, "top_k": 50, "min_p": 0.01, "n": 3, "logprobs": 1},
    "penalties": {"seed": 3, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4},
    "stops": {"seed": 11, "stop": ("e",), "min_tokens": 30, "ignore_eos": True},
    "schema": {"seed": 5, "json_schema": SCHEMA},
    "scored": {"temperature": 0, "prompt_logprobs": 1, "logprobs": 0},
}


def seen(output: Any) -> Any:
    """All that a user has of it, but times."""
    return (
        [
            (one.text, one.token_ids, one.finish_reason, one.stop_reason, _rounded(one.logprobs))
            for one in output.outputs
        ],
        _rounded(output.prompt_logprobs),
        output.prompt_token_ids,
    )


def _rounded(entries: Any) -> Any:
    """Sums over other chunks of rows differ in their last bits."""
    return entries and [one and {token: round(entry.logprob, 3) for token, entry in one.items()} for one in entries]


def loaded(model: str, world: TaskWorld) -> AsyncLLM:
    llm = AsyncLLM(
        model, world=world, pp_size=2, recover=True, page_size=4, chunked_prefill_size=16, threads_per_rank=1
    )
    assert llm.tokenizer is not None
    return llm


@pytest.mark.parametrize("kind", KINDS)
async def test_everything_goes_on(kind: str, tiny: str) -> None:
    if kind == "schema":
        pytest.importorskip("llguidance")
    params = SamplingParams(**({"max_tokens": 60} | KINDS[kind]))
    world = TaskWorld()
    llm = await asyncio.to_thread(loaded, tiny, world)
    prompt = "The gate of the harbour is open, and"
    async with llm:
        undisturbed = seen(await llm.complete(prompt, params))
        for rank, after in ((0, 1), (1, 9), (0, 20)):
            epoch, shown = llm.state.epoch, ""
            async for output in llm.generate(prompt, params):
                assert output.outputs[0].text.startswith(shown)
                shown = output.outputs[0].text
                if sum(len(one.token_ids) for one in output.outputs) >= after and llm.state.epoch == epoch:
                    world._tasks[rank].cancel()
                    while llm.state.epoch == epoch:  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
            assert seen(output) == undisturbed
        assert llm.state.restarts >= 1
