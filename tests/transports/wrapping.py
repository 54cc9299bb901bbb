"""Two peers over a wrapped transport, for the tests of wrappers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from pipelined.clock import LoopClock
from pipelined.messages import Peer, TensorHeader
from pipelined.transport import EndpointSpec, MemoryRendezvous, resolve

PEERS = (Peer("pair", 0), Peer("pair", 1))


@asynccontextmanager
async def pair(uri: str, board: MemoryRendezvous | None = None, **changes: Any) -> AsyncIterator[tuple[Any, Any]]:
    """Both ends, on the loop's time; closed at the end as far as they still are open."""
    board = board or MemoryRendezvous()
    fields: dict[str, Any] = {"world": PEERS, "rendezvous": board, "clock": LoopClock(), "window": 64, **changes}
    specs = [EndpointSpec(me=me, connect=(peer,), **fields) for me, peer in (PEERS, PEERS[::-1])]
    ends = await asyncio.gather(*(resolve(uri).open(spec) for spec in specs))
    try:
        yield ends[0], ends[1]
    finally:
        for end in ends:
            end.abort()


def step(number: int) -> TensorHeader:
    return TensorHeader(0, number)


def now() -> float:
    return asyncio.get_running_loop().time()
