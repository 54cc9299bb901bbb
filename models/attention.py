"""Attention on a CPU over paged keys and values: parts computed without a mask, merged by log-sum-exp.

Registered with transformers under the name `NAME`; transformers then builds no masks. Each part is a call of torch's
flash kernel. That kernel works on blocks of 256 query rows from 768 rows on, of 64 or 32 below: with fewer rows, the
query heads of a group are folded into the query length, so that it sees group times as many.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from pipelined.errors import ModelError

from .paged_kv import slot_numbers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .paged_kv import KvLayer, PagedCache, Span

    KvPart = tuple[torch.Tensor, torch.Tensor]  # keys, values: [kv_heads, tokens, dim]

__all__ = ["CACHE_ATTRIBUTE", "NAME", "paged_attention", "register"]

NAME = "pipelined_cpu"
CACHE_ATTRIBUTE = "pipelined_cache"
"""Attention modules carry their stage's `PagedCache` under this name."""

_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_FOLD_BELOW_ROWS = 768  # where the kernel's block of query rows grows to 256
_BLOCK_ROWS = 512  # query rows at a time where a window or softcap needs blocks
_EXPAND_TOKENS = 1024  # latent keys and values expanded at a time


@dataclass(frozen=True)
class _Rule:
    """Which keys a query sees, and how scores are shaped."""

    scale: float
    window: int | None = None  # sees this many keys, itself included
    chunk: int | None = None  # sees keys of its own chunk of that many positions
    softcap: float | None = None

    def first_key(self, position: int) -> int:
        """The first position that a query at `position` sees."""
        if self.window is not None:
            return max(0, position - self.window + 1)
        return position - position % self.chunk if self.chunk is not None else 0

    def blocks(self, span: Span) -> list[tuple[int, int]]:
        """Cuts the rows of `span`: no block crosses a chunk, or is longer than the window."""
        longest = span.rows
        if self.window is not None or self.softcap is not None:
            longest = min(_BLOCK_ROWS, self.window or _BLOCK_ROWS)
        cuts = list(range(0, span.rows, longest))
        if self.chunk is not None:
            first = -span.start % self.chunk
            cuts = sorted({*cuts, *range(first, span.rows, self.chunk)})
        return list(zip(cuts, [*cuts[1:], span.rows], strict=True))


class _Merged:
    """A weighted mean of parts: `out` [kv_heads, group, rows, dim] and `lse` [kv_heads, group, rows]."""

    def __init__(self) -> None:
        self.out: torch.Tensor | None = None
        self.lse: torch.Tensor | None = None

    def add(self, out: torch.Tensor, lse: torch.Tensor, rows: int | None = None) -> None:
        """Merge in a part; with `rows`, it is one of the first `rows` rows only."""
        if self.out is None or self.lse is None:
            self.out, self.lse = out, lse
            return
        into, lses = (self.out, self.lse) if rows is None else (self.out[:, :, :rows], self.lse[:, :, :rows])
        into.lerp_(out, torch.sigmoid(lse - lses).unsqueeze(-1).to(out.dtype))
        lses.copy_(torch.logaddexp(lses, lse))


