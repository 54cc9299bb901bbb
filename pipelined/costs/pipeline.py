"""The cost model of a pipeline: that of each of its stages, the slowest of which counts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from pipelined.costs.work import MicroBatch
from pipelined.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pipelined.costs.stage import StageCost

__all__ = ["PipelineCost"]


@dataclass(frozen=True)
class PipelineCost:
    """Costs of the stages, the first first."""

    stages: tuple[StageCost, ...]

    def __post_init__(self) -> None:
        if not self.stages:
            raise ConfigError("a pipeline's cost needs one stage or more, got none")

    @classmethod
    def even(cls, stage: StageCost, pp_size: int) -> PipelineCost:
        """`pp_size` stages alike."""
        return cls((stage,) * pp_size)

    @cached_property
    def distinct(self) -> tuple[StageCost, ...]:
        """Stages alike counted once."""
        return tuple(dict.fromkeys(self.stages))

    def times_s(self, work: MicroBatch) -> tuple[float, ...]:
        """Seconds of a micro-batch on each stage."""
        return tuple(stage.launch_s(work) for stage in self.stages)

    def launch_s(self, work: MicroBatch) -> float:
        """Seconds of a micro-batch on the stage that is slowest at it."""
        return max(stage.launch_s(work) for stage in self.distinct)

    def tokens_within(self, prefix_tokens: float, seconds: float) -> float:
        """Most tokens that a launch of one chunk may have, so that no stage takes longer than `seconds`."""
        return min((stage.tokens_within(prefix_tokens, seconds - stage.c) for stage in self.distinct), default=math.inf)

    def fill(self, works: Iterable[MicroBatch]) -> float:
        """Stages but the slowest, each counted by its speed: what a launch costs on its way in and out.

        P - 1 for P stages alike; with it, a prompt cut into chunks takes sum t_i + fill * max t_i.
        """
        total = slowest = 0.0
        for work in works:
            times = self.times_s(work)
            total += sum(times)
            slowest += max(times)
        return total / slowest - 1 if slowest > 0 else float(len(self.stages) - 1)
