"""The KV memory of a stage, and the `Cache` that hands it to a transformers model.

A layer's keys lie as [kv_heads, slots, head_dim] and its values likewise, so that a run of consecutive slots is a
strided view. Which slots hold which positions comes with each batch (`Ragged`); nothing here allocates or frees pages.
Knows nothing of how attention is computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache

from pipelined.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .batching import Segment, SlotRun

__all__ = ["GATHER_BELOW_TOKENS", "GATHER_BLOCK_TOKENS", "KvLayer", "KvPool", "PagedCache", "Piece", "Ragged", "Span"]

GATHER_BELOW_TOKENS = 256
"""Runs shorter than this are copied together before attending: a call for each would cost more than the copy."""

GATHER_BLOCK_TOKENS = 4096
"""Most tokens that are copied together at a time, which bounds the memory for it."""

_SCATTER_BELOW_ROWS = 8
"""New rows in runs shorter than this are written by one indexed copy for all of them."""

Piece = tuple[int, int]
"""(first slot, tokens): consecutive slots that are read in place."""


@dataclass(frozen=True)
class KvLayer:
    """Memory of one layer: `keys` [kv_heads, slots, key_dim], `values` [kv_heads, slots, value_dim]."""

    keys: torch.Tensor
    values: torch.Tensor


class KvPool:
    """KV memory for `slots` tokens in each layer that asks for it. Untouched memory costs nothing but address space."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._layers: dict[int, KvLayer] = {}

    def __repr__(self) -> str:
        return f"<KvPool {self.slots} slots, {len(self._layers)} layers>"

    @property
    def size_bytes(self) -> int:
        """Bytes of address space taken so far."""
        tensors = [tensor for layer in self._layers.values() for tensor in (layer.keys, layer.values)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def layer(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> KvLayer:
        """The memory of layer `index`, made to fit `keys` and `values` ([1, kv_heads, rows, dim]) the first time."""
        found = self._layers.get(index)
        if found is None:
            made = [
                torch.empty((new.shape[1], self.slots, new.shape[3]), dtype=new.dtype, device=new.device)
                for new in (keys, values)
            ]
            found = self._layers[index] = KvLayer(*made)
        return found


@dataclass(frozen=True)
class Span:
    """Rows [row, row + rows) of a batch belong to one sequence and stand at positions from `start` on."""

    row: int
    rows: int
    start: int
    runs: tuple[SlotRun, ...]

    @property
    def end(self) -> int:
        """Position after the last row."""
        return self.start + self.rows

    def slots(self, first: int, end: int) -> list[Piece]:
        """Where positions [first, end) lie, in order."""
        pieces: list[Piece] = []
        at = 0
        for slot, tokens in self.runs:
            low, high = max(first, at), min(end, at + tokens)
            if low < high:
                pieces.append((slot + low - at, high - low))
            at += tokens
            if at >= end:
                break
        return pieces


class Ragged:
    """A batch as attention and KV memory see it: segments back to back, each at its own positions.

    What is read and written is worked out once and used by every layer.
    """

    def __init__(self, segments: Sequence[Segment]) -> None:
        spans: list[Span] = []
        row = 0
        for segment in segments:
            spans.append(Span(row, segment.length, segment.start, segment.runs))
            row += segment.length
        self.spans: tuple[Span, ...] = tuple(spans)
        self.rows = row
        self.positions = _positions(spans)  # [rows] int64
        self._copies, self._scatter = _writes(spans)
        self._reads: dict[tuple[int, int, int], tuple[tuple[Piece, ...], tuple[torch.Tensor, ...]]] = {}

    def write(self, layer: KvLayer, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store the batch's new keys and values ([1, kv_heads, rows, dim]) in their slots."""
        for memory, new in ((layer.keys, keys[0]), (layer.values, values[0])):
            for row, slot, rows in self._copies:
                memory[:, slot : slot + rows].copy_(new[:, row : row + rows])
            if self._scatter is not None:
                at, slots = self._scatter
                memory.index_copy_(1, slots, new if at is None else new.index_select(1, at))

    def reads(self, index: int, first: int, end: int) -> tuple[tuple[Piece, ...], tuple[torch.Tensor, ...]]:
        """How to read positions [first, end) of span `index` in any order.

        Returns:
            Pieces to read in place, and slot numbers ([tokens] int64 each) to gather.
        """
        key = (index, first, end)
        found = self._reads.get(key)
        if found is None:
            found = self._reads[key] = _plan_reads(self.spans[index].slots(first, end))
        return found


def _positions(spans: Iterable[Span]) -> torch.Tensor:
    parts = [torch.arange(span.start, span.end) for span in spans]
    return parts[0] if len(parts) == 1 else torch.cat([*parts, torch.empty(0, dtype=torch.int64)])


def _writes(
    spans: Iterable[Span],
) -> tuple[list[tuple[int, int, int]], tuple[torch.Tensor | None, torch.Tensor] | None]:
    copies: list[tuple[int, int, int]] = []
    for span in spans:
        row = span.row
        for slot, rows in span.slots(span.start, span.end):
            copies.append((row, slot, rows))
            row += rows
    small = [copy for copy in copies if copy[2] < _SCATTER_BELOW_ROWS]
    if len(small) < 2:
        return copies, None
    at = torch.cat([torch.arange(row, row + rows) for row, _, rows in small])
    slots = torch.cat([torch.arange(slot, slot + rows) for _, slot, rows in small])
    large = [copy for copy in copies if copy[2] >= _SCATTER_BELOW_ROWS]
    return large, (at if large else None, slots)


def _plan_reads(pieces: Sequence[Piece]) -> tuple[tuple[Piece, ...], tuple[torch.Tensor, ...]]:
    short = [piece for piece in pieces if piece[1] < GATHER_BELOW_TOKENS]
    if len(short) < 2:
        return tuple(pieces), ()
    slots = slot_numbers(short)
    long = tuple(piece for piece in pieces if piece[1] >= GATHER_BELOW_TOKENS)
    return long, torch.split(slots, GATHER_BLOCK_TOKENS)


def slot_numbers(pieces: Iterable[Piece]) -> torch.Tensor:
    """Slot of every token of `pieces`, in order: [tokens] int64."""
    return torch.cat([torch.arange(slot, slot + tokens) for slot, tokens in pieces])


class PagedCache(Cache):  # type: ignore[misc]
    """What the model takes for its cache: stores what is new, and leaves what is old to the attention function.

    One for each stage. `begin` before a forward says which batch it is. The attention function finds it on the module
    that calls it (see `slicing.attach`) and reads `ragged` and `current` from it.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.pool = KvPool(0)
        self.ragged = Ragged(())
        self.current: KvLayer | None = None
        self.updates = 0
        self._scratch: dict[tuple[int, int, torch.dtype], tuple[torch.Tensor, torch.Tensor]] = {}
        self._offsets: torch.Tensor | None = None

    def begin(self, ragged: Ragged) -> None:
        """The next forward runs this batch."""
        self.ragged = ragged
        self.current = None
        self.updates = 0
        self._offsets = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the new keys and values ([1, kv_heads, rows, dim]) and return only them."""
        if key_states.shape[2] != self.ragged.rows:
            raise ModelError(
                f"layer {layer_idx} caches {key_states.shape[2]} rows for a batch of {self.ragged.rows}: this "
                "architecture keeps something else than one key per token and cannot be sliced"
            )
        self.current = self.pool.layer(layer_idx, key_states, value_states)
        self.updates += 1
        self.ragged.write(self.current, key_states, value_states)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """Positions minus row numbers, [rows]: models add `arange(rows)` to it and so get each row's position."""
        if self._offsets is None:
            self._offsets = self.ragged.positions - torch.arange(self.ragged.rows)
        return self._offsets

    def gather(self, layer: KvLayer, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values at `slots` ([kv_heads, tokens, dim]), copied into a buffer that the next call overwrites."""
        gathered = []
        for memory, scratch in zip((layer.keys, layer.values), self._buffers(layer), strict=True):
            target = scratch[: memory.shape[0] * len(slots)].view(memory.shape[0], len(slots), memory.shape[2])
            gathered.append(torch.index_select(memory, 1, slots, out=target))
        return gathered[0], gathered[1]

    def _buffers(self, layer: KvLayer) -> tuple[torch.Tensor, torch.Tensor]:
        heads, _, key_dim = layer.keys.shape
        value_dim = layer.values.shape[2]
        key = (heads * key_dim, heads * value_dim, layer.keys.dtype)
        found = self._scratch.get(key)
        if found is None:
            rows = heads * GATHER_BLOCK_TOKENS
            found = self._scratch[key] = (
                layer.keys.new_empty((rows, key_dim)),
                layer.values.new_empty((rows, value_dim)),
            )
        return found
