"""What a configuration says of the work in each layer: heads, windows, experts. For plans; computes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["Shapes", "active_elements", "shapes"]

_EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts")


class Shapes(NamedTuple):
    """As in `ModelInfo`."""

    heads: int
    kv_heads: int
    attention_width: int
    windows: tuple[int, ...]


def shapes(text: Any, layers: int) -> Shapes:
    """Of a configuration's language model."""
    heads = int(text.num_attention_heads)
    if getattr(text, "kv_lora_rank", None):
        # Scores have the width of a query, values one of their own: the mean of both counts twice.
        query = getattr(text, "qk_nope_head_dim", 0) + text.qk_rope_head_dim
        value = getattr(text, "v_head_dim", None) or query
        return Shapes(heads, 1, heads * (query + value) // 2, ())
    groups = getattr(text, "num_key_value_heads", None) or heads
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    fewest = min(groups) if isinstance(groups, list | tuple) else groups
    return Shapes(heads, int(fewest), heads * int(width), _windows(text, layers))


def _windows(text: Any, layers: int) -> tuple[int, ...]:
    kinds = getattr(text, "layer_types", None)
    sizes = {
        "sliding_attention": getattr(text, "sliding_window", None) or 0,
        "chunked_attention": getattr(text, "attention_chunk_size", None) or 0,
    }
    if not kinds or len(kinds) != layers or not any(sizes.get(kind) for kind in kinds):
        return ()
    return tuple(sizes.get(kind, 0) for kind in kinds)


def active_elements(elements: Mapping[str, int], text: Any) -> Iterator[tuple[str, int]]:
    """Elements of each tensor that one token uses: of routed experts, the share that is chosen."""
    experts = next((count for name in _EXPERTS if isinstance(count := getattr(text, name, None), int) and count), 0)
    chosen = getattr(text, "num_experts_per_tok", None) or getattr(text, "moe_topk", None) or experts
    for name, count in elements.items():
        routed = ".experts." in name and "shared" not in name
        yield name, count * int(chosen) // experts if routed and experts else count
