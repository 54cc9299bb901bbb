"""How long a micro-batch should take: the fast search behind balanced chunks.

For a queue of prompts cut into micro-batches of times t_i, P stages alike take sum t_i + (P - 1) * max t_i; of several
prompts, what they wait on average counts as much as what the last one does. A longer target means fewer launches and a
longer way through the pipeline. The search looks at many targets at once: over an integral along the prompts for a
first idea, then, where there are few micro-batches, over the very cuts that each target leads to.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pipelined.costs import MicroBatch, PipelineCost

if TYPE_CHECKING:
    from typing import TypeAlias

    import numpy.typing as npt

    from pipelined.costs import StageCost

    FloatArray: TypeAlias = npt.NDArray[np.float64]

__all__ = ["Target", "Task", "find_target"]

FEW = 32
"""Up to so many micro-batches are cut exactly; beyond, an integral is as good."""

FEW_PROMPTS = 4
"""Likewise for prompts."""

_COARSE = 48
_FINE = 256  # side by side: many take hardly longer than few
_POINTS = 48
_PROMPTS = 24


class Target(NamedTuple):
    """What a micro-batch should take at most.

    Attributes:
        seconds: On the stage that is slowest at it.
        micro_batches: About how many the queue takes.
        exact: Found by cutting, not by an integral.
    """

    seconds: float
    micro_batches: float
    exact: bool


@dataclass(frozen=True)
class Task:
    """What is to be cut.

    Attributes:
        cost: Of the pipeline.
        queue: (prefix tokens, tokens left) of the prompts, in order.
        align: Chunks are multiples of this, but for the last of a prompt.
        most_tokens: Of a micro-batch.
        beside: Decodes that are in every micro-batch.
        sunk_s: A time that micro-batches under way take anyhow: what takes no longer makes nothing worse.
        most_s: No target above this, or None.
    """

    cost: PipelineCost
    queue: tuple[tuple[int, int], ...]
    align: int = 64
    most_tokens: int = 1 << 40
    beside: MicroBatch = field(default_factory=MicroBatch)
    sunk_s: float = 0.0
    most_s: float | None = None


def find_target(task: Task) -> Target:
    """The target with the least predicted time for the queue: until its last prompt has a token, and on average."""
    search = _Search(task)
    targets = search.range()
    scores, counts = search.integrate(targets)
    best = int(scores.argmin())
    if counts[best] > FEW or len(task.queue) > FEW_PROMPTS:
        return Target(float(targets[best]), float(counts[best]), exact=False)
    # What the integral says of few micro-batches is rough: look at some more, and some fewer.
    near = np.flatnonzero((counts <= 1.25 * counts[best] + 3) & (counts >= 0.8 * counts[best] - 2))
    low, high = targets[max(0, near[0] - 1)], targets[min(len(targets) - 1, near[-1] + 1)]
    fine = np.geomspace(low, high, _FINE)
    scores, counts = search.cut(fine)
    best = int(scores.argmin())
    return Target(float(fine[best]), float(counts[best]), exact=True)


class _Search:
    def __init__(self, task: Task) -> None:
        self._task = task
        prompts = task.queue[:_PROMPTS]
        each = max(2, _POINTS // len(prompts))
        middles = (np.arange(each) + 0.5) / each
        self._L = np.concatenate([prefix + left * middles for prefix, left in prompts])
        # prompts beyond those looked at are like them
        scale = sum(left for _, left in task.queue) / sum(left for _, left in prompts)
        self._weight = np.concatenate([np.full(each, scale * left / each) for _, left in prompts])
        self._lefts = np.concatenate([np.full(each, float(left)) for _, left in prompts])
        self._stages = self._bottlenecks()
        self._base = [stage.launch_s(task.beside) for stage in self._stages]
        typical = float(np.median(self._L)), max(1, min(task.align * 16, task.most_tokens, prompts[0][1]))
        work = MicroBatch(((int(typical[0]), typical[1]),), task.beside.decodes, task.beside.context_tokens)
        self._fill = task.cost.fill([work])

    def _bottlenecks(self) -> list[StageCost]:
        """Stages that are the slowest anywhere."""
        stages, task = self._task.cost.distinct, self._task
        if len(stages) == 1:
            return list(stages)
        sizes = np.geomspace(task.align, max(task.align, min(task.most_tokens, max(left for _, left in task.queue))), 5)
        L, x = np.meshgrid(self._L[:: max(1, len(self._L) // 8)], sizes)
        times = np.stack([stage.launch_s(task.beside) + stage.chunks_s(L, x) for stage in stages])
        return [stages[index] for index in np.unique(times.argmax(axis=0))]

    def range(self) -> FloatArray:
        """Targets worth a look: from the least chunk anywhere to the largest micro-batch."""
        task = self._task
        most = float(min(task.most_tokens, max(sum(left for _, left in task.queue), task.align)))
        chunk = np.minimum(np.minimum(self._lefts, most), float(task.align))
        low = min(b + s.chunks_s(self._L, chunk).min() for b, s in self._pairs())
        high = max(b + s.chunks_s(self._L, np.full_like(self._L, most)).max() for b, s in self._pairs())
        low = max(low, task.sunk_s)
        if task.most_s is not None:
            low, high = min(low, task.most_s), min(high, task.most_s)
        return np.geomspace(low, max(low, high), _COARSE)

    def _pairs(self) -> list[tuple[float, StageCost]]:
        return list(zip(self._base, self._stages, strict=True))

    def _time(self, sums: FloatArray, peaks: FloatArray) -> FloatArray:
        """What counts: halfway between when the last prompt of the queue has its first token and the mean of all.

        On average prompts wait for (n + 1) / 2n of the sum, and for the way through the pipeline as the last one does.
        """
        prompts = len(self._task.queue)
        return (3 * prompts + 1) / (4 * prompts) * sums + self._fill * np.maximum(peaks, self._task.sunk_s)

    def integrate(self, targets: FloatArray) -> tuple[FloatArray, FloatArray]:
        """(predicted seconds, micro-batches) for each target, from chunk sizes at points along the prompts.

        Chunks are taken to lie around the points, so that their time is that of their middle token times their size;
        they may go on into the next prompt.
        """
        align, L = float(self._task.align), self._L
        parts = [(base + stage.looks_s(L), stage.rates_s(L)) for base, stage in self._pairs()]
        sizes = np.full((len(targets), len(L)), float(self._task.most_tokens))
        with np.errstate(divide="ignore"):
            for fixed, rate in parts:
                sizes = np.minimum(sizes, (targets[:, None] - fixed) / rate)
        sizes = np.maximum(np.floor(sizes / align) * align, align)
        times = np.zeros_like(sizes)
        for fixed, rate in parts:
            times = np.maximum(times, fixed + rate * sizes)
        counts = self._weight / sizes
        peaks = np.minimum(times.max(axis=1), (counts * times).sum(axis=1))
        return self._time(np.maximum((counts * times).sum(axis=1), peaks), peaks), counts.sum(axis=1)

    def cut(self, targets: FloatArray) -> tuple[FloatArray, FloatArray]:
        """(predicted seconds, micro-batches) for each target, by cutting the queue as the policy would."""
        lanes = _Lanes(self._task, targets, self._pairs())
        for _ in range(8 * FEW + 4 * len(self._task.queue)):
            if not lanes.step():
                break
        return self._time(lanes.sums, lanes.peaks), lanes.counts


class _Lanes:
    """The cuts of all targets, side by side: each lane is one target's walk along the queue."""

    def __init__(self, task: Task, targets: FloatArray, stages: list[tuple[float, StageCost]]) -> None:
        self._align, self._most = float(task.align), float(task.most_tokens)
        self._starts = np.array([prefix for prefix, _ in task.queue] + [0], dtype=np.float64)
        self._lengths = np.array([left for _, left in task.queue] + [0], dtype=np.float64)
        self._targets, self._stages = targets, stages
        self._prompt = np.zeros(len(targets), dtype=int)
        self._done = np.zeros(len(targets))
        self._tokens = np.zeros(len(targets))
        self._base = np.array([base for base, _ in stages])[:, None]
        self._used = np.repeat(self._base, len(targets), axis=1)
        self.sums = np.zeros(len(targets))
        self.peaks = np.zeros(len(targets))
        self.counts = np.zeros(len(targets))

    def step(self) -> bool:
        """One more chunk in every lane that is not through; whether any is left."""
        last = len(self._lengths) - 1
        going = self._prompt < last
        if not going.any():
            return False
        L = self._starts[self._prompt] + self._done
        left = self._lengths[self._prompt] - self._done
        room = self._most - self._tokens
        for used, (_, stage) in zip(self._used, self._stages, strict=True):
            room = np.minimum(room, stage.many_within(L, (self._targets - used) * (1 + 1e-9)))
        size = np.where(room >= left, left, np.floor(room / self._align) * self._align)
        size = np.where(self._tokens == 0, np.maximum(size, np.minimum(self._align, left)), size)
        size = np.where(going, size, 0.0)
        took = size > 0
        for row, (_, stage) in enumerate(self._stages):
            self._used[row] += np.where(took, stage.chunks_s(L, size), 0.0)
        self._tokens += size
        self._done += size
        ended = going & (size >= left)
        self._prompt[ended] += 1
        self._done[ended] = 0.0
        self._close(going & (~ended | (self._prompt == last)))
        return True

    def _close(self, full: npt.NDArray[np.bool_]) -> None:
        """Those micro-batches take no more."""
        slowest = self._used.max(axis=0)
        self.sums += np.where(full, slowest, 0.0)
        self.peaks = np.where(full, np.maximum(self.peaks, slowest), self.peaks)
        self.counts += full
        self._used = np.where(full, self._base, self._used)
        self._tokens = np.where(full, 0.0, self._tokens)
