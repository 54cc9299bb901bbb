"""Tensor links that break one rule each. Loaded as `broken_tensors:Name`."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from typing import Any

import msgspec
import torch
from wrapped import Wrapped, relay, transport

from pipelined.errors import EndOfLane, LaneMismatch, PeerLost
from pipelined.transport import Lane, Transfer


class _Blocks(Wrapped):
    def post_send(self, tensor: Any, header: Any, **more: Any) -> Any:
        time.sleep(0.04)
        return self.inner.post_send(tensor, header, **more)


class _Forgets(Wrapped):
    """Holds only a weak reference to what it is to send."""

    def post_send(self, tensor: Any, header: Any, *, after: Any = None) -> Any:
        if after is None or after.done():
            return self.inner.post_send(tensor, header)
        late, weak = torch.zeros_like(tensor), weakref.ref(tensor)

        def read() -> None:
            if (alive := weak()) is not None:
                late.copy_(alive)

        after.add_done_callback(read)
        return self.inner.post_send(late, header, after=after)


class _DoneTooEarly(Wrapped):
    """Says done at once, reads the bytes a little later."""

    def post_send(self, tensor: Any, header: Any, **more: Any) -> Any:
        asyncio.get_running_loop().call_later(0.002, lambda: self.inner.post_send(tensor, header, **more))
        early: Transfer[None] = Transfer("early")
        early.finish(None)
        return early


class _LeasesFloats(Wrapped):
    """Leases are of one dtype, whatever was asked for."""

    def lease(self, shape: Any, dtype: Any) -> Any:
        return torch.empty(shape)


class _SendIgnoresEvent(Wrapped):
    def post_send(self, tensor: Any, header: Any, *, after: Any = None) -> Any:
        return self.inner.post_send(tensor, header)


class _ReceiveIgnoresEvent(Wrapped):
    def post_recv(self, seq: Any, into: Any = None, *, after: Any = None) -> Any:
        return self.inner.post_recv(seq, into)


class _OneView(Wrapped):
    """Every received tensor lies in the same memory."""

    def post_recv(self, seq: Any, into: Any = None, **more: Any) -> Any:
        def landed(received: Any) -> Any:
            if (last := self.state.get("last")) is not None and into is None:
                last.fill_(0)
            if into is None:
                self.state["last"] = received.tensor
            return received

        return relay(self.inner.post_recv(seq, into, **more), result=landed)


class _Swaps(Wrapped):
    """Every tenth tensor leaves after its successor."""

    def post_send(self, tensor: Any, header: Any, **more: Any) -> Any:
        if header.step % 10 == 5 and self.inner.credits() > 1:
            self.state["kept"] = (tensor, header)
            done: Transfer[None] = Transfer("kept")
            done.finish(None)
            return done
        transfer = self.inner.post_send(tensor, header, **more)
        if "kept" in self.state:
            self.inner.post_send(*self.state.pop("kept"))
        return transfer


class _OneQueue(Wrapped):
    """While HIDDEN is full or waits, nothing leaves on KV."""

    def post_send(self, tensor: Any, header: Any, *, after: Any = None) -> Any:
        assert self.endpoint is not None
        hidden = self.endpoint.inner.tensors(self.peer, Lane.HIDDEN)
        if self.lane != Lane.HIDDEN and not (hidden.credits() and hidden.flushed()):
            return Transfer("behind HIDDEN")
        return self.inner.post_send(tensor, header, after=after)


class _AnySeq(Wrapped):
    """Gives whatever comes next, whoever asks for what."""

    def post_send(self, tensor: Any, header: Any, **more: Any) -> Any:
        return self.inner.post_send(tensor, msgspec.structs.replace(header, step=0, index=0), **more)

    def post_recv(self, seq: Any, into: Any = None, **more: Any) -> Any:
        return self.inner.post_recv((0, 0), into, **more)


class _DropsMismatched(Wrapped):
    """A wrong receive takes the tensor with it."""

    def post_recv(self, seq: Any, into: Any = None, **more: Any) -> Any:
        def drop(error: Exception) -> Exception:
            if isinstance(error, LaneMismatch) and self.inner._arrived:
                self.inner._arrived.popleft().release()
            return error

        return relay(self.inner.post_recv(seq, into, **more), error=drop)


class _Clips(Wrapped):
    """Fills a buffer that is too small with what fits."""

    def post_recv(self, seq: Any, into: Any = None, **more: Any) -> Any:
        def clip(received: Any) -> Any:
            if into is not None:
                into.copy_(received.tensor.reshape(-1)[: into.numel()])
            return received

        return relay(self.inner.post_recv(seq, **more), result=clip)


class _RefusesEmpty(Wrapped):
    def post_send(self, tensor: Any, header: Any, **more: Any) -> Any:
        if not tensor.numel():
            raise ValueError("nothing to send")
        return self.inner.post_send(tensor, header, **more)


class _Widens(Wrapped):
    """Knows no 8 and 16 bit floats."""

    def post_send(self, tensor: Any, header: Any, **more: Any) -> Any:
        narrow = tensor.dtype.is_floating_point and tensor.element_size() < 4
        return self.inner.post_send(tensor.float() if narrow else tensor, header, **more)


class _IgnoresStrides(Wrapped):
    def post_send(self, tensor: Any, header: Any, **more: Any) -> Any:
        if not tensor.is_contiguous():
            tensor = tensor.flatten().reshape(-1)[: tensor.numel()].sort().values.reshape(tensor.shape)
        return self.inner.post_send(tensor, header, **more)


class _Cuts(Wrapped):
    """Loses the end of what is larger than 32 MiB."""

    def post_send(self, tensor: Any, header: Any, **more: Any) -> Any:
        return self.inner.post_send(tensor[: 32 << 20] if tensor.dim() == 1 else tensor, header, **more)


class _ReadyAtOnce(Wrapped):
    async def ready(self) -> None:
        return


class _CountsTwice(Wrapped):
    """Each `release` gives a credit, the second one too."""

    def credits(self) -> int:
        assert self.endpoint is not None
        forged = self.endpoint.shared.get((self.endpoint.me, self.peer, self.lane), 0)
        return int(self.inner.credits()) + forged

    def post_recv(self, seq: Any, into: Any = None, **more: Any) -> Any:
        assert self.endpoint is not None
        shared, key = self.endpoint.shared, (self.peer, self.endpoint.me, self.lane)

        class Twice(Wrapped):
            def release(self) -> None:
                shared[key] = shared.get(key, 0) + self.state.get("released", 0)
                self.state["released"] = 1
                self.inner.release()

        return relay(self.inner.post_recv(seq, into, **more), result=Twice)


class _FreesViews(Wrapped):
    """Gives the credit back on arrival, whether or not the view was released."""

    def post_recv(self, seq: Any, into: Any = None, **more: Any) -> Any:
        def copied(received: Any) -> Any:
            kept = Wrapped(received)
            kept.__dict__["tensor"] = received.tensor.clone()
            received.release()
            return kept

        return relay(self.inner.post_recv(seq, into, **more), result=copied)


class _CancelsWithItsWaiter(Wrapped):
    """A cancelled waiter withdraws the receive."""

    def post_recv(self, seq: Any, into: Any = None, **more: Any) -> Any:
        inner = self.inner.post_recv(seq, into, **more)

        class Fragile(Transfer[Any]):
            def __await__(self) -> Any:
                try:
                    return (yield from super().__await__())
                except asyncio.CancelledError:
                    inner.cancel()
                    raise

        return relay(inner, Fragile)


class _WithdrawnTakes(Wrapped):
    """A withdrawn receive still takes the tensor."""

    def post_recv(self, seq: Any, into: Any = None, **more: Any) -> Any:
        outer = relay(self.inner.post_recv(seq, into, **more), _Withdrawn)
        return outer


class _Withdrawn(Transfer[Any]):
    def cancel(self) -> bool:
        return not self.done()


class _BusyForEver(Wrapped):
    """A cancelled `ready()` keeps its place."""

    async def ready(self) -> None:
        from pipelined.errors import BusyError

        if self.state.get("waiting"):
            raise BusyError("somebody waits")
        self.state["waiting"] = True
        await self.inner.ready()
        self.state["waiting"] = False


class _Polls(Wrapped):
    """Any number of tasks may wait."""

    async def ready(self) -> None:
        while not self.inner.credits():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


class _WakesElsewhere(Wrapped):
    """Transfers end on a thread of the transport's."""

    def post_send(self, tensor: Any, header: Any, **more: Any) -> Any:
        loop = asyncio.get_running_loop()
        outer: Transfer[None] = Transfer("elsewhere")

        def ended(_: Any) -> None:
            thread = threading.Thread(target=outer.finish, args=(None,))
            thread.start()
            thread.join()
            loop.call_soon(lambda: None)

        self.inner.post_send(tensor, header, **more).add_done_callback(ended)
        return outer


