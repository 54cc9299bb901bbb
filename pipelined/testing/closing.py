"""R9, R10: closing flushes, aborting is immediate, and every end of a link has its error, on every lane, for ever."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from pipelined.errors import ClosedError, EndOfLane, PeerLost, TransportError
from pipelined.testing.links import Links
from pipelined.testing.tools import header, pattern, same
from pipelined.testing.world import World, peer
from pipelined.transport import Lane

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pipelined.transport import Endpoint, Received, Transfer

__all__ = [
    "check_abort_is_immediate",
    "check_aborts_of_both",
    "check_aclose_flushes",
    "check_aclose_is_idempotent",
    "check_closes_of_both",
    "check_local_close",
    "check_lost_names_the_peer",
    "check_peer_abort",
    "check_peer_close",
]

STATES = ("idle", "posted", "mid-transfer")
GRACE_S = 0.5
"""Beyond a declared bound, for a busy machine."""


class _Busy:
    """A pair of endpoints brought into one of the states; with transfers of rank 0 under way."""

    def __init__(self, world: World, left: Endpoint, right: Endpoint, state: str) -> None:
        self.left, self.right = left, right
        self.near, self.far = Links(left, peer(1)), Links(right, peer(0))
        self.size_bytes = (16 << 20) if world.quick else (64 << 20)
        self.sends: list[Transfer[None]] = []
        self.receives: list[Transfer[Received]] = []
        if state == "idle":
            return
        size_bytes = 1_000 if state == "posted" else self.size_bytes
        for near, far in zip(self.near.tensors.values(), self.far.tensors.values(), strict=True):
            self.sends.append(near.post_send(pattern(1, size_bytes), header(0)))
            self.receives.append(near.post_recv((0, 0)))
            if state == "mid-transfer":
                far.post_send(pattern(2, size_bytes), header(0))

    @property
    def pending(self) -> list[Transfer[None] | Transfer[Received]]:
        """All that rank 0 has posted."""
        return [*self.sends, *self.receives]


async def _brought(world: World, state: str) -> _Busy:
    left, right = await world.pair()
    busy = _Busy(world, left, right, state)
    await world.settle(3)
    return busy


async def _all_end(
    world: World,
    transfers: Iterable[Transfer[None] | Transfer[Received]],
    kinds: tuple[type[TransportError], ...],
    when: str,
) -> None:
    """Each ends with success or one of `kinds`."""
    for transfer in transfers:
        try:
            await world.within(_outcome(transfer), f"{transfer!r} {when}")
        except TransportError as error:
            allowed = " or ".join(kind.__name__ for kind in kinds)
            fits = isinstance(error, kinds)
            world.expect(fits, f"{transfer!r} {when} raised {type(error).__name__}: {error}", f"success or {allowed}")


async def _outcome(transfer: Transfer[None] | Transfer[Received]) -> None:
    await transfer


async def check_aclose_flushes(world: World) -> None:
    """What was posted before `aclose` arrives, on every lane; then EndOfLane."""
    left, right = await world.pair()
    near, far = Links(left, peer(1)), Links(right, peer(0))
    size_bytes = (4 << 20) + 1
    for link in near.tensors.values():
        for step in range(4):
            link.post_send(pattern(step, size_bytes if step == 2 else 50_000), header(step))
    for messages in near.messages.values():
        for number in range(10):
            messages.send_nowait(b"%d" % number)
    async with asyncio.TaskGroup() as group:
        closing = group.create_task(left.aclose())
        for lane, link in far.tensors.items():
            for step in range(4):
                received = await world.receive(link, step)
                right_bytes = same(received.tensor, pattern(step, size_bytes if step == 2 else 50_000))
                world.expect(right_bytes, f"{lane.name} {step}, flushed by aclose, came changed", "as posted")
                received.release()
        for lane, far_messages in far.messages.items():
            for number in range(10):
                frame = await world.within(far_messages.receive(), f"message {number} on {lane.name} before the close")
                world.expect(bytes(frame) == b"%d" % number, f"{frame!r} came", f"message {number}")
        await world.within(asyncio.shield(closing), "aclose, with everything received,")
    await far.lead_to(world, (EndOfLane,), "after all of a closed peer was received", 5.0)


async def check_aclose_is_idempotent(world: World) -> None:
    """`aclose` twice, at the same time, after `abort`, and `abort` after it: no error, no hang."""
    left, right = await world.pair()
    async with asyncio.TaskGroup() as group:
        for _ in range(3):
            group.create_task(world.within(left.aclose(), "aclose called three times at once"))
    await world.within(left.aclose(), "aclose of a closed endpoint")
    left.abort()
    left.abort()
    right.abort()
    await world.within(right.aclose(), "aclose after abort")
    async with (await world.pair())[0] as third:
        world.expect(third.me == peer(0), f"`async with` gave {third!r}", "the endpoint itself")
    await world.within(third.aclose(), "aclose after the end of `async with`")


async def check_abort_is_immediate(world: World) -> None:
    """`abort` in mid-transfer fails all that is pending before the loop turns ten times."""
    busy = await _brought(world, "mid-transfer")
    waiting = list(busy.near.post_receives(9).values())
    busy.left.abort()
    for _ in range(10):
        await asyncio.sleep(0)
    late = [repr(transfer) for transfer in (*busy.pending, *waiting) if not transfer.done()]
    world.expect(not late, f"still pending ten turns after abort: {', '.join(late)}", "all to have ended")
    await _all_end(world, (*busy.pending, *waiting), (ClosedError,), "after abort")
    await busy.near.stay_over(world, (ClosedError,), "after abort")


async def check_local_close(world: World) -> None:
    """One's own end is closed and aborted, idle, posted and in mid-transfer: ClosedError."""
    for state in STATES:
        for how in ("aclose", "abort"):
            busy, when = await _brought(world, state), f"after one's own {how}, {state}"
            waiting = list(busy.near.post_receives(9).values())
            if how == "abort":
                busy.left.abort()
            else:
                await world.within(busy.left.aclose(), f"aclose, {state},")
            await _all_end(world, busy.pending, (ClosedError,), when)
            for transfer in waiting:
                await world.raises(ClosedError, transfer, f"a receive waiting {when}")
            await busy.near.stay_over(world, (ClosedError,), when)
            busy.right.abort()


