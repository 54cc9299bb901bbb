"""Message links, endpoints and transports that break one rule each. Loaded as `broken_links:Name`."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from typing import Any

from wrapped import Endpoint, Transport, Wrapped, transport

from pipelined.clock import MonotonicClock
from pipelined.errors import ClosedError, EndOfLane, HandshakeError, MissingDependencyError, WouldBlock
from pipelined.transport import Lane


class _LosesWhenCancelled(Wrapped):
    """A frame that was taken is gone if the wait ends just then."""

    async def receive(self) -> bytes:
        frame: bytes = await self.inner.receive()
        await asyncio.sleep(0)
        return frame


class _SendsThenSuspends(Wrapped):
    """A cancelled send may have been sent."""

    async def send(self, frame: bytes) -> None:
        await self.inner.send(frame)
        await asyncio.sleep(0)


class _SwapsFrames(Wrapped):
    async def receive(self) -> bytes:
        if "kept" in self.state:
            return self.state.pop("kept")  # type: ignore[no-any-return]
        frame: bytes = await self.inner.receive()
        self.state["count"] = self.state.get("count", 0) + 1
        if self.state["count"] % 7 == 0:
            self.state["kept"] = frame
            frame = await self.inner.receive()
        return frame


class _OneMessageQueue(Wrapped):
    """While SCHEDULE is full, the other lanes lose their messages."""

    async def send(self, frame: bytes) -> None:
        assert self.endpoint is not None
        if self.endpoint.inner.messages(self.peer, Lane.SCHEDULE).credits():
            await self.inner.send(frame)


class _PollsMessages(Wrapped):
    """Any number of tasks may receive."""

    async def receive(self) -> bytes:
        while True:
            try:
                return self.inner.receive_nowait()  # type: ignore[no-any-return]
            except WouldBlock:
                await asyncio.sleep(0.001)


class _ClosesWithoutFlush(Endpoint):
    async def aclose(self) -> None:
        self.inner.abort()


class _ClosesOnce(Endpoint):
    async def aclose(self) -> None:
        if self.state.get("closed"):
            raise ClosedError("closed already")
        self.state["closed"] = True
        await self.inner.aclose()


class _AbortsLate(Endpoint):
    def abort(self) -> None:
        asyncio.get_running_loop().call_later(0.1, self.inner.abort)


class _NeverCloses(Endpoint):
    async def aclose(self) -> None:
        self.inner.abort()
        await asyncio.Event().wait()


class _Foreign(Endpoint):
    """Tells the peer nothing when it closes: a clean end looks like a death."""

    async def aclose(self) -> None:
        await asyncio.sleep(0.01)
        self.inner.abort()


class _TellsNobody(Endpoint):
    @property
    def lost(self) -> Any:
        async def nobody() -> Any:
            return
            yield

        return nobody()


class _NewLinks(Endpoint):
    """A new object each time."""

    def tensors(self, peer: Any, lane: Any) -> Wrapped:
        return Wrapped(self.inner.tensors(peer, lane), self, peer, lane)


class _LocalCloseEnds(Wrapped):
    """Closing one's own end looks as if the peer had."""

    def post_send(self, tensor: Any, header: Any, **more: Any) -> Any:
        try:
            return self.inner.post_send(tensor, header, **more)
        except ClosedError:
            raise EndOfLane("over") from None


class _LeavesTask(Transport):
    kept: list[Any] = []  # noqa: RUF012

    async def open(self, spec: Any) -> Endpoint:
        self.kept.append(asyncio.get_running_loop().create_task(asyncio.sleep(1000)))
        return await super().open(spec)


class _LeavesDescriptor(Transport):
    async def open(self, spec: Any) -> Endpoint:
        os.dup(0)
        return await super().open(spec)


class _LeavesMemory(Transport):
    """8 MiB for each endpoint, touched, and never given back while the process lives."""

    kept: list[bytearray] = []  # noqa: RUF012

    async def open(self, spec: Any) -> Endpoint:
        self.kept.append(bytearray(b"x") * (8 << 20))
        return await super().open(spec)


class _AnyDtype(Transport):
    def change(self, spec: Any) -> Any:
        return replace(spec, dtype="")


class _Bounded(Transport):
    """Takes ten times what the window allows."""

    def change(self, spec: Any) -> Any:
        return replace(spec, window=spec.window * 10)


class _OwnClock(Transport):
    def change(self, spec: Any) -> Any:
        return replace(spec, clock=MonotonicClock())


class _ComparesClocks(Transport):
    """Expects that all peers read the same time."""

    async def open(self, spec: Any) -> Endpoint:
        spec.rendezvous.publish(f"time/{spec.me.rank}", str(spec.clock.now()))
        endpoint = await super().open(spec)
        for other in spec.connect:
            theirs = float(spec.rendezvous.get(f"time/{other.rank}") or 0)
            if abs(spec.clock.now() - theirs) > 1000:
                endpoint.abort()
                raise HandshakeError(f"{other}'s hello is too old")
        return endpoint


class _AnySecret(Transport):
    def change(self, spec: Any) -> Any:
        return replace(spec, secret="")


class _AnyEpoch(Transport):
    def change(self, spec: Any) -> Any:
        return replace(spec, epoch=0)


class _NamesNobody(Transport):
    async def open(self, spec: Any) -> Endpoint:
        try:
            return await super().open(spec)
        except HandshakeError:
            raise HandshakeError("somebody is absent") from None


class NeedsUnnamed(Transport):
    """Its library's absence is a bare ModuleNotFoundError."""

    requires = ("colorsys",)

    def __init__(self) -> None:
        import colorsys  # noqa: F401

        super().__init__()


class NeedsNamed(Transport):
    """As it should be."""

    requires = ("colorsys",)

    def __init__(self) -> None:
        try:
            import colorsys  # noqa: F401
        except ModuleNotFoundError as error:
            raise MissingDependencyError("needs", "pip install colorsys") from error
        super().__init__()


class Throws(Transport):
    """Leaves an exception in a callback of the loop."""

    async def open(self, spec: Any) -> Endpoint:
        asyncio.get_running_loop().call_soon(lambda: 1 // 0)
        return await super().open(spec)


LosesWhenCancelled = transport(messages=_LosesWhenCancelled)
SendsThenSuspends = transport(messages=_SendsThenSuspends)
SwapsFrames = transport(messages=_SwapsFrames)
OneMessageQueue = transport(messages=_OneMessageQueue)
PollsMessages = transport(messages=_PollsMessages)
ClosesWithoutFlush = transport(endpoint=_ClosesWithoutFlush)
ClosesOnce = transport(endpoint=_ClosesOnce)
AbortsLate = transport(endpoint=_AbortsLate)
NeverCloses = transport(endpoint=_NeverCloses)
Foreign = transport(endpoint=_Foreign)
TellsNobody = transport(endpoint=_TellsNobody)
NewLinks = transport(endpoint=_NewLinks)
LocalCloseEnds = transport(tensors=_LocalCloseEnds)
LeavesTask, LeavesDescriptor, TooWide = _LeavesTask, _LeavesDescriptor, _Bounded
OwnClock, ComparesClocks = _OwnClock, _ComparesClocks
AnySecret, AnyEpoch, AnyDtype, NamesNobody = _AnySecret, _AnyEpoch, _AnyDtype, _NamesNobody
LeavesMemory = _LeavesMemory
