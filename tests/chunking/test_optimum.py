from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelined.chunking import cut_seconds, optimum
from pipelined.costs import StageCost
from pipelined.errors import ConfigError

costs = st.builds(StageCost, st.floats(0, 1e-3), st.floats(1e-3, 1), st.floats(0, 20), st.floats(0, 1e-2))


def cuts(units: int) -> list[tuple[int, ...]]:
    """All compositions."""
    if not units:
        return [()]
    return [(first, *rest) for first in range(1, units + 1) for rest in cuts(units - first)]


@given(costs, st.integers(1, 9), st.floats(0, 9), st.integers(0, 300), st.integers(0, 6))
@settings(max_examples=60, deadline=None)
def test_it_is_the_best_of_all_cuts(cost: StageCost, units: int, fill: float, prefix: int, short: int) -> None:
    tokens = 7 * units - short
    best = min(
        cut_seconds(cost, (*(7 * n for n in cut[:-1]), 7 * cut[-1] - short), fill, prefix) for cut in cuts(units)
    )
    found = optimum(cost, tokens, fill, prefix_tokens=prefix, align=7, within=1e-7)
    assert sum(found.sizes) == tokens
    assert cut_seconds(cost, found.sizes, fill, prefix) == pytest.approx(found.seconds)
    assert found.seconds == pytest.approx(best, rel=1e-6)


def test_nothing_cannot_be_cut() -> None:
    with pytest.raises(ConfigError, match="expected 1 or more"):
        optimum(StageCost(0, 1, 1), 0, 3)
