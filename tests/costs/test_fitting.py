from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelined.costs import MicroBatch, Sample, StageCost, Window, fit
from pipelined.costs.fitting import features, from_coefficients
from pipelined.errors import ConfigError

GRID = [(prefix, tokens) for prefix in (0, 1024, 4096, 16384) for tokens in (128, 256, 512, 1024, 2048)]
costs = st.builds(StageCost, st.floats(1e-9, 1e-7), st.floats(1e-5, 1e-4), st.floats(0, 0.05), st.floats(0, 1e-6))


def measured(cost: StageCost, noise: float = 0.0, seed: int = 0) -> list[Sample]:
    rng = np.random.default_rng(seed)
    works = [MicroBatch((chunk,)) for chunk in GRID]
    return [Sample(work, cost.launch_s(work) * float(np.exp(rng.normal(0, noise)))) for work in works]


@given(costs)
def test_exact_times_give_the_exact_model(cost: StageCost) -> None:
    found = fit(measured(cost))
    assert not found.problem
    assert found.worst_error < 1e-6
    for prefix, tokens in ((65536, 4096), (0, 64)):
        assert found.cost.chunk_s(prefix, tokens) == pytest.approx(cost.chunk_s(prefix, tokens), rel=1e-3, abs=1e-6)


@given(costs, st.integers(0, 10**6))
@settings(max_examples=30)
def test_a_slow_first_sample_and_noise_do_not_matter(cost: StageCost, seed: int) -> None:
    samples = measured(cost, 0.03, seed)
    samples[0] = samples[0]._replace(seconds=30 * samples[0].seconds)
    found = fit(samples)
    assert 0 in found.dropped
    assert not found.problem
    far = MicroBatch(((32768, 2048),))
    assert found.cost.launch_s(far) == pytest.approx(cost.launch_s(far), rel=0.15)


@given(costs, st.integers(0, 10**6))
@settings(max_examples=20)
def test_one_point_in_ten_may_be_wild(cost: StageCost, seed: int) -> None:
    rng = np.random.default_rng(seed)
    samples = measured(cost, 0.02, seed)
    for place in rng.choice(len(samples), 2, replace=False):
        samples[place] = samples[place]._replace(seconds=samples[place].seconds * float(rng.choice([0.05, 5, 50])))
    found = fit(samples)
    assert len(found.dropped) == 2
    assert found.mean_error < 0.05


def test_warm_up_is_skipped() -> None:
    samples = [Sample.of(0, 64, 9.0)] * 5 + measured(StageCost(1e-8, 1e-5, 0.01))
    found = fit(samples, warmup=5)
    assert found.dropped == ()
    assert found.worst_error < 1e-6
    assert "good (20 points" in found.verdict


def test_windows_and_decodes_have_their_terms() -> None:
    cost = StageCost(1e-8, 1e-5, 0.01, 1e-8, (Window(1000, 3e-8, 2e-8),), per_decode=1e-3, per_context=1e-7)
    works = [MicroBatch((chunk,)) for chunk in GRID] + [
        MicroBatch(((512, 256),) if n % 2 else (), n, n * context) for n in (1, 4, 16) for context in (500, 9000)
    ]
    found = fit([Sample(work, cost.launch_s(work)) for work in works], windows=(1000,))
    assert found.worst_error < 1e-6
    assert found.cost.per_decode == pytest.approx(1e-3, rel=1e-3)
    assert found.cost.windows[0].a == pytest.approx(3e-8, rel=1e-3)
    far = MicroBatch(((50_000, 512), (0, 64)), 8, 80_000)
    theta = [cost.c, cost.b, cost.d, cost.a, 1e-3, 1e-7, 2e-8, 3e-8]
    assert features(far, (1000,)) @ np.array(theta) == pytest.approx(cost.launch_s(far))
    assert from_coefficients(np.array(theta), (1000,)) == cost


def test_bad_fits_are_refused_with_the_reason() -> None:
    rng = np.random.default_rng(1)
    wild = [sample._replace(seconds=float(rng.uniform(0.001, 1))) for sample in measured(StageCost(1e-8, 1e-5, 0.01))]
    found = fit(wild)
    assert "stand out" in found.problem or "misses its points" in found.problem
    assert found.verdict.startswith("refused: ")
    with pytest.raises(ConfigError, match="measure again"):
        found.checked()
    assert "size" in fit([Sample.of(0, 64, 0.1 + i / 1000) for i in range(9)]).problem
    assert "does not grow" in fit([Sample.of(0, n, 0.1) for n in (64, 128, 256, 512)]).problem


def test_too_little_is_an_error() -> None:
    with pytest.raises(ConfigError, match="3 points after a warm-up of 2 are too few"):
        fit([Sample.of(0, n, 0.1) for n in (1, 2, 3, 4, 5)], warmup=2)
    with pytest.raises(ConfigError, match="point 2 took nan s"):
        fit([Sample.of(0, n, 0.1 if n != 3 else float("nan")) for n in (1, 2, 3, 4, 5)])
