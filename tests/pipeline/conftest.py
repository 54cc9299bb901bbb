from __future__ import annotations

import asyncio
import gc
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from pipelined.pipeline import Pipeline

Open = Callable[..., AbstractAsyncContextManager[Pipeline]]


# Child processes import the stages of the tests by the name of their module.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    """Devices end their threads."""
    yield
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("pipelined-")]


@pytest.fixture
def opened() -> Open:
    """A pipeline that must have given everything back at the end, whatever the test did with it."""

    @asynccontextmanager
    async def open_(stages: list[Any], *, healthy: bool = True, **settings: Any) -> AsyncIterator[Pipeline]:
        before = asyncio.all_tasks()
        async with Pipeline(stages, **settings) as pipe:
            yield pipe
            if healthy:
                await idle(pipe)
        await asyncio.sleep(0)
        left = asyncio.all_tasks() - before
        assert not left, left
        gc.collect()

    return open_


async def idle(pipe: Pipeline, timeout_s: float = 5.0) -> None:
    """Wait until no rank holds anything; what was cancelled needs a moment to get through."""
    try:
        async with asyncio.timeout(timeout_s):
            while any(count for held in (await pipe.integrity()).values() for count in held.values()):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"still held: {await pipe.integrity()}") from None
