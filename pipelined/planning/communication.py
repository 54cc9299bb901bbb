"""How many bytes each kind of parallelism moves for a prompt, and how long that takes. Pure.

The volumes are those of one *chain*: one device of each stage. With one kind of parallelism alone they are the
published formulas, for S tokens, hidden size H, L layers, and keys and values of KV bytes a token and layer:

    TP   4 * (TP - 1) / TP * S * H * L     two all-reduces a layer, each moving its operand twice around a ring
    CP   (CP - 1) / CP * S * KV * L        keys and values of all others
    PP   (PP - 1) * S * H                  hidden states, once at each boundary
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipelined.planning.layouts import Layout

__all__ = ["Moved", "moved_bytes", "tp_bytes_per_token", "tp_hops"]


@dataclass(frozen=True)
class Moved:
    """Bytes of a chain, by what moved them."""

    tp: float
    cp: float
    pp: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.tp + self.cp + self.pp


def tp_bytes_per_token(tp: int, hidden_bytes: float) -> float:
    """What each device sends for a token in each layer: two all-reduces of the hidden state."""
    return 4 * (tp - 1) / tp * hidden_bytes


def tp_hops(tp: int) -> int:
    """Latencies that a layer waits for: two all-reduces, each twice around the ring."""
    return 4 * (tp - 1)


def moved_bytes(layout: Layout, tokens: int, *, layers: int, hidden_bytes: float, kv_bytes: float) -> Moved:
    """For a prompt of so many tokens.

    Args:
        layout: How the devices share the work.
        tokens: Of the prompt.
        layers: Of the model.
        hidden_bytes: Of a token's hidden state.
        kv_bytes: Keys and values of a token, of all layers together.
    """
    own = tokens / layout.cp  # with context parallelism each chain has its part of the sequence
    return Moved(
        tp=layers * own * tp_bytes_per_token(layout.tp, hidden_bytes),
        cp=(layout.cp - 1) * own * kv_bytes / layout.tp,
        pp=(layout.pp - 1) * own * hidden_bytes,
    )
