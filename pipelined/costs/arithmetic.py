"""Costs of layers put together to costs of stages."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pipelined.costs.stage import StageCost, Window

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["added", "explicit", "scaled"]


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


def explicit(cost: StageCost) -> StageCost:
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
            known = explicit(cost)
            per_decode += known.per_decode or 0.0
            per_context += known.per_context or 0.0
    total = replace(total, windows=tuple(windows[tokens] for tokens in sorted(windows)))
    return replace(total, per_decode=per_decode, per_context=per_context) if decodes else total
