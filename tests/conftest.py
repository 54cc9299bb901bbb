"""For all tests: nothing may block a loop, and a few fixtures that many folders need."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
import torch
import uvloop
from blockbuster import BlockBuster
from hypothesis import settings

Runner = Callable[[Coroutine[Any, Any, Any]], Any]

_SCANNED = ["pipelined", "pipelined.transports", "pipelined.models"]

_MAY_BLOCK = {
    # Small files of one's own, once a link, before anything flows.
    "transport/rendezvous.py": {"publish", "get", "__init__"},
    "transports/zmq.py": {"_url", "_stop"},
    # /proc is memory, not a disk.
    "rank/health.py": {"resident_bytes"},
    # Looking up plug-ins reads the metadata of installed packages, once a pipeline.
    "importlib/metadata/__init__.py": {"entry_points", "distributions", "read_text"},
    # An import on first use reads files.
    "<frozen importlib._bootstrap>": {"_find_and_load", "import_", "_gcd_import"},
}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "may_block: the test blocks a loop on purpose")
    # A shell in the background has its children ignore Ctrl-C, and theirs would.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # A suite that passed passes again: new examples are for whoever looks for them (HYPOTHESIS_PROFILE=explore).
    settings.register_profile("same", derandomize=True, deadline=None)
    settings.register_profile("explore", deadline=None)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


@pytest.fixture(autouse=True)
def blocking_is_an_error(request: pytest.FixtureRequest) -> Iterator[None]:
    """A call that blocks a running loop raises where it is made, if our own code makes it."""
    if request.node.get_closest_marker("may_block"):
        yield
        return
    guard = BlockBuster(_SCANNED, excluded_modules=["pipelined.testing"])
    for function in guard.functions.values():
        for filename, names in _MAY_BLOCK.items():
            function.can_block_in(filename, names)
    guard.activate()
    try:
        yield
    finally:
        guard.deactivate()


@pytest.fixture(scope="session", autouse=True)
def _one_torch_thread() -> None:
    """The machine that tests run on is shared; nothing here is about speed."""
    torch.set_num_threads(1)


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Runner:
    """Run a coroutine on either kind of real loop."""
    factory = asyncio.new_event_loop if request.param == "asyncio" else uvloop.new_event_loop

    def go(coro: Coroutine[Any, Any, Any]) -> Any:
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(coro)

    return go


@pytest.fixture(params=["cpu", "stream", "emulated"])
def device_kind(request: pytest.FixtureRequest) -> str:
    """Each kind of device that needs no accelerator."""
    kind: str = request.param
    return kind
