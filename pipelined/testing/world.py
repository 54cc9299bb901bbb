"""A small world of endpoints for one check: opened by URI, in one process and one loop, closed afterwards."""

from __future__ import annotations

import asyncio
import importlib
import time
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from pipelined.errors import ConfigError, PipelinedError, WouldBlock
from pipelined.messages import Peer
from pipelined.testing.check import CheckFailed
from pipelined.testing.tools import header
from pipelined.transport import EndpointSpec, FileRendezvous, Lane, MemoryRendezvous, Received, Rendezvous, resolve
from pipelined.transport.registry import split_uri

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    import torch

    from pipelined.transport import Capabilities, Endpoint, MessageLink, TensorLink, Transfer, Transport

__all__ = ["MESSAGE_LANES", "TENSOR_LANES", "World", "peer", "transport_from", "without_window"]

T = TypeVar("T")

TENSOR_LANES = (Lane.HIDDEN, Lane.KV)
MESSAGE_LANES = (Lane.SCHEDULE, Lane.RESULTS, Lane.HEALTH)

PATIENCE_S = 10.0
"""Real time within which anything that should happen has happened, on a busy machine too, unless said otherwise."""


def peer(rank: int) -> Peer:
    """The peer of that rank in the kit's pipeline."""
    return Peer("kit", rank)


def transport_from(source: str) -> Transport:
    """The transport that `source` names: a URI, or `package.module:Class` for one that is not registered.

    Raises:
        ConfigError: There is none of that name.
    """
    if "://" in source or ":" not in source:
        return resolve(source)
    module, _, attribute = source.partition(":")
    try:
        made: Transport = getattr(importlib.import_module(module), attribute)()
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"transport {source!r} cannot be loaded ({error}); expected a URI such as 'shm://', "
            "or 'package.module:Class' of something that can be imported"
        ) from error
    return made


def without_window(source: str) -> str:
    """The URI without its `window`: checks set windows of their own."""
    head, mark, query = source.partition("?")
    kept = "&".join(option for option in query.split("&") if not option.startswith("window="))
    return head + mark + kept if kept else head


