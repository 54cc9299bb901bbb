"""All stages of a model in a row, driven by steps as ranks would drive them, in one thread.

Payloads pass from stage to stage as over a link: split into frames, copied, joined. What a stage has received is
poisoned once its outputs have left, so that whoever keeps it computes something else.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self, cast

import torch

from pipelined.errors import PipelinedError
from pipelined.messages import ErrorInfo, TensorHeader
from pipelined.rank.payload import join, split
from pipelined.stage.poison import Snapshot, overlaps, poison, tensors_in
from pipelined.transport import Topology

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from pipelined.messages import Outcome, Step
    from pipelined.stage import ModelInfo, Payload, Stage, StageContext
    from pipelined.testing.stage_script import Planned
    from pipelined.transport import Received

__all__ = ["KitContext", "StageChain", "travelled"]


@dataclass(frozen=True)
class KitContext:
    """A `StageContext` of its own: plain memory, on the CPU."""

    rank: int
    size: int
    torch_device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    process_group: Any = None

    @property
    def topology(self) -> Topology:
        """One rank a stage."""
        return Topology(self.size)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """See `StageContext`. Holds junk, as memory that was used before."""
        made = torch.empty(tuple(shape), dtype=dtype)
        poison(made)
        return made


@dataclass(frozen=True)
class _Frame:
    header: TensorHeader
    tensor: torch.Tensor


def travelled(payload: Payload, *, step: int = 0, rows: int = 1) -> Payload:
    """The payload as it comes out of a link: other memory, builtins encoded and decoded.

    Raises:
        ConfigError: Something in it cannot travel.
    """
    frames = [_Frame(header, tensor.detach().clone()) for header, tensor in split(payload, step=step, rows=rows)]
    joined = join(cast("Sequence[Received]", frames))
    assert not isinstance(joined, ErrorInfo)
    return joined


class _Held:
    """What a stage gave for one step, as it was when the stage returned."""

    def __init__(self, outputs: Payload) -> None:
        self._outputs = [(name, Snapshot(value)) for name, value in outputs.items() if isinstance(value, torch.Tensor)]

    def changed(self) -> list[str]:
        return [name for name, snapshot in self._outputs if not snapshot.same()]


class StageChain:
    """The stages of a cut. A context manager: `teardown` is called on the way out.

    Attributes:
        edges: First layer of each stage, and the number of layers.
        stages: The stages.
        capacity: What they have agreed on, None if none of them is limited.
        complaints: What stages did to memory that is not theirs.
    """

    def __init__(
        self, info: ModelInfo, build: Callable[[ModelInfo, tuple[int, int], StageContext], Stage], edges: Sequence[int]
    ) -> None:
        self.edges = tuple(edges)
        size = len(edges) - 1
        self.contexts = [KitContext(rank, size) for rank in range(size)]
        self.stages = [build(info, (edges[rank], edges[rank + 1]), self.contexts[rank]) for rank in range(size)]
        self.capacity: int | None = None
        self.complaints: list[str] = []
        self._held: list[_Held | None] = [None] * size

    def __repr__(self) -> str:
        return f"<StageChain {self.edges}>"

    def __enter__(self) -> Self:
        """Set all stages up and agree on a capacity."""
        found = [stage.setup(context) for stage, context in zip(self.stages, self.contexts, strict=True)]
        limits = [capacity for capacity in found if capacity is not None]
        self.capacity = min(limits) if limits else None
        for stage in self.stages:
            stage.start(self.capacity)
        return self

    def __exit__(self, *_: object) -> None:
        """Tear all stages down."""
        for stage in self.stages:
            stage.teardown()

    def prepare(self, step: Step) -> list[Any]:
        """Every stage's batch."""
        return [stage.prepare(step) for stage in self.stages]

    def forward(
        self, planned: Planned, batches: Sequence[Any], tamper: Callable[[int, Planned, Payload], None] | None = None
    ) -> Sequence[Outcome]:
        """Run a step through all stages.

        Args:
            planned: The step.
            batches: From `prepare`.
            tamper: Called with the index of a stage, the step and what that stage is about to receive; may change it.

        Returns:
            What the last stage collects; nothing for a step without rows.
        """
        if not planned.step.rows:
            return ()
        payload: Payload = {}
        for index, (stage, batch) in enumerate(zip(self.stages, batches, strict=True)):
            if tamper is not None:
                tamper(index, planned, payload)
            payload = self._one(index, stage, batch, payload, planned.step)
        return self.stages[-1].collect(batches[-1], payload)

    def _one(self, index: int, stage: Stage, batch: Any, inputs: Payload, step: Step) -> Payload:
        before = [(name, Snapshot(value)) for name, value in inputs.items() if isinstance(value, torch.Tensor)]
        outputs = stage.forward(batch, inputs)
        where = f"stage {index} in step {step.number}"
        for name, snapshot in before:
            if not snapshot.same():
                self.complaints.append(f"{where} wrote to its input {name!r}")
        held = self._held[index]
        for name in held.changed() if held else ():
            self.complaints.append(f"{where} changed output {name!r} of a step before, which may still be leaving")
        try:
            sent = travelled(outputs, step=step.number, rows=step.rows)
        except PipelinedError as error:
            self.complaints.append(f"{where}: {error}")
            raise
        given = tensors_in(outputs)
        self._held[index] = _Held(outputs)
        for tensor in tensors_in(inputs):
            if not any(overlaps(tensor, other) for other in given):
                poison(tensor)
        return sent

    def run(
        self,
        steps: Iterable[Planned],
        judge: Callable[[Planned, Sequence[Outcome]], None],
        *,
        ahead: int = 0,
        void: frozenset[int] = frozenset(),
        tamper: Callable[[int, Planned, Payload], None] | None = None,
    ) -> None:
        """Run steps, each prepared `ahead` steps before it is launched; those numbered in `void` are prepared only."""
        ready: deque[tuple[Planned, list[Any]]] = deque()

        def launch() -> None:
            planned, batches = ready.popleft()
            if planned.step.number not in void:
                judge(planned, self.forward(planned, batches, tamper))

        for planned in steps:
            ready.append((planned, self.prepare(planned.step)))
            if len(ready) > ahead:
                launch()
        while ready:
            launch()

    def reset(self) -> None:
        """A new epoch."""
        self._held = [None] * len(self.stages)
        for stage in self.stages:
            stage.reset()

    def held(self) -> dict[str, int]:
        """What the stages say that they hold and that is not zero."""
        return {
            f"stage {index}: {what}": count
            for index, stage in enumerate(self.stages)
            for what, count in stage.integrity().items()
            if count
        }
