from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelined.costs import nnls


def by_enumeration(matrix: np.ndarray, target: np.ndarray) -> float:
    """The least residual over all choices of columns whose solution is not negative."""
    best = float(np.linalg.norm(target))
    for count in range(1, matrix.shape[1] + 1):
        for chosen in itertools.combinations(range(matrix.shape[1]), count):
            own = matrix[:, chosen]
            x = np.linalg.lstsq(own, target, rcond=None)[0]
            if (x >= -1e-12).all():
                best = min(best, float(np.linalg.norm(own @ np.maximum(x, 0) - target)))
    return best


@given(st.integers(0, 10**9), st.integers(1, 5), st.integers(1, 12))
def test_it_finds_the_least_residual(seed: int, columns: int, rows: int) -> None:
    rng = np.random.default_rng(seed)
    matrix, target = rng.normal(size=(rows, columns)), rng.normal(size=rows)
    if seed % 3 == 0 and columns > 1:
        matrix[:, -1] = matrix[:, 0] * (seed % 5)  # dependent, or all zeros
    x = nnls(matrix, target)
    assert (x >= 0).all()
    assert float(np.linalg.norm(matrix @ x - target)) <= by_enumeration(matrix, target) + 1e-8


@given(st.lists(st.floats(0, 10), min_size=3, max_size=3), st.integers(0, 10**9))
def test_it_recovers_coefficients_of_very_different_size(shares: list[float], seed: int) -> None:
    rng = np.random.default_rng(seed)
    matrix = rng.uniform(0.1, 1, size=(20, 3)) * np.array([1.0, 1e4, 1e9])
    truth = np.array(shares) / np.array([1.0, 1e4, 1e9])
    assert nnls(matrix, matrix @ truth) == pytest.approx(truth, rel=1e-6, abs=1e-10)


def test_nothing_fits_what_is_negative() -> None:
    assert nnls(np.eye(2), np.array([-1.0, -2.0])).tolist() == [0, 0]
    assert nnls(np.zeros((3, 2)), np.ones(3)).tolist() == [0, 0]
