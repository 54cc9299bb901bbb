from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

Runner = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Runner:
    """Run a coroutine on either kind of real loop."""
    factory = asyncio.new_event_loop if request.param == "asyncio" else uvloop.new_event_loop

    def go(coro: Coroutine[Any, Any, Any]) -> Any:
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(coro)

    return go


@pytest.fixture
def fired() -> Callable[[Any], Coroutine[Any, Any, None]]:
    """Wait for an event."""

    async def wait(event: Any) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        event.add_done_callback(lambda: future.done() or future.set_result(None))
        await asyncio.wait_for(future, 10)

    return wait
