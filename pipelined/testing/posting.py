"""R1, R2, R3: posting never waits, buffers are kept, done means done."""

from __future__ import annotations

import asyncio
import gc
import time
from typing import TYPE_CHECKING

import torch

from pipelined.testing.tools import ManualEvent, header, pattern, same
from pipelined.testing.world import TENSOR_LANES, World, peer
from pipelined.transport import Lane

if TYPE_CHECKING:
    from pipelined.transport import Received, Transfer

__all__ = [
    "check_a_dropped_buffer_is_kept",
    "check_a_landing_waits_for_its_event",
    "check_a_send_waits_for_its_event",
    "check_done_means_readable",
    "check_done_means_reusable",
    "check_posting_returns_with_a_silent_peer",
    "check_ring_where_all_send_first",
]

_AT_ONCE_S = 0.02  # a blocked call takes far longer, a busy machine rarely this long in most of several calls


async def check_ring_where_all_send_first(world: World) -> None:
    """Every rank posts its send before any rank posts a receive."""
    ends = await world.open()
    size, size_bytes = len(ends), (1 << 20) if world.quick else (8 << 20)
    sends = [
        end.tensors(peer((rank + 1) % size), Lane.HIDDEN).post_send(pattern(rank, size_bytes), header(0))
        for rank, end in enumerate(ends)
    ]
    receives = [end.tensors(peer((rank - 1) % size), Lane.HIDDEN).post_recv((0, 0)) for rank, end in enumerate(ends)]
    for rank, transfer in enumerate(receives):
        received = await world.within(transfer, f"the receive of rank {rank} in a ring where all send first")
        right = same(received.tensor, pattern((rank - 1) % size, size_bytes))
        world.expect(right, f"rank {rank} received other bytes than its neighbour sent", "the bytes that were sent")
        received.release()
    for rank, transfer_out in enumerate(sends):
        await world.within(transfer_out, f"the send of rank {rank}, whose tensor was received,")


