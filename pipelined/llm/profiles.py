"""What was measured before on this set-up: finds the profile, and refuses one of another set-up."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING

from pipelined.costs import Fingerprint, Profile, decode_profile, encode_costs
from pipelined.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipelined.llm.config import EngineConfig
    from pipelined.stage import ModelInfo

__all__ = ["fingerprint", "known_costs", "read_profile"]


def fingerprint(config: EngineConfig, info: ModelInfo, layers: Sequence[tuple[int, int]]) -> Fingerprint:
    """Of an engine with those layers [from, to) on its stages: whatever its times depend on."""
    on_cpu = config.device == "cpu"
    return Fingerprint(
        model=info.ref,
        digest=info.fingerprint,
        layers=tuple(end - start for start, end in layers),
        machine=_machine(config.device),
        dtype=info.dtype,
        threads=config.threads if on_cpu else 0,
    )


def read_profile(path: str | Path) -> Profile:
    """The profile in a file.

    Raises:
        ConfigError: There is no such file, or it is no sound profile; one line, with the place in the file.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"the profile {str(path)!r} cannot be read: {error.strerror}") from error
    return decode_profile(content, str(path))


def known_costs(config: EngineConfig, info: ModelInfo, layers: Sequence[tuple[int, int]]) -> str:
    """What is known of the stages at the start, as `encode_costs` writes it; "": nothing.

    Raises:
        ConfigError: The profile cannot be read, or is of another model, layout or machine; says what differs.
    """
    if config.profile is None:
        return config.stage_costs
    profile = read_profile(config.profile)
    profile.check(fingerprint(config, info, layers), config.profile)
    return encode_costs(profile.cost())


def _machine(device: str) -> str:
    kind, _, index = device.partition(":")
    if kind == "cuda":
        import torch

        return str(torch.cuda.get_device_name(int(index or 0)))
    if kind != "cpu":
        return kind
    return f"{_cpu_name()}, {len(os.sched_getaffinity(0))} cores"


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()
