from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

sys.path.insert(0, str(Path(__file__).parent))  # for `serving_tools`

from serving_tools import Served, save_tiny_model

from pipelined.llm import AsyncLLM
from pipelined.serving import ServerSettings

Serve = Callable[..., AbstractAsyncContextManager[Served]]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random two-layer model with a byte-level tokenizer and a chat template that knows tools."""
    pytest.importorskip("transformers")
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


def _loaded(model: str, **settings: Any) -> AsyncLLM:
    llm = AsyncLLM(model, **settings)
    assert llm.tokenizer is not None
    return llm


@pytest.fixture
def serve() -> Serve:
    """An application over an engine of tasks, and a client of it that needs no port. All is given back at the end."""

    @asynccontextmanager
    async def open_(
        model: str = "toy://?layers=4&vocab=997&hidden=4&context=2048&kv=65536",
        server: dict[str, Any] | None = None,
        **engine: Any,
    ) -> AsyncIterator[Served]:
        defaults: dict[str, Any] = {"workers": "task", "pp_size": 2, "page_size": 4, "chunked_prefill_size": 32}
        llm = await asyncio.to_thread(_loaded, model, **(defaults | {"threads_per_rank": 1} | engine))
        async with llm, Served(llm, ServerSettings(**(server or {}))) as served:
            yield served
            await served.at_rest()

    return open_
