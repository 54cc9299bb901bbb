"""When everything ends: the recurrence of a pipeline whose stages each do one thing at a time, in order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pipelined.errors import ConfigError

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["makespan"]


def makespan(
    times_s: npt.ArrayLike, hop_s: npt.ArrayLike = 0.0, ready_s: npt.ArrayLike = 0.0
) -> npt.NDArray[np.float64]:
    """Finish times of steps that flow through stages: finish = max(previous on the stage, arrival) + time.

    Args:
        times_s: Seconds, [steps, stages].
        hop_s: From one stage to the next: a number, or anything that broadcasts to [steps, stages - 1].
        ready_s: When each step may begin on the first stage: a number or [steps].

    Returns:
        [steps, stages]; the last step leaves the last stage at `[-1, -1]`.
    """
    times = np.asarray(times_s, dtype=np.float64)
    if times.ndim != 2 or not times.size:
        raise ConfigError(f"times of shape {times.shape}: expected [steps, stages], one of each or more")
    steps, stages = times.shape
    hops = np.broadcast_to(np.asarray(hop_s, dtype=np.float64), (steps, stages - 1))
    arrival = np.broadcast_to(np.asarray(ready_s, dtype=np.float64), (steps,))
    finish = np.empty_like(times)
    for stage in range(stages):
        # max-plus along the steps: when the last wait ended, plus all the work since
        done = np.cumsum(times[:, stage])
        finish[:, stage] = done + np.maximum.accumulate(arrival - (done - times[:, stage]))
        if stage + 1 < stages:
            arrival = finish[:, stage] + hops[:, stage]
    return finish
