"""Devices that are described, or measured for a moment, and what a layer costs on them: where there is no profile."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from pipelined.clock import MonotonicClock
from pipelined.costs import StageCost, Window
from pipelined.errors import ConfigError, nearest
from pipelined.planning.plan_units import bytes_text, parse_bytes, parse_flops, parse_rate

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipelined.stage import ModelInfo

__all__ = [
    "ELEMENT_BYTES",
    "HARDWARE",
    "LAUNCH_S",
    "Hardware",
    "estimated_head",
    "estimated_layers",
    "measure_here",
    "parse_hardware",
]

ELEMENT_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2, "int64": 8}

LAUNCH_S: Final = 5e-3
_OF_PEAK: Final = 0.6
_OF_MATMUL: Final = 0.85
_MEASURE_S: Final = 0.15


@dataclass(frozen=True)
class Hardware:
    """One device.

    Attributes:
        name: What to call it.
        flops: Operations a second of matrix multiplications, at most. efficiency: the share of them that layers reach.
        bytes_per_s: Of its memory.
        memory_bytes: How much there is; 0: not known.
        launch_s: What starting a micro-batch takes, whatever is in it.
        measured: On this machine, just now.
    """

    name: str
    flops: float
    bytes_per_s: float
    memory_bytes: float = 0.0
    efficiency: float = _OF_PEAK
    launch_s: float = LAUNCH_S
    measured: bool = False

    @property
    def text(self) -> str:
        """For people."""
        rate = f"{self.flops / 1e12:.3g} TFLOPS" if self.flops >= 1e12 else f"{self.flops / 1e9:.3g} GFLOPS"
        how = "measured now" if self.measured else "as described"
        return (
            f"{self.name} ({rate} and {bytes_text(self.bytes_per_s)}/s {how}; layers reach {self.efficiency:.0%} of "
            f"the operations, a launch takes {1e3 * self.launch_s:g} ms)"
        )


def _known(name: str, teraflops: float, gbytes_per_s: float, gbytes: float) -> Hardware:
    return Hardware(name, teraflops * 1e12, gbytes_per_s * 1e9, gbytes * 1e9)


HARDWARE: Final = {
    one.name: one
    for one in (
        _known("a100", 312, 2039, 80),
        _known("b200", 2250, 8000, 180),
        _known("h20", 148, 4000, 96),
        _known("h100", 989, 3350, 80),
        _known("h200", 989, 4800, 141),
        _known("l40s", 362, 864, 48),
        _known("mi300x", 1307, 5300, 192),
        _known("mi355x", 2517, 8000, 288),
    )
}
"""By name: dense operations a second on 16-bit floats, and memory, by their makers' data sheets."""


def parse_hardware(text: str, efficiency: float | None = None) -> Hardware:
    """A device by its name, or as `148TFLOPS,4TB/s` with an optional memory: `148TFLOPS,4TB/s,96GB`.

    Raises:
        ConfigError: There is none of that name, or a part is missing.
    """
    if not text.strip()[:1].isdigit():
        found = HARDWARE.get(text.strip().lower())
        if found is None:
            raise ConfigError(f"unknown hardware {text!r}{nearest(text, (*HARDWARE, 'here'))}; or 148TFLOPS,4TB/s,96GB")
    else:
        parts = [part.strip() for part in text.split(",")]
        flops = [parse_flops(part) for part in parts if part.lower().endswith("flops")]
        rates = [parse_rate(part) for part in parts if "/" in part]
        sizes = [parse_bytes(part) for part in parts if "/" not in part and not part.lower().endswith("flops")]
        if len(flops) != 1 or len(rates) != 1 or len(sizes) > 1:
            raise ConfigError(f"hardware {text!r}: expected operations and bandwidth, such as 148TFLOPS,4TB/s,96GB")
        found = Hardware("a device", flops[0], rates[0], sizes[0] if sizes else 0.0)
    return found if efficiency is None else replace(found, efficiency=efficiency)


def measure_here(devices: int, dtype: str = "float32", efficiency: float | None = None) -> Hardware:
    """This machine's share for each of so many devices: a moment of matrix multiplication and of copying."""
    import torch

    cores = len(os.sched_getaffinity(0))
    threads, before = max(1, cores // devices), torch.get_num_threads()
    kind = getattr(torch, dtype, torch.float32)
    torch.set_num_threads(threads)
    try:
        left, right = (torch.ones(768, 768, dtype=kind if kind.is_floating_point else torch.float32) for _ in range(2))
        rounds, seconds = _timed(lambda: torch.mm(left, right))
        flops = rounds * 2 * 768**3 / seconds
        source = torch.ones(1 << 24)
        target = torch.empty_like(source)
        rounds, seconds = _timed(lambda: target.copy_(source))
        bandwidth = rounds * 2 * source.nbytes / seconds
    finally:
        torch.set_num_threads(before)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / devices
    share = _OF_MATMUL if efficiency is None else efficiency
    name = f"{threads} thread{'s' * (threads > 1)} of this machine"
    return Hardware(name, flops, bandwidth, memory, share, launch_s=1e-3, measured=True)


def _timed(work: Callable[[], object]) -> tuple[int, float]:
    """(how often, seconds), after a first time that does not count."""
    work()
    clock, rounds = MonotonicClock(), 0
    started_s = clock.now()
    while (seconds := clock.now() - started_s) < _MEASURE_S or not rounds:
        work()
        rounds += 1
    return rounds, seconds


def estimated_layers(info: ModelInfo, hardware: Hardware) -> tuple[StageCost, ...]:
    """What each layer costs on one device: multiplications with its weights and of attention, and reading both."""
    element = ELEMENT_BYTES.get(info.dtype, 2)
    rate = hardware.flops * hardware.efficiency
    a = 2 * (info.attention_width or info.hidden_size) / rate
    costs = []
    for layer, weights in enumerate(info.layer_bytes):
        used = info.active_bytes[layer] if info.active_bytes else weights
        token_s, look_s = 2 * used / element / rate, info.kv_bytes_per_token[layer] / hardware.bytes_per_s
        window = info.windows[layer] if info.windows else 0
        cost = StageCost(a, token_s, weights / hardware.bytes_per_s, look_s, per_decode=token_s, per_context=look_s)
        if window:
            cost = replace(cost, a=0.0, d=0.0, windows=(Window(window, a, look_s),), per_context=0.0)
        costs.append(cost)
    return tuple(costs)


def estimated_head(info: ModelInfo, hardware: Hardware) -> StageCost:
    """What the last stage has besides: the output head, for one token of each sequence."""
    element = ELEMENT_BYTES.get(info.dtype, 2)
    token_s = 2 * info.head_bytes / element / (hardware.flops * hardware.efficiency)
    return StageCost(0.0, 0.0, info.head_bytes / hardware.bytes_per_s, per_decode=token_s, per_context=0.0)
