"""The books of one epoch's KV pages: the allocator, the radix tree, and what happens when pages run out.

Every page is free, or owned by sequences and perhaps the tree. A page that only the tree owns, and no lock protects, is
as good as free: `available_pages` counts it, `take` evicts it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pipelined.kv.pages import PageAllocator
from pipelined.kv.radix import Node, RadixTree

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["PageBooks", "Prefix"]

_SPARE_PAGES = 15


class Prefix(NamedTuple):
    """A cached prefix, held for a sequence until `PageBooks.release`."""

    pages: list[int]
    lock: Node | None


class PageBooks:
    """Who owns which page of a cache of `capacity_pages` pages of `page_size` tokens."""

    def __init__(self, capacity_pages: int, page_size: int, *, radix_cache: bool) -> None:
        self.page_size = page_size
        self.radix_cache = radix_cache
        self.evicted_pages = 0
        self.version = 0
        """Grows whenever more pages may have become available, or more prefixes known."""
        self._allocator = PageAllocator(capacity_pages)
        self._tree = RadixTree(page_size) if radix_cache else None
        # Evicting a few more than needed lets a growing sequence find neighbours instead of single pages.
        self._spare_pages = min(_SPARE_PAGES, capacity_pages // 32)

    @property
    def capacity_pages(self) -> int:
        """Pages in all."""
        return self._allocator.capacity_pages

    @property
    def available_pages(self) -> int:
        """Pages that `take` can give: free, or cached and unused."""
        return self._allocator.free_pages + (self._tree.evictable_pages if self._tree else 0)

    @property
    def cached_pages(self) -> int:
        """Pages that the tree holds, whether a sequence uses them or not."""
        return self._tree.held_pages if self._tree else 0

    def pages_for(self, tokens: int) -> int:
        """Pages that the KV of so many tokens fills, the last one perhaps in part."""
        return -(-tokens // self.page_size)

    def match(self, tokens: bytes | bytearray, max_tokens: int) -> Prefix:
        """The longest cached prefix of at most `max_tokens`, in whole pages; its pages get one more owner."""
        if self._tree is None:
            return Prefix([], None)
        node, pages = self._tree.match(tokens, max_tokens // self.page_size)
        self._tree.lock(node)
        self._allocator.share(pages)
        return Prefix(pages, node)

    def take(self, count: int, after: int | None = None) -> list[int]:
        """`count` pages (at most `available_pages`) for one owner, next to page `after` if possible."""
        missing = count - self._allocator.free_pages
        if missing > 0:
            assert self._tree is not None, f"{count} pages asked for, {self.available_pages} available"
            evicted = self._tree.evict(missing + self._spare_pages)
            self.evicted_pages += len(evicted)
            self._allocator.drop(evicted)
        return self._allocator.take(count, after)

    def keep(
        self, tokens: bytes | bytearray, computed: int, pages: Sequence[int], lock: Node | None, *, leaving: bool
    ) -> Node | None:
        """Make the first `computed` tokens' KV findable, whole pages of it.

        Where another sequence was first with a part of the prefix, the tree keeps that one's pages, and these stay the
        sequence's own. What lies behind is then taken only from a sequence that is `leaving`: to keep it findable, the
        whole path must be locked, and one that goes on would hold pages that it doesn't use, perhaps for ever.

        Args:
            tokens: Packed ids, `computed` or more.
            computed: How many of them have their KV in `pages` for certain.
            pages: The sequence's page table.
            lock: What the sequence holds of the tree.
            leaving: It will `release` what it holds as soon as it can.

        Returns:
            What it holds from now on.
        """
        whole = computed // self.page_size
        if self._tree is None or not whole:
            return lock
        _, found = self._tree.match(tokens, whole)
        known = len(found)
        if known == whole or (not leaving and found != list(pages[:known])):
            return lock
        node, _ = self._tree.insert(tokens, list(pages[:whole]))
        self._allocator.share(pages[known:whole])
        self._tree.lock(node)
        if lock is not None:
            self._tree.unlock(lock)
        self.version += 1
        return node

    def release(self, pages: Sequence[int], lock: Node | None) -> None:
        """A sequence no longer owns `pages`, nor needs what it locked."""
        if self._tree is not None and lock is not None:
            self._tree.unlock(lock)
        self._allocator.drop(pages)
        self.version += 1

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless every page is free, cached, or in the `tables` of those who hold pages."""
        self._allocator.check_integrity()
        expected = [0] * self.capacity_pages
        for table in tables:
            for page in table:
                expected[page] += 1
        if self._tree is not None:
            self._tree.check_integrity()
            for page, locked in self._tree.pages():
                assert locked or not expected[page], f"page {page} is in use, yet could be evicted"
                expected[page] += 1
        wrong = [page for page, owners in enumerate(expected) if owners != self._allocator.owners(page)]
        assert not wrong, f"pages {wrong[:10]} have other owners than the books say"