class World:
    """Where a check runs.

    Attributes:
        source: URI, or `package.module:Class`.
        rule: Rule under check, for the errors.
        size: How many peers a check of many should use.
        quick: Fewer and smaller.
        directory: Empty folder of this check's own.
        patience_s: Real time within which anything that should happen has happened.
    """

    def __init__(
        self, source: str, *, rule: str, size: int, quick: bool, directory: Path, patience_s: float = PATIENCE_S
    ) -> None:
        self.source = source
        self.rule = rule
        self.size = size
        self.quick = quick
        self.directory = directory
        self.patience_s = patience_s
        self.capabilities: Capabilities = transport_from(source).capabilities
        self._options = split_uri(source)[1] if "://" in source else {}
        self._endpoints: list[Endpoint] = []
        self._boards = 0

    # ---- judging ----

    def fail(self, happened: str, expected: str) -> NoReturn:
        """Raise `CheckFailed` for this rule."""
        raise CheckFailed(self.rule, happened, expected)

    def expect(self, holds: bool, happened: str, expected: str) -> None:
        """Fail unless `holds`."""
        if not holds:
            self.fail(happened, expected)

    async def within(self, awaitable: Awaitable[T], what: str, limit_s: float | None = None) -> T:
        """Await it; fail if it takes longer than `limit_s` (the world's patience unless given)."""
        limit_s = self.patience_s if limit_s is None else limit_s
        try:
            async with asyncio.timeout(limit_s) as bound:
                return await awaitable
        except TimeoutError:
            if not bound.expired():
                raise
            self.fail(f"{what} hung for {limit_s:g} s", "it to end")

    @staticmethod
    def now() -> float:
        """Real time: deadlines of the kit's own."""
        return time.monotonic()

    async def raises(
        self,
        kinds: type[PipelinedError] | tuple[type[PipelinedError], ...],
        awaitable: Awaitable[object],
        what: str,
        limit_s: float | None = None,
    ) -> PipelinedError:
        """Await something that must fail with one of `kinds` within `limit_s`; returns the error."""
        try:
            result = await self.within(awaitable, what, limit_s)
        except CheckFailed:
            raise
        except PipelinedError as error:
            return self._kind(error, kinds, what)
        self.fail(f"{what} gave {result!r}", _names(kinds))

    def raises_now(
        self, kinds: type[PipelinedError] | tuple[type[PipelinedError], ...], call: Callable[[], object], what: str
    ) -> PipelinedError:
        """Call something that must fail at once with one of `kinds`; returns the error."""
        try:
            result = call()
        except PipelinedError as error:
            return self._kind(error, kinds, what)
        self.fail(f"{what} gave {result!r}", _names(kinds))

    def _kind(
        self, error: PipelinedError, kinds: type[PipelinedError] | tuple[type[PipelinedError], ...], what: str
    ) -> PipelinedError:
        if not isinstance(error, kinds):
            raise CheckFailed(self.rule, f"{what} raised {type(error).__name__}: {error}", _names(kinds)) from error
        return error

    # ---- opening ----

    def rendezvous(self) -> Rendezvous:
        """A fresh board of the kind that the transport needs."""
        self._boards += 1
        if self.capabilities.processes:
            return FileRendezvous(self.directory / f"board{self._boards}")
        return MemoryRendezvous()

    def spec(self, rank: int, size: int, rendezvous: Rendezvous, **changes: Any) -> EndpointSpec:
        """How rank `rank` of `size` opens, connected to all others unless `changes` says otherwise."""
        everyone = tuple(peer(other) for other in range(size))
        fields: dict[str, Any] = {
            "me": peer(rank),
            "world": everyone,
            "rendezvous": rendezvous,
            "connect": tuple(other for other in everyone if other.rank != rank),
            "open_timeout_s": self.patience_s,
            "options": self._options,
        }
        return EndpointSpec(**(fields | changes))

    async def open_one(self, spec: EndpointSpec) -> Endpoint:
        """Open one end on a transport object of its own, as each process would."""
        endpoint = await transport_from(self.source).open(spec)
        self._endpoints.append(endpoint)
        return endpoint

    async def open(self, size: int | None = None, **changes: Any) -> list[Endpoint]:
        """Open `size` endpoints, each connected to every other; `changes` go into every spec."""
        size = size or self.size
        board = self.rendezvous()
        async with asyncio.TaskGroup() as group:
            opening = [
                group.create_task(self.open_one(self.spec(rank, size, board, **changes))) for rank in range(size)
            ]
        return [task.result() for task in opening]

    async def pair(self, **changes: Any) -> tuple[Endpoint, Endpoint]:
        """Two connected endpoints, ranks 0 and 1."""
        left, right = await self.open(2, **changes)
        return left, right

    async def tensor_pair(self, lane: Lane = Lane.HIDDEN, **changes: Any) -> tuple[TensorLink, TensorLink]:
        """Both ends of a tensor link: rank 0's and rank 1's."""
        left, right = await self.pair(**changes)
        return left.tensors(peer(1), lane), right.tensors(peer(0), lane)

    async def message_pair(self, lane: Lane = Lane.SCHEDULE, **changes: Any) -> tuple[MessageLink, MessageLink]:
        """Both ends of a message link: rank 0's and rank 1's."""
        left, right = await self.pair(**changes)
        return left.messages(peer(1), lane), right.messages(peer(0), lane)

    async def close(self) -> None:
        """Abort whatever is open."""
        for endpoint in self._endpoints:
            endpoint.abort()
        self._endpoints.clear()
        await self.settle()

    # ---- moving ----

    async def until(self, holds: Callable[[], bool], limit_s: float) -> None:
        """Let the loop run until `holds`, at most `limit_s`; judges nothing."""
        until_s = self.now() + limit_s
        while not holds() and self.now() < until_s:  # noqa: ASYNC110  (what it polls has no event)
            await asyncio.sleep(0.005)

    async def settle(self, turns: int = 20, pause_s: float = 0.0) -> None:
        """Let the loop turn, and the other side act."""
        for _ in range(turns):
            await asyncio.sleep(0)
        await asyncio.sleep(pause_s)

    async def post(self, link: TensorLink, tensor: torch.Tensor, step: int, index: int = 0) -> Transfer[None]:
        """Post a send as soon as there is a credit."""
        while True:
            try:
                return link.post_send(tensor, header(step, index))
            except WouldBlock:
                await self.within(link.ready(), "ready() on a lane whose peer receives")

    async def receive(self, link: TensorLink, step: int, index: int = 0, into: torch.Tensor | None = None) -> Received:
        """Receive one tensor."""
        return await self.within(link.post_recv((step, index), into), f"the receive of {step}.{index}")

    def fill(self, link: TensorLink, tensor: torch.Tensor, first_step: int = 0) -> list[Transfer[None]]:
        """Post `tensor` until the window is full."""
        posted: list[Transfer[None]] = []
        while len(posted) < 10_000:
            try:
                posted.append(link.post_send(tensor, header(first_step + len(posted))))
            except WouldBlock:
                return posted
        self.fail("10,000 sends were accepted though nobody receives", "WouldBlock beyond the window")

    def fill_messages(self, link: MessageLink, frame: bytes = b"x") -> int:
        """Send `frame` until the window is full; how often."""
        for count in range(10_000):
            try:
                link.send_nowait(frame)
            except WouldBlock:
                return count
        self.fail("10,000 messages were accepted though nobody receives", "WouldBlock beyond the window")


def _names(kinds: type[PipelinedError] | tuple[type[PipelinedError], ...]) -> str:
    return " or ".join(kind.__name__ for kind in (kinds if isinstance(kinds, tuple) else (kinds,)))
