from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from pipelined.kv import Node, RadixTree
from pipelined.messages import pack_tokens

PAGE = 2


def packed(*tokens: int) -> bytes:
    return pack_tokens(list(tokens))


def test_whole_pages_match_and_the_rest_does_not() -> None:
    tree = RadixTree(PAGE)
    tree.insert(packed(1, 2, 3, 4, 5, 6), [10, 11, 12])
    assert tree.match(packed(1, 2, 3, 4, 5, 6, 7), 9)[1] == [10, 11, 12]
    assert tree.match(packed(1, 2, 3, 4, 5), 9)[1] == [10, 11]
    assert tree.match(packed(1, 2, 3, 9, 5, 6), 9)[1] == [10]
    assert tree.match(packed(1, 9, 3, 4), 9)[1] == []
    assert tree.match(packed(1, 2, 3, 4, 5, 6), 1)[1] == [10]
    tree.check_integrity()


def test_the_first_to_insert_a_prefix_keeps_it() -> None:
    tree = RadixTree(PAGE)
    tree.insert(packed(1, 2, 3, 4), [10, 11])
    _, known = tree.insert(packed(1, 2, 3, 4, 5, 6), [20, 21, 22])
    assert known == 2
    assert tree.match(packed(1, 2, 3, 4, 5, 6), 9)[1] == [10, 11, 22]
    assert tree.held_pages == 3


def test_least_recently_used_goes_first_and_from_its_tail() -> None:
    tree = RadixTree(PAGE)
    tree.insert(packed(1, 1, 2, 2, 3, 3), [0, 1, 2])
    tree.insert(packed(7, 7, 8, 8), [3, 4])
    tree.match(packed(1, 1), 9)  # splits, and makes the first page the most recently used
    assert tree.evict(1) == [2]
    assert tree.evict(2) == [1, 4]
    assert tree.evict(9) == [3, 0]
    assert (tree.held_pages, tree.evictable_pages, tree.evict(1)) == (0, 0, [])
    tree.check_integrity()


def test_locked_paths_stay_even_when_they_are_split() -> None:
    tree = RadixTree(PAGE)
    node, _ = tree.insert(packed(1, 1, 2, 2, 3, 3), [0, 1, 2])
    tree.lock(node)
    tree.insert(packed(1, 1, 9, 9), [0, 5])
    assert tree.evictable_pages == 1
    assert tree.evict(9) == [5]
    tree.unlock(node)
    assert sorted(tree.evict(9)) == [0, 1, 2]
    tree.check_integrity()


def test_growing_behind_a_shortened_leaf() -> None:
    tree = RadixTree(PAGE)
    tree.insert(packed(1, 1, 2, 2, 3, 3, 4, 4), [0, 1, 2, 3])
    assert tree.evict(1) == [3]
    tree.insert(packed(1, 1, 2, 2, 3, 3, 5, 5), [0, 1, 2, 6])
    assert tree.match(packed(1, 1, 2, 2, 3, 3, 4, 4), 9)[1] == [0, 1, 2]
    assert tree.match(packed(1, 1, 2, 2, 3, 3, 5, 5), 9)[1] == [0, 1, 2, 6]
    tree.check_integrity()


class Prefixes:
    """The obvious model: every prefix of whole pages, and its last page."""

    def __init__(self) -> None:
        self.pages: dict[tuple[int, ...], int] = {}

    def match(self, tokens: list[int], most: int) -> list[int]:
        found = []
        for end in range(PAGE, min(len(tokens), most * PAGE) + 1, PAGE):
            page = self.pages.get(tuple(tokens[:end]))
            if page is None:
                break
            found.append(page)
        return found

    def insert(self, tokens: list[int], pages: list[int]) -> None:
        for index, page in enumerate(pages):
            self.pages.setdefault(tuple(tokens[: (index + 1) * PAGE]), page)

    def forget(self, page: int) -> tuple[int, ...]:
        (gone,) = [prefix for prefix, held in self.pages.items() if held == page]
        del self.pages[gone]
        return gone


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 2**40))
def test_against_a_dict_of_prefixes(seed: int) -> None:
    rng = random.Random(seed)
    tree, model, fresh = RadixTree(PAGE), Prefixes(), 0
    locks: list[tuple[Node, list[int]]] = []
    for _ in range(60):
        tokens = [rng.choice([0, 0, 0, 1]) for _ in range(rng.randint(0, 16))]
        action = rng.random()
        if action < 0.35:
            pages = list(range(fresh, fresh + rng.randint(0, len(tokens) // PAGE)))
            fresh += len(pages)
            known = len(model.match(tokens, len(pages)))
            model.insert(tokens, pages)
            assert tree.insert(pack_tokens(tokens), pages)[1] == known
        elif action < 0.65:
            most = rng.randint(0, 9)
            node, found = tree.match(bytearray(pack_tokens(tokens)), most)
            assert found == model.match(tokens, most)
            if rng.random() < 0.5:
                tree.lock(node)
                locks.append((node, found))
        elif action < 0.8 and locks:
            tree.unlock(locks.pop(rng.randrange(len(locks)))[0])
        else:
            want, evictable = rng.randint(1, 6), tree.evictable_pages
            evicted = tree.evict(want)
            assert len(evicted) == min(want, evictable)
            gone = [model.forget(page) for page in evicted]
            assert not any(prefix[: len(g)] == g for prefix in model.pages for g in gone), "a page outlived its prefix"
        locked = {page for _, pages in locks for page in pages}
        assert locked == {page for page, is_locked in tree.pages() if is_locked}
        assert sorted(page for page, _ in tree.pages()) == sorted(model.pages.values())
        tree.check_integrity()
