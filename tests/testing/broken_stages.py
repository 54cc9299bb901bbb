"""Toys that each break one rule of stages; `FloatToy` keeps them all and lets floating-point rows flow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch

from pipelined.messages import Admit, Release, Step
from pipelined.models.toy import ToyBatch, ToyFamily, ToyStage

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipelined.stage import Payload


def family(stage: Callable[..., ToyStage]) -> Any:
    """A family that builds `stage`."""

    class Family(ToyFamily):
        def build(self, info: Any, layers: tuple[int, int], ctx: Any) -> ToyStage:
            return stage(info, layers, ctx)

    return Family()


class FloatToy(ToyStage):
    """Exact in float64; a sequence with anything not finite in its rows fails, alone."""

    def forward(self, batch: ToyBatch, inputs: Payload) -> Payload:
        if self._first:
            hidden = inputs["hidden"]
            inputs = inputs | {"faults": list(inputs.get("faults", ())) + self.faults(batch, hidden)}
            inputs["hidden"] = torch.nan_to_num(hidden, posinf=0, neginf=0).to(torch.int64)
        outputs = super().forward(batch, inputs)
        if "hidden" in outputs:
            outputs["hidden"] = outputs["hidden"].to(torch.float64)
        return outputs

    def faults(self, batch: ToyBatch, hidden: torch.Tensor) -> list[Any]:
        found, row = [], 0
        for segment in batch.batch.segments:
            if not torch.isfinite(hidden[row : row + segment.length]).all():
                found.append([segment.seq, self._rank, "not finite"])
            row += segment.length
        return found


class DeafToNan(FloatToy):
    """Goes on with whatever came."""

    def faults(self, batch: ToyBatch, hidden: torch.Tensor) -> list[Any]:
        return []


class FailsAll(FloatToy):
    """Fails the whole batch for one."""

    def faults(self, batch: ToyBatch, hidden: torch.Tensor) -> list[Any]:
        bad = super().faults(batch, hidden)
        return [[segment.seq, self._rank, "not finite"] for segment in batch.batch.segments] if bad else []


class _Shifted(ToyStage):
    """Adds `shift(batch)` to what its layers read: any other number than 0 changes the tokens."""

    def shift(self, batch: ToyBatch) -> int:
        return 0

    def _layer(self, index: int, hidden: Any, segments: Any) -> Any:
        return super()._layer(index, hidden + self._shift, segments)

    def forward(self, batch: ToyBatch, inputs: Payload) -> Payload:
        self._shift = self.shift(batch)
        return super().forward(batch, inputs)


class CutMatters(_Shifted):
    """A stage that is not the first computes something else."""

    def shift(self, batch: ToyBatch) -> int:
        return int(self._first > 0 and self._first % 2)


class BatchMatters(_Shifted):
    """Rows depend on how many run beside them."""

    def shift(self, batch: ToyBatch) -> int:
        return len(batch.batch.segments) - 1


class ChunksMatter(_Shifted):
    """A chunk in the middle of a prompt is taken for something else."""

    def shift(self, batch: ToyBatch) -> int:
        return int(any(segment.start and segment.length > 1 for segment in batch.batch.segments))


class SharesState(_Shifted):
    """What it does depends on how many sequences it has seen released."""

    released = 0

    def prepare(self, step: Step) -> ToyBatch | None:
        self.released += sum(isinstance(item, Release) for item in step.items)
        return super().prepare(step)

    def shift(self, batch: ToyBatch) -> int:
        return self.released


class DirtyPages(ToyStage):
    """Adds to what a page holds instead of overwriting it."""

    def _layer(self, index: int, hidden: Any, segments: Any) -> Any:
        before = self._kv[index].copy()
        hidden = super()._layer(index, hidden, segments)
        self._kv[index] += np.where((before != self._kv[index]) & (before != -7), before, 0)
        return hidden


class MixesPrefix(ToyStage):
    """Takes the pages of a cached prefix in the wrong order, or one of them for another."""

    def prepare(self, step: Step) -> ToyBatch | None:
        items = tuple(
            msgspec.structs.replace(item, pages=tuple((page + 1) % self._pages for page in item.pages))
            if isinstance(item, Admit)
            else item
            for item in step.items
        )
        return super().prepare(msgspec.structs.replace(step, items=items))


class ForgetsGenerated(_Shifted):
    """A sequence admitted with generated tokens is taken for a longer prompt, which it computes differently."""

    def prepare(self, step: Step) -> ToyBatch | None:
        resumed = getattr(self, "_resumed", set())
        for item in step.items:
            if isinstance(item, Admit) and len(item.tokens) // 4 > item.prompt_tokens:
                resumed.add(item.seq)
        self._resumed = resumed
        return super().prepare(step)

    def shift(self, batch: ToyBatch) -> int:
        return int(any(segment.seq in self._resumed for segment in batch.batch.segments))


class ReadsLive(_Shifted):
    """`forward` looks at what `prepare` was told last."""

    def prepare(self, step: Step) -> ToyBatch | None:
        self._last = step.number
        return super().prepare(step)

    def shift(self, batch: ToyBatch) -> int:
        return self._last - batch.batch.number


class CountsForwards(_Shifted):
    """Keeps a number of its own in step with those prepared by counting calls of `forward`."""

    prepared = launched = 0

    def prepare(self, step: Step) -> ToyBatch | None:
        batch = super().prepare(step)
        if batch is not None:
            self._numbers = getattr(self, "_numbers", {}) | {step.number: self.prepared}
            self.prepared += 1
        return batch

    def shift(self, batch: ToyBatch) -> int:
        self.launched += 1
        return self._numbers[batch.batch.number] - self.launched + 1


class NeverForgets(ToyStage):
    """`reset` does nothing."""

    def reset(self) -> None:
        pass


class HoldsOn(ToyStage):
    """Counts a slot that is never given back."""

    admitted = 0

    def prepare(self, step: Step) -> ToyBatch | None:
        self.admitted += sum(isinstance(item, Admit) for item in step.items)
        return super().prepare(step)

    def integrity(self) -> dict[str, int]:
        return super().integrity() | {"slots": self.admitted}


class WritesInput(ToyStage):
    """Computes in the memory of the transport."""

    def forward(self, batch: ToyBatch, inputs: Payload) -> Payload:
        outputs = super().forward(batch, inputs)
        if "hidden" in inputs:
            inputs["hidden"].zero_()
        return outputs


class OneBuffer(ToyStage):
    """Writes every output to the same memory."""

    def forward(self, batch: ToyBatch, inputs: Payload) -> Payload:
        outputs = super().forward(batch, inputs)
        if "hidden" in outputs:
            if not hasattr(self, "_buffer"):
                self._buffer = torch.empty(4096, outputs["hidden"].shape[1], dtype=torch.int64)
            view = self._buffer[: len(outputs["hidden"])]
            view.copy_(outputs["hidden"])
            outputs["hidden"] = view
        return outputs


class CannotTravel(ToyStage):
    """Gives an object of its own along."""

    def forward(self, batch: ToyBatch, inputs: Payload) -> Payload:
        return super().forward(batch, inputs) | {"it": object()}


class Raises(ToyStage):
    """Cannot be set up."""

    def setup(self, ctx: Any) -> int | None:
        raise FileNotFoundError("weights.bin")


class Hangs(ToyStage):
    """Never comes back."""

    def forward(self, batch: ToyBatch, inputs: Payload) -> Payload:
        import threading

        threading.Event().wait(30)
        return super().forward(batch, inputs)
