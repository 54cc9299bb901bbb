from __future__ import annotations

import pytest

from pipelined.kv import PageBooks
from pipelined.messages import pack_tokens

PROMPT = pack_tokens(list(range(12)))


def test_a_prefix_is_kept_found_and_given_back() -> None:
    books = PageBooks(8, 4, radix_cache=True)
    pages = books.take(3)
    lock = books.keep(PROMPT, 11, pages, None, leaving=False)
    assert (books.cached_pages, books.available_pages) == (2, 5)
    books.release(pages, lock)
    assert (books.cached_pages, books.available_pages) == (2, 8)
    prefix = books.match(PROMPT, 11)
    assert prefix.pages == pages[:2]
    assert books.available_pages == 6
    books.check_integrity([prefix.pages])
    books.release(*prefix)
    books.check_integrity([])


def test_cached_pages_give_way() -> None:
    books = PageBooks(4, 4, radix_cache=True)
    pages = books.take(3)
    books.release(pages, books.keep(PROMPT, 12, pages, None, leaving=True))
    assert len(books.take(4)) == 4
    assert (books.cached_pages, books.evicted_pages) == (0, 3)


def test_who_goes_on_never_locks_pages_that_it_does_not_use() -> None:
    books = PageBooks(8, 4, radix_cache=True)
    first, second = books.take(2), books.take(3)
    lock = books.keep(PROMPT, 8, first, None, leaving=False)
    assert books.keep(PROMPT, 12, second, None, leaving=False) is None
    books.release(first, lock)
    assert books.available_pages == 5  # all but the second's three
    books.check_integrity([second])
    lock = books.keep(PROMPT, 12, second, None, leaving=True)
    books.release(second, lock)
    assert books.match(PROMPT, 12).pages == [*first, second[2]]


def test_without_a_tree_nothing_is_kept() -> None:
    books = PageBooks(8, 4, radix_cache=False)
    pages = books.take(3)
    assert books.keep(PROMPT, 12, pages, None, leaving=True) is None
    books.release(pages, None)
    assert books.match(PROMPT, 12).pages == []
    assert books.available_pages == 8


def test_a_lost_page_is_noticed() -> None:
    books = PageBooks(8, 4, radix_cache=True)
    pages = books.take(2)
    with pytest.raises(AssertionError, match="other owners"):
        books.check_integrity([pages[:1]])