def register() -> None:
    """Make the attention known to transformers. Idempotent."""
    if NAME not in ALL_ATTENTION_FUNCTIONS.valid_keys():
        ALL_ATTENTION_FUNCTIONS.register(NAME, paged_attention)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention of the batch that the module's `PagedCache` has begun.

    Args:
        module: The attention module; it carries the cache.
        query: [1, heads, rows, dim].
        key: The new ones only, [1, kv_heads, rows, dim]; they are in the pages already.
        value: Likewise.
        attention_mask: Must be None: nothing is masked but by position.
        scaling: Of the scores; None: dim ** -0.5.
        dropout: Not applied.
        sliding_window: How many keys a query sees, itself included; None: all before it.
        softcap: Scores are squashed into (-softcap, softcap).
        s_aux: A sink for each head: a score without a value, [heads].
        position_bias: Must be None.
        is_causal: Must not be False.
        **kwargs: Not looked at.

    Returns:
        [1, rows, heads, value_dim], and no weights.

    Raises:
        ModelError: The architecture wants something that is not offered here.
    """
    if attention_mask is not None or position_bias is not None or is_causal is False:
        raise ModelError(f"{type(module).__name__} attends with a mask or bias of its own and cannot be sliced")
    source = _source(module)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    rule = _Rule(scale, sliding_window, _chunk_of(module), softcap)
    heads, rows, kv_heads, width = query.shape[1], query.shape[2], key.shape[1], value.shape[3]
    spans = source.cache.ragged.spans
    if len(spans) == 1 and rows > 1:
        merged = _span(query[0], key[0], value[0], 0, source, rule, s_aux)
        return merged.permute(2, 0, 1, 3).reshape(1, rows, heads, width), None
    result = query.new_empty((rows, kv_heads, heads // kv_heads, width))
    for index, span in enumerate(spans):
        at = slice(span.row, span.row + span.rows)
        if span.rows == 1:
            result[span.row].copy_(_decode(query[0, :, span.row], index, source, rule, s_aux))
        else:
            merged = _span(query[0, :, at], key[0, :, at], value[0, :, at], index, source, rule, s_aux)
            result[at].copy_(merged.permute(2, 0, 1, 3))
    return result.view(1, rows, heads, width), None


def _chunk_of(module: torch.nn.Module) -> int | None:
    """Llama 4: layers with rotary positions attend within chunks; the size is nowhere but in the configuration."""
    config: Any = getattr(module, "config", None)
    layer_types = getattr(config, "layer_types", None)
    if layer_types and layer_types[module.layer_idx] == "chunked_attention":
        size: int = config.attention_chunk_size
        return size
    return None


@dataclass(frozen=True)
class _Source:
    """Reads stored keys and values of one layer. `expand` turns latents into keys and values (MLA)."""

    cache: PagedCache
    layer: KvLayer
    expand: Callable[[torch.Tensor, torch.Tensor], KvPart] | None

    @property
    def plain(self) -> bool:
        """Whether what is stored is what the kernel takes."""
        return self.expand is None and self.layer.keys.shape[2] == self.layer.values.shape[2]

    def parts(self, index: int, first: int, end: int) -> Iterator[KvPart]:
        """Positions [first, end) of span `index`, in parts and in any order. A part is valid until the next."""
        pieces, gathers = self.cache.ragged.reads(index, first, end)
        for slot, tokens in pieces:
            step = tokens if self.expand is None else _EXPAND_TOKENS
            for at in range(slot, slot + tokens, step):
                until = min(slot + tokens, at + step)
                yield self._expanded(self.layer.keys[:, at:until], self.layer.values[:, at:until])
        for slots in gathers:
            for some in torch.split(slots, len(slots) if self.expand is None else _EXPAND_TOKENS):
                yield self._expanded(*self.cache.gather(self.layer, some))

    def ordered(self, index: int, first: int, end: int) -> KvPart:
        """Positions [first, end) of span `index`, in order."""
        pieces = self.cache.ragged.spans[index].slots(first, end)
        if len(pieces) == 1:
            slot, tokens = pieces[0]
            return self._expanded(self.layer.keys[:, slot : slot + tokens], self.layer.values[:, slot : slot + tokens])
        slots = slot_numbers(pieces)
        return self._expanded(self.layer.keys.index_select(1, slots), self.layer.values.index_select(1, slots))

    def _expanded(self, keys: torch.Tensor, values: torch.Tensor) -> KvPart:
        if self.expand is None:
            return keys, values
        keys, values = self.expand(keys.unsqueeze(0), values.unsqueeze(0))
        return keys[0], values[0]


def _source(module: torch.nn.Module) -> _Source:
    """Where the layer whose keys were cached last keeps them: that of the attention that is about to run."""
    cache: PagedCache = getattr(module, CACHE_ATTRIBUTE)
    layer, cache.current = cache.current, None
    if layer is None:
        raise ModelError(f"{type(module).__name__} attends without caching its keys and cannot be sliced")
    return _Source(cache, layer, getattr(module, "expand_kv", None))


def _decode(query: torch.Tensor, index: int, source: _Source, rule: _Rule, sinks: torch.Tensor | None) -> torch.Tensor:
    """One row, [heads, dim]: its own key is in the pages like the others. Gives [kv_heads, group, value_dim].

    With many sequences this runs for each of them in each layer, so it goes straight to the kernel where it can.
    """
    position = source.cache.ragged.spans[index].start
    first = rule.first_key(position)
    pieces, gathers = source.cache.ragged.reads(index, first, position + 1)
    keys, values = source.layer.keys, source.layer.values
    heads, dim = query.shape
    if len(pieces) == 1 and not gathers and source.plain and rule.softcap is None:
        slot, tokens = pieces[0]
        out, lse = _kernel(
            query.view(1, keys.shape[0], heads // keys.shape[0], dim),
            keys[None, :, slot : slot + tokens],
            values[None, :, slot : slot + tokens],
            0.0,
            False,
            scale=rule.scale,
        )
        return out[0] if sinks is None else _sunk(out[0], lse[0], sinks)
    merged = _Merged()
    for some_keys, some_values in source.parts(index, first, position + 1):
        merged.add(*_attend(query[:, None], some_keys, some_values, rule))
    assert merged.out is not None
    assert merged.lse is not None
    out, lse = merged.out[:, :, 0], merged.lse[:, :, 0]
    return out if sinks is None else _sunk(out, lse, sinks)


def _sunk(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Scale `out` [kv_heads, group, ..., dim] down, in place: each head's sink takes a share of the weight."""
    sink = sinks.view(lse.shape[0], lse.shape[1], *(1,) * (lse.dim() - 2))
    shares = torch.sigmoid(lse - sink.to(lse.dtype))
    return out.mul_(shares.unsqueeze(-1).to(out.dtype))


