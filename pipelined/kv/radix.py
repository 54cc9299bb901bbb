"""Which token prefixes have their KV in which pages: a radix tree with one or more whole pages on each edge.

Knows packed token ids and page numbers. Owns no pages: whoever calls `insert` and `evict` keeps the books. Recency is a
counter of operations, not a clock.
"""

from __future__ import annotations

from heapq import heappop, heappush, heapreplace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Node", "RadixTree"]

_TOKEN_BYTES = 4


class Node:
    """A stretch of whole pages behind its parent's.

    `key` holds the tokens of `pages`, and perhaps more: evicting from the tail shortens `pages` alone.
    """

    __slots__ = ("children", "key", "locks", "pages", "parent", "queued", "serial", "used")

    def __init__(self, key: bytes, pages: list[int], parent: Node | None, used: int, serial: int) -> None:
        self.key = key
        self.pages = pages
        self.parent = parent
        self.children: dict[bytes, Node] = {}
        self.locks = 0
        self.used = used
        self.serial = serial
        self.queued = False

    def __repr__(self) -> str:
        return f"<Node pages={len(self.pages)} children={len(self.children)} locks={self.locks}>"

    @property
    def evictable(self) -> bool:
        """An unlocked leaf that holds pages (the root holds none)."""
        return not self.locks and not self.children and self.parent is not None


