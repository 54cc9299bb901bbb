"""What the coroutines of a rank share: services, and counts of what was done."""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from pipelined.errors import RankError, RequestCancelled
from pipelined.messages import ErrorInfo
from pipelined.trace.histogram import STEP_S, WAIT_S, Histogram

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipelined.clock import Clock
    from pipelined.messages import Step
    from pipelined.rank.config import RankConfig
    from pipelined.rank.deadlines import Deadlines
    from pipelined.rank.links import Links
    from pipelined.stage import Device, Stage
    from pipelined.trace import Tracer
    from pipelined.transport import Topology

__all__ = ["Core", "Counts", "RankContext", "stage_error"]


@dataclass
class Counts:
    """What a rank has done in this epoch.

    Attributes:
        steps_applied: Steps prepared, and `digest` a checksum over them in order: equal on all ranks.
        steps_begun: Those with rows among them. steps_done: how many have left the rank.
        busy_s: Time the device was computing.
        sent_bytes: Tensor bytes sent on.
        heard, told: At rank 0, messages from the driver, and `Outputs` for it.
        chunk_s: Times of the device for micro-batches with prompt tokens.
        input_wait_s: How long a step that could be launched waited for its inputs (HIDDEN lane).
        credit_wait_s: How long an output waited for a free buffer (HIDDEN lane).
        result_wait_s: At rank 0, waits for a result while as many steps as may be were in flight (RESULTS lane).
    """

    steps_applied: int = 0
    digest: int = 0
    steps_begun: int = 0
    steps_done: int = 0
    steps_void: int = 0
    busy_s: float = 0.0
    sent_bytes: int = 0
    heard: int = 0
    told: int = 0
    chunk_s: Histogram = field(default_factory=lambda: Histogram(STEP_S))
    input_wait_s: Histogram = field(default_factory=lambda: Histogram(WAIT_S))
    credit_wait_s: Histogram = field(default_factory=lambda: Histogram(WAIT_S))
    result_wait_s: Histogram = field(default_factory=lambda: Histogram(WAIT_S))


@dataclass(frozen=True)
class Core:
    """The services that a rank's coroutines share, for one epoch."""

    config: RankConfig
    epoch: int
    stage: Stage
    device: Device
    clock: Clock
    links: Links
    tracer: Tracer
    deadlines: Deadlines
    counts: Counts = field(default_factory=Counts)

    def error_at(self, error: BaseException, step: Step) -> ErrorInfo:
        """An exception of this stage's code, with its place and traceback."""
        return stage_error(error, rank=self.config.rank, stage=self.stage.name, step=step.number)


def stage_error(error: BaseException, *, rank: int, stage: str, step: int | None = None) -> ErrorInfo:
    """What a stage's own code raised; of a class of its own only if that carries a place, or says who cancelled."""
    keeps = isinstance(error, RankError | RequestCancelled)
    return ErrorInfo(
        kind=type(error).__name__ if keeps else "StageError",
        message=error.reason
        if isinstance(error, RankError)
        else str(error)
        if keeps
        else f"{type(error).__name__}: {error}",
        rank=rank,
        stage=stage,
        step=step,
        traceback="".join(traceback.format_exception(error)),
    )


@dataclass(frozen=True)
class RankContext:
    """See `StageContext`."""

    rank: int
    size: int
    topology: Topology
    torch_device: torch.device
    links: Links | None = None
    process_group: Any = None

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """See `StageContext`."""
        if self.links is None or self.links.downstream is None:
            return torch.empty(tuple(shape), dtype=dtype, device=self.torch_device)
        return self.links.downstream.lease(tuple(shape), dtype)
