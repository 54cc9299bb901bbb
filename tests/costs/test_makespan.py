from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelined.costs import makespan
from pipelined.errors import ConfigError

shapes = st.tuples(st.integers(1, 12), st.integers(1, 6), st.integers(0, 10**9))


@given(shapes)
def test_it_is_the_recurrence(shape: tuple[int, int, int]) -> None:
    steps, stages, seed = shape
    rng = np.random.default_rng(seed)
    times, hops = rng.exponential(size=(steps, stages)), rng.exponential(size=(steps, stages - 1))
    ready = rng.exponential(3, size=steps)
    finish = makespan(times, hops, ready)
    for i in range(steps):
        for s in range(stages):
            arrival = ready[i] if s == 0 else finish[i, s - 1] + hops[i, s - 1]
            before = finish[i - 1, s] if i else 0.0
            assert finish[i, s] == pytest.approx(max(arrival, before) + times[i, s])


@given(st.lists(st.floats(0, 100), min_size=1, max_size=30), st.integers(1, 8))
def test_stages_alike_take_the_sum_and_the_largest(times: list[float], stages: int) -> None:
    finish = makespan(np.repeat(np.array(times)[:, None], stages, axis=1), hop_s=0.5)
    assert finish[-1, -1] == pytest.approx(sum(times) + (stages - 1) * (max(times) + 0.5))


def test_shapes_are_checked() -> None:
    with pytest.raises(ConfigError, match="steps, stages"):
        makespan([1.0, 2.0])
