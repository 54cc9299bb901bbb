"""What a micro-batch does, as far as its cost goes."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["MicroBatch"]


class MicroBatch(NamedTuple):
    """The work of one launch.

    Attributes:
        chunks: (prefix tokens, tokens) of each chunk of a prompt.
        decodes: Sequences that get one token.
        context_tokens: Sum of the context lengths of those.
    """

    chunks: tuple[tuple[int, int], ...] = ()
    decodes: int = 0
    context_tokens: int = 0

    @property
    def tokens(self) -> int:
        """Rows that flow."""
        return sum(tokens for _, tokens in self.chunks) + self.decodes
