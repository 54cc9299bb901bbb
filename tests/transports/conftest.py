"""Two or more endpoints of any of our transports, in one loop."""

from __future__ import annotations

import asyncio
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pipelined.messages import Peer
from pipelined.transport import EndpointSpec, FileRendezvous, MemoryRendezvous
from pipelined.transport.registry import resolve

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

torch.set_num_threads(1)

# Tests share helpers by the name of their module.
sys.path.insert(0, str(Path(__file__).parent))


class World:
    """Opens peers that know each other."""

    def __init__(self, uri: str, size: int, directory: str) -> None:
        self.uri = uri
        self.peers = tuple(Peer("test", rank) for rank in range(size))
        self.rendezvous = MemoryRendezvous() if uri.startswith("memory") else FileRendezvous(directory)

    def spec(self, rank: int, **changes: Any) -> EndpointSpec:
        fields: dict[str, Any] = {
            "me": self.peers[rank],
            "world": self.peers,
            "rendezvous": self.rendezvous,
            "connect": tuple(peer for peer in self.peers if peer.rank != rank),
            "open_timeout_s": 5.0,
        }
        return EndpointSpec(**{**fields, **changes})

    async def open(self, rank: int, **changes: Any) -> Any:
        return await resolve(self.uri).open(self.spec(rank, **changes))

    async def open_all(self, **changes: Any) -> list[Any]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self.open(peer.rank, **changes)) for peer in self.peers]
        return [task.result() for task in tasks]


@pytest.fixture(params=["memory://", "shm://"])
def uri(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make_world(uri: str, tmp_path: Path) -> Callable[[int], World]:
    return lambda size=2: World(uri, size, str(tmp_path / "rendezvous"))


@asynccontextmanager
async def opened(world: World, **changes: Any) -> AsyncIterator[list[Any]]:
    """All peers of a world; aborted at the end unless closed before."""
    endpoints = await world.open_all(**changes)
    try:
        yield endpoints
    finally:
        for endpoint in endpoints:
            endpoint.abort()


@pytest.fixture
def open_world(make_world: Callable[[int], World]) -> Callable[..., Any]:
    return lambda size=2, **changes: opened(make_world(size), **changes)
