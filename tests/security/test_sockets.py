"""Random and mutated bytes at every listening socket: nothing crashes, nothing stalls, outputs stay right."""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING

import psutil
import pytest
import torch
from attacker import Attacker, listening, templates
from fuzzed_stages import add_one

from pipelined.pipeline import Pipeline

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

ATTACK_S = 6.0
STALL_S = 15.0
"""Longer than any output takes on a busy machine, shorter than any deadline of the runtime."""
GROWTH_BYTES = 300 << 20

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180), pytest.mark.may_block]


@pytest.mark.parametrize("transport", ["shm://", "tcp://", "zmq://", "zmq://127.0.0.1"])
async def test_a_pipeline_goes_on_under_attack(transport: str) -> None:
    async with Pipeline([add_one] * 3, workers="process", transport=transport, step_timeout_s=60.0) as pipe:
        children = psutil.Process().children(recursive=True)
        addresses = await asyncio.to_thread(listening, [os.getpid(), *(child.pid for child in children)])
        own = 1 if transport.startswith("zmq") else 2  # health has sockets of its own beside other transports
        assert len(addresses) >= 4 * own, addresses  # three ranks and the driver
        before = [child.memory_info().rss for child in children]
        with Attacker(addresses, templates("pipeline", 3), seed=1) as attacker:
            count = await _flow(pipe, time.monotonic() + ATTACK_S)
        assert count > 20
        assert set(attacker.thrown) == addresses
        assert min(attacker.thrown.values()) > 10
        assert all(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)
        grown = [child.memory_info().rss - held for child, held in zip(children, before, strict=True)]
        assert max(grown) < GROWTH_BYTES, grown
        assert await _flow(pipe, time.monotonic() + 0.5) > 0  # and afterwards


async def _flow(pipe: Pipeline, until_s: float) -> int:
    """Inputs through the pipeline until then, every output looked at; how many."""

    async def inputs() -> AsyncIterator[dict[str, object]]:
        number = 0
        while time.monotonic() < until_s:
            yield {"t": torch.full((1000 + number % 5000,), number), "n": number}
            number += 1

    count, outputs = 0, pipe.stream(inputs())
    while True:
        async with asyncio.timeout(STALL_S):
            output = await anext(outputs, None)
        if output is None:
            return count
        assert output["n"] == count
        assert torch.equal(output["t"], torch.full((1000 + count % 5000,), count + 3))
        count += 1
