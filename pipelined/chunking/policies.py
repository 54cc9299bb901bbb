"""Chunk policies by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipelined.chunking.balanced import BalancedChunks
from pipelined.chunking.dynamic import DynamicChunks
from pipelined.chunking.fixed import FixedChunks
from pipelined.costs import LiveCosts
from pipelined.errors import ConfigError, nearest

if TYPE_CHECKING:
    from pipelined.chunking.base import ChunkPolicy

__all__ = ["POLICIES", "make_policy"]

POLICIES = ("fixed", "dynamic", "balanced")


def make_policy(
    name: str,
    *,
    chunked_prefill_size: int,
    page_size: int = 64,
    costs: LiveCosts | None = None,
    smoothing_factor: float = 0.75,
    max_micro_batch_tokens: int | None = None,
    target_itl_s: float | None = None,
) -> ChunkPolicy:
    """The policy of that name.

    Args:
        name: "fixed", "dynamic" or "balanced".
        chunked_prefill_size: Of fixed chunks; where dynamic ones begin.
        page_size: Tokens of a KV page.
        costs: What is known of the stages, and learns on. None: of one stage, nothing.
        smoothing_factor: Of dynamic chunks.
        max_micro_batch_tokens: Bound on balanced micro-batches.
        target_itl_s: Inter-token latency that balanced micro-batches keep to while decodes run.

    Raises:
        ConfigError: There is none of that name, or a value is out of range.
    """
    costs = costs or LiveCosts(1)
    if name == "fixed":
        return FixedChunks(chunked_prefill_size)
    if name == "dynamic":
        return DynamicChunks(chunked_prefill_size, costs, smoothing=smoothing_factor, page_size=page_size)
    if name == "balanced":
        return BalancedChunks(costs, page_size=page_size, most_tokens=max_micro_batch_tokens, target_itl_s=target_itl_s)
    raise ConfigError(f"unknown chunk policy {name!r}{nearest(name, POLICIES)}")