class RadixTree:
    """Prefixes of token ids, packed as int32, in whole pages of `page_size` tokens."""

    def __init__(self, page_size: int) -> None:
        self.page_bytes = page_size * _TOKEN_BYTES
        self.root = Node(b"", [], None, 0, 0)
        self._operations = 0
        self._serials = 0
        self._held_pages = 0
        self._evictable_pages = 0
        self._oldest: list[tuple[int, int, Node]] = []  # heap; `used` may be outdated, checked when popped

    @property
    def held_pages(self) -> int:
        """Pages in the tree."""
        return self._held_pages

    @property
    def evictable_pages(self) -> int:
        """Pages in the tree that no lock protects: what `evict` could give."""
        return self._evictable_pages

    def match(self, tokens: bytes | bytearray, max_pages: int) -> tuple[Node, list[int]]:
        """The longest known prefix of `tokens`, at most `max_pages` long.

        Returns:
            The node at its end (to be locked), and its pages. The root and no pages if nothing matches.
        """
        self._operations += 1
        limit = min(max_pages, len(tokens) // self.page_bytes)
        node, pages = self.root, list[int]()
        while len(pages) < limit:
            child = self._child(node, tokens, len(pages))
            if child is None:
                break
            common = self._common_pages(child, tokens, len(pages), limit - len(pages))
            node = child if common == len(child.pages) else self._split(child, common)
            node.used = self._operations
            pages.extend(node.pages)
        return node, pages

    def insert(self, tokens: bytes | bytearray, pages: list[int]) -> tuple[Node, int]:
        """Make known that `pages` hold the KV of `tokens` (at least that many pages of them).

        Where the tree has a page for the same prefix already, it keeps its own.

        Returns:
            The node at the end, and how many of the first of `pages` the tree did *not* take.
        """
        node, known = self.match(tokens, len(pages))
        have = len(known)
        if have == len(pages):
            return node, have
        node.key = node.key[: len(node.pages) * self.page_bytes]  # it may have been shortened by `evict`
        start, end = have * self.page_bytes, len(pages) * self.page_bytes
        leaf = self._new_node(bytes(tokens[start:end]), pages[have:], node)
        node.children[leaf.key[: self.page_bytes]] = leaf
        self._held_pages += len(leaf.pages)
        self._evictable_pages += len(leaf.pages)
        self._enqueue(leaf)
        return leaf, have

    def lock(self, node: Node) -> None:
        """Protect the pages from the root to `node` from eviction. Locks count."""
        step: Node | None = node
        while step is not None and step.parent is not None:
            if not step.locks:
                self._evictable_pages -= len(step.pages)
            step.locks += 1
            step = step.parent

    def unlock(self, node: Node) -> None:
        """Undo one `lock`."""
        step: Node | None = node
        while step is not None and step.parent is not None:
            assert step.locks > 0, f"{step!r} is unlocked more often than locked"
            step.locks -= 1
            if not step.locks:
                self._evictable_pages += len(step.pages)
                self._enqueue(step)
            step = step.parent

    def evict(self, count: int) -> list[int]:
        """Forget up to `count` unlocked pages: the least recently used leaf first, each from its tail."""
        evicted: list[int] = []
        while len(evicted) < count and self._oldest:
            used, _, node = self._oldest[0]
            if not node.evictable:
                heappop(self._oldest)
                node.queued = False
            elif used != node.used:
                heapreplace(self._oldest, (node.used, node.serial, node))
            else:
                evicted += self._shorten(node, count - len(evicted))
        self._held_pages -= len(evicted)
        self._evictable_pages -= len(evicted)
        return evicted

    def pages(self) -> Iterator[tuple[int, bool]]:
        """Every page in the tree, and whether it is locked."""
        for node in self._nodes():
            for page in node.pages:
                yield page, node.locks > 0

    def check_integrity(self) -> None:
        """Raise AssertionError if the tree is not a tree or its counts are wrong."""
        held = evictable = 0
        for node in self._nodes():
            held += len(node.pages)
            evictable += 0 if node.locks else len(node.pages)
            assert node.pages, "an empty node was left behind"
            assert len(node.key) >= len(node.pages) * self.page_bytes, "tokens of a page are missing"
            assert not node.children or len(node.key) == len(node.pages) * self.page_bytes, "an inner node was cut"
            parent = node.parent
            assert parent is not None, "a node without parent is not the root"
            assert parent.children[node.key[: self.page_bytes]] is node, "a child is filed under other tokens"
            assert parent is self.root or parent.locks >= node.locks, "a node is locked more than its parent"
            assert not node.evictable or node.queued, "an evictable leaf would never be found"
        assert held == self._held_pages, "pages were miscounted"
        assert evictable == self._evictable_pages, "evictable pages were miscounted"

    def _nodes(self) -> Iterator[Node]:
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            yield node

    def _child(self, node: Node, tokens: bytes | bytearray, page: int) -> Node | None:
        start = page * self.page_bytes
        return node.children.get(bytes(tokens[start : start + self.page_bytes]))

    def _common_pages(self, node: Node, tokens: bytes | bytearray, page: int, limit: int) -> int:
        """How many of `node`'s first pages `tokens` has from `page` on, at least 1 (the child was found by it)."""
        size, base = self.page_bytes, page * self.page_bytes
        most = min(len(node.pages), limit)
        if tokens[base : base + most * size] == node.key[: most * size]:
            return most
        least = 1
        while most - least > 1:  # the first `least` pages are equal, the first `most` are not
            middle = (least + most) // 2
            low, high = least * size, middle * size
            if tokens[base + low : base + high] == node.key[low:high]:
                least = middle
            else:
                most = middle
        return least

    def _split(self, node: Node, pages: int) -> Node:
        """Cut `node` behind its first `pages`; returns the new upper part. `node` itself stays the lower one."""
        parent, at = node.parent, pages * self.page_bytes
        assert parent is not None, "the root is never split"
        upper = self._new_node(node.key[:at], node.pages[:pages], parent)
        upper.locks, upper.used = node.locks, node.used
        parent.children[upper.key[: self.page_bytes]] = upper
        node.key, node.pages, node.parent = node.key[at:], node.pages[pages:], upper
        upper.children[node.key[: self.page_bytes]] = node
        return upper

    def _shorten(self, leaf: Node, count: int) -> list[int]:
        """Take up to `count` pages off the tail of the leaf on top of the heap; without pages it goes."""
        gone = leaf.pages[-count:]
        del leaf.pages[-count:]
        kept = len(leaf.pages) * self.page_bytes
        if not leaf.pages:
            heappop(self._oldest)
            parent = leaf.parent
            assert parent is not None, "the root is never evicted"
            del parent.children[leaf.key[: self.page_bytes]]
            leaf.parent = None
            self._enqueue(parent)
        elif len(leaf.key) > 2 * kept:  # cut the tokens now and then only: a copy costs as much as the whole leaf
            leaf.key = leaf.key[:kept]
        return gone

    def _new_node(self, key: bytes, pages: list[int], parent: Node) -> Node:
        self._serials += 1
        return Node(key, pages, parent, self._operations, self._serials)

    def _enqueue(self, node: Node) -> None:
        if node.evictable and not node.queued:
            node.queued = True
            heappush(self._oldest, (node.used, node.serial, node))
