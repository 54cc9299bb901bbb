"""Costs of layers, put together."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelined.costs import MicroBatch, StageCost, Window, added, scaled

SECONDS = st.floats(0, 1e-3)
WINDOWS = st.lists(st.builds(Window, st.sampled_from([64, 512]), SECONDS, SECONDS), max_size=2).map(tuple)
COSTS = st.builds(StageCost, SECONDS, SECONDS, SECONDS, SECONDS, windows=WINDOWS, per_decode=st.none() | SECONDS)
WORK = MicroBatch(((100, 50), (0, 700)), 3, 900)


@given(st.lists(COSTS, min_size=1, max_size=4))
def test_layers_add_up(costs: list[StageCost]) -> None:
    chunks = WORK._replace(decodes=0, context_tokens=0)
    assert added(costs).launch_s(chunks) == pytest.approx(
        sum(cost.launch_s(chunks) for cost in costs), rel=1e-9, abs=1e-12
    )
    assert scaled(added(costs), 0.5).launch_s(WORK) == pytest.approx(
        added(costs).launch_s(WORK) / 2, rel=1e-9, abs=1e-12
    )
    if not any(cost.windows for cost in costs):
        assert added(costs).launch_s(WORK) == pytest.approx(
            sum(cost.launch_s(WORK) for cost in costs), rel=1e-9, abs=1e-12
        )
