"""The lanes against the model {lane: deque}, with a transport that delivers when it is told to."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pipelined.errors import ClosedError, EndOfLane, LaneMismatch, PeerLost, ProtocolError, Truncated, WouldBlock
from pipelined.messages import Peer, TensorHeader
from pipelined.transport import Lane
from pipelined.transport.lanes import MessageLane, OwnedParcel, TensorLane

if TYPE_CHECKING:
    from collections.abc import Callable

A, B = Peer("t", 0), Peer("t", 1)


class Sender(TensorLane):
    """Keeps what leaves in `wire`, and finishes a send when `finish` is called."""

    def __init__(self, window: int = 3) -> None:
        super().__init__(A, B, Lane.HIDDEN, 0, window)
        self.wire: deque[tuple[TensorHeader, torch.Tensor]] = deque()
        self.unfinished: deque[Callable[[], None]] = deque()
        self.instant = False

    def transmit(self, header: TensorHeader, tensor: torch.Tensor, sent: Callable[[], None]) -> None:
        self.wire.append((header, tensor.clone().reshape(-1).view(torch.uint8)))
        if self.instant:
            sent()
        else:
            self.unfinished.append(sent)


class Receiver(TensorLane):
    def __init__(self) -> None:
        super().__init__(B, A, Lane.HIDDEN, 0, 3)

    def transmit(self, header: TensorHeader, tensor: torch.Tensor, sent: Callable[[], None]) -> None:
        raise NotImplementedError


class Machine(RuleBasedStateMachine):
    """One direction of a lane; the wire moves only in `deliver`."""

    WINDOW = 3

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()

    def run(self, action: Callable[[], Any]) -> Any:
        async def once() -> Any:
            result = action()
            await asyncio.sleep(0)
            return result

        return self.loop.run_until_complete(once())

    @initialize(instant=st.booleans())
    def begin(self, instant: bool) -> None:
        self.sender, self.receiver = Sender(self.WINDOW), Receiver()
        self.sender.instant = instant
        self.posted: deque[int] = deque()  # sent, not yet received
        self.expecting: deque[tuple[int, Any]] = deque()
        self.held: list[Any] = []
        self.buffers: dict[int, torch.Tensor] = {}
        self.sends: list[Any] = []
        self.number = self.next_recv = 0
        self.over: type[Exception] | None = None

    @rule()
    def post_send(self) -> None:
        tensor, header = torch.full((2,), self.number), TensorHeader(0, self.number)
        if self.over:
            with pytest.raises(self.over):
                self.run(lambda: self.sender.post_send(tensor, header))
        elif len(self.posted) + len(self.held) >= self.WINDOW:
            with pytest.raises(WouldBlock):
                self.run(lambda: self.sender.post_send(tensor, header))
        else:
            self.sends.append(self.run(lambda: self.sender.post_send(tensor, header)))
            self.posted.append(self.number)
            self.number += 1

    @precondition(lambda self: self.sender.unfinished)
    @rule()
    def finish(self) -> None:
        self.run(self.sender.unfinished.popleft())

    @precondition(lambda self: self.sender.wire and not self.over)
    @rule()
    def deliver(self) -> None:
        header, raw = self.sender.wire.popleft()
        self.run(lambda: self.receiver.arrive(OwnedParcel(header, raw, self.sender.grant)))
        self.settle()

    @rule(wrong=st.booleans(), into=st.booleans())
    def post_recv(self, wrong: bool, into: bool) -> None:
        buffer = torch.zeros(3, dtype=torch.int64) if into else None
        seq = 1000 if wrong else self.next_recv
        transfer = self.run(lambda: self.receiver.post_recv((seq, 0), buffer))
        if self.over:
            with pytest.raises(self.over):
                transfer.result()
            return
        if buffer is not None:
            self.buffers[buffer.data_ptr()] = buffer
        self.expecting.append((seq, transfer))
        if not wrong:
            self.next_recv += 1
        self.settle()

    @precondition(lambda self: self.expecting and not self.expecting[-1][1].done())
    @rule()
    def cancel_the_last(self) -> None:
        seq, transfer = self.expecting.pop()
        assert self.run(transfer.cancel)
        if seq != 1000:
            self.next_recv -= 1

    def settle(self) -> None:
        while self.expecting and self.expecting[0][1].done():
            seq, transfer = self.expecting.popleft()
            if seq == 1000:
                assert isinstance(transfer.error, LaneMismatch)
                continue
            assert self.posted.popleft() == seq
            received = transfer.result()
            assert received.tensor.tolist() == [seq, seq]
            if received.tensor.data_ptr() not in self.buffers:  # else it was copied, and its credit is back
                self.held.append(received)

    @precondition(lambda self: self.held)
    @rule()
    def release(self) -> None:
        received = self.held.pop(0)
        self.run(received.release)
        self.run(received.release)

    @rule(how=st.sampled_from(["lose", "end", "close_local"]))
    def finish_the_lane(self, how: str) -> None:
        if self.over:
            return
        errors = {"lose": PeerLost, "end": EndOfLane, "close_local": ClosedError}
        self.over = errors[how]
        while self.sender.wire and how == "end":  # the contract: everything sent has been handed over before
            header, raw = self.sender.wire.popleft()
            self.run(lambda h=header, r=raw: self.receiver.arrive(OwnedParcel(h, r, self.sender.grant)))
        self.settle()
        for lane in (self.sender, self.receiver):
            self.run(lambda lane=lane: getattr(lane, how)(*(["it is gone"] if how == "lose" else [])))
        for _, transfer in self.expecting:
            assert isinstance(transfer.error, errors[how])
        self.expecting.clear()
        assert all(send.done() for send in self.sends)
        if how == "end":
            while self.receiver._arrived:
                transfer = self.run(lambda: self.receiver.post_recv((self.next_recv, 0)))
                assert transfer.result().tensor[0] == self.next_recv
                self.next_recv += 1

    @invariant()
    def credits_add_up(self) -> None:
        if hasattr(self, "sender") and not self.over:
            in_hand = len(self.held) + sum(1 for seq, t in self.expecting if t.done() and seq != 1000)
            assert self.sender.credits() == self.WINDOW - len(self.posted) - in_hand

    def teardown(self) -> None:
        self.loop.close()


TestLanes = Machine.TestCase
TestLanes.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


class Messages(MessageLane):
    def __init__(self) -> None:
        super().__init__(A, B, Lane.RESULTS, 0, 2, 10)
        self.sent: list[bytes] = []
        self.credits_owed = 0

    def transmit(self, frame: bytes) -> None:
        self.sent.append(frame)

    def consumed(self) -> None:
        self.credits_owed += 1


async def test_a_sender_waits_for_credit_and_keeps_its_place() -> None:
    lane = Messages()
    await lane.send(b"0")
    await lane.send(b"1")
    waiting = asyncio.ensure_future(lane.send(b"2"))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert lane.sent == [b"0", b"1"]  # cancelled: not at all
    waiting = asyncio.ensure_future(lane.send(b"3"))
    await asyncio.sleep(0)
    lane.grant()
    await waiting
    assert lane.sent[-1] == b"3"
    assert lane.credits() == 0
    waiting = asyncio.ensure_future(lane.send(b"4"))
    await asyncio.sleep(0)
    lane.lose("test")
    with pytest.raises(PeerLost):
        await waiting


async def test_what_arrived_before_the_end_is_read_and_nothing_after_a_loss() -> None:
    lane = Messages()
    lane.arrive(b"x")
    lane.end()
    lane.lose("after its bye, this means nothing")
    assert await lane.receive() == b"x"
    with pytest.raises(EndOfLane):
        await lane.receive()
    lane = Messages()
    lane.arrive(b"x")
    lane.lose("test")
    with pytest.raises(PeerLost):
        await lane.receive()
    lane.close_local()
    with pytest.raises(ClosedError):
        await lane.receive()


async def test_a_header_that_does_not_fit_its_data() -> None:
    lane = Receiver()
    for header in (
        TensorHeader(0, 0, shape=(4,), dtype="float32"),
        TensorHeader(0, 0, shape=(-16,), dtype="uint8"),
        TensorHeader(0, 0, shape=(16,), dtype="nn"),
    ):
        with pytest.raises(ProtocolError):
            lane.arrive(OwnedParcel(header, torch.zeros(15, dtype=torch.uint8), lambda: None))


async def test_a_buffer_that_is_not_aligned() -> None:
    lane = Receiver()
    header = TensorHeader(0, 0, shape=(2,), dtype="float32")
    lane.arrive(OwnedParcel(header, torch.zeros(8, dtype=torch.uint8), lambda: None))
    with pytest.raises(Truncated, match="not aligned"):
        await lane.post_recv((0, 0), torch.zeros(20, dtype=torch.uint8)[1:])


async def test_a_callback_that_raises_hurts_only_itself() -> None:
    reported: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context["exception"]))
    lane, called = Sender(), []
    transfer = lane.post_send(torch.ones(1), TensorHeader(0, 0))

    def fail(_: object) -> None:
        raise KeyError("mine")

    transfer.add_done_callback(fail)
    transfer.add_done_callback(called.append)
    following = lane.post_send(torch.ones(1), TensorHeader(0, 1))
    lane.unfinished.popleft()()
    lane.unfinished.popleft()()
    assert called == [transfer]
    assert isinstance(reported[0], KeyError)
    assert following.done()


async def test_closing_lets_leave_what_was_posted() -> None:
    lane = Sender()
    transfers = [lane.post_send(torch.ones(1), TensorHeader(0, n)) for n in range(2)]
    receive = lane.post_recv((0, 0))
    lane.begin_close()
    with pytest.raises(ClosedError):
        await receive
    with pytest.raises(ClosedError):
        lane.post_send(torch.ones(1), TensorHeader(0, 2))
    flushing = asyncio.ensure_future(lane.wait_flushed())
    await asyncio.sleep(0)
    assert not flushing.done()
    lane.unfinished.popleft()()
    lane.unfinished.popleft()()
    await flushing
    assert all(transfer.error is None and transfer.done() for transfer in transfers)
    assert len(lane.wire) == 2


async def test_a_loss_while_flushing_ends_the_flush() -> None:
    lane = Sender()
    transfer = lane.post_send(torch.ones(1), TensorHeader(0, 0))
    lane.begin_close()
    flushing = asyncio.ensure_future(lane.wait_flushed())
    await asyncio.sleep(0)
    lane.lose("test")
    await flushing
    assert isinstance(transfer.error, PeerLost)
    lane.unfinished.popleft()()  # too late, and harmless
