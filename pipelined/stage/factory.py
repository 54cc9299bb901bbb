"""From the name of a device to a device. Imports each kind only when it is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from pipelined.errors import ConfigError, UnknownSchemeError, nearest

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipelined.clock import Clock
    from pipelined.stage.device import Device

__all__ = ["DEVICES", "make_device"]

DEVICES: Final = ("cpu", "cuda", "emulated", "stream")
"""Kinds of devices. `cuda:1` names the second GPU."""


def make_device(
    kind: str,
    clock: Clock,
    *,
    threads: int | None = None,
    time_of: Callable[[Any], float] | None = None,
    name: str = "",
) -> Device:
    """A device for one rank.

    Args:
        kind: One of `DEVICES`, for a GPU also with its index.
        clock: The rank's.
        threads: Torch threads of a CPU; None: as torch is set. Ignored by others.
        time_of: Time model of the emulated kinds: seconds for a stage's `cost`. Ignored by others.
        name: For messages; the kind if empty.

    Raises:
        UnknownSchemeError: No such kind; names those that exist.
        ConfigError: An option is missing or out of range, or there is no such GPU.
    """
    base, _, index = kind.partition(":")
    if base not in DEVICES or (index and (base != "cuda" or not index.isdigit())):
        raise UnknownSchemeError(f"unknown device {kind!r}{nearest(kind, DEVICES)}")
    if base == "cpu":
        from pipelined.stage.cpu import CpuDevice

        return CpuDevice(clock, threads, name)
    if base == "cuda":
        from pipelined.stage.cuda import CudaDevice

        return CudaDevice(clock, int(index or 0), name)
    if base == "stream":
        from pipelined.stage.stream import StreamDevice

        return StreamDevice(clock, name=name, time_of=time_of)
    if time_of is None:
        raise ConfigError("an emulated device needs time_of, a function from a stage's cost to seconds")
    from pipelined.stage.emulated import EmulatedDevice

    return EmulatedDevice(clock, time_of, name)
