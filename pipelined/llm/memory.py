"""What the ranks of a model need in memory, held against what there is before any of them loads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipelined.clock import off_loop
from pipelined.errors import CapacityError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipelined.pipeline import World
    from pipelined.stage import ModelInfo

__all__ = ["MemoryNeed", "available_bytes", "check_memory", "memory_need"]

PROCESS_BYTES = 330 << 20
"""Of a rank with its libraries, before it loads anything."""

_SMALL_BYTES = 256 << 20

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class MemoryNeed:
    """Of the ranks on one host.

    Attributes:
        weight_bytes: Of each stage.
        kv_bytes: Likewise: of as many tokens as were asked for, or of one page.
        process_bytes: Of each rank besides.
    """

    weight_bytes: tuple[int, ...]
    kv_bytes: tuple[int, ...]
    process_bytes: int

    @property
    def total_bytes(self) -> int:
        """Of all ranks together."""
        return sum(self.weight_bytes) + sum(self.kv_bytes) + self.process_bytes * len(self.weight_bytes)

    @property
    def small(self) -> bool:
        """Not worth looking at what there is."""
        return sum(self.weight_bytes) + sum(self.kv_bytes) < _SMALL_BYTES

    def check(self, free_bytes: int) -> None:
        """Refuse what cannot be.

        Raises:
            CapacityError: Says what each stage needs, and what there is.
        """
        if self.total_bytes <= free_bytes:
            return
        stages = "; ".join(
            f"stage {number}: weights {_mib(weights)}, KV cache {_mib(kv)}"
            for number, (weights, kv) in enumerate(zip(self.weight_bytes, self.kv_bytes, strict=True))
        )
        raise CapacityError(
            f"the model does not fit: {_mib(self.total_bytes)} are needed on this host ({stages}; {len(self.kv_bytes)} "
            f"processes of {_mib(self.process_bytes)}), {_mib(free_bytes)} are free; use a smaller dtype or model, ask "
            "for fewer tokens of KV cache, or free memory"
        )


def memory_need(info: ModelInfo, layers: Sequence[tuple[int, int]], *, processes: bool) -> MemoryNeed:
    """What these stages need at least."""
    tokens = info.options.kv_cache_tokens or info.options.page_size
    weights, kv = [], []
    for number, (first, end) in enumerate(layers):
        ends_bytes = (info.embedding_bytes if number == 0 else 0) + (
            info.head_bytes if number == len(layers) - 1 else 0
        )
        weights.append(sum(info.layer_bytes[first:end]) + ends_bytes)
        kv.append(tokens * sum(info.kv_bytes_per_token[first:end]))
    return MemoryNeed(tuple(weights), tuple(kv), PROCESS_BYTES if processes else 0)


async def check_memory(info: ModelInfo, layers: Sequence[tuple[int, int]], device: str, world: World) -> None:
    """Refuse a model that cannot fit into this host's memory, before anything loads it.

    Raises:
        CapacityError: Says what each stage needs, and what there is.
    """
    if device not in ("cpu", "stream") or info.family == "emulated":  # weights live elsewhere, or nowhere
        return
    if world.next_epoch:  # its ranks hold them already
        return
    need = memory_need(info, layers, processes=world.processes)
    if not need.small and (free_bytes := await off_loop(available_bytes)) is not None:
        need.check(free_bytes)


def available_bytes() -> int | None:
    """Memory that could be taken without swapping, within this process's limits; None where that can't be known."""
    found = []
    try:
        lines = _MEMINFO.read_text().splitlines()
        found += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    except OSError:
        return None
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
        cache = next(
            int(line.split()[1])
            for line in (_CGROUP / "memory.stat").read_text().splitlines()
            if line.startswith("inactive_file ")
        )
        found += [max(0, int(limit) - used + cache)] if limit != "max" else []
    except (OSError, ValueError, StopIteration):
        pass  # no limit that could be read
    return min(found, default=None)


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:,.0f} MiB"
