from __future__ import annotations

import gc
import itertools
import mmap
import os
import threading
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pipelined.errors import ProtocolError
from pipelined.transports.arena import Arena, Slot, map_segment, slot_bytes

LIMIT = 96 << 20
SIZES = st.sampled_from([0, 1, 4096, 5000, 65536, 70_000, 2_359_296, 9 << 20, 33 << 20])


@given(st.integers(0, 1 << 40))
def test_classes_are_pages_and_waste_at_most_a_quarter(size: int) -> None:
    capacity = slot_bytes(size)
    assert capacity >= size
    assert capacity % mmap.PAGESIZE == 0
    assert capacity <= max(4096, size + max(4096, size // 4))
    assert slot_bytes(capacity) == capacity


class Slots(RuleBasedStateMachine):
    """Sent slots and leases never overlap, within the limit, and all of it comes back."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(LIMIT, lambda: None)
        self.out: dict[int, tuple[Slot, int]] = {}
        self.leases: list[tuple[torch.Tensor, int]] = []
        self.sent_leases: list[torch.Tensor] = []
        self.count = 0

    @rule(size=SIZES)
    def allocate(self, size: int) -> None:
        slot = self.arena.allocate(size)
        if slot is not None:
            assert slot.capacity_bytes >= size
            self.out[slot.number] = (slot, size)

    @rule(size=SIZES)
    def lease(self, size: int) -> None:
        tensor = self.arena.lease((size,), torch.uint8)
        if tensor is None:
            return
        self.count += 1
        if size < 1 << 20:
            tensor.fill_(self.count % 251)
            self.leases.append((tensor, self.count % 251))

    @precondition(lambda self: self.leases)
    @rule(drop=st.booleans())
    def send_lease(self, drop: bool) -> None:
        tensor, mark = self.leases.pop(0)
        assert (tensor == mark).all()
        slot = self.arena.take_lease(tensor.data_ptr(), tensor.nbytes)
        assert slot is not None
        assert self.arena.take_lease(tensor.data_ptr(), tensor.nbytes) is None
        self.out[slot.number] = (slot, tensor.nbytes)
        if not drop:
            self.sent_leases.append(tensor)

    @precondition(lambda self: self.leases or self.sent_leases)
    @rule()
    def drop(self) -> None:
        (self.leases or self.sent_leases).pop()

    @precondition(lambda self: self.out)
    @rule()
    def free(self) -> None:
        number = next(iter(self.out))
        del self.out[number]
        self.arena.freed(number)
        with pytest.raises(ProtocolError):
            self.arena.freed(number)

    @invariant()
    def apart(self) -> None:
        taken = [(slot.address, slot.address + size) for slot, size in self.out.values()]
        sent = {start for start, _ in taken}
        taken += [(t.data_ptr(), t.data_ptr() + t.nbytes) for t, _ in self.leases]
        taken += [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in self.sent_leases if t.data_ptr() not in sent]
        taken.sort()
        assert all(left[1] <= right[0] for left, right in itertools.pairwise(taken))
        assert self.arena.size_bytes <= LIMIT

    def teardown(self) -> None:
        self.leases.clear()
        self.sent_leases.clear()
        for number in list(self.out):
            self.arena.freed(number)
        assert self.arena.allocate(33 << 20) is not None  # whatever happened, all of it is to be had again
        assert self.arena.allocate(33 << 20) is not None


TestSlots = Slots.TestCase
TestSlots.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def test_leases_from_many_threads() -> None:
    arena, wrong = Arena(LIMIT, lambda: None), []

    def work(mark: int) -> None:
        for size in range(100, 600):
            tensor = arena.lease((size,), torch.uint8)
            assert tensor is not None
            tensor.fill_(mark)
            if not (tensor == mark).all():
                wrong.append(size)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    gc.collect()
    slot = arena.allocate(1)
    assert slot is not None
    assert slot.segment.used_bytes < 40 * 4096


@pytest.mark.parametrize("what", ["unsealed", "short", "no memfd"])
def test_segments_that_could_be_taken_away_are_refused(what: str, tmp_path: Any) -> None:
    if what == "no memfd":
        fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
        os.ftruncate(fd, 8192)
    elif what == "unsealed":
        fd = os.memfd_create("x", os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, 8192)
    else:
        arena = Arena(LIMIT, lambda: None)
        slot = arena.allocate(1)
        assert slot is not None
        fd = slot.segment.take_fd()
    with pytest.raises(ProtocolError, match="not a sealed segment"):
        map_segment(fd, 8192 if what != "short" else 1 << 40)
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)
