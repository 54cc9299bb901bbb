from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelined.errors import CapacityError
from pipelined.kv import PageAllocator, runs


def test_runs_are_maximal_and_ordered() -> None:
    assert list(runs([])) == []
    assert list(runs([3, 4, 5, 9, 2, 3, 1])) == [(3, 3), (9, 1), (2, 2), (1, 1)]


def test_a_cache_without_pages_is_refused() -> None:
    with pytest.raises(CapacityError, match="0 pages"):
        PageAllocator(0)


def test_a_sequence_grows_in_place() -> None:
    allocator = PageAllocator(64)
    pages = allocator.take(3)
    for _ in range(5):
        pages += allocator.take(4, pages[-1])
    assert pages == list(range(23))


def test_two_sequences_that_grow_in_turn_stay_in_one_run_each() -> None:
    allocator = PageAllocator(256)
    tables = [allocator.take(4), allocator.take(4)]
    for _ in range(20):
        for table in tables:
            table += allocator.take(4, table[-1])
    assert [len(list(runs(table))) for table in tables] == [1, 1]


def test_eight_sequences_that_grow_in_turn_have_few_runs() -> None:
    allocator = PageAllocator(1024)
    tables = [allocator.take(2) for _ in range(8)]
    for _ in range(50):
        for table in tables:
            table += allocator.take(2, table[-1])
    assert max(len(list(runs(table))) for table in tables) <= 4


def test_misuse_is_an_assertion() -> None:
    allocator = PageAllocator(4)
    pages = allocator.take(2)
    with pytest.raises(AssertionError, match="3 pages asked for, 2 are free"):
        allocator.take(3)
    with pytest.raises(AssertionError, match="has no owner"):
        allocator.share([3 - page for page in pages if page == 0] or [3])
    allocator.drop(pages)
    with pytest.raises(AssertionError, match="has no owner"):
        allocator.drop(pages[:1])


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 60), st.integers(0, 2**32))
def test_against_a_counter_of_owners(capacity: int, seed: int) -> None:
    rng = random.Random(seed)
    allocator, owners, held = PageAllocator(capacity), Counter[int](), list[list[int]]()
    for _ in range(80):
        action = rng.random()
        if action < 0.5 and allocator.free_pages:
            after = rng.choice(held)[-1] if held and rng.random() < 0.7 else None
            pages = allocator.take(rng.randint(1, allocator.free_pages), after)
            assert not any(owners[page] for page in pages)
        elif action < 0.65 and held:
            pages = rng.choice(held)
            allocator.share(pages)
            pages = list(pages)
        elif held:
            gone = held.pop(rng.randrange(len(held)))
            allocator.drop(gone)
            owners.subtract(gone)
            pages = []
        else:
            pages = []
        if pages:
            owners.update(pages)
            held.append(pages)
        allocator.check_integrity()
        assert all(allocator.owners(page) == owners[page] for page in range(capacity))
        assert allocator.free_pages == sum(not owners[page] for page in range(capacity))
    for pages in held:
        allocator.drop(pages)
    assert list(runs(allocator.take(capacity))) == [(0, capacity)]