async def check_posting_returns_with_a_silent_peer(world: World) -> None:
    """post_send and post_recv return at once though the peer neither receives nor sends."""
    near, _ = await world.tensor_pair(window=8)
    took: dict[str, list[float]] = {"post_send": [], "post_recv": []}
    tensor = pattern(1, (1 << 20) if world.quick else (8 << 20))
    for step in range(8):
        start_s = time.perf_counter()
        near.post_send(tensor, header(step))
        middle_s = time.perf_counter()
        near.post_recv((step, 0))
        took["post_send"].append(middle_s - start_s)
        took["post_recv"].append(time.perf_counter() - middle_s)
        await world.settle(2)
    for call, times in took.items():
        middle = sorted(times)[len(times) // 2]
        world.expect(
            middle < _AT_ONCE_S, f"{call} took {middle * 1e3:.0f} ms (median of 8) with a silent peer", "it to return"
        )


async def check_a_dropped_buffer_is_kept(world: World) -> None:
    """The sender drops its only reference and allocates again before the bytes are read."""
    near, far = await world.tensor_pair()
    event, size_bytes = ManualEvent(), 1 << 18
    for step in range(4):
        near.post_send(pattern(step, size_bytes), header(step), after=event)
    gc.collect()
    junk = [torch.full((size_bytes,), 255, dtype=torch.uint8) for _ in range(8)]
    event.fire()
    for step in range(4):
        received = await world.receive(far, step)
        kept = same(received.tensor, pattern(step, size_bytes))
        world.expect(kept, f"tensor {step}, dropped by its sender while under way, arrived changed", "what was posted")
        received.release()
    del junk
    await _dropped_target(world)


async def _dropped_target(world: World) -> None:
    near, far = await world.tensor_pair()
    transfer = far.post_recv((0, 0), torch.zeros(1 << 18, dtype=torch.uint8))
    gc.collect()
    junk = [torch.full((1 << 18,), 255, dtype=torch.uint8) for _ in range(8)]
    near.post_send(pattern(3, 1 << 18), header(0))
    received = await world.within(transfer, "a receive whose buffer was dropped")
    world.expect(same(received.tensor, pattern(3, 1 << 18)), "a dropped target buffer was reused", "it to be kept")
    del junk


async def check_done_means_reusable(world: World) -> None:
    """Every buffer is overwritten the moment its send is done; no receiver may see that."""
    left, right = await world.pair(window=16)
    sizes = [1, 4096, 1 << 20, (8 << 20) + 3] if world.quick else [1, 4096, 1 << 20, (8 << 20) + 3, 64 << 20]
    for lane in TENSOR_LANES:
        near, far = left.tensors(peer(1), lane), right.tensors(peer(0), lane)
        transfers: list[Transfer[None]] = []
        for step, size_bytes in enumerate(sizes):
            tensor = pattern(step, size_bytes)
            transfers.append(near.post_send(tensor, header(step)))
            transfers[-1].add_done_callback(lambda _, tensor=tensor: tensor.fill_(255))  # type: ignore[misc]
        # Held back for a while, so that what is read from the sender's memory only now shows.
        await world.settle(50, 0.02)
        for step, size_bytes in enumerate(sizes):
            received = await world.receive(far, step)
            await world.settle(5)
            intact = same(received.tensor, pattern(step, size_bytes))
            world.expect(
                intact, f"{size_bytes} bytes overwritten after their send was done arrived overwritten", "as posted"
            )
            received.release()
        for transfer in transfers:
            await world.within(transfer, "a send whose tensor was received and released")


async def check_done_means_readable(world: World) -> None:
    """A received view holds its data until it is released, whatever is sent meanwhile."""
    near, far = await world.tensor_pair(window=8)
    held: list[Received] = []
    for step in range(4):
        await world.post(near, pattern(step, 100_000), step)
        target = torch.zeros(100_000, dtype=torch.uint8) if step % 2 else None
        held.append(await world.receive(far, step, into=target))
    for step in range(4, 12):
        await world.post(near, pattern(step, 100_000), step)
        (await world.receive(far, step)).release()
    for step, received in enumerate(held):
        intact = same(received.tensor, pattern(step, 100_000))
        world.expect(intact, f"view {step} changed while it was held", "its data until release()")
        received.release()


async def check_a_send_waits_for_its_event(world: World) -> None:
    """The bytes are read no earlier than `after` fires, and later sends wait behind."""
    near, far = await world.tensor_pair()
    event, tensor = ManualEvent(), torch.zeros(5_000, dtype=torch.uint8)
    first = near.post_send(tensor, header(0), after=event)
    second = near.post_send(pattern(9, 5_000), header(1))
    receives = [far.post_recv((0, 0)), far.post_recv((1, 0))]
    await world.settle(50, 0.05)
    early = [name for name, transfer in _named(first, second, *receives).items() if transfer.done()]
    world.expect(not early, f"done before the event of the first send fired: {', '.join(early)}", "all to wait")
    tensor.copy_(pattern(8, 5_000))
    event.fire()
    for seed, transfer in zip((8, 9), receives, strict=True):
        received = await world.within(transfer, "a receive after the sender's event fired")
        world.expect(
            same(received.tensor, pattern(seed, 5_000)), "bytes were read before the event fired", "those at the event"
        )
        received.release()


async def check_a_landing_waits_for_its_event(world: World) -> None:
    """A receive into a buffer writes there no earlier than its `after` fires."""
    near, far = await world.tensor_pair()
    event, target = ManualEvent(), torch.full((5_000,), 7, dtype=torch.uint8)
    transfer = far.post_recv((0, 0), target, after=event)
    near.post_send(pattern(1, 5_000), header(0))
    await world.settle(50, 0.05)
    world.expect(not transfer.done(), "a receive was done before its event fired", "it to wait")
    world.expect(bool((target == 7).all()), "a buffer was written before the receive's event fired", "it to wait")
    event.fire()
    received = await world.within(transfer, "a receive whose event has fired")
    world.expect(same(target, pattern(1, 5_000)), "the buffer holds other bytes than were sent", "the bytes sent")
    received.release()
    await asyncio.sleep(0)


def _named(*transfers: Transfer[None] | Transfer[Received]) -> dict[str, Transfer[None] | Transfer[Received]]:
    return {f"{number}: {transfer!r}": transfer for number, transfer in enumerate(transfers)}
