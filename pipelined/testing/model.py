"""R4, R7: random operations on a whole world, held against the model `{(source, destination, lane): deque}`."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from pipelined.errors import LaneMismatch, Truncated, WouldBlock
from pipelined.testing.tools import header, pattern, same
from pipelined.testing.world import TENSOR_LANES, World, peer

if TYPE_CHECKING:
    from pipelined.transport import Endpoint, Received, TensorLink

__all__ = [
    "TENSOR_OPERATIONS",
    "TensorWay",
    "check_random_operations_follow_the_model",
    "receive",
    "release",
    "tensor_ways",
]


@dataclass
class TensorWay:
    """One direction of one lane: both ends, and what the model says is under way."""

    name: str
    near: TensorLink
    far: TensorLink
    window: int
    sent: int = 0
    under_way: deque[tuple[int, int]] = field(default_factory=deque)  # (step, bytes)
    held: list[tuple[int, int, Received]] = field(default_factory=list)


async def check_random_operations_follow_the_model(world: World) -> None:
    """Sends, receives, wrong receives, small buffers and late releases at random, on every pair and lane."""
    size, window = min(3, world.size), 3
    for seed in range(2 if world.quick else 10):
        ends, draw = await world.open(size, window=window), random.Random(seed)
        ways = tensor_ways(ends, window)
        for number in range(300 if world.quick else 1000):
            way = draw.choice(ways)
            operation = draw.choice((_send, receive, *TENSOR_OPERATIONS))
            await operation(world, way, draw, f"seed {seed}, operation {number}, {way.name}")
        for way in ways:
            while way.under_way:
                await receive(world, way, draw, f"seed {seed}, at the end, {way.name}")
            while way.held:
                await release(world, way, draw, f"seed {seed}, at the end, {way.name}")
        for end in ends:
            end.abort()


def tensor_ways(ends: list[Endpoint], window: int) -> list[TensorWay]:
    """Every direction of every tensor lane between these endpoints, of ranks 0 and up."""
    return [
        TensorWay(
            f"{source}->{target} {lane.name}",
            ends[source].tensors(peer(target), lane),
            ends[target].tensors(peer(source), lane),
            window,
        )
        for lane in TENSOR_LANES
        for source in range(len(ends))
        for target in range(len(ends))
        if source != target
    ]


async def _send(world: World, way: TensorWay, draw: random.Random, where: str) -> None:
    if len(way.under_way) + len(way.held) >= way.window:
        world.raises_now(
            WouldBlock,
            lambda: way.near.post_send(torch.zeros(1), header(way.sent)),
            f"{where}: a send beyond the window",
        )
        return
    size_bytes = draw.choice((0, 1, 100, draw.randrange(50_000)))
    await world.post(way.near, pattern(way.sent, size_bytes), way.sent)
    way.under_way.append((way.sent, size_bytes))
    way.sent += 1


async def receive(world: World, way: TensorWay, draw: random.Random, where: str) -> None:
    """Take the next; it must be what the model says."""
    if not way.under_way:
        return
    step, size_bytes = way.under_way.popleft()
    into = torch.empty(size_bytes + draw.randrange(5), dtype=torch.uint8) if draw.random() < 0.3 else None
    received = await world.receive(way.far, step, into=into)
    world.expect(same(received.tensor, pattern(step, size_bytes)), f"{where}: other data than in the model", "the next")
    if into is None:
        way.held.append((step, size_bytes, received))
    else:
        received.release()


async def release(world: World, way: TensorWay, draw: random.Random, where: str) -> None:
    """Give one back, in any order; it must not have changed while it was held."""
    if way.held:
        step, size_bytes, received = way.held.pop(draw.randrange(len(way.held)))
        world.expect(same(received.tensor, pattern(step, size_bytes)), f"{where}: a held view changed", "its data")
        received.release()


async def _wrong(world: World, way: TensorWay, draw: random.Random, where: str) -> None:
    if way.under_way:
        step = way.under_way[0][0] + draw.choice((-1, 1))
        await world.raises(LaneMismatch, way.far.post_recv((step, 0)), f"{where}: a receive of another step")


async def _small(world: World, way: TensorWay, draw: random.Random, where: str) -> None:
    if way.under_way and way.under_way[0][1] > 0:
        step, size_bytes = way.under_way[0]
        into = torch.empty(draw.randrange(size_bytes), dtype=torch.uint8)
        await world.raises(Truncated, way.far.post_recv((step, 0), into), f"{where}: a receive into a small buffer")


TENSOR_OPERATIONS = (_send, receive, release, _wrong, _small)
"""What may be done to a tensor way at any time; each holds the transport against the model."""
