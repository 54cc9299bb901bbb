"""What a stage takes once the ranks of a layout share it. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pipelined.costs import explicit, scaled
from pipelined.planning.communication import tp_bytes_per_token, tp_hops

if TYPE_CHECKING:
    from pipelined.costs import StageCost
    from pipelined.planning.layouts import Layout
    from pipelined.planning.scenario import Link

__all__ = ["shared"]


def shared(
    cost: StageCost, layout: Layout, link: Link, *, layers: int, hidden_bytes: float, kv_bytes: float
) -> StageCost:
    """A stage's cost once TP and CP ranks share it, with what they have to tell each other.

    Work on tokens is divided by all of them, reading weights by the TP ranks alone. What is told does not overlap with
    the work, as in the published measurements, where large TP gets slower.

    Args:
        cost: On one device.
        layout: Whose `tp` and `cp` count.
        link: Between any two ranks.
        layers: Of the stage.
        hidden_bytes: Of a token's hidden state.
        kv_bytes: Keys and values of a token, of all layers of the stage.
    """
    if layout.tp == layout.cp == 1:
        return cost
    own = scaled(explicit(cost), 1 / layout.tp)
    split = scaled(own, 1 / layout.cp)
    second_per_byte = 1e-9 / link.bandwidth_gbytes_per_s if link.bandwidth_gbytes_per_s else 0.0
    latency_s = 1e-6 * link.latency_us
    told = layers * tp_bytes_per_token(layout.tp, hidden_bytes) * second_per_byte
    gathered = (layout.cp - 1) / layout.cp * kv_bytes / layout.tp * second_per_byte
    hops = layers * (tp_hops(layout.tp) + layout.cp - 1) * latency_s
    return replace(
        split,
        b=split.b + told / layout.cp + gathered,
        c=own.c + hops,
        per_decode=(own.per_decode or 0.0) + told,  # a single token is not split
    )
