"""R4, R5, R6: first in first out on each lane, each tensor for the step that it names, every size and dtype."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import torch

from pipelined.errors import LaneMismatch, Truncated
from pipelined.testing.tools import ManualEvent, header, pattern, same
from pipelined.testing.world import MESSAGE_LANES, TENSOR_LANES, World, peer
from pipelined.transport import Lane

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from pipelined.transport import MessageLink, TensorLink

__all__ = [
    "check_a_big_tensor_arrives",
    "check_a_stuck_lane_holds_up_no_other",
    "check_a_stuck_message_lane_holds_up_no_other",
    "check_a_wrong_seq_is_a_lane_mismatch",
    "check_all_dtypes_arrive",
    "check_messages_in_order_under_random_sizes",
    "check_non_contiguous_arrive",
    "check_short_and_empty_are_legal",
    "check_tensors_in_order_under_random_sizes",
    "check_too_long_is_truncated",
]


def _sizes(seed: int, count: int, most: int) -> list[int]:
    draw = random.Random(seed)
    return [int(most ** draw.random()) - draw.randrange(2) for _ in range(count)]


async def _together(*work: Coroutine[object, object, None]) -> None:
    async with asyncio.TaskGroup() as group:
        for coroutine in work:
            group.create_task(coroutine)


async def check_tensors_in_order_under_random_sizes(world: World) -> None:
    """Thousands of tensors of random sizes over several lanes, both ways, received with and without a buffer."""
    left, right = await world.pair(window=8)
    count, work = (500 if world.quick else 2500), []
    for seed, lane in enumerate(TENSOR_LANES):
        for near, far, way in ((left, right, 0), (right, left, 1)):
            sizes = _sizes(2 * seed + way, count, 60_000)
            work.append(_send_tensors(world, near.tensors(far.me, lane), sizes))
            work.append(_receive_tensors(world, far.tensors(near.me, lane), sizes, lane))
    await _together(*work)


async def _send_tensors(world: World, link: TensorLink, sizes: list[int]) -> None:
    for step, size_bytes in enumerate(sizes):
        await world.post(link, pattern(step, size_bytes), step)


async def _receive_tensors(world: World, link: TensorLink, sizes: list[int], lane: Lane) -> None:
    draw = random.Random(len(sizes))
    for step, size_bytes in enumerate(sizes):
        into = torch.empty(size_bytes + draw.randrange(9), dtype=torch.uint8) if draw.random() < 0.3 else None
        received = await world.receive(link, step, into=into)
        right = same(received.tensor, pattern(step, size_bytes))
        world.expect(right, f"tensor {step} on {lane.name} is not the {step}th sent there", "the order of posting")
        received.release()


async def check_messages_in_order_under_random_sizes(world: World) -> None:
    """Thousands of messages of random sizes over several lanes, both ways."""
    left, right = await world.pair(window=16)
    count, work = (350 if world.quick else 1700), []
    for seed, lane in enumerate(MESSAGE_LANES):
        for near, far, way in ((left, right, 0), (right, left, 1)):
            sizes = _sizes(2 * seed + way, count, 20_000)
            work.append(_send_frames(world, near.messages(far.me, lane), sizes))
            work.append(_receive_frames(world, far.messages(near.me, lane), sizes, lane))
    await _together(*work)


def _frame(number: int, size_bytes: int) -> bytes:
    return (number.to_bytes(4, "little") * (size_bytes // 4 + 1))[:size_bytes]


async def _send_frames(world: World, link: MessageLink, sizes: list[int]) -> None:
    for number, size_bytes in enumerate(sizes):
        await world.within(link.send(_frame(number, size_bytes)), "a send whose peer receives")


async def _receive_frames(world: World, link: MessageLink, sizes: list[int], lane: Lane) -> None:
    for number, size_bytes in enumerate(sizes):
        frame = await world.within(link.receive(), "a receive whose peer sends")
        right = bytes(frame) == _frame(number, size_bytes)
        world.expect(right, f"message {number} on {lane.name} is not the {number}th sent there", "the order of sending")


async def check_a_stuck_lane_holds_up_no_other(world: World) -> None:
    """HIDDEN is full, or waits for an event; KV and the messages still pass, to and fro."""
    for why in ("full", "waiting for an event"):
        left, right = await world.pair(window=4)
        stuck, size_bytes = left.tensors(peer(1), Lane.HIDDEN), 1 << 20
        if why == "full":
            world.fill(stuck, pattern(1, size_bytes))
        else:
            stuck.post_send(pattern(1, size_bytes), header(0), after=ManualEvent())
            stuck.post_send(pattern(1, size_bytes), header(1))
        for step in range(6):
            for near, far in ((left, right), (right, left)):
                await world.post(near.tensors(far.me, Lane.KV), pattern(step, 10_000), step)
                received = await world.within(
                    far.tensors(near.me, Lane.KV).post_recv((step, 0)), f"KV, while HIDDEN is {why},"
                )
                received.release()
        if world.capabilities.messages:
            await _pass_messages(world, left.messages(peer(1), Lane.RESULTS), right.messages(peer(0), Lane.RESULTS))


async def check_a_stuck_message_lane_holds_up_no_other(world: World) -> None:
    """SCHEDULE is full since nobody receives; RESULTS and HEALTH still pass, to and fro."""
    left, right = await world.pair(window=4)
    world.fill_messages(left.messages(peer(1), Lane.SCHEDULE), bytes(50_000))
    for lane in (Lane.RESULTS, Lane.HEALTH):
        await _pass_messages(world, left.messages(peer(1), lane), right.messages(peer(0), lane))
        await _pass_messages(world, right.messages(peer(0), lane), left.messages(peer(1), lane))


async def _pass_messages(world: World, near: MessageLink, far: MessageLink) -> None:
    for number in range(6):
        await world.within(near.send(b"%d" % number), "a send, while another lane is stuck,")
        frame = await world.within(far.receive(), "a receive, while another lane is stuck,")
        world.expect(bytes(frame) == b"%d" % number, f"{frame!r} arrived", f"{b'%d' % number!r}")


async def check_a_wrong_seq_is_a_lane_mismatch(world: World) -> None:
    """A receive for another step or index fails, names both, and the tensor stays for the next one."""
    near, far = await world.tensor_pair()
    tensor = pattern(4, 3_000)
    near.post_send(tensor, header(4, 1))
    for wrong in ((5, 1), (4, 0), (3, 1)):
        error = await world.raises(LaneMismatch, far.post_recv(wrong), f"a receive for {wrong} of a tensor for (4, 1)")
        named = all(str(number) in str(error) for number in (*wrong, 4, 1))
        world.expect(named, f"the error says {str(error)!r}", "what was expected and what came, both named")
    received = await world.receive(far, 4, 1)
    world.expect(same(received.tensor, tensor), "after mismatches the tensor came changed", "the tensor as sent")
    received.release()
    early, right = far.post_recv((7, 0)), far.post_recv((6, 0))
    near.post_send(tensor, header(6))
    await world.raises(LaneMismatch, early, "a receive posted ahead for another step")
    (await world.within(right, "the receive for the right step behind a wrong one")).release()


async def check_short_and_empty_are_legal(world: World) -> None:
    """Tensors shorter than the buffer, empty ones and scalars arrive with their own shape."""
    near, far = await world.tensor_pair()
    shapes: list[tuple[int, ...]] = [(), (0,), (3, 0, 2), (1,), (2, 3), (1, 1, 1, 5)]
    step = 0
    for shape in shapes:
        for into in (None, torch.full((64,), 9.0)):
            tensor = torch.arange(max(1, _count(shape)), dtype=torch.float32)[: _count(shape)].reshape(shape)
            await world.post(near, tensor, step)
            received = await world.receive(far, step, into=into)
            right = same(received.tensor, tensor) and received.header.shape == shape
            world.expect(right, f"{list(shape)} arrived as {list(received.tensor.shape)}", "its own shape and values")
            beyond = into is None or bool((into[_count(shape) :] == 9).all())
            world.expect(beyond, f"the buffer was written beyond a tensor of shape {list(shape)}", "only its part")
            received.release()
            step += 1


def _count(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())


async def check_too_long_is_truncated(world: World) -> None:
    """A tensor larger than the buffer fails that receive, touches nothing, and stays for the next one."""
    near, far = await world.tensor_pair()
    tensor, small = pattern(2, 1_000), torch.full((999,), 7, dtype=torch.uint8)
    near.post_send(tensor, header(0))
    await world.raises(Truncated, far.post_recv((0, 0), small), "a receive of 1,000 bytes into 999")
    world.expect(bool((small == 7).all()), "the buffer that was too small was written", "it to be left alone")
    received = await world.receive(far, 0, into=torch.empty(1_000, dtype=torch.uint8))
    world.expect(same(received.tensor, tensor), "the tensor came changed", "the tensor, still there")
    received.release()


async def check_all_dtypes_arrive(world: World) -> None:
    """Every dtype arrives as it was, bf16 and fp8 among them."""
    near, far = await world.tensor_pair()
    dtypes = [
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.complex64),
    ]
    step = 0
    for dtype in dtypes:
        tensor = pattern(3, 24 * 16).view(dtype).reshape(3, -1)
        for into in (None, torch.empty_like(tensor)):
            await world.post(near, tensor, step)
            received = await world.receive(far, step, into=into)
            world.expect(same(received.tensor, tensor), f"{dtype} arrived as {received.tensor.dtype}", "every bit")
            received.release()
            step += 1
    await world.post(near, torch.tensor([True, False, True]), step)
    received = await world.receive(far, step)
    world.expect(received.tensor.tolist() == [True, False, True], "bools arrived changed", "every value")
    received.release()


async def check_non_contiguous_arrive(world: World) -> None:
    """Transposed, strided and expanded tensors arrive with their values."""
    near, far = await world.tensor_pair()
    base = torch.arange(6_000, dtype=torch.float32).reshape(60, 100)
    views = [base.t(), base[::2, 3:50:4], base[:, :1].expand(60, 7), base[5]]
    for step, view in enumerate(views):
        await world.post(near, view, step)
        received = await world.receive(far, step)
        world.expect(same(received.tensor, view), f"a view with strides {view.stride()} came changed", "its values")
        received.release()


async def check_a_big_tensor_arrives(world: World) -> None:
    """64 MiB arrive whole, beside small ones on the same lane."""
    near, far = await world.tensor_pair()
    big = pattern(6, 64 << 20)
    transfers = [near.post_send(tensor, header(step)) for step, tensor in enumerate((pattern(0, 10), big, big[:77]))]
    for step, tensor in enumerate((pattern(0, 10), big, big[:77])):
        received = await world.receive(far, step)
        world.expect(same(received.tensor, tensor), f"{tensor.numel()} bytes came changed", "every byte")
        received.release()
    for transfer in transfers:
        await world.within(transfer, "a send whose tensor was received and released")
