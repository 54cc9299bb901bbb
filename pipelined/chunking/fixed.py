"""Chunks of one size."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipelined.errors import ConfigError

if TYPE_CHECKING:
    from pipelined.chunking.base import Load

__all__ = ["FixedChunks", "TokenBudget"]


class FixedChunks:
    """At most `chunked_prefill_size` prompt tokens in a micro-batch, from one prompt or several.

    Decodes in it are not counted: a long prompt is cut into equal chunks whatever else runs.
    """

    def __init__(self, chunked_prefill_size: int) -> None:
        if chunked_prefill_size < 1:
            raise ConfigError(f"chunked_prefill_size={chunked_prefill_size} is not a chunk; expected 1 token or more")
        self.chunked_prefill_size = chunked_prefill_size

    def __repr__(self) -> str:
        return f"<FixedChunks {self.chunked_prefill_size}>"

    def micro_batch(self, load: Load) -> TokenBudget:
        """The same for every micro-batch."""
        return TokenBudget(self.chunked_prefill_size)


class TokenBudget:
    """So many tokens, whoever takes them."""

    __slots__ = ("_left",)

    def __init__(self, tokens: int) -> None:
        self._left = tokens

    def offer(self, prefix_tokens: int, remaining_tokens: int) -> int:
        """What is left."""
        return min(self._left, remaining_tokens)

    def spend(self, prefix_tokens: int, tokens: int) -> None:
        """The chunk was planned."""
        self._left -= tokens
