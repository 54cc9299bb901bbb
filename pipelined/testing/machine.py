"""A hypothesis state machine: operations in any order, held against the model `{(source, destination, lane): deque}`.

The same model as that of the kit's random check, but hypothesis looks for the sequence and shrinks it:

    TestMine = link_machine("mine://").TestCase
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelined.errors import MissingDependencyError, WouldBlock
from pipelined.testing.model import TENSOR_OPERATIONS, receive, release, tensor_ways
from pipelined.testing.world import MESSAGE_LANES, World, peer

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from pipelined.transport import Endpoint, MessageLink

__all__ = ["link_machine"]

_WINDOW = 3
_PATIENCE_S = 30.0


@dataclass
class _MessageWay:
    """One direction of one message lane, and what the model says is under way."""

    name: str
    near: MessageLink
    far: MessageLink
    sent: int = 0
    under_way: deque[bytes] = field(default_factory=deque)


def _message_ways(ends: list[Endpoint]) -> list[_MessageWay]:
    return [
        _MessageWay(
            f"{source}->{1 - source} {lane.name}",
            ends[source].messages(peer(1 - source), lane),
            ends[1 - source].messages(peer(source), lane),
        )
        for lane in MESSAGE_LANES
        for source in (0, 1)
    ]


async def _say(world: World, way: _MessageWay, draw: random.Random, where: str) -> None:
    frame = b"%d " % way.sent + bytes(draw.choice((0, 1, 200, 70_000)))
    if len(way.under_way) >= _WINDOW:
        world.raises_now(WouldBlock, lambda: way.near.send_nowait(frame), f"{where}: a message beyond the window")
        return
    await world.within(way.near.send(frame), f"{where}: a message within the window")
    way.under_way.append(frame)
    way.sent += 1


async def _hear(world: World, way: _MessageWay, _: random.Random, where: str) -> None:
    if not way.under_way:
        world.raises_now(WouldBlock, way.far.receive_nowait, f"{where}: a message that nobody sent")
        return
    frame = await world.within(way.far.receive(), f"{where}: a message under way")
    right = way.under_way.popleft()
    world.expect(frame == right, f"{where}: {frame[:9]!r}, {len(frame)} bytes", f"{right[:9]!r}, {len(right)} bytes")


class _Play:
    """One run: two endpoints on a loop of their own."""

    def __init__(self, source: str, patience_s: float) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="pipelined-")
        self._runner = asyncio.Runner()
        where = Path(self._directory.name)
        self.world = World(source, rule="R4", size=2, quick=True, directory=where, patience_s=patience_s)
        ends = self.run(self.world.open(2, window=_WINDOW))
        able = self.world.capabilities
        self.tensors = tensor_ways(ends, _WINDOW) if able.tensors else []
        self.messages = _message_ways(ends) if able.messages else []
        self.ways: list[Any] = [*self.tensors, *self.messages]

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """On the loop."""
        return self._runner.run(work)

    def narrow(self, first: int, count: int) -> None:
        """From here on use a few lanes only: so more happens on each."""
        ways = self.ways[first % len(self.ways) :] + self.ways
        self.ways = ways[:count]

    def step(self, lane: int, operation: int, draw: random.Random) -> None:
        """An operation, by numbers, on a lane."""
        way = self.ways[lane % len(self.ways)]
        operations: tuple[Any, ...] = (_say, _hear) if isinstance(way, _MessageWay) else TENSOR_OPERATIONS
        self.run(operations[operation % len(operations)](self.world, way, draw, way.name))

    def drain(self, draw: random.Random) -> None:
        """Nothing may be left over or missing."""
        for tensors in self.tensors:
            while tensors.under_way:
                self.run(receive(self.world, tensors, draw, f"{tensors.name}, at the end"))
            while tensors.held:
                self.run(release(self.world, tensors, draw, f"{tensors.name}, at the end"))
        for messages in self.messages:
            while messages.under_way:
                self.run(_hear(self.world, messages, draw, f"{messages.name}, at the end"))

    def end(self) -> None:
        """Close all."""
        self.run(self.world.close())
        self._runner.close()
        self._directory.cleanup()


def link_machine(source: str, *, patience_s: float = _PATIENCE_S) -> type[Any]:
    """A `hypothesis.stateful.RuleBasedStateMachine` for a transport.

    Args:
        source: URI, or `package.module:Class`.
        patience_s: Real time within which anything that should happen has happened.

    Raises:
        MissingDependencyError: hypothesis is not installed.
    """
    try:
        from hypothesis import strategies as st
        from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
    except ModuleNotFoundError as error:
        raise MissingDependencyError("hypothesis", "pip install hypothesis") from error

    class LinkMachine(RuleBasedStateMachine):
        """Steps of a `_Play`."""

        def __init__(self) -> None:
            super().__init__()
            self.play = _Play(source, patience_s)
            self.sound = True

        @initialize(first=st.integers(0, 9), count=st.sampled_from((1, 2, 10)))
        def begin(self, first: int, count: int) -> None:
            self.play.narrow(first, count)

        @rule(lane=st.integers(0, 9), operation=st.integers(0, 9), seed=st.integers(0, 2**32 - 1))
        def step(self, lane: int, operation: int, seed: int) -> None:
            self.sound = False  # unless it says so itself
            self.play.step(lane, operation, random.Random(seed))
            self.sound = True

        def teardown(self) -> None:
            try:
                if self.sound:
                    self.play.drain(random.Random(0))
            finally:
                self.play.end()

    return LinkMachine
