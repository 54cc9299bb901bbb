"""Ways to spread a model over devices: pipeline, tensor and context parallelism. Pure."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Layout", "layouts"]


class Layout(NamedTuple):
    """Stages, ranks that share a stage's weights, and ranks that share a sequence."""

    pp: int
    tp: int = 1
    cp: int = 1

    @property
    def devices(self) -> int:
        """How many it takes."""
        return self.pp * self.tp * self.cp

    @property
    def runnable(self) -> bool:
        """Whether the runtime can run it: pipelines are run, the others are predicted only."""
        return self.tp == self.cp == 1

    def __str__(self) -> str:
        """As `PP4 TP2`."""
        shown = [("PP", self.pp), ("TP", self.tp), ("CP", self.cp)]
        return " ".join(f"{name}{size}" for name, size in shown if size > 1) or "one device"


def layouts(devices: int) -> list[Layout]:
    """Those that use all of the devices, and pipelines of fewer; the longest pipelines first."""
    sizes = [size for size in range(devices, 0, -1) if devices % size == 0]
    full = [Layout(pp, tp, devices // pp // tp) for pp in sizes for tp in sizes if devices % (pp * tp) == 0]
    return full + [Layout(pp) for pp in sizes if pp < devices]
