"""Which KV pages are free, and how many owners each of the others has.

Knows page numbers only: nothing of tokens, sequences or ranks. Free pages are kept as runs of consecutive numbers, so
that a sequence's pages form few long runs (attention reads a run without copying it).
"""

from __future__ import annotations

from array import array
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from pipelined.errors import CapacityError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["PageAllocator", "runs"]


def runs(pages: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Maximal runs of consecutive ascending numbers in `pages`, as (first, length), in order."""
    first = length = 0
    for page in pages:
        if length and page == first + length:
            length += 1
            continue
        if length:
            yield first, length
        first, length = page, 1
    if length:
        yield first, length


class PageAllocator:
    """Pages `0 .. capacity_pages - 1`, each free or with one or more owners.

    Taking and dropping cost O(pages handled), and O(log runs) for each run touched.
    """

    def __init__(self, capacity_pages: int) -> None:
        if capacity_pages < 1:
            raise CapacityError(f"a KV cache of {capacity_pages} pages holds nothing; give it at least 1")
        self.capacity_pages = capacity_pages
        self._free_pages = 0
        self._owners = array("i", bytes(4 * capacity_pages))
        self._length_at: dict[int, int] = {}  # first page of a free run -> its length
        self._first_before: dict[int, int] = {}  # page behind a free run -> first page of the run
        self._longest: list[tuple[int, int]] = []  # heap of (-length, first); stale entries are skipped
        self._add_run(0, capacity_pages)

    @property
    def free_pages(self) -> int:
        """How many pages nobody owns."""
        return self._free_pages

    def owners(self, page: int) -> int:
        """How many owners `page` has."""
        return self._owners[page]

    def take(self, count: int, after: int | None = None) -> list[int]:
        """Pages for one new owner; the caller has seen that `free_pages >= count`.

        Args:
            count: How many.
            after: Last page that the sequence has. Its neighbour is taken if it is free; otherwise, as for a new
                sequence, pages from the longest free run.
        """
        assert 0 <= count <= self._free_pages, f"{count} pages asked for, {self._free_pages} are free"
        taken: list[int] = []
        while len(taken) < count:
            missing = count - len(taken)
            first = None if after is None else after + 1
            if first is not None and first in self._length_at:
                part = self._cut(first, first, missing)
            else:
                part = self._cut(*self._fresh(missing), missing)
            taken.extend(part)
            after = taken[-1]
        for page in taken:
            self._owners[page] = 1
        self._free_pages -= count
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """One more owner for each of `pages`, all of which have one already."""
        owners = self._owners
        for page in pages:
            assert owners[page] > 0, f"page {page} is shared but has no owner"
            owners[page] += 1

    def drop(self, pages: Iterable[int]) -> None:
        """One owner fewer for each of `pages`; those without owners are free from now on."""
        owners = self._owners
        freed = []
        for page in pages:
            left = owners[page] - 1
            assert left >= 0, f"page {page} is dropped but has no owner"
            owners[page] = left
            if not left:
                freed.append(page)
        for first, length in runs(freed):
            self._give_back(first, length)

    def check_integrity(self) -> None:
        """Raise AssertionError if the runs, the owners and the count of free pages disagree."""
        free = [page for first, length in self._length_at.items() for page in range(first, first + length)]
        assert len(free) == len(set(free)) == self._free_pages, "free runs overlap, or were miscounted"
        assert all(self._owners[page] == 0 for page in free), "a free page has an owner"
        assert self._owners.count(0) == self._free_pages, "a page without owner is in no free run"
        behind = {first + length: first for first, length in self._length_at.items()}
        assert behind == self._first_before, "the two indexes of free runs differ"
        assert not behind.keys() & self._length_at.keys(), "two free runs touch and were not merged"
        assert {(-n, first) for first, n in self._length_at.items()} <= set(self._longest), "a free run was lost"

    def _fresh(self, count: int) -> tuple[int, int]:
        """Where a new sequence goes: (first page of the longest run, page to begin at)."""
        while self._length_at.get(self._longest[0][1]) != -self._longest[0][0]:
            heappop(self._longest)
        length, first = -self._longest[0][0], self._longest[0][1]
        # The page before the run belongs to somebody who may want to grow: begin in the middle and leave him room.
        spare = length - count
        return first, first + (spare // 2 if first and spare > 0 else 0)

    def _cut(self, first: int, begin: int, count: int) -> range:
        """Up to `count` pages from `begin` on, out of the free run at `first`; what is left stays free."""
        end = first + self._length_at.pop(first)
        del self._first_before[end]
        stop = min(begin + count, end)
        if first < begin:
            self._add_index(first, begin - first)
        if stop < end:
            self._add_index(stop, end - stop)
        return range(begin, stop)

    def _give_back(self, first: int, length: int) -> None:
        before = self._first_before.pop(first, None)
        total, start = length, first
        if before is not None:
            start = before
            total += self._length_at.pop(before)
        behind = self._length_at.pop(first + length, None)
        if behind is not None:
            del self._first_before[first + length + behind]
            total += behind
        self._add_index(start, total)
        self._free_pages += length

    def _add_run(self, first: int, length: int) -> None:
        self._add_index(first, length)
        self._free_pages += length

    def _add_index(self, first: int, length: int) -> None:
        self._length_at[first] = length
        self._first_before[first + length] = first
        heappush(self._longest, (-length, first))
        if len(self._longest) > 64 + 4 * len(self._length_at):
            self._longest = [(-n, start) for start, n in self._length_at.items()]
            heapify(self._longest)