class _Computes(Wrapped):
    """Holds the loop for 40 ms of computing a big tensor."""

    def post_recv(self, seq: Any, into: Any = None, **more: Any) -> Any:
        def compute(received: Any) -> Any:
            until_s = time.thread_time() + 0.04
            while received.tensor.numel() > 1 << 20 and time.thread_time() < until_s:
                pass
            return received

        return relay(self.inner.post_recv(seq, into, **more), result=compute)


class _DeadIsEnded(Wrapped):
    """A peer that died looks as if it had closed."""

    def post_recv(self, seq: Any, into: Any = None, **more: Any) -> Any:
        def soften(error: Exception) -> Exception:
            return EndOfLane("it went") if isinstance(error, PeerLost) else error

        return relay(self.inner.post_recv(seq, into, **more), error=soften)


class _DeafToDeath(Wrapped):
    """Receives from a dead peer wait for ever."""

    def post_recv(self, seq: Any, into: Any = None, **more: Any) -> Any:
        return relay(self.inner.post_recv(seq, into, **more), error=lambda e: None if isinstance(e, PeerLost) else e)


class _OnceOnly(Wrapped):
    """Says once that the link is over, then waits for ever."""

    def post_recv(self, seq: Any, into: Any = None, **more: Any) -> Any:
        transfer = self.inner.post_recv(seq, into, **more)
        if transfer.error is not None:
            self.state["told"] = self.state.get("told", 0) + 1
        return Transfer("for ever") if self.state.get("told", 0) > 2 else transfer


