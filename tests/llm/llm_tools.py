"""What the tests of the engine share."""

from __future__ import annotations

import asyncio
from typing import Any

from pipelined.llm import AsyncLLM
from pipelined.messages import SamplingParams
from pipelined.models.toy import reference_tokens

TOY = "toy://?layers=6&vocab=997&hidden=4&context=2048&kv=65536"


async def at_rest(llm: AsyncLLM, timeout_s: float = 10.0) -> None:
    """Wait until no rank holds anything, then see that all ranks have applied the same steps."""
    try:
        async with asyncio.timeout(timeout_s):
            while any(count for held in (await llm.integrity()).values() for count in held.values()):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            while len({rank["steps_applied"] for rank in (await llm.stats()).values()}) > 1:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"still held: {await llm.integrity()}") from None
    assert len({rank["digest"] for rank in (await llm.stats()).values()}) == 1


def greedy(max_tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **more)


def right(model: str, prompt: list[int], tokens: list[int], max_tokens: int, **more: Any) -> None:
    """The tokens are those that the model would say, all of them."""
    assert tokens == reference_tokens(model, prompt, max_tokens, **more)