def _span(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    index: int,
    source: _Source,
    rule: _Rule,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """One sequence's rows: [kv_heads, group, rows, value_dim]."""
    span = source.cache.ragged.spans[index]
    blocks = rule.blocks(span)
    outs = []
    for low, high in blocks:
        merged = _block(query[:, low:high], key[:, low:high], value[:, low:high], index, low, source, rule)
        assert merged.out is not None
        assert merged.lse is not None
        outs.append(merged.out if sinks is None else _sunk(merged.out, merged.lse, sinks))
    return outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)


def _block(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    index: int,
    low: int,
    source: _Source,
    rule: _Rule,
) -> _Merged:
    """A block of rows: its own keys causally, those that all its rows see, and those at the window's edge."""
    rows = query.shape[1]
    first = source.cache.ragged.spans[index].start + low
    merged = _Merged()
    merged.add(*_attend(query, key, value, rule, causal=True))
    seen_by_all = rule.first_key(first + rows - 1)
    for keys, values in source.parts(index, seen_by_all, first):
        merged.add(*_attend(query, keys, values, rule))
    edge = rule.first_key(first)
    if edge < seen_by_all:  # a window: the last row sees none of these
        keys, values = source.ordered(index, edge, seen_by_all)
        assert rule.window is not None
        mask = _edge_mask(rows - 1, seen_by_all - edge, first - rule.window - edge, query.dtype)
        merged.add(*_attend(query[:, :-1], keys, values, rule, mask=mask), rows=rows - 1)
    return merged


def _edge_mask(rows: int, keys: int, shift: int, dtype: torch.dtype) -> torch.Tensor:
    """[rows, keys]: 0 where key > row + shift, else -inf."""
    hidden = torch.arange(keys)[None, :] <= torch.arange(rows)[:, None] + shift
    return torch.zeros((rows, keys), dtype=dtype).masked_fill_(hidden, -torch.inf)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rule: _Rule,
    *,
    causal: bool = False,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One part.

    Args:
        query: [heads, rows, dim].
        key: [kv_heads, keys, dim].
        value: [kv_heads, keys, value_dim].
        rule: Its scale and softcap are used.
        causal: Row i sees keys up to i.
        mask: Added to the scores, [rows, keys]; no row may be masked in full.

    Returns:
        out [kv_heads, group, rows, value_dim] and natural-log lse [kv_heads, group, rows].
    """
    if rule.softcap is not None:
        return _attend_softcap(query, key, value, rule, causal=causal, mask=mask)
    heads, rows, dim = query.shape
    kv_heads, value_dim = key.shape[0], value.shape[2]
    group = heads // kv_heads
    if value_dim < dim:  # the kernel wants them equal
        value = functional.pad(value, (0, dim - value_dim))
    fold = group > 1 and rows < _FOLD_BELOW_ROWS and not causal and mask is None
    if fold:
        query = query.reshape(kv_heads, group * rows, dim)
    out, lse = _kernel(
        query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0), 0.0, causal, attn_mask=mask, scale=rule.scale
    )
    shape = (kv_heads, group, rows)
    split = (1, (group, rows)) if fold else (0, (kv_heads, group))
    out = out[0, ..., :value_dim].unflatten(*split)
    return out, lse.reshape(shape)


def _attend_softcap(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rule: _Rule,
    *,
    causal: bool,
    mask: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Like `_attend`, in plain torch, with scores squashed into (-softcap, softcap)."""
    heads, rows, dim = query.shape
    kv_heads, keys = key.shape[0], key.shape[1]
    folded = query.reshape(kv_heads, heads // kv_heads * rows, dim)
    merged = _Merged()
    hidden: torch.Tensor | None = None
    if causal:
        hidden = torch.full((rows, keys), -torch.inf).triu_(1)
    elif mask is not None:
        hidden = mask.float()
    for at in range(0, keys, _EXPAND_TOKENS):
        some = slice(at, min(keys, at + _EXPAND_TOKENS))
        scores = torch.matmul(folded, key[:, some].transpose(1, 2)).float().mul_(rule.scale / rule.softcap)  # type: ignore[operator]
        scores = scores.tanh_().mul_(rule.softcap).view(kv_heads, -1, rows, some.stop - at)  # type: ignore[arg-type]
        if hidden is not None:
            scores += hidden[:, some]
        lse = scores.logsumexp(-1)
        weights = scores.sub_(lse.unsqueeze(-1)).exp_().to(value.dtype)
        merged.add(torch.matmul(weights.view(kv_heads, -1, some.stop - at), value[:, some]).view(*lse.shape, -1), lse)
    assert merged.out is not None
    assert merged.lse is not None
    return merged.out, merged.lse
