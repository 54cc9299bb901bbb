"""Leases and views, and nothing left over: tasks, descriptors, threads, memory."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from typing import TYPE_CHECKING

import torch

from pipelined.rank.health import resident_bytes
from pipelined.testing.links import Links
from pipelined.testing.tools import header, pattern, same
from pipelined.testing.world import World, peer
from pipelined.transport import Lane

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipelined.transport import Received

__all__ = [
    "check_a_lease_is_written_in_place",
    "check_leases_never_sent_come_back",
    "check_nothing_leaks",
    "check_views_released_late_bound_the_sender",
    "check_views_released_twice_count_once",
]

_WARM_UP_ROUNDS = 3
_SLACK_MIB = 96
"""What memory may grow by in rounds that pass a few kilobytes: arenas and caches that fill, never a leak of buffers."""


async def check_a_lease_is_written_in_place(world: World) -> None:
    """Leases of several shapes and dtypes are written, sent and arrive, whatever is leased and written next."""
    near, far = await world.tensor_pair(window=4)
    step = 0
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        for shape in ((), (0,), (5,), (33, 70), (1024, 640)):
            lease = near.lease(shape, dtype)
            fits = lease.shape == shape and lease.dtype == dtype and lease.is_contiguous()
            world.expect(fits, f"a lease of {shape} {dtype} is {lease.shape} {lease.dtype}", "as asked, contiguous")
            lease.copy_(torch.full(shape, 3 + step % 4, dtype=dtype))
            expected = lease.clone()
            transfer = near.post_send(lease, header(step))
            del lease  # posting it gave the memory away
            received = await world.receive(far, step)
            await world.settle(5)
            near.lease(shape, dtype).zero_()
            world.expect(
                same(received.tensor, expected), f"a lease of {shape} {dtype} came changed", "what was written"
            )
            received.release()
            await world.within(transfer, "the send of a lease, received and released,")
            step += 1
            while near.credits() == 0:
                await world.within(near.ready(), "ready() after all views were released")


async def check_leases_never_sent_come_back(world: World) -> None:
    """Thousands of MiB are leased and dropped, some from another thread; sending still works."""
    near, far = await world.tensor_pair(window=4)

    def take() -> None:
        for _ in range(200):
            near.lease((1 << 20,), torch.uint8)[0] = 1

    take()
    await asyncio.to_thread(take)
    gc.collect()
    await world.settle(20, 0.02)
    held = [near.lease((1 << 20,), torch.uint8) for _ in range(64)]
    for step in range(8):
        lease = near.lease((1 << 20,), torch.uint8)
        lease.copy_(pattern(step, 1 << 20))
        while near.credits() == 0:
            await world.within(near.ready(), "ready() with leases held back")
        near.post_send(lease, header(step))
        del lease
        received = await world.receive(far, step)
        world.expect(same(received.tensor, pattern(step, 1 << 20)), f"lease {step} came changed", "what was written")
        received.release()
    del held


async def check_views_released_late_bound_the_sender(world: World) -> None:
    """Views that nobody releases hold the sender at its window; late, in any order, they give the credits back."""
    near, far = await world.tensor_pair(window=4)
    held: list[Received] = []
    for step in range(4):
        await world.post(near, pattern(step, 70_000), step)
        held.append(await world.receive(far, step))
    await world.settle(20, 0.03)
    world.expect(near.credits() == 0, f"{near.credits()} credits with 4 views of a window of 4 held", "0")
    for step, received in enumerate(held):
        world.expect(same(received.tensor, pattern(step, 70_000)), f"view {step} changed while held", "its data")
    for received in (held[2], held[0], held[3], held[1]):
        received.release()
    await world.within(near.ready(), "ready() after all views were released")
    await _until_credits(world, 4, near.credits)
    left, right = await world.pair(window=2)
    for step in range(2):
        await world.post(left.tensors(peer(1), Lane.HIDDEN), pattern(step, 70_000), step)
        held.append(await world.receive(right.tensors(peer(0), Lane.HIDDEN), step))
    await world.within(left.aclose(), "aclose while the peer holds views")
    await world.within(right.aclose(), "aclose with views held")
    for received in held[4:]:
        received.release()


async def check_views_released_twice_count_once(world: World) -> None:
    """`release` twice gives one credit, and does not give away the memory of a later tensor."""
    near, far = await world.tensor_pair(window=3)
    for step in range(0, 6, 2):
        await world.post(near, pattern(step, 50_000), step)
        first = await world.receive(far, step)
        first.release()
        await _until_credits(world, 3, near.credits)
        await world.post(near, pattern(step + 1, 50_000), step + 1)
        second = await world.receive(far, step + 1)
        first.release()
        await world.settle(20, 0.02)
        world.expect(near.credits() <= 2, f"{near.credits()} credits with 1 of 3 in flight", "2")
        world.expect(same(second.tensor, pattern(step + 1, 50_000)), "a view changed on another's release", "its data")
        second.release()
        second.release()
        await _until_credits(world, 3, near.credits)


async def _until_credits(world: World, count: int, credits: Callable[[], int]) -> None:
    await world.until(lambda: credits() == count, 5.0)
    await world.settle(10)
    world.expect(credits() == count, f"{credits()} credits once everything was released", f"the window, {count}")


def _descriptors() -> int | None:
    """How many the process has open; None where that can't be told."""
    for directory in ("/proc/self/fd", "/dev/fd"):
        if os.path.isdir(directory):
            return len(os.listdir(directory))
    return None


async def _held() -> dict[str, int]:
    """What the process holds now: tasks of this loop, threads, open descriptors."""
    gc.collect()
    descriptors = await asyncio.to_thread(_descriptors)  # reads a directory: not for the loop's thread
    held = {"tasks": len(asyncio.all_tasks()), "threads": threading.active_count()}
    return held if descriptors is None else held | {"descriptors": descriptors}


async def check_nothing_leaks(world: World) -> None:
    """100 rounds of open, pass, close or abort leave no task, descriptor, thread or memory that the first ones did not.

    Memory is held against a bound of its own, since allocators keep some.
    """
    rounds = 20 if world.quick else 100
    before: dict[str, int] = {}
    before_bytes = 0
    for number in range(rounds + _WARM_UP_ROUNDS):
        if number == _WARM_UP_ROUNDS:
            before, before_bytes = await _held(), resident_bytes()
        await _round(world, number)
    await world.settle(20, 0.05)
    after, now_bytes = await _held(), resident_bytes()
    if before_bytes:
        grown_mib = (now_bytes - before_bytes) >> 20
        right = f"at most {_SLACK_MIB}"
        world.expect(grown_mib <= _SLACK_MIB, f"{grown_mib} MiB more after {rounds} rounds of open and close", right)
    for what, count in before.items():
        grown = after[what] - count
        world.expect(grown <= rounds // 5, f"{grown} {what} more after {rounds} rounds of open and close", "none")


async def _round(world: World, number: int) -> None:
    left, right = await world.pair()
    near, far = Links(left, peer(1)), Links(right, peer(0))
    for lane, link in near.tensors.items():
        link.post_send(pattern(number, 1_000), header(0))
        link.post_send(pattern(number, 1_000), header(1))
        (await world.receive(far.tensors[lane], 0)).release()
    for lane, messages in near.messages.items():
        messages.send_nowait(b"x")
        await world.within(far.messages[lane].receive(), "a message")
    if number % 2:
        left.abort()
        right.abort()
    await world.within(left.aclose(), "aclose")
    await world.within(right.aclose(), "aclose")
    await world.close()
