"""Least squares with coefficients that are not negative."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["nnls"]


def nnls(matrix: npt.NDArray[np.float64], target: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The x >= 0 that minimises |matrix @ x - target|. Made for a handful of columns.

    The active-set method of Lawson and Hanson, on columns of unit length. Columns of zeros get 0.
    """
    lengths = np.linalg.norm(matrix, axis=0)
    scale = np.where(lengths > 0, lengths, 1.0)
    columns = matrix / scale
    size = columns.shape[1]
    x = np.zeros(size)
    free = np.zeros(size, dtype=bool)
    empty = lengths == 0
    refused = empty.copy()
    tolerance = 1e-12 * max(1.0, float(np.linalg.norm(target)))
    for _ in range(8 * size):  # each pass lowers the residual; a handful is the rule
        gradient = np.where(free | refused, -np.inf, columns.T @ (target - columns @ x))
        best = int(np.argmax(gradient))
        if gradient[best] <= tolerance:
            break
        free[best] = True
        before = x
        x = _descend(columns, target, x, free)
        if not free[best] or np.array_equal(before, x):
            refused[best] = True  # it depends on the others: not to be tried again until they have moved
        else:
            refused = empty.copy()
    return x / scale


def _descend(
    columns: npt.NDArray[np.float64],
    target: npt.NDArray[np.float64],
    x: npt.NDArray[np.float64],
    free: npt.NDArray[np.bool_],
) -> npt.NDArray[np.float64]:
    """Towards the unbounded solution of the free columns; those that reach 0 on the way leave `free` (in place)."""
    while free.any():
        goal = np.zeros_like(x)
        goal[free] = np.linalg.lstsq(columns[:, free], target, rcond=1e-13)[0]
        below = free & (goal <= 0)
        if not below.any():
            return goal
        with np.errstate(divide="ignore", invalid="ignore"):
            steps = np.where(below, x / (x - goal), np.inf)
        steps = np.nan_to_num(steps, nan=0.0, posinf=np.inf)
        x = x + min(1.0, float(np.min(steps))) * (goal - x)
        free &= ~(below & (steps <= np.min(steps)))
        x[~free] = 0.0
    return np.zeros_like(x)
