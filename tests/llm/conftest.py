from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from pipelined.llm import AsyncLLM

sys.path.insert(0, str(Path(__file__).parent))  # for `llm_tools`, also in child processes

Engine = Callable[..., AbstractAsyncContextManager[AsyncLLM]]


@pytest.fixture
def engine() -> Engine:
    """An engine over tasks that must have given everything back at the end, whatever the test did with it."""

    from llm_tools import TOY, at_rest

    @asynccontextmanager
    async def open_(model: str = TOY, *, healthy: bool = True, **settings: Any) -> AsyncIterator[AsyncLLM]:
        before = asyncio.all_tasks()
        defaults: dict[str, Any] = {
            "workers": "task",
            "page_size": 4,
            "chunked_prefill_size": 32,
            "threads_per_rank": 1,
        }
        async with AsyncLLM(model, **(defaults | settings)) as llm:
            yield llm
            if healthy:
                await at_rest(llm)
        await asyncio.sleep(0)
        left = {task for task in asyncio.all_tasks() - before if "AsyncLLM.complete" not in repr(task.get_coro())}
        assert not left, left
        gc.collect()

    return open_
