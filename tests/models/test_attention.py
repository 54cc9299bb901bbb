"""The paged attention against a plain softmax over one sequence at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pipelined.errors import ModelError
from pipelined.models import attention
from pipelined.models.batching import Segment
from pipelined.models.paged_kv import KvPool, PagedCache, Ragged

PAGE = 4
POOL_PAGES = 512


class Case:
    """Sequences with stored prefixes in scattered pages, and a batch of new rows for them."""

    def __init__(self, spans: list[tuple[int, int]], heads: int, kv_heads: int, dtype: torch.dtype = torch.float32):
        generator = torch.Generator().manual_seed(len(spans) + heads)
        self.spans, self.kv_heads, self.dtype = spans, kv_heads, dtype
        self.dim = 8
        self.module = nn.Module()
        self.cache = PagedCache()
        self.cache.pool = KvPool(POOL_PAGES * PAGE)
        setattr(self.module, attention.CACHE_ATTRIBUTE, self.cache)
        pages = torch.randperm(POOL_PAGES // 2, generator=generator).tolist()
        pages = [page for pair in pages for page in (2 * pair, 2 * pair + 1)]
        self.full = []
        segments: list[Segment] = []
        for number, (start, rows) in enumerate(spans):
            count = -(-(start + rows) // PAGE)
            mine, pages = pages[:count], pages[count:]
            shapes = [(heads, start + rows, 8), (kv_heads, start + rows, 8), (kv_heads, start + rows, 8)]
            self.full.append([torch.randn(shape, generator=generator).to(dtype) for shape in shapes])
            if start:
                self._store(number, 0, start, mine)
            segments.append(Segment(number, start, (0,) * rows, _runs(mine, start + rows), sample=True))
        self.cache.begin(Ragged(segments))

    def _store(self, number: int, low: int, high: int, pages: list[int]) -> None:
        _, key, value = self.full[number]
        self.cache.begin(Ragged([Segment(number, low, (0,) * (high - low), _runs(pages, high), sample=False)]))
        self.cache.update(key[None, :, low:high], value[None, :, low:high], 0)

    def run(self, **options: Any) -> torch.Tensor:
        new = [
            torch.cat(
                [
                    full[part][:, start : start + rows]
                    for full, (start, rows) in zip(self.full, self.spans, strict=True)
                ],
                1,
            )
            for part in range(3)
        ]
        query, key, value = (tensor[None] for tensor in new)
        key, value = self.cache.update(key, value, 0)
        out, _ = attention.paged_attention(self.module, query, key, value, None, **options)
        return out[0]  # [rows, heads, dim]

    def expected(self, **options: Any) -> torch.Tensor:
        return torch.cat(
            [_plain(*full, start, **options) for full, (start, _) in zip(self.full, self.spans, strict=True)]
        )


def _runs(pages: list[int], length: int) -> tuple[tuple[int, int], ...]:
    runs: list[tuple[int, int]] = []
    for at in range(0, length, PAGE):
        slot, size = pages[at // PAGE] * PAGE, min(PAGE, length - at)
        if runs and sum(runs[-1]) == slot:
            runs[-1] = (runs[-1][0], runs[-1][1] + size)
        else:
            runs.append((slot, size))
    return tuple(runs)


def _plain(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    start: int,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    chunk: int | None = None,
) -> torch.Tensor:
    query, key, value = query.double(), key.double(), value.double()
    group = query.shape[0] // key.shape[0]
    scores = query @ key.repeat_interleave(group, 0).transpose(1, 2) * query.shape[-1] ** -0.5
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    position = torch.arange(query.shape[1])
    seen = position[None, :] <= position[:, None]
    if sliding_window is not None:
        seen &= position[None, :] > position[:, None] - sliding_window
    if chunk is not None:
        seen &= position[None, :] // chunk == position[:, None] // chunk
    scores = scores.masked_fill(~seen, -torch.inf)
    if s_aux is not None:
        scores = torch.cat([scores, s_aux.double()[:, None, None].expand(-1, scores.shape[1], 1)], -1)
    weights = scores.softmax(-1)[..., : key.shape[1]]
    return (weights @ value.repeat_interleave(group, 0)).transpose(0, 1)[start:]


spans = st.lists(st.tuples(st.integers(0, 90), st.integers(1, 40)), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(
    spans=spans,
    heads=st.sampled_from([(4, 4), (4, 2), (6, 2), (3, 1)]),
    window=st.sampled_from([None, 1, 2, 7, 16, 64]),
    softcap=st.sampled_from([None, 1.5]),
    sinks=st.booleans(),
)
def test_equals_plain_softmax(
    spans: list[tuple[int, int]], heads: tuple[int, int], window: int | None, softcap: float | None, sinks: bool
) -> None:
    case = Case(spans, *heads)
    options: dict[str, Any] = {"sliding_window": window, "softcap": softcap}
    if sinks:
        options["s_aux"] = torch.linspace(-2.0, 2.0, heads[0])
    torch.testing.assert_close(case.run(**options).double(), case.expected(**options), atol=2e-5, rtol=1e-4)


@settings(max_examples=20, deadline=None)
@given(spans=spans, chunk=st.sampled_from([4, 16, 50]))
def test_chunked_attention(spans: list[tuple[int, int]], chunk: int) -> None:
    case = Case(spans, 4, 2)
    case.module.layer_idx = 0  # type: ignore[assignment]
    case.module.config = type("Config", (), {"layer_types": ["chunked_attention"], "attention_chunk_size": chunk})()  # type: ignore[assignment]
    torch.testing.assert_close(case.run().double(), case.expected(chunk=chunk), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("start", [0, 600])
@pytest.mark.parametrize("window", [None, 300])
def test_chunks_above_the_kernels_block_sizes(start: int, window: int | None) -> None:
    case = Case([(start, 800), (start // 2, 1)], 4, 2)
    got, want = case.run(sliding_window=window), case.expected(sliding_window=window)
    torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, {"softcap": 1.5}, {"sliding_window": 9}], ids=str)
def test_half_precision(dtype: torch.dtype, options: dict[str, Any]) -> None:
    case = Case([(40, 20), (11, 1)], 4, 2, dtype)
    got = case.run(**options)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), case.expected(**options), atol=3e-2, rtol=3e-2)


def test_refuses_what_it_would_ignore() -> None:
    case = Case([(0, 3)], 2, 2)
    query = torch.zeros(1, 2, 3, 8)
    with pytest.raises(ModelError, match="without caching"):
        attention.paged_attention(case.module, query, query, query, None)
    with pytest.raises(ModelError, match="mask or bias"):
        attention.paged_attention(case.module, query, query, query, torch.zeros(3, 3))
    with pytest.raises(ModelError, match="mask or bias"):
        attention.paged_attention(case.module, query, query, query, None, is_causal=False)


def test_stale_memory_is_never_read() -> None:
    case = Case([(30, 10), (5, 1), (0, 9)], 4, 2)
    layer = case.cache.pool.layer(0, *(torch.zeros(1, 2, 1, 8) for _ in range(2)))
    written = torch.zeros(POOL_PAGES * PAGE, dtype=torch.bool)
    for span in case.cache.ragged.spans:
        for slot, tokens in span.slots(0, span.start):
            written[slot : slot + tokens] = True
    layer.keys[:, ~written] = torch.nan
    layer.values[:, ~written] = torch.nan
    torch.testing.assert_close(
        case.run(sliding_window=12).double(), case.expected(sliding_window=12), atol=2e-5, rtol=1e-4
    )