class _KeepsLeases(Wrapped):
    """A lease that is never sent is gone for good."""

    def lease(self, shape: Any, dtype: Any) -> Any:
        self.state["taken"] = self.state.get("taken", 0) + 1
        if self.state["taken"] > 300:
            raise MemoryError("no leases left")
        return torch.empty(shape, dtype=dtype)


Blocks = transport(tensors=_Blocks)
Forgets = transport(tensors=_Forgets)
LeasesFloats = transport(tensors=_LeasesFloats, declares={"leases": True})
DoneTooEarly = transport(tensors=_DoneTooEarly, declares={"leases": True})
SendIgnoresEvent = transport(tensors=_SendIgnoresEvent)
ReceiveIgnoresEvent = transport(tensors=_ReceiveIgnoresEvent)
OneView = transport(tensors=_OneView)
Swaps = transport(tensors=_Swaps)
OneQueue = transport(tensors=_OneQueue)
AnySeq = transport(tensors=_AnySeq)
DropsMismatched = transport(tensors=_DropsMismatched)
Clips = transport(tensors=_Clips)
RefusesEmpty = transport(tensors=_RefusesEmpty)
Widens = transport(tensors=_Widens)
IgnoresStrides = transport(tensors=_IgnoresStrides)
Cuts = transport(tensors=_Cuts)
ReadyAtOnce = transport(tensors=_ReadyAtOnce)
CountsTwice = transport(tensors=_CountsTwice)
FreesViews = transport(tensors=_FreesViews)
CancelsWithItsWaiter = transport(tensors=_CancelsWithItsWaiter)
WithdrawnTakes = transport(tensors=_WithdrawnTakes)
BusyForEver = transport(tensors=_BusyForEver)
Polls = transport(tensors=_Polls)
WakesElsewhere = transport(tensors=_WakesElsewhere)
Computes = transport(tensors=_Computes)
DeadIsEnded = transport(tensors=_DeadIsEnded)
DeafToDeath = transport(tensors=_DeafToDeath)
OnceOnly = transport(tensors=_OnceOnly)
KeepsLeases = transport(tensors=_KeepsLeases, declares={"leases": True})
DeafProcess = transport(tensors=_DeafToDeath, around="zmq://")