async def check_peer_close(world: World) -> None:
    """The peer's aclose, idle, posted and in mid-transfer: what it sent arrives, then EndOfLane for ever."""
    for state in STATES:
        busy, when = await _brought(world, state), f"after the peer's aclose, {state}"
        async with asyncio.TaskGroup() as group:
            closing = group.create_task(busy.right.aclose())
            if state == "mid-transfer":
                for transfer in busy.receives:
                    received = await world.within(transfer, f"a receive {when}")
                    right = same(received.tensor, pattern(2, busy.size_bytes))
                    world.expect(right, f"what the peer flushed came changed, {state}", "every byte")
                    received.release()
            await world.within(asyncio.shield(closing), f"the peer's aclose, {state},")
        await _all_end(world, busy.pending, (EndOfLane,), when)
        await busy.near.lead_to(world, (EndOfLane,), when, 5.0)
        await busy.near.stay_over(world, (EndOfLane,), when)
        await world.within(busy.left.aclose(), f"aclose {when}")
        await busy.near.stay_over(world, (ClosedError,), f"after both closed, {state}")


async def check_peer_abort(world: World) -> None:
    """The peer's abort, idle, posted and in mid-transfer: PeerLost on every lane, for ever, within the bound."""
    bound_s = world.capabilities.peer_lost_bound_s
    for state in STATES:
        busy, when = await _brought(world, state), f"after the peer's abort, {state}"
        busy.right.abort()
        await busy.near.lead_to(world, (PeerLost,), when, bound_s + GRACE_S)
        await _all_end(world, busy.pending, (PeerLost,), when)
        await busy.near.stay_over(world, (PeerLost,), when)
        await world.within(busy.left.aclose(), f"aclose {when}")


async def check_closes_of_both(world: World) -> None:
    """Both close at the same time, idle, posted and in mid-transfer: neither hangs, both end in ClosedError."""
    for state in STATES:
        busy, when = await _brought(world, state), f"after both closed at once, {state}"
        async with asyncio.TaskGroup() as group:
            group.create_task(world.within(busy.left.aclose(), f"aclose while the peer closes, {state},"))
            group.create_task(world.within(busy.right.aclose(), f"aclose while the peer closes, {state},"))
        await _all_end(world, busy.pending, (ClosedError, EndOfLane), when)
        for links in (busy.near, busy.far):
            await links.stay_over(world, (ClosedError,), when)


async def check_aborts_of_both(world: World) -> None:
    """Both abort at the same time, idle, posted and in mid-transfer: all ends in ClosedError."""
    for state in STATES:
        busy, when = await _brought(world, state), f"after both aborted at once, {state}"
        busy.left.abort()
        busy.right.abort()
        await _all_end(world, busy.pending, (ClosedError, PeerLost), when)
        for links in (busy.near, busy.far):
            await links.stay_over(world, (ClosedError,), when)


async def check_lost_names_the_peer(world: World) -> None:
    """`lost` yields the peer that died and no other, the others go on, and it ends with the endpoint."""
    ends = await world.open(3)
    seen: list[PeerLost] = []

    async def watch() -> None:
        async for error in ends[0].lost:
            seen.append(error)

    async with asyncio.TaskGroup() as group:
        watching = group.create_task(watch())
        await world.settle(3)
        ends[2].abort()
        await world.until(lambda: bool(seen), world.capabilities.peer_lost_bound_s + GRACE_S)
        if world.capabilities.tensors:
            ends[0].tensors(peer(1), Lane.HIDDEN).post_send(pattern(1, 100), header(0))
            (await world.receive(ends[1].tensors(peer(0), Lane.HIDDEN), 0)).release()
        await world.within(ends[1].aclose(), "aclose of the other peer")
        await world.settle(20, 0.05)
        await world.within(ends[0].aclose(), "aclose")
        await world.settle(20, 0.05)
        ended = watching.done()
        watching.cancel()
    named = [str(error) for error in seen if isinstance(error, PeerLost)]
    world.expect(len(named) == 1 and str(peer(2)) in named[0], f"lost gave {named}", f"one PeerLost naming {peer(2)}")
    world.expect(ended, "lost went on after the endpoint had closed", "it to end")
