"""Slots in, slots out: what is written is what is read, wherever pages lie."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelined.errors import ModelError
from pipelined.models.batching import Segment
from pipelined.models.paged_kv import (
    GATHER_BELOW_TOKENS,
    GATHER_BLOCK_TOKENS,
    KvPool,
    PagedCache,
    Ragged,
    Span,
    slot_numbers,
)


def rows(heads: int, count: int, first: int = 0) -> torch.Tensor:
    """[1, heads, count, 2], each row different."""
    return torch.arange(first, first + heads * count * 2, dtype=torch.float32).view(1, heads, count, 2)


@settings(max_examples=100, deadline=None)
@given(
    runs=st.lists(st.integers(1, 12), min_size=1, max_size=8),
    start_share=st.floats(0, 1),
    data=st.data(),
)
def test_positions_map_to_slots_in_order(runs: list[int], start_share: float, data: st.DataObject) -> None:
    gaps = [data.draw(st.integers(1, 5)) for _ in runs]
    slots, at = [], 0
    laid = []
    for size, gap in zip(runs, gaps, strict=True):
        at += gap
        laid.append((at, size))
        slots.extend(range(at, at + size))
        at += size
    total = len(slots)
    start = min(total - 1, int(start_share * total))
    span = Span(0, total - start, start, tuple(laid))
    low = data.draw(st.integers(0, total - 1))
    high = data.draw(st.integers(low + 1, total))
    assert slot_numbers(span.slots(low, high)).tolist() == slots[low:high]
    assert span.slots(low, low) == []


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=10))
def test_a_batch_is_written_where_its_runs_say(lengths: list[int]) -> None:
    segments, at = [], 0
    for seq, length in enumerate(lengths):  # every other sequence has its rows in two runs
        split = length // 2 if seq % 2 else 0
        runs = ((at, split), (at + split + 3, length - split)) if split else ((at, length),)
        segments.append(Segment(seq, 0, (0,) * length, runs, sample=False))
        at += length + 5
    ragged = Ragged(segments)
    cache = PagedCache()
    cache.pool = KvPool(at)
    cache.begin(ragged)
    keys, values = rows(2, ragged.rows), rows(3, ragged.rows, first=10_000)
    new = cache.update(keys, values, 4)
    assert new[0] is keys
    assert new[1] is values
    layer = cache.pool.layer(4, keys, values)
    for span in ragged.spans:
        where = slot_numbers(span.slots(0, span.end))
        mine = slice(span.row, span.row + span.rows)
        torch.testing.assert_close(layer.keys[:, where], keys[0, :, mine])
        torch.testing.assert_close(layer.values[:, where], values[0, :, mine])


def test_reads_long_runs_in_place_and_gathers_short_ones() -> None:
    short, long = GATHER_BELOW_TOKENS - 1, GATHER_BELOW_TOKENS
    runs = ((0, short), (1000, long), (2000, short))
    total = short + long + short
    ragged = Ragged([Segment(0, total - 1, (0,), runs, sample=True)])
    pieces, gathers = ragged.reads(0, 0, total)
    assert pieces == ((1000, long),)
    assert torch.cat(gathers).tolist() == [*range(short), *range(2000, 2000 + short)]
    assert ragged.reads(0, 0, short) == (((0, short),), ())  # a single short run needs no copy


def test_gathers_in_blocks() -> None:
    runs = tuple((10 * number, 8) for number in range(GATHER_BLOCK_TOKENS // 8 + 1))
    total = 8 * len(runs)
    ragged = Ragged([Segment(0, total - 1, (0,), runs, sample=True)])
    _, gathers = ragged.reads(0, 0, total)
    assert [len(slots) for slots in gathers] == [GATHER_BLOCK_TOKENS, 8]
    cache = PagedCache()
    cache.pool = KvPool(10 * len(runs))
    layer = cache.pool.layer(0, rows(2, 1), rows(2, 1))
    layer.keys.copy_(torch.randn_like(layer.keys))
    layer.values.zero_()
    keys, _ = cache.gather(layer, gathers[0])
    torch.testing.assert_close(keys, layer.keys[:, gathers[0]])


def test_sequence_length_gives_models_each_rows_position() -> None:
    ragged = Ragged([Segment(0, 7, (0, 0), ((0, 9),), sample=True), Segment(1, 3, (0,), ((16, 4),), sample=True)])
    cache = PagedCache()
    cache.begin(ragged)
    assert ragged.positions.tolist() == [7, 8, 3]
    assert (torch.arange(3) + cache.get_seq_length()).tolist() == [7, 8, 3]


def test_other_rows_than_the_batchs_are_refused() -> None:
    cache = PagedCache()
    cache.pool = KvPool(8)
    cache.begin(Ragged([Segment(0, 0, (0, 0), ((0, 2),), sample=True)]))
    with pytest.raises(ModelError, match="caches 3 rows for a batch of 2"):
        cache.update(rows(1, 3), rows(1, 3), 0)


def test_memory_is_counted_and_taken_once() -> None:
    pool = KvPool(10)
    assert pool.size_bytes == 0
    first = pool.layer(0, rows(2, 1), rows(2, 1))
    assert pool.layer(0, rows(2, 5), rows(2, 5)) is first
    assert pool.size_bytes == 2 * (2 * 10 * 2 * 4)
    assert "10 slots" in repr(pool)
