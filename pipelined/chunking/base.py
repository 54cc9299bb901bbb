"""What decides how many prompt tokens go into a micro-batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from pipelined.costs import MicroBatch

__all__ = ["Budget", "ChunkPolicy", "Load"]


class Load(NamedTuple):
    """What a policy may know when a micro-batch is begun.

    Attributes:
        decodes: Decodes that are in the micro-batch already.
        decode_context_tokens: Sum of their context lengths.
        prompts: Prompts that still have tokens to prefill, admitted or waiting.
        queue: The first of those prompts, in the order in which they are served: (prefix tokens, tokens left) each.
        flying: What is in the micro-batches in flight, the oldest first.
    """

    decodes: int = 0
    decode_context_tokens: int = 0
    prompts: int = 0
    queue: tuple[tuple[int, int], ...] = ()
    flying: tuple[MicroBatch, ...] = ()


class Budget(Protocol):
    """What one micro-batch may still take. Made for it, asked once or more, then forgotten."""

    def offer(self, prefix_tokens: int, remaining_tokens: int) -> int:
        """Tokens that a prompt may run now; the scheduler takes that many or fewer (whole pages, what fits).

        Args:
            prefix_tokens: Tokens of the prompt before the chunk, cached ones too.
            remaining_tokens: Tokens of it that are not planned yet, at least 1.

        Returns:
            0 to `remaining_tokens`; 0: the micro-batch is full. The first offer to a micro-batch without decodes is a
            page or more (or all that remains), so that prefill always gets on.
        """
        ...

    def spend(self, prefix_tokens: int, tokens: int) -> None:
        """The chunk was planned."""
        ...


class ChunkPolicy(Protocol):
    """Sizes the chunks of all micro-batches of a pipeline."""

    def micro_batch(self, load: Load) -> Budget:
        """The budget of the next micro-batch."""
        ...
