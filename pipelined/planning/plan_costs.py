"""Costs of layers put together to costs of stages, for any layout. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pipelined.costs import StageCost, Window
from pipelined.planning.communication import tp_bytes_per_token, tp_hops

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pipelined.planning.layouts import Layout
    from pipelined.planning.scenario import Link

__all__ = ["added", "scaled", "shared"]


def scaled(cost: StageCost, factor: float) -> StageCost:
    """All of its coefficients times `factor`."""
    return StageCost(
        a=cost.a * factor,
        b=cost.b * factor,
        c=cost.c * factor,
        d=cost.d * factor,
        windows=tuple(Window(one.tokens, one.a * factor, one.d * factor) for one in cost.windows),
        per_decode=None if cost.per_decode is None else cost.per_decode * factor,
        per_context=None if cost.per_context is None else cost.per_context * factor,
    )


def _explicit(cost: StageCost) -> StageCost:
    """With decodes as numbers: those of a chunk of one token, where nothing else is known."""
    context = 2 * cost.a + cost.d
    return replace(
        cost,
        per_decode=cost.chunk_s(0, 1) if cost.per_decode is None else cost.per_decode,
        per_context=context if cost.per_context is None else cost.per_context,
    )


def added(costs: Iterable[StageCost]) -> StageCost:
    """One after the other in the same stage."""
    total = StageCost(0.0, 0.0, 0.0)
    windows: dict[int, Window] = {}
    each = list(costs)
    decodes = any(cost.per_decode is not None or cost.per_context is not None for cost in each)
    per_decode = per_context = 0.0
    for cost in each:
        total = StageCost(total.a + cost.a, total.b + cost.b, total.c + cost.c, total.d + cost.d)
        for one in cost.windows:
            before = windows.get(one.tokens, Window(one.tokens))
            windows[one.tokens] = Window(one.tokens, before.a + one.a, before.d + one.d)
        if decodes:
            known = _explicit(cost)
            per_decode += known.per_decode or 0.0
            per_context += known.per_context or 0.0
    total = replace(total, windows=tuple(windows[tokens] for tokens in sorted(windows)))
    return replace(total, per_decode=per_decode, per_context=per_context) if decodes else total


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
    own = scaled(_explicit(cost), 1 / layout.tp)
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
