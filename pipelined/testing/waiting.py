"""R7, R8, R11: the window and its wait, waiters that are cancelled, waiters that are one too many."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

import torch

from pipelined.errors import BusyError, ClosedError, WouldBlock
from pipelined.testing.tools import header, pattern, same
from pipelined.testing.world import World

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from pipelined.transport import MessageLink, Received

__all__ = [
    "check_a_cancelled_message_receive_loses_nothing",
    "check_a_cancelled_message_send_is_whole_or_not_at_all",
    "check_a_cancelled_ready_frees_the_place",
    "check_a_cancelled_transfer_waiter_changes_nothing",
    "check_a_second_message_waiter_is_busy",
    "check_a_second_ready_is_busy",
    "check_a_withdrawn_receive_takes_nothing",
    "check_beyond_the_message_window_would_block",
    "check_beyond_the_window_would_block",
]

_CANCEL_POINTS = (0, 1, 2, 3, 5, 8, 20)
"""Turns of the loop after which a waiter is cancelled: before, at and after each point where it may stand."""


async def _cancelled_after(turns: int, start: Callable[[], Awaitable[object]]) -> bool:
    """Start a wait, let the loop turn, cancel it. Whether it ended with the cancellation."""

    async def wait() -> None:
        await start()

    async with asyncio.TaskGroup() as group:
        task = group.create_task(wait())
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
    return task.cancelled()


async def check_beyond_the_window_would_block(world: World) -> None:
    """Exactly `window` sends are accepted, then WouldBlock; `ready()` wakes once the peer released one."""
    for window in (1, 4):
        near, far = await world.tensor_pair(window=window)
        world.expect(near.credits() == window, f"credits() is {near.credits()} at first", f"the window, {window}")
        posted = len(world.fill(near, pattern(1, 2_000)))
        world.expect(posted == window, f"{posted} sends were accepted with a window of {window}", f"{window}")
        world.expect(near.credits() == 0, f"credits() is {near.credits()} at WouldBlock", "0")
        await _ready_wakes(world, near.ready, partial(far.post_recv, (0, 0)), window)
        world.expect(near.credits() >= 1, f"credits() is {near.credits()} after ready()", "at least 1")
        near.post_send(pattern(2, 2_000), header(window))
        for step in range(1, window + 1):
            (await world.receive(far, step)).release()


async def _ready_wakes(
    world: World, ready: Callable[[], Awaitable[None]], receive: Callable[[], Awaitable[Received]], window: int
) -> None:
    async def wait() -> None:
        await ready()

    async with asyncio.TaskGroup() as group:
        waiter = group.create_task(wait())
        await world.settle(30, 0.03)
        if waiter.done():
            waiter.cancel()
            world.fail(f"ready() returned with all {window} of the window in flight", "it to wait for a credit")
        received = await world.within(receive(), "a receive with the window full")
        received.release()
        await world.within(asyncio.shield(waiter), "ready() after the peer has released one")


async def check_beyond_the_message_window_would_block(world: World) -> None:
    """Messages beyond the window: WouldBlock from send_nowait, a wait in send, which the receiver ends."""
    near, far = await world.message_pair(window=3)
    world.raises_now(WouldBlock, far.receive_nowait, "receive_nowait with nothing sent")
    sent = world.fill_messages(near)
    world.expect(sent == 3, f"{sent} messages were accepted with a window of 3", "3")
    async with asyncio.TaskGroup() as group:
        waiter = group.create_task(near.send(b"last"))
        await world.settle(30, 0.03)
        if waiter.done():
            world.fail("send() returned though the window is full", "it to wait for a credit")
        frames = [await world.within(far.receive(), "a receive of what was sent") for _ in range(4)]
        await world.within(asyncio.shield(waiter), "send() after the peer has received")
    world.expect([bytes(f) for f in frames] == [b"x", b"x", b"x", b"last"], f"{frames} arrived", "all four in order")


async def check_a_cancelled_message_receive_loses_nothing(world: World) -> None:
    """A receive is cancelled before, while and after a frame arrives; every frame is still received."""
    near, far = await world.message_pair(window=64)
    for number, turns in enumerate((*_CANCEL_POINTS, *_CANCEL_POINTS)):
        frame = b"%d" % number
        got: list[bytes] = []
        early = number < len(_CANCEL_POINTS)

        async def take(got: list[bytes] = got) -> None:
            got.append(await far.receive())

        if early:
            await _cancelled_after(turns, take)
            near.send_nowait(frame)
        else:
            near.send_nowait(frame)
            await _cancelled_after(turns, take)
        if not got:
            got.append(await world.within(far.receive(), "a receive after one that was cancelled"))
        what = f"after a receive cancelled {turns} turns in, {bytes(got[0])!r} came"
        world.expect(bytes(got[0]) == frame, what, f"{frame!r}, neither lost nor doubled")


async def check_a_cancelled_message_send_is_whole_or_not_at_all(world: World) -> None:
    """Sends that wait for a credit are cancelled; what raised was not sent, what returned was."""
    near, far = await world.message_pair(window=2)
    expected = [b"x"] * world.fill_messages(near)
    got: list[bytes] = []
    for number, turns in enumerate((*_CANCEL_POINTS, *_CANCEL_POINTS)):
        frame = b"%d" % number
        freed = number >= len(_CANCEL_POINTS)  # from here on a credit comes back just before the cancel
        if freed:
            got.append(await world.within(far.receive(), "a receive of what was sent"))
        if not await _cancelled_after(turns, lambda frame=frame: near.send(frame)):  # type: ignore[misc]
            expected.append(frame)
        elif freed:
            await world.within(near.send(b"refill"), "a send with a credit")
            expected.append(b"refill")
    await world.within(_drain(far, got, len(expected)), "receiving what was sent")
    await world.settle(20, 0.03)
    world.raises_now(WouldBlock, far.receive_nowait, "a receive after everything that was sent")
    world.expect(
        [bytes(f) for f in got] == expected, f"{got} arrived", f"{expected}: cancelled sends whole or not at all"
    )


async def _drain(link: MessageLink, into: list[bytes], until: int) -> None:
    while len(into) < until:
        into.append(await link.receive())


async def check_a_cancelled_transfer_waiter_changes_nothing(world: World) -> None:
    """Waiters of a send and of a receive are cancelled; both still complete with the right data."""
    near, far = await world.tensor_pair()
    for step, turns in enumerate(_CANCEL_POINTS):
        for into in (None, torch.zeros(300_000, dtype=torch.uint8)):
            number = 2 * step + (into is not None)
            receive = far.post_recv((number, 0), into)
            await _cancelled_after(turns, lambda receive=receive: receive)  # type: ignore[misc]
            send = near.post_send(pattern(number, 300_000), header(number))
            await _cancelled_after(turns, lambda send=send: send)  # type: ignore[misc]
            await _cancelled_after(turns, lambda receive=receive: receive)  # type: ignore[misc]
            received = await world.within(receive, "a receive one of whose waiters was cancelled")
            right = same(received.tensor, pattern(number, 300_000))
            world.expect(right, "after a cancelled waiter the data came changed", "the data as sent")
            received.release()
            await world.within(send, "a send one of whose waiters was cancelled")


async def check_a_withdrawn_receive_takes_nothing(world: World) -> None:
    """`Transfer.cancel` of a posted receive fails it; the tensor goes to the next receive."""
    near, far = await world.tensor_pair()
    receive = far.post_recv((0, 0))
    withdrawn = receive.cancel()
    near.post_send(pattern(1, 100), header(0))
    if withdrawn:
        await world.raises(ClosedError, receive, "a withdrawn receive")
        receive = far.post_recv((0, 0))
    received = await world.within(receive, "the receive after one that was withdrawn")
    world.expect(same(received.tensor, pattern(1, 100)), "another tensor came", "the one that was sent")
    world.expect(not receive.cancel(), "cancel() of a completed receive returned True", "False")
    received.release()


async def check_a_cancelled_ready_frees_the_place(world: World) -> None:
    """`ready()` is cancelled at several points; the next one waits, and wakes."""
    near, far = await world.tensor_pair(window=1)
    near.post_send(pattern(0, 10), header(0))
    for turns in _CANCEL_POINTS:
        ended = await _cancelled_after(turns, near.ready)
        world.expect(ended, "ready() returned with the window full", "it to wait until cancelled")
    await _ready_wakes(world, near.ready, partial(far.post_recv, (0, 0)), 1)


async def check_a_second_ready_is_busy(world: World) -> None:
    """While one task waits in `ready()`, a second one gets BusyError and the first is undisturbed."""
    near, far = await world.tensor_pair(window=1)
    near.post_send(pattern(0, 10), header(0))
    async with asyncio.TaskGroup() as group:
        first = group.create_task(near.ready())
        await world.settle(3)
        await world.raises(BusyError, near.ready(), "a second ready() on a lane end")
        (await world.receive(far, 0)).release()
        await world.within(asyncio.shield(first), "the first ready(), once there is a credit,")


async def check_a_second_message_waiter_is_busy(world: World) -> None:
    """While one task receives, or waits to send, a second one gets BusyError and the first is undisturbed."""
    near, far = await world.message_pair(window=1)
    async with asyncio.TaskGroup() as group:
        reading = group.create_task(far.receive())
        await world.settle(3)
        await world.raises(BusyError, far.receive(), "a second receive() on a lane end")
        near.send_nowait(b"one")
        world.expect(
            bytes(await world.within(asyncio.shield(reading), "the first receive()")) == b"one",
            "another frame",
            "'one'",
        )
    await world.settle(20, 0.05)
    await world.within(near.send(b"two"), "a send with a credit")
    async with asyncio.TaskGroup() as group:
        writing = group.create_task(near.send(b"three"))
        await world.settle(3)
        await world.raises(BusyError, near.send(b"four"), "a second waiting send() on a lane end")
        got = [bytes(await world.within(far.receive(), "a receive of what was sent")) for _ in range(2)]
        await world.within(asyncio.shield(writing), "the first waiting send()")
    world.expect(got == [b"two", b"three"], f"{got} arrived", "[b'two', b'three']")
